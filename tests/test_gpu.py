"""
Compares a GPU with the CPU, with and without the Triton kernels; `make gpu` runs these tests. Without a GPU they run on
the CPU, with Triton's interpreter; those that would only repeat another test there are skipped.
"""

import os
import shutil
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import REPO, ok, steps
from test_kernels import make_index
from test_kernels import pytestmark as needs_interpreter

from mhf import head
from mhf.generate import Engine
from test_mhf import distance, plain, random_model

pytest.importorskip('triton', reason='needs the package triton')
# read by cuBLAS when it is initialized, for test_deterministic
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
DEVICE = 'cuda' if torch.cuda.is_available() and os.environ['TRITON_INTERPRET'] == '0' else 'cpu'
# without a GPU, the interpreter runs the kernels
with_kernels = pytest.param(True, marks=needs_interpreter if DEVICE == 'cpu' else ())
on_a_gpu = pytest.mark.skipif(DEVICE == 'cpu', reason='needs a GPU, and `make gpu`')
KINDS = [dict(loss='exact'), dict(loss='product'), dict(num_hashes=0)]


def everything(m, ids):
    """Returns {name: tensor}: a model's loss, gradients, log P, and losses per position."""
    x = ids[:, :-1]
    y = ids[:, 1:]
    m.zero_grad()
    loss = m(x, y)
    loss.backward()
    measured = {'loss': loss, 'P': m.log_probs(ids).exp(), 'losses': torch.stack(m.token_losses(x, y))}
    return measured | {name: p.grad.clone() for name, p in m.named_parameters()}


@pytest.fixture(scope='module', params=KINDS, ids=['exact', 'product', 'Standard'])
def reference(request):
    """A model in float64 on the CPU, token ids, and everything() with plain torch."""
    m = random_model(**request.param, unused_ids=[290])
    ids = torch.randint(3, 290, (3, 41))
    return m, ids, plain(everything, m, ids)


@pytest.mark.parametrize('use_kernels', [pytest.param(False, marks=on_a_gpu), with_kernels])
@pytest.mark.parametrize(
    'dtype, tolerance', [pytest.param(torch.float32, 1e-4, marks=on_a_gpu), (torch.float64, 1e-10)], ids=str
)
def test_equals_the_cpu(reference, dtype, tolerance, use_kernels, monkeypatch):
    """Logits, losses and gradients on a GPU equal those of model.MHF on a CPU, in columns and with kernels."""
    m, ids, expected = reference
    m = deepcopy(m).to(DEVICE, dtype)
    monkeypatch.setattr(head, 'has_kernels', lambda device: use_kernels)
    monkeypatch.setattr(head, 'chunk_size', lambda *_: 50)
    measured = everything(m, ids.to(DEVICE))
    # the gradient of the gate's last bias is 0, except for rounding
    wrong = {k: distance(measured[k], t) for k, t in expected.items() if t.norm() > 1e-6}
    assert max(wrong.values()) < tolerance, wrong


# -----------------------------------------------------------------------------
# the kernels at the sizes of the paper


@on_a_gpu
@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
def test_kernels_equal_columns(dtype, tolerance, monkeypatch):
    """Token logits and their adjoint by the kernels equal those in columns, and repeat to the bit."""
    table = np.random.default_rng(0).integers(1, 16384, (32768, 4))
    index = [tensor.to(DEVICE) for tensor in make_index(table, 16384)]
    o = [torch.randn(2048, 16384, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(4)]
    weights = torch.randn(2048, 32768, device=DEVICE)

    def logits_and_gradients():
        logits = head.token_logits(o, *index)
        return [logits.detach(), *torch.autograd.grad(logits, o, weights)]

    by_kernels = logits_and_gradients()
    assert all(map(torch.equal, by_kernels, logits_and_gradients()))
    monkeypatch.setattr(head, 'has_kernels', lambda device: False)
    for a, b in zip(by_kernels, logits_and_gradients(), strict=True):
        assert distance(a, b) < tolerance


@on_a_gpu
@pytest.mark.parametrize('loss', ['exact', 'product'])
def test_memory_of_a_chunk(loss):
    """A chunk of the head allocates at most the memory that head.chunk_size counts, and the gradient of E."""
    m = random_model(dtype=torch.float32, loss=loss, vocab_size=32768, num_buckets=16384, num_hashes=4).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        n = head.chunk_size(DEVICE, m.config)
        h = torch.randn(1, n, m.config.hidden_size, device=DEVICE, requires_grad=True)
        m.hidden_states = lambda x: h
        ids = torch.zeros(1, n, dtype=torch.int64, device=DEVICE)
        m.compile()
        m(ids, ids)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        m(ids, ids)
    counted = n * (6 * 4 * 16384 + 8 * 32768) + 2 * m.embed.weight.nbytes
    assert torch.cuda.max_memory_allocated() - before < 1.1 * counted


# -----------------------------------------------------------------------------
# training and generation


def train(device, dtype='float32', compiled=False, loss='exact'):
    """Trains the same small model for eight steps. Returns its losses."""
    m = random_model(dtype=torch.float32, loss=loss)
    m.init_weights()
    ids = torch.randint(3, 300, (8, 4, 25))
    m.to(device)
    if compiled:
        m.compile()
    optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3, fused=True)
    losses = []
    for batch in ids.to(device):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == 'bfloat16'):
            value = m(batch[:, :-1], batch[:, 1:])
        value.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=on_a_gpu)], ids=['eager', 'compiled'])
@pytest.mark.parametrize(
    'dtype, tolerance', [pytest.param('float32', 2e-3, marks=on_a_gpu), ('bfloat16', 2e-2)], ids=['float32', 'bfloat16']
)
@pytest.mark.parametrize('loss', ['exact', 'product'])
def test_training(loss, dtype, tolerance, compiled):
    """Training on a GPU follows the losses of a CPU, compiled or not, in both precisions."""
    assert train(DEVICE, dtype, compiled, loss) == pytest.approx(train('cpu', loss=loss), rel=tolerance)


@on_a_gpu
def test_deterministic():
    """With deterministic algorithms and compiled, as with train.py --deterministic, two runs have the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        assert train(DEVICE, 'bfloat16', compiled=True) == train(DEVICE, 'bfloat16', compiled=True)
    finally:
        torch.use_deterministic_algorithms(False)


@on_a_gpu
def test_generation():
    """A step captured as a CUDA graph generates the tokens of an eager step and of a CPU, also past a full context."""
    m = random_model()
    ids = torch.randint(3, 300, (1, 7))
    on_cpu = list(Engine(m, temperature=0).stream(ids, 60))
    m.to(DEVICE)
    for compiled in (False, True):
        engine = Engine(m, temperature=0)
        if compiled:
            engine.compile(1, 67)
        assert torch.cat(list(engine.stream(ids.to(DEVICE), 60))).tolist() == torch.cat(on_cpu).tolist()


@on_a_gpu
def test_torchrun(quick):
    """With nccl, torchrun and one process per GPU, a resumed run follows the losses of a CPU."""
    shutil.copytree(quick / 'out', quick / 'gpu')
    args = ['cfg.py', '--max_steps=32', '--dtype=float32']
    ok('train.py', *args, '--device=cpu', cwd=quick)
    processes = min(2, torch.cuda.device_count())
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    command += [str(REPO / 'train.py'), *args, '--out_dir=gpu', '--device=cuda']
    done = subprocess.run(command, cwd=quick, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    on_cpu, on_gpu = ([s['loss'] for s in steps(quick, out)[24:]] for out in ('out', 'gpu'))
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)
