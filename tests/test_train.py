"""train.py: the loop, resuming, processes, signals and kills. Most runs are of `few`, a second for 24 steps."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import (
    IN_FORWARD,
    assert_same,
    events,
    free_port,
    ok,
    ranks,
    real_documents,
    run,
    save_edited,
    snapshot,
    start,
    started,
    steps,
    weights,
    write_jsonl,
    write_released,
)
from mhf.device import pick_dtype

import configurator
from hashing import signature_table, token_ids
from mhf import device
from mhf.bins import block_indices
from mhf.checkpoint import checked_digest, load_checkpoint
from mhf.meta import read_meta
from model import MHF, MHFConfig


def until(step):
    """The settings of a run that ends early and is otherwise the same."""
    return f'--max_steps={step}', '--lr_decay_steps=24'


def waited(processes, timeout=120):
    """Processes that have ended, as [(returncode, stdout, stderr)]."""
    outputs = [p.communicate(timeout=timeout) for p in processes]
    return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


# -----------------------------------------------------------------------------
# learning


def test_training_learns_and_reports(few):
    """The loop does not learn, or its log, checkpoint or picture is missing something."""
    log = events(few)
    train = [e for e in log if 'loss' in e]
    val = [e for e in log if 'val_loss' in e]
    assert [e['step'] for e in train] == list(range(1, 25)) and [e['step'] for e in val] == [8, 16, 24]
    assert set(train[0]) == {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s'}
    assert train[-1]['tokens'] == 24 * 8 * 16
    assert train[-1]['loss'] < train[0]['loss'] - 1 and val[2]['val_loss'] < val[0]['val_loss']
    # at first every token is about equally likely
    assert abs(train[0]['loss'] - math.log(32768)) < 0.5
    assert all(e['val_loss'] == e['val_nats'] for e in val)
    ckpt = weights(few)
    assert ckpt['step'] == 24 and ckpt['config']['num_buckets'] == 256
    assert not [k for k in ckpt['model'] if 'module' in k]
    assert (few / 'out/loss.png').read_bytes()[:4] == b'\x89PNG' and (few / 'out/ckpt_best.pt').exists()


def test_weight_decay_spares_norms_and_biases(few):
    """A norm or a bias decays, or a matrix does not, or a parameter is not trained at all."""
    model, ckpt = load_checkpoint(few / 'out/ckpt.pt')
    decays = {}
    for group in ckpt['optimizer']['param_groups']:
        for k in group['params']:
            moment = ckpt['optimizer']['state'][k]['exp_avg']
            decays.setdefault(group['weight_decay'], []).append(tuple(moment.shape))
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert sorted(decays[0.1]) == sorted(s for s in shapes if len(s) >= 2)
    assert sorted(decays[0.0]) == sorted(s for s in shapes if len(s) < 2) and len(decays) == 2


def test_learning_rate_schedule(few):
    """The schedule is not the paper's: linear from 0 to the maximum, cosine to 0."""
    lr = [e['lr'] for e in steps(few)]
    expected = [1e-2 * t / 4 if t < 4 else 1e-2 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 20)) for t in range(24)]
    assert lr == pytest.approx(expected, abs=1e-15) and lr[0] == 0


def test_validation_is_the_normalised_likelihood(few):
    """val_nats or val_bpb is not what the model assigns to the held-out text."""
    model, _ = load_checkpoint(few / 'out/ckpt.pt')
    ids = torch.tensor(token_ids(np.load(few / 'bins/val_000000.bin'), model.signatures.numpy()))
    total = 0.0
    for b in range(0, len(ids) - 1, 16):
        row = ids[b : b + 17]
        total -= model.log_probs(row[None, :-1])[0].gather(1, row[1:, None]).sum().item()
    last = events(few)[-1]
    size = json.loads((few / 'bins/meta.json').read_text())['splits']['val']['bytes']
    assert last['val_nats'] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert last['val_bpb'] == pytest.approx(total / math.log(2) / size, rel=1e-5)


# keeps what the model sees first
FIRST_BATCH = """
import torch
from model import MHF
forward = MHF.forward
def kept(self, x, y):
    MHF.forward = forward
    torch.save((x, y), 'first.pt')
    return forward(self, x, y)
MHF.forward = kept
"""


