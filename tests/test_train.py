"""train.py: the loop, resuming, processes, signals and kills."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import (
    REPO,
    Forked,
    assert_same,
    events,
    ok,
    rank_variables,
    ranks,
    real_documents,
    refused,
    run,
    run_ranks,
    snapshot,
    started,
    steps,
    wait_all,
    weights,
    write_jsonl,
)

from mhf.checkpoint import find_checkpoint, load, read_checkpoint
from mhf.data import Bins, block_indices
from mhf.runtime import keep_freed_memory

# a patch that delays every write of a checkpoint
SLOW_SAVE = """
import time
from mhf import checkpoint
save = checkpoint.save
checkpoint.save = lambda *args: (time.sleep({seconds}), save(*args))
"""
# a patch that executes {do} in the {n}-th forward pass of training
IN_FORWARD = """
import os, signal, torch
from model import MHF
passes = []
forward = MHF.forward
@torch.compiler.disable
def counted(self, x, y):
    passes.append(len(passes))
    if len(passes) == {n}:
        {do}
    return forward(self, x, y)
MHF.forward = counted
"""


def until(step):
    """Returns the flags of a run that ends at `step`, with the learning rates of the complete run."""
    return f'--max_steps={step}', '--lr_decay_steps=24'


# -----------------------------------------------------------------------------
# learning


def test_training_learns_and_reports(few):
    """
    A run reduces its loss, logs every step and validation, and writes checkpoints. The learning rate rises linearly
    from 0 to the maximum, then falls to 0 along a cosine.
    """
    log = events(few)
    train = [e for e in log if 'loss' in e]
    val = [e for e in log if 'val_loss' in e]
    assert [e['step'] for e in train] == list(range(1, 25)) and [e['step'] for e in val] == [8, 16, 24]
    assert set(train[0]) == {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s'}
    assert train[-1]['tokens'] == 24 * 8 * 16
    assert train[-1]['loss'] < train[0]['loss'] - 1 and val[2]['val_loss'] < train[0]['loss'] - 0.5
    # at initialization all tokens are about equally likely
    assert abs(train[0]['loss'] - math.log(32768)) < 0.5
    assert all(e['val_loss'] == e['val_nats'] for e in val)
    expected = [1e-2 * t / 4 if t < 4 else 1e-2 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 20)) for t in range(24)]
    assert [e['lr'] for e in train] == pytest.approx(expected, abs=1e-15) and train[0]['lr'] == 0
    ckpt = weights(few)
    assert ckpt['step'] == 24 and ckpt['settings']['num_buckets'] == 256
    assert not [k for k in ckpt['model'] if 'module' in k or '_orig_mod' in k]
    assert (few / 'out/ckpt_best.pt').exists()


# prints the step of each event that Weights & Biases receives
WANDB = """
import sys, types
run = types.SimpleNamespace(log=lambda event, step: print('logged step', step))
sys.modules['wandb'] = types.SimpleNamespace(init=lambda config: run)
"""


def test_the_product_loss_in_a_redirected_log(quick):
    """
    A file has a line every log_interval steps and no progress bar, Weights & Biases every step and validation. The
    product loss is a sum over H ids.
    """
    args = ('--out_dir=b', '--loss=product', '--log_interval=2', '--wandb', *until(5))
    done = ok('train.py', 'cfg.py', *args, cwd=quick, patch=WANDB)
    lines = re.findall(r'^step (\d)/5: loss [\d.]+, lr \S+, norm [\d.]+, \d+ ms, [\d,]+ tokens/s$', done.stdout, re.M)
    assert lines == ['2', '4', '5'] and '%|' not in done.stdout + done.stderr
    assert re.findall(r'logged step (\d)', done.stdout) == ['1', '2', '3', '4', '5', '5']
    assert 'P(w) will be overconfident' in done.stdout and '--loss=exact' in done.stdout
    # at initialization all buckets are equally likely
    assert abs(steps(quick, 'b')[0]['loss'] - 3 * math.log(256)) < 0.5
    last = events(quick, 'b')[-1]
    assert last['val_loss'] > last['val_nats'] + 3


def held_out_nats(folder, out='out'):
    """Returns -log P of the held-out tokens of a folder, in nats per token, by log_probs of a run's model."""
    model, _ = read_checkpoint(folder / out / 'ckpt.pt')
    ids = torch.from_numpy(Bins(folder / 'bins', 'val')[:].astype(np.int64))
    assert not model.training
    total = 0.0
    for b in range(0, len(ids) - 1, 16):
        row = ids[b : b + 17]
        total -= model.log_probs(row[None, :-1])[0].gather(1, row[1:, None]).sum().item()
    return total / (len(ids) - 1)


