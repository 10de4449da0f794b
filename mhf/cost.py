"""
What a training step costs, by formulas and measured.

The formulas give its FLOPs and its bytes; `python bench.py CONFIG --plan` prints them. A Machine and TrainingSteps
measure its time and its memory; bench.py prints them, and study/costs.py writes them into a table.
"""

import contextlib
import functools
import gc
import math
import os
import statistics
import time
from dataclasses import astuple, replace

import torch
from tqdm import tqdm

from configurator import InputError
from hashing import signature_table
from mhf.fused import FusedMHF, cpu_chunk, gpu_chunk

# -----------------------------------------------------------------------------
# by formulas


def flops_per_token(c):
    """
    FLOPs of the matrix products that training takes for a token, of a MHFConfig's model: 2 per multiply and add. Causal
    attention counts half. A product that is computed a second time, or that only moves numbers, does not count.
    """
    d = c.hidden_size
    width = c.num_heads * c.head_dim
    layer = 2 * d * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    attention = 2 * width * (c.block_size + 1)
    forward = c.num_layers * (layer + attention) + 2 * c.num_coordinates * c.buckets_per_coordinate * d
    if c.num_hashes:
        encoder = c.num_hashes * 2 * c.bottleneck * (d + 1) + 2 * d * d
        soft_embedding_and_mixer = 2 * c.num_buckets * d + 2 * 3 * d * c.bottleneck
        mixers = 0 if c.ablation == 'no_cascade' else c.num_hashes - 1
        forward += encoder + mixers * soft_embedding_and_mixer
    return 3 * forward


def step_memory(c, parameters, sequences, accumulates, checkpointing=False, free=None):
    """
    Bytes that a step of a MHFConfig's model needs -> {what takes them: bytes}. Products are in bfloat16, and nothing is
    compiled. sequences: of a micro-batch; accumulates: whether an update has several micro-batches; free: the GPU's
    free bytes, None on a CPU.

    The formulas count what autograd keeps. From 100M to 3B parameters, with 1 or 8 sequences of 2,048 tokens, they are
    within 13 % of a trace of the allocations, and an H100's peaks agreed with that trace (LOG.md).
    """
    d = c.hidden_size
    width = c.num_heads * c.head_dim
    keys = c.num_kv_heads * c.head_dim
    tokens = sequences * c.block_size
    # of a token: norms and the residual stream; queries and attention's result; keys and values; the MLP's four tensors
    block = 18 * d + 8 * width + 8 * keys + 8 * c.intermediate_size
    # of a token: the rows of E in both precisions, the gate's products
    encoder = 14 * c.num_hashes * d
    kept = 4 * d if checkpointing else block
    # autocast keeps the matrices in bfloat16
    matrices = 2 * c.num_layers * d * (2 * width + 2 * keys + 3 * c.intermediate_size)
    # of a token of a chunk: bucket logits, probabilities and gradients; a GPU's exact loss also keeps token logits
    logits = 10 * c.num_coordinates * c.buckets_per_coordinate
    if c.num_hashes and c.loss == 'exact' and free is not None:
        logits += 4 * c.vocab_size
    if free is None:
        chunk = cpu_chunk(c.num_coordinates, c.buckets_per_coordinate)
    else:
        chunk = gpu_chunk(c.num_coordinates, c.buckets_per_coordinate, c.vocab_size, free)
    chunk = min(tokens, chunk)
    # E in bfloat16 and its gradient; h and its gradient
    head = 6 * c.num_coordinates * c.buckets_per_coordinate * d + chunk * logits + 8 * tokens * d
    return {
        'parameters': 4 * parameters,
        'AdamW': 8 * parameters,
        # without accumulation, the backward frees activations while it makes gradients
        'gradients': 4 * parameters if accumulates else 0,
        'activations': tokens * (c.num_layers * kept + encoder + 8 * d) + matrices,
        'head, or a block': max(head, tokens * block * checkpointing),
    }


def machine_memory():
    """Bytes of memory that this machine has; infinite where Python cannot tell, on Windows."""
    if not hasattr(os, 'sysconf'):
        return math.inf
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def check_memory(model, device, micro_batch_size, accumulation, checkpointing):
    """Raises InputError where the processes on a CPU need more memory for a training step than the machine has."""
    if torch.device(device).type != 'cpu':
        return
    parameters = sum(model.num_params())
    needs = step_memory(model.config, parameters, micro_batch_size, accumulation > 1, checkpointing)
    processes = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    need = processes * sum(needs.values())
    if need > machine_memory():
        has = f'a step needs {need / 1e9:,.1f} GB, this machine has {machine_memory() / 1e9:,.1f}'
        raise InputError(f'micro_batch_size={micro_batch_size}: {has}; use a smaller one')


# -----------------------------------------------------------------------------
# measured


