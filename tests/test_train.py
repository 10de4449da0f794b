"""train.py: the loop, resuming, processes, signals and kills."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    Forked,
    assert_same,
    events,
    ok,
    rank_variables,
    ranks,
    refused,
    run,
    snapshot,
    started,
    steps,
    succeed,
    weights,
)

from mhf.checkpoint import load, read_checkpoint
from mhf.data import Bins, sequence_indices

# a patch that executes {do} at the {n}-th call of some functions
AT_CALL = """
import os, signal, torch
from model import MHF
calls = []
def counted(real):
    @torch.compiler.disable
    def function(*args, **options):
        calls.append(real)
        if len(calls) == {n}:
            {do}
        return real(*args, **options)
    return function
for holder, name in {functions}:
    setattr(holder, name, counted(getattr(holder, name)))
"""


def in_forward(n, do):
    """Returns a patch that executes `do` in the n-th forward pass of training."""
    return AT_CALL.format(n=n, do=do, functions='[(MHF, "forward")]')


def until(step):
    """Returns the flags of a run that ends at `step`, with the learning rates of the complete run."""
    return f'--max_steps={step}', '--lr_decay_steps=24'


# -----------------------------------------------------------------------------
# learning


def test_training_learns(trained):
    """
    A run reduces its loss, logs every step and validation, and writes checkpoints. The learning rate rises linearly
    from 0 to the maximum, then falls to 0 along a cosine.
    """
    log = events(trained)
    val = {e['step']: e['val_loss'] for e in log if 'val_loss' in e}
    assert [e['step'] for e in log] == list(range(1, 25)) and [*val] == [8, 16, 24]
    assert log[-1]['tokens'] == 24 * 8 * 16
    assert log[-1]['loss'] < log[0]['loss'] - 1 and val[24] < log[0]['loss'] - 0.5
    # at initialization all tokens are about equally likely
    assert abs(log[0]['loss'] - math.log(32768)) < 0.5
    expected = [1e-2 * t / 4 if t < 4 else 1e-2 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 20)) for t in range(24)]
    assert [e['lr'] for e in log] == pytest.approx(expected, abs=1e-15) and log[0]['lr'] == 0
    assert weights(trained)['step'] == 24 and (trained / 'out/ckpt_best.pt').exists()


def loss_of_step(model, folder, step):
    """-log P(w) of the sequences of a step (from 0)."""
    train = Bins(folder / 'bins', 'train')
    starts = 16 * sequence_indices(step, 8, (len(train) - 1) // 16, seed=42)
    ids = torch.tensor(np.stack([train[start : start + 17] for start in starts]).astype(np.int64))
    h = model.hidden_states(ids[:, :-1]).flatten(0, 1)
    logits = model.token_logits(model.hash_decoder(h, model.head_matrices()))
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def test_reported_numbers(quick):
    """The loss and the gradient norm of a step, printed and logged, are those of -log P(w) of its sequences."""
    done = ok('train.py', 'cfg.py', '--out_dir=b', *until(1), cwd=quick)
    model, _ = read_checkpoint(quick / 'b/ckpt.pt')  # of the initialization: the first learning rate is 0
    loss = loss_of_step(model, quick, 0)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    logged = events(quick, 'b')[0]
    assert logged['loss'] == pytest.approx(loss.item(), rel=1e-5)
    assert logged['grad_norm'] == pytest.approx(norm, rel=1e-4)
    line = f'step 1/1: loss {loss:.4f}, lr 0.00e+00, norm {norm:.2f}, '
    assert line in done.stdout and f'validation loss {logged["val_loss"]:.4f}, ' in done.stdout


def test_updates(quick):
    """AdamW updates the weights with clipped gradients. E has its own learning rate; vectors have no weight decay."""
    args = ('train.py', 'cfg.py', '--out_dir=b', '--warmup_steps=1', '--weight_decay=0.5', '--beta1=0.7', '--beta2=0.8')
    args += ('--grad_clip=0.1', '--embedding_lr_mult=3.0')
    ok(*args, *until(1), cwd=quick)
    model, _ = read_checkpoint(quick / 'b/ckpt.pt')
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    ok(*args, *until(4), cwd=quick)
    E = model.embed.weight
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not E]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.AdamW(group, betas=(0.7, 0.8), weight_decay=0.5) for group in ([E], matrices)]
    optimizers.append(torch.optim.AdamW(vectors, betas=(0.7, 0.8), weight_decay=0))
    for step in range(4):
        model.zero_grad()
        loss_of_step(model, quick, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer, factor in zip(optimizers, (3, 1, 1), strict=True):
            optimizer.param_groups[0]['lr'] = factor * 5e-3 * (1 + math.cos(math.pi * (step - 1) / 23)) if step else 0
            optimizer.step()
    updated = weights(quick, 'b')['model']
    for name, p in model.named_parameters():
        if name != 'encoder.gate.2.bias':  # its gradient is rounding: softmax ignores it
            change = updated[name] - initial[name]
            assert (p - updated[name]).norm() < 0.01 * change.norm(), name


# a fork of model.py: dropout, and a loss of its own
FORK = """
import torch.nn.functional as F
from model import MHF, Block
forward = Block.forward
Block.forward = lambda self, *args: F.dropout(forward(self, *args), 0.2, self.training)
MHF.loss_per_position = lambda self, o, y: 3 * self.negative_log_likelihood(o, y)
"""


def test_validation_is_the_normalized_likelihood(quick):
    """
    val_nats and val_bpb are the negative log-likelihood of all held-out tokens under the model, without dropout;
    val_loss is the trained loss.
    """
    ok('train.py', 'cfg.py', '--out_dir=a', *until(3), cwd=quick, patch=FORK)
    model, _ = read_checkpoint(quick / 'a/ckpt.pt')
    assert not model.training
    val = Bins(quick / 'bins', 'val')
    ids = torch.from_numpy(val[:].astype(np.int64))
    total = 0.0
    for b in range(0, len(ids) - 1, 16):
        row = ids[b : b + 17]
        total -= model.log_probs(row[None, :-1])[0].gather(1, row[1:, None]).sum().item()
    last = events(quick, 'a')[-1]
    assert last['val_nats'] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert last['val_loss'] == pytest.approx(3 * last['val_nats'], rel=1e-6)
    assert last['val_bpb'] == pytest.approx(total / math.log(2) / val.bytes, rel=1e-5)


def test_informed_signatures(quick):
    """A new model counts tokens once; several processes and exports use its table and ranges."""
    data = ('cfg.py', '--data_format=ids', '--data_dir=ids', *until(6))
    ok('prepare.py', *data[:3], cwd=quick)
    ok('train.py', *data, '--counts_from=bins', '--out_dir=a', cwd=quick)  # the same text, as signatures
    ok('train.py', 'cfg.py', *until(6), '--counts_from=train', '--out_dir=own', cwd=quick)  # shards of other signatures
    assert_same(weights(quick, 'own')['model'], weights(quick, 'a')['model'])
    args = ('--counts_from=ids', '--out_dir=c', '--micro_batch_size=4')
    done = succeed(ranks(2, 'train.py', *data, *args, cwd=quick))
    assert ['tokens counted' in rank.stdout for rank in done] == [True, False]
    ok('mhf.released', 'a', 'exported', cwd=quick)
    model = load(str(quick / 'a')).model
    assert [len(ranges) > 5 for ranges in model.config.frequency_ranges] == [True] * 3
    for source in ('c', 'exported'):
        other = load(str(quick / source)).model
        assert other.config.frequency_ranges == model.config.frequency_ranges
        assert_same(other.signatures, model.signatures)


def test_a_diverged_run_resumes_as_advised(quick):
    """A run that diverges stops without saving its weights, and resumes with a smaller learning rate."""
    args = ('train.py', 'cfg.py', '--out_dir=b', '--warmup_steps=1', *until(6))
    ok(*args, '--max_steps=1', cwd=quick)
    broken = ('--learning_rate=1e30', '--grad_clip=0', '--eval_interval=1')
    refused(*args, *broken, says='step 2: val_loss=', cwd=quick)
    ok(*args, cwd=quick)
    assert weights(quick, 'b')['step'] == 6


# -----------------------------------------------------------------------------
# resuming


@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
def test_resume_is_exact(quick, compiled):
    """A run stopped twice, within a step and an epoch, ends with weights, optimizer and log of an uninterrupted one."""
    num_sequences = (len(Bins(quick / 'bins', 'train')) - 1) // 16
    # the steps whose batches contain the end of the first and of the second of three epochs
    assert 3 < 24 * 8 / num_sequences and num_sequences % 8
    borders = [num_sequences // 8, 2 * num_sequences // 8]
    uninterrupted = 'out'
    args = ['cfg.py', '--out_dir=b']
    if compiled:
        if not shutil.which(os.environ.get('CXX', 'g++')):
            pytest.skip('torch.compile needs a C++ compiler')
        borders.pop()
        uninterrupted = 'a'
        args += ['--compile=True', '--num_layers=1', *until(borders[0] + 3)]
        ok('train.py', *args, '--out_dir=a', cwd=quick)
    log = quick / 'b/log.jsonl'
    first = 0
    for border in borders:
        # during the first of two micro-batches
        stop = in_forward(2 * (border - first) + 1, 'os.kill(os.getpid(), signal.SIGTERM)')
        done = run('train.py', *args, cwd=quick, patch=stop)
        first = border + 1
        assert done.returncode == 143 and weights(quick, 'b')['step'] == first, done.stderr[-3000:]
        before = log.read_text()
        # a crash leaves steps after the checkpoint, a damaged and an incomplete line
        log.write_text(before + '{"step": 999, "loss": 9.0}\n\0\n{"step": 1, "lo')
    ok('train.py', *args, cwd=quick)
    assert log.read_text().startswith(before)
    assert steps(quick, 'b') == steps(quick, uninterrupted)
    a = weights(quick, uninterrupted)
    b = weights(quick, 'b')
    for key in ('model', 'optimizer', 'step', 'best_val_loss'):
        assert_same(a[key], b[key])


# a fork of model.py: dropout, a buffer that changes in training, tied parameters, and parameters that no step uses
STATEFUL = """
import torch, torch.nn.functional as F
from model import MHF, Block
def new_init(self, *args, init=Block.__init__):
    init(self, *args)
    self.self_attn.k_norm.weight = self.self_attn.q_norm.weight
    self.unused = torch.nn.Parameter(torch.ones(2, 2))
    self.unused_vector = torch.nn.Parameter(torch.ones(2))
    self.register_buffer('mean', torch.zeros(()))