def test_validation_is_the_normalized_likelihood(few):
    """val_nats and val_bpb are the negative log-likelihood of all held-out tokens under the model."""
    last = events(few)[-1]
    val = Bins(few / 'bins', 'val')
    nats = held_out_nats(few)
    assert last['val_loss'] == last['val_nats'] == pytest.approx(nats, rel=1e-5)
    assert last['val_bpb'] == pytest.approx(nats * (len(val) - 1) / math.log(2) / val.bytes, rel=1e-5)


# a fork of model.py: dropout, and a loss of its own
FORK = """
import torch.nn.functional as F
from model import MHF, Block, MHFConfig
forward = Block.forward
Block.forward = lambda self, *args: F.dropout(forward(self, *args), 0.2, self.training)
MHFConfig.__post_init__ = lambda self: None
def loss(self, o, y, nats=None):
    return {'third': 3}[self.config.loss] * self.negative_log_likelihood(o, y)
MHF.loss_per_position = loss
"""


def test_a_fork_with_dropout_and_another_loss(quick):
    """Validation is without dropout; it reports the trained loss, and bits per byte of P(w)."""
    ok('train.py', 'cfg.py', '--loss=third', '--out_dir=a', *until(3), cwd=quick, patch=FORK)
    a = weights(quick, 'a')
    torch.save(a | dict(identity=a['identity'] | dict(loss='exact')), quick / 'a/ckpt.pt')
    event = events(quick, 'a')[-1]
    assert event['val_nats'] == pytest.approx(held_out_nats(quick, 'a'), rel=1e-5)
    assert event['val_loss'] == pytest.approx(3 * event['val_nats'], rel=1e-6)


def test_standard(quick):
    """The Standard model trains, and sample.py reads its checkpoint."""
    ok('prepare.py', 'cfg.py', '--num_hashes=0', '--data_dir=ids', cwd=quick)
    args = ('--num_hashes=0', '--data_dir=ids', '--out_dir=std', *until(12), '--eval_interval=12')
    ok('train.py', 'cfg.py', *args, cwd=quick)
    last = events(quick, 'std')[-1]
    assert last['val_loss'] == last['val_nats'] < math.log(32768) - 1
    assert 'std/ckpt.pt' in ok('sample.py', 'cfg.py', '--out_dir=std', cwd=quick).stderr


