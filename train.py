"""
Trains a MultiHashFormer or a Standard model, on a laptop or on many GPUs. The defaults train a 100M H4B16K.

    $ python train.py config/mhf_tiny.py                                  # one process: GPU if there is one, else CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --standalone --nproc_per_node=2 train.py config/mhf_tiny.py --device=cpu --micro_batch_size=4

    two machines, the first at 10.0.0.1; the second has --node_rank=1:
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py X

    one command that starts a run and goes on with it (for the variable see pytorch/pytorch issue 135712):
    $ TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node=8 --max-restarts=3 train.py X --auto_resume

It needs the bins that prepare.py makes with the same config. prepare.py's docstring tells how text becomes a loss. It
writes out_dir/ckpt.pt (the newest), ckpt_best.pt, the last few as ckpt_000123.pt, log.jsonl and loss.png. SIGTERM and
Ctrl-C finish the step, write a checkpoint and exit with 143 and 130. A resumed run reads the batches that the straight
run would have read, in the same order. On a CPU, and with --deterministic on a GPU (seen on an H100, not compiled), it
ends with the same bits. Without it, a GPU's atomic adds (attention, embedding) round differently in every run.
"""

import contextlib
import importlib.util
import json
import math
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import InputError, check_numbers, configure
from mhf import plot
from mhf.bins import Verified, block_indices, frequencies, open_bins, prefetch
from mhf.checkpoint import Checkpoints, check_data, check_settings
from mhf.cost import check_memory
from mhf.device import pick_compile, pick_dtype, use_device
from mhf.distributed import World, explain_crashes
from mhf.fused import FusedMHF
from mhf.meta import SPLITS, checked_table, data_folder, identity, load_meta
from mhf.released import check_vocabulary, init_model
from model import MHF, MHFConfig

# output
out_dir = 'out'
eval_interval = 1000  # steps between validations; each also writes a checkpoint
init_from = 'scratch'  # scratch | resume (the newest checkpoint in out_dir) | a released folder, hub id, other out_dir
auto_resume = False  # resume where out_dir has a checkpoint, else init_from: for a cluster that repeats its command
keep_checkpoints = (
    2  # of the newest checkpoints, under names with their step; if ckpt.pt is damaged, the one before is resumed
)
wandb = False  # also log to Weights & Biases, where it is installed; WANDB_PROJECT and WANDB_NAME name project and run
# data, as in prepare.py
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''
tokenizer = 'mistral'
data_format = 'signatures'  # what they hold: signatures | ids
# batch
batch_size = 256  # sequences per update, over all processes; gradient accumulation follows from it
micro_batch_size = 8  # sequences per process and forward pass
block_size = 2048  # T, tokens per sequence
# model
num_layers = 12
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768  # d
intermediate_size = 2560
num_hashes = 4  # H; 0 is the Standard model
num_buckets = 16384  # B
num_lsh = 0
single_id = False
by_frequency = (
    False  # for studies: frequent tokens have buckets of their own (hashing.frequency_table); data_format=ids
)
ablation = ''  # of the method, for studies: mean_gate | hard_embeddings | no_cascade
loss = 'exact'  # exact: -log P(w), the distribution that is sampled from | product: the paper's, its coordinates summed
encoder_init = 'orthogonal'  # how Ws begins: orthogonal | identity | normal, the paper's (study/RESULTS.md)
embedding_scale = 8.0  # Ws begins so many times as large, and Standard's rows of E enter so; the paper's is 1.0
# optimizer: AdamW, linear warm-up, cosine to 0
learning_rate = 5e-4  # the maximum
embedding_lr_mult = 1.0  # E learns at so many times this rate
embedding_std = 0.02  # for studies: of E, drawn
max_steps = 20000  # updates
warmup_steps = 2000
lr_decay_steps = 0  # length of the schedule; 0 is max_steps
weight_decay = 0.1  # on every parameter of two or more dimensions
beta1 = 0.9
beta2 = 0.999
grad_clip = 1.0  # norm over all parameters; 0 is off
unfrozen_end_layers = 0  # of the first and of the last layers, the others are frozen; 0 trains all of them
seed = 42  # of the weights and of the order of the data
# system; None is the best that is there
device = None  # cuda | cuda:1 | cpu | mps
dtype = None  # bfloat16 | float32, of the matrix products; parameters and optimizer are float32
compile = None  # torch.compile, which needs a C compiler
deterministic = False  # on a GPU, too, each run has the same bits: slower
plain = False  # trains model.py as it stands, by autograd: slower and larger, for changing it
activation_checkpointing = False  # keeps only the inputs of the blocks, whose forward is computed twice; same gradients
timeout = 600  # seconds that processes wait for each other

