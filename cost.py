"""
What a training step costs, from a trace of it on tensors without memory: its kernels, each with FLOPs and bytes, and
the memory in use; and what a machine of given rates makes of them. `python bench.py CONFIG --plan` prints it.

    ops, fused, sizes = count(config, sequences=8, device_type='cuda')
    seconds = price(ops, Rates(...), 'head')['seconds']
"""

import contextlib
import math
import re
import weakref
from collections import Counter
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import loss as fast
from model import MHF

PRICED = ('body', 'head', 'optimizer')


def flops_per_token(c):
    """Of the model's training: what is computed twice, or as a product only to move it, does not count."""
    d, z, width = c.hidden_size, c.bottleneck, c.num_heads * c.head_dim
    layer = 2 * d * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    forward = c.num_layers * (layer + 2 * width * (c.block_size + 1)) + 2 * c.coordinates * c.buckets * d
    if c.num_hashes:  # the encoder; soft embeddings and mixers
        forward += c.num_hashes * 2 * z * (d + 1) + 2 * d * d
        forward += (c.ablation != 'no_cascade') * (c.num_hashes - 1) * (2 * c.num_buckets * d + 2 * 3 * d * z)
    return 3 * forward


class Op(NamedTuple):
    """A kernel."""

    part: str  # body or head
    kind: str  # gemm, attention or attention_backward; exp, which is no memory speed on a CPU; or stream
    flops: int
    size: int  # bytes read and written


# what reads of its first input only what its second says
INDEXED = ('index', 'index_select', 'gather', 'embedding', 'embedding_bag', 'embedding_bag_forward_only')


class Trace(TorchDispatchMode):
    """
    Counts the kernels of what runs in it: `ops`, and `fused`, as if all between two matrix products were one kernel,
    which reads and writes what others wrote and read. And memory: the new bytes in use (live), and most of them (peak).
    """

    def __init__(self, device_type):
        super().__init__()
        self.on_cuda, self.part, self.ops, self.fused = device_type == 'cuda', 'body', Counter(), Counter()
        self.live = self.peak = self.region = self.region_size = 0
        # of a storage: new bytes, the region (kernels between two products) that used it last, has no other one read it
        self.stores = {}

    def note(self, tensor, new):
        """A tensor's storage as a number; a new one is in use until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.stores:
            self.stores[key] = [new * storage.nbytes(), self.region if new else None, new]
            self.live += self.stores[key][0]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.freed, key)
        return key

    def freed(self, key):
        self.live -= self.stores.pop(key)[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        read = {self.note(t, False): bytes_of(t) for t in sorted(inputs, key=bytes_of)}
        kwargs = kwargs or {}
        # torch 2.11 cannot do this one with fake tensors
        result = kwargs['out'] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        written = {self.note(t, True): bytes_of(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        name, in_place = func._overloadpacket.__name__.strip('_'), func._schema.is_mutable
        if 'empty' in name or (not in_place and written.keys() <= read.keys()):
            return result  # a view, which launches nothing
        kind, flops = 'stream', 0
        size = sum(read.values()) + sum(written.values())
        if name in ('mm', 'addmm', 'bmm', 'baddbmm'):
            b = [t for t in args if isinstance(t, torch.Tensor)][-1]
            kind, flops = 'gemm', 2 * result.numel() * b.shape[-2]
        elif name.startswith('scaled_dot_product'):
            # two products, in backward four, of their causal half; a fused kernel's recomputation is not counted
            backward = 'backward' in name
            q, k = inputs[backward : backward + 2]
            kind, flops = 'attention', 2 * q.numel() * (k.shape[-2] + 1)
            if backward:
                kind, flops = 'attention_backward', 2 * flops
        elif name == 'lookups':
            # its kernels move the bucket logits four times, and the token logits twice
            o, _, rows, *_ = args
            laid_out, token_logits = fast.lookup_bytes(o, len(rows))
            size = 4 * laid_out + 2 * token_logits
            self.peak = max(self.peak, self.live + laid_out + token_logits)
        elif name in INDEXED or (in_place and re.match('index_|scatter', name)):
            # of what is indexed only what is touched: numbers, or rows
            table, index = inputs[:2]
            dim = args[1] if isinstance(args[1], int) else 0
            rows = 1 if re.search('gather|scatter', name) else table.numel() // table.shape[dim]
            touched = index.numel() * rows * table.element_size()
            size += (1 + in_place) * (touched - bytes_of(table))
        elif re.search('exp|softmax|silu', name):
            kind = 'exp'
            if self.on_cuda and name in ('softmax', 'log_softmax') and args[1] % inputs[0].dim() < inputs[0].dim() - 1:
                # CUDA's kernel for other than the last dimension reads three times, in blocks of up to 1,024 columns,
                # each on one of some 132 multiprocessors: (16384, 512) gets 1/132 of the bandwidth
                blocks = math.prod(inputs[0].shape[: args[1]]) * -(-math.prod(inputs[0].shape[args[1] + 1 :]) // 1024)
                size = int(2 * size * max(1, 132 / blocks))
        op = Op(self.part, kind, flops, size)
        self.ops[op] += 1
        if name == 'lookups':  # opaque to a compiler
            self.end_region()
            self.fused[op] += 1
        else:
            self.fuse(op, read, written)
        return result

    def fuse(self, op, read, written):
        for key, size in read.items():
            _, region, unread = store = self.stores[key]
            if op.flops or region != self.region:
                # what another region made is written, once, and what is changed in place is written again
                self.region_size += size * (unread + (not op.flops) * (1 + (key in written)))
                store[1:] = self.region, False
        if op.flops:
            self.end_region()
            self.fused[op] += 1
            for key in written:
                self.stores[key][2] = False

    def end_region(self):
        if self.region_size:
            self.fused[Op(self.part, 'stream', 0, self.region_size)] += 1
        self.region, self.region_size = self.region + 1, 0


def rms_norm_on_cuda(x, shape, weight, eps):
    """One kernel each way, as layer_norm is, which saves as much; the CPU's is many."""
    return F.layer_norm(x, shape, weight, None, eps)


