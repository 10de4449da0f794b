"""
FusedMHF: model.MHF with a head that is fast and small. It computes the same numbers.

The plain head holds the H x B bucket logits of every token of a batch, and for the exact loss its V token logits. Here
the head goes through the tokens in chunks and computes the gradients of a chunk at once (FusedHead, chunk_gradients), so
nothing outlives a chunk but dL/dh and dL/dE. Token logits are gathered from the bucket logits, and their gradient is
summed back. test_mhf.py holds both heads together in float64: losses and every gradient.

Every tensor is (n, B) or (n, V), a row a token, so that a softmax runs over contiguous numbers: over columns CUDA's
softmax would run on one multiprocessor. Only the exact loss's sums over the vocabulary want a bucket to be a row, so
that gathering runs at the speed of memory. On a GPU the kernels of kernels.py make these sums, behind the operator
`lookups`. On a CPU, and on a GPU without Triton or a C compiler, a few tokens at a time are laid in columns.
"""

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mhf.device import no_triton
from model import MHF, token_logits, upcast

# -----------------------------------------------------------------------------
# how many tokens at a time


class Tiles(NamedTuple):
    """How many tokens the head works on together. That suits the device and changes no number."""

    chunk: int  # tokens whose bucket logits exist, and whose gradients are made together
    block: int  # of a chunk, the tokens whose cross-entropies are made together
    columns: int  # of a chunk, the tokens whose token logits are laid in columns
    kernels: bool  # the kernels of kernels.py sum over the vocabulary, and nothing is laid in columns


@functools.cache
def tiles_for(device, H, B, V):
    """The Tiles for a device and a head. A GPU's chunk depends on the memory that is free when this is first called."""
    if device.type == 'cuda':
        chunk = gpu_chunk(H, B, V, free=torch.cuda.mem_get_info(device)[0])
        return Tiles(chunk, block=chunk, columns=512, kernels=kernels_run_here())
    # as many as a CPU's cache holds: with 16, 32 and 256 columns a token takes 154, 42 and 131 us
    return Tiles(cpu_chunk(H, B), block=64, columns=32, kernels=False)


