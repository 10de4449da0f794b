"""
Trains a MultiHashFormer or a Standard model; the same file on a laptop and on many GPUs.

    $ python train.py config/mhf_tiny.py                                  # one process: GPU if there is one, else CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --standalone --nproc_per_node=2 train.py config/mhf_tiny.py --device=cpu --micro_batch_size=4

    two machines, the first at 10.0.0.1; the second has --node_rank=1:
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py X

Needs the bins of prepare.py with the same config. prepare.py says how a document becomes a row of a bin; from there on:
bins.blocks_of -> read_batch -> inputs_and_targets (signatures) -> MHF.forward: hidden_states, head_loss ->
loss.LeanHead, with exact_nll or product_nll (--plain_head: HashDecoder, with exact_loss or product_loss).

Writes out_dir/ckpt.pt (the newest), ckpt_best.pt, the last few as ckpt_000123.pt, log.jsonl and loss.png. SIGTERM and
Ctrl-C finish the step, write a checkpoint and exit with 143 and 130. A resumed run reads the batches of a straight one,
in its order; on a CPU, and with --deterministic on a GPU (seen on an H100, not compiled), it ends with the same bits.
Without, attention's backward and the compiled embedding's sum gradients there by atomic adds, whose order, and so the
rounding, is another in each run. With --auto_resume one command starts and goes on:
    $ TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node=8 --max-restarts=3 train.py X --auto_resume
(the variable, because restarted workers may else meet the addresses of dead ones: pytorch/pytorch issue 135712)
"""

import contextlib
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
import torch.distributed as dist
from tqdm import tqdm

import plot
from bins import SPLITS, Verified, blocks_of, checked_table, data_folder, identity, load_meta, open_bins, read_ahead
from checkpoint import Checkpoints, load_model, only_tokens, pick_compile, pick_device, pick_dtype
from configurator import InputError, configure
from cost import machine_memory, step_memory
from model import MHF, MHFConfig
from processes import World

# The defaults train the paper's 100M H4B16K on FineWeb-Edu.
# output
out_dir = 'out'
eval_interval = 1000  # steps between validations; each also writes a checkpoint
# scratch | resume (the newest checkpoint in out_dir) | a released folder or hub id[@revision], or another out_dir
init_from = 'scratch'
auto_resume = False  # resume where out_dir has a checkpoint, else init_from: for a cluster that repeats its command
keep = 2  # of the newest checkpoints, under names with their step; if ckpt.pt is damaged, the one before is resumed
wandb = False  # also log to Weights & Biases, where it is installed; WANDB_PROJECT and WANDB_NAME name project and run
# data, as in prepare.py
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''
tokenizer = 'mistral'
bins = 'signatures'  # what they hold: signatures | ids
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
ablation = ''  # of the method, for studies: mean_gate | hard_embeddings | no_cascade
loss = 'exact'  # exact: -log P(w), the distribution that is sampled from | product: the paper's, its coordinates summed
# optimizer: AdamW, linear warm-up, cosine to 0
learning_rate = 5e-4  # the maximum
embedding_rate = 1.0  # E learns at so many times this rate
embedding_std = 0.02  # for studies: of E, drawn
max_steps = 20000  # updates
warmup_steps = 2000
lr_decay_steps = 0  # length of the schedule; 0 is max_steps
weight_decay = 0.1  # on every parameter of two or more dimensions
beta1 = 0.9
beta2 = 0.999
grad_clip = 1.0  # norm over all parameters; 0 is off
train_layers = 0  # of the first and of the last layers, the others are frozen; 0 trains all of them
seed = 42  # of the weights and of the order of the data
# system; None is the best that is there
device = None  # cuda | cuda:1 | cpu | mps
dtype = None  # bfloat16 | float32, of the matrix products; parameters and optimizer are float32
compile = None  # torch.compile, which needs a C compiler
deterministic = False  # on a GPU, too, each run has the same bits: slower
plain_head = False  # trains through model.py's plain head by autograd: slower and larger, for changing it
activation_checkpointing = False  # keeps only the inputs of the blocks, whose forward is computed twice; same gradients
timeout = 600  # seconds that processes wait for each other

config = configure(globals())
# what a resumed run may not change, beside its data (identity: tokenizer, signature table, text); all else is free
FIXED_ON_RESUME = (
    'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'hidden_size', 'intermediate_size',
    'num_hashes', 'num_buckets', 'num_lsh', 'single_id', 'ablation', 'embedding_std', 'loss', 'tokenizer',
    'batch_size', 'block_size', 'seed', 'embedding_rate', 'weight_decay', 'beta1', 'beta2', 'train_layers',
)  # fmt: skip

