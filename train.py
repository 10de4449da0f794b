"""
Trains a MultiHashFormer or a Standard model; the same file on a laptop and on many GPUs.

    $ python train.py config/mhf_tiny.py                                  # one process: GPU if there is one, else CPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/mhf_1b.py  # 8 GPUs of one machine
    $ torchrun --standalone --nproc_per_node=2 train.py config/mhf_tiny.py --device=cpu --micro_batch_size=4

    two machines, the first at 10.0.0.1:
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py config/mhf_1b.py
    $ torchrun --nnodes=2 --nproc_per_node=8 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py config/mhf_1b.py

Needs the bins of prepare.py with the same config. Writes out_dir/ckpt.pt (the newest), ckpt_best.pt, the last few as
ckpt_000123.pt, log.jsonl and loss.png. SIGTERM and Ctrl-C finish the step, write a checkpoint and exit with 143 and 130; with
--init_from=auto the same command starts and goes on:
    $ TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node=8 --max-restarts=3 train.py config/mhf_1b.py --init_from=auto
(the variable, because restarted workers may else meet the addresses of dead ones: pytorch/pytorch issue 135712)
    $ python train.py config/mhf_1b.py --init_from=resume --export=DIR    # the newest checkpoint in the released format
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from configurator import InputError, configure
from hashing import fingerprint, get_tokenizer, permute, tokenizer_fingerprint
from model import MHF, MHFConfig, digest_of_state, pick_device
from prepare import ahead, data_folder, load_meta, load_table, open_bin

# The defaults train the paper's 100M H4B16K on FineWeb-Edu.
# output
out_dir = 'out'
eval_interval = 1000  # steps between validations; each also writes a checkpoint
# scratch | resume (out_dir/ckpt.pt) | released:<folder or hub id> | expand:<out_dir, released folder or hub id>, whose vocabulary
# the one of the data extends | replace:<the same>, with a whole other vocabulary | auto, auto:expand:... (resume where it can)
init_from = 'scratch'
new_data = False  # with resume: goes on with other text, of the same tokenizer and signatures, from its first epoch
keep = 2  # of the newest checkpoints, under names with their step; should ckpt.pt be damaged, the one before is resumed
export = ''  # with resume: only writes the model in the released format into this new folder
wandb = False  # also log to Weights & Biases, where it is installed
wandb_project = 'multihashformer'
wandb_run_name = ''
# data, as in prepare.py
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''
tokenizer = 'mistral'
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
loss = 'exact'  # exact: -log P(w), the distribution that is sampled from | product: the paper's, its coordinates summed
# optimizer: AdamW, linear warm-up, cosine to 0
learning_rate = 5e-4  # the maximum
max_steps = 20000  # updates
warmup_steps = 2000
lr_decay_steps = 0  # length of the schedule; 0 is max_steps
weight_decay = 0.1  # on every parameter of two or more dimensions
beta1 = 0.9
beta2 = 0.999
grad_clip = 1.0  # norm over all parameters; 0 is off
train_layers = 0  # of the first and of the last layers, the others are frozen; 0 trains all of them
seed = 42  # of the weights and of the order of the data
spike_deviations = 10.0  # a loss so many robust deviations above the last 100 is logged as a spike; 0 is never
stop_on_spike = False
# system; None takes what is there
device = None  # cuda | cuda:1 | cpu | mps
dtype = None  # bfloat16 | float32, of the matrix products; parameters and optimizer are float32
compile = None  # torch.compile
activation_checkpointing = False  # keeps only the inputs of the blocks, whose forward is computed twice; same gradients
backend = None  # nccl | gloo
timeout = 600  # seconds that processes wait for each other

config = configure(globals())

# -----------------------------------------------------------------------------
# processes and devices

distributed = 'RANK' in os.environ  # set by torchrun
try:
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
except ValueError:
    rank, world_size = -1, -1
if not 0 <= rank < world_size or distributed != ('WORLD_SIZE' in os.environ):
    named = ', '.join(f'{k}={os.environ.get(k)}' for k in ('RANK', 'WORLD_SIZE'))
    raise InputError(f'the environment has {named}; start this with torchrun, or unset them')
master = rank == 0


def one_line(kind, e, traceback):
    """What Python calls with an error that nothing caught: no traceback where the machine is at fault and not the code."""
    words = ' '.join(str(e).split())[:300]
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in words:
        words = f'not enough memory on {device} ({words}); a smaller --micro_batch_size (now {micro_batch_size}) or --activation_checkpointing needs less'
    elif isinstance(e, dist.DistError) or 'gloo' in words:
        words = f'process {rank} of {world_size} lost the others ({words})'
    elif kind is KeyboardInterrupt:
        words = 'interrupted'
    else:
        return sys.__excepthook__(kind, e, traceback)
    print(f'error: {words}{f"; {kept()}" if "writing" in globals() else ""}', file=sys.stderr)


sys.excepthook = one_line

device, dtype = pick_device(device, dtype)
device_type = torch.device(device).type
if device_type == 'cuda':
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('high')
if compile is None:
    compile = device_type == 'cuda'
if type(compile) is not bool:
    raise InputError(f'compile={compile}: must be True or False')
if backend not in (None, 'nccl', 'gloo'):
    raise InputError(f'backend={backend}: must be nccl or gloo')
autocast = torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()

# -----------------------------------------------------------------------------
# settings, data and model: everything is checked before anything is written

for key in ('batch_size', 'micro_batch_size', 'block_size', 'max_steps', 'eval_interval', 'learning_rate', 'timeout'):
    if not 0 < config[key] < math.inf:
        raise InputError(f'{key}={config[key]}: must be above 0')
for key in (
    'warmup_steps',
    'lr_decay_steps',
    'weight_decay',
    'grad_clip',
    'seed',
    'num_hashes',
    'keep',
    'spike_deviations',
    'train_layers',
):
    if not 0 <= config[key] < math.inf:
        raise InputError(f'{key}={config[key]}: must not be negative')
if batch_size % (micro_batch_size * world_size):
    fits = (
        max(m for m in range(1, micro_batch_size + 1) if batch_size % (m * world_size) == 0)
        if batch_size % world_size == 0
        else None
    )
    raise InputError(
        f'batch_size={batch_size} does not divide by micro_batch_size={micro_batch_size} x {world_size} processes; use '
        + (f'--micro_batch_size={fits}' if fits else f'a batch_size that is a multiple of {world_size}')
    )
accumulation = batch_size // (micro_batch_size * world_size)
schedule_steps = lr_decay_steps or max_steps
if warmup_steps >= schedule_steps:
    raise InputError(f'warmup_steps={warmup_steps} leaves nothing of the {schedule_steps} steps of the schedule')

source, _, where = init_from.partition(':')
if auto := source == 'auto':
    source, _, where = (where or 'scratch').partition(':')
if source not in (('released', 'expand', 'replace') if where else ('scratch', 'resume')):
    raise InputError(
        f"init_from='{init_from}': must be scratch, resume, auto, or released:, expand: or replace:<folder or hub id>"
    )
out = Path(out_dir)


def step_of(path):
    """The step in the name of a checkpoint, or None."""
    found = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
    return found and int(found[1])


def milestones():
    """The checkpoints with a step in their name, the newest first."""
    return sorted((p for p in out.glob('ckpt_*.pt') if step_of(p) is not None), key=step_of, reverse=True)


ckpt, start_step, first_step, best_val, recent = None, 0, 0, math.inf, []
saved = [p for p in (out / 'ckpt.pt', *milestones()) if p.exists()]
if auto and saved:
    source = 'resume'
if source in ('released', 'expand', 'replace'):
    if source != 'released' and (Path(where) / 'ckpt.pt').exists():
        model, origin = MHF.from_checkpoint(Path(where) / 'ckpt.pt')
        origin = origin['data']
    else:
        model, origin = MHF.from_pretrained(where), {}
if source == 'resume':
    for path in saved or [out / 'ckpt.pt']:
        try:
            model, ckpt = MHF.from_checkpoint(path, whole=True)
            break
        except InputError as e:
            if path == (saved or [path])[-1]:
                raise
            if master:
                print(
                    f'WARNING: {str(e)}; going back to the checkpoint before', file=sys.stderr
                )
elif saved:
    raise InputError(f'{saved[0]} exists; go on with it by --init_from=resume, or choose another --out_dir')
if where:  # the data must fit its architecture; the context and the loss are ours to choose
    config |= {k: v for k, v in asdict(model.config).items() if k in config and k not in ('block_size', 'loss')}
if export:
    if source != 'resume':
        raise InputError(f'export={export} needs --init_from=resume: it writes what is in {out}')
    model.export(export, ckpt['config']['tokenizer'])
    print(f'{path}, step {ckpt["step"]} -> {export}')
    sys.exit()

meta = load_meta(config)
train_rows, val_rows = open_bin(config, meta, 'train'), open_bin(config, meta, 'val')
num_blocks = (len(train_rows) - 1) // block_size
if num_blocks < 1:
    raise InputError(
        f'block_size={block_size} is over the {len(train_rows):,} training tokens of {data_folder(config)}'
    )
damage = []  # what is found wrong with the bins while training runs; few of them are read through before it begins


def verify():
    try:
        for rows in (train_rows, val_rows):
            rows.verify(slice(rank, None, world_size))
    except (InputError, OSError) as e:
        damage.append(e)


verifying = threading.Thread(target=verify, daemon=True)
verifying.start()

table = load_table(config, meta)
if table is not None:
    meta['table_sha256'] = fingerprint(table)
sign_here = table is not None and not meta['num_hashes']  # bins of token ids
data_identity = {k: meta[k] for k in ('tokenizer', 'tokenizer_sha256', 'table_sha256')}
data_identity['train_sha256'] = meta['splits']['train']['sha256']
model_config = MHFConfig(
    vocab_size=meta['vocab_size'],
    pad_id=meta['pad_id'],
    **{k: config[k] for k in MHFConfig.__annotations__ if k in config},
)
if source == 'scratch':
    torch.manual_seed(seed)
    model = MHF(model_config, table, meta['gaps'])
else:
    before = model.config.vocab_size, sum(model.num_params())
    if source == 'expand' and not model.config.num_hashes:
        old, new = get_tokenizer(origin.get('tokenizer', 'mistral')), get_tokenizer(config['tokenizer'])
        for tok, trained_with in ((old, origin.get('tokenizer_sha256')), (new, meta['tokenizer_sha256'])):
            if trained_with and tokenizer_fingerprint(tok) != trained_with:
                raise InputError(
                    f"tokenizer '{tok.name}' is not what it was when {where} or {data_folder(config)} was made"
                )
        if new.tokens[: len(old.tokens)] != old.tokens or len(old.tokens) != before[0] or not hasattr(old, 'split'):
            raise InputError(f"tokenizer '{new.name}' does not extend '{old.name}', which {where} was trained with")
        model.extend_vocabulary(None, made_of=old.split(new.tokens[len(old.tokens) :]))
    elif source == 'expand':
        try:
            model.extend_vocabulary(table, meta['gaps'])
        except InputError as e:
            raise InputError(
                f'{where} cannot be expanded by {data_folder(config)}: {str(e)}'
            ) from None
    elif source == 'replace':
        if not model.config.num_hashes:
            raise InputError(
                f'{where} is a Standard model: each of its tokens has a row of its own, which cannot be replaced'
            )
        model.replace_vocabulary(table, meta['pad_id'], meta['gaps'])
    settable = {k: v for k, v in asdict(model_config).items() if k in config or k == 'vocab_size'}
    different = [k for k, v in settable.items() if v != getattr(model.config, k)] if source == 'resume' else []
    if different:
        listed = ', '.join(f'{k}={getattr(model.config, k)} (now {settable[k]})' for k in different)
        raise InputError(f'{path} is another architecture: {listed}; use its own settings')
    V = meta['vocab_size']
    model.config.block_size, model.config.loss = block_size, config['loss']
    if model.config.vocab_size < V:
        raise InputError(
            f'the vocabulary of the bins, {V}, does not fit the vocab_size={model.config.vocab_size} of {where or out_dir}'
        )
    theirs = model.signatures.numpy()
    if table is not None and not (np.array_equal(theirs[:V], table) and not theirs[V:].any()):
        first = int(np.argmax((theirs[:V] != table).any(1)))
        raise InputError(
            f'{where or out_dir} has another signature table than {data_folder(config)}: id {first} is '
            f'{theirs[first].tolist()} there, {table[first].tolist()} here'
        )
if ckpt:
    start_step, first_step, best_val, recent = (ckpt[k] for k in ('step', 'first_step', 'best_val', 'recent'))
    for key in ('batch_size', 'block_size', 'seed', 'weight_decay', 'beta1', 'beta2', 'train_layers'):
        if ckpt['config'].get(key, config[key]) != config[key]:
            raise InputError(
                f'{path} was trained with {key}={ckpt["config"][key]}, now it is {config[key]}; a resumed run keeps it'
            )
    different = [k for k in ckpt['data'] if ckpt['data'][k] != data_identity[k]]
    if different == ['train_sha256'] and new_data:
        first_step, best_val, recent = start_step, math.inf, []  # its losses are no measure for the new
    elif different:
        key = different[0]
        raise InputError(
            f'{path} was trained on other data: {key}={ckpt["data"][key]}, {data_folder(config)} has {data_identity[key]}'
            + ('; --new_data goes on with it' if different == ['train_sha256'] else '')
        )
    if start_step >= max_steps and auto:
        print(f'{path} is at step {start_step} of {max_steps}: done')
        sys.exit()
    if start_step >= max_steps:
        raise InputError(f'{path} is at step {start_step} already; max_steps={max_steps} leaves nothing to do')
if wandb and master:
    try:
        import wandb as wandb_module
    except ImportError:
        raise InputError('wandb=True, but it is not installed: pip install wandb') from None
verifying.join(10)
if damage:
    raise damage[0]
if distributed:
    try:
        dist.init_process_group(
            backend or ('nccl' if device_type == 'cuda' else 'gloo'), timeout=timedelta(seconds=timeout)
        )
    except (RuntimeError, ValueError) as e:  # nobody there, an address that is taken, a variable that is not set
        reason = ' '.join(str(e).split())[:200]
        raise InputError(
            f'process {rank} of {world_size} did not meet the others within {timeout} s ({reason}); start all of them by torchrun'
        ) from None
try:
    out.mkdir(parents=True, exist_ok=True)
    (out / '.writable').touch()
    (out / '.writable').unlink(missing_ok=True)
except OSError as e:
    raise InputError(f'out_dir={out_dir} cannot be written ({e})') from None

# -----------------------------------------------------------------------------
# optimizer, wrappers

model.to(device)
if train_layers:
    model.layers[train_layers : len(model.layers) - train_layers].requires_grad_(False)
decayed = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
others = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
optimizer = torch.optim.AdamW(
    [dict(params=decayed, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)],
    lr=learning_rate,
    betas=(beta1, beta2),
    eps=1e-8,
    fused=device_type in ('cuda', 'cpu'),
)
if ckpt:
    try:
        optimizer.load_state_dict(ckpt['optimizer'])
    except (ValueError, KeyError, AttributeError) as e:
        raise InputError(f'{path} has the optimizer of another model ({e})') from None
    del ckpt
model.activation_checkpointing = activation_checkpointing
raw_model = model  # not wrapped by DDP: what is saved and evaluated
if compile:
    model.compile()
if distributed:
    model = DDP(
        model,
        device_ids=[device] if device_type == 'cuda' else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,  # one copy of the gradients, not two
    )


def learning_rate_at(step):
    """Of the update that leads from `step` to step + 1."""
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    done = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
    return learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def blocks_of(step):
    """The batch_size blocks of update `step`, a function of (seed, step) alone: epoch after epoch, each a fresh permutation."""
    i = np.arange((step - first_step) * batch_size, (step - first_step + 1) * batch_size)
    blocks = np.empty_like(i)
    for epoch in np.unique(i // num_blocks):
        here = i // num_blocks == epoch
        blocks[here] = permute(i[here] % num_blocks, num_blocks, seed, int(epoch))
    return blocks


def host_rows(rows, starts):
    """Sequences of block_size + 1 tokens from each of `starts` -> (n, T + 1, H) int64, pinned where there is a GPU."""
    rows = np.stack([rows[b : b + block_size + 1] for b in starts])
    most = raw_model.config.vocab_size if sign_here else raw_model.config.buckets
    if rows.max() >= most:
        what = 'token id' if sign_here else 'bucket'
        raise InputError(f'{data_folder(config)} has {what} {rows.max()}, the model has {most}: a damaged bin')
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows.pin_memory() if device_type == 'cuda' else rows


def to_device(rows):
    """(n, T + 1, H) on the host -> inputs and targets, each (n, T, H)."""
    rows = rows.to(device, non_blocking=True)
    if sign_here:
        rows = raw_model.signatures[rows[..., 0]]
    return rows[:, :-1], rows[:, 1:]


def load():
    """The micro-batches of this process, from start_step on. Runs in a thread, which has a current GPU of its own."""
    if device_type == 'cuda':
        torch.cuda.set_device(device)
    for step in range(start_step, max_steps):
        for micro in blocks_of(step).reshape(accumulation, world_size, micro_batch_size)[:, rank]:
            yield host_rows(train_rows, micro * block_size)


@torch.no_grad()
def evaluate():
    """Validation over all held-out tokens, in order, shared by all processes: three numbers."""
    starts = np.arange(0, len(val_rows) - 1, block_size)
    whole = [b for b in starts if b + block_size < len(val_rows)]
    chunks = [whole[k : k + micro_batch_size] for k in range(0, len(whole), micro_batch_size)]
    chunks += [[b] for b in starts if b + block_size >= len(val_rows)]  # the last, shorter block
    sums = torch.zeros(2, dtype=torch.float64)
    raw_model.eval()
    for chunk in chunks[rank::world_size]:
        x, y = to_device(host_rows(val_rows, chunk))
        with autocast:
            sums += torch.stack([nats.double().sum().cpu() for nats in raw_model.nll(x, y)])
    raw_model.train()
    if distributed:
        sums = sums.to(device)
        dist.all_reduce(sums)
    product, nats = (sums / (len(val_rows) - 1)).tolist()
    bits = nats * (len(val_rows) - 1) / math.log(2) / meta['splits']['val']['bytes']
    return dict(val_loss=product if raw_model.config.loss == 'product' else nats, val_nats=nats, val_bpb=bits)


def on_host(state):
    """A copy in the host's memory, which training does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to('cpu', copy=True)
    if isinstance(state, dict):
        return {k: on_host(v) for k, v in state.items()}
    return [on_host(v) for v in state] if isinstance(state, list) else state


