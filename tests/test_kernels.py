"""
kernels.py without a GPU: its kernels in Triton's interpreter against the plain loss in float64, and compiled for an
H100; who takes them, and what they take. test_mhf.py has them inside the whole head, tests/test_gpu.py on a GPU.
"""

import itertools
import os
import subprocess
import sys
import types
from collections import defaultdict

import pytest
import torch

pytest.importorskip('triton', reason='needs the package triton')

from conftest import REPO
from torch.distributed._tools.mem_tracker import MemTracker

from hashing import signature_table
from mhf import device, fused, kernels
from mhf.fused import Tiles
from model import exact_loss
from study import kernels as study_kernels
from study.kernels import COLUMNS, KERNELS, table_of

ON_CPU = Tiles(chunk=512, block=64, columns=32, kernels=False)
# of 64 words none of which is a token
pytestmark = pytest.mark.filterwarnings('ignore:divide by zero encountered in log')


def tables(H, B, V, num_lsh=0, unused_ids=(), unique=True):
    """A vocabulary's signatures -> (tokens,) ids that are tokens, and the Table."""
    signatures = torch.tensor(
        signature_table([f'word {i}' for i in range(V)], H, B, num_lsh, unique=unique).astype(int)
    )
    token_mask = torch.ones(V, dtype=torch.bool)
    token_mask[list(unused_ids)] = False
    return token_mask.nonzero()[:, 0], table_of(signatures, token_mask, B)


def logits_and_targets(tokens, table, n, dtype, scale=1.0):
    """Bucket logits, H of (n, B), and n ids."""
    torch.manual_seed(0)
    H = table.signatures.shape[1]
    B = (len(table.begins) - 1) // H
    return [(scale * torch.randn(n, B)).to(dtype) for _ in range(H)], tokens[torch.randint(len(tokens), (n,))]


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# ids that are no token: a few, and whole tiles of 64 words
GAPS = dict(unused_ids=[5, *range(60, 210)])
VOCABULARIES = {
    'one coordinate': dict(H=1, B=400, V=300),
    'more buckets than words': dict(H=3, B=250, V=200),
    'long lists': dict(H=4, B=24, V=500),
    'unused_ids': dict(H=2, B=70, V=400, **GAPS),
    'single ID': dict(H=4, B=60, V=200, unique=False),
    'LSH': dict(H=3, B=60, V=200, num_lsh=2),
}


@pytest.mark.parametrize('n, dtype, tolerance', [(1, torch.float32, 1e-6), (70, torch.float64, 1e-14)])
@pytest.mark.parametrize('name', VOCABULARIES)
def test_kernels_equal_the_plain_loss(name, n, dtype, tolerance):
    """The exact loss or its gradient is another one on a GPU than on a CPU; or a bucket of no word has a gradient."""
    tokens, table = tables(**VOCABULARIES[name])
    o, targets = logits_and_targets(tokens, table, n, dtype)
    y = table.signatures[targets]
    plain = [o_i.double().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, table.signatures, table.token_mask)
    expected.sum().backward()

    unchanged = [o_i.clone() for o_i in o]
    assert torch.equal(fused.exact_nll(o, y, table, KERNELS), fused.exact_nll(unchanged, y, table, KERNELS))
    assert all(map(torch.equal, o, unchanged))
    nll = fused.exact_nll(o, y, table, KERNELS, gradient=True)
    assert nll.dtype == dtype and (nll - expected).abs().max() < 20 * tolerance
    for ours, theirs in zip(o, plain, strict=True):
        assert relative(ours, theirs.grad) < tolerance
        assert (ours[theirs.grad == 0] == 0).all()

    # a second time with the same bits
    again = fused.exact_nll(unchanged, y, table, KERNELS, gradient=True)
    assert torch.equal(nll, again) and all(map(torch.equal, o, unchanged))