# -----------------------------------------------------------------------------
# processes and device

# into a file or a pipe, too, a line is written when it is said
sys.stdout.reconfigure(line_buffering=True)
world = World()
master, out = world.rank == 0, Path(out_dir)
checkpoints = Checkpoints(out_dir, keep, writes=master)


def explain_crash(error_class, e, traceback):
    """What Python calls with an uncaught error: no traceback where the machine is at fault and not the code."""
    words = ' '.join(str(e).split())[:300]
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in words:
        less = f'a smaller --micro_batch_size (now {micro_batch_size}) or --activation_checkpointing'
        plan = ' '.join(['python bench.py', *(a for a in sys.argv[1:] if a[:2] != '--'), '--plan'])
        words = f'not enough memory on {device} ({words}); {less} needs less, {plan} says how much'
    elif isinstance(e, dist.DistError) or 'gloo' in words:
        words = f'process {world.rank} of {world.size} lost the others ({words})'
    elif error_class is KeyboardInterrupt:
        words = 'interrupted'
    else:
        return sys.__excepthook__(error_class, e, traceback)
    print(f'error: {words}; {checkpoints.kept()}', file=sys.stderr)


sys.excepthook = explain_crash
device = pick_device(device)
device_type = torch.device(device).type
if device_type == 'cuda':
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('high')
    if deterministic:
        # read when cuBLAS starts
        os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False

# -----------------------------------------------------------------------------
# checks; the data and the model, too, are checked before anything is written

above_zero = ('batch_size', 'micro_batch_size', 'block_size', 'max_steps', 'eval_interval', 'timeout')
above_zero += ('learning_rate', 'embedding_rate')
not_negative = ('warmup_steps', 'lr_decay_steps', 'weight_decay', 'grad_clip', 'num_hashes', 'keep')
for key in (*above_zero, *not_negative, 'train_layers'):
    if not (0 < config[key] < math.inf if key in above_zero else 0 <= config[key] < math.inf):
        raise InputError(f'{key}={config[key]}: must {"be above 0" if key in above_zero else "not be negative"}')
for key, limit in (('seed', 2**64), ('beta1', 1), ('beta2', 1)):
    if not 0 <= config[key] < limit:
        raise InputError(f'{key}={config[key]}: must be from 0 to below {limit}')
compile, no_compiler = pick_compile(compile, device)
if batch_size % (micro_batch_size * world.size):
    fitting = [m for m in range(1, micro_batch_size + 1) if batch_size % (m * world.size) == 0]
    use = f'--micro_batch_size={fitting[-1]}' if fitting else f'a batch_size that is a multiple of {world.size}'
    product = f'micro_batch_size={micro_batch_size} x {world.size} processes'
    raise InputError(f'batch_size={batch_size} does not divide by {product}; use {use}')
accumulation = batch_size // (micro_batch_size * world.size)
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps} leaves nothing of the {schedule_steps} steps of the schedule')
if wandb and master:
    try:
        import wandb as wandb_module
    except ImportError:
        raise InputError('wandb=True, but it is not installed: pip install wandb') from None

# -----------------------------------------------------------------------------
# the bins

starts_from_model = init_from not in ('scratch', 'resume')
if auto_resume and checkpoints.there():
    init_from = 'resume'
meta = load_meta(config)
train_tokens, val_tokens = open_bins(config, meta, 'train'), open_bins(config, meta, 'val')
num_blocks = (len(train_tokens) - 1) // block_size
if num_blocks < 1:
    raise InputError(f'block_size={block_size}: {data_folder(config)} has {len(train_tokens):,} training tokens')
verified = Verified((train_tokens, val_tokens), world.rank, world.size)  # in a thread, while training runs

# -----------------------------------------------------------------------------
# the processes meet and agree; weights from elsewhere

if world.distributed:
    world.meet(device, timeout)
    mine = {k: v for k, v in config.items() if k not in ('out_dir', 'data_dir')}  # a machine may have its own paths
    mine |= dict(init_from=init_from, device=device_type, torch=torch.__version__)
    mine['tokenizer'] = meta['tokenizer_sha256']
    world.agree(mine | {f'{split} bins': meta['splits'][split]['sha256'] for split in SPLITS})


def read_model():
    """(model, the checkpoint's dict), each None where there is none. Raises InputError."""
    model = ckpt = None
    if init_from == 'resume':
        # ckpt.pt, or where it is damaged the newest that is whole
        model, ckpt = checkpoints.newest_whole()
    elif checkpoints.there():
        raise InputError(f'{out} has a checkpoint; --init_from=resume goes on, or choose another --out_dir')
    elif starts_from_model:
        model, *_ = load_model(init_from)
    return model, ckpt


