"""
The fast head: the twin of model.py's plain losses, for the Hash Decoder and for the Standard head (one coordinate, no
mixers).

Plain, the head would hold the H x B logits of every token of a batch and, for the exact loss, its V token logits.
Here it goes through the tokens in chunks and computes a chunk's gradients at once (LeanHead), so that nothing
outlives a chunk but dL/dh and dL/dE. Token logits are gathered from the bucket logits, and their gradient is summed
back by the table read backwards (Table). test_mhf.py holds both heads together in float64: losses and every gradient.

Everything is (B, n) or (V, n), a column a token: a bucket is a row of contiguous numbers, and gathering runs at
memory speed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Chunk sizes, with what decided them on 2 CPU cores; a GPU's were not measured.


def head_chunk(H, B):
    """Tokens whose H*B logits exist at a time; each chunk adds to all of dE, so not too few. H4B16K: 512, 0.28 GiB."""
    return max(64, min(1024, 2**25 // (H * B)))


def vocabulary_chunk(device_type):
    """Tokens whose V logits exist at a time. On a CPU, us a token by this number: 16: 154, 32: 42, 256: 131."""
    return 32 if device_type == 'cpu' else 512


def softmax_chunk(device_type, n):
    """Tokens of the product loss at a time: log_softmax of (16384, 512) by 64 14.6 ms, by 128 28.6."""
    return 64 if device_type == 'cpu' else n


def add_in_rows(total, part):
    """total += part, of lower precision, which += converts first: 1,024 rows stay in a cache (16.8 -> 2.5 ms)."""
    rows = 1024 if total.device.type == 'cpu' else len(total)
    for t, p in zip(total.split(rows), part.split(rows), strict=True):
        t += p


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(o):
    """Bucket logits (B, n) -> probabilities, in o's precision; float32 or better inside, also under autocast."""
    with torch.autocast(o.device.type, enabled=False):
        return o.softmax(dim=0)


def E_for_matmul(E):
    """E (H*B, d) -> a constant in the precision of autocast, so that chunks need not convert it again."""
    kind = E.device.type
    return E.detach().to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else E.dtype)


class Table(NamedTuple):
    """The signature table as the head reads it, forwards and backwards."""

    signatures: Tensor  # (V, H)
    is_token: Tensor  # (V,) bool
    rows: Tensor  # (V, H): signatures as rows of E, which has H*B
    gaps: Tensor  # ids that are no token
    ids: Tensor  # (tokens * H,): ids sorted by their rows of E
    begins: Tensor  # (H*B,): where each row of E begins in ids
    identity: bool  # the Standard model's: token w is bucket w


def read_table(signatures, is_token, B, identity):
    """signatures (V, H) int64, is_token (V,) bool, buckets a coordinate -> Table."""
    H, ids = signatures.shape[1], is_token.nonzero()[:, 0]
    rows = signatures + B * torch.arange(H, device=ids.device)
    by_row = rows[ids].T.flatten()
    ends = torch.bincount(by_row, minlength=H * B).cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    sorted_ids = ids.repeat(H)[by_row.argsort(stable=True)]
    return Table(signatures, is_token, rows, (~is_token).nonzero()[:, 0], sorted_ids, begins, identity)


def token_scores(oT, table):
    """Bucket logits oT (H*B, n) -> a new tensor of token logits sum_i o_i[s_i(w)], (V, n), -inf if it is none."""
    scores = oT.clone() if table.identity else F.embedding_bag(table.rows, oT, mode='sum')
    return scores.index_fill_(0, table.gaps, -torch.inf) if len(table.gaps) else scores


def exact_nll(o, y, table, gradient=False):
    """
    Bucket logits o, list of H (B, n); y (n, H) -> -log P(y) (n,), float32 or better, normalised over the vocabulary.
    With `gradient`, o is overwritten by d/do: of bucket b of coordinate i, the sum of P(w) over the tokens w with
    s_i(w) = b, minus 1 if b = y_i.
    """
    if table.identity:  # one coordinate, whose buckets are the tokens: the same without gathers
        return product_nll(o, y, table, gradient)
    nll, m = [], vocabulary_chunk(y.device.type)
    y = y + len(o[0]) * torch.arange(len(o), device=y.device)  # rows of E
    for k in range(0, len(y), m):
        block = slice(k, k + m)
        oT = torch.cat([at_least_float32(o_i[:, block]) for o_i in o])  # (H*B, m)
        scores, target = token_scores(oT, table), y[block].T  # (V, m), (H, m)
        top = scores.amax(0)
        P = scores.sub_(top).exp_()
        # P(w) = P / total: here the exact loss is normalised over the vocabulary (Standard: product_nll's log_softmax)
        total = P.sum(0)
        nll.append(total.log() + top - oT.gather(0, target).sum(0))
        if gradient:
            g = F.embedding_bag(table.ids, P, table.begins, mode='sum').div_(total)  # (H*B, m)
            g.scatter_add_(0, target, torch.full_like(oT[: len(target)], -1.0))
            for o_i, g_i in zip(o, g.chunk(len(o)), strict=True):
                o_i[:, block] = g_i
    return torch.cat(nll)


