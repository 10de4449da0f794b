"""
The exact loss's sums over the vocabulary as kernels for a GPU, in Triton. The operator fused.lookups calls them.
model.exact_loss is the same in plain PyTorch; without Triton, fused.py sums in columns.

    lay_out      bucket logits o_i (n, B)  ->  the same in blocks of tokens, where each bucket is a row
    normalise    sum_i o_i[s_i(w)] of every word w  ->  the token logits, their maximum and their logsumexp
    derive       the sum of P(w) over the words of each bucket, less 1 at the target  ->  dL/do_i, written over o_i

A word is an entry of the vocabulary here, and a token is a place in the batch.

A gather runs at the speed of memory only where the numbers that it reads lie side by side. In (n, B) the logits of one
bucket lie B numbers apart. In a block of 64 tokens they are a row of 64 numbers: normalise adds H rows to the token
logits of a word and keeps these as a row in float32, and derive gathers the rows of a bucket's words. All programs of a
block run before those of the next, so a block's rows stay in the L2 cache.

Nothing is summed by atomic adds, so the same input gives the same bits. Offsets into what grows with n are 64-bit.
Block sizes come from compiling for sm_90 and counting (tests/compile_kernels.py). No GPU has measured them yet;
`python -m study.kernels` names the fastest on one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# exp2 is one instruction of a GPU, exp is five
LOG2_OF_E = tl.constexpr(1.4426950408889634)


class Sizes(NamedTuple):
    """What one program works on, and its warps (32 threads each). All are powers of 2."""

    tokens: int = 64  # of a block
    words: int = 64  # of a program of normalise
    buckets: int = 16  # of a program of derive
    lay_out_warps: int = 4
    normalise_warps: int = 4
    derive_warps: int = 2


SIZES = Sizes()


def sum_over_vocabulary(o, y, rows, token_mask, inverse, sizes=SIZES):
    """
    o: bucket logits, H of (n, B), contiguous, float64, float32 or bfloat16; with `inverse` they are overwritten by the
    gradient of -log P(y).
    y (n, H) int64, the target's signature.
    rows (V, H) int32, the signatures as rows of E; token_mask (V,) bool.
    inverse: (ids, begins), int32, where the words of row r of E are ids[begins[r] : begins[r + 1]]; () for no gradient.

    Returns three (n,), float32 or better: the token logit of y, the largest token logit, and their logsumexp, so that
    log P(y) = token logit - logsumexp.
    """
    assert all(o_i.is_contiguous() for o_i in o)
    y = y.contiguous()
    accumulate = torch.promote_types(o[0].dtype, torch.float32)
    targets = zip(o, y.split(1, dim=1), strict=True)
    target = sum(o_i.gather(1, y_i).to(accumulate) for o_i, y_i in targets)
    # Triton launches on the current GPU, which need not be the one where the logits are
    with torch.cuda.device_of(o[0]):
        laid_out = lay_out(o, sizes)
        logits, largest, logsumexp = normalise(laid_out, rows, token_mask, bool(inverse), sizes)
        if inverse:
            derive(logits, logsumexp, y, inverse, o, sizes)
    n = len(y)
    return target[:, 0], largest[:n], logsumexp[:n]


def lay_out(o, sizes=SIZES):
    """Bucket logits, H of (n, B) -> the same as (blocks, H*B, tokens of a block); 0 beyond n."""
    H = len(o)
    n, B = o[0].shape
    blocks = triton.cdiv(n, sizes.tokens)
    laid_out = o[0].new_empty(blocks, H * B, sizes.tokens)
    grid = triton.cdiv(B, sizes.tokens), blocks
    lay_out_kernel[grid](tuple(o), laid_out, n, B, H, sizes.tokens, num_warps=sizes.lay_out_warps)
    return laid_out


def normalise(laid_out, rows, token_mask, keep, sizes=SIZES):
    """
    laid_out (blocks, H*B, T) of lay_out, rows and token_mask as above -> the token logits (blocks, V, T), or None unless
    `keep`; of every token the largest one, and their logsumexp, (blocks * T,). Logits are float32 or better; those of
    ids that are no token are left as they were in memory.
    """
    blocks, buckets, T = laid_out.shape
    V, H = rows.shape
    accumulate = torch.promote_types(laid_out.dtype, torch.float32)
    logits = laid_out.new_empty(blocks, V, T, dtype=accumulate) if keep else None
    tiles = triton.cdiv(V, sizes.words)
    largest = laid_out.new_empty(tiles, blocks * T, dtype=accumulate)
    logsumexp = torch.empty_like(largest)
    table = rows, token_mask
    results = logits, largest, logsumexp
    shape = H, T, sizes.words
    normalise_kernel[tiles, blocks](laid_out, table, results, V, buckets, shape, num_warps=sizes.normalise_warps)
    return logits, largest.amax(0), logsumexp.logsumexp(0)


def derive(logits, logsumexp, y, inverse, o, sizes=SIZES):
    """logits and logsumexp of normalise, y and inverse as above -> the gradient of -log P(y), over o, H of (n, B)."""
    H = len(o)
    n, B = o[0].shape
    blocks, V, T = logits.shape
    grid = triton.cdiv(B, sizes.buckets), H, blocks
    normalised = logits, logsumexp
    shape = H, T, sizes.buckets
    derive_kernel[grid](normalised, tuple(inverse), y, tuple(o), (n, V, B), shape, num_warps=sizes.derive_warps)


@triton.jit
def lay_out_kernel(o, laid_out, n, B, H: tl.constexpr, T: tl.constexpr):
    bucket = tl.program_id(0) * T + tl.arange(0, T)
    block = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, T)
    token = block * T + column
    exists = (token < n)[:, None] & (bucket < B)
    for i in tl.static_range(H):
        x = tl.load(o[i] + (token[:, None] * B + bucket), mask=exists, other=0)  # (tokens, buckets)
        row = (block * H + i) * B + bucket
        tl.store(laid_out + (row[:, None] * T + column), x.T, mask=(bucket < B)[:, None])


@triton.jit
def normalise_kernel(laid_out, table, results, V, buckets, shape: tl.constexpr):
    rows, token_mask = table
    logits, largest, logsumexp = results
    H: tl.constexpr = shape[0]
    T: tl.constexpr = shape[1]
    W: tl.constexpr = shape[2]  # words of this program
    word = tl.program_id(0) * W + tl.arange(0, W)
    block = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, T)
    real = tl.load(token_mask + word, mask=word < V, other=0) != 0
    logit = 0.0
    for i in tl.static_range(H):
        row = block * buckets + tl.load(rows + word * H + i, mask=real, other=0)
        # a word that is no token has a logit of -inf, and so no share of the sum
        x = tl.load(laid_out + (row[:, None] * T + column), mask=real[:, None], other=-float('inf'))
        x = x.to(logsumexp.dtype.element_ty)  # (words, tokens)
        logit = logit + x if i else x
    if logits is not None:
        tl.store(logits + ((block * V + word)[:, None] * T + column), logit, mask=real[:, None])
    # finite, also where none of the words is a token
    top = tl.maximum(tl.max(logit, 0), -1e30)
    total = tl.sum(tl.exp2((logit - top) * LOG2_OF_E), 0)
    place = (tl.program_id(0) * tl.num_programs(1) + block) * T + column
    tl.store(largest + place, top)
    tl.store(logsumexp + place, top + tl.log(total))


@triton.jit
def derive_kernel(normalised, inverse, y, gradient, counts, shape: tl.constexpr):
    logits, logsumexp = normalised
    ids, begins = inverse
    n, V, B = counts
    H: tl.constexpr = shape[0]
    T: tl.constexpr = shape[1]
    R: tl.constexpr = shape[2]  # buckets of this program
    bucket = tl.program_id(0) * R + tl.arange(0, R)
    coordinate = tl.program_id(1)
    block = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, T)
    token = block * T + column
    row = coordinate * B + bucket
    begin = tl.load(begins + row, mask=bucket < B, other=0)
    end = tl.load(begins + row + 1, mask=bucket < B, other=0)
    normaliser = tl.load(logsumexp + token) * LOG2_OF_E
    target = tl.load(y + (token * H + coordinate), mask=token < n, other=-1)
    total = -(bucket[:, None] == target).to(normaliser.dtype)  # (buckets, tokens)
    # as often as the longest of these buckets has words
    for k in range(tl.max(end - begin)):
        real = begin + k < end
        word = block * V + tl.load(ids + begin + k, mask=real, other=0)
        logit = tl.load(logits + (word[:, None] * T + column), mask=real[:, None], other=-float('inf'))
        total += tl.exp2(logit * LOG2_OF_E - normaliser)
    exists = (token < n)[:, None] & (bucket < B)
    for i in tl.static_range(H):
        if i == coordinate:
            place = token[:, None] * B + bucket
            tl.store(gradient[i] + place, total.T.to(gradient[i].dtype.element_ty), mask=exists)