@pytest.mark.parametrize('name', ['long lists', 'unused_ids'])
def test_kernels_in_bfloat16(name):
    """
    In bfloat16 sums are made in less than float32, or the -1 of the target is lost in rounding. The interpreter cuts
    float32 to bfloat16 where a GPU rounds to nearest, so the gradient must be float32's, cut.
    """
    tokens, table = tables(**VOCABULARIES[name])
    o, targets = logits_and_targets(tokens, table, 70, torch.bfloat16)
    y = table.signatures[targets]
    in_columns = [o_i.clone() for o_i in o]
    wide = [o_i.float() for o_i in o]
    nll = fused.exact_nll(o, y, table, KERNELS, gradient=True)
    assert torch.equal(nll, fused.exact_nll(wide, y, table, KERNELS, gradient=True))
    assert torch.allclose(nll, fused.exact_nll(in_columns, y, table, ON_CPU, gradient=True), rtol=1e-6)
    for ours, theirs, third in zip(o, wide, in_columns, strict=True):
        cut = (theirs.view(torch.int32) & -(2**16)).view(torch.float32)
        assert torch.equal(ours.float(), cut)
        # rounded to nearest, as a GPU does it, both forms are as exact
        assert relative(theirs.bfloat16(), third.double()) < 2e-3


def test_predictions():
    """log P, the likeliest token or its probability, which evaluation reports, are others on a GPU."""
    tokens, table = tables(**VOCABULARIES['unused_ids'])
    # large enough for many targets to be the likeliest token
    o, targets = logits_and_targets(tokens, table, 70, torch.float32, scale=4)
    likeliest = fused.token_scores(o, table).argmax(1)
    targets[::2] = likeliest[::2]
    ours, theirs = (fused.predictions(o, targets, table, tiles) for tiles in (KERNELS, ON_CPU))
    assert torch.allclose(ours, theirs, atol=1e-5) and torch.equal(ours[1], theirs[1])
    assert 35 <= ours[1].sum() < 70
    # of two equally likely tokens, each counts
    tied = [torch.zeros_like(o_i) for o_i in o]
    assert fused.predictions(tied, targets, table, KERNELS)[1].all()


def test_a_large_vocabulary():
    """131,072 words, the paper's H and B: a list, a tile or an offset is beyond what the kernels were written for."""
    V = 131072
    H = 4
    B = 16384
    n = 3
    signatures = torch.randint(1, B, (V, H), generator=torch.Generator().manual_seed(0))
    table = table_of(signatures, torch.ones(V, dtype=torch.bool), B)
    o, targets = logits_and_targets(torch.arange(V), table, n, torch.float64)
    y = signatures[targets]
    plain = [o_i.clone().requires_grad_() for o_i in o]
    expected = exact_loss(plain, y, table.signatures, table.token_mask)
    expected.sum().backward()
    # larger tiles than a GPU's, since the interpreter's time goes by their number
    sizes = kernels.Sizes(tokens=32, words=8192, buckets=4096)
    inverse = [table.ids, table.begins]
    target, _, logsumexp = kernels.sum_over_vocabulary(o, y, table.rows, table.token_mask, inverse, sizes)
    assert torch.allclose(logsumexp - target, expected, rtol=1e-13)
    assert all(relative(ours, theirs.grad) < 1e-13 for ours, theirs in zip(o, plain, strict=True))


def test_compiles_for_an_h100(tmp_path):
    """
    A kernel that runs in the interpreter does not compile for a GPU, spills registers, or reads at 32-bit offsets,
    which end at 2^31 bucket logits: 32,768 tokens of H4B16K.
    """
    command = [sys.executable, '-m', 'tests.compile_kernels', '--quick']
    environment = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET='0')
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    # three runs: the kernels with a gradient, and two of them without
    assert len(done.stdout.splitlines()) == 15


# -----------------------------------------------------------------------------
# who takes them, and what they take


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """What this machine has is looked up anew, and again afterwards."""
    for cached in (device.no_triton, fused.kernels_run_here):
        cached.cache_clear()
    yield monkeypatch
    for cached in (device.no_triton, fused.kernels_run_here):
        cached.cache_clear()


BROKEN = {
    'no Triton': (
        lambda patch: patch.setitem(sys.modules, 'triton', None),
        'no package triton: pip install triton, on Linux',
    ),
    'an old Triton': (
        lambda patch: patch.setitem(sys.modules, 'triton', types.SimpleNamespace(__version__='3.5.1')),
        'triton 3.5.1 is older than 3.6; use torch 2.11 or newer, which brings it',
    ),
    'no compiler': (lambda patch: patch.setenv('PATH', ''), 'no C compiler: install gcc or clang, or name one in $CC'),
    'a wrong CC': (lambda patch: patch.setenv('CC', 'nothing-like-gcc'), 'no C compiler: install gcc or clang'),
    'no headers': (
        lambda patch: patch.setattr(device.sysconfig, 'get_path', lambda *_: '/nowhere'),
        "no Python.h in /nowhere (Debian's package python3-dev has it)",
    ),
}