def save(step, best):
    """Copies the state and leaves writing it to a thread; waits for the write before."""
    global writing
    if writing:
        writing.result()
    began = time.perf_counter()
    state = dict(
        model=raw_model.state_dict(),
        optimizer=optimizer.state_dict(),
        model_config=asdict(raw_model.config),
        config=dict(config),
        step=step,
        first_step=first_step,  # of the present data
        best_val=best_val,
        recent=recent[:],
        data=data_identity,
    )
    state = on_host(state)
    writing = writer.submit(write, state, best, time.perf_counter() - began)


def write(state, best, stood):
    """out_dir/ckpt.pt, replaced only by a whole new one; the milestone, and where it is the best so far ckpt_best.pt, are the same file."""
    global last_saved, good
    began, temporary, newest = time.perf_counter(), out / 'ckpt.pt.tmp', out / 'ckpt.pt'

    def same(path):
        temporary.unlink(missing_ok=True)
        try:
            os.link(newest, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(newest, temporary)
        os.replace(temporary, path)

    try:
        temporary.unlink(missing_ok=True)  # it may be a link to ckpt.pt
        state['sha256'] = {key: digest_of_state(value) for key, value in state.items()}
        with open(temporary, 'wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, newest)
        last_saved, good = state['step'], newest
        if best:
            same(out / 'ckpt_best.pt')
        if keep:
            same(out / f'ckpt_{state["step"]:06}.pt')
        later = [
            p for p in milestones() if step_of(p) > state['step']
        ]  # a damaged one, or a future that will be another
        for path in later + milestones()[len(later) + keep :]:
            path.unlink()
    except (OSError, RuntimeError) as e:
        temporary.unlink(missing_ok=True)
        raise InputError(f'{newest} could not be written ({e}); the one before is untouched') from None
    bar.write(
        f'checkpoint of step {last_saved}: training stood still for {stood:.2f} s, written in {time.perf_counter() - began:.2f} s'
    )


def open_log():
    """out_dir/log.jsonl, without what it says of steps that will happen again; what a crash left half-written goes."""
    path, temporary, lines = out / 'log.jsonl', out / 'log.jsonl.tmp', []
    try:
        for leftover in out.glob('ckpt*.tmp'):
            leftover.unlink()
        if source == 'resume' and path.exists():
            lines = [json.dumps(e) + '\n' for e in read_log() if e['step'] <= start_step]
        temporary.write_text(''.join(lines))
        os.replace(temporary, path)
        return open(path, 'a')
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InputError(f'{path} cannot be written ({e})') from None


def read_log():
    """The events of out_dir/log.jsonl; lines that are none, like a last one that a crash left unfinished, are dropped."""
    events = []
    for line in (out / 'log.jsonl').read_text(errors='replace').splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get('step'), int):
                events.append(event)
    return events


def log(**event):
    """One line of out_dir/log.jsonl."""
    log_file.write(json.dumps(event) + '\n')
    log_file.flush()
    if wandb:
        wandb_run.log(event, step=event['step'])


def draw(path):
    """The loss curve of out_dir/log.jsonl."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    events = read_log()
    fig, ax = plt.subplots(figsize=(8, 5))
    for name, style in (
        ('loss', dict(lw=0.8, alpha=0.6)),
        ('val_loss', dict(marker='o')),
        ('val_nats', dict(marker='o')),
    ):
        points = [(e['tokens'], e[name]) for e in events if name in e]
        if name == 'val_loss' and all(e[name] == e['val_nats'] for e in events if name in e):
            continue  # the training loss is -log P(w): one curve
        label = dict(loss='training loss', val_loss='validation: training loss', val_nats='validation: -log P(w)')[name]
        ax.plot(*zip(*points), label=label, **style)
    ax.set(xlabel='tokens', ylabel='nats per token', title=f'{out_dir}: {sum(raw_model.num_params()):,} parameters')
    ax.grid(alpha=0.3)
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')


def kept():
    if writing:
        with contextlib.suppress(InputError):
            writing.result()
    if last_saved is None:
        return 'no checkpoint was written yet'
    return f'{good} is good, of step {last_saved}: go on with --init_from=resume'


# -----------------------------------------------------------------------------
# the loop

if master:
    c, (interface, decoder) = raw_model.config, raw_model.num_params()
    kind = f'MultiHashFormer H={c.num_hashes} B={c.num_buckets}, {c.loss} loss' if c.num_hashes else 'Standard model'
    print(f'{kind}: {interface:,} parameters of the embedding interface + {decoder:,} of the decoder')
    print(
        f'{device}, {dtype}, compile={compile}; {batch_size} sequences = {world_size} process(es) x {micro_batch_size} x {accumulation}'
    )
    print(
        f'{max_steps:,} steps x {batch_size * block_size:,} tokens, {max_steps * batch_size / num_blocks:.2f} epochs of {data_folder(config)}'
    )
    if source in ('expand', 'replace'):
        print(f'{before[0]:,} -> {c.vocab_size:,} tokens: {sum(raw_model.num_params()) - before[1]:,} new parameters')
    if train_layers:
        frozen = sum(p.numel() for p in raw_model.parameters() if not p.requires_grad)
        print(f'{frozen:,} parameters are frozen: all layers but the first {train_layers} and the last {train_layers}')
    if source == 'resume':
        print(f'resumed at step {start_step}{", with other data" if start_step and first_step == start_step else ""}')
    log_file = open_log()
    if wandb:
        wandb_run = wandb_module.init(project=wandb_project, name=wandb_run_name or out.name, config=config)

tokens_per_step = batch_size * block_size
last_saved, good, speeds = (start_step, path, []) if source == 'resume' else (None, None, [])
writer, writing = ThreadPoolExecutor(1), None
torch.serialization.set_crc32_options(False)  # checkpoints have SHA-256; this one would keep training waiting
stopped_by = 0  # a signal


def stop(signum, frame):
    """After this step; a second signal at once."""
    global stopped_by
    stopped_by = signum
    signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)


for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, stop)
bar = tqdm(
    total=max_steps,
    initial=start_step,
    disable=not master,
    unit='step',
    desc='train',
    delay=1,
    mininterval=0.2 if sys.stderr.isatty() else 20,  # nothing before the first step is through
)
micro_batches = ahead(load())
try:
    for step in range(start_step, max_steps):
        if writing and writing.done():
            writing.result()  # a full disk stops the run at once
        if damage:
            raise InputError(f'{str(damage[0])}; stopped at step {step}, {kept()}')
        began = time.perf_counter()
        lr = learning_rate_at(step)
        for group in optimizer.param_groups:
            group['lr'] = lr
        mean_loss = torch.zeros((), device=device)
        for k in range(accumulation):
            x, y = to_device(next(micro_batches))
            if distributed:  # gradients are exchanged once per update
                model.require_backward_grad_sync = k == accumulation - 1
            with autocast:  # micro-batches are equally long, so the mean of their means is the mean over all tokens
                micro_loss = model(x, y) / accumulation
            micro_loss.backward()
            mean_loss += micro_loss.detach()
        stopping = stopped_by
        if distributed:
            shared = torch.stack([mean_loss / world_size, torch.tensor(float(stopping), device=device)])
            dist.all_reduce(shared)
            mean_loss, stopping = shared[0], int(shared[1].item()) and (stopped_by or signal.SIGTERM)
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        mean_loss, norm = mean_loss.item(), norm.item()
        if not math.isfinite(mean_loss) or not math.isfinite(norm):
            raise InputError(
                f'step {step}: loss {mean_loss}, gradient norm {norm}; stopped before the update, {kept()}'
            )
        spike = False
        if spike_deviations and len(recent) >= 20:
            middle = statistics.median(recent)
            deviation = 1.4826 * statistics.median(abs(x - middle) for x in recent)
            spike = mean_loss > middle + spike_deviations * max(deviation, 1e-3)
        if spike and stop_on_spike:
            raise InputError(
                f'step {step}: loss {mean_loss:.4f} is a spike above the {middle:.4f} +- {deviation:.4f} of the last '
                f'{len(recent)} steps; stopped before the update, {kept()}'
            )
        recent = [*recent[-99:], mean_loss]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began

        done = step + 1
        if master:
            speeds.append(tokens_per_step / seconds)
            log(
                step=done,
                tokens=done * tokens_per_step,
                loss=mean_loss,
                lr=lr,
                grad_norm=norm,
                tokens_per_s=round(speeds[-1], 1),
                **dict(spike=True) if spike else {},
            )
            if spike:
                bar.write(f'step {done}: loss {mean_loss:.4f} is a spike above {middle:.4f} +- {deviation:.4f}')
            bar.set_postfix_str(f'loss {mean_loss:.3f}, {speeds[-1]:,.0f} tokens/s', refresh=False)
            bar.update()
        if done % eval_interval == 0 or done == max_steps:
            result = evaluate()
            best = result['val_loss'] < best_val
            best_val = min(best_val, result['val_loss'])
            if master:
                log(step=done, tokens=done * tokens_per_step, **result)
                save(done, best)
                bar.write(
                    f'step {done}: validation loss {result["val_loss"]:.4f}, {result["val_nats"]:.4f} nats per token, '
                    f'{result["val_bpb"]:.4f} bits per byte{" (best)" if best else ""}'
                )
        elif stopping and master:
            save(done, False)
        if not master and (done % eval_interval == 0 or stopping):
            last_saved, good = done, out / 'ckpt.pt'
        if stopping and done < max_steps:
            break
    if writing:
        writing.result()
    if stopping and done < max_steps:
        bar.close()
        if master:
            print(f'stopped by signal {stopping}; {kept()}', file=sys.stderr)
        sys.exit(128 + stopping)
except KeyboardInterrupt:
    bar.close()
    if master:
        print(f'interrupted; {kept()}', file=sys.stderr)
    sys.exit(130)
except OSError as e:  # the log: disk full, or gone
    raise InputError(f'{out} cannot be written ({e}); stopped at step {step}, {kept()}') from None
finally:
    bar.close()

if master:
    steady = speeds[min(5, len(speeds) - 1) :]  # without warm-up
    print(
        f'{tokens_per_step * len(steady) / sum(tokens_per_step / s for s in steady):,.0f} tokens/s; {out}/ckpt.pt, log.jsonl, loss.png'
    )
    log_file.close()
    draw(out / 'loss.png')
if distributed:
    dist.destroy_process_group()
