"""
Device, precision and CUDA graphs; initialization, consistency checks and reductions for several processes; the log of a
run, and the signals that stop it.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from mhf.errors import InputError

# -----------------------------------------------------------------------------
# device, precision, CUDA graphs


def pick_device(device=None):
    """
    Returns the requested device, else cuda if available, else cpu; mps is untested, so it must be requested. Under
    torchrun, cuda is the GPU of this process.
    """
    if device is None:
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    torch.empty(0, device=device)  # torch.cuda.set_device would not say that torch was built without CUDA
    return device


def pick_dtype(dtype, device):
    """
    Returns the precision of matrix products: the requested one, else bfloat16 on a GPU or x86 CPU with instructions for
    it. Raises InputError for another precision.
    """
    if dtype not in (None, 'bfloat16', 'float32'):
        raise InputError(f'dtype={dtype}: must be bfloat16 or float32 (float16 would need loss scaling)')
    if torch.device(device).type == 'cuda':
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype or ('bfloat16' if is_fast else 'float32')


def capture(function, *tensors):
    """
    Captures function(*tensors) as a CUDA graph. Returns a function that copies its arguments into clones of `tensors`
    and replays the graph: one launch instead of hundreds. Its next call overwrites its result.
    """
    tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    stream = torch.cuda.Stream()  # as torch.cuda.graph's documentation requires
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles the function, and initializes libraries
            function(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*tensors)

    def replay(*new_tensors):
        for tensor, new_tensor in zip(tensors, new_tensors, strict=True):
            tensor.copy_(new_tensor)
        graph.replay()
        return result

    replay.function = function  # keeps alive what the graph reads
    return replay


@contextlib.contextmanager
def unchanged_buffers(model):
    """Restores a model's buffers, such as a running mean, after passes that train nothing."""
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def keep_freed_memory():
    """
    Lets glibc keep the freed memory of large tensors for later ones. Page faults of new memory would take up to a
    quarter of a training step on a CPU. Other C libraries are unchanged.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # M_TRIM_THRESHOLD alone would only end the dynamic M_MMAP_THRESHOLD
        if mallopt(-3, 2**30) == 1:  # M_MMAP_THRESHOLD
            mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


# -----------------------------------------------------------------------------
# distributed runs; a single process has no process group, and keeps its own values


def init_distributed(device=None, deterministic=False):
    """
    Picks the device, and joins the process group if torchrun started several processes. With `deterministic`, a GPU
    computes the same bits in every run. Returns (rank, world size, device).
    """
    rank = int(os.environ.get('RANK', 0))
    world_size = int(os.environ.get('WORLD_SIZE', 1))
    device = pick_device(device)
    on_gpu = torch.device(device).type == 'cuda'
    if not on_gpu:
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if on_gpu and deterministic:
        os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'  # cuBLAS reads it when it is initialized
        torch.use_deterministic_algorithms(True)
    if world_size > 1:
        backend = 'cpu:gloo,cuda:nccl' if on_gpu else 'gloo'
        dist.init_process_group(backend, timeout=timedelta(hours=1))  # writing a checkpoint may take as long
    return rank, world_size, device


def broadcast(value):
    """Returns rank 0's value, which must be picklable, on all ranks."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def check_same_on_all_ranks(values):
    """Raises InputError on all ranks if a dict differs between them. Its values must be picklable."""
    if not dist.is_initialized():
        return
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    for rank, other in enumerate(gathered):
        if changes := describe_changes(gathered[0], other, 'rank 0:'):
            raise InputError(f'rank {rank} has {changes}; use the same settings, files and versions on all machines')


def describe_changes(old, new, word='was'):
    """Describes the names in both dicts whose values differ: 'seed=7 (was 42), loss=exact (was product)'."""
    names = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    return ', '.join(f'{name}={new[name]!s:.64} ({word} {old[name]!s:.64})' for name in names)


def wrap_ddp(model, micro_batch_size, autocast):
    """Returns the model under DDP, which starts all ranks with the weights of rank 0."""
    device = model.embed.weight.device
    shape = (micro_batch_size, model.config.block_size + 1)
    model = DDP(model, device_ids=[device] if device.type == 'cuda' else None, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # each rank has its own
    # DDP rebuilds its buckets after the first backward pass, and then sums in another order. A pass on zeros precedes
    # the first step, so that a resumed run sums in the order of an uninterrupted one. The pass also makes every .grad a
    # view of a bucket, which avoids a second copy of the gradients.
    zeros = torch.zeros(shape, dtype=int, device=device)
    with autocast, unchanged_buffers(model):
        model(zeros[:, :-1], zeros[:, 1:]).backward()  # slices, as in get_batch, so that one graph is compiled
    model.zero_grad(set_to_none=False)
    return model


def all_reduce(tensor):
    """Sums a tensor over all ranks, in place, and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


# -----------------------------------------------------------------------------
# the log of a run, and signals


class Log:
    """
    log.jsonl, one JSON object per line that starts with its step, and Weights & Biases if `wandb_config` are settings.
    A run that resumes at `step` repeats what follows: later lines and an incomplete one are dropped. The log of
    another run or program gets another name.
    """

    def __init__(self, path, step, wandb_config=None):
        text = path.read_bytes() if path.exists() else b''
        size = 0
        for line in text.splitlines(keepends=True):
            event = re.match(rb'{"step": (\d+), .*}\n', line)
            if not event or int(event[1]) > step:
                break
            size += len(line)
        if text and not (step and size):
            path.rename(path.with_name(f'log_{time.strftime("%Y%m%d_%H%M%S")}.jsonl'))
            size = 0
        self.file = open(path, 'a', buffering=1)
        self.file.truncate(size)
        self.wandb_run = None
        if wandb_config is not None:
            import wandb

            self.wandb_run = wandb.init(config=wandb_config)

    def write(self, **event):
        try:
            self.file.write(json.dumps(event) + '\n')
        except OSError as e:  # such as a full disk; the file's buffer keeps the line for the next write
            tqdm.write(f'{self.file.name}: {e}')
        if self.wandb_run:
            self.wandb_run.log(event, step=event['step'])


@contextlib.contextmanager
def stop_signals(world_size):
    """
    Yields a list of the SIGTERM, SIGINT, SIGHUP and SIGUSR1 that this process has received in the `with` block. A
    second Ctrl-C interrupts a single process; torchrun may send one Ctrl-C twice.
    """
    received = []

    def receive(signum, frame):
        received.append(signum)
        if world_size == 1 and received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    caught = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]  # nohup ignores SIGHUP
    handlers = {signum: signal.signal(signum, receive) for signum in caught}
    try:
        yield received
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