class Machine:
    """
    What is measured on: a device and a precision, a clock, and a meter of memory.

    compile: whether training steps are compiled; None means on a GPU alone. repeats: how often each thing is measured;
    the median counts. progress: whether a terminal sees a bar.
    """

    def __init__(self, device, dtype, compile=None, repeats=3, progress=True):
        self.device = device
        self.device_type = torch.device(device).type
        self.on_gpu = self.device_type == 'cuda'
        self.dtype_name = dtype
        self.dtype = getattr(torch, dtype)
        self.compiles = self.on_gpu if compile is None else compile
        self.repeats = repeats
        # what tqdm calls disable: None is off where nobody looks
        self.hide_bars = None if progress else True
        self.name = f'{torch.get_num_threads()} CPU threads'
        if self.on_gpu:
            torch.set_float32_matmul_precision('high')
            torch.cuda.set_device(device)
            self.name = torch.cuda.get_device_name(device)
        # large enough that nothing but the product counts
        self.gemm_size = 8192 if self.on_gpu else 2048

    @functools.cached_property
    def gemm_flops(self):
        """FLOPs per second of large matrix products, measured when first asked for."""
        size = self.gemm_size
        # a GPU's clock needs several products in one timing
        times = 20 if self.on_gpu else 1
        x = torch.randn(size, size, device=self.device, dtype=self.dtype)
        return times * 2 * size**3 / self.best_of(lambda: [x @ x for _ in range(times)])

    def autocast(self):
        return torch.autocast(self.device_type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, f):
        """Calls f -> the seconds that it takes."""
        self.synchronize()
        began = time.perf_counter()
        f()
        self.synchronize()
        return time.perf_counter() - began

    def best_of(self, f, n=8):
        """Calls f once to warm up, then n times -> the fewest seconds."""
        f()
        return min(self.timed(f) for _ in range(n))

    def peak_memory(self, f):
        """
        Calls f -> the bytes that it takes: the largest memory in use while it runs, less what is in use before. None on
        a CPU, which cannot tell.
        """
        gc.collect()
        if not self.on_gpu:
            f()
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before

    def free_memory(self):
        """Bytes that are free, on the GPU or of this machine."""
        if self.on_gpu:
            return torch.cuda.mem_get_info()[0]
        with contextlib.suppress(ValueError, OSError, AttributeError):
            return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        return 8e9

    def in_turn(self, run, items):
        """
        {name: item} -> {name: (median seconds, peak memory)}. run(measure, item) calls measure(the work on the item)
        and returns what that returns. Items take turns, A B C A B C ...: first to warm up, then for the memory, then
        for the time.
        """
        seconds = {name: [] for name in items}
        memory = {}
        for turn in tqdm(range(self.repeats + 2), leave=False, disable=self.hide_bars):
            for name, item in items.items():
                if turn == 1:
                    memory[name] = run(self.peak_memory, item)
                else:
                    seconds[name].append(run(self.timed, item))
        return {name: (statistics.median(seconds[name][1:]), memory[name]) for name in items}


def random_model(c, tok):
    """A model with random weights, always the same; it has a copy of the config, which a caller may change."""
    table = None
    if c.num_hashes:
        table = signature_table(tok.tokens, c.num_hashes, c.num_buckets, pad_id=tok.pad)
    unused_ids = [i for i, token in enumerate(tok.tokens) if token is None]
    torch.manual_seed(0)
    return FusedMHF(replace(c), table, unused_ids)


def random_tokens(model, *shape):
    """Signatures (*shape, H) of random tokens from the later half of the vocabulary, which has no special ones."""
    V = model.config.vocab_size
    return model.signatures[torch.randint(V // 2, V, shape, device=model.signatures.device)]


class TrainingSteps:
    """
    Training steps of several models, each on one micro-batch of random tokens: forward, backward, clipping and AdamW.

    configs is {name: MHFConfig}. Those that differ in their loss alone share a model.
    """

    def __init__(self, machine, configs, tok, micro_batch_size, checkpointing=False):
        self.machine = machine
        self.configs = configs
        self.micro_batch_size = micro_batch_size
        self.checkpointing = checkpointing
        self.models = {}
        self.optimizers = {}
        built = {}
        for name, c in configs.items():
            shape = astuple(replace(c, loss='exact'))
            if shape not in built:
                built[shape] = self.build(c, tok)
            self.models[name], self.optimizers[name] = built[shape]

    def build(self, c, tok):
        """A config's model on the machine, compiled where it compiles, and its optimizer."""
        model = random_model(c, tok).to(self.machine.device)
        model.activation_checkpointing = self.checkpointing
        fused = self.machine.device_type in ('cuda', 'cpu')
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
        if self.machine.compiles:
            model.compile()
        return model, optimizer

    def run(self, measure, name):
        """Returns measure(step) for a step of the named model, and drops the gradients afterwards."""
        model = self.models[name]
        optimizer = self.optimizers[name]
        c = self.configs[name]
        model.config.loss = c.loss
        s = random_tokens(model, self.micro_batch_size, c.block_size + 1)

        def step():
            with self.machine.autocast():
                loss = model(s[:, :-1], s[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        measured = measure(step)
        optimizer.zero_grad(set_to_none=True)
        return measured

    def costs(self):
        """Measures all models in turn -> {name: dict}: time and memory of a step, and what the formulas say of it."""
        measured = self.machine.in_turn(self.run, {name: name for name in self.configs})
        return {name: self.cost(name, *measured[name]) for name in self.configs}

    def cost(self, name, seconds, memory):
        """The dict of one model, given the seconds and the peak memory of its step."""
        c = self.configs[name]
        parameters = sum(self.models[name].num_params())
        flops = flops_per_token(c)
        tokens_per_s = self.micro_batch_size * c.block_size / seconds
        free = self.machine.free_memory() if self.machine.on_gpu else None
        needs = step_memory(c, parameters, self.micro_batch_size, False, self.checkpointing, free)
        return dict(
            parameters=parameters,
            tokens_per_s=tokens_per_s,
            seconds=seconds,
            flops_per_token=flops,
            gemm_share=flops * tokens_per_s / self.machine.gemm_flops,
            peak_memory=memory,
            # as measured: beyond parameters and the optimizer's moments
            planned_memory=needs['activations'] + needs['head, or a block'],
        )
