"""
kernels.py without a GPU: run by Triton's interpreter and compared with model.py, and compiled for an H100.
tests/test_gpu.py tests the kernels on a GPU.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('triton', reason='needs the package triton')

import triton
from conftest import REPO

from hashing import signature_table
from mhf import head, kernels
from mhf.head import value_and_gradient
from test_mhf import PlainMHF, distance, needs_interpreter, vocabulary

# the interpreter warns about a block of 64 unused ids
pytestmark = [needs_interpreter, pytest.mark.filterwarnings('ignore:divide by zero encountered in log')]


def make_vocabulary(H, B, V, unused_ids=(), unique=True):
    return vocabulary(signature_table([f'word {i}' for i in range(V)], H, B, unique=unique), B, unused_ids)


def random_logits(m, n, dtype):
    """n random bucket logits, H of (n, B); the same in each run."""
    torch.manual_seed(0)
    return [torch.randn(n, m.config.num_buckets).to(dtype) for _ in range(m.config.num_hashes)]


# a few ids, and complete blocks of 64 ids
GAPS = dict(unused_ids=[5, *range(60, 210)])
VOCABULARIES = {
    'one hash': dict(H=1, B=400, V=300),
    'long lists': dict(H=4, B=12, V=150),
    'unused ids': dict(H=2, B=70, V=400, **GAPS),
    'single ID': dict(H=4, B=60, V=200, unique=False),
}


CASES = [(name, 1, torch.float64, 1e-14) for name in VOCABULARIES]
CASES += [('long lists', 70, torch.float32, 1e-6), ('unused ids', 70, torch.bfloat16, 5e-3)]


@pytest.mark.parametrize('name, n, dtype, tolerance', CASES)
def test_kernels_equal_the_plain_sums(name, n, dtype, tolerance, monkeypatch):
    """
    -log P and its gradient equal model.py's. Sums are float32 or better, also over bfloat16 logits. The
    gradient of a bucket without tokens is 0.
    """
    m = make_vocabulary(**VOCABULARIES[name])
    o = random_logits(m, n, dtype)
    y = m.signatures[m.token_mask][:n]
    y = y[torch.arange(n) % len(y)]
    plain_loss = functools.partial(PlainMHF.negative_log_likelihood, m)
    expected, *plain = value_and_gradient(plain_loss, [o_i.double() for o_i in o], y)
    monkeypatch.setattr(head, 'has_kernels', lambda device: True)
    loss, *gradient = value_and_gradient(m.negative_log_likelihood, o, y)
    assert (loss - expected).abs().max() < 20 * min(tolerance, 1e-6)
    for g, plain_g in zip(gradient, plain, strict=True):
        assert distance(g, plain_g) < tolerance
        assert (g[plain_g == 0] == 0).all()
    with torch.no_grad():
        assert torch.equal(m.negative_log_likelihood(o, y), loss)


def test_a_large_vocabulary():
    """The kernels work with a vocabulary of 131,072 and the paper's B."""
    table = torch.randint(1, 16384, (131072, 2), generator=torch.Generator().manual_seed(0)).numpy()
    m = vocabulary(table, 16384)
    o = random_logits(m, 1, torch.float64)
    expected, *plain = value_and_gradient(lambda o, _: m.token_logits(o).logsumexp(dim=1), o, None)
    # fewer and larger programs than on a GPU, because the interpreter's run time depends on their count
    sizes = kernels.Sizes(positions=32, tokens=8192, buckets=4096)
    normalizer, gradient = kernels.log_normalizer(o, m.index, True, sizes)
    assert torch.allclose(normalizer, expected, rtol=1e-13)
    assert all(distance(g, plain_g) < 1e-13 for g, plain_g in zip(gradient, plain, strict=True))


# -----------------------------------------------------------------------------
# compilation without a GPU

# the parts of a GPU driver that compilation needs
H100 = SimpleNamespace(
    get_current_target=lambda: triton.backends.compiler.GPUTarget('cuda', 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
)


class CompileOnly:
    """Replaces a kernel: a launch compiles it and checks the result."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: check_compiled(self.kernel.warmup(*args, grid=grid, **options))


def check_compiled(compiled):
    """Prints a kernel's registers. Raises AssertionError if it spills registers or uses 32-bit offsets."""
    # tensors that grow with the positions of a chunk are addressed by two-dimensional pointers
    offsets = re.findall(r'tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>', compiled.asm['ttir'])
    assert offsets and set(offsets) == {'i64'}, (compiled.metadata.name, offsets)
    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        used = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf'{name}:(\d+)', used)[1]) for name in ('REG', 'STACK', 'LOCAL'))
    assert stack == local == 0, (compiled.metadata.name, used)
    print(f'{compiled.metadata.name}: {registers} registers, {compiled.metadata.shared} bytes of shared memory')


def compile_kernels():
    """Compiles the kernels. Needs TRITON_INTERPRET=0."""
    triton.runtime.driver.set_active(H100)
    for name in ('transpose_kernel', 'logsumexp_kernel', 'backward_kernel'):
        setattr(kernels, name, CompileOnly(getattr(kernels, name)))
    # Triton specializes kernels for integers that are 1 or multiples of 16
    cases = [(torch.bfloat16, 4, 256, 64, True), (torch.bfloat16, 3, 263, 1, False), (torch.float64, 1, 263, 77, True)]
    for dtype, H, B, n, gradient in cases:
        index = vocabulary(torch.randint(1, B, (1000, H)).numpy(), B).index
        kernels.log_normalizer([torch.zeros(n, B, dtype=dtype) for _ in range(H)], index, gradient)


def test_compiles_for_an_h100(tmp_path):
    """
    The kernels compile for a GPU without spilling registers, and use 64-bit offsets: 32-bit ones end at 2^31 bucket
    logits, 32,768 positions of H4B16K.
    """
    code = 'import test_kernels; test_kernels.compile_kernels()'
    path = os.pathsep.join([str(REPO), str(REPO / 'tests')])
    environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0', PYTHONPATH=path)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    # three kernels with a gradient, two without
    assert len(done.stdout.splitlines()) == 3 + 2 + 3
