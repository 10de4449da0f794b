"""
Trains a MultiHashFormer or a Standard model. The defaults are the paper's 100M H4B16K.

    $ python train.py config/mhf_tiny.py                                  # one process: a GPU if available, else a CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 train.py X  # the first of 2 machines

Reads the shards that prepare.py writes with the same config. Writes to out_dir ckpt.pt, the newest checkpoint,
ckpt_best.pt, the one with the lowest validation loss, and log.jsonl. If out_dir has a checkpoint, the run resumes from
the newest; to go back to the best, delete ckpt.pt. run_identity in mhf/checkpoint.py lists what may not change.

The global batch at a step depends only on (seed, step), so a run can resume on any number of processes; the random
numbers of a rank also depend on this number. With the same number of processes and settings, on a CPU or with
--deterministic on a GPU, it ends with the same bits as an uninterrupted run. If a fork has buffers, checkpoints
contain those of rank 0.

On SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGUSR1 a run finishes its step, saves a checkpoint and exits with 128 + signal.
torchrun kills it 30 s after the signal (torch 2.13: TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds).
"""

import math
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import configure
from mhf import checkpoint, runtime
from mhf.data import SPLITS, Bins, data_folder, get_table, prefetch, sequence_indices
from mhf.errors import InputError, ignore_closed_output
from mhf.tokenizers import get_tokenizer
from model import MHF

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
init_from = 'scratch'  # scratch | weights and architecture of a model: an out_dir, *.pt, released folder or hub id
seed = 42  # of weight initialization, data order and random numbers
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
num_buckets = 16384  # B; hashing.py names the best sizes for the paper's signatures
num_lsh = 0
single_id = False
bottleneck = 64  # z, the hidden size of the gate and of the mixers
rope_theta = 1e6
norm_eps = 1e-6
# '': the paper's signatures | train, or a prepared folder: informed signatures (hashing.py), from the token counts of
# the training data, or of that folder (of a sample, if it has more than 268 M tokens)
counts_from = ''
ablation = ''  # mean_gate | no_cascade
loss = 'product'  # product: the paper's sum of cross-entropies; P(w) becomes overconfident | exact: -log P(w)
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
# bfloat16 | float32 (TF32 on a GPU), of matrix products; None: the checkpoint's, or bfloat16 on a device with
# instructions for it. Parameters and optimizer are float32
dtype = None
compile = None  # torch.compile, which needs a C compiler; None: on a GPU
# with compile, on one GPU without activation_checkpointing: capture a micro-batch as a CUDA graph; False if the model
# synchronizes with the CPU, or reads a Python value that changes during training, because the graph keeps the first one
cuda_graph = True
deterministic = False  # bit-reproducible on a GPU, slower
activation_checkpointing = False  # keep only the inputs of the blocks, and compute their forward pass twice

config = configure(globals())
ignore_closed_output()
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps}: must be below the {schedule_steps} steps of the schedule')
if counts_from and (num_lsh or single_id or init_from != 'scratch'):
    raise InputError(f'counts_from={counts_from}: informed signatures need a new model, num_lsh=0, single_id=False')

# -----------------------------------------------------------------------------
# processes

rank, world_size, device = runtime.init_distributed(device, deterministic)
master = rank == 0
on_gpu = torch.device(device).type == 'cuda'
compile = on_gpu if compile is None else compile
accumulation, remainder = divmod(batch_size, micro_batch_size * world_size)
if remainder or accumulation < 1:
    factors = f'micro_batch_size x processes = {micro_batch_size} x {world_size}'
    raise InputError(f'batch_size={batch_size}: must be a multiple of {factors}; change one of the two settings')
tokens_per_step = batch_size * block_size

# -----------------------------------------------------------------------------
# what a step consists of: learning rate, batches, gradients; validation


def get_lr(step):
    """Learning rate of update `step` (from 0): linear warm-up from 0, then a cosine to 0 at schedule_steps."""
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
    return learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def get_batch(bins, starts):
    """Sequences at the token offsets `starts` -> token ids of inputs and targets, each (n, T) int64, on the device."""
    ids = np.stack([bins[start : start + block_size + 1] for start in starts])
    ids = torch.from_numpy(ids.astype(np.int64))
    if on_gpu:
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True)
    return ids[:, :-1], ids[:, 1:]