def test_both_data_formats_train_alike(quick):
    """
    Bins of token ids and of signatures give the same bits, also for a model with another table; the first batch has the
    blocks of block_indices.
    """
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', cwd=quick)
    ids = ('cfg.py', '--data_format=ids', '--data_dir=ids')
    save_targets = IN_FORWARD.format(n=1, do="torch.save(y, 'targets.pt')")
    ok('train.py', *ids, '--out_dir=b', cwd=quick, patch=save_targets)
    tokens = np.load(quick / 'ids/train_000000.bin')
    first = block_indices(0, 8, (len(tokens) - 1) // 16, seed=42)[:4]
    expected = np.stack([tokens[16 * b + 1 : 16 * b + 17] for b in first])
    assert_same(torch.load(quick / 'targets.pt'), torch.tensor(expected, dtype=torch.int64))
    assert steps(quick, 'b') == steps(quick)
    for key in ('model', 'optimizer', 'best_val_loss'):
        assert_same(weights(quick, 'b')[key], weights(quick)[key])
    ok('prepare.py', 'cfg.py', '--single_id', '--data_dir=single', cwd=quick)
    signatures = ('cfg.py', '--data_dir=bins')
    counts = ('--counts_from=train', '--num_hashes=4')
    for k, (data, model) in enumerate([(signatures, counts), (('cfg.py', '--data_dir=single'), ('--single_id',))]):
        for out, args in ((f's{k}', data), (f'i{k}', ids)):
            ok('train.py', *args, *model, f'--out_dir={out}', *until(3), cwd=quick)
        losses = [[step['loss'] for step in steps(quick, f'{format}{k}')] for format in 'si']
        # where ids share a signature, another of them is the target, and sums are rounded in another order
        assert losses[0] == (losses[1] if model == counts else pytest.approx(losses[1], rel=1e-6))
    says = 'prepare it with --data_format=ids'
    refused('train.py', 'cfg.py', '--data_dir=single', '--out_dir=c', says=says, cwd=quick)


def test_informed_signatures(quick):
    """A new model counts tokens once; a resume, other weights' runs and exports use its table and ranges as stored."""
    data = ('cfg.py', '--data_format=ids', '--data_dir=ids', *until(6))
    ok('prepare.py', *data[:3], cwd=quick)
    args = (*data, '--counts_from=ids')
    done = ok('train.py', *args, '--out_dir=a', cwd=quick)
    assert '0.0% of the training tokens in ids never occurred' not in done.stdout
    ok('train.py', *data, '--counts_from=train', '--out_dir=own', cwd=quick)
    assert_same(weights(quick, 'own')['model'], weights(quick, 'a')['model'])
    stop = IN_FORWARD.format(n=5, do='os.kill(os.getpid(), signal.SIGTERM)')
    assert run('train.py', *args, '--out_dir=b', cwd=quick, patch=stop).returncode == 143
    refused('train.py', *data, '--out_dir=b', says='counts_from= (was ids)', cwd=quick)
    ok('train.py', *args, '--out_dir=b', cwd=quick)
    assert_same(weights(quick, 'b')['model'], weights(quick, 'a')['model'])
    for code, _, errors in run_ranks(2, 'train.py', *args, '--out_dir=c', '--micro_batch_size=4', cwd=quick):
        assert code == 0, errors
    wrong = ('--counts_from=no', '--out_dir=e', '--micro_batch_size=4')
    for code, _, errors in run_ranks(2, 'train.py', *data, *wrong, cwd=quick):
        assert code == 1 and re.fullmatch(r'.*error: counts_from=no: no prepared data.*\n', errors), errors
    ok('train.py', *data, '--init_from=a', '--out_dir=d', cwd=quick)
    ok('mhf.export', 'a', 'exported', cwd=quick)
    model = load(str(quick / 'a')).model
    assert [len(ranges) > 5 for ranges in model.config.frequency_ranges] == [True] * 3
    for source in ('c', 'd', 'exported'):
        other = load(str(quick / source)).model
        assert other.config.frequency_ranges == model.config.frequency_ranges
        assert_same(other.signatures, model.signatures)
    # as written by another program: the model's tokenizer can still be named
    tokenizer_json = quick / 'exported/tokenizer.json'
    tokenizer_json.write_text(json.dumps(json.loads(tokenizer_json.read_text())))
    load(str(quick / 'exported'), 'mistral')


def test_a_diverged_run_resumes_as_advised(quick):
    """A run that diverges stops without saving its weights, and resumes with a smaller learning rate."""
    args = ('train.py', 'cfg.py', '--out_dir=b', '--warmup_steps=1', *until(6))
    ok(*args, '--max_steps=1', cwd=quick)
    broken = ('--learning_rate=1e30', '--grad_clip=0', '--micro_batch_size=4')
    for eval_interval, number in ((1, 'step 2: val_loss'), (24, 'step 3: loss')):
        message = rf'error: {number}=(nan|inf); rerun with a smaller learning_rate'
        for code, _, errors in run_ranks(2, *args, *broken, f'--eval_interval={eval_interval}', cwd=quick):
            assert code == 1 and re.search(message, errors), errors
    ok(*args, cwd=quick)
    assert weights(quick, 'b')['step'] == 6


# -----------------------------------------------------------------------------
# resuming


@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
def test_resume_is_exact(quick, compiled):
    """A run stopped twice, within a step and an epoch, ends with weights, optimizer and log of an uninterrupted one."""
    blocks = (Bins(quick / 'bins', 'train').tokens - 1) // 16
    # the steps whose batches contain the end of the first and of the second of three epochs
    assert 3 < 24 * 8 / blocks and blocks % 8
    borders = [blocks // 8, 2 * blocks // 8]
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
        stop = IN_FORWARD.format(n=2 * (border - first) + 1, do='os.kill(os.getpid(), signal.SIGTERM)')
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
    self.register_buffer('mean', torch.zeros(()))
def new_forward(self, x, *args, forward=Block.forward):
    if self.training:
        self.mean.lerp_(x.detach().float().mean(), 0.1)
    return F.dropout(forward(self, x, *args), 0.2, self.training)
Block.__init__ = new_init
Block.forward = new_forward
"""


@pytest.mark.parametrize('number', [1, 2])
def test_a_fork_resumes_exactly(quick, number):
    """
    A model with dropout, a running mean and tied parameters, resumed, ends with the bits of an uninterrupted run. A
    parameter that no step uses has a zero gradient on any number of processes.
    """
    args = ('train.py', 'cfg.py', '--micro_batch_size=2', '--lr_decay_steps=24')
    for out, last in (('a', 4), ('b', 2), ('b', 4)):
        done = run_ranks(number, *args, f'--out_dir={out}', f'--max_steps={last}', cwd=quick, patch=STATEFUL)
        assert [code for code, *_ in done] == number * [0], done
    a = weights(quick, 'a')
    b = weights(quick, 'b')
    for key in ('model', 'optimizer'):
        assert_same(a[key], b[key])
    tied = {f'layers.{i}.self_attn.k_norm.weight' for i in (0, 1)}
    assert tied < a['model'].keys() and not tied & a['optimizer'].keys()
    assert 0 < abs(a['model']['layers.1.mean']) and (a['model']['layers.1.unused'] < 1).all()


def change_documents(folder, split):
    """Changes the fingerprint of a split of the bins."""
    path = folder / 'bins/000000.json'
    unit = json.loads(path.read_text())
    unit[split]['sha256'] = 'of other documents'
    path.write_text(json.dumps(unit))


# writes the groups of the optimizer
GROUPS = """
import json, torch
class Recorded(torch.optim.AdamW):
    def step(self):
        groups = [g | dict(params=[list(p.shape) for p in g['params']]) for g in self.param_groups]
        with open('groups.json', 'w') as f:
            json.dump(groups, f)
        return super().step()
torch.optim.AdamW = Recorded
"""


def test_what_a_resumed_run_may_change(quick):
    """A resumed run applies new settings, also of the optimizer; vectors have no weight decay."""
    args = ('train.py', 'cfg.py', '--max_steps=25')
    free = ('--micro_batch_size=8', '--learning_rate=1e-3', '--warmup_steps=1', '--grad_clip=0.5', '--beta2=0.9')
    free += ('--weight_decay=0.2', '--embedding_lr_mult=2.0', '--dtype=bfloat16', '--activation_checkpointing')
    done = ok(*args, *free, '--eval_interval=1', cwd=quick, patch=GROUPS)
    assert re.search(r'changed settings: .*beta2=0.9 \(was 0.999\), .*embedding_lr_mult=2.0 \(was 1.0\)', done.stdout)
    groups = json.loads((quick / 'groups.json').read_text())
    assert [group['weight_decay'] for group in groups] == [0.2, 0.2, 0]
    assert [group['betas'] for group in groups] == 3 * [[0.9, 0.9]]
    assert [group['lr_mult'] for group in groups] == [2, 1, 1] and groups[0]['lr'] == 2 * groups[1]['lr']
    parameters = list(read_checkpoint(quick / 'out/ckpt.pt')[0].parameters())
    assert groups[0]['params'] == [[3 * 256, 32]]
    assert {len(shape) for shape in groups[1]['params']} == {2} and {len(shape) for shape in groups[2]['params']} == {1}
    assert sum(len(group['params']) for group in groups) == len(parameters)
    # without --dtype the precision of the checkpoint
    assert 'cpu, bfloat16' in ok(*args, '--max_steps=26', '--dtype=None', cwd=quick).stdout


def test_what_a_resumed_run_may_not_change(quick):
    """
    A run with other data or another setting that decides the model, its data or its loss is refused, with both values;
    nothing is written.
    """
    fixed = dict(seed=7, batch_size=4, block_size=8, loss='product', unfrozen_end_layers=1, num_layers=3, bottleneck=8)
    args = ('train.py', 'cfg.py', '--max_steps=25')
    before = snapshot(quick)
    line = refused(*args, *[f'--{k}={v}' for k, v in fixed.items()], says='choose another --out_dir', cwd=quick)
    for key, value in fixed.items():
        assert re.search(rf'\b{key}={value} \(was \w+\)', line), key
    assert snapshot(quick) == before
    for split in ('val', 'train'):
        change_documents(quick, split)
        before = snapshot(quick)
        line = refused(*args, says='choose another --out_dir', cwd=quick)
        assert re.search(rf'{split}_sha256=\w{{64}} \(was \w{{64}}\)', line)
        assert snapshot(quick) == before


def test_a_finished_run_is_one_line(quick):
    """The command of a finished run prints one line and changes nothing."""
    before = snapshot(quick)
    line = 'already at step 24 of max_steps=24; raise --max_steps, or choose another --out_dir for a new run\n'
    assert ok('train.py', 'cfg.py', cwd=quick).stdout == line
    assert snapshot(quick) == before


def test_from_weights_of_another_run(quick):
    """
    init_from a model takes its weights and architecture, and prints where they differ from the settings. The same
    command resumes, also after a signal.
    """
    (quick / 'three.py').write_text('num_layers = 3\nnum_kv_heads = 2\nnum_buckets = 512\n')
    args = ['--out_dir=b', '--warmup_steps=0', '--learning_rate=1e-9', '--lr_decay_steps=9', '--eval_interval=1']
    command = ('train.py', 'cfg.py', 'three.py', *args, '--init_from=out')
    stop = IN_FORWARD.format(n=3, do='os.kill(os.getpid(), signal.SIGINT)')
    stopped = run(*command, cwd=quick, patch=stop)
    assert stopped.returncode == 130 and 'Traceback' not in stopped.stderr
    assert 'stopped by signal 2 at step 2; rerun the same command' in stopped.stderr
    differing = (
        'num_buckets=256 (the setting is 512), num_kv_heads=1 (the setting is 2), num_layers=2 (the setting is 3)'
    )
    assert f'model: out, with another architecture: {differing}\n' in stopped.stdout
    assert events(quick, 'b')[-1]['val_loss'] == pytest.approx(events(quick)[-1]['val_loss'], rel=1e-4)
    shutil.move(quick / 'out', quick / 'moved')  # a resumed run does not read it
    says = 'init_from=scratch (was out), num_buckets=512 (was 256), num_kv_heads=2 (was 1); undo the change'
    refused(*command, '--init_from=scratch', '--num_layers=2', says=says, cwd=quick)
    assert 'resumed at step 2' in ok(*command, '--max_steps=3', cwd=quick).stdout
    state = weights(quick, 'b')
    assert state['identity'] == weights(quick, 'moved')['identity'] | dict(init_from='out')


def test_one_run_in_an_out_dir(quick):
    """A second run in an out_dir ends in one line that names the first; a killed run does not block the next."""
    slow = IN_FORWARD.format(n=20, do="open('slow', 'w').close(); import time; time.sleep(60)")
    command = ('train.py', 'cfg.py', '--out_dir=b')
    first = started(*command, cwd=quick, wait_for='slow', patch=slow)
    before = snapshot(quick)
    refused(*command, says='b is in use by another process, which has locked b/.train.lock', cwd=quick)
    assert snapshot(quick) == before
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert 'resumed at step 8' in ok(*command, cwd=quick).stdout


# as %run of a notebook executes a script: its namespace and the traceback of its error remain
NOTEBOOK = """
import subprocess, sys
kept = []
def run(path, *args):
    sys.argv = [path, *args]
    kept.append(dict(__name__='__main__', __file__=path))
    try:
        exec(compile(open(path).read(), path, 'exec'), kept[-1])
    except BaseException as e:
        kept.append(e)
        print('ended by', type(e).__name__)
path, *args = sys.argv[1:]
run(path, *args, '--learning_rate=1e30', '--grad_clip=0', '--warmup_steps=1')
run(path, *args, '--max_steps=1')
run(path, *args, '--max_steps=2')
sys.exit(subprocess.run([sys.executable, path, *args, '--max_steps=3']).returncode)
"""


def test_a_run_in_a_notebook(quick):
    """A run releases its lock when it ends and when it fails, although its process continues."""
    (quick / 'notebook.py').write_text(NOTEBOOK)
    command = [sys.executable, 'notebook.py', REPO / 'train.py', 'cfg.py', '--out_dir=b', '--lr_decay_steps=24']
    done = subprocess.run(command, cwd=quick, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=REPO))
    assert done.returncode == 0 and done.stdout.count('ended by InputError') == 1, done.stdout + done.stderr
    assert weights(quick, 'b')['step'] == 3 and not (quick / 'b/.train.lock').exists()


def test_a_new_run_keeps_the_log_of_another(quick):
    """A new run in the out_dir of a run whose checkpoints were moved away keeps the other log under another name."""
    log = (quick / 'out/log.jsonl').read_text()
    for path in (quick / 'out').glob('*.pt'):
        path.unlink()
    ok('train.py', 'cfg.py', *until(1), '--warmup_steps=0', cwd=quick)
    assert (quick / 'out/log_1.jsonl').read_text() == log and len(steps(quick)) == 1


@pytest.mark.parametrize('result, calls', [(1, [-3, -1]), (0, [-3])])
def test_freed_memory_is_kept(monkeypatch, result, calls):
    """M_TRIM_THRESHOLD is not set if glibc refuses M_MMAP_THRESHOLD."""
    called = []
    mallopt = lambda parameter, value: called.append(parameter) or result  # noqa: E731
    monkeypatch.setattr('ctypes.CDLL', lambda _: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert called == calls


# -----------------------------------------------------------------------------
# signals and kills


@pytest.mark.parametrize('number, receivers', [(2, [0, 1]), (2, [1]), (1, [0])], ids=['echo', 'one', 'ctrl-c'])
def test_a_second_signal(quick, number, receivers):
    """All ranks save if a signal is repeated, or if one rank receives it. A second Ctrl-C ends a single process."""
    signum = signal.SIGTERM if number == 2 else signal.SIGINT
    # a slow step and a slow write
    slow = IN_FORWARD.format(n=9, do="open(f'slow{os.getpid()}', 'w').close(); time.sleep(3)")
    slow = f'import time\n{slow}\n{SLOW_SAVE.format(seconds=2)}'
    args = ('cfg.py', '--out_dir=b', '--eval_interval=24', f'--micro_batch_size={4 // number}')
    processes = ranks(number, 'train.py', *args, cwd=quick, patch=slow)
    while len(list(quick.glob('slow*'))) < number and processes[0].returncode is None:
        time.sleep(0.02)
    for _ in range(2):
        for rank in receivers:
            os.kill(processes[rank].pid, signum)
        time.sleep(0.8)
    processes[-1].communicate()
    # rank 1 waited for rank 0's write
    assert (quick / 'b/ckpt.pt').exists() == (number == 2)
    assert [code for code, *_ in wait_all(processes)] == ([143, 143] if number == 2 else [-signum])
    if number == 2:
        assert weights(quick, 'b')['step'] == steps(quick, 'b')[-1]['step'] < 24


@pytest.mark.parametrize('name, code', [('SIGHUP', 129), ('SIGUSR1', 138)])
def test_a_signal_without_output(quick, name, code):
    """After any of the signals that end a run it saves a checkpoint, even if the reader of its output has ended."""
    closed = 'r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r); '
    stop = IN_FORWARD.format(n=7, do=f'{closed}os.kill(os.getpid(), signal.{name})')
    done = run('train.py', 'cfg.py', '--out_dir=b', '--log_interval=1', cwd=quick, patch=stop)
    assert done.returncode == code and weights(quick, 'b')['step'] == 4


def test_an_ignored_signal_and_a_reader_that_ends(quick):
    """A signal that was ignored at the start (nohup) does not stop a run, nor does a reader of its output that ends."""
    closed = 'r, w = os.pipe(); os.dup2(w, 1); os.close(r); '
    patch = IN_FORWARD.format(n=3, do=f'{closed}os.kill(os.getpid(), signal.SIGHUP)')
    patch += 'signal.signal(signal.SIGHUP, signal.SIG_IGN)\n'
    assert not ok('train.py', 'cfg.py', '--out_dir=b', '--log_interval=1', *until(4), cwd=quick, patch=patch).stderr
    assert weights(quick, 'b')['step'] == 4


# kills the process at the {n}-th forward pass of training or of validation, or the {n}-th fsync or rename of a write
KILL = """
import os, signal, torch
from model import MHF
calls = []
def killing(real):
    @torch.compiler.disable
    def function(*args, **options):
        calls.append(real)
        if len(calls) == {n}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return function
for holder, name in {functions}:
    setattr(holder, name, killing(getattr(holder, name)))
"""
MOMENTS = {
    'training': ('[(MHF, "forward")]', 40),
    'validation': ('[(MHF, "token_losses")]', 20),
    'writing': ('[(os, "fsync"), (os, "replace")]', 20),
}


def test_kill_train(quick):
    """A run killed at random moments of training, validation and writing ends with the bits of an uninterrupted one."""
    command = ('train.py', 'cfg.py', '--eval_interval=2', '--out_dir=killed')
    kills = []
    while len(kills) < int(os.environ.get('MHF_KILLS', 3)):
        moment, (functions, most) = list(MOMENTS.items())[len(kills) % 3]
        n = random.randint(1, most)
        done = run(*command, cwd=quick, patch=KILL.format(n=n, functions=functions))
        if done.returncode == 0:  # it ended before the n-th call
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        path = find_checkpoint(quick / 'killed')
        step = read_checkpoint(path)[1].step if path else 0
        kills.append(f'call {n} of {moment}: the newest checkpoint is of step {step}')
    print(*kills, sep='\n')
    ok(*command, cwd=quick)
    for key in ('model', 'optimizer', 'step'):
        assert_same(weights(quick, 'killed')[key], weights(quick)[key])
    assert steps(quick, 'killed') == steps(quick) and not list((quick / 'killed').glob('*.tmp'))


# -----------------------------------------------------------------------------
# several processes


def test_any_world_size_sees_the_same_batches(quick):
    """Runs with any number of processes and machines and any micro_batch_size train on the same data, also resumed."""
    short = (str(REPO / 'train.py'), 'cfg.py', *until(4), '--eval_interval=4')
    ok(*short, '--out_dir=micro', '--micro_batch_size=2', cwd=quick)
    val = events(quick, 'micro')[-1]
    port = rank_variables(2)['MASTER_PORT']
    nodes = ('torch.distributed.run', '--nnodes=2', '--nproc_per_node=1', f'--master_port={port}')
    agents = [Forked(*nodes, f'--node_rank={k}', *short, '--out_dir=nodes', cwd=quick) for k in (0, 1)]
    more = ('train.py', 'cfg.py', *until(8), '--micro_batch_size=2', '--out_dir=micro')
    seed = IN_FORWARD.format(n=3, do="open(f'seed_{torch.initial_seed()}', 'w').close()")
    two = ranks(2, *short, '--out_dir=two', cwd=quick, patch=seed)
    done = wait_all([*agents, *two, *ranks(4, *more, cwd=quick)])
    assert [code for code, *_ in done] == 8 * [0], [errors for _, _, errors in done]
    # the ranks draw different random numbers
    assert sorted(path.name for path in quick.glob('seed_*')) == ['seed_44', 'seed_45']
    for out in ('micro', 'two', 'nodes'):
        for step, alone in zip(steps(quick, out)[:4], steps(quick), strict=False):
            assert step == pytest.approx(alone, rel=1e-4), out
        assert [e for e in events(quick, out) if 'val_loss' in e][0] == pytest.approx(val, rel=1e-4), out
    resumed = steps(quick, 'micro')
    alone = steps(quick)[:8]
    assert [s['step'] for s in resumed] == [s['step'] for s in alone]
    assert [s['loss'] for s in resumed] == pytest.approx([s['loss'] for s in alone], abs=1e-3)


def test_ranks_must_agree(quick, tmp_path):
    """Ranks with another checkpoint, torch or corpus end; each machine prints a line with the differences."""
    other = shutil.copytree(quick, tmp_path / 'other')
    torch.save(weights(other) | dict(step=16), other / 'out/ckpt.pt')
    shutil.rmtree(other / 'bins')
    write_jsonl(other / 'docs.jsonl', [t[:1000] for t in real_documents()[10:14]])
    ok('prepare.py', 'cfg.py', cwd=other)
    before = snapshot(tmp_path)
    args = ('train.py', 'cfg.py', '--max_steps=30', '--lr_decay_steps=24')
    old = "import torch; torch.__version__ = '2.0.1'"
    for options, patch, differences in (
        ((), old, ('checkpoint step=16 (rank 0: 24)', 'torch=2.0.1 (rank 0: ')),
        (('--out_dir=b',), '', ('train_sha256=',)),
    ):
        variables = rank_variables(2)
        first = Forked(*args, *options, cwd=quick, RANK='0', **variables)
        second = Forked(*args, *options, cwd=other, patch=patch, RANK='1', **variables)
        for code, _, errors in wait_all([first, second]):
            assert code == 1 and 'error: rank 1 has ' in errors and errors.count('\n') == 1, errors
            assert all(difference in errors for difference in differences), errors
    assert snapshot(tmp_path) == before


def test_a_slow_write_is_not_a_failure(quick):
    """All ranks wait for rank 0's write, even if it takes longer than the timeout of a training step."""
    slow = 'import datetime\nfrom mhf import runtime\nruntime.TIMEOUT = datetime.timedelta(seconds=2)\n'
    slow += SLOW_SAVE.format(seconds=5)
    done = run_ranks(2, 'train.py', 'cfg.py', '--out_dir=b', *until(2), '--warmup_steps=1', cwd=quick, patch=slow)
    assert [code for code, *_ in done] == [0, 0], done


def test_a_dead_rank_does_not_hang_the_rest(quick):
    """When a rank dies, torchrun ends the others, and --max-restarts resumes from the newest checkpoint."""
    torchrun = ('torch.distributed.run', '--standalone', '--nproc_per_node=2', '--max-restarts=1')
    command = (str(REPO / 'train.py'), 'cfg.py', '--out_dir=b', '--max_steps=120', '--lr_decay_steps=120')
    environment = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')  # as in train.py's docstring
    process = started(*torchrun, *command, cwd=quick, wait_for='b/ckpt.pt', **environment)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in children if 'train.py' in ' '.join(p.cmdline())]
    workers[-1].kill()
    psutil.wait_procs(workers, timeout=60)
    at = weights(quick, 'b')['step']  # the new workers still import torch
    assert 8 <= at < 120
    done = process.communicate()
    assert done.returncode == 0, done.stderr[-6000:]
    assert f'resumed at step {at}' in done.stdout and done.stdout.count('resumed at step') == 1
    assert [s['step'] for s in steps(quick, 'b')] == list(range(1, 121))
