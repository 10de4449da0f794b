"""
Trains a MultiHashFormer or a Standard model. The defaults are the paper's 100M H4B16K.

    $ python train.py config/mhf_tiny.py                                  # one process: a GPU if available, else a CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --standalone --nproc_per_node=2 train.py config/mhf_tiny.py --device=cpu --micro_batch_size=4

    two machines, the first at 10.0.0.1; the second has --node_rank=1:
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py X

    one command that starts a run and resumes it (the variable avoids pytorch/pytorch issue 135712):
    $ TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node=8 --max-restarts=3 train.py X --auto_resume

Reads the bins that prepare.py writes with the same config. README.md, "Code", traces a document to its loss.
Writes to out_dir: ckpt.pt (the newest), ckpt_previous.pt, ckpt_best.pt, and log.jsonl. The global batch at a step
depends only on (seed, step), so a run can resume on any number of processes. With the same number of processes and
settings, on a CPU or with --deterministic on a GPU, it ends with the same bits as an uninterrupted run. A resumed run
may change every setting, except those in FIXED, which include the training data, and those of the model, which include
its initialization. Another value of a model's setting is an error on the command line and is ignored in a config.

On SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGUSR1 a run finishes its step, saves a checkpoint and exits with 128 + signal.
torchrun kills it 30 s after the signal (torch 2.13: TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds); if the checkpoint takes
longer, the one before remains. To go back to the previous checkpoint, delete ckpt.pt.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from configurator import check_numbers, command_line_names, configure
from hashing import frequency_table
from mhf import runtime
from mhf.checkpoint import find_checkpoints, load, lock, make_config, resume, save
from mhf.data import block_indices, check_tokenizer, count_tokens, data_folder, get_table, open_bins, prefetch
from mhf.errors import InputError, Output
from mhf.tokenizers import get_tokenizer
from model import MHF, MHFConfig

# output
out_dir = 'out'
eval_interval = 1000  # steps between validations; each also saves a checkpoint
log_interval = 10  # steps between printed lines; log.jsonl has every step
wandb = False  # also log to Weights & Biases, which reads WANDB_PROJECT and WANDB_NAME
# data, as in prepare.py
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''
tokenizer = 'mistral'
data_format = 'signatures'  # signatures | ids
# initialization
# scratch | resume: the newest checkpoint in out_dir | only the weights of an out_dir, *.pt, released folder or hub id
init_from = 'scratch'
auto_resume = False  # resume if out_dir has a checkpoint, else init_from: for clusters that requeue jobs
seed = 42  # of weight initialization and data order
# batch
batch_size = 256  # sequences per step, over all processes; gradient accumulation follows from it
micro_batch_size = 8  # sequences per process and forward pass
block_size = 2048  # T, tokens per sequence
# model: the paper's 100M H4B16K
num_layers = 12
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768  # d
intermediate_size = 2560
num_hashes = 4  # H; 0 is the Standard model
num_buckets = 16384  # B; a multiple of 8 is faster on a GPU
num_lsh = 0
single_id = False
ablation = ''  # mean_gate | hard_embeddings | no_cascade
loss = 'product'  # product: the paper's sum of cross-entropies | exact: -log P(w)
encoder_init = 'normal'  # initialization of W_s (HashEncoder.out): normal, std 0.02 | orthogonal
# a folder of prepared ids: a new model's signatures depend on how often a token occurs in it (hashing.frequency_table)
counts_from = ''
embedding_scale = 1.0  # multiplies W_s at initialization (MHF) or the embedding row (Standard)
# optimizer: AdamW, linear warm-up, cosine decay to 0
learning_rate = 5e-4  # the maximum
embedding_lr_mult = 1.0  # multiplies the learning rate of E
max_steps = 20000
warmup_steps = 2000
lr_decay_steps = 0  # length of the schedule; 0: max_steps
weight_decay = 0.1  # of parameters with two or more dimensions
beta1 = 0.9
beta2 = 0.999
grad_clip = 1.0  # norm over all parameters; 0: off
unfrozen_end_layers = 0  # train the first and last n layers and the parameters outside layers; 0: all layers
# system
device = None  # cuda | cuda:1 | cpu | mps; None: a GPU if available, else the CPU
# bfloat16 | float32 (TF32 on a GPU), of matrix products; None: the faster one. Parameters and optimizer are float32
dtype = None
compile = None  # torch.compile, which needs a C compiler; None: on a GPU
# with compile and one process: capture a micro-batch as a CUDA graph; False if the model synchronizes with the CPU
cuda_graph = True
deterministic = False  # bit-reproducible on a GPU, slower
activation_checkpointing = False  # keep only the inputs of the blocks, and compute their forward pass twice

config = configure(globals())
Output.ignores_errors = True  # a closed pipe or terminal never ends a run
# what a resumed run may not change, because it decides which data a step reads or what is optimized
FIXED = ('seed', 'batch_size', 'block_size', 'loss', 'unfrozen_end_layers', 'tokenizer_sha256', 'train_sha256')


def describe_changes(old, new):
    """Describes the names in both dicts whose values differ: 'seed=7 (was 42), loss=exact (was product)'."""
    names = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    return ', '.join(f'{name}={new[name]!s:.64} (was {old[name]!s:.64})' for name in names)


# -----------------------------------------------------------------------------
# setup: settings, processes

check_numbers(config, 'batch_size micro_batch_size block_size max_steps eval_interval log_interval', low=1)
check_numbers(config, 'learning_rate embedding_lr_mult warmup_steps lr_decay_steps weight_decay grad_clip')
check_numbers(config, 'num_hashes unfrozen_end_layers')
check_numbers(config, 'beta1 beta2', below=1)
check_numbers(config, 'seed', below=2**64)
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps}: must be below the {schedule_steps} steps of the schedule')
master = runtime.is_rank0()
if master:
    lock(out_dir)
rank, world_size, device = runtime.init_distributed(device, deterministic)
device_type = torch.device(device).type
compile = runtime.pick_compile(compile, device)
accumulation, remainder = divmod(batch_size, micro_batch_size * world_size)
if remainder:
    factors = f'micro_batch_size x processes = {micro_batch_size} x {world_size}'
    fix = 'use a smaller micro_batch_size or another batch_size'
    raise InputError(f'batch_size={batch_size}: must be a multiple of {factors}; {fix}')
tokens_per_step = batch_size * block_size

# -----------------------------------------------------------------------------
# setup: the checkpoint or the model from which the run starts

checkpoints = find_checkpoints(out_dir)
is_resumed = init_from == 'resume' or auto_resume and bool(checkpoints)
if checkpoints and not is_resumed:
    fix = 'resume it with --init_from=resume, or choose another --out_dir'
    raise InputError(f'{out_dir} already has a checkpoint, {checkpoints[0].name}; {fix}')
source = out_dir if is_resumed else init_from
model = None
ckpt = None
if is_resumed:
    model, ckpt = resume(out_dir)
elif init_from != 'scratch':
    loaded = load(init_from, tokenizer)
    model = loaded.model
first_step = ckpt['step'] if ckpt else 0
best_val_loss = ckpt['best_val_loss'] if ckpt else math.inf
same_on_all_ranks = {name: value for name, value in config.items() if name not in ('out_dir', 'data_dir')}
same_on_all_ranks |= {'resume': is_resumed, 'checkpoint step': first_step, 'device type': device_type}
runtime.check_same_on_all_ranks(same_on_all_ranks | {'torch version': torch.__version__})
if ckpt and first_step >= max_steps:
    reached = f'{out_dir} is already at step {first_step} of max_steps={max_steps}'
    if not auto_resume:
        raise InputError(f'{reached}; raise max_steps')
    if master:
        print(reached)
    runtime.cleanup()
    sys.exit(0)
# the architecture is that of a loaded model; other values on the command line are errors, in a config file are ignored
names = (MHFConfig.__annotations__.keys() & config.keys()) - {'block_size', 'loss'}
architecture = {name: getattr(model.config, name) for name in names} if model else {}
run_config = config | architecture
if 2 * unfrozen_end_layers > run_config['num_layers']:
    limit = f'half of num_layers={run_config["num_layers"]}'
    raise InputError(f'unfrozen_end_layers={unfrozen_end_layers}: must be at most {limit}, or 0 to train all layers')

# -----------------------------------------------------------------------------
# setup: data

train_bins, val_bins, meta = open_bins(run_config)
num_blocks = (len(train_bins) - 1) // block_size
if num_blocks < 1:
    tokens = f'{data_folder(run_config)} has only {len(train_bins):,} training tokens'
    raise InputError(f'block_size={block_size}: {tokens}; use a smaller block_size, or prepare more text')
data = dict(
    tokenizer=meta['tokenizer'],
    tokenizer_sha256=meta['tokenizer_sha256'],
    train_sha256=train_bins.fingerprint,
    val_sha256=val_bins.fingerprint,
)
runtime.check_same_on_all_ranks(data)
table = get_table(run_config, meta)
if model and not is_resumed:
    check_tokenizer(data_folder(run_config), meta, loaded.tok)
fixed = {name: architecture[name] for name in architecture.keys() & command_line_names()}
if ckpt:
    fixed |= {name: value for name, value in (ckpt['config'] | ckpt['data']).items() if name in FIXED}
changes = describe_changes(fixed, config | data)
if changes:
    fix = 'undo the change, or start a new run with another --out_dir' if ckpt else 'undo the change'
    raise InputError(f'{source} was trained with other settings: {changes}; {fix}')
if (
    model
    and table is not None
    and not model.config.frequency_ranges
    and (model.signatures[: len(table)].numpy() != table).any()
):
    raise InputError(f"{source}: its table is not that of tokenizer '{meta['tokenizer']}'; change --data_dir")
if ckpt and not ckpt['optimizer']['state']:
    fix = f'start a new run with --init_from={source} and another --out_dir'
    raise InputError(f'{out_dir}: its checkpoint has no optimizer state, so it cannot be resumed; {fix}')

# -----------------------------------------------------------------------------
# setup: model

if model:
    model.config.block_size = block_size
    model.config.loss = loss
else:
    torch.manual_seed(seed)
    model_config = make_config(run_config, vocab_size=meta['vocab_size'], pad_id=meta['pad_id'])
    if counts_from:
        tok = get_tokenizer(tokenizer)
        counts = count_tokens(counts_from, tok)
        table, model_config.frequency_ranges = frequency_table(
            tok.tokens, counts, num_hashes, num_buckets, meta['pad_id']
        )
    with torch.device(device):  # a GPU draws other random numbers than a CPU
        model = MHF(model_config, table, meta['unused_ids'])
        model.init_weights()
if ckpt and dtype is None:
    dtype = ckpt['config']['dtype']
dtype = runtime.pick_dtype(dtype, device)
run_config['dtype'] = dtype
autocast = torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()
model = model.to(device)
raw_model = model
raw_model.activation_checkpointing = activation_checkpointing
if unfrozen_end_layers:
    raw_model.layers[unfrozen_end_layers : len(raw_model.layers) - unfrozen_end_layers].requires_grad_(False)
if compile:
    raw_model.compile()
    torch._dynamo.config.optimize_ddp = False  # one graph; DDP exchanges the gradients after its backward pass
if world_size > 1:
    model = runtime.wrap_ddp(raw_model, micro_batch_size, autocast)
trains_product = raw_model.config.loss == 'product' and raw_model.config.num_hashes > 0

# -----------------------------------------------------------------------------
# setup: optimizer. E has a learning-rate multiplier, and vectors have no weight decay

E = raw_model.embed.weight
trained = [p for p in raw_model.parameters() if p.requires_grad]
groups = [
    dict(params=[E], weight_decay=weight_decay, lr_mult=embedding_lr_mult),
    dict(params=[p for p in trained if p.dim() >= 2 and p is not E], weight_decay=weight_decay, lr_mult=1.0),
    dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0, lr_mult=1.0),
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=True)
if ckpt:
    # copied, because the checkpoint is mapped to a file that the run will replace
    state = tree_map_only(torch.Tensor, lambda x: x.to(device, copy=True), ckpt['optimizer']['state'])
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=state))  # with the settings of this run
    if master:
        print(f'resumed at step {first_step}')
        previous = {k: v for k, v in ckpt['config'].items() if k not in ('init_from', 'auto_resume')}
        changes = describe_changes(previous, run_config)
        if changes:
            print(f'changed settings: {changes}')
    # a checkpoint of commit d585c03 has no fingerprint of its validation data
    if ckpt['data'].get('val_sha256', data['val_sha256']) != data['val_sha256']:
        best_val_loss = math.inf
        best_path = Path(out_dir) / 'ckpt_best.pt'
        if master and best_path.exists():
            print('other validation data: ckpt_best.pt becomes ckpt_best_old.pt')
            os.replace(best_path, Path(out_dir) / 'ckpt_best_old.pt')
    ckpt = None  # frees its memory

# -----------------------------------------------------------------------------
# learning rate, batches, validation


def get_lr(step):
    """
    Learning rate of update `step` (the first is 0): rises linearly from 0 for warmup_steps, then falls as a cosine to 0
    at schedule_steps, which is lr_decay_steps or max_steps.
    """
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
    return learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def get_batch(bins, starts):
    """Sequences at the token offsets `starts` -> signatures of inputs and targets, each (n, T, H) int64."""
    tokens = np.stack([bins[start : start + block_size + 1] for start in starts])
    tokens = torch.from_numpy(tokens.astype(np.int64))
    if device_type == 'cuda':
        tokens = tokens.pin_memory()
    tokens = tokens.to(device, non_blocking=True)
    signatures = tokens if tokens.dim() == 3 else raw_model.signatures[tokens]
    return signatures[:, :-1], signatures[:, 1:]


def training_batches():
    """
    Yields the micro-batches of this rank from first_step on. Micro-batch k of rank r contains the sequences from
    (k * world_size + r) * micro_batch_size on of the step's batch_size. Runs in a thread, so it sets the CUDA device.
    """
    if device_type == 'cuda':
        torch.cuda.set_device(device)
    for step in range(first_step, max_steps):
        blocks = block_indices(step, batch_size, num_blocks, seed)
        for micro_batch in blocks.reshape(accumulation, world_size, micro_batch_size)[:, rank]:
            yield get_batch(train_bins, micro_batch * block_size)


@torch.no_grad()
def evaluate():
    """Validates on all held-out tokens, in order; the ranks share them. Returns a dict for the log."""
    n = len(val_bins) - 1
    starts = range(0, n - n % block_size, block_size)
    batches = [starts[k : k + micro_batch_size] for k in range(0, len(starts), micro_batch_size)]
    if n % block_size:
        batches.append([n - n % block_size])  # a shorter sequence
    losses = ('product', 'exact') if trains_product else ('exact',)
    sums = torch.zeros(len(losses), dtype=torch.float64)
    for batch in tqdm(batches[rank::world_size], desc='validate', leave=False, disable=None if master else True):
        x, y = get_batch(val_bins, batch)
        # the few smaller batches run eagerly, because compiling their shapes would take longer
        eager = compile and x.shape[:2] != (micro_batch_size, block_size)
        with autocast, torch.compiler.set_stance('force_eager') if eager else contextlib.nullcontext():
            token_losses = raw_model.token_losses(x, y, losses)
        sums += torch.stack([token_loss.cpu().double().sum() for token_loss in token_losses])
    means = (runtime.all_reduce(sums) / n).tolist()
    nats = means[-1]  # -log P(w); equals val_loss unless the run trains the product loss
    return dict(val_loss=means[0], val_nats=nats, val_bpb=nats * n / math.log(2) / val_bins.bytes)


def check_finite(step, **values):
    """Ends the run before it updates or saves its weights if a value, the same on all ranks, is not finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            fix = 'use a smaller learning_rate, with --auto_resume, which continues from the newest checkpoint'
            raise InputError(f'step {step}: {name}={value}; {fix}')