def training_batches(bins, first_step):
    """
    Yields the micro-batches of this rank from first_step on. Micro-batch k of rank r contains the sequences from
    (k * world_size + r) * micro_batch_size on of the step's batch_size, so another world_size regroups the same batch.
    """
    if on_gpu:  # this runs in a thread
        torch.cuda.set_device(device)
    for step in range(first_step, max_steps):
        step_indices = sequence_indices(step, batch_size, (len(bins) - 1) // block_size, seed)
        for indices in step_indices.reshape(accumulation, world_size, micro_batch_size)[:, rank]:
            yield get_batch(bins, indices * block_size)


@torch.no_grad()
def validate(model, bins, autocast):
    """Validates on all held-out tokens, in order; the ranks share them. Returns a dict for the log."""
    n = len(bins) - 1
    starts = range(0, n - n % block_size, block_size)
    batches = [starts[k : k + micro_batch_size] for k in range(0, len(starts), micro_batch_size)]
    if n % block_size:
        batches.append([n - n % block_size])  # a shorter sequence
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for batch in tqdm(batches[rank::world_size], desc='validate', leave=False, disable=None if master else True):
        x, y = get_batch(bins, batch)
        # the few smaller batches run eagerly, because compiling their shapes would take longer
        eager = compile and x.shape != (micro_batch_size, block_size)
        with autocast, torch.compiler.set_stance('force_eager' if eager else 'default'):
            token_losses = model.token_losses(x, y)
        sums += torch.stack([token_loss.cpu().double().sum() for token_loss in token_losses])
    model.train()
    val_loss, nats = (runtime.all_reduce(sums) / n).tolist()  # the trained loss, and -log P(w)
    return dict(val_loss=val_loss, val_nats=nats, val_bpb=nats * n / math.log(2) / bins.bytes)


# -----------------------------------------------------------------------------
# setup: the start of the run, data

lock = checkpoint.lock(out_dir) if master else None
raw_model, resumed = checkpoint.open_start(out_dir, init_from, tokenizer)
first_step = resumed.step if resumed else 0
best_val_loss = resumed.best_val_loss if resumed else math.inf
dtype = resumed.settings['dtype'] if resumed and dtype is None else dtype
dtype = config['dtype'] = runtime.pick_dtype(dtype, device)  # checkpoints store config
folder = data_folder(config)
tok = get_tokenizer(tokenizer)
train_bins, val_bins = (Bins(folder, split, tok) for split in SPLITS)
meta = train_bins.meta
num_sequences = (len(train_bins) - 1) // block_size
if num_sequences < 1:
    raise InputError(f'block_size={block_size}: must be below the {len(train_bins):,} training tokens in {folder}')
model_config = checkpoint.run_config(config, meta, raw_model)
identity = checkpoint.run_identity(model_config, config, train_bins, val_bins)
facts = {'checkpoint step': first_step, 'device type': torch.device(device).type, 'torch': torch.__version__}
runtime.check_same_on_all_ranks(config | identity | facts | dict(out_dir='', data_dir=''))  # folders may differ
if resumed:
    checkpoint.check_identity(out_dir, resumed, identity)

# -----------------------------------------------------------------------------
# setup: model

if raw_model:
    raw_model.to(device)
    raw_model.config = model_config  # another block_size or loss changes no module
else:
    # of rank 0, because forms and shapes depend on Python's version of Unicode
    table, model_config.frequency_ranges = runtime.broadcast(get_table(config) if master else None)
    torch.manual_seed(seed)
    with torch.device(device):  # a GPU draws other random numbers than a CPU
        raw_model = MHF(model_config, table, meta['unused_ids'])
        raw_model.init_weights()
raw_model.train()
raw_model.activation_checkpointing = activation_checkpointing
if unfrozen_end_layers:
    for i in range(unfrozen_end_layers, len(raw_model.layers) - unfrozen_end_layers):
        raw_model.layers[i].requires_grad_(False)
if compile:
    raw_model.compile()
    torch._dynamo.config.optimize_ddp = False  # one graph; DDP exchanges the gradients after its backward pass
autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == 'bfloat16')
model = runtime.wrap_ddp(raw_model, micro_batch_size, autocast) if world_size > 1 else raw_model


def compute_gradients(x, y):
    """Adds the gradients of a micro-batch. Returns its share of this process's mean loss over the step."""
    with autocast:
        micro_loss = model(x, y) / accumulation
    micro_loss.backward()
    return micro_loss.detach()


use_graph = compile and cuda_graph and not activation_checkpointing and on_gpu and world_size == 1
if use_graph:
    with runtime.unchanged_buffers(raw_model):
        compute_gradients = runtime.capture(compute_gradients, *get_batch(train_bins, [0] * micro_batch_size))

# -----------------------------------------------------------------------------
# setup: optimizer. E has a learning-rate multiplier, and vectors have no weight decay

E = raw_model.embed.weight
trainable = [p for p in raw_model.parameters() if p.requires_grad]
groups = [
    dict(params=[E], weight_decay=weight_decay, lr_mult=embedding_lr_mult),
    dict(params=[p for p in trainable if p.dim() >= 2 and p is not E], weight_decay=weight_decay, lr_mult=1.0),
    dict(params=[p for p in trainable if p.dim() < 2], weight_decay=0.0, lr_mult=1.0),
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=True)
if resumed:
    checkpoint.restore_optimizer(optimizer, raw_model, resumed.optimizer)