def test_the_paper_s_loss_and_the_signatures_it_sees(quick, mistral):
    """--loss=product is not the sum over coordinates, or the model sees others than the signatures of the text."""
    ok('train.py', 'cfg.py', '--out_dir=b', '--loss=product', *until(6), patch=FIRST_BATCH, cwd=quick)
    # at first every bucket is equally likely
    assert abs(steps(quick, 'b')[0]['loss'] - 3 * math.log(256)) < 0.5
    last = events(quick, 'b')[-1]
    assert last['val_loss'] > last['val_nats'] + 3
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', cwd=quick)
    ids = np.load(quick / 'ids/train_000000.bin')
    table = signature_table(mistral.tokens, 3, 256, 0, mistral.pad)
    first = block_indices(0, 8, (len(ids) - 1) // 16, seed=42)[:4]
    expected = torch.tensor(np.stack([table[ids[16 * b : 16 * b + 17]] for b in first]), dtype=torch.int64)
    assert_same(torch.load(quick / 'first.pt'), (expected[:, :-1], expected[:, 1:]))


def test_standard_and_bfloat16(quick):
    """The Standard model does not go the same way through all scripts, or bfloat16 does not train."""
    ok('prepare.py', 'cfg.py', '--num_hashes=0', '--data_dir=ids', cwd=quick)
    args = ('--num_hashes=0', '--data_dir=ids', '--out_dir=std', '--dtype=bfloat16', *until(12), '--eval_interval=12')
    ok('train.py', 'cfg.py', *args, cwd=quick)
    last = events(quick, 'std')[-1]
    assert last['val_loss'] == pytest.approx(last['val_nats'], rel=1e-5) and last['val_nats'] < math.log(32768) - 1
    assert 'std/ckpt.pt' in ok('sample.py', 'cfg.py', '--out_dir=std', cwd=quick).stderr


def test_the_plain_model_trains_alike(quick):
    """--plain, for a fork to change, is the fast model after all, learns something else, or cannot be resumed."""
    args = ('cfg.py', '--plain', '--out_dir=b', '--auto_resume')
    no_fast_head = 'from mhf import fused\nfused.FusedMHF.head_loss = fused.FusedMHF.token_losses = None'
    for last in (4, 8):
        ok('train.py', *args, *until(last), cwd=quick, patch=no_fast_head)
    ours, fast = ([s['loss'] for s in steps(quick, out)[:8]] for out in ('b', 'out'))
    assert len(ours) == 8 and ours == pytest.approx(fast, abs=1e-4)


def test_the_rate_of_the_embeddings(quick):
    """--embedding_lr_mult moves other weights than E, or E otherwise than so many times as far; or a resume forgets it."""
    args = ('cfg.py', '--warmup_steps=0', '--max_steps=1', '--weight_decay=0')
    after = []
    for rate in (1, 3):
        ok('train.py', *args, f'--embedding_lr_mult={rate}.0', f'--out_dir=rate{rate}', cwd=quick)
        after.append(weights(quick, f'rate{rate}')['model'])
    a, b = (m.pop('embed.weight') for m in after)
    # Adam's first step is the rate, 1e-2
    assert (b - a).abs().max().item() == pytest.approx(2e-2, rel=1e-2)
    assert all(torch.equal(after[0][k], after[1][k]) for k in after[0])
    refused = run('train.py', *args, '--out_dir=rate3', '--auto_resume', '--max_steps=2', cwd=quick)
    assert 'embedding_lr_mult=3.0 (now 1.0)' in refused.stderr


def test_the_scale_of_new_embeddings(quick):
    """--embedding_std leaves E as large as ever, or makes other weights larger."""
    args = ('cfg.py', '--learning_rate=1e-9', '--warmup_steps=0', '--max_steps=1')
    after = []
    for std in (0.02, 0.08):
        ok('train.py', *args, f'--embedding_std={std}', f'--out_dir=std{std}', cwd=quick)
        after.append(weights(quick, f'std{std}')['model'])
    for name, weight in after[1].items():
        times = 4 if name == 'embed.weight' else 1
        assert torch.allclose(weight.double(), times * after[0][name].double(), atol=1e-6), name


def test_how_the_hash_encoder_begins(quick):
    """Ws does not begin as --encoder_init and --embedding_scale say, or other weights are drawn otherwise for it."""
    args = ('cfg.py', '--learning_rate=1e-9', '--warmup_steps=0', '--max_steps=1')
    after = {}
    for init in ('normal', 'identity', 'orthogonal'):
        ok('train.py', *args, f'--encoder_init={init}', '--embedding_scale=4', f'--out_dir={init}', cwd=quick)
        after[init] = weights(quick, init)['model']
    ok('train.py', *args, '--encoder_init=normal', '--embedding_scale=1', '--out_dir=paper', cwd=quick)
    paper = weights(quick, 'paper')['model']
    W = {init: of_init.pop('encoder.out.weight').double() for init, of_init in after.items()}
    eye = torch.eye(len(W['normal']), dtype=torch.float64)
    assert torch.allclose(W['identity'], 4 * eye, atol=1e-6)
    assert torch.allclose(W['orthogonal'] @ W['orthogonal'].T, 16 * eye, atol=1e-4)
    assert not torch.allclose(W['orthogonal'].abs(), 4 * eye, atol=1e-2)
    assert torch.allclose(W['normal'], 4 * paper.pop('encoder.out.weight').double(), atol=1e-6)
    for of_init in after.values():
        assert all(torch.allclose(of_init[name], weight, atol=1e-6) for name, weight in paper.items())


def test_an_orthogonal_beginning_is_drawn_on_the_cpu(monkeypatch):
    """train.py's default ends in an error on a device that has no QR decomposition, as Apple's mps."""
    decomposed = []
    qr = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, 'qr', lambda x: decomposed.append(x.device.type) or qr(x))
    with torch.device('meta'):
        MHF(MHFConfig(vocab_size=9, num_layers=1, encoder_init='orthogonal'))
    assert decomposed == ['cpu']