config = configure(globals())
# A resumed run may change these settings, and no others. Its text stays (meta.identity): dataset, data_dir and bins may
# name another place or another kind of bins with the same text. It keeps its dtype unless another is asked for.
FREE_ON_RESUME = (
    'out_dir', 'eval_interval', 'init_from', 'auto_resume', 'keep_checkpoints', 'wandb', 'dataset', 'data_dir', 'data_format',
    'micro_batch_size', 'learning_rate', 'max_steps', 'warmup_steps', 'lr_decay_steps', 'grad_clip',
    'device', 'dtype', 'compile', 'deterministic', 'plain', 'activation_checkpointing', 'timeout',
)  # fmt: skip

# -----------------------------------------------------------------------------
# processes and device

sys.stdout.reconfigure(line_buffering=True)  # a file or a pipe, too, gets every line when it is printed
world = World()
master = world.rank == 0
out = Path(out_dir)
Model = MHF if plain else FusedMHF
checkpoints = Checkpoints(out_dir, keep_checkpoints, writes=master)
device = use_device(device, deterministic)
explain_crashes(world, checkpoints, device, micro_batch_size)
device_type = torch.device(device).type

# -----------------------------------------------------------------------------
# checks: the settings here, then the data and the model, all before anything is written

check_numbers(
    config,
    above_zero='batch_size micro_batch_size block_size max_steps eval_interval timeout learning_rate embedding_lr_mult',
    not_negative='warmup_steps lr_decay_steps weight_decay grad_clip num_hashes keep_checkpoints unfrozen_end_layers',
    below=dict(seed=2**64, beta1=1, beta2=1),
)
compile, no_compiler = pick_compile(compile, device)
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps} leaves nothing of the {schedule_steps} steps of the schedule')
accumulation = world.accumulation(batch_size, micro_batch_size)
if wandb and not importlib.util.find_spec('wandb'):
    raise InputError('wandb=True, but it is not installed: pip install wandb')

# -----------------------------------------------------------------------------
# the bins; the processes meet and agree

starts_from_model = init_from not in ('scratch', 'resume')
if auto_resume and checkpoints.there():
    init_from = 'resume'
meta = load_meta(config)
train_tokens = open_bins(config, meta, 'train')
val_tokens = open_bins(config, meta, 'val')
num_blocks = (len(train_tokens) - 1) // block_size
if num_blocks < 1:
    raise InputError(f'block_size={block_size}: {data_folder(config)} has {len(train_tokens):,} training tokens')
verified = Verified((train_tokens, val_tokens), world.rank, world.size)  # in a thread, while training runs
if world.distributed:
    world.meet(device, timeout)
    mine = {k: v for k, v in config.items() if k not in ('out_dir', 'data_dir')}  # a machine may have its own paths
    mine |= dict(init_from=init_from, device=device_type, torch=torch.__version__, tokenizer=meta['tokenizer_sha256'])
    world.agree(mine | {f'{split} bins': meta['splits'][split]['sha256'] for split in SPLITS})

# -----------------------------------------------------------------------------
# the model: from scratch, from the newest checkpoint, or from a folder or the hub

model, ckpt = world.together(lambda: init_model(init_from, checkpoints, Model))
source = checkpoints.last_path or init_from
if world.distributed:
    world.agree(dict(checkpoint=checkpoints.last_digest))
# a resumed run keeps its precision; a CPU's is measured, and what process 0 measured counts
dtype, why_dtype = world.of_first(pick_dtype(dtype or (ckpt and ckpt['config'].get('dtype')), device))
if starts_from_model:
    # its architecture counts, but the context and the loss are ours to choose
    architecture = asdict(model.config) | dict(block_size=block_size, loss=loss)
    config |= {name: value for name, value in architecture.items() if name in config}
if ckpt:
    check_settings(ckpt, source, config, FREE_ON_RESUME)
