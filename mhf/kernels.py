"""
The logsumexp of the token logits as Triton kernels, for mhf/head.py.

    transpose    copies the bucket logits o_i (n, B) into blocks of positions, with one row per bucket
    logsumexp    computes the token logits sum_i o_i[s_i(w)] of every token id w, and their logsumexp
    backward     computes the gradient: for each bucket the sum of P(w) over its tokens

Gathers are fast if they read contiguous memory. In (n, B) the logits of one bucket are B elements apart. In a block of
64 positions they are one row of 64. logsumexp adds H rows to get the token logits of an id, and stores them as a row in
float32. backward gathers the rows of a bucket's tokens. The programs of a block run before those of the next block, so
the rows of a block stay in the L2 cache.

The kernels use no atomic adds, so equal inputs produce equal bits. Offsets into tensors that grow with n are 64-bit.
The sizes are the fastest of those tried on an H200 with 4,096 positions of H4B16K: 1.37 ms with the gradient; with 32
or 128 positions 1.66 and 1.70, 32 or 128 tokens 1.49 and 1.38, 8 or 32 buckets 1.43 and 1.51 (study/LOG.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2_E): a GPU has an instruction for exp2 only


class Sizes(NamedTuple):
    """Elements per program, and warps (32 threads) per program. All are powers of two."""

    positions: int = 64  # per block, for all kernels
    tokens: int = 64  # for logsumexp
    buckets: int = 16  # for backward
    transpose_warps: int = 4
    logsumexp_warps: int = 4
    backward_warps: int = 2


SIZES = Sizes()


def log_normalizer(o, index, gradient, sizes=SIZES):
    """
    Args:
        o: bucket logits, H of (n, B), contiguous, float64, float32 or bfloat16
        index: a head.Index
        gradient: whether to compute the gradient

    Returns: the logsumexp of the token logits (n,), float32 or better; its gradient (H, n, B), or an empty tensor.
    """
    H = len(o)
    n, B = o[0].shape
    # Triton launches on the current GPU, so make the logits' GPU the current one
    with torch.cuda.device_of(o[0]):
        transposed = transpose(o, sizes)
        logits, normalizer = logsumexp(transposed, index, gradient, sizes)
        if not gradient:
            return normalizer[:n], o[0].new_empty(0)
        # overwrites the transposed logits, which are at least as large
        bucket_gradient = transposed.flatten()[: H * n * B].view(H, n, B)
        backward(logits, normalizer, index, bucket_gradient, sizes)
    return normalizer[:n], bucket_gradient


def transpose(o, sizes):
    """Bucket logits, H of (n, B) -> (blocks, H*B, positions per block), 0 for positions from n on."""
    H = len(o)
    n, B = o[0].shape
    T = sizes.positions
    blocks = triton.cdiv(n, T)
    transposed = o[0].new_empty(blocks, H * B, T)
    grid = (triton.cdiv(B, T), blocks)
    transpose_kernel[grid](tuple(o), transposed, n, B, H, T, num_warps=sizes.transpose_warps)
    return transposed


def logsumexp(transposed, index, keep_logits, sizes):
    """
    Args: transposed (blocks, H*B, T) from transpose; a head.Index.
    Returns: the token logits (blocks, V, T), undefined for unused ids, or None without keep_logits; their logsumexp at
        every position, (blocks * T,). Both are float32 or better.
    """
    blocks, num_rows, T = transposed.shape
    V, H = index.rows.shape
    accumulate = torch.promote_types(transposed.dtype, torch.float32)
    logits = transposed.new_empty(blocks, V, T, dtype=accumulate) if keep_logits else None
    grid = (triton.cdiv(V, sizes.tokens), blocks)
    partial = transposed.new_empty(grid[0], blocks * T, dtype=accumulate)
    tensors = (transposed, index.rows, index.token_mask, logits, partial)
    logsumexp_kernel[grid](*tensors, V, num_rows, H, T, sizes.tokens, num_warps=sizes.logsumexp_warps)
    return logits, partial.logsumexp(0)


def backward(logits, normalizer, index, gradient, sizes):
    """Writes the gradient (H, n, B) of the normalizer; logits and normalizer are those of logsumexp."""
    H, n, B = gradient.shape
    blocks, V, T = logits.shape
    grid = (triton.cdiv(B, sizes.buckets), H, blocks)
    tensors = (logits, normalizer, index.ids, index.id_offsets, gradient)
    backward_kernel[grid](*tensors, n, V, B, T, sizes.buckets, num_warps=sizes.backward_warps)


@triton.jit
def transpose_kernel(o, transposed, n, B, H: tl.constexpr, T: tl.constexpr):
    bucket = tl.program_id(0) * T + tl.arange(0, T)
    block = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, T)
    position = block * T + column
    exists = (position < n)[:, None] & (bucket < B)
    for i in tl.static_range(H):
        x = tl.load(o[i] + (position[:, None] * B + bucket), mask=exists, other=0)  # (positions, buckets)
        row = (block * H + i) * B + bucket
        tl.store(transposed + (row[:, None] * T + column), x.T, mask=(bucket < B)[:, None])


@triton.jit
def logsumexp_kernel(
    transposed, rows, token_mask, logits, lse, V, num_rows, H: tl.constexpr, T: tl.constexpr, W: tl.constexpr
):
    token = tl.program_id(0) * W + tl.arange(0, W)
    block = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, T)
    used = tl.load(token_mask + token, mask=token < V, other=0) != 0
    logit = 0.0
    for i in tl.static_range(H):
        row = block * num_rows + tl.load(rows + token * H + i, mask=used, other=0)
        # the logit of an unused id is -inf, so it adds 0 to the sum
        x = tl.load(transposed + (row[:, None] * T + column), mask=used[:, None], other=-float('inf'))
        x = x.to(lse.dtype.element_ty)  # (tokens, positions)
        logit = logit + x if i else x
    if logits is not None:
        tl.store(logits + ((block * V + token)[:, None] * T + column), logit, mask=used[:, None])
    # finite even if all ids of this program are unused
    top = tl.maximum(tl.max(logit, 0), -1e30)
    total = tl.sum(tl.exp2((logit - top) * LOG2_E), 0)
    program = tl.program_id(0) * tl.num_programs(1) + block
    tl.store(lse + program * T + column, top + tl.log(total))


@triton.jit
def backward_kernel(logits, normalizer, ids, offsets, gradient, n, V, B, T: tl.constexpr, R: tl.constexpr):
    bucket = tl.program_id(0) * R + tl.arange(0, R)
    coordinate = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, T)
    position = block * T + column
    row = coordinate * B + bucket
    start = tl.load(offsets + row, mask=bucket < B, other=0)
    end = tl.load(offsets + row + 1, mask=bucket < B, other=0)
    scaled_normalizer = tl.load(normalizer + position) * LOG2_E
    total = tl.zeros((R, T), scaled_normalizer.dtype)  # (buckets, positions)
    # the bucket with the most tokens determines the number of iterations
    for k in range(tl.max(end - start)):
        used = start + k < end
        token = block * V + tl.load(ids + start + k, mask=used, other=0)
        logit = tl.load(logits + (token[:, None] * T + column), mask=used[:, None], other=-float('inf'))
        total += tl.exp2(logit * LOG2_E - scaled_normalizer)
    exists = (position < n)[:, None] & (bucket < B)
    place = (coordinate * n + position)[:, None] * B + bucket
    tl.store(gradient + place, total.T.to(gradient.dtype.element_ty), mask=exists)
