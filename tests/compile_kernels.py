"""
Compiles the kernels of kernels.py for an H100 (sm_90) without a GPU. This finds errors that Triton's interpreter cannot
find: wrong types, spilled registers, 32-bit offsets.

    $ python -m tests.compile_kernels                           # three precisions, H from 1 to 4, odd and even widths
    $ python -m tests.compile_kernels --sizes=64,32,8,4,4,1     # other kernels.Sizes
    $ python -m tests.compile_kernels --quick                   # three cases, for test_kernels.py
"""

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ['TRITON_INTERPRET'] = '0'

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mhf import kernels

TOOLS = Path(triton.__file__).parent / 'backends/nvidia/bin'
# the parts of a GPU driver that compilation needs
H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget('cuda', 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
)


class CompileOnly:
    """Replaces a kernel: a launch compiles it and appends the result to `compiled`."""

    def __init__(self, kernel, compiled):
        self.kernel = kernel
        self.compiled = compiled

    def __getitem__(self, grid):
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def check(compiled):
    """Describes a kernel in one line. Raises AssertionError if it spills registers or uses 32-bit offsets."""
    # tensors that grow with the positions of a chunk are addressed by two-dimensional pointers
    offsets = re.findall(r'tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>', compiled.asm['ttir'])
    assert offsets and set(offsets) == {'i64'}, (compiled.metadata.name, offsets)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        command = [TOOLS / 'cuobjdump', '-res-usage', file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf'{name}:(\d+)', used)[1]) for name in ('REG', 'STACK', 'LOCAL'))
    assert stack == local == 0, (compiled.metadata.name, used)
    return f'{compiled.metadata.name:<18}{registers:>4} registers, {compiled.metadata.shared:>6} bytes of shared memory'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--sizes', default=','.join(map(str, kernels.SIZES)))
    args = parser.parse_args()
    sizes = kernels.Sizes(*map(int, args.sizes.split(',')))
    driver.set_active(H100)
    compiled = []
    for name in ('transpose_kernel', 'logsumexp_kernel', 'backward_kernel'):
        setattr(kernels, name, CompileOnly(getattr(kernels, name), compiled))
    # Triton specializes kernels for integers that are 1 or multiples of 16
    runs = list(itertools.product((torch.bfloat16, torch.float32, torch.float64), (1, 2, 3, 4), (256, 263), (64, 77)))
    if args.quick:
        runs = [(torch.bfloat16, 4, 256, 64), (torch.bfloat16, 3, 263, 1), (torch.float64, 1, 263, 77)]
    for dtype, H, B, n in runs:
        o = [torch.zeros(n, B, dtype=dtype) for _ in range(H)]
        y = torch.zeros(n, H, dtype=torch.int64)
        rows = torch.zeros(1000, H, dtype=torch.int32)
        token_mask = torch.ones(1000, dtype=torch.bool)
        inverse = [torch.zeros(1000 * H, dtype=torch.int32), torch.zeros(H * B + 1, dtype=torch.int32)]
        for gradient in (inverse, []):
            compiled.clear()
            kernels.sum_over_vocabulary(o, y, rows, token_mask, gradient, sizes)
            for kernel in compiled:
                name = 'gradient' if gradient else 'log P'
                print(f'{str(dtype)[6:]:<9} H={H} B={B} n={n:<3} {name:<9}', check(kernel), flush=True)


if __name__ == '__main__':
    main()