model, ckpt = world.together(read_model)
if world.distributed:
    world.agree(dict(checkpoint=checkpoints.last_digest))
source = checkpoints.last_path or init_from
# a resumed run keeps its precision; a CPU's is measured, and what process 0 has measured counts
same_as_before = ckpt['config'].get('dtype') if ckpt else None
dtype, why_dtype = world.of_first(pick_dtype(dtype or same_as_before, device))
autocast = torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()
if starts_from_model:  # the settings take its architecture, but for the context and the loss, which are ours to choose
    architecture = {k: v for k, v in asdict(model.config).items() if k in config and k not in ('block_size', 'loss')}
    globals().update(architecture)
    config |= architecture
start_step, best_val = 0, math.inf
if ckpt:
    # what older checkpoints did not know
    then = dict(ablation='', embedding_rate=1.0, embedding_std=0.02) | ckpt['config'] | ckpt['data']
    changed = [f'{k}={then.get(k)} (now {config[k]})' for k in FIXED_ON_RESUME if then.get(k) != config[k]]
    if changed:
        raise InputError(f'{source} was trained with {", ".join(changed)}; a resumed run keeps it')
table = checked_table(config, meta)
data = identity(meta, table)
if ckpt:
    other = [key for key, value in data.items() if ckpt['data'].get(key) != value]
    if other:
        words = f'other bins or another tokenizer than these (their {", ".join(other)} differs)'
        hint = f'--init_from={out} and another --out_dir begin with its weights'
        raise InputError(f'{source} was trained on {words}; a resumed run keeps them; {hint}')
    if ckpt['step'] >= max_steps:
        if auto_resume:
            print(f'{source} is at step {ckpt["step"]} of {max_steps}: done')
            sys.exit()
        raise InputError(f'{source} is at step {ckpt["step"]} already; max_steps={max_steps} leaves nothing to do')
    # an older train.py could change the text of a run, whose batches then began anew
    if ckpt.get('data_start_step'):
        began = f'went on with other text at step {ckpt["data_start_step"]} (--new_data, which is gone)'
        raise InputError(f'{source} {began}; --init_from={out} and another --out_dir begin with its weights')
    start_step, best_val = ckpt['step'], ckpt['best_val']
if model:
    model.config.block_size, model.config.loss = block_size, loss
    V, theirs = meta['vocab_size'], model.signatures
    if not only_tokens(model, V, meta['gaps']):
        raise InputError(f'{source} has vocab_size={len(theirs)}, {data_folder(config)} {V}')
    if table is not None:
        ours, theirs = np.pad(table, ((0, len(theirs) - V), (0, 0))), theirs.numpy()
        if len(differing := np.flatnonzero((theirs != ours).any(1))):
            first = differing[0]
            rows = f'id {first} is {theirs[first].tolist()} there, {ours[first].tolist()} here'
            raise InputError(f"{source} has another signature table than tokenizer '{tokenizer}' gives: {rows}")
else:
    torch.manual_seed(seed)
    architecture = {k: v for k, v in config.items() if k in MHFConfig.__annotations__}
    architecture = MHFConfig(vocab_size=meta['vocab_size'], pad_id=meta['pad_id'], **architecture)
    # drawn on the device: a GPU draws other numbers than a CPU
    with torch.device(device):
        model = MHF(architecture, table, meta['gaps'])
if device_type == 'cpu':
    needs = step_memory(
        model.config,
        sum(model.num_params()),
        micro_batch_size,
        accumulates=accumulation > 1,
        checkpointing=activation_checkpointing,
    )
    on_this_machine = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    need = on_this_machine * sum(needs.values())
    if need > machine_memory():
        has = f'a step needs {need / 1e9:,.1f} GB, this machine has {machine_memory() / 1e9:,.1f}'
        raise InputError(f'micro_batch_size={micro_batch_size}: {has}; use a smaller one')
if damage := verified.error_within(10):
    raise damage
checkpoints.make_folder()

# -----------------------------------------------------------------------------
# compile, DDP; the optimizer

raw_model = model.to(device)
raw_model.activation_checkpointing, raw_model.plain_head = activation_checkpointing, plain_head
if train_layers:
    raw_model.layers[train_layers : len(raw_model.layers) - train_layers].requires_grad_(False)
if compile:
    raw_model.compile()
