"""
The fast head: the twin of model.py's plain losses, for the Hash Decoder and for the Standard head (one coordinate, no
mixers).

Plain, the head would hold the H x B logits of every token of a batch and, for the exact loss, its V token logits.
Here it goes through the tokens in chunks and computes a chunk's gradients at once (LeanHead, chunk_gradients), so that
nothing outlives a chunk but dL/dh and dL/dE. Token logits are gathered from the bucket logits, and their gradient is
summed back. test_mhf.py holds both heads together in float64: losses and every gradient.

Everything is (n, B) or (n, V), a row a token, so that every softmax is over contiguous numbers: over columns, CUDA's
would run on one multiprocessor. Only the exact loss's sums over the vocabulary need a bucket to be a row, so that
gathering runs at memory speed. On a GPU they are the kernels of lookups.py, behind the operator `lookups`. On a CPU,
and on a GPU without Triton or a C compiler, a small block of tokens is laid in columns (token_scores, bucket_sums).
"""

import functools
import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# -----------------------------------------------------------------------------
# the form that suits the machine


def no_compiler(variable, *names):
    """'', if the compiler that an environment variable names, or else one of `names`, is there; or what is missing."""
    found = any(map(shutil.which, os.environ.get(variable, '').split()[:1] or names))
    return '' if found else f'no C compiler: install {" or ".join(names)}, or name one in ${variable}'


@functools.cache
def no_triton():
    """
    Why Triton cannot compile for this machine's GPU, or ''. torch.compile needs it there, and so do the kernels of
    lookups.py. Beside the package it takes a C compiler and Python's headers.
    """
    try:
        version = importlib.import_module('triton').__version__
    except ImportError:
        return 'no package triton: pip install triton, on Linux'
    if tuple(int(n) for n in version.split('.')[:2]) < (3, 6):
        return f'triton {version} is older than 3.6; use torch 2.11 or newer, which brings it'
    # where Triton looks, too; Ubuntu's default scheme names another folder, which is empty
    headers = Path(sysconfig.get_path('include', 'posix_prefix'))
    if not (headers / 'Python.h').exists():
        return f"no Python.h in {headers} (Debian's package python3-dev has it)"
    return no_compiler('CC', 'gcc', 'clang')


@functools.cache
def kernels_run_here():
    """Whether lookups.py's kernels run on this machine's GPU. Where they don't, says why, once."""
    reason = no_triton()
    if reason and os.environ.get('RANK', '0') == '0':
        print(f'log P is summed without the kernels of lookups.py, several times slower: {reason}', file=sys.stderr)
    return not reason


def head_bytes(H, B, V):
    """
    Bytes that the head takes for a token of a chunk, in bfloat16: the H*B bucket logits and their probabilities, and
    what the operator `lookups` allocates, the logits laid out again and V token logits in float32.
    """
    return 6 * H * B + 4 * V


