"""
Compiles the kernels of kernels.py for an H100 (sm_90) on a machine without a GPU. This finds errors that Triton's
interpreter cannot: wrong types, spilled registers, 32-bit offsets.

    $ python -m tests.compile_kernels                           # three precisions, H from 1 to 4, odd widths
    $ python -m tests.compile_kernels --sizes=64,32,8,4,4,1     # other kernels.Sizes
    $ python -m tests.compile_kernels --quick                   # the selection for the tests
"""

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ['TRITON_INTERPRET'] = '0'

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mhf import kernels

TOOLS = Path(triton.__file__).parent / 'backends/nvidia/bin'


class H100:
    """The parts of a GPU driver that compilation needs."""

    @staticmethod
    def get_current_target():
        return GPUTarget('cuda', 90, 32)

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(device=None):
        return 0


class Compiles:
    """Replaces a kernel: a launch compiles it and records the result."""

    def __init__(self, kernel, compiled):
        self.kernel = kernel
        self.compiled = compiled

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.compiled.append((options, self.kernel.warmup(*args, grid=grid, **options)))

        return launch


def check(compiled, options):
    """Describes a kernel in one line. Raises AssertionError if it spills registers or uses 32-bit offsets."""
    # tensors that grow with the positions of a chunk are addressed by matrices of pointers
    offsets = re.findall(r'tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>', compiled.asm['ttir'])
    assert offsets and set(offsets) == {'i64'}, (compiled.metadata.name, offsets)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        command = [TOOLS / 'cuobjdump', '-res-usage', file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf'{name}:(\d+)', used)[1]) for name in ('REG', 'STACK', 'LOCAL'))
    assert stack == local == 0, (compiled.metadata.name, used)
    warps = options['num_warps']
    shared = compiled.metadata.shared
    # of 65,536 registers, given in 256 to a warp, 227 KiB of shared memory, 64 warps and 32 programs
    fitting = min(65536 // (-(-registers * 32 // 256) * 256) // warps, 227 * 1024 // (shared + 1024), 64 // warps, 32)
    busy = f'{fitting * warps} of 64 warps of a multiprocessor busy'
    return f'{compiled.metadata.name:<18}{registers:>4} registers, {shared:>6} bytes shared, {busy}'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--sizes', default=','.join(map(str, kernels.SIZES)))
    args = parser.parse_args()
    sizes = kernels.Sizes(*map(int, args.sizes.split(',')))
    driver.set_active(H100())
    compiled = []
    for name in ('transpose_kernel', 'logsumexp_kernel', 'backward_kernel'):
        setattr(kernels, name, Compiles(getattr(kernels, name), compiled))
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
            for options, kernel in compiled:
                name = 'gradient' if gradient else 'log P'
                print(f'{str(dtype)[6:]:<9} H={H} B={B} n={n:<3} {name:<9}', check(kernel, options), flush=True)


if __name__ == '__main__':
    main()