def test_a_table_by_frequency(quick):
    """A run with --by_frequency has the plain table, goes on with another one, or bins of signatures get one unseen."""
    args = ('cfg.py', '--by_frequency', '--out_dir=b', '--auto_resume')
    done = run('train.py', *args, *until(2), cwd=quick)
    assert done.returncode == 1 and 'hold signatures' in done.stderr and 'Traceback' not in done.stderr
    ids = ('--data_format=ids', '--data_dir=ids')
    ok('prepare.py', 'cfg.py', *ids, cwd=quick)
    ok('train.py', *args, *ids, *until(2), cwd=quick)
    table = weights(quick, 'b')['model']['signatures']
    counts = np.bincount(np.load(quick / 'ids/train_000000.bin'), minlength=len(table))
    most_frequent = counts.argsort(kind='stable')[-20:]
    # of 255 buckets the first 63 have one token each
    assert (table[most_frequent] == table[most_frequent][:, :1]).all() and table[most_frequent].max() <= 63
    ok('sample.py', 'cfg.py', '--out_dir=b', cwd=quick)
    other = run('train.py', *args, *ids, '--num_lsh=1', '--out_dir=c', cwd=quick)
    assert other.returncode == 1 and 'leave out num_lsh' in other.stderr and not (quick / 'c').exists()
    refused = run('train.py', *args[:1], *args[2:], *ids, *until(3), cwd=quick)
    assert refused.returncode == 1 and 'by_frequency=True (now False)' in refused.stderr
    ok('train.py', *args, *ids, *until(3), cwd=quick)
    assert torch.equal(weights(quick, 'b')['model']['signatures'], table)


# an older checkpoint lacks them
NEWER_SETTINGS = ('ablation', 'embedding_std', 'encoder_init', 'embedding_scale')


def test_an_ablation_is_kept_and_old_checkpoints_have_none(quick):
    """A resumed or evaluated ablation silently becomes the method, or checkpoints from before ablations are refused."""
    args = ('cfg.py', '--out_dir=b', '--auto_resume')
    ok('train.py', *args, '--ablation=hard_embeddings', *until(4), cwd=quick)
    refused = run('train.py', *args, *until(5), cwd=quick)
    assert refused.returncode == 1 and 'ablation=hard_embeddings (now )' in refused.stderr
    ok('train.py', *args, '--ablation=hard_embeddings', *until(5), cwd=quick)
    assert load_checkpoint(quick / 'b/ckpt.pt')[0].hash_decoder.hard
    state = weights(quick)
    for key, name in itertools.product(('config', 'model_config'), NEWER_SETTINGS):
        del state[key][name]
    # its Hash Decoder had another name, and its settings another one for --plain
    state['model'] = {name.replace('hash_decoder.', 'mixers.'): tensor for name, tensor in state['model'].items()}
    state['config']['plain_head'] = state['config'].pop('plain')
    save_edited(state, quick / 'out/ckpt.pt')
    args = ('cfg.py', '--auto_resume', *until(25))
    refused = run('train.py', *args, cwd=quick)
    assert refused.returncode == 1 and 'encoder_init=normal (now orthogonal)' in refused.stderr
    done = ok('train.py', *args, '--encoder_init=normal', '--embedding_scale=1', cwd=quick)
    assert 'resumed at step 24' in done.stdout and 'WARNING' not in done.stderr
    assert 'hash_decoder.0.0.weight' in weights(quick)['model']


def test_a_resumed_run_keeps_its_precision(quick):
    """A run that goes on where another precision is faster becomes another run without a word."""
    args = ('cfg.py', '--out_dir=b', '--auto_resume', '--compile=False')
    ok('train.py', *args, '--dtype=bfloat16', *until(4), cwd=quick)
    # the precision is left to train.py
    for dtype, said in (('None', 'cpu, bfloat16'), ('float32', 'cpu, float32'), ('None', 'cpu, float32')):
        done = ok('train.py', *args, f'--dtype={dtype}', *until(steps(quick, 'b')[-1]['step'] + 1), cwd=quick)
        assert said in done.stdout, dtype


@pytest.mark.parametrize(
    'bfloat16, float32, faster', [(3e12, 1e12, 'bfloat16'), (1.1e12, 1e12, 'float32'), (1, 9, 'float32')]
)
def test_the_precision_of_a_cpu_is_measured(monkeypatch, bfloat16, float32, faster):
    """A CPU whose products in bfloat16 are slower trains in bfloat16, or one without them waits for seconds."""
    rates = {torch.bfloat16: bfloat16, torch.float32: float32}
    sizes = []
    monkeypatch.setattr(device, 'products_per_second', lambda dtype, size: sizes.append(size) or rates[dtype])
    dtype, why = pick_dtype(None, 'cpu')
    assert dtype == faster and 'GFLOP/s in float32' in why
    assert max(sizes) == (256 if bfloat16 == 1 else 512)
    assert pick_dtype('float32', 'cpu') == ('float32', '')