def head_chunk(H, B, V, device, free=None):
    """
    Tokens whose H*B logits exist at a time. Each chunk adds to all of dE, so they should not be few. On a CPU with
    H4B16K 512, which take 0.28 GiB. On a GPU 4,096, or as many as fit into a sixteenth of what is `free`, in bytes.
    """
    if device.type != 'cuda':
        return max(64, min(1024, 2**25 // (H * B)))
    free = free or torch.cuda.mem_get_info(device)[0]
    fitting = int(free // (16 * head_bytes(H, B, V)))
    # rounded down to a power of 2
    return max(256, min(4096, 2 ** fitting.bit_length() // 2))


def column_chunk(table):
    """Tokens in columns at a time. On a CPU, us a token by this number: 16: 154, 32: 42, 256: 131."""
    return 32 if table.on_cpu else 512


def softmax_chunk(table, n):
    """Tokens of the product loss at a time, of n; on a CPU as many as its cache holds."""
    return 64 if table.on_cpu else n


# -----------------------------------------------------------------------------
# precision


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(o):
    """Bucket logits (n, B) -> probabilities, in o's precision; float32 or better inside, also under autocast."""
    with torch.autocast(o.device.type, enabled=False):
        return o.softmax(dim=-1)


def hardmax(o):
    """As softmax, with all of the probability at the likeliest bucket: an ablation, without a derivative."""
    return F.one_hot(o.argmax(dim=-1), o.shape[-1]).to(o.dtype)


def E_for_matmul(E):
    """E (H*B, d) -> a constant in the precision of autocast, so that chunks need not convert it again."""
    kind = E.device.type
    return E.detach().to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else E.dtype)


# -----------------------------------------------------------------------------
# the signature table


class Table(NamedTuple):
    """The signature table as the head reads it, forwards and backwards."""

    signatures: Tensor  # (H, V), a row a coordinate
    is_token: Tensor  # (V,) bool
    rows: Tensor  # (V, H) int32: signatures as rows of E, which has H*B
    gaps: Tensor  # ids that are no token
    ids: Tensor  # (tokens * H,) int32: ids sorted by their rows of E
    begins: Tensor  # (H*B + 1,) int32: the ids of row r of E are ids[begins[r] : begins[r + 1]]
    identity: bool  # the Standard model's: token w is bucket w
    kernels: bool  # the sums over the vocabulary are lookups.py's; otherwise they are made in columns
    on_cpu: bool  # whose cache the smaller chunks must fit
    chunk: int  # tokens of the head at a time


def read_table(signatures, is_token, B, identity, device_type, kernels):
    """
    signatures (V, H) int64, is_token (V,) bool, buckets a coordinate; the device to be fast on, and whether with the
    kernels of lookups.py -> Table.
    """
    V, H = signatures.shape
    ids = is_token.nonzero()[:, 0]
    rows = signatures + B * torch.arange(H, device=ids.device)
    by_row = rows[ids].T.flatten()
    ends = torch.bincount(by_row, minlength=H * B).cumsum(0)
    sorted_ids = ids.repeat(H)[by_row.argsort(stable=True)]
    return Table(
        signatures=signatures.T.contiguous(),
        is_token=is_token,
        rows=rows.int(),
        gaps=(~is_token).nonzero()[:, 0],
        ids=sorted_ids.int(),
        begins=torch.cat([ends.new_zeros(1), ends]).int(),
        identity=identity,
        kernels=kernels and not identity,
        on_cpu=device_type == 'cpu',
        chunk=head_chunk(H, B, V, signatures.device),
    )


# -----------------------------------------------------------------------------
# the sums over the vocabulary, by kernels


@torch.library.custom_op('mhf::lookups', mutates_args=('o',))
def lookups(
    o: list[Tensor], y: Tensor, rows: Tensor, is_token: Tensor, inverse: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Bucket logits o, list of H (n, B), contiguous; y (n, H); of the Table rows, is_token, and as `inverse` ids and
    begins, or nothing -> of each token the token logit of y, the largest token logit and their logsumexp, three (n,),
    float32 or better. With `inverse`, o is overwritten by the gradient of -log P(y).

    An operator of its own, because torch.compile must not look into it, and tensors without memory have to pass. The
    token logit of y is gathered here and not by the caller: torch.compile could move that gather behind the operator,
    for which it would have to copy all of o.
    """
    # the kernels need Triton, which only those who call them need to have
    return importlib.import_module('lookups').sum_over_vocabulary(o, y, rows, is_token, inverse)


@lookups.register_fake
def _(o, y, rows, is_token, inverse):
    dtype = torch.promote_types(o[0].dtype, torch.float32)
    return tuple(o[0].new_empty(len(y), dtype=dtype) for _ in range(3))


# -----------------------------------------------------------------------------
# the same in columns


def to_columns(x):
    """(m, k) -> (k, m), contiguous. On a CPU by a product with the identity: exact, and faster than a copy."""
    return x.T @ torch.eye(len(x), dtype=x.dtype) if x.device.type == 'cpu' else x.T.contiguous()


def to_rows(columns):
    """(k, m) -> (m, k), contiguous, likewise."""
    m = columns.shape[1]
    return torch.eye(m, dtype=columns.dtype) @ columns.T if columns.device.type == 'cpu' else columns.T.contiguous()


def token_scores(o, table):
    """Bucket logits, list of H (m, B) -> a new tensor of token logits sum_i o_i[s_i(w)], (m, V), -inf if it is none."""
    if table.identity:
        scores = at_least_float32(o[0]).clone()
    else:
        columns = to_columns(torch.cat(o, dim=1))
        scores = F.embedding_bag(table.rows, at_least_float32(columns), mode='sum').T
    return scores.index_fill_(1, table.gaps, -torch.inf) if len(table.gaps) else scores


def normalise(scores):
    """Token logits (m, V), which are overwritten -> P (m, V), and their logsumexp (m, 1)."""
    # in place, so that it stays in a cache
    top = scores.amax(-1, keepdim=True)
    P = scores.sub_(top).exp_()
    total = P.sum(-1, keepdim=True)
    return P.div_(total), top + total.log()


def bucket_sums(P, table):
    """P of tokens (m, V) -> (m, H*B): of each bucket b of coordinate i, the sum of P(w) over w with s_i(w) = b."""
    columns = P.T.contiguous()
    return F.embedding_bag(table.ids, columns, table.begins, mode='sum', include_last_offset=True).T


# -----------------------------------------------------------------------------
# the losses, and what they say of a token


def exact_nll(o, y, table, gradient=False):
    """
    Bucket logits o, list of H (n, B); y (n, H) -> -log P(y) (n,), float32 or better, normalised over the vocabulary.
    With `gradient`, o is overwritten by d/do: of bucket b of coordinate i, the sum of P(w) over the tokens w with
    s_i(w) = b, minus 1 if b = y_i.
    """
    if table.identity:  # one coordinate, whose buckets are the tokens: the same without gathers
        return product_nll(o, y, table, gradient)
    # here the exact loss is normalised over the vocabulary (Standard: product_nll's log_softmax)
    if table.kernels:
        inverse = [table.ids, table.begins] if gradient else []
        target, _, logsumexp = lookups(o, y, table.rows, table.is_token, inverse)
        return logsumexp - target
    nll, m = [], column_chunk(table)
    for k in range(0, len(y), m):
        nll.append(exact_nll_in_columns([o_i[k : k + m] for o_i in o], y[k : k + m], table, gradient))
    return torch.cat(nll)


def exact_nll_in_columns(o, y, table, gradient):
    """As exact_nll, for few tokens."""
    H, B = len(o), o[0].shape[1]
    target = sum(at_least_float32(o_i.gather(1, y_i)) for o_i, y_i in zip(o, y.split(1, dim=1), strict=True))
    P, logsumexp = normalise(token_scores(o, table))
    if gradient:
        rows = y + B * torch.arange(H, device=y.device)
        g = bucket_sums(P, table).scatter_add_(1, rows, -torch.ones_like(target).expand(-1, H))  # (m, H*B)
        g = to_rows(g.T.to(o[0].dtype))
        for o_i, g_i in zip(o, g.split(B, dim=1), strict=True):
            o_i.copy_(g_i)
    return (logsumexp - target)[:, 0]


def product_nll(o, y, table, gradient=False):
    """
    As exact_nll, but the paper's loss sum_i -log p_i[y_i], whose gradient is p_i, minus 1 at y_i: never normalised over
    the vocabulary, unless its one coordinate is the vocabulary, as the Standard model's, without gaps.
    """
    nll, m = [], softmax_chunk(table, len(y))
    for k in range(0, len(y), m):
        total = 0
        for o_i, y_i in zip(o, y[k : k + m].split(1, dim=1), strict=True):
            block = o_i[k : k + m]
            scores = block.index_fill(1, table.gaps, -torch.inf) if table.identity and len(table.gaps) else block
            logp = scores.log_softmax(-1, dtype=torch.promote_types(block.dtype, torch.float32))
            target = logp.gather(1, y_i)
            total -= target[:, 0]
            if gradient:
                block.copy_(logp.exp_().scatter_add_(1, y_i, torch.full_like(target, -1.0)))
        nll.append(total)
    return torch.cat(nll)


def predictions(o, targets, table):
    """
    Bucket logits o, list of H (n, B); ids (n,) -> of each token: log P(id), is it the likeliest one (1 or 0), and P(the
    likeliest), (3, n). Of several equally likely ones the first counts as the likeliest, with kernels each of them.
    """
    if table.kernels:
        target, largest, logsumexp = lookups(o, table.signatures[:, targets].T, table.rows, table.is_token, [])
        return torch.stack([target - logsumexp, target == largest, (largest - logsumexp).exp()])
    parts, m = [], column_chunk(table)
    for k, t in zip(range(0, len(targets), m), targets.split(m), strict=True):
        scores = token_scores([o_i[k : k + m] for o_i in o], table)  # (m, V)
        target, (top, best) = scores.gather(1, t[:, None])[:, 0], scores.max(-1)
        total = scores.sub_(top[:, None]).exp_().sum(-1)
        parts.append(torch.stack([target - top - total.log(), best == t, 1 / total]))
    return torch.cat(parts, dim=1)


# -----------------------------------------------------------------------------
# a chunk and its gradients; the loop over chunks


class Mixed(NamedTuple):
    """What a mixer read and made, for its derivative."""

    x: Tensor  # (n, 2d), [c ; e]
    a: Tensor  # (n, z), before the SiLU
    s: Tensor  # (n, z), after it


def chunk_gradients(nll, softmax, h, y, E, mixers, table):
    """
    The loss of a chunk and its derivatives, in plain operations on new tensors: torch.compile makes one graph of it.

        forward   o_i = E_i c_i    p_i = softmax(o_i)    e_i = E_i^T p_i    c_{i+1} = c_i + mixer_i(c_i, e_i)
        backward  g_i = dL/do_i = (the loss's own gradient) + p_i * (E_i de_i - <e_i, de_i>)
                  dL/dE_i = g_i c_i^T + p_i de_i^T       dL/dc_i = E_i^T g_i + (by way of c_{i+1})

    nll: exact_nll or product_nll; softmax, or hardmax; h (n, d), y (n, H); E (H, B, d) and the mixers' (Wdn, bdn, Wup,
    bup), H - 1 or none, in the matrix products' precision -> the sum, a scalar; dL/dh (n, d); of each coordinate the
    pairs (a, b) of dL/dE_i = sum of a^T b; of each mixer the four derivatives. <,> is over d.
    """
    H, d, precision = len(E), h.shape[1], E.dtype
    c, o, p, read, mixed = h, [], [], [], []
    for i in range(H):
        read.append(c.to(precision))
        o.append(read[i] @ E[i].T)  # (n, B)
        if i < len(mixers):
            down, down_bias, up, up_bias = mixers[i]
            p.append(softmax(o[i]))
            x = torch.cat([read[i], p[i] @ E[i]], dim=1)  # (n, 2d)
            a = F.linear(x, down, down_bias)
            mixed.append(Mixed(x, a, F.silu(a)))
            c = c + F.linear(mixed[i].s, up, up_bias)
    # o_i becomes the loss's own gradient
    loss = nll(o, y, table, gradient=True).sum()
    dc, dE, dmixers = torch.zeros_like(c), [], []
    for i in reversed(range(H)):
        g, pairs = o[i], []  # (n, B)
        if i < len(mixers):  # o_i also acts through e_i and c_{i+1}
            (down, _, up, _), (x, a, s), dy = mixers[i], mixed[i], dc.to(precision)
            sigmoid = at_least_float32(a).sigmoid()
            da = at_least_float32(dy @ up) * sigmoid * (1 + a * (1 - sigmoid))  # (n, z)
            # a product with ones: a sum over rows
            ones, low = torch.ones_like(dc[:, 0]), da.to(precision)
            dmixers.append((low.T @ x, ones @ da, dy.T @ s, ones @ dc))
            through_c, de = (low @ down).split(d, dim=1)
            dc = dc + through_c
            inner = (at_least_float32(x[:, d:]) * de).sum(dim=1, keepdim=True)  # (n, 1)
            g = g.addcmul_(p[i], torch.addmm(-inner.to(precision), de, E[i].T))
            pairs = [(p[i], de)]
        dc = dc + g @ E[i]
        dE.append([(g, read[i]), *pairs])
    return loss, dc, dE[::-1], dmixers[::-1]


def add_products(total, pairs):
    """total (B, d) += the sum of a^T b over pairs (n, B), (n, d), perhaps of lower precision."""
    if pairs[0][0].dtype == total.dtype:
        for a, b in pairs:
            total.addmm_(a.T, b)
    elif total.device.type == 'cuda':
        for a, b in pairs:
            torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        (a, b), *more = pairs
        part = a.T @ b
        for a, b in more:
            part.addmm_(a.T, b)
        # += converts first: 1,024 rows stay in a cache (16.8 -> 2.5 ms)
        for t, rows in zip(total.split(1024), part.split(1024), strict=True):
            t += rows


class LeanHead(torch.autograd.Function):
    """
    The sum of the loss over n tokens, chunk by chunk, and its derivatives with it. Matrix products run in the precision
    of autocast; softmaxes, the one-hot term and the sums over coordinates and chunks in float32 or better. First
    derivatives only, and backward only once.
    """

    @staticmethod
    def forward(ctx, gradients_of, nll, softmax, table, chunk, h, y, E, *mixers):
        """
        gradients_of: chunk_gradients, perhaps compiled; nll, softmax: as there; table: Table; chunk: tokens; h (n, d),
        y (n, H), E (H*B, d), mixers: the decoder's parameters -> the sum, a scalar.
        """
        dh, dE, *dmixers = gradients = [torch.zeros_like(t) for t in (h, E, *mixers)]
        H, (E, *mixers) = y.shape[1], [E_for_matmul(t) for t in (E, *mixers)]
        E, dE = (t.unflatten(0, (H, -1)) for t in (E, dE))  # (H, B, d)
        mixers = [mixers[i : i + 4] for i in range(0, len(mixers), 4)]
        loss = torch.zeros((), dtype=at_least_float32(h[:0]).dtype, device=h.device)
        with torch.autocast(h.device.type, enabled=False):
            # chunks of one size, where that is possible: one graph, if it is compiled
            for h_, y_, dh_ in zip(*(t.chunk(-(-len(h) // chunk)) for t in (h.detach(), y, dh)), strict=True):
                part, dc, dE_, dmixers_ = gradients_of(nll, softmax, h_, y_, E, mixers, table)
                loss += part
                dh_.copy_(dc)
                for total, pairs in zip(dE, dE_, strict=True):
                    add_products(total, pairs)
                for total, part in zip(dmixers, (t for four in dmixers_ for t in four), strict=True):
                    total += part
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError('the lean head keeps its gradients for one backward pass only')
        dh, *rest = (g.mul_(scale) for g in gradients)
        return None, None, None, None, None, dh, None, *rest