@pytest.mark.parametrize('name', BROKEN)
def test_without_what_the_kernels_need(as_if_on_a_gpu, capsys, name):
    """A GPU without Triton or a C compiler ends in a traceback, or is slow and nobody knows why."""
    as_if_on_a_gpu.delenv('CC', raising=False)
    breaks, says = BROKEN[name]
    breaks(as_if_on_a_gpu)
    assert not fused.kernels_run_here() and not fused.kernels_run_here()
    line = capsys.readouterr().err
    assert line.startswith('log P is summed without the kernels of kernels.py, several times slower: ') and says in line
    assert line.count('\n') == 1


def test_one_process_says_it(as_if_on_a_gpu, capsys):
    """Eight processes of a run say the same eight times."""
    as_if_on_a_gpu.setitem(sys.modules, 'triton', None)
    as_if_on_a_gpu.setenv('RANK', '3')
    assert not fused.kernels_run_here() and not capsys.readouterr().err


def test_columns_on_a_gpu():
    """The form for a GPU without Triton, larger blocks of columns, has another loss, gradient or prediction."""
    tokens, table = tables(**VOCABULARIES['unused_ids'])
    o, targets = logits_and_targets(tokens, table, 1100, torch.float64)
    y = table.signatures[targets]
    other = [o_i.clone() for o_i in o]
    assert torch.allclose(*(fused.predictions(o, targets, table, tiles) for tiles in (COLUMNS, ON_CPU)), rtol=1e-12)
    ours = fused.exact_nll(o, y, table, COLUMNS, gradient=True)
    assert torch.allclose(ours, fused.exact_nll(other, y, table, ON_CPU, gradient=True), rtol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(o, other, strict=True))


def test_memory(monkeypatch):
    """A chunk of the head or --plan counts other memory than the kernels take."""
    H = 4
    B = 300
    V = 2000
    n = 128
    tokens, table = tables(H, B, V)
    o, targets = logits_and_targets(tokens, table, n, torch.bfloat16)
    y = table.signatures[targets]
    for name in ('lay_out_kernel', 'normalise_kernel', 'derive_kernel'):
        # what they launch takes no memory of its own
        monkeypatch.setattr(kernels, name, defaultdict(lambda: lambda *_, **__: None))
    with MemTracker() as measured:
        kernels.sum_over_vocabulary(o, y, table.rows, table.token_mask, [table.ids, table.begins])
    peak = measured.get_tracker_snapshot('peak')[torch.device('cpu')]['Total']
    # the bucket logits and their probabilities are there before; beside these only sums of 64 words and the targets
    assert fused.bytes_per_token(H, B, V) * n == pytest.approx(2 * 2 * n * H * B + peak, rel=0.05)
    # so many fit into a sixteenth of what is free
    one = fused.bytes_per_token(4, 16384, 131072)
    assert fused.gpu_chunk(4, 16384, 131072, free=16 * 1024 * one) == 1024
    assert fused.gpu_chunk(4, 16384, 131072, free=16 * 1024 * one - 16) == 512
    assert fused.gpu_chunk(4, 16384, 32768, free=70e9) == 4096


def test_the_kernels_are_timed(capsys, monkeypatch):
    """study/kernels.py, for a few minutes of a lent GPU, does not run, or names other sizes than the fastest."""
    signatures = torch.tensor(signature_table([f'word {i}' for i in range(40)], 1, 50).astype(int))
    case = study_kernels.random_case(signatures, 50, 3, torch.float32)
    monkeypatch.setattr(study_kernels, 'TOKENS', (32, 64))

    calls = itertools.count(1)

    def seconds_of(work):
        work()
        return 1 / next(calls)  # the later, the faster

    study_kernels.measure(case, seconds_of)
    shown = capsys.readouterr().out
    assert 'the same bits' in shown and 'of a copy' in shown
    last = kernels.Sizes(64, words=128, buckets=32, lay_out_warps=8, normalise_warps=8, derive_warps=4)
    assert f'fastest: {last}' in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_timing_needs_a_gpu():
    """On a machine without a GPU study/kernels.py ends in a traceback."""
    command = [sys.executable, '-m', 'study.kernels']
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | dict(PYTHONPATH=''))
    assert done.returncode == 1 and done.stderr.startswith('error: this needs a GPU and Triton; here: ')
    assert done.stderr.count('\n') == 1