def add_products_on_cuda(total, pairs):
    for a, b in pairs:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)


def bytes_of(tensor):
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def trace(c, sequences, device_type, accumulate, checkpointing, free=None):
    """What count() returns, of all layers."""
    # of the size of any other
    table = 1 + np.arange(c.vocab_size * c.coordinates).reshape(c.vocab_size, -1) % (c.buckets - 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = MHF(c, table)
    model.activation_checkpointing, model.head_device = checkpointing, device_type
    # a real one, because what the head reads from it depends on its numbers
    model.replace_vocabulary(table, c.pad_id)
    model.table()
    as_on_device = contextlib.ExitStack()
    if device_type == 'cuda':
        model.head_chunk = fast.head_chunk(c.coordinates, c.buckets, c.vocab_size, torch.device('cuda'), free)
        as_on_device.enter_context(mock.patch.object(F, 'rms_norm', rms_norm_on_cuda))
        as_on_device.enter_context(mock.patch.object(fast, 'add_products', add_products_on_cuda))
    P, n = sum(model.num_params()), sequences * c.block_size
    with FakeTensorMode(allow_non_fake_inputs=True):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if accumulate else None
        s = model.sign(torch.zeros(sequences, c.block_size + 1, dtype=torch.int64))
        with as_on_device, Trace(device_type) as t:
            with torch.autocast('cpu', torch.bfloat16):
                h = model.hidden_states(s[:, :-1])
                t.end_region()
                sizes = dict(parameters=P, activations=t.live, peak_forward=t.peak)
                t.part, t.peak = 'head', t.live
                cut = h.detach().requires_grad_()
                mean_loss = model.head_loss(cut.flatten(0, 1), s[:, 1:].flatten(0, 1)) / n
            mean_loss.backward()
            t.end_region()
            sizes['peak_head'], t.part, t.peak = t.peak, 'body', t.live
            h.backward(cut.grad)
            t.end_region()
            sizes |= dict(peak_backward=t.peak, peak_end=t.live)
    # the norm reads gradients, clipping also writes them, AdamW reads four numbers of a parameter and writes three
    for ops in (t.ops, t.fused):
        ops[Op('optimizer', 'stream', 0, 40 * P)] = 1
    return t.ops, t.fused, sizes


def count(c, sequences, device_type, accumulate=False, checkpointing=False, free=None):
    """
    The kernels of a micro-batch of `sequences` x c.block_size tokens and of the update: {Op: how many}, the same fused,
    and {sizes: bytes, and parameters}. From models of one and two layers: each other one adds the same.
    """
    how, more = (sequences, device_type, accumulate, checkpointing, free), c.num_layers - 1
    counts = zip(*(trace(replace(c, num_layers=k), *how) for k in (1, 2)), strict=True)
    return tuple({k: a.get(k, 0) + more * (b.get(k, 0) - a.get(k, 0)) for k in a | b} for a, b in counts)


class Rates(NamedTuple):
    """What a machine reaches: FLOP/s, bytes/s, and how long it takes to start a kernel."""

    gemm: float
    attention: float
    attention_backward: float
    exp: float
    stream: float
    launch: float
    queued: bool


def price(ops, rates, part):
    """
    Predicts the seconds of a part: a kernel takes as long as its FLOPs or its bytes, whichever is longer. A GPU's are
    queued, so that starting them costs time only where it takes longer than they do; a CPU does one after the other.
    """
    total, flops, moved, launches = 0.0, 0.0, 0.0, 0
    for op, n in ops.items():
        if op.part == part:
            arithmetic = op.flops / getattr(rates, op.kind) if op.flops else 0.0
            memory = op.size / (rates.exp if op.kind == 'exp' else rates.stream)
            total, launches = total + n * max(arithmetic, memory), launches + n
            flops, moved = flops + n * arithmetic, moved + n * memory
    start = launches * rates.launch
    bounds = dict(FLOPs=flops, bytes=moved, starts=start)
    seconds = max(total, start) if rates.queued else total + start
    return dict(seconds=seconds, **bounds, launches=launches, bound=max(bounds, key=bounds.get))


def memory_plan(sizes, accumulate):
    """Bytes by what takes them, at the peak of a step of which count() gave the sizes."""
    P, peak = sizes['parameters'], max(size for key, size in sizes.items() if key.startswith('peak'))
    need = dict(parameters=4 * P, optimizer=8 * P, gradients=4 * P * accumulate, activations=sizes['activations'])
    return need | {'head or backward': peak - sizes['activations']}
