"""
Compares a GPU with the CPU, with and without the Triton kernels; `make gpu` runs these tests. Without a GPU, tests that
can run on a CPU use the chunk sizes of a GPU and Triton's interpreter; the others are skipped.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO, plain_twin, random_model, sizes, steps
from torch._dynamo.utils import ReinplaceCounters

from mhf import chunked as fused
from mhf.chunked import ChunkSizes
from mhf.lm import MHFLM
from mhf.tokenizers import get_tokenizer
from study.kernels import COLUMNS, KERNELS, random_inputs, signature_index

pytest.importorskip('triton', reason='needs the package triton')
DEVICE = 'cuda' if torch.cuda.is_available() and os.environ['TRITON_INTERPRET'] == '0' else 'cpu'
on_a_gpu = pytest.mark.skipif(DEVICE == 'cpu', reason='needs a GPU, and `make gpu`')
KINDS = [dict(loss='exact'), dict(loss='product'), dict(num_hashes=0)]


def distance(measured, expected):
    """Relative distance of two tensors."""
    a = measured.detach().double().cpu()
    b = expected.detach().double().cpu()
    return ((a - b).norm() / b.norm()).item()


def everything(m, ids, autocast=False):
    """Returns {name: tensor}: a model's loss, gradients, log P, and losses per position."""
    x = m.signatures[ids[:, :-1]]
    y = m.signatures[ids[:, 1:]]
    m.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = m(x, y)
        loss.backward()
        measured = {'loss': loss, 'log_probs': m.log_probs(ids), 'losses': torch.stack(m.token_losses(x, y))}
    return measured | {name: p.grad.clone() for name, p in m.named_parameters()}


def references(changes):
    """Returns a model in float64 on the CPU, token ids, and everything() of the plain model."""
    m = random_model(**changes)
    ids = torch.randint(3, 300, (3, 41))
    return m, ids, everything(plain_twin(m), ids)