# -----------------------------------------------------------------------------
# gradients


def compute_gradients(is_first, x, y):
    """
    Adds the gradients of a micro-batch to those of the step's earlier ones; is_first: there are none. Returns its share
    of the mean loss over all tokens.
    """
    if is_first:
        optimizer.zero_grad(set_to_none=world_size == 1)  # DDP's gradients are views of its buckets
    with autocast:
        micro_loss = model(x, y) / accumulation
    micro_loss.backward()
    return micro_loss.detach()


first_gradients = partial(compute_gradients, True)
further_gradients = partial(compute_gradients, False)
if compile and cuda_graph and device_type == 'cuda' and world_size == 1:
    start = time.perf_counter()
    example = get_batch(train_bins, [0] * micro_batch_size)
    pool = torch.cuda.graph_pool_handle()
    first_gradients = runtime.capture(first_gradients, *example, pool=pool)
    if accumulation > 1:
        further_gradients = runtime.capture(further_gradients, *example, pool=pool)
    print(f'compiled in {time.perf_counter() - start:.0f} s')

# -----------------------------------------------------------------------------
# checkpoints, log, signals


def get_checkpoint(step):
    """Returns the contents of a checkpoint after `step` steps."""
    return dict(
        model=raw_model.state_dict(),
        model_config=asdict(raw_model.config),
        optimizer=optimizer.state_dict(),
        config=run_config,
        step=step,
        best_val_loss=best_val_loss,
        data=data,
        add_bos=True,  # prepare.py puts bos before each document
    )