def test_products_that_are_held_up_do_not_choose_the_precision(monkeypatch):
    """
    Beside a busy process a CPU with instructions for bfloat16 trains in float32, at half the speed; or after the
    measurement it trains with one thread.
    """
    seconds = [9.0] * 11 + [0.5] + [9.0] * 4
    clock = itertools.accumulate(itertools.chain.from_iterable((1.0, each) for each in seconds))
    threads = []

    def perf_counter():
        threads.append(torch.get_num_threads())
        return next(clock)

    monkeypatch.setattr(device, 'time', SimpleNamespace(perf_counter=perf_counter))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert device.products_per_second(torch.float32, 4) == 2 * 4**3 / 0.5
    assert set(threads) == {1} and torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_batches_are_a_permutation_without_replacement():
    """Within an epoch a block comes twice, or epochs repeat the same order."""
    stream = np.concatenate([block_indices(step, batch_size=8, num_blocks=37, seed=1) for step in range(40)])
    epochs = [stream[e * 37 : (e + 1) * 37] for e in range(8)]
    assert all(sorted(e) == list(range(37)) for e in epochs)
    assert len({e.tobytes() for e in epochs}) == 8


def test_bins_of_either_kind(quick):
    """A model that is trained on signatures is not, to the last bit, the one that is trained on token ids."""
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', cwd=quick)
    ok('train.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', '--out_dir=b', cwd=quick)
    assert 'table_sha256' in read_meta(quick / 'bins') and 'table_sha256' not in read_meta(quick / 'ids')
    assert steps(quick, 'b') == steps(quick)
    for key in ('model', 'optimizer', 'best_val'):
        assert_same(weights(quick, 'b')[key], weights(quick)[key])


def test_validation_changes_nothing(quick):
    """How often a run validates must not change what it learns."""
    ok('train.py', 'cfg.py', '--out_dir=b', '--eval_interval=2', *until(6), cwd=quick)
    assert steps(quick, 'b') == steps(quick)[:6]


def test_non_finite_loss_stops_before_the_update(quick):
    """A run that diverges goes on, or overwrites its last good checkpoint with NaNs."""
    state = weights(quick)
    state['model']['norm.weight'][0] = math.inf
    (quick / 'bad').mkdir()
    save_edited(state, quick / 'bad/ckpt.pt')
    before = snapshot(quick)
    done = run('train.py', 'cfg.py', '--max_steps=30', '--init_from=resume', '--out_dir=bad', cwd=quick)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert re.search(r'error: step 24: loss nan.* bad/ckpt.pt is good, of step 24', done.stderr), done.stderr
    (quick / 'bad/log.jsonl').unlink()
    assert snapshot(quick) == before


def test_out_of_memory(quick):
    """A GPU that is too small prints a page of traceback, and not what to change."""
    oom = IN_FORWARD.format(n=3, do="raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')")
    done = run('train.py', 'cfg.py', '--init_from=resume', '--max_steps=30', cwd=quick, patch=oom)
    lines = [line for line in done.stderr.splitlines() if 'error' in line]
    assert done.returncode == 1 and 'Traceback' not in done.stderr and len(lines) == 1, done.stderr
    assert all(w in lines[0] for w in ('2.00 GiB', '--micro_batch_size (now 4)', 'ckpt.pt is good, of step 24'))
    assert 'python bench.py cfg.py --plan says how much' in lines[0]


def test_damage_found_while_training(quick):
    """Bins that take longer to read through than a run's start are never checked, or the checkpoint isn't named."""
    path = quick / 'bins/train_000000.bin'
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]))
    late = 'import time; from mhf import bins; bins.Verified.wait = lambda *_: None\n'
    late += 'verify = bins.Bins.verify; bins.Bins.verify = lambda *args: (time.sleep(1), verify(*args))'
    done = run('train.py', 'cfg.py', '--init_from=resume', '--max_steps=5000', cwd=quick, patch=late)
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr[-2000:]
    assert re.search(r'error: .*bin is damaged.*; stopped at step \d+, out/ckpt.*pt is good, of step', done.stderr)


# -----------------------------------------------------------------------------
# going on


def compiles():
    return shutil.which('g++') and not subprocess.run(['g++', '-x', 'c++', '-fsyntax-only', os.devnull]).returncode