model = world.wrap(raw_model)
trained = [p for p in model.parameters() if p.requires_grad]
matrices, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]
if embedding_rate != 1:
    E = raw_model.embed.weight
    groups[0]['params'] = [p for p in matrices if p is not E]
    groups = [dict(params=[E], weight_decay=weight_decay, rate=embedding_rate), *groups]
fused = device_type in ('cuda', 'cpu')
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=fused)
if ckpt:
    try:
        optimizer.load_state_dict(ckpt['optimizer'])
    except (ValueError, KeyError, AttributeError) as e:
        raise InputError(f'{source} has the optimizer of another model ({e})') from None
    ckpt = None  # frees its memory
# DDP's gradients stay in its buckets while micro-batches add to them; from the first on, after a backward of nothing
in_buckets = world.distributed and accumulation > 1
if in_buckets:
    nothing = torch.zeros(micro_batch_size, block_size, raw_model.config.coordinates, dtype=torch.int64, device=device)
    with autocast:
        model(nothing, nothing).backward()
    optimizer.zero_grad(set_to_none=False)

# -----------------------------------------------------------------------------
# the schedule, batches, validation


def learning_rate_at(step):
    """The rate of the update that leads from `step` to step + 1."""
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    done = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
    return learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def read_batch(split, starts):
    """
    Sequences of block_size + 1 tokens of some Bins from each of `starts` -> signatures (n, T + 1, H) or token ids
    (n, T + 1), int64, pinned where there is a GPU.
    """
    tokens = np.stack([split[b : b + block_size + 1] for b in starts])
    limit = raw_model.config.buckets if tokens.ndim == 3 else raw_model.config.vocab_size
    if tokens.max() >= limit:
        raise InputError(f'{data_folder(config)} has the number {tokens.max()}, the model {limit}: a damaged bin')
    tokens = torch.from_numpy(tokens.astype(np.int64))
    return tokens.pin_memory() if device_type == 'cuda' else tokens


def inputs_and_targets(tokens):
    """Signatures or token ids on the host, as read_batch gives them -> the signatures of both, each (n, T, H)."""
    tokens = tokens.to(device, non_blocking=True)
    signatures = tokens if tokens.dim() == 3 else raw_model.sign(tokens)
    return signatures[:, :-1], signatures[:, 1:]


def micro_batches():
    """Those of this process, from start_step on. Runs in a thread, which has a current GPU of its own."""
    if device_type == 'cuda':
        torch.cuda.set_device(device)
    for step in range(start_step, max_steps):
        blocks = blocks_of(step, batch_size, num_blocks, seed)
        for micro in blocks.reshape(accumulation, world.size, micro_batch_size)[:, world.rank]:
            yield read_batch(train_tokens, micro * block_size)


# seconds between two pictures of a progress bar: a file keeps all of them
redraw_interval = 0.2 if sys.stderr.isatty() else 20


@torch.no_grad()
def evaluate():
    """Validation over all held-out tokens, in order, shared by all processes: three numbers."""
    n, sums = len(val_tokens) - 1, torch.zeros(2, dtype=torch.float64)
    starts, whole = list(range(0, n, block_size)), n // block_size
    batches = [starts[k : min(k + micro_batch_size, whole)] for k in range(0, whole, micro_batch_size)]
    batches += [starts[whole:]] if whole < len(starts) else []  # the last, shorter block
    progress = dict(desc='validate', unit='batch', leave=False, delay=1, disable=not master)
    for batch in tqdm(batches[world.rank :: world.size], **progress, mininterval=redraw_interval):
        x, y = inputs_and_targets(read_batch(val_tokens, batch))
        with autocast:
            losses = raw_model.both_losses(x, y)
        sums += torch.stack([each.double().sum().cpu() for each in losses])
    product, nats = (world.sum(sums, device) / n).tolist()
    bits = nats * n / math.log(2) / meta['splits']['val']['bytes']
    return dict(val_loss=product if loss == 'product' and num_hashes else nats, val_nats=nats, val_bpb=bits)


# -----------------------------------------------------------------------------
# the log, signals


def append_to_log(text):
    """log.jsonl is only ever appended to: a step that a resumed run repeats has two lines; readers keep the last."""
    try:
        with open(out / 'log.jsonl', 'a') as f:
            f.write(text)
    except OSError as e:  # disk full, or gone
        raise InputError(f'{out / "log.jsonl"} cannot be written ({e}); {checkpoints.kept()}') from None


def log(**event):
    append_to_log(json.dumps(event) + '\n')
    if wandb:
        wandb_run.log(event, step=event['step'])


received = []  # signals, and when