table = checked_table(config, meta, frequencies(train_tokens, meta['vocab_size']) if by_frequency else None)
data = identity(meta, table)
start_step = ckpt['step'] if ckpt else 0
best_val = ckpt['best_val'] if ckpt else math.inf
if ckpt:
    check_data(ckpt, source, data, out_dir)
    if start_step >= max_steps and not auto_resume:
        raise InputError(f'{source} is at step {start_step} already; max_steps={max_steps} leaves nothing to do')
    if start_step >= max_steps:
        print(f'{source} is at step {start_step} of {max_steps}: done')
        sys.exit()
if model:
    check_vocabulary(model, source, meta, table)
    model.config.block_size = block_size
    model.config.loss = loss
else:
    torch.manual_seed(seed)
    architecture = {name: value for name, value in config.items() if name in MHFConfig.__annotations__}
    architecture = MHFConfig(vocab_size=meta['vocab_size'], pad_id=meta['pad_id'], **architecture)
    with torch.device(device):  # a GPU draws other numbers than a CPU
        model = Model(architecture, table, meta['unused_ids'])
check_memory(model, device, micro_batch_size, accumulation, activation_checkpointing)
verified.wait(10)
checkpoints.make_folder()

# -----------------------------------------------------------------------------
# compile, DDP; the optimizer

autocast = torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()
raw_model = model.to(device)
raw_model.activation_checkpointing = activation_checkpointing
if unfrozen_end_layers:
    raw_model.layers[unfrozen_end_layers : len(raw_model.layers) - unfrozen_end_layers].requires_grad_(False)
if compile:
    raw_model.compile()
model = world.wrap(raw_model)
E = raw_model.embed.weight
trained = [p for p in model.parameters() if p.requires_grad]
matrices = [p for p in trained if p.dim() >= 2 and (p is not E or embedding_lr_mult == 1)]
others = [p for p in trained if p.dim() < 2]
groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
if embedding_lr_mult != 1:
    groups.insert(0, dict(params=[E], weight_decay=weight_decay, rate=embedding_lr_mult))
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=True)
if ckpt:
    try:
        optimizer.load_state_dict(ckpt['optimizer'])
    except (ValueError, KeyError, AttributeError) as e:
        raise InputError(f'{source} has the optimizer of another model ({e})') from None
    ckpt = None  # frees its memory
# One backward on zeros makes every .grad a view of a DDP bucket, so gradients exist once.
in_buckets = world.distributed and accumulation > 1
if in_buckets:
    nothing = torch.zeros(
        micro_batch_size, block_size, raw_model.config.num_coordinates, dtype=torch.int64, device=device
    )
    with autocast:
        model(nothing, nothing).backward()
    optimizer.zero_grad(set_to_none=False)

# -----------------------------------------------------------------------------
# the schedule, batches, validation


def get_lr(step):
    """The rate of the update that leads from `step` to step + 1."""
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    done = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
    return learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def read_batch(split, starts):
    """
    The sequences of block_size + 1 tokens that begin at each of `starts` in the Bins `split`: signatures (n, T + 1, H)
    or token ids (n, T + 1), int64, in pinned memory if there is a GPU. Raises InputError for a damaged bin.
    """
    tokens = np.stack([split[start : start + block_size + 1] for start in starts])
    limit = raw_model.config.buckets_per_coordinate if tokens.ndim == 3 else raw_model.config.vocab_size
    if tokens.max() >= limit:
        raise InputError(f'{data_folder(config)} has the number {tokens.max()}, the model {limit}: a damaged bin')
    tokens = torch.from_numpy(tokens.astype(np.int64))
    return tokens.pin_memory() if device_type == 'cuda' else tokens


def inputs_and_targets(tokens):
    """What read_batch gives -> the signatures of inputs and targets, each (n, T, H), on the device."""
    tokens = tokens.to(device, non_blocking=True)
    signatures = tokens if tokens.dim() == 3 else raw_model.signatures[tokens]
    return signatures[:, :-1], signatures[:, 1:]