@pytest.mark.parametrize('compiled', [False, True], ids=['plain', 'compiled'])
def test_resume_is_exact(quick, compiled):
    """
    A run that was stopped, in the middle of gradient accumulation and of an epoch, and resumed, twice in a row and
    with evaluation and samples in between, ends with other weights, optimizer state or log than a straight one.
    """
    blocks = (json.loads((quick / 'bins/meta.json').read_text())['splits']['train']['tokens'] - 1) // 16
    # three epochs, whose borders lie within a batch: the steps that cross into the second and the third
    assert 3 < 24 * 8 / blocks and blocks % 8
    borders = (blocks // 8, 2 * blocks // 8)
    straight = 'out'
    args = ['cfg.py', '--out_dir=b', '--auto_resume']
    if compiled:
        if not compiles():
            pytest.skip('torch.compile needs a C++ compiler')
        borders = borders[:1]
        straight = 'a'
        args += ['--compile', '--num_layers=1', *until(borders[0] + 3)]
        ok('train.py', *args, '--out_dir=a', cwd=quick)
    first = 0
    for border in borders:
        # in the first of two micro-batches
        stop = IN_FORWARD.format(n=2 * (border - first) + 1, do='os.kill(os.getpid(), signal.SIGTERM)')
        done = run('train.py', *args, cwd=quick, patch=stop)
        first = border + 1
        assert done.returncode == 143 and weights(quick, 'b')['step'] == first, done.stderr[-3000:]
    if not compiled:
        ok('eval.py', '--out_dir=b', '--tasks=bits_per_byte', '--text=docs.jsonl', '--device=cpu', cwd=quick)
        ok('sample.py', 'cfg.py', '--out_dir=b', cwd=quick)
    log = quick / 'b/log.jsonl'
    # as a crash leaves it
    before = log.read_text() + '{"step": 13, "lo'
    log.write_text(before)
    ok('train.py', *args, cwd=quick)
    assert log.read_text().startswith(before) and steps(quick, 'b') == steps(quick, straight)
    a = weights(quick, straight)
    b = weights(quick, 'b')
    for key in ('model', 'optimizer', 'step', 'best_val'):
        assert_same(a[key], b[key])


# each refused on resume, though all else is the same
OTHER = dict(
    num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=16, intermediate_size=32, num_hashes=4,
    num_buckets=512, num_lsh=1, loss='product', block_size=8, batch_size=4, seed=7, weight_decay=0.2, beta1=0.8,
    beta2=0.9, unfrozen_end_layers=1, embedding_std=0.1, encoder_init='identity', embedding_scale=2.0, ablation='mean_gate',
    single_id=True,
)  # fmt: skip


def test_what_a_resumed_run_may_change(quick):
    """A resumed run goes on with another architecture, order of the data or optimizer, or may not change its length."""
    declared = configurator.settings_of('train.py')
    before = snapshot(quick)
    assert MHFConfig.__annotations__.keys() & declared.keys() <= OTHER.keys()
    args = ('cfg.py', '--init_from=resume', '--max_steps=25')
    *flags, single_id = [f'--{k}={v}' for k, v in OTHER.items()]
    # not with num_lsh: it has no LSH
    refused = [run('train.py', *args, *few_of_them, cwd=quick) for few_of_them in (flags, [single_id])]
    for done in refused:
        assert done.returncode == 1 and 'Traceback' not in done.stderr and 'a resumed run keeps it' in done.stderr
    for key, value in OTHER.items():
        assert re.search(rf'\b{key}=\S* \(now {value}\)', refused[key == 'single_id'].stderr), key
    other = run('train.py', *args, '--tokenizer=tekken', cwd=quick)
    assert other.returncode == 1 and 'tokenizer=mistral' in other.stderr and snapshot(quick) == before
    changed = (
        '--micro_batch_size=8',
        '--learning_rate=1e-3',
        '--warmup_steps=1',
        '--grad_clip=0.5',
        '--keep_checkpoints=1',
    )
    ok('train.py', *args, *changed, '--dtype=bfloat16', '--activation_checkpointing', '--eval_interval=1', cwd=quick)
    assert weights(quick)['step'] == 25


def test_from_weights_of_another_run(quick):
    """init_from starts from other weights or another architecture than the model's, or its command starts again."""
    model, _ = load_checkpoint(quick / 'out/ckpt.pt')
    write_released(quick / 'released', model, shards=2)
    # only the data has to be named: the architecture is the model's
    args = ['--data_dir=bins', '--block_size=16', '--batch_size=8', '--micro_batch_size=8', '--device=cpu']
    args += ['--dtype=float32', '--warmup_steps=0', '--learning_rate=1e-9', '--lr_decay_steps=9', '--eval_interval=1']
    for source in ('released', 'out'):
        command = ('train.py', *args, f'--init_from={source}', f'--out_dir=from_{source}', '--auto_resume')
        assert 'resumed' not in ok(*command, '--max_steps=1', cwd=quick).stdout
        state = weights(quick, f'from_{source}')
        assert events(quick, f'from_{source}')[-1]['val_loss'] == pytest.approx(events(quick)[-1]['val_loss'], rel=1e-4)
        kept = asdict(model.config)
        if source == 'released':
            # it does not say how its weights began
            kept |= dict(encoder_init='normal', embedding_scale=1.0)
        assert state['model_config'] == kept and state['config']['num_buckets'] == 256
    assert 'resumed at step 1' in ok(*command, '--max_steps=2', cwd=quick).stdout
    assert ': done' in ok(*command, '--max_steps=2', cwd=quick).stdout


def test_other_text_is_refused(quick):
    """A resumed run goes on with other text than it has read, or is not told how to."""
    write_jsonl(quick / 'more.jsonl', [t[:1000] for t in real_documents()[10:14]])
    data = ('cfg.py', '--dataset=more.jsonl', '--data_dir=more', '--max_steps=26')
    ok('prepare.py', *data[:3], cwd=quick)
    refused = run('train.py', *data, '--init_from=resume', cwd=quick)
    assert (
        refused.returncode == 1
        and 'was trained on other bins or another tokenizer than these (their train_sha256 differs); ' in refused.stderr
    )
    assert '--init_from=out and another --out_dir' in refused.stderr
    ok('train.py', *data, '--init_from=out', '--out_dir=b', cwd=quick)
    # a checkpoint of an older train.py, which had a setting for that, would be resumed with other batches
    save_edited(weights(quick) | dict(data_start_step=8), quick / 'out/ckpt.pt')
    refused = run('train.py', 'cfg.py', '--max_steps=26', '--init_from=resume', cwd=quick)
    assert refused.returncode == 1 and 'went on with other text at step 8' in refused.stderr


# -----------------------------------------------------------------------------
# signals and kills


@pytest.mark.parametrize('case', ['echo', 'one', 'late', 'ctrl-c'])
def test_a_second_signal(quick, case):
    """
    torchrun hands on the signal that its workers have had already, which costs the checkpoint; or a process ends while
    the first still writes, which makes torchrun end that too; or one of two machines is told to stop, and the other
    waits for it. Or a second wish to stop is not obeyed at once.
    """
    # a step and a write that take long; `late` is a second signal that comes 80 s after the first
    slow = IN_FORWARD.format(n=9, do="open(f'slow{os.getpid()}', 'w').close(); time.sleep(3)")
    slow = f'import time\nfrom mhf import checkpoint\n{slow}\nwrite = checkpoint.Checkpoints._write\n'
    slow += 'checkpoint.Checkpoints._write = lambda *args: (time.sleep(2), write(*args))\n'
    slow += 'clock = time.monotonic; time.monotonic = lambda: 100 * clock()\n' if case == 'late' else ''
    command = ('train.py', 'cfg.py', '--out_dir=b', '--eval_interval=24')
    signum = signal.SIGTERM
    if case == 'ctrl-c':
        processes = [start(*command, cwd=quick, patch=slow)]
        signum = signal.SIGINT
    else:
        processes = ranks(2, *command, '--micro_batch_size=2', cwd=quick, patch=slow)
    while len(list(quick.glob('slow*'))) < len(processes) and processes[0].poll() is None:
        time.sleep(0.02)
    for _ in range(2):
        for process in processes[case == 'one' :]:
            process.send_signal(signum)
        time.sleep(0.8)
    if case in ('echo', 'one'):
        processes[1].communicate(timeout=60)
        # it has waited for the write
        assert (quick / 'b/ckpt.pt').exists()
        assert [code for code, *_ in waited(processes)] == [143, 143]
        assert weights(quick, 'b')['step'] == steps(quick, 'b')[-1]['step'] < 24
    else:
        assert [code for code, *_ in waited(processes)] == [-signum] * len(processes)
        assert not (quick / 'b/ckpt.pt').exists()


@pytest.mark.parametrize('signum, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint(quick, signum, code):
    """A preempted run loses its steps, prints a traceback, or cannot go on with the same command."""
    command = ('train.py', 'cfg.py', '--out_dir=b', '--auto_resume')
    process = started(*command, cwd=quick, wait_for='b/log.jsonl')
    time.sleep(0.1)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and 'Traceback' not in stderr and '--init_from=resume' in stderr, stderr
    at = weights(quick, 'b')['step']
    assert [e['step'] for e in steps(quick, 'b')] == list(range(1, at + 1)) and at < 24
    assert f'resumed at step {at}' in ok(*command, cwd=quick).stdout
    for key in ('model', 'optimizer'):
        assert_same(weights(quick, 'b')[key], weights(quick)[key])
    assert 'ckpt.pt is at step 24 of 24: done' in ok(*command, cwd=quick).stdout


def test_kill_train(quick):
    """
    A killed run leaves no checkpoint that loads, or ends with other weights than an undisturbed one; MHF_KILLS=30
    kills thirty times.
    """
    kills = int(os.environ.get('MHF_KILLS', 3))
    seed = int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    command = ('train.py', 'cfg.py', '--eval_interval=2', '--auto_resume', '--out_dir=killed')
    draw = np.random.default_rng(seed)
    killed = 0
    writing = quick / 'killed/ckpt.pt.tmp'
    expected = {k: weights(quick)[k] for k in ('model', 'optimizer', 'step')}
    while killed < kills:
        process = started(*command, cwd=quick, wait_for='killed/ckpt.pt')
        moment = draw.uniform(0, 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=moment)
        # half of them while a checkpoint is written
        while killed % 2 and not writing.exists() and process.poll() is None:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            # it finished: from the beginning again
            assert_same({k: weights(quick, 'killed')[k] for k in expected}, expected)
            shutil.rmtree(quick / 'killed')
            continue
        assert process.returncode == -signal.SIGKILL
        # the lines of a run are in its log file when it is killed; the first one has written a checkpoint
        assert killed or 'step 2: validation: ' in process.communicate()[0]
        killed += 1
        checked_digest(quick / 'killed/ckpt.pt')
        _, ckpt = load_checkpoint(quick / 'killed/ckpt.pt')
        print(f'seed {seed}, killed {moment:.2f} s after a checkpoint was there, which is of step {ckpt["step"]}')
    ok(*command, cwd=quick)
    assert_same({k: weights(quick, 'killed')[k] for k in expected}, expected)
    assert steps(quick, 'killed') == steps(quick) and not writing.exists()


# -----------------------------------------------------------------------------
# several processes


def test_any_world_size_sees_the_same_batches(quick):
    """
    2 or 4 processes, two machines or another micro-batch train on other data or take another mean than one process,
    from the beginning or resumed.
    """
    short = ('train.py', 'cfg.py', *until(4), '--eval_interval=4')
    ok(*short, '--out_dir=micro', '--micro_batch_size=2', cwd=quick)
    val = events(quick, 'micro')[-1]
    nodes = ['--nnodes=2', '--nproc_per_node=1', '--master_addr=127.0.0.1', f'--master_port={free_port()}']
    agents = [start(*short, '--out_dir=nodes', cwd=quick, torchrun=[*nodes, f'--node_rank={k}']) for k in (0, 1)]
    more = ('train.py', 'cfg.py', *until(8), '--micro_batch_size=2', '--auto_resume', '--out_dir=micro')
    done = waited([*agents, *ranks(2, *short, '--out_dir=two', cwd=quick), *ranks(4, *more, cwd=quick)])
    assert [code for code, *_ in done] == 8 * [0], done
    for out in ('micro', 'two', 'nodes'):
        for ours, alone in zip(steps(quick, out)[:4], steps(quick), strict=False):
            assert ours == pytest.approx(alone, rel=1e-4), out
        assert [e for e in events(quick, out) if 'val_loss' in e][0] == pytest.approx(val, rel=1e-4), out
    resumed = steps(quick, 'micro')
    alone = steps(quick)[:8]
    assert [s['step'] for s in resumed] == [s['step'] for s in alone]
    assert [s['loss'] for s in resumed] == pytest.approx([s['loss'] for s in alone], abs=1e-3)


# notes where gradients lie before each forward pass; compiles quickly, and fails where DDP cuts a graph at its buckets
BUCKETS = """
import json, os, torch
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
DDPOptimizer.compile_fn = None
def compile(self):
    self._compiled_call_impl = torch.compile(self._call_impl, backend='eager')
torch.nn.Module.compile = compile
forward, places = DDP.forward, []
def noted(self, *args):
    places.append([p.grad.data_ptr() if p.grad is not None else None for p in self.parameters()])
    with open(f"places{os.environ['RANK']}", 'w') as f:
        json.dump(places, f)
    return forward(self, *args)
DDP.forward = noted
"""


def test_gradients_stay_in_ddp_s_buckets(quick):
    """With accumulation gradients are held twice, from the first step on; or DDP cuts a compiled graph into pieces."""
    args = ('cfg.py', '--out_dir=b', '--micro_batch_size=2', '--eval_interval=24', '--compile', *until(3))
    done = waited(ranks(2, 'train.py', *args, cwd=quick, patch=BUCKETS, CXX='sh'))
    assert [code for code, *_ in done] == [0, 0] and 'FutureWarning' not in done[1][2], done
    # one pass of nothing, after which DDP orders its buckets anew, and three steps of two
    places = json.loads((quick / 'places1').read_text())
    assert len(places) == 7 and None not in places[2] and all(p == places[2] for p in places[2:])
    assert [s['loss'] for s in steps(quick, 'b')] == pytest.approx([s['loss'] for s in steps(quick)[:3]], rel=1e-4)


# A GPU's form of the head on a CPU; compiles quickly, and notes what. Of 32,768 words the kernels of kernels.py would
# take minutes in Triton's interpreter.
COMPILED = """
import os, torch
from mhf import fused
from mhf.fused import FusedMHF, Tiles
def validate(o, y, rows, token_mask, inverse):
    assert not inverse
    logits = torch.cat(o, dim=1)[:, rows].sum(2).float().masked_fill(~token_mask, -torch.inf)
    target = sum(o_i.gather(1, y_i[:, None])[:, 0].float() for o_i, y_i in zip(o, y.T, strict=True))
    return target, logits.amax(1), logits.logsumexp(1)
fused.lookups = validate
compile, init = torch.compile, FusedMHF.__init__
def noted(f, **options):
    with open(f"compiled{os.environ['RANK']}", 'a') as file:
        print(f.__name__, file=file)
    return compile(f, backend='aot_eager', **options)
def of_a_gpu(self, *args):
    init(self, *args)
    self.tiles = Tiles(chunk=4096, block=4096, columns=512, kernels=True)
torch.compile, FusedMHF.__init__ = noted, of_a_gpu
"""


def test_a_compiled_head_in_two_processes(quick):
    """Under DDP a GPU's compiled head learns something else than the head of a CPU, or is not compiled at all."""
    args = ('train.py', 'cfg.py', '--micro_batch_size=2', '--eval_interval=4', '--loss=product', *until(4))
    processes = ranks(2, *args, '--out_dir=plain', cwd=quick)
    processes += ranks(2, *args, '--out_dir=compiled', '--compile', cwd=quick, patch=COMPILED, CXX='sh')
    done = waited(processes)
    assert [code for code, *_ in done] == [0] * 4, done[-1][2]
    assert (quick / 'compiled1').read_text().split() == ['chunk_gradients', '_call_impl']
    ours = steps(quick, 'compiled')
    theirs = steps(quick, 'plain')
    assert len(ours) == 4 and [s['loss'] for s in ours] == pytest.approx([s['loss'] for s in theirs], rel=1e-5)
    assert [s['grad_norm'] for s in ours] == pytest.approx([s['grad_norm'] for s in theirs], rel=1e-4)
    ours, theirs = (events(quick, out)[-1]['val_nats'] for out in ('compiled', 'plain'))
    assert ours == pytest.approx(theirs, rel=1e-5)


def pair(*args, cwd, other=None, patch='', **environment):
    """Two processes as [(returncode, stdout, stderr)]; the second may have a folder, patch and variables of its own."""
    told = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), WORLD_SIZE='2')
    first = start('train.py', 'cfg.py', *args, cwd=cwd, RANK='0', **told)
    told |= environment
    return waited([first, start('train.py', 'cfg.py', *args, cwd=other or cwd, patch=patch, RANK='1', **told)])