def cpu_chunk(H, B):
    """Tokens of a chunk on a CPU: 512 with H4B16K, which take 0.28 GiB. Each adds to all of dE, so they are large."""
    return max(64, min(1024, 2**25 // (H * B)))


def gpu_chunk(H, B, V, free):
    """Tokens of a chunk on a GPU: 4,096, or as many as a sixteenth of the `free` bytes holds, a power of 2."""
    fitting = int(free // (16 * bytes_per_token(H, B, V)))
    return max(256, min(4096, 2 ** fitting.bit_length() // 2))


def bytes_per_token(H, B, V):
    """
    Bytes that the head takes for a token of a chunk, in bfloat16: the H*B bucket logits and their probabilities, and
    what the operator `lookups` allocates, the logits laid out again and V token logits in float32.
    """
    return 6 * H * B + 4 * V


@functools.cache
def kernels_run_here():
    """Whether the kernels of kernels.py run on this machine's GPU. If they don't, the first process says why, once."""
    reason = no_triton()
    if reason and os.environ.get('RANK', '0') == '0':
        print(f'log P is summed without the kernels of kernels.py, several times slower: {reason}', file=sys.stderr)
    return not reason


# -----------------------------------------------------------------------------
# the signature table


class Table(NamedTuple):
    """The signature table as the head reads it, forwards and backwards."""

    signatures: Tensor  # (V, H) int64
    token_mask: Tensor  # (V,) bool
    rows: Tensor  # (V, H) int32: signatures as rows of E, which has H*B
    unused_ids: Tensor  # ids that are no token, int64
    ids: Tensor  # (tokens * H,) int32: ids sorted by their rows of E
    begins: Tensor  # (H*B + 1,) int32: the ids of row r of E are ids[begins[r] : begins[r + 1]]
    standard: bool  # the Standard model's table: token w is bucket w


def invert_table(signatures, token_mask, B):
    """Signatures (V, H) int64, token_mask (V,) bool, B buckets a coordinate -> {name: array} of Table's other tensors."""
    H = signatures.shape[1]
    ids = np.flatnonzero(token_mask)
    rows = signatures + B * np.arange(H)
    row_of_each = rows[ids].T.ravel()
    ends = np.bincount(row_of_each, minlength=H * B).cumsum()
    sorted_ids = np.tile(ids, H)[row_of_each.argsort(kind='stable')]
    return dict(
        rows=rows.astype(np.int32),
        unused_ids=np.flatnonzero(~token_mask),
        ids=sorted_ids.astype(np.int32),
        begins=np.concatenate([[0], ends]).astype(np.int32),
    )


# -----------------------------------------------------------------------------
# the model


class FusedMHF(MHF):
    """
    MHF with a head that holds no (n, H*B) or (n, V) tensor of the whole batch. Same parameters, same names, same
    numbers, and the same errors.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        self.tiles = None  # Tiles; None takes those that suit the device
        self.chunk_gradients = chunk_gradients  # or the same compiled

    def set_vocabulary(self, signatures, token_mask):
        super().set_vocabulary(signatures, token_mask)
        for name, array in invert_table(signatures, token_mask, self.config.buckets_per_coordinate).items():
            tensor = torch.tensor(array, device=self.signatures.device)
            self.register_buffer(f'table_{name}', tensor, persistent=False)

    def table(self):
        """The Table of the vocabulary, on the model's device."""
        backwards = self.table_rows, self.table_unused_ids, self.table_ids, self.table_begins
        return Table(self.signatures, self.token_mask, *backwards, standard=self.config.num_hashes == 0)

    def tiles_here(self):
        """The Tiles that were set, or else those that suit the device."""
        c = self.config
        return self.tiles or tiles_for(
            self.embed.weight.device, c.num_coordinates, c.buckets_per_coordinate, c.vocab_size
        )

    def compile(self, **options):
        """
        nn.Module.compile of the body. Of the head it compiles what happens to a chunk, where a chunk is not cut into
        the small blocks of a CPU: these would compile for minutes and gain nothing. The loop over chunks stays eager.
        """
        self.head_loss = torch.compiler.disable(self.head_loss)
        # not tiles_here(): it measures the free memory, which is to happen in a forward pass, beside its activations
        if self.tiles:
            small_blocks = self.tiles.block < self.tiles.chunk
        else:
            small_blocks = self.embed.weight.device.type == 'cpu'
        if not small_blocks:
            self.chunk_gradients = torch.compile(chunk_gradients, fullgraph=True, **options)
        super().compile(**options)

    def nll(self, loss):
        """The function that computes the loss called 'exact' or 'product'."""
        # Standard's one coordinate is its vocabulary, so both are its cross-entropy
        return exact_nll if loss == 'exact' and self.config.num_hashes else cross_entropies

    def head_loss(self, h, y):
        nll = self.nll(self.config.loss)
        softmax = hard_softmax if self.hash_decoder.hard else soft_softmax
        head = Head(nll, softmax, self.table(), self.tiles_here())
        if torch.is_grad_enabled():
            mixers = self.hash_decoder.parameters()
            return FusedHead.apply(self.chunk_gradients, head, h, y, self.head_weight, *mixers)
        return sum(nll(o, y_, head.table, head.tiles).sum() for o, y_ in self.logits_by_chunk(h, y))

    def logits_by_chunk(self, h, y):
        """h (n, d), y (n, ...) -> chunk by chunk: bucket logits, H of (chunk, B), and the chunk of y; no gradients."""
        E = for_matmul(self.head_weight)
        chunk = self.tiles_here().chunk
        for h_, y_ in zip(h.split(chunk), y.split(chunk), strict=True):
            yield self.hash_decoder(h_, E), y_

    @torch.no_grad()
    def token_losses(self, x, y):
        # Standard's two losses are one
        names = ('product', 'exact') if self.config.num_hashes else ('exact',)
        losses = [self.nll(name) for name in names]
        table = self.table()
        tiles = self.tiles_here()
        of_chunks = []
        for o, y_ in self.logits_by_chunk(self.hidden_states(x).flatten(0, 1), y.flatten(0, 1)):
            of_chunks.append(torch.stack([nll(o, y_, table, tiles) for nll in losses]))
        return torch.cat(of_chunks, dim=1).expand(2, -1).unflatten(1, x.shape[:2]).unbind(0)

    @torch.no_grad()
    def predict(self, h, targets):
        """h (n, d), ids (n,) -> log P(id) in nats, is it the likeliest token (1 or 0), P(the likeliest): three (n,)."""
        table = self.table()
        tiles = self.tiles_here()
        of_chunks = [predictions(o, ids, table, tiles) for o, ids in self.logits_by_chunk(h, targets)]
        return torch.cat(of_chunks, dim=1).unbind(0)

    @torch.no_grad()
    def next_token_logits(self, h):
        o = self.hash_decoder(h, for_matmul(self.head_weight))
        if self.config.num_hashes:
            return token_logits(o, self.signatures, self.token_mask)
        return mask_unused(upcast(o[0]), self.table_unused_ids)


# -----------------------------------------------------------------------------
# precision


def soft_softmax(o):
    """Bucket logits (n, B) -> probabilities, in o's precision; float32 or better inside, also under autocast."""
    with torch.autocast(o.device.type, enabled=False):
        return o.softmax(dim=-1)


def hard_softmax(o):
    """The ablation hard_embeddings: all of the probability at the likeliest bucket, without a derivative."""
    return F.one_hot(o.argmax(dim=-1), o.shape[-1]).to(o.dtype)


def for_matmul(parameter):
    """A parameter as a constant in the precision of autocast, so that chunks need not convert it again."""
    device_type = parameter.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else parameter.dtype
    return parameter.detach().to(dtype)


# -----------------------------------------------------------------------------
# the sums over the vocabulary, by kernels


@torch.library.custom_op('mhf::lookups', mutates_args=('o',))
def lookups(
    o: list[Tensor], y: Tensor, rows: Tensor, token_mask: Tensor, inverse: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Bucket logits o, list of H (n, B), contiguous; y (n, H); of the Table rows, token_mask, and as `inverse` ids and
    begins, or nothing -> of each token the token logit of y, the largest token logit and their logsumexp, three (n,),
    float32 or better. With `inverse`, o is overwritten by the gradient of -log P(y).

    An operator of its own, because torch.compile must not look into it, and tensors without memory have to pass. The
    token logit of y is gathered here and not by the caller: torch.compile could move that gather behind the operator,
    for which it would have to copy all of o.
    """
    # the kernels need Triton: only who calls them needs to have it
    return importlib.import_module('mhf.kernels').sum_over_vocabulary(o, y, rows, token_mask, inverse)


@lookups.register_fake
def _(o, y, rows, token_mask, inverse):
    dtype = torch.promote_types(o[0].dtype, torch.float32)
    return tuple(o[0].new_empty(len(y), dtype=dtype) for _ in range(3))


# -----------------------------------------------------------------------------
# the sums over the vocabulary, in columns


def to_columns(x):
    """(m, k) -> (k, m), contiguous."""
    if x.device.type == 'cpu':
        # a product with the identity is exact, and faster than a copy
        return x.T @ torch.eye(len(x), dtype=x.dtype)
    return x.T.contiguous()


def to_rows(columns):
    """(k, m) -> (m, k), contiguous."""
    if columns.device.type == 'cpu':
        return torch.eye(columns.shape[1], dtype=columns.dtype) @ columns.T
    return columns.T.contiguous()


def mask_unused(scores, unused_ids):
    """Token logits (m, V) -> the same, with -inf for the ids `unused_ids`, which are no token."""
    return scores.index_fill(1, unused_ids, -torch.inf) if len(unused_ids) else scores


def token_scores(o, table):
    """Bucket logits, list of H (m, B) -> a new tensor of token logits sum_i o_i[s_i(w)], (m, V), -inf if it is none."""
    if table.standard:
        scores = upcast(o[0]).clone()
    else:
        columns = to_columns(torch.cat(o, dim=1))
        scores = F.embedding_bag(table.rows, upcast(columns), mode='sum').T
    return mask_unused(scores, table.unused_ids)


def probabilities(scores):
    """Token logits (m, V), which are overwritten -> P (m, V), and their logsumexp (m, 1)."""
    # in place, so that it stays in a cache
    top = scores.amax(-1, keepdim=True)
    P = scores.sub_(top).exp_()
    total = P.sum(-1, keepdim=True)
    # here exact_nll_in_columns normalises P over the vocabulary
    return P.div_(total), top + total.log()


def bucket_sums(P, table):
    """P of tokens (m, V) -> (m, H*B): of each bucket b of coordinate i, the sum of P(w) over w with s_i(w) = b."""
    columns = P.T.contiguous()
    return F.embedding_bag(table.ids, columns, table.begins, mode='sum', include_last_offset=True).T


def exact_nll_in_columns(o, y, table, gradient):
    """exact_nll of a few tokens."""
    H = len(o)
    B = o[0].shape[1]
    target = sum(upcast(o_i.gather(1, y_i)) for o_i, y_i in zip(o, y.split(1, dim=1), strict=True))
    P, logsumexp = probabilities(token_scores(o, table))
    if gradient:
        rows = y + B * torch.arange(H, device=y.device)
        minus_one = -torch.ones_like(target).expand(-1, H)
        g = bucket_sums(P, table).scatter_add_(1, rows, minus_one)  # (m, H*B)
        g = to_rows(g.T.to(o[0].dtype))
        for o_i, g_i in zip(o, g.split(B, dim=1), strict=True):
            o_i.copy_(g_i)
    return (logsumexp - target)[:, 0]


# -----------------------------------------------------------------------------
# the losses, and what they say of a token


def exact_nll(o, y, table, tiles, gradient=False):
    """
    The exact loss of a MultiHashFormer: bucket logits o, list of H (n, B); y (n, H) -> -log P(y) (n,), float32 or
    better. With `gradient`, o is overwritten by the gradient: for bucket b of coordinate i the sum of P(w) over the
    tokens w with s_i(w) = b, minus 1 if b = y_i.
    """
    if tiles.kernels:
        inverse = [table.ids, table.begins] if gradient else []
        target, _, logsumexp = lookups(o, y, table.rows, table.token_mask, inverse)
        # the logsumexp normalises P over the vocabulary
        return logsumexp - target
    nll = []
    for begin in range(0, len(y), tiles.columns):
        some = slice(begin, begin + tiles.columns)
        nll.append(exact_nll_in_columns([o_i[some] for o_i in o], y[some], table, gradient))
    return torch.cat(nll)


def cross_entropies(o, y, table, tiles, gradient=False):
    """
    The paper's loss, the sum of the coordinates' cross-entropies: o and y as above -> sum_i -log p_i[y_i] (n,), float32
    or better. With `gradient`, o_i is overwritten by p_i, minus 1 at y_i. For the Standard model, whose one coordinate
    is its vocabulary, this is -log P(y): the log_softmax normalises P over the vocabulary, without the unused_ids.
    """
    nll = []
    for begin in range(0, len(y), tiles.block):
        some = slice(begin, begin + tiles.block)
        total = 0
        for o_i, y_i in zip(o, y[some].split(1, dim=1), strict=True):
            block = o_i[some]
            scores = mask_unused(block, table.unused_ids) if table.standard else block
            logp = scores.log_softmax(-1, dtype=torch.promote_types(block.dtype, torch.float32))
            target = logp.gather(1, y_i)
            total -= target[:, 0]
            if gradient:
                block.copy_(logp.exp_().scatter_add_(1, y_i, torch.full_like(target, -1.0)))
        nll.append(total)
    return torch.cat(nll)


def predictions(o, targets, table, tiles):
    """
    Bucket logits o, list of H (n, B); ids (n,) -> of each token: log P(id), is it the likeliest one (1 or 0), and P(the
    likeliest), (3, n). Of several equally likely ones the first counts as the likeliest, with kernels each of them.
    """
    if tiles.kernels and not table.standard:
        y = table.signatures[targets]
        target, largest, logsumexp = lookups(o, y, table.rows, table.token_mask, [])
        return torch.stack([target - logsumexp, target == largest, (largest - logsumexp).exp()])
    of_tokens = []
    for begin in range(0, len(targets), tiles.columns):
        some = slice(begin, begin + tiles.columns)
        scores = token_scores([o_i[some] for o_i in o], table)  # (m, V)
        target = scores.gather(1, targets[some, None])[:, 0]
        top, likeliest = scores.max(-1)
        total = scores.sub_(top[:, None]).exp_().sum(-1)
        of_tokens.append(torch.stack([target - top - total.log(), likeliest == targets[some], 1 / total]))
    return torch.cat(of_tokens, dim=1)


# -----------------------------------------------------------------------------
# a chunk and its gradients


class Head(NamedTuple):
    """What the head does with every chunk."""

    nll: Callable  # exact_nll or cross_entropies
    softmax: Callable  # soft_softmax or hard_softmax
    table: Table
    tiles: Tiles


class Mixed(NamedTuple):
    """What a mixer read and made, which its derivative needs."""

    x: Tensor  # (n, 2d), [c ; e]
    a: Tensor  # (n, z), before the SiLU
    s: Tensor  # (n, z), after it


def chunk_gradients(head, h, y, E, mixers):
    """
    The loss of a chunk and its derivatives, in plain operations on new tensors: torch.compile makes one graph of it.

        forward   o_i = E_i c_i    p_i = softmax(o_i)    e_i = E_i^T p_i    c_{i+1} = c_i + mixer_i(c_i, e_i)
        backward  g_i = dL/do_i = (the loss's own gradient) + p_i * (E_i de_i - <e_i, de_i>)
                  dL/dE_i = g_i c_i^T + p_i de_i^T       dL/dc_i = E_i^T g_i + (by way of c_{i+1})

    h (n, d), y (n, H); E (H, B, d) and the mixers' (Wdn, bdn, Wup, bup), H - 1 or none, in the precision of the matrix
    products -> the sum of the loss, a scalar; dL/dh (n, d); of each coordinate the pairs (a, b) of dL/dE_i = sum of
    a^T b; of each mixer the four derivatives. <,> is the inner product over d.
    """
    cs, o, p, mixed = cascade(head.softmax, h, E, mixers)
    # this makes the loss's own gradient of every o_i
    loss = head.nll(o, y, head.table, head.tiles, gradient=True).sum()
    dc = torch.zeros_like(h)
    dE = []
    dmixers = []
    for i in reversed(range(len(E))):
        g = o[i]  # (n, B)
        pairs = []
        if i < len(mixers):  # o_i also acts by way of e_i and c_{i+1}
            dc, de, of_mixer = mixer_gradients(mixers[i], mixed[i], dc)
            dmixers.append(of_mixer)
            e = upcast(mixed[i].x[:, h.shape[1] :])
            inner = (e * de).sum(dim=1, keepdim=True)  # (n, 1)
            g = g.addcmul_(p[i], torch.addmm(-inner.to(E.dtype), de, E[i].T))
            pairs = [(p[i], de)]
        dc = dc + g @ E[i]
        dE.append([(g, cs[i]), *pairs])
    return loss, dc, dE[::-1], dmixers[::-1]


def cascade(softmax, h, E, mixers):
    """The forward half of chunk_gradients: lists of c_i and o_i of each coordinate, of p_i and Mixed of each mixer."""
    c = h
    cs = []
    o = []
    p = []
    mixed = []
    for i, E_i in enumerate(E):
        cs.append(c.to(E.dtype))
        o.append(cs[i] @ E_i.T)  # (n, B)
        if i < len(mixers):
            down, down_bias, up, up_bias = mixers[i]
            p.append(softmax(o[i]))
            x = torch.cat([cs[i], p[i] @ E_i], dim=1)  # (n, 2d)
            a = F.linear(x, down, down_bias)
            mixed.append(Mixed(x, a, F.silu(a)))
            c = c + F.linear(mixed[i].s, up, up_bias)  # c_{i+1}
    return cs, o, p, mixed


def mixer_gradients(mixer, mixed, dc):
    """
    A mixer's (Wdn, bdn, Wup, bup), its Mixed, and dL/dc_{i+1} (n, d) -> what it adds to dL/dc_i, with dL/dc_{i+1}
    itself, (n, d); dL/de_i (n, d); the derivatives of its four parameters.
    """
    down, _, up, _ = mixer
    dy = dc.to(down.dtype)
    sigmoid = upcast(mixed.a).sigmoid()
    da = upcast(dy @ up) * sigmoid * (1 + mixed.a * (1 - sigmoid))  # (n, z)
    rounded = da.to(down.dtype)
    # a product with ones sums over rows
    ones = torch.ones_like(dc[:, 0])
    derivatives = rounded.T @ mixed.x, ones @ da, dy.T @ mixed.s, ones @ dc
    through_c, de = (rounded @ down).split(dc.shape[1], dim=1)
    return dc + through_c, de, derivatives


# -----------------------------------------------------------------------------
# the loop over chunks


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
        products = a.T @ b
        for a, b in more:
            products.addmm_(a.T, b)
        # += converts first: 1,024 rows stay in a cache (16.8 -> 2.5 ms)
        for total_rows, rows in zip(total.split(1024), products.split(1024), strict=True):
            total_rows += rows


class FusedHead(torch.autograd.Function):
    """
    The sum of the loss over n tokens, chunk by chunk, and its derivatives with it. Matrix products run in the precision
    of autocast; softmaxes, the one-hot term and the sums over coordinates and chunks in float32 or better. First
    derivatives only, and backward only once.
    """

    @staticmethod
    def forward(ctx, gradients_of, head, h, y, E, *mixers):
        """
        gradients_of: chunk_gradients, perhaps compiled; head: Head; h (n, d), y (n, H), E (H*B, d); mixers: the Hash
        Decoder's parameters -> the sum, a scalar.
        """
        H = y.shape[1]
        gradients = [torch.zeros_like(tensor) for tensor in (h, E, *mixers)]
        dh, dE, *dmixers = gradients
        dE = dE.unflatten(0, (H, -1))  # (H, B, d)
        E = for_matmul(E).unflatten(0, (H, -1))
        mixers = [for_matmul(parameter) for parameter in mixers]
        mixers = [mixers[i : i + 4] for i in range(0, len(mixers), 4)]
        loss = torch.zeros((), dtype=upcast(h[:0]).dtype, device=h.device)
        # chunks of one size, where that is possible: one graph, if it is compiled
        number = -(-len(h) // head.tiles.chunk)
        chunks = zip(h.detach().chunk(number), y.chunk(number), dh.chunk(number), strict=True)
        with torch.autocast(h.device.type, enabled=False):
            for h_chunk, y_chunk, dh_chunk in chunks:
                chunk_loss, dc, dE_pairs, dmixers_chunk = gradients_of(head, h_chunk, y_chunk, E, mixers)
                loss += chunk_loss
                dh_chunk.copy_(dc)
                for total, pairs in zip(dE, dE_pairs, strict=True):
                    add_products(total, pairs)
                for total, derivative in zip(dmixers, itertools.chain(*dmixers_chunk), strict=True):
                    total += derivative
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError('the lean head keeps its gradients for one backward pass only')
        ctx.gradients = None
        dh, *others = (gradient.mul_(scale) for gradient in gradients)
        return None, None, dh, None, *others