def product_nll(o, y, table, gradient=False):
    """
    As exact_nll, but the paper's loss sum_i -log p_i[y_i], whose gradient is p_i, minus 1 at y_i: never normalised over
    the vocabulary, unless its one coordinate is the vocabulary, as the Standard model's, without gaps.
    """
    nll, m = [], softmax_chunk(y.device.type, len(y))
    for k in range(0, len(y), m):
        block, total = slice(k, k + m), 0
        for o_i, y_i in zip(o, y[block].T, strict=True):
            scores, target = o_i[:, block], y_i[None]  # (B, m), (1, m)
            if table.identity:
                scores = scores.index_fill(0, table.gaps, -torch.inf)
            logp = at_least_float32(scores).log_softmax(0)
            total -= logp.gather(0, target)[0]
            if gradient:
                o_i[:, block] = logp.exp_().scatter_add_(0, target, torch.full_like(logp[:1], -1.0))
        nll.append(total)
    return torch.cat(nll)


class Mixed(NamedTuple):
    """What a mixer read and made, all (n, d), for its derivative, which is left to autograd: it is small."""

    c: Tensor
    e: Tensor
    next_c: Tensor


class LeanHead(torch.autograd.Function):
    """
    The sum of the loss over n tokens. The cascade and its derivative by hand; <,> is over d:

        forward   o_i = E_i c_i    p_i = softmax(o_i)    e_i = E_i^T p_i    c_{i+1} = c_i + mixer_i(c_i, e_i)
        backward  g_i = dL/do_i = (the loss's own gradient) + p_i * (E_i de_i - <e_i, de_i>)
                  dL/dE_i = g_i c_i^T + p_i de_i^T       dL/dc_i = E_i^T g_i + (by way of c_{i+1})

    Matrix products run in the precision of autocast; softmaxes, the one-hot term and the sums over coordinates and
    chunks in float32 or better. First derivatives only, and backward only once.
    """

    @staticmethod
    def forward(ctx, nll, decoder, table, chunk, h, y, E, *mixers):
        """
        nll: exact_nll or product_nll; decoder: the HashDecoder; table: Table; chunk: tokens; h (n, d), y (n, H), E
        (H*B, d), mixers: the decoder's parameters -> the sum, a scalar.
        """
        H, gradients = len(decoder) + 1, [torch.zeros_like(t) for t in (h, E, *mixers)]
        dh, dE, *dmixers = gradients
        E, dE = (t.unflatten(0, (H, -1)) for t in (E_for_matmul(E), dE))  # (H, B, d)
        loss = torch.zeros((), dtype=at_least_float32(h[:0]).dtype, device=h.device)
        for c, y_, dh_ in zip(*(t.split(chunk) for t in (h.detach(), y, dh)), strict=True):
            o, p, mixed = [], [], []
            for i in range(H):
                o.append(E[i] @ c.T.to(E.dtype))  # (B, n)
                if i < H - 1:
                    p.append(softmax(o[i]))
                    with torch.enable_grad():
                        c, e = c.detach().requires_grad_(), (p[i].T @ E[i]).to(c.dtype).requires_grad_()
                        mixed.append(Mixed(c, e, decoder.mix(i, c, e)))
                    c = mixed[i].next_c.detach()
            # o_i becomes the loss's own gradient
            loss += nll(o, y_, table, gradient=True).sum()
            dc = torch.zeros_like(c)
            for i in reversed(range(H)):
                g = o.pop()  # (B, n)
                if i < H - 1:  # o_i also acts through e_i and c_{i+1}
                    c, e, next_c = mixed.pop()
                    dc, de, *dmixer = torch.autograd.grad(next_c, [c, e, *decoder[i].parameters()], dc)
                    for total, part in zip(dmixers[i * len(dmixer) : (i + 1) * len(dmixer)], dmixer, strict=True):
                        total += part
                    inner = (e.detach() * de).sum(dim=1)  # (n,)
                    g.addcmul_(p[i], torch.addmm(-inner.to(E.dtype), E[i], de.T.to(E.dtype)))
                part = g @ c.detach().to(E.dtype)  # (B, d)
                add_in_rows(dE[i], part.addmm_(p.pop(), de.to(E.dtype)) if i < H - 1 else part)
                dc = dc + g.T @ E[i]
            dh_.copy_(dc)
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError('the lean head keeps its gradients for one backward pass only')
        dh, *rest = (g.mul_(scale) for g in gradients)
        return None, None, None, None, dh, None, *rest


def predictions(o, targets, table):
    """
    Bucket logits o, list of H (B, n); ids (n,) -> of each token: log P(id), is it the likeliest one, P(the
    likeliest), (3, n).
    """
    parts, m = [], vocabulary_chunk(targets.device.type)
    for k, t in zip(range(0, len(targets), m), targets.split(m), strict=True):
        scores = token_scores(at_least_float32(torch.cat([o_i[:, k : k + m] for o_i in o])), table)  # (V, m)
        target, (top, best) = scores.gather(0, t[None])[0], scores.max(0)
        total = scores.sub_(top).exp_().sum(0)
        parts.append(torch.stack([target - top - total.log(), best == t, 1 / total]))
    return torch.cat(parts, dim=1)