@pytest.mark.parametrize('use_kernels', [False, True])
@pytest.mark.parametrize('changes', KINDS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_equals_the_cpu(dtype, tolerance, changes, use_kernels):
    """Logits, losses and gradients on a GPU equal those of the plain model on a CPU, in columns and with kernels."""
    m, ids, expected = references(changes)
    m.to(DEVICE, dtype).chunk_sizes = ChunkSizes(chunk=50, block=50, columns=512, use_kernels=use_kernels)
    measured = everything(m, ids.to(DEVICE))
    # the gradient of the gate's last bias is 0, except for rounding
    wrong = {k: distance(measured[k], t) for k, t in expected.items() if t.norm() > 1e-6}
    assert max(wrong.values()) < tolerance, wrong


@pytest.mark.parametrize('changes', KINDS)
def test_a_compiled_chunk(changes):
    """A compiled chunk of the head has the gradients of the plain model."""
    if not (shutil.which('g++') or shutil.which('cc')):
        pytest.skip('torch.compile needs a C++ compiler')
    if DEVICE == 'cpu' and changes != KINDS[0]:
        pytest.skip('compiles for half a minute, so only on a GPU')
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    m, ids, expected = references(changes)
    m.to(DEVICE, torch.float32).chunk_sizes = sizes(chunk=4096, use_kernels=True)
    errors = []
    for m.chunk_gradients in (fused.chunk_gradients, torch.compile(fused.chunk_gradients, fullgraph=True)):
        measured = everything(m, ids.to(DEVICE), autocast=True)
        errors.append({k: distance(measured[k], expected[k]) for k in ('loss', 'embed.weight', 'norm.weight')})
    eager, compiled = errors
    # compilation changes the rounding to bfloat16
    assert all(compiled[k] < 1.5 * eager[k] + 1e-3 for k in eager), errors
    # the kernels write to the bucket logits, not to a copy of half a GiB
    assert not ReinplaceCounters.get_total_missed()


def head_inputs(V, H, B, n, dtype):
    """Returns the SignatureIndex of a random table, and random bucket logits and targets, on DEVICE."""
    table = torch.randint(1, B, (V, H)).numpy()
    with torch.device(DEVICE):
        index = signature_index(table, B)
        return index, *random_inputs(index, n, dtype)


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
def test_kernels_equal_columns(dtype, tolerance):
    """Loss and gradient of the kernels equal those of the sums in columns, and repeat to the bit."""
    shape = (32768, 4, 16384, 4096) if DEVICE == 'cuda' else (300, 3, 90, 70)
    index, o, y = head_inputs(*shape, dtype)
    again = [o_i.clone() for o_i in o]
    in_columns = [o_i.clone() for o_i in o]
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    assert torch.equal(nll, fused.exact_nll(again, y, index, KERNELS, gradient=True))
    assert all(map(torch.equal, o, again))
    expected = fused.exact_nll(in_columns, y, index, COLUMNS, gradient=True)
    assert (nll - expected).abs().max() < 1e-5 and distance(torch.cat(o), torch.cat(in_columns)) < tolerance


@on_a_gpu
def test_memory_of_the_kernels():
    """The kernels allocate at most 1.1 x the memory of the transposed bucket logits and the token logits."""
    index, o, y = head_inputs(32768, 4, 16384, 4096, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused.exact_nll(o, y, index, KERNELS, gradient=True)
    token_logits = 4 * 4096 * 32768
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (sum(o_i.nbytes for o_i in o) + token_logits)


@on_a_gpu
def test_more_bucket_logits_than_an_int32_counts():
    """The kernels are correct for a chunk with more than 2^31 bucket logits."""
    n = 2**15 + 100
    index, o, y = head_inputs(1000, 4, 16384, n, torch.bfloat16)
    parts = (slice(0, 100), slice(n - 100, n))
    expected = [[o_i[part].clone() for o_i in o] for part in parts]
    nll = fused.exact_nll(o, y, index, KERNELS, gradient=True)
    for part, o_part in zip(parts, expected, strict=True):
        assert torch.allclose(nll[part], fused.exact_nll(o_part, y[part], index, COLUMNS, gradient=True), atol=1e-5)
        assert all(distance(g[part], g_part) < 5e-3 for g, g_part in zip(o, o_part, strict=True))


def test_products_are_summed_in_float32():
    """dL/dE, a sum over all chunks, is accumulated in float32."""
    a = torch.ones(4, 8, dtype=torch.bfloat16, device=DEVICE)
    b = torch.full((4, 6), 2**-9, device=DEVICE)
    total = torch.ones(8, 6, device=DEVICE)
    for _ in range(64):
        fused.add_products(total, [(a, b.bfloat16()), (a, b.bfloat16())])
    assert torch.equal(total, torch.full_like(total, 1 + 64 * 2 * 4 * 2**-9))


def test_evaluation():
    """eval.py's batched scores on a GPU equal log P of each continuation on a CPU."""
    m = random_model()
    draw = np.random.default_rng(0)
    contexts = [draw.integers(3, 300, n).tolist() for n in (1, 5, 9)]
    requests = [([1, *c], draw.integers(3, 300, n).tolist()) for c in contexts for n in (1, 4, 9)]
    expected = []
    for context, continuation in requests:
        ids = torch.tensor([[*context, *continuation]])
        logp = m.log_probs(ids[:, :-1])[0].gather(1, ids[0, 1:, None])
        expected.append(logp[len(context) - 1 :].sum().item())
    lm = MHFLM(m.to(DEVICE, torch.float32), get_tokenizer('mistral'))
    scores = {k: logp.sum().item() for k, (logp, _, _) in lm.score_requests(requests, '')}
    assert np.allclose([scores[k] for k in range(len(requests))], expected, rtol=1e-4, atol=1e-3)


# -----------------------------------------------------------------------------
# scripts run as subprocesses, because the forked processes of the other tests see no GPU


def script(name, *args, cwd, processes=0, seconds=300):
    """Runs a script, which must succeed. Returns its stdout."""
    run = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}'] if processes else []
    command = [sys.executable, *run, str(REPO / name), *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(folder, *options, processes=0):
    """Returns the losses of eight steps that resume from the checkpoint of `trained`."""
    name = f'run{len(list(folder.glob("run*")))}'
    shutil.copytree(folder / 'out', folder / name)
    args = ['cfg.py', f'--out_dir={name}', '--init_from=resume', '--max_steps=32', *options]
    script('train.py', *args, cwd=folder, processes=processes)
    return [s['loss'] for s in steps(folder, name)[24:]]


@pytest.fixture(scope='module')
def on_cpu(trained):
    return losses(trained, '--device=cpu')


@on_a_gpu
@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 2e-3), ('bfloat16', 2e-2)])
@pytest.mark.parametrize('kernels', [False, True])
def test_training(copy, on_cpu, kernels, dtype, tolerance, compiled):
    """Training on a GPU follows the losses of a CPU, compiled or not, with kernels or without."""
    options = ['--device=cuda', f'--dtype={dtype}', f'--compile={compiled}', f'--kernels={kernels}']
    assert losses(copy, *options) == pytest.approx(on_cpu, rel=tolerance)


@on_a_gpu
def test_deterministic(copy):
    """With --deterministic, two runs on the same GPU have equal losses."""
    options = ['--device=cuda', '--deterministic', '--compile=False']
    assert losses(copy, *options) == losses(copy, *options)


@on_a_gpu
@pytest.mark.parametrize('processes', [1, 2])
def test_several_gpus(copy, on_cpu, processes):
    """With nccl and one process per GPU, training follows the losses of a CPU."""
    if torch.cuda.device_count() < processes:
        pytest.skip(f'needs {processes} GPUs')
    options = ['--device=cuda', '--dtype=float32']
    assert losses(copy, *options, processes=processes) == pytest.approx(on_cpu, rel=2e-3)


@on_a_gpu
def test_generation(trained):
    """A step captured as a CUDA graph generates the same text as an eager step and a CPU."""
    args = ['--out_dir=out', '--temperature=0', '--dtype=float32', '--start=import', '--max_new_tokens=100']
    ways = [['--device=cpu'], ['--device=cuda', '--compile=False'], ['--device=cuda']]
    on_cpu, eager, captured = (script('sample.py', *args, *way, cwd=trained) for way in ways)
    assert on_cpu == eager == captured