def stop_after_this_step(signum, frame):
    """A second signal stops at once, but within 5 s torchrun only hands on the one that its workers have already."""
    now = time.monotonic()
    received.append((signum, now))
    if len(received) > 1 and not ((world.distributed or signum == signal.SIGTERM) and now - received[0][1] < 5):
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)
        signal.raise_signal(signum)


# -----------------------------------------------------------------------------
# the loop

tokens_per_step = batch_size * block_size
if master:
    c, (interface, decoder) = raw_model.config, raw_model.num_params()
    name = f'MultiHashFormer H={c.num_hashes} B={c.num_buckets}, {c.loss} loss' if c.num_hashes else 'Standard model'
    print(f'{name}: {interface:,} parameters of the embedding interface + {decoder:,} of the decoder')
    sequences = f'{batch_size} sequences = {world.size} process(es) x {micro_batch_size} x {accumulation}'
    print(f'{device}, {dtype}, compile={compile}; {sequences}')
    if why_dtype:
        print(f'dtype={dtype}: {why_dtype}')
    if device_type == 'cuda' and no_compiler:
        print(f'not compiled: {no_compiler}')
    if plain_head:
        print('the plain head')
    epochs = max_steps * batch_size / num_blocks
    print(f'{max_steps:,} steps x {tokens_per_step:,} tokens, {epochs:.2f} epochs of {data_folder(config)}')
    if train_layers:
        frozen = sum(p.numel() for p in raw_model.parameters() if not p.requires_grad)
        print(f'{frozen:,} parameters are frozen: all layers but the first {train_layers} and the last {train_layers}')
    if init_from == 'resume':
        print(f'resumed at step {start_step}')
    log_path = out / 'log.jsonl'
    half_a_line = log_path.is_file() and not log_path.read_bytes().endswith(b'\n')  # as a crash leaves it
    append_to_log('\n' if half_a_line else '')
    if wandb:
        project = os.environ.get('WANDB_PROJECT', 'multihashformer')
        wandb_run = wandb_module.init(project=project, name=os.environ.get('WANDB_NAME', out.name), config=config)
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, stop_after_this_step)
# no bar before the first step is through
bar = dict(total=max_steps, initial=start_step, unit='step', desc='train', delay=1, disable=not master)
bar = tqdm(**bar, mininterval=redraw_interval)
speeds, batches = [], read_ahead(micro_batches())
with bar:
    for step in range(start_step, max_steps):
        checkpoints.raise_if_failed()
        if verified.error:
            raise InputError(f'{verified.error}; stopped at step {step}, {checkpoints.kept()}')
        began = time.perf_counter()
        lr = learning_rate_at(step)
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
        stopping = stopping or (signal.SIGTERM if others_stop else 0)
        wrong = '' if math.isfinite(mean_loss + norm) else f'loss {mean_loss}, gradient norm {norm}'
        if wrong:
            raise InputError(f'step {step}: {wrong}; stopped before the update, {checkpoints.kept()}')
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_buckets)
        speeds.append(tokens_per_step / (time.perf_counter() - began))

        done, best = step + 1, False
        tokens, validating = done * tokens_per_step, done % eval_interval == 0 or done == max_steps
        if master:
            event = dict(step=done, tokens=tokens, loss=mean_loss, lr=lr, grad_norm=norm)
            log(**event, tokens_per_s=round(speeds[-1], 1))
            bar.set_postfix_str(f'loss {mean_loss:.3f}, {speeds[-1]:,.0f} tokens/s', refresh=False)
            bar.update()
            # now there is a bar, and its last line is ended also in a file
            bar.delay = 0
        if validating:
            result = evaluate()
            if device_type == 'cuda':
                result['peak_gpu_mb'] = torch.cuda.max_memory_allocated() / 1e6
            best, best_val = result['val_loss'] < best_val, min(best_val, result['val_loss'])
            if master:
                log(step=done, tokens=tokens, **result)
                # with the exact loss both are one number
                numbers = 'validation loss {val_loss:.4f}, ' if loss == 'product' and num_hashes else 'validation: '
                numbers += '{val_nats:.4f} nats per token, {val_bpb:.4f} bits per byte'
                bar.write(f'step {done}: {numbers.format(**result)}{" (best)" if best else ""}')
        if validating or stopping:
            state = dict(model=raw_model.state_dict(), optimizer=optimizer.state_dict(), step=done, data=data)
            state |= dict(model_config=asdict(raw_model.config), config=config | dict(dtype=dtype), best_val=best_val)
            checkpoints.save(state, best)
        if stopping:
            break
    checkpoints.wait()
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