def test_processes_agree_before_they_start(quick, tmp_path):
    """
    Where a machine does not see the shared disk, one process trains from scratch beside others that resume, or on other
    text; or processes of two versions of torch, or of two runs, work together.
    """
    other = shutil.copytree(quick, tmp_path / 'other')
    shutil.rmtree(other / 'out')
    before = snapshot(tmp_path)
    args = ('--auto_resume', '--max_steps=30', '--lr_decay_steps=24')
    old = "import torch; torch.__version__ = '2.0.1'"
    done = [pair(*args, cwd=quick, other=other), pair(*args, cwd=other, other=quick), pair(*args, cwd=quick, patch=old)]
    # another text, of which all else is the same
    shutil.copytree(quick / 'out', other / 'out')
    damage = json.loads((other / 'bins/meta.json').read_text())
    damage['splits']['train']['shards'][0]['digest'] = '0'
    (other / 'bins/meta.json').write_text(json.dumps(damage))
    done.append(pair(*args, cwd=quick, other=other))
    # the same names, and another checkpoint
    shutil.rmtree(other)
    shutil.copytree(quick, other)
    for suffix in ('', '.sha256'):
        shutil.copy(other / f'out/ckpt_000016.pt{suffix}', other / f'out/ckpt.pt{suffix}')
    done.append(pair(*args, cwd=quick, other=other))
    says = (
        'init_from=scratch (process 0: resume)',
        'init_from=resume (process 0: scratch)',
        'torch=2.0.1 (',
        'train bins=',
        'checkpoint=',
    )
    for ((code, _, errors), rest), expected in zip(done, says, strict=True):
        assert code == 1 and errors.startswith('error: process 1 has ') and errors.count('\n') == 1, errors
        # under torchrun one line says it for all
        assert expected in errors and rest == (1, '', ''), (errors, rest)
    shutil.rmtree(other)
    assert snapshot(tmp_path) == {k: v for k, v in before.items() if not k.startswith('other')}