def micro_batches():
    """The micro-batches of this process, from start_step on. A thread runs this, which has a current GPU of its own."""
    if device_type == 'cuda':
        torch.cuda.set_device(device)
    for step in range(start_step, max_steps):
        blocks = block_indices(step, batch_size, num_blocks, seed)
        for micro in blocks.reshape(accumulation, world.size, micro_batch_size)[:, world.rank]:
            yield read_batch(train_tokens, micro * block_size)


# seconds between two updates of a progress bar: a file keeps all of them
redraw_interval = 0.2 if sys.stderr.isatty() else 20


@torch.no_grad()
def evaluate():
    """Validates on all held-out tokens, in order, shared by the processes: a dict of three numbers."""
    n = len(val_tokens) - 1
    starts = list(range(0, n, block_size))
    whole = n // block_size
    batches = [starts[k : min(k + micro_batch_size, whole)] for k in range(0, whole, micro_batch_size)]
    if whole < len(starts):
        batches.append(starts[whole:])  # the last, shorter block
    sums = torch.zeros(2, dtype=torch.float64)
    bar = tqdm(
        batches[world.rank :: world.size],
        desc='validate',
        unit='batch',
        leave=False,
        delay=1,
        disable=not master,
        mininterval=redraw_interval,
    )
    for batch in bar:
        x, y = inputs_and_targets(read_batch(val_tokens, batch))
        with autocast:
            losses = raw_model.token_losses(x, y)
        sums += torch.stack([of_tokens.double().sum().cpu() for of_tokens in losses])
    product, nats = (world.sum(sums, device) / n).tolist()
    bits = nats * n / math.log(2) / meta['splits']['val']['bytes']
    return dict(val_loss=product if trains_product else nats, val_nats=nats, val_bpb=bits)


# -----------------------------------------------------------------------------
# the log, signals


def append_to_log(text):
    """Appends to log.jsonl: a step that a resumed run repeats has two lines there, and readers keep the last."""
    try:
        with open(out / 'log.jsonl', 'a') as f:
            f.write(text)
    except OSError as e:  # disk full, or gone
        raise InputError(f'{out / "log.jsonl"} cannot be written ({e}); {checkpoints.kept()}') from None


def log(**event):
    append_to_log(json.dumps(event) + '\n')
    if wandb:
        wandb_run.log(event, step=event['step'])


received = []  # (signal, when)


def stop_after_this_step(signum, frame):
    """
    The first signal makes the loop end after its step, a second one stops at once. But a signal within 5 s of the first
    may come from torchrun, which hands on what its workers have had already.
    """
    now = time.monotonic()
    received.append((signum, now))
    if len(received) == 1:
        return
    from_torchrun = (world.distributed or signum == signal.SIGTERM) and now - received[0][1] < 5
    if not from_torchrun:
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)
        signal.raise_signal(signum)


# -----------------------------------------------------------------------------
# what is said at the start

c = raw_model.config
trains_product = c.loss == 'product' and c.num_hashes > 0
tokens_per_step = batch_size * block_size
if master:
    interface, decoder = raw_model.num_params()
    name = f'MultiHashFormer H={c.num_hashes} B={c.num_buckets}, {c.loss} loss' if c.num_hashes else 'Standard model'
    print(f'{name}: {interface:,} parameters of the embedding interface + {decoder:,} of the decoder')
    sequences = f'{batch_size} sequences = {world.size} process(es) x {micro_batch_size} x {accumulation}'
    print(f'{device}, {dtype}, compile={compile}; {sequences}')
    if why_dtype:
        print(f'dtype={dtype}: {why_dtype}')
    if device_type == 'cuda' and no_compiler:
        print(f'not compiled: {no_compiler}')
    if plain:
        print('the plain model')
    epochs = max_steps * batch_size / num_blocks
    print(f'{max_steps:,} steps x {tokens_per_step:,} tokens, {epochs:.2f} epochs of {data_folder(config)}')
    if unfrozen_end_layers:
        frozen = sum(p.numel() for p in raw_model.parameters() if not p.requires_grad)
        print(
            f'{frozen:,} parameters are frozen: all layers but the first {unfrozen_end_layers} and the last {unfrozen_end_layers}'
        )
    if init_from == 'resume':
        print(f'resumed at step {start_step}')
    log_path = out / 'log.jsonl'
    if log_path.is_file() and not log_path.read_bytes().endswith(b'\n'):
        append_to_log('\n')  # a crash left half a line
    else:
        append_to_log('')
    if wandb:
        project = os.environ.get('WANDB_PROJECT', 'multihashformer')
        name = os.environ.get('WANDB_NAME', out.name)
        wandb_run = importlib.import_module('wandb').init(project=project, name=name, config=config)
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, stop_after_this_step)

