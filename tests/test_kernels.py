"""
kernels.py without a GPU: in Triton's interpreter against the plain loss in float64, and compiled for an H100.
test_mhf.py tests the kernels inside the fused head, tests/test_gpu.py on a GPU.
"""

import itertools
import os
import subprocess
import sys
import sysconfig
import types

import pytest
import torch

pytest.importorskip('triton', reason='needs the package triton')

from conftest import REPO

from hashing import signature_table
from mhf import fused, kernels
from mhf.fused import ChunkSizes
from mhf.runtime import no_triton
from model import exact_loss
from study import kernels as study_kernels
from study.kernels import COLUMNS, KERNELS, build_index

ON_CPU = ChunkSizes(chunk=512, block=64, columns=32)
# the interpreter, for a block of 64 unused ids
pytestmark = pytest.mark.filterwarnings('ignore:divide by zero encountered in log')


def vocabulary(H, B, V, num_lsh=0, unused_ids=(), unique=True):
    """Returns the used ids (tokens,) and the SignatureIndex of V tokens."""
    strings = [f'word {i}' for i in range(V)]
    signatures = torch.tensor(signature_table(strings, H, B, num_lsh, unique=unique).astype(int))
    token_mask = torch.ones(V, dtype=torch.bool)
    token_mask[list(unused_ids)] = False
    return token_mask.nonzero()[:, 0], build_index(signatures, token_mask, B)


def logits_and_targets(tokens, index, n, dtype):
    """Returns random bucket logits, H of (n, B), and n token ids."""
    torch.manual_seed(0)
    H = index.signatures.shape[1]
    B = (len(index.offsets) - 1) // H
    return [torch.randn(n, B).to(dtype) for _ in range(H)], tokens[torch.randint(len(tokens), (n,))]


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# a few ids, and complete blocks of 64 ids
GAPS = dict(unused_ids=[5, *range(60, 210)])
VOCABULARIES = {
    'one coordinate': dict(H=1, B=400, V=300),
    'more buckets than tokens': dict(H=3, B=250, V=200),
    'long lists': dict(H=4, B=24, V=500),
    'unused_ids': dict(H=2, B=70, V=400, **GAPS),
    'single ID': dict(H=4, B=60, V=200, unique=False),
    'LSH': dict(H=3, B=60, V=200, num_lsh=2),
}


@pytest.mark.parametrize('n, dtype, tolerance', [(1, torch.float32, 1e-6), (70, torch.float64, 1e-14)])
@pytest.mark.parametrize('name', VOCABULARIES)
def test_kernels_equal_the_plain_loss(name, n, dtype, tolerance):
    """Loss and gradient equal the plain ones, with equal bits each time; buckets without tokens have no gradient."""
    tokens, index = vocabulary(**VOCABULARIES[name])
    o, targets = logits_and_targets(tokens, index, n, dtype)
    y = index.signatures[targets]
    plain = [o_i.double().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, index.signatures, index.token_mask)
    expected.sum().backward()

    unchanged = [o_i.clone() for o_i in o]
    assert torch.equal(fused.exact_nll(o, y, index, KERNELS), fused.exact_nll(unchanged, y, index, KERNELS))
    assert all(map(torch.equal, o, unchanged))
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    assert nll.dtype == dtype and (nll - expected).abs().max() < 20 * tolerance
    for ours, theirs in zip(o, plain, strict=True):
        assert relative(ours, theirs.grad) < tolerance
        assert (ours[theirs.grad == 0] == 0).all()

    # a second time with the same bits
    again = fused.exact_nll(unchanged, y, index, KERNELS, gradient=True)
    assert torch.equal(nll, again) and all(map(torch.equal, o, unchanged))


@pytest.mark.parametrize('name', ['long lists', 'unused_ids'])
def test_kernels_in_bfloat16(name):
    """
    Sums over bfloat16 logits are float32, and the target's -1 is not lost in rounding. The interpreter truncates
    float32 to bfloat16 where a GPU rounds to nearest, so the gradient equals the truncated float32 one.
    """
    tokens, index = vocabulary(**VOCABULARIES[name])
    o, targets = logits_and_targets(tokens, index, 70, torch.bfloat16)
    y = index.signatures[targets]
    in_columns = [o_i.clone() for o_i in o]
    wide = [o_i.float() for o_i in o]
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    assert torch.equal(nll, fused.exact_nll(wide, y, index, KERNELS, gradient=True))
    assert torch.allclose(nll, fused.exact_nll(in_columns, y, index, ON_CPU, gradient=True), rtol=1e-6)
    for ours, theirs, third in zip(o, wide, in_columns, strict=True):
        cut = (theirs.view(torch.int32) & -(2**16)).view(torch.float32)
        assert torch.equal(ours.float(), cut)
        # rounded to nearest, as on a GPU, both forms are equally exact
        assert relative(theirs.bfloat16(), third.double()) < 2e-3