if master:
    hash_params, layer_params = raw_model.num_params()
    print(checkpoint.describe_start(config, identity, resumed))
    print(f'{hash_params:,} parameters in E and hash modules + {layer_params:,} in layers and final norm')
    print(f'{world_size} x {device}, {dtype}, compile={compile}; {accumulation} x {micro_batch_size} sequences each')
    epochs = max_steps * batch_size / num_sequences
    print(f'{max_steps:,} steps x {tokens_per_step:,} tokens, {epochs:.2f} epochs of {folder}')
resumed = None  # its tensors are mapped to a file that the run will replace

# -----------------------------------------------------------------------------
# training loop

with runtime.stop_signals(world_size) as received:
    if master:
        log = runtime.Log(Path(out_dir) / 'log.jsonl', first_step, config | asdict(model_config) if wandb else None)
    batches = prefetch(training_batches(train_bins, first_step))
    stop_signal = 0
    done = first_step
    bar = tqdm(range(first_step, max_steps), 'train', max_steps, initial=first_step, disable=None if master else True)
    for step in bar:
        start_time = time.perf_counter()
        lr = get_lr(step)
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_mult']
        # dropout, or any other random numbers of a model, differ between steps and ranks
        torch.manual_seed((seed + step * world_size + rank) % 2**64)
        # DDP's gradients are views of its buckets, and a CUDA graph adds to fixed addresses
        optimizer.zero_grad(set_to_none=world_size == 1 and not use_graph)
        loss_sum = torch.zeros((), device=device)
        for k in range(accumulation):
            x, y = next(batches)
            model.require_backward_grad_sync = k == accumulation - 1  # for DDP: exchange gradients once per step
            loss_sum += compute_gradients(x, y)
        for p in trainable:  # AdamW decays an unused parameter, too, as under DDP, where its gradient is zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        stop_signal = received[0] if received else 0
        totals = runtime.all_reduce(torch.stack([loss_sum / world_size, loss_sum.new_tensor(stop_signal)]))
        grad_norm = torch.nn.utils.clip_grad_norm_(trainable, grad_clip if grad_clip > 0 else math.inf).item()
        mean_loss, any_signal = totals.tolist()
        if any_signal and not stop_signal:
            stop_signal = signal.SIGTERM  # another rank received it
        optimizer.step()
        done = step + 1
        seconds = time.perf_counter() - start_time

        validates = done % eval_interval == 0 or done == max_steps
        results = validate(raw_model, val_bins, autocast) if validates else {}
        for name, value in dict(loss=mean_loss, grad_norm=grad_norm, **results).items():  # the same on all ranks
            if not math.isfinite(value):  # the run ends before it saves its weights
                raise InputError(f'step {done}: {name}={value}; rerun with a smaller learning_rate; the run resumes')
        val_loss = results.get('val_loss', math.inf)
        is_best = val_loss < best_val_loss
        best_val_loss = min(val_loss, best_val_loss)
        if master:
            speed = tokens_per_step / seconds
            event = dict(step=done, tokens=done * tokens_per_step, loss=mean_loss, lr=lr, grad_norm=grad_norm)
            log.write(**event, tokens_per_s=speed, **results)
            if done % log_interval == 0 or done == max_steps:
                times = f'{seconds * 1e3:.0f} ms, {speed:,.0f} tokens/s'
                bar.write(f'step {done}/{max_steps}: loss {mean_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.2f}, {times}')
            if validates:
                line = f'validation loss {val_loss:.4f}, {results["val_bpb"]:.4f} bits per byte'
                bar.write(f'step {done}: {line}{" (best)" if is_best else ""}')
        if master and (validates or stop_signal):
            contents = checkpoint.Checkpoint(
                model=raw_model.state_dict(),
                vocabulary=raw_model.vocabulary(),
                optimizer=checkpoint.optimizer_state(optimizer, raw_model),
                identity=identity | asdict(raw_model.config),  # with the frequency ranges
                settings={name: value for name, value in config.items() if name not in identity},
                tokenizer=meta['tokenizer'],
                step=done,
                best_val_loss=best_val_loss,
            )
            checkpoint.save(out_dir, contents, is_best)
        if validates or stop_signal:
            runtime.all_reduce(torch.zeros(1))  # a barrier: wait, for up to an hour, until rank 0 has saved
        if stop_signal:
            break

if master:
    lock.release()
if world_size > 1:
    torch.distributed.destroy_process_group()
if done < max_steps:
    if master:
        print(f'stopped by signal {stop_signal:d} at step {done}; rerun the same command to resume', file=sys.stderr)
    sys.exit(128 + stop_signal)
if master:
    print(f'{out_dir}: step {done} of {max_steps}; ckpt.pt, ckpt_best.pt, log.jsonl')
