"""
Trains a MultiHashFormer or a Standard model. The defaults are the paper's 100M H4B16K.

    $ python train.py config/mhf_tiny.py                                  # one process: a GPU if available, else a CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --standalone --nproc_per_node=2 train.py config/mhf_tiny.py --device=cpu --micro_batch_size=4

    two machines, the first at 10.0.0.1; the second has --node_rank=1:
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py X

    one command that starts a run and resumes it (the variable avoids pytorch/pytorch issue 135712):
    $ TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node=8 --max-restarts=3 train.py X --auto_resume

Reads the bins that prepare.py writes with the same config. The docstring of prepare.py traces a document to its loss.
Writes to out_dir: ckpt.pt (the newest), ckpt_best.pt, the last two as ckpt_000123.pt, log.jsonl and loss.png. On
SIGTERM or Ctrl-C it finishes the step, saves a checkpoint and exits with 143 or 130; for a checkpoint that takes over
30 s to write, set TORCH_ELASTIC_SHUTDOWN_TIMEOUT. The global batch at a step depends only on (seed, step), so a run can
resume on any number of processes. A resumed run may change only the settings in FREE_ON_RESUME. With the same number of
processes and settings, on a CPU or with --deterministic on a GPU, it ends with the same bits as an uninterrupted run.
To go back to an earlier checkpoint, delete ckpt.pt and the later ckpt_000123.pt.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import InputError, check_numbers, command_line_names, configure, print_error
from hashing import fingerprint
from mhf import runtime
from mhf.checkpoint import Checkpoints
from mhf.chunked import ChunkedMHF, make_config
from mhf.data import block_indices, data_folder, get_table, open_bins, prefetch
from mhf.released import check_vocabulary, init_model
from model import MHFConfig

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
num_buckets = 16384  # B
num_lsh = 0
single_id = False
ablation = ''  # mean_gate | hard_embeddings | no_cascade
loss = 'product'  # product: the paper's sum of cross-entropies | exact: -log P(w)
encoder_init = 'normal'  # initialization of W_s (HashEncoder.out): normal, std 0.02 | orthogonal
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
deterministic = False  # bit-reproducible on a GPU, slower
activation_checkpointing = False  # keep only the inputs of the blocks, and compute their forward pass twice

config = configure(globals())
# The settings that a resumed run may change; the number of processes may change too. dataset and data_dir may change
# only if the data are identical. dtype=None keeps the checkpoint's. A resumed run, and a run with --init_from=MODEL,
# keeps the architecture of the loaded model: another value in a config file is ignored; on the command line it is an
# error.
FREE_ON_RESUME = {
    'out_dir', 'eval_interval', 'log_interval', 'wandb', 'dataset', 'data_dir', 'init_from', 'auto_resume',
    'micro_batch_size', 'learning_rate', 'max_steps', 'warmup_steps', 'lr_decay_steps', 'grad_clip', 'device', 'dtype',
    'compile', 'deterministic', 'activation_checkpointing',
}  # fmt: skip

# -----------------------------------------------------------------------------
# setup: settings and processes

check_numbers(config, 'batch_size micro_batch_size block_size max_steps eval_interval log_interval', low=1)
check_numbers(config, 'learning_rate embedding_lr_mult', positive=True)
check_numbers(config, 'warmup_steps lr_decay_steps weight_decay grad_clip num_hashes unfrozen_end_layers')
check_numbers(config, 'beta1 beta2', below=1)
check_numbers(config, 'seed', below=2**64)
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps}: must be below the {schedule_steps} steps of the schedule')
checkpoints = Checkpoints(out_dir, writes=runtime.is_rank0())
checkpoints.lock()
rank, world_size, device = runtime.init_distributed(device, deterministic)
master = rank == 0
device_type = torch.device(device).type
compile = runtime.pick_compile(compile, device)
accumulation, remainder = divmod(batch_size, micro_batch_size * world_size)
if remainder:
    product = f'micro_batch_size x processes = {micro_batch_size} x {world_size}'
    fix = 'use a smaller micro_batch_size or another batch_size'
    raise InputError(f'batch_size={batch_size}: must be a multiple of {product}; {fix}')
tokens_per_step = batch_size * block_size

# -----------------------------------------------------------------------------
# setup: data and loaded model

resume = init_from == 'resume' or auto_resume and bool(checkpoints.list())
model, ckpt, tokenizer_sha256 = init_model('resume' if resume else init_from, checkpoints, ChunkedMHF)
source = out_dir if resume else init_from
first_step = ckpt['step'] if ckpt else 0
best_val_loss = ckpt['best_val_loss'] if ckpt else math.inf
# settings that a loaded model determines: the fields of MHFConfig except these two
model_settings = MHFConfig.__annotations__.keys() & config.keys() - {'block_size', 'loss'} if model else set()
run_config = config | {name: getattr(model.config, name) for name in model_settings}

train_bins, val_bins, meta = open_bins(run_config, config)
num_blocks = (len(train_bins) - 1) // block_size
if num_blocks < 1:
    tokens = f'{data_folder(run_config)} has only {len(train_bins):,} training tokens'
    raise InputError(f'block_size={block_size}: {tokens}; use a smaller block_size, or prepare more text')
same_on_all_ranks = {name: value for name, value in config.items() if name not in ('out_dir', 'data_dir')}
same_on_all_ranks |= {'resume': resume, 'checkpoint step': first_step, 'device type': device_type}
same_on_all_ranks |= {'training data': train_bins.fingerprint, 'validation data': val_bins.fingerprint}
runtime.check_same_on_all_ranks(same_on_all_ranks | {'torch version': torch.__version__})

table = get_table(run_config, meta)
data = dict(
    tokenizer=meta['tokenizer'],
    tokenizer_sha256=meta['tokenizer_sha256'],
    table_sha256=None if table is None else fingerprint(table),
    train_sha256=train_bins.fingerprint,
)

# -----------------------------------------------------------------------------
# setup: refuse changes of a resumed run outside FREE_ON_RESUME, and changes of the architecture of a loaded model

old = ckpt['config'] | ckpt['data'] if ckpt else run_config
new = config | data
fixed = new.keys() - FREE_ON_RESUME if ckpt else model_settings
fixed = fixed - (model_settings - command_line_names())  # a config file's are ignored
changed = [name for name in sorted(fixed) if new[name] != old.get(name)]
changes = ', '.join(f'{name}={old.get(name)!s:.20} (now {new[name]!s:.20})' for name in changed)
if changes:
    fix = 'undo the change'
    if model_settings.isdisjoint(changed):
        fix += f', or start a new run with --init_from={source} and another --out_dir'
    raise InputError(f'{source} was trained with {changes}, which must not change; {fix}')
if ckpt and first_step >= max_steps and not auto_resume:
    raise InputError(f'{source} is already at step {first_step}: raise max_steps={max_steps}')

# -----------------------------------------------------------------------------
# setup: model

if model:
    check_vocabulary(model, tokenizer_sha256, source, meta, table)
    model.config.block_size = block_size
    model.config.loss = loss
else:
    torch.manual_seed(seed)
    model_config = make_config(run_config, vocab_size=meta['vocab_size'], pad_id=meta['pad_id'])
    with torch.device(device):  # a GPU draws other random numbers than a CPU
        model = ChunkedMHF(model_config, table, meta['unused_ids'])
        model.init_weights()
dtype = runtime.pick_dtype(ckpt['config']['dtype'] if ckpt and dtype is None else dtype, device)
autocast = torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()
raw_model = model.to(device)
raw_model.activation_checkpointing = activation_checkpointing
if unfrozen_end_layers:
    raw_model.layers[unfrozen_end_layers : len(raw_model.layers) - unfrozen_end_layers].requires_grad_(False)
if compile:
    raw_model.compile()
    torch._dynamo.config.optimize_ddp = False  # one graph; DDP exchanges the gradients after its backward pass
model = raw_model
if world_size > 1:
    model = runtime.wrap_ddp(raw_model)
    # DDP rebuilds its buckets after the first backward pass, and then sums in another order. A pass on zeros precedes
    # the first step, so that a resumed run sums in the order of an uninterrupted one. The pass also makes every .grad a
    # view of a bucket, which avoids a second copy of the gradients.
    zeros = torch.zeros(micro_batch_size, block_size + 1, raw_model.config.num_coordinates, dtype=int, device=device)
    with autocast:
        model(zeros[:, :-1], zeros[:, 1:]).backward()  # slices, as in get_batch, so that one graph is compiled
    model.zero_grad(set_to_none=False)
trains_product = raw_model.config.loss == 'product' and raw_model.config.num_hashes > 0

# -----------------------------------------------------------------------------
# setup: optimizer


def configure_optimizer():
    """AdamW with three groups: E has a learning-rate multiplier, and vectors have no weight decay."""
    E = raw_model.embed.weight
    trained = [p for p in raw_model.parameters() if p.requires_grad]
    other_matrices = [p for p in trained if p.dim() >= 2 and p is not E]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [
        dict(params=[E], weight_decay=weight_decay, lr_mult=embedding_lr_mult),
        dict(params=other_matrices, weight_decay=weight_decay, lr_mult=1.0),
        dict(params=vectors, weight_decay=0.0, lr_mult=1.0),
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=True)


optimizer = configure_optimizer()
if ckpt:
    optimizer.load_state_dict(ckpt['optimizer'])
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
    """Yields the micro-batches of this rank from first_step on. Runs in a thread, so the CUDA device is set again."""
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


# -----------------------------------------------------------------------------
# log and signals

log_path = Path(out_dir) / 'log.jsonl'


def open_wandb():
    """Starts a run of Weights & Biases. Raises InputError."""
    try:
        import wandb as weights_and_biases

        run = weights_and_biases.init(config=run_config)
    except Exception as e:  # not installed, a folder of this name, not logged in, no network
        fix = 'pip install wandb, run `wandb login`, or set WANDB_MODE=offline'
        raise InputError(f'wandb=True: {e}; {fix}') from None

    def report(*error):
        run.finish(exit_code=1)
        print_error(*error)

    sys.excepthook = report  # wandb's hook prints a traceback
    return run


def open_log():
    """
    Opens log.jsonl in append mode. Drops the lines after first_step, which a resumed run writes again, and all lines
    from a damaged one on.
    """
    log_path.touch()
    size = 0
    for line in log_path.read_bytes().splitlines(keepends=True):
        try:
            is_kept = line.endswith(b'\n') and json.loads(line)['step'] <= first_step
        except (ValueError, TypeError, KeyError):  # a crash of the machine
            is_kept = False
        if not is_kept:
            break
        size += len(line)
    os.truncate(log_path, size)
    return open(log_path, 'a', buffering=1)


def log(**event):
    try:
        log_file.write(json.dumps(event) + '\n')
    except OSError as e:  # a full disk
        raise InputError(f'{log_path} cannot be written ({e}); {checkpoints.resume_hint()}') from None
    if wandb:
        wandb_run.log(event, step=event['step'])


def plot_loss():
    """Draws loss.png from log.jsonl."""
    from matplotlib.figure import Figure  # slow to import

    events = [json.loads(line) for line in log_path.read_text().splitlines()]
    figure = Figure(figsize=(8, 5))
    ax = figure.add_subplot()
    for key, label in dict(loss='training', val_loss='validation', val_nats='validation: -log P(w)').items():
        points = [(event['tokens'], event[key]) for event in events if key in event]
        if points and (key != 'val_nats' or trains_product):
            ax.plot(*zip(*points, strict=True), label=label, lw=0.8, marker='' if key == 'loss' else 'o')
    ax.set(xlabel='tokens', ylabel='nats per token', title=f'{sum(raw_model.num_params()):,} parameters')
    ax.grid(alpha=0.3)
    ax.legend()
    path = Path(out_dir) / 'loss.png'
    try:
        figure.savefig(path, dpi=120, bbox_inches='tight')
    except OSError as e:  # a full disk
        raise InputError(f'{path} cannot be written ({e}); the checkpoints are complete') from None


received_signals = []


def request_stop(signum, frame):
    """Stops the loop after its step. A second Ctrl-C kills a single process; torchrun may send one Ctrl-C twice."""
    received_signals.append(signum)
    if signum == signal.SIGINT and world_size == 1:
        signal.signal(signum, signal.SIG_DFL)


def check_finite(**values):
    """Ends the run before it updates or saves its weights if a value, the same on all ranks, is not finite."""
    if not all(map(math.isfinite, values.values())):
        checkpoints.wait()
        runtime.barrier()  # rank 0 waits for its write first: torchrun kills it when another rank exits
        if not master:
            sys.exit(1)
        shown = ', '.join(f'{key} {value}' for key, value in values.items())
        fix = checkpoints.resume_hint('a smaller learning_rate')
        raise InputError(f'step {step + 1}: a value is not finite ({shown}); {fix}')


def print_setup():
    """Prints the model, the batch and the schedule."""
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
    if schedule_steps < max_steps:
        print(f'lr_decay_steps={lr_decay_steps}: the learning rate is 0 from that step to max_steps={max_steps}')
    if resume:
        previous_lr = optimizer.param_groups[-1]['lr']
        print(f'resumed at step {first_step}: learning rate {previous_lr:.2e} before, {get_lr(first_step):.2e} now')


# -----------------------------------------------------------------------------
# training loop

if master:
    wandb_run = open_wandb() if wandb else None
    log_file = open_log()
    print_setup()
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, request_stop)
peak = runtime.peak_flops(device) if dtype == 'bfloat16' else None  # of one GPU
step_seconds = []  # without validation and saving
batches = prefetch(training_batches())
bar = tqdm(total=max_steps, initial=first_step, desc='train', unit='step', disable=None if master else True)
done = first_step
for step in range(first_step, max_steps):
    checkpoints.raise_if_failed()
    start = time.perf_counter()
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_mult']
    loss_sum = torch.zeros((), device=device)
    for k in range(accumulation):
        x, y = next(batches)
        if world_size > 1:  # gradients are exchanged once per step
            model.require_backward_grad_sync = k == accumulation - 1
        with autocast:  # all micro-batches have the same size, so this sums to the mean over all tokens
            micro_loss = model(x, y) / accumulation
        micro_loss.backward()
        loss_sum += micro_loss.detach()
    stop_signal = received_signals[0] if received_signals else 0
    shared = runtime.all_reduce(torch.stack([loss_sum / world_size, loss_sum.new_full((), stop_signal)]))
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
    mean_loss, any_signal = shared.tolist()
    if any_signal and not stop_signal:
        stop_signal = signal.SIGTERM  # another rank received it
    check_finite(loss=mean_loss, grad_norm=grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=world_size == 1)
    step_seconds.append(time.perf_counter() - start)

    done = step + 1
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
        check_finite(val_loss=val_loss)
        is_best = val_loss < best_val_loss
        best_val_loss = min(best_val_loss, val_loss)
    if validates and master:
        log(step=done, tokens=tokens, **result)
        nats = f', -log P(w) {result["val_nats"]:.4f} nats per token' if trains_product else ''
        best = ' (best)' if is_best else ''
        tqdm.write(f'step {done}: validation loss {val_loss:.4f}, {result["val_bpb"]:.4f} bits per byte{nats}{best}')
    if validates or stop_signal:
        state = dict(
            model=raw_model.state_dict(),
            model_config=asdict(raw_model.config),
            optimizer=optimizer.state_dict(),
            config=run_config | dict(dtype=dtype),
            step=done,
            best_val_loss=best_val_loss,
            data=data,
            add_bos=True,  # prepare.py puts bos before each document
        )
        checkpoints.save(state, is_best)
        runtime.barrier()  # waits up to an hour: rank 0 may still have been writing the previous checkpoint
    if stop_signal:
        break

# -----------------------------------------------------------------------------
# summary

bar.close()
checkpoints.wait()
runtime.cleanup()
if done < max_steps:
    if master:
        print(f'stopped by signal {stop_signal:d}; {checkpoints.resume_hint()}', file=sys.stderr)
    sys.exit(128 + stop_signal)
if master:
    plot_loss()
    print(f'{out_dir}: ckpt.pt, ckpt_best.pt, log.jsonl, loss.png')