log_path = Path(out_dir) / 'log.jsonl'
log_lines = log_path.read_bytes().splitlines(keepends=True) if master and log_path.exists() else []
# a run that was killed before its first checkpoint may have written a part of its first line
if log_lines and not is_resumed and not b'{"step": '.startswith(log_lines[0][:9]):
    raise InputError(f'{log_path} is not the log of a run; choose another --out_dir')
if wandb and master:
    try:
        import wandb as weights_and_biases
    except ImportError as e:
        raise InputError(f'wandb=True: {e}; pip install wandb, or omit --wandb') from None
    wandb_run = weights_and_biases.init(config=run_config)
if master:
    log_path.touch()
    # drops the steps that a resumed run repeats, and an incomplete last line
    steps = [re.match(rb'{"step": (\d+), .*}\n', line) for line in log_lines]
    os.truncate(log_path, sum(len(match[0]) for match in steps if match and int(match[1]) <= first_step))


def log(**event):
    """Writes an event to log.jsonl. If it cannot, saves a checkpoint and raises InputError."""
    try:
        with open(log_path, 'a') as f:
            f.write(json.dumps(event) + '\n')
    except OSError as e:  # a full disk
        save(out_dir, get_checkpoint(event['step']), is_best=False)
        raise InputError(f'{log_path} cannot be written ({e}); resume with --init_from=resume') from None
    if wandb:
        wandb_run.log(event, step=event['step'])