def test_a_large_vocabulary():
    """The kernels work with 131,072 tokens and the paper's H and B."""
    V = 131072
    H = 4
    B = 16384
    n = 3
    signatures = torch.randint(1, B, (V, H), generator=torch.Generator().manual_seed(0))
    index = build_index(signatures, torch.ones(V, dtype=torch.bool), B)
    o, targets = logits_and_targets(torch.arange(V), index, n, torch.float64)
    y = signatures[targets]
    plain = [o_i.clone().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, index.signatures, index.token_mask)
    expected.sum().backward()
    # fewer and larger programs than on a GPU, because the interpreter's time depends on their number
    sizes = kernels.Sizes(positions=32, tokens=8192, buckets=4096)
    inverse = [index.ids, index.offsets]
    target, logsumexp = kernels.sum_over_vocabulary(o, y, index.rows, index.token_mask, inverse, sizes)
    assert torch.allclose(logsumexp - target, expected, rtol=1e-13)
    assert all(relative(ours, theirs.grad) < 1e-13 for ours, theirs in zip(o, plain, strict=True))


def test_compiles_for_an_h100(tmp_path):
    """
    The kernels compile for a GPU without spilling registers, and use 64-bit offsets: 32-bit ones end at 2^31 bucket
    logits, 32,768 positions of H4B16K.
    """
    command = [sys.executable, '-m', 'tests.compile_kernels', '--quick']
    environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0')
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    # three runs: the kernels with a gradient, and two of them without
    assert len(done.stdout.splitlines()) == 15


BROKEN = {
    'no Triton': (lambda patch: patch.setitem(sys.modules, 'triton', None), 'no package triton'),
    'an old Triton': (
        lambda patch: patch.setitem(sys.modules, 'triton', types.SimpleNamespace(__version__='3.5.1')),
        'triton 3.5.1 is older than 3.6',
    ),
    'no compiler': (lambda patch: patch.setenv('PATH', ''), 'no C compiler: install gcc or clang'),
    'a wrong CC': (lambda patch: patch.setenv('CC', 'nothing-like-gcc'), 'no C compiler: install gcc or clang'),
    'no headers': (
        lambda patch: patch.setattr(sysconfig, 'get_path', lambda *_: '/nowhere'),
        'no Python.h in /nowhere',
    ),
}


@pytest.mark.parametrize('name', BROKEN)
def test_no_triton(monkeypatch, name):
    """no_triton() says what Triton lacks."""
    monkeypatch.delenv('CC', raising=False)
    change, reason = BROKEN[name]
    change(monkeypatch)
    assert no_triton.__wrapped__().startswith(reason)


def test_columns_on_a_gpu():
    """Columns of a GPU's size give the loss, gradient and predictions of a CPU's."""
    tokens, index = vocabulary(**VOCABULARIES['unused_ids'])
    o, targets = logits_and_targets(tokens, index, 1100, torch.float64)
    y = index.signatures[targets]
    other = [o_i.clone() for o_i in o]
    assert torch.allclose(*(fused.predictions(o, targets, index, sizes) for sizes in (COLUMNS, ON_CPU)), rtol=1e-12)
    ours = fused.exact_nll(o, y, index, COLUMNS, gradient=True)
    assert torch.allclose(ours, fused.exact_nll(other, y, index, ON_CPU, gradient=True), rtol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(o, other, strict=True))


def test_the_kernels_are_timed(capsys, monkeypatch):
    """study/kernels.py runs and names the fastest sizes."""
    signatures = torch.tensor(signature_table([f'word {i}' for i in range(40)], 1, 50).astype(int))
    case = study_kernels.random_case(signatures, 50, 3, torch.float32)
    monkeypatch.setattr(study_kernels, 'POSITIONS', (32, 64))

    calls = itertools.count(1)

    def measure_seconds(work):
        work()
        return 1 / next(calls)  # the later, the faster

    study_kernels.measure(case, measure_seconds)
    shown = capsys.readouterr().out
    assert 'equal bits' in shown and 'of a copy' in shown
    last = kernels.Sizes(64, tokens=128, buckets=32, transpose_warps=8, logsumexp_warps=8, backward_warps=4)
    assert f'fastest: {last}' in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_timing_needs_a_gpu():
    """Without a GPU, study/kernels.py ends with an error of one line."""
    command = [sys.executable, '-m', 'study.kernels']
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | dict(PYTHONPATH=''))
    assert done.returncode == 1 and done.stderr.startswith('error: this needs a GPU and Triton; here: ')
    assert done.stderr.count('\n') == 1