# -----------------------------------------------------------------------------
# the loop

# the bar appears after the first step
bar = tqdm(
    total=max_steps,
    initial=start_step,
    unit='step',
    desc='train',
    delay=1,
    disable=not master,
    mininterval=redraw_interval,
)
speeds = []
batches = prefetch(micro_batches())
with bar:
    for step in range(start_step, max_steps):
        checkpoints.raise_if_failed()
        if verified.damage:
            raise InputError(f'{verified.damage}; stopped at step {step}, {checkpoints.kept()}')
        began = time.perf_counter()
        lr = get_lr(step)
        for group in optimizer.param_groups:
            group['lr'] = lr * group.get('rate', 1)
        mean_loss = torch.zeros((), device=device)
        for k in range(accumulation):
            x, y = inputs_and_targets(next(batches))
            if in_buckets:  # gradients are exchanged once per update
                model.require_backward_grad_sync = k == accumulation - 1
            with autocast:  # micro-batches are equally long, so the mean of their means is the mean over all tokens
                micro_loss = model(x, y) / accumulation
            micro_loss.backward()
            mean_loss += micro_loss.detach()
        stopping = received[0][0] if received else 0
        shared = world.sum(torch.stack([mean_loss / world.size, mean_loss.new_full((), stopping)]))
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
        mean_loss, others_stop = shared.tolist()
        if others_stop and not stopping:
            stopping = signal.SIGTERM
        if not math.isfinite(mean_loss + norm):
            wrong = f'loss {mean_loss}, gradient norm {norm}'
            raise InputError(f'step {step}: {wrong}; stopped before the update, {checkpoints.kept()}')
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_buckets)
        speeds.append(tokens_per_step / (time.perf_counter() - began))

        done = step + 1
        tokens = done * tokens_per_step
        validating = done % eval_interval == 0 or done == max_steps
        best = False
        if master:
            speed = round(speeds[-1], 1)
            log(step=done, tokens=tokens, loss=mean_loss, lr=lr, grad_norm=norm, tokens_per_s=speed)
            bar.set_postfix_str(f'loss {mean_loss:.3f}, {speeds[-1]:,.0f} tokens/s', refresh=False)
            bar.update()
            # from now on there is a bar, whose last line is also ended in a file
            bar.delay = 0
        if validating:
            result = evaluate()
            if device_type == 'cuda':
                result['peak_gpu_mb'] = torch.cuda.max_memory_allocated() / 1e6
            best = result['val_loss'] < best_val
            best_val = min(best_val, result['val_loss'])
            if master:
                log(step=done, tokens=tokens, **result)
                # with the exact loss both are one number
                numbers = 'validation loss {val_loss:.4f}, ' if trains_product else 'validation: '
                numbers += '{val_nats:.4f} nats per token, {val_bpb:.4f} bits per byte'
                if best:
                    numbers += ' (best)'
                bar.write(f'step {done}: {numbers.format(**result)}')
        if validating or stopping:
            state = dict(
                model=raw_model.state_dict(),
                model_config=asdict(raw_model.config),
                optimizer=optimizer.state_dict(),
                config=config | dict(dtype=dtype),
                step=done,
                best_val=best_val,
                data=data,
            )
            checkpoints.save(state, best)
        if stopping:
            break
    checkpoints.wait()

# -----------------------------------------------------------------------------
# the last line

world.leave()
if done < max_steps:
    if master:
        print(f'stopped by signal {stopping}; {checkpoints.kept()}', file=sys.stderr)
    sys.exit(128 + stopping)
if master:
    steady = speeds[min(5, len(speeds) - 1) :]  # without warm-up
    print(f'{statistics.harmonic_mean(steady):,.0f} tokens/s; {out}/ckpt.pt, log.jsonl, loss.png')
    title = f'{out_dir}: {sum(raw_model.num_params()):,} parameters'
    plot.loss_curve(plot.read_log(out / 'log.jsonl'), title, out / 'loss.png')