received_signals = []


def request_stop(signum, frame):
    """Stops the loop after its step. A second Ctrl-C kills a single process; torchrun may send one Ctrl-C twice."""
    received_signals.append(signum)
    if signum == signal.SIGINT and world_size == 1:
        signal.signal(signum, signal.SIG_DFL)


for name in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1'):
    signum = getattr(signal, name, None)  # Windows has only the first two
    if signum and signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
        signal.signal(signum, request_stop)

# -----------------------------------------------------------------------------
# training loop

if master:
    c = raw_model.config
    hash_params, layer_params = raw_model.num_params()
    name = f'MultiHashFormer H={c.num_hashes} B={c.num_buckets}, {c.loss} loss' if c.num_hashes else 'Standard model'
    print(f'{name}: {hash_params:,} parameters in E and hash modules + {layer_params:,} in layers and final norm')
    if trains_product:
        print('P(w) will be overconfident, because the product loss does not train P(w); --loss=exact does')
    sequences = f'{batch_size} sequences = {world_size} process(es) x {micro_batch_size} x {accumulation}'
    print(f'{device}, {dtype}, compile={compile}; {sequences}')
    epochs = max_steps * batch_size / num_blocks
    print(f'{max_steps:,} steps x {tokens_per_step:,} tokens, {epochs:.2f} epochs of {data_folder(run_config)}')