def new_forward(self, x, *args, forward=Block.forward):
    if self.training:
        self.mean.lerp_(x.detach().float().mean(), 0.1)
    return F.dropout(forward(self, x, *args), 0.2, self.training)
Block.__init__ = new_init
Block.forward = new_forward
"""


@pytest.mark.parametrize('number', [1, 4])  # the sum of two ranks does not depend on their order
def test_a_fork_resumes_exactly(quick, number):
    """
    A model with dropout, a running mean and tied parameters, resumed, ends with the bits of an uninterrupted run. A
    parameter that no step uses has a zero gradient on any number of processes: weight decay reduces matrices only.
    """
    args = ('train.py', 'cfg.py', '--micro_batch_size=1', '--lr_decay_steps=24')
    for out, last in (('a', 4), ('b', 2), ('b', 4)):
        succeed(ranks(number, *args, f'--out_dir={out}', f'--max_steps={last}', cwd=quick, patch=STATEFUL))
    a = weights(quick, 'a')
    b = weights(quick, 'b')
    for key in ('model', 'optimizer'):
        assert_same(a[key], b[key])
    tied = {f'layers.{i}.self_attn.k_norm.weight' for i in (0, 1)}
    assert tied < a['model'].keys() and not tied & a['optimizer'].keys()
    assert abs(a['model']['layers.1.mean']) > 0
    assert (a['model']['layers.1.unused'] < 1).all() and (a['model']['layers.1.unused_vector'] == 1).all()


def test_what_a_resumed_run_may_change(quick):
    """A resumed run applies new settings, also of the optimizer. A finished run changes nothing."""
    best = Path('out/ckpt_best.pt')
    before = snapshot(quick)
    assert 'out: step 24 of 24' in ok('train.py', 'cfg.py', cwd=quick).stdout
    assert snapshot(quick) == before
    a = weights(quick)['model']
    args = ('train.py', 'cfg.py', '--max_steps=25')
    free = ('--micro_batch_size=8', '--learning_rate=100', '--warmup_steps=1', '--grad_clip=0.5', '--beta2=0.9')
    free += ('--weight_decay=0.2', '--embedding_lr_mult=0.0', '--dtype=bfloat16', '--activation_checkpointing')
    opened = "open(f'{args[0].activation_checkpointing} {torch.is_autocast_enabled(\"cpu\")}', 'w').close()"
    done = ok(*args, *free, cwd=quick, patch=in_forward(1, opened))
    assert (quick / 'True True').exists()
    # the validation loss rises
    assert snapshot(quick)[str(best)] == before[str(best)]
    assert weights(quick)['best_val_loss'] == torch.load(quick / best)['best_val_loss']
    assert re.search(r'changed settings: .*beta2=0.9 \(was 0.999\), .*embedding_lr_mult=0.0 \(was 1.0\)', done.stdout)
    b = weights(quick)['model']
    assert [name for name in a if torch.equal(a[name], b[name])] == ['embed.weight']
    # without --dtype the precision of the checkpoint
    assert 'cpu, bfloat16' in ok(*args, '--max_steps=26', '--dtype=None', cwd=quick).stdout


def test_what_a_resumed_run_may_not_change(quick):
    """
    A run with other data or another setting that decides the model, its data or its loss is refused, with both values;
    nothing is written.
    """
    path = quick / 'bins/meta.json'
    meta = json.loads(path.read_text())
    for split in ('val', 'train'):
        meta[split][0]['sha256'] = 'of other documents'
    path.write_text(json.dumps(meta))
    fixed = dict(seed=7, batch_size=4, block_size=8, loss='product', unfrozen_end_layers=1, num_layers=3, bottleneck=8)
    flags = [f'--{k}={v}' for k, v in fixed.items()]
    before = snapshot(quick)
    line = refused('train.py', 'cfg.py', '--max_steps=25', *flags, says='choose another --out_dir', cwd=quick)
    for key, value in {**fixed, 'train_sha256': r'\w{64}', 'val_sha256': r'\w{64}'}.items():
        assert re.search(rf'\b{key}={value} \(was \w+\)', line), key
    assert snapshot(quick) == before


def test_from_weights_of_another_run(quick):
    """
    init_from a model takes its weights and architecture, but not its loss, and prints where they differ from the
    settings. The same command resumes.
    """
    (quick / 'three.py').write_text('num_layers = 3\nnum_kv_heads = 2\nnum_buckets = 512\nloss = "product"\n')
    args = ['--out_dir=b', '--warmup_steps=0', '--learning_rate=1e-9', '--lr_decay_steps=9', '--eval_interval=1']
    command = ('train.py', 'cfg.py', 'three.py', *args, '--init_from=out')
    assert 'num_layers=2 (was 3)' in ok(*command, '--max_steps=2', cwd=quick).stdout
    assert events(quick, 'b')[-1]['val_nats'] == pytest.approx(events(quick)[-1]['val_nats'], rel=1e-4)
    shutil.move(quick / 'out', quick / 'moved')  # a resumed run does not read it
    assert 'resumed at step 2' in ok(*command, '--max_steps=3', cwd=quick).stdout
    state = weights(quick, 'b')
    assert state['identity'] == weights(quick, 'moved')['identity'] | dict(init_from='out', loss='product')


SLEEP = "open('slow', 'w').close(); import time; time.sleep(60)"
SLOW_SETUP = f'from mhf import checkpoint\ndef slow(*_): {SLEEP}\ncheckpoint.open_start = slow\n'


@pytest.mark.parametrize('slow', [in_forward(20, SLEEP), SLOW_SETUP])
def test_one_run_in_an_out_dir(quick, slow):
    """A run blocks its out_dir from its setup on. A second one ends in one line; a killed run blocks no other."""
    command = ('train.py', 'cfg.py', '--out_dir=b')
    first = started(*command, cwd=quick, wait_for='slow', patch=slow)
    before = snapshot(quick)
    refused(*command, says='b/.train.lock', cwd=quick)
    assert snapshot(quick) == before
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert ('resumed at step 8' in ok(*command, cwd=quick).stdout) == (slow != SLOW_SETUP)


@pytest.mark.parametrize('is_new', [True, False])
def test_a_run_keeps_the_log_of_another(quick, is_new):
    """
    A new run in the out_dir of a run whose checkpoints were moved away keeps the other log under another name, and a
    resumed run keeps a log that train.py did not write.
    """
    path = quick / 'out/log.jsonl'
    log = '{"step": 0, "loss": 9}\n' + path.read_text() if is_new else '{"step": 900, "loss": 1}\n'
    path.write_text(log)
    for checkpoint in (quick / 'out').glob('*.pt') if is_new else ():
        checkpoint.unlink()
    ok('train.py', 'cfg.py', *(until(1) if is_new else until(25)), '--warmup_steps=0', cwd=quick)
    (other,) = (quick / 'out').glob('log_*.jsonl')
    assert other.read_text() == log and len(steps(quick)) == 1


# -----------------------------------------------------------------------------
# signals and kills


def test_a_signal_to_one_of_two_ranks(quick):
    """If one rank receives a signal, even twice, both finish the step and end with its checkpoint."""
    wait = "while not os.path.exists('go'): time.sleep(0.02)"
    slow = 'import time\n' + in_forward(9, f"open(f'slow{{os.getpid()}}', 'w').close()\n            {wait}")
    args = ('cfg.py', '--out_dir=b', '--eval_interval=24', '--micro_batch_size=2')
    processes = ranks(2, 'train.py', *args, cwd=quick, patch=slow)
    while len(list(quick.glob('slow*'))) < 2 and processes[0].returncode is None:
        time.sleep(0.02)
    for _ in range(2):
        os.kill(processes[1].pid, signal.SIGINT)
        time.sleep(0.5)
    (quick / 'go').touch()
    assert [process.communicate().returncode for process in processes] == [143, 130]
    assert weights(quick, 'b')['step'] == steps(quick, 'b')[-1]['step'] == 4


@pytest.mark.parametrize('start, code', [('', 129), ('signal.signal(signal.SIGHUP, signal.SIG_IGN)', 0)])
def test_a_signal_without_output(quick, start, code):
    """
    After a signal a run saves a checkpoint, even if the reader of its output has ended. A signal that was ignored at
    the start (nohup) does not stop it, nor does the end of the reader.
    """
    closed = 'r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r); '
    patch = in_forward(7, f'{closed}os.kill(os.getpid(), signal.SIGHUP)') + start
    done = run('train.py', 'cfg.py', '--out_dir=b', '--log_interval=1', *until(6), cwd=quick, patch=patch)
    assert done.returncode == code and weights(quick, 'b')['step'] == (4 if code else 6)


# functions of training, validation and writing, and the largest number of the call that kills the run
MOMENTS = [('[(MHF, "forward")]', 40), ('[(MHF, "token_losses")]', 20), ('[(os, "fsync"), (os, "replace")]', 20)]


def test_kill_train(quick):
    """A run killed at random moments of training, validation and writing ends with the bits of an uninterrupted one."""
    command = ('train.py', 'cfg.py', '--eval_interval=2', '--out_dir=killed')
    kill = 'os.kill(os.getpid(), signal.SIGKILL)'
    for functions, most in MOMENTS:
        n = random.randint(1, most)
        print(functions, n)
        done = run(*command, cwd=quick, patch=AT_CALL.format(n=n, do=kill, functions=functions))
        assert done.returncode in (0, -signal.SIGKILL), (n, done.stderr)  # 0: it ended before the n-th call
    ok(*command, cwd=quick)
    for key in ('model', 'optimizer', 'step'):
        assert_same(weights(quick, 'killed')[key], weights(quick)[key])
    assert steps(quick, 'killed') == steps(quick) and not list((quick / 'killed').glob('*.tmp'))


# -----------------------------------------------------------------------------
# several processes


def test_any_world_size_sees_the_same_batches(quick):
    """Runs with any number of processes and any micro_batch_size train on the same data, also resumed."""
    short = ('train.py', 'cfg.py', *until(4), '--eval_interval=4')
    ok(*short, '--out_dir=micro', '--micro_batch_size=2', cwd=quick)
    val = {key: value for key, value in events(quick, 'micro')[-1].items() if key.startswith('val_')}
    more = ('train.py', 'cfg.py', *until(8), '--micro_batch_size=2', '--out_dir=micro')
    seed = in_forward(3, "open(f'seed_{torch.initial_seed()}', 'w').close()")
    succeed([*ranks(2, *short, '--out_dir=two', cwd=quick, patch=seed), *ranks(4, *more, cwd=quick)])
    # the ranks draw different random numbers
    assert sorted(path.name for path in quick.glob('seed_*')) == ['seed_44', 'seed_45']
    for out in ('micro', 'two'):
        for step, alone in zip(steps(quick, out)[:4], steps(quick), strict=False):
            assert step == pytest.approx(alone, rel=1e-4), out
        assert {key: events(quick, out)[3][key] for key in val} == pytest.approx(val, rel=1e-4), out
    resumed = steps(quick, 'micro')
    alone = steps(quick)[:8]
    assert [s['step'] for s in resumed] == [s['step'] for s in alone]
    assert [s['loss'] for s in resumed] == pytest.approx([s['loss'] for s in alone], abs=1e-3)


def test_ranks_must_agree(quick, tmp_path):
    """Ranks with another checkpoint or torch end; each machine prints a line with the differences."""
    other = shutil.copytree(quick, tmp_path / 'other')
    torch.save(weights(other) | dict(step=16), other / 'out/ckpt.pt')
    before = snapshot(tmp_path)
    args = ('train.py', 'cfg.py', '--max_steps=30', '--lr_decay_steps=24')
    variables = rank_variables(2)
    first = Forked(*args, cwd=quick, RANK='0', **variables)
    second = Forked(*args, cwd=other, patch="import torch; torch.__version__ = '2.0.1'", RANK='1', **variables)
    for process in (first, second):
        done = process.communicate()
        errors = done.stderr
        assert done.returncode == 1 and 'error: rank 1 has ' in errors and errors.count('\n') == 1, errors
        assert 'checkpoint step=16 (rank 0: 24)' in errors and 'torch=2.0.1 (rank 0: ' in errors
    assert snapshot(tmp_path) == before