def test_a_dead_rank_does_not_hang_the_rest(quick):
    """A machine that dies leaves the other ranks waiting, or torchrun --max-restarts begins from nothing."""
    command = ('train.py', 'cfg.py', '--out_dir=b', '--auto_resume', '--max_steps=60', '--lr_decay_steps=60')
    master, other = ranks(2, *command, cwd=quick)
    while not (quick / 'b/ckpt_000008.pt').exists() and master.poll() is None:
        time.sleep(0.02)
    os.kill(other.pid, signal.SIGKILL)
    _, stderr = master.communicate(timeout=60)
    assert master.returncode == 1 and 'Traceback' not in stderr and 'error: process 0 of 2 lost the others' in stderr
    other.communicate()
    checked_digest(quick / 'b/ckpt.pt')
    at = weights(quick, 'b')['step']
    assert 8 <= at < 60
    torchrun = ['--standalone', '--nproc_per_node=2', '--max-restarts=1']
    process = started(*command, cwd=quick, wait_for=f'b/ckpt_{at + 8:06}.pt', torchrun=torchrun)
    children = psutil.Process(process.pid).children(recursive=True)
    [p for p in children if 'train.py' in ' '.join(p.cmdline())][-1].kill()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr[-6000:]
    assert f'resumed at step {at}' in stdout and len(re.findall(r'resumed at step', stdout)) == 2
    assert [s['step'] for s in steps(quick, 'b')] == list(range(1, 61))


def test_a_process_without_its_master(quick):
    """A process whose master is not there waits for ever, or ends with a traceback."""
    env = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), RANK='1', WORLD_SIZE='2')
    done = run('train.py', 'cfg.py', '--out_dir=new', '--timeout=2', cwd=quick, **env)
    assert done.returncode == 1 and 'Traceback' not in done.stderr and not (quick / 'new').exists()
    # torch's own log of sockets may precede
    assert done.stderr.splitlines()[-1].startswith('error: process 1 of 2 did not meet the others within 2 s')
