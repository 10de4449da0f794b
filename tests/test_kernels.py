"""
kernels.py without a GPU: run by Triton's interpreter and compared with the plain loss, and compiled for an H100.
test_mhf.py tests the kernels inside the fused head; tests/test_gpu.py tests them on a GPU.
"""

import os
import subprocess
import sys
import sysconfig

import pytest
import torch

pytest.importorskip('triton', reason='needs the package triton')

from conftest import REPO

from hashing import signature_table
from mhf import chunked as fused
from mhf import kernels
from mhf.chunked import ChunkSizes
from mhf.runtime import no_triton
from model import exact_loss
from study.kernels import CHANGES, KERNELS, measure, random_inputs, signature_index

ON_CPU = ChunkSizes(chunk=512, block=64, columns=32)
# the interpreter warns about a block of 64 unused ids
pytestmark = pytest.mark.filterwarnings('ignore:divide by zero encountered in log')


def make_index(H, B, V, num_lsh=0, unused_ids=(), unique=True):
    """Returns the SignatureIndex of V tokens."""
    table = signature_table([f'word {i}' for i in range(V)], H, B, num_lsh, unique=unique)
    return signature_index(table, B, unused_ids)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# a few ids, and complete blocks of 64 ids
GAPS = dict(unused_ids=[5, *range(60, 210)])
VOCABULARIES = {
    'one coordinate': dict(H=1, B=400, V=300),
    'more buckets than tokens': dict(H=3, B=250, V=200),
    'long lists': dict(H=4, B=24, V=500),
    'unused ids': dict(H=2, B=70, V=400, **GAPS),
    'single ID': dict(H=4, B=60, V=200, unique=False),
    'LSH': dict(H=3, B=60, V=200, num_lsh=2),
}


@pytest.mark.parametrize('n, dtype, tolerance', [(1, torch.float32, 1e-6), (70, torch.float64, 1e-14)])
@pytest.mark.parametrize('name', VOCABULARIES)
def test_kernels_equal_the_plain_loss(name, n, dtype, tolerance):
    """Loss and gradient equal the plain ones and repeat to the bit; the gradient of buckets without tokens is 0."""
    index = make_index(**VOCABULARIES[name])
    o, y = random_inputs(index, n, dtype)
    plain = [o_i.double().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, index.signatures, index.token_mask)
    expected.sum().backward()

    unchanged = [o_i.clone() for o_i in o]
    assert torch.equal(fused.exact_nll(o, y, index, KERNELS), fused.exact_nll(unchanged, y, index, KERNELS))
    assert all(map(torch.equal, o, unchanged))
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    assert nll.dtype == dtype and (nll - expected).abs().max() < 20 * tolerance
    for gradient, plain_o in zip(o, plain, strict=True):
        assert relative(gradient, plain_o.grad) < tolerance
        assert (gradient[plain_o.grad == 0] == 0).all()

    again = fused.exact_nll(unchanged, y, index, KERNELS, gradient=True)
    assert torch.equal(nll, again) and all(map(torch.equal, o, unchanged))


@pytest.mark.parametrize('name', ['long lists', 'unused ids'])
def test_kernels_in_bfloat16(name):
    """
    Sums over bfloat16 logits are float32, and the target's -1 is not lost in rounding. Triton's interpreter truncates
    float32 to bfloat16, where a GPU rounds to nearest, so the gradient equals the truncated float32 gradient.
    """
    index = make_index(**VOCABULARIES[name])
    o, y = random_inputs(index, 70, torch.bfloat16)
    in_columns = [o_i.clone() for o_i in o]
    in_float32 = [o_i.float() for o_i in o]
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    assert torch.equal(nll, fused.exact_nll(in_float32, y, index, KERNELS, gradient=True))
    assert torch.allclose(nll, fused.exact_nll(in_columns, y, index, ON_CPU, gradient=True), rtol=1e-6)
    for g, g_float32, g_columns in zip(o, in_float32, in_columns, strict=True):
        truncated = (g_float32.view(torch.int32) & -(2**16)).view(torch.float32)
        assert torch.equal(g.float(), truncated)
        # rounded to nearest, as on a GPU, the float32 gradient is as exact as that of the columns
        assert relative(g_float32.bfloat16(), g_columns.double()) < 2e-3


def test_a_large_vocabulary():
    """The kernels work with 131,072 tokens and the paper's H and B."""
    table = torch.randint(1, 16384, (131072, 4), generator=torch.Generator().manual_seed(0)).numpy()
    index = signature_index(table, 16384)
    o, y = random_inputs(index, 3, torch.float64)
    plain = [o_i.clone().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, index.signatures, index.token_mask)
    expected.sum().backward()
    # fewer and larger programs than on a GPU, because the interpreter's run time depends on their count
    sizes = kernels.Sizes(positions=32, tokens=8192, buckets=4096)
    inverse = [index.ids, index.offsets]
    target, logsumexp = kernels.sum_over_vocabulary(o, y, index.rows, index.token_mask, inverse, sizes)
    assert torch.allclose(logsumexp - target, expected, rtol=1e-13)
    assert all(relative(g, plain_o.grad) < 1e-13 for g, plain_o in zip(o, plain, strict=True))


def test_compiles_for_an_h100(tmp_path):
    """
    The kernels compile for a GPU without spilling registers, and use 64-bit offsets: 32-bit ones end at 2^31 bucket
    logits, 32,768 positions of H4B16K.
    """
    command = [sys.executable, '-m', 'tests.compile_kernels', '--quick']
    environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0')
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    # three cases of five kernels: three with a gradient, two without
    assert len(done.stdout.splitlines()) == 15


BROKEN = [
    (lambda patch: patch.setitem(sys.modules, 'triton', None), 'no package triton'),
    (lambda patch: patch.setenv('PATH', ''), 'no C compiler: install gcc or clang'),
    (lambda patch: patch.setenv('CC', 'nothing-like-gcc'), 'no C compiler: install gcc or clang'),
    (lambda patch: patch.setattr(sysconfig, 'get_path', lambda *_: '/nowhere'), 'no Python.h in /nowhere'),
]


@pytest.mark.parametrize('change, reason', BROKEN)
def test_no_triton(monkeypatch, change, reason):
    """no_triton() names what Triton lacks."""
    monkeypatch.delenv('CC', raising=False)
    change(monkeypatch)
    assert no_triton.__wrapped__().startswith(reason)


def test_the_kernels_are_timed(capsys):
    """study/kernels.py times both forms and every change of sizes."""
    index = make_index(1, 50, 40)

    def measure_ms(call):
        call()
        return 1.0

    measure(*random_inputs(index, 3, torch.float32), index, measure_ms)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 + sum(map(len, CHANGES.values())) and all(line.endswith(('ms', ':')) for line in lines)
