"""
kernels.py without a GPU: run by Triton's interpreter and compared with plain torch, and compiled for an H100.
tests/test_gpu.py tests the kernels on a GPU.
"""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip('triton', reason='needs the package triton')

import triton
from conftest import REPO
from packaging.version import Version

from hashing import signature_table
from mhf import head, kernels
from test_mhf import distance, plain_token_logits

# range() of a tensor: only 0-dimensional arrays can be converted to Python scalars
no_interpreter = Version(triton.__version__) < Version('3.7') and Version(np.__version__) >= Version('2.4')
pytestmark = pytest.mark.skipif(no_interpreter, reason="Triton's interpreter before 3.7 fails with NumPy 2.4")


def make_index(table, B):
    """Returns rows, ids and offsets of a table (V, H), as in model.MHF.set_vocabulary."""
    V, H = table.shape
    rows = table + B * np.arange(H)
    return [torch.tensor(array, dtype=torch.int32) for array in (rows, *head.invert(rows, H * B))]


TABLES = {'one hash': (1, 400, 300), 'long lists': (4, 12, 150), 'two blocks of tokens': (2, 70, 400)}
CASES = [(name, 1, torch.float64, 1e-14) for name in TABLES]
CASES += [('long lists', 70, torch.float32, 1e-6), ('two blocks of tokens', 70, torch.bfloat16, 5e-3)]


@pytest.mark.parametrize('use_kernels', [True, False])
@pytest.mark.parametrize('name, n, dtype, tolerance', CASES)
def test_token_logits_and_their_adjoint(name, n, dtype, tolerance, use_kernels, monkeypatch):
    """
    Token logits and gradients equal those of plain torch, by kernels and by columns. Sums are float32 or better, also
    over bfloat16 logits. The gradient of a bucket without tokens is 0.
    """
    H, B, V = TABLES[name]
    table = signature_table([f'word {i}' for i in range(V)], H, B).astype(np.int64)
    table[3:7] = 0  # unused ids
    index = make_index(table, B)
    torch.manual_seed(0)
    o = [torch.randn(n, B).to(dtype).requires_grad_() for _ in range(H)]
    wide = [o_i.detach().double().requires_grad_() for o_i in o]
    monkeypatch.setattr(head, 'has_kernels', lambda device: use_kernels)
    logits = head.token_logits(o, *index)
    expected = plain_token_logits(wide, *index)
    assert logits.dtype == torch.promote_types(dtype, torch.float32) and distance(logits, expected) < 1e-6
    weights = torch.randn(n, V, dtype=torch.float64)
    gradients = torch.autograd.grad(logits, o, weights.to(logits.dtype))
    for g, plain_g in zip(gradients, torch.autograd.grad(expected, wide, weights), strict=True):
        assert g.dtype == dtype and distance(g, plain_g) < tolerance and (g[plain_g == 0] == 0).all()


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
    """Prints a kernel's name. Raises AssertionError if it uses 32-bit offsets."""
    # tensors that grow with the positions of a chunk are addressed by two-dimensional pointers
    offsets = re.findall(r'tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>', compiled.asm['ttir'])
    assert offsets and set(offsets) == {'i64'} and compiled.asm['cubin'], (compiled.metadata.name, offsets)
    print(compiled.metadata.name)


def compile_kernels():
    """Compiles the kernels. Needs TRITON_INTERPRET=0."""
    triton.runtime.driver.set_active(H100)
    for name in ('transpose_kernel', 'sum_kernel', 'adjoint_kernel'):
        setattr(kernels, name, CompileOnly(getattr(kernels, name)))
    # Triton specializes kernels for integers that are 1 or multiples of 16
    for dtype, H, B, n in ((torch.bfloat16, 4, 256, 64), (torch.bfloat16, 3, 263, 1), (torch.float64, 1, 263, 77)):
        rows, ids, offsets = make_index(np.ones((1000, H), np.int64), B)
        logits = kernels.token_logits([torch.zeros(n, B, dtype=dtype) for _ in range(H)], rows)
        kernels.bucket_gradients(logits, ids, offsets, H, dtype)


def test_compiles_for_an_h100(tmp_path):
    """
    The kernels compile for a GPU and use 64-bit offsets: 32-bit ones end at 2^31 bucket logits, 32,768 positions of
    H4B16K.
    """
    code = 'import test_kernels; test_kernels.compile_kernels()'
    path = os.pathsep.join([str(REPO), str(REPO / 'tests')])
    environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0', PYTHONPATH=path)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 3 * 4  # two kernels forward, two backward
