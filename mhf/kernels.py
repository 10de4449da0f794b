"""
The token logits and their adjoint as Triton kernels, for mhf/head.py.

    transpose_kernel   copies the bucket logits o_i (n, B) into blocks of positions, with one row per bucket
    sum_kernel         computes the token logits sum_i o_i[s_i(w)] of every token id w
    adjoint_kernel     computes for each bucket the sum of a gradient over its tokens

Gathers are fast if they read contiguous memory. In (n, B) the logits of one bucket are B elements apart. In a block of
64 positions they are one row of 64. sum_kernel adds H rows to get the token logits of an id. adjoint_kernel gathers the
rows of a bucket's tokens from the transposed gradient. The programs of a block run before those of the next block, so
the rows of a block stay in the L2 cache.

The kernels use no atomic adds, so equal inputs produce equal bits. Offsets into tensors that grow with n are 64-bit.
The sizes are the fastest of those tried on an H200 (study/LOG.md).
"""

import torch
import triton
import triton.language as tl

# elements per program, and warps (32 threads) per program: powers of two
POSITIONS = 64  # per block, of all kernels
SUM_TOKENS = 64
ADJOINT_BUCKETS = 16
TRANSPOSE_WARPS = 4
SUM_WARPS = 4
ADJOINT_WARPS = 2


def token_logits(o, rows):
    """Bucket logits o, H of (n, B), contiguous, and rows (V, H) int32 -> (n, V), float32 or better."""
    n, B = o[0].shape
    V, H = rows.shape
    logits = o[0].new_empty(n, V, dtype=torch.promote_types(o[0].dtype, torch.float32))
    # Triton launches on the current GPU, so make the logits' GPU the current one
    with torch.cuda.device_of(o[0]):
        transposed = transpose(o)  # (blocks, H*B, positions per block)
        grid = (triton.cdiv(V, SUM_TOKENS), len(transposed))
        constants = (H, POSITIONS, SUM_TOKENS)
        sum_kernel[grid](transposed, rows, logits, n, V, H * B, *constants, num_warps=SUM_WARPS)
    return logits


def bucket_gradients(gradient, ids, offsets, H, dtype):
    """
    The adjoint of token_logits: gradient (n, V), contiguous -> the gradients of the bucket logits (H, n, B), of this
    dtype. ids and offsets are those of head.invert.
    """
    n, V = gradient.shape
    B = (len(offsets) - 1) // H
    result = gradient.new_empty(H, n, B, dtype=dtype)
    with torch.cuda.device_of(gradient):
        transposed = transpose([gradient])  # (blocks, V, positions per block)
        grid = (triton.cdiv(B, ADJOINT_BUCKETS), H, len(transposed))
        constants = (POSITIONS, ADJOINT_BUCKETS)
        adjoint_kernel[grid](transposed, ids, offsets, result, n, V, B, *constants, num_warps=ADJOINT_WARPS)
    return result


def transpose(o):
    """H tensors (n, B) -> (blocks, H*B, positions per block), 0 for positions from n on."""
    H = len(o)
    n, B = o[0].shape
    blocks = triton.cdiv(n, POSITIONS)
    transposed = o[0].new_empty(blocks, H * B, POSITIONS)
    grid = (triton.cdiv(B, POSITIONS), blocks)
    transpose_kernel[grid](tuple(o), transposed, n, B, H, POSITIONS, num_warps=TRANSPOSE_WARPS)
    return transposed


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
def sum_kernel(transposed, rows, logits, n, V, num_rows, H: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    token = tl.program_id(0) * W + tl.arange(0, W)
    block = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, T)
    position = block * T + column
    logit = tl.zeros((W, T), logits.dtype.element_ty)  # (tokens, positions)
    for i in tl.static_range(H):
        row = block * num_rows + tl.load(rows + token * H + i, mask=token < V, other=0)
        logit += tl.load(transposed + (row[:, None] * T + column)).to(logit.dtype)
    exists = (position < n)[:, None] & (token < V)
    tl.store(logits + (position[:, None] * V + token), logit.T, mask=exists)


@triton.jit
def adjoint_kernel(transposed, ids, offsets, result, n, V, B, T: tl.constexpr, R: tl.constexpr):
    bucket = tl.program_id(0) * R + tl.arange(0, R)
    i = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, T)
    position = block * T + column
    row = i * B + bucket
    first = tl.load(offsets + row, mask=bucket < B, other=0)
    end = tl.load(offsets + row + 1, mask=bucket < B, other=0)
    total = tl.zeros((R, T), transposed.dtype.element_ty)  # (buckets, positions)
    # the bucket with the most tokens determines the number of iterations
    for k in range(tl.max(end - first)):
        used = first + k < end
        token = block * V + tl.load(ids + first + k, mask=used, other=0)
        total += tl.load(transposed + (token[:, None] * T + column), mask=used[:, None], other=0)
    exists = (position < n)[:, None] & (bucket < B)
    place = (i * n + position)[:, None] * B + bucket
    tl.store(result + place, total.T.to(result.dtype.element_ty), mask=exists)