peak = runtime.peak_flops(device) if dtype == 'bfloat16' else None  # of one GPU
step_seconds = []  # without validation and saving
batches = prefetch(training_batches())
bar = tqdm(total=max_steps, initial=first_step, desc='train', unit='step', disable=None if master else True)
for step in range(first_step, max_steps):
    start = time.perf_counter()
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_mult']
    loss_sum = torch.zeros((), device=device)
    for k in range(accumulation):
        x, y = next(batches)
        if world_size > 1:  # gradients are exchanged once per step
            model.require_backward_grad_sync = k == accumulation - 1
        loss_sum += further_gradients(x, y) if k else first_gradients(x, y)
    stop_signal = received_signals[0] if received_signals else 0
    shared = runtime.all_reduce(torch.stack([loss_sum / world_size, loss_sum.new_full((), stop_signal)]))
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
    mean_loss, any_signal = shared.tolist()
    if any_signal and not stop_signal:
        stop_signal = signal.SIGTERM  # another rank received it
    done = step + 1
    check_finite(done, loss=mean_loss, grad_norm=grad_norm)
    optimizer.step()
    step_seconds.append(time.perf_counter() - start)

    tokens = done * tokens_per_step
    bar.update()
    if master:
        tokens_per_s = round(tokens_per_step / step_seconds[-1], 1)
        log(step=done, tokens=tokens, loss=mean_loss, lr=lr, grad_norm=grad_norm, tokens_per_s=tokens_per_s)
    if master and (done % log_interval == 0 or done == max_steps):
        seconds = np.median(step_seconds[-log_interval:])
        speed = tokens_per_step / seconds
        line = f'loss {mean_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.2f}, {seconds * 1e3:.0f} ms, {speed:,.0f} tokens/s'
        if peak:
            line += f', MFU {raw_model.estimate_flops() * speed / (peak * world_size):.1%}'
        tqdm.write(f'step {done}/{max_steps}: {line}')
    validates = done % eval_interval == 0 or done == max_steps
    is_best = False
    if validates:
        result = evaluate()
        val_loss = result['val_loss']
        check_finite(done, val_loss=val_loss)
        is_best = val_loss < best_val_loss
    if validates and master:
        log(step=done, tokens=tokens, **result)
        nats = f', -log P(w) {result["val_nats"]:.4f} nats per token' if trains_product else ''
        best = ' (best)' if is_best else ''
        tqdm.write(f'step {done}: validation loss {val_loss:.4f}, {result["val_bpb"]:.4f} bits per byte{nats}{best}')
    if is_best:
        best_val_loss = val_loss
    if master and (validates or stop_signal):
        save(out_dir, get_checkpoint(done), is_best)
    if validates or stop_signal:
        runtime.barrier()  # waits up to an hour for the checkpoint
    if stop_signal:
        break

# -----------------------------------------------------------------------------
# summary

bar.close()
runtime.cleanup()
if done < max_steps:
    if master:
        print(f'stopped by signal {stop_signal:d} at step {done}; resume with --init_from=resume', file=sys.stderr)
    sys.exit(128 + stop_signal)
if master:
    print(f'{out_dir}: ckpt.pt, ckpt_best.pt, log.jsonl')
