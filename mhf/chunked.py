"""
ChunkedMHF: model.MHF with a fused head, which computes the same losses faster and in less memory.

The plain head stores the H x B bucket logits of every position of a batch and, for the exact loss, its V token logits.
The fused head processes the positions in chunks and computes a chunk's loss and gradients together (FusedHead,
chunk_gradients), so only dL/dh and dL/dE are kept between chunks. test_fused_equals_plain compares both heads in
float64: losses and every gradient.

Tensors are (n, B) or (n, V), one row per position, because CUDA's softmax over columns runs on one multiprocessor. The
exact loss sums over the vocabulary faster with one row per bucket, so it transposes a few positions at a time, into
columns. On a GPU with use_kernels, the Triton kernels of kernels.py compute these sums.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import InputError
from model import MHF, MHFConfig, token_logits, upcast

# -----------------------------------------------------------------------------
# chunk sizes


class ChunkSizes(NamedTuple):
    """How many positions the head processes together. They affect results only by rounding."""

    chunk: int  # positions whose bucket logits and gradients are computed together
    block: int  # positions of a chunk whose cross-entropies are computed together
    columns: int  # positions of a chunk whose token logits are computed together, in columns
    use_kernels: bool = False  # the kernels of kernels.py sum over the vocabulary


def default_chunk_sizes(device_type, config, use_kernels=False):
    """
    Returns the ChunkSizes of a device type and a config. They must not depend on anything else, such as free memory, or
    a resumed run would round differently.
    """
    num_logits = config.num_coordinates * config.buckets_per_coordinate
    if device_type == 'cuda':
        # bytes per position: bfloat16 logits, probabilities and transposed logits; float32 token logits
        bytes_per_position = 6 * num_logits + 4 * config.vocab_size
        chunk = min(4096, round_down(2.2e9 / bytes_per_position))
        return ChunkSizes(chunk, block=chunk, columns=512, use_kernels=use_kernels)
    # every chunk updates all of dL/dE, so chunks are large: 512 positions of H4B16K, 0.28 GiB
    # 32 columns fit in a CPU's cache: a position takes 154, 42 and 131 us with 16, 32 and 256 columns
    chunk = max(64, min(1024, round_down(2**25 / num_logits)))
    return ChunkSizes(chunk, block=64, columns=32)


def round_down(x):
    """The largest power of two that is not above x >= 1."""
    return 2 ** (int(x).bit_length() - 1)


# -----------------------------------------------------------------------------
# signature index


class SignatureIndex(NamedTuple):
    """The signature table and its inverse: a token's buckets and a bucket's tokens."""

    signatures: Tensor  # (V, H) int64
    token_mask: Tensor  # (V,) bool
    rows: Tensor  # (V, H) int32: signatures as rows of E, which has H*B rows
    unused_ids: Tensor  # int64: ids without a token
    ids: Tensor  # (tokens * H,) int32: token ids sorted by their rows of E
    offsets: Tensor  # (H*B + 1,) int32: row r of E belongs to the tokens ids[offsets[r] : offsets[r + 1]]
    standard: bool  # the Standard model's table: token w is bucket w


def invert_table(signatures, token_mask, B):
    """Signatures (V, H) int64, token_mask (V,) bool -> {name: array} of the other tensors of SignatureIndex."""
    H = signatures.shape[1]
    ids = np.flatnonzero(token_mask)
    rows = signatures + B * np.arange(H)
    token_rows = rows[ids].T.ravel()
    ends = np.bincount(token_rows, minlength=H * B).cumsum()
    sorted_ids = np.tile(ids, H)[token_rows.argsort(kind='stable')]
    return dict(
        rows=rows.astype(np.int32),
        unused_ids=np.flatnonzero(~token_mask),
        ids=sorted_ids.astype(np.int32),
        offsets=np.concatenate([[0], ends]).astype(np.int32),
    )


# -----------------------------------------------------------------------------
# the model


class ChunkedMHF(MHF):
    """MHF with the fused head: same parameters, names and losses. No (n, H*B) tensor of a complete batch is stored."""

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        self.use_kernels = False  # on a GPU: use the Triton kernels, which need the package triton and a C compiler
        self.chunk_sizes = None  # ChunkSizes, set by tests only; None: default_chunk_sizes
        self.chunk_gradients = chunk_gradients  # compile() replaces it

    def set_vocabulary(self, signatures, token_mask):
        super().set_vocabulary(signatures, token_mask)
        for name, array in invert_table(signatures, token_mask, self.config.buckets_per_coordinate).items():
            tensor = torch.tensor(array, device=self.signatures.device)
            self.register_buffer(f'index_{name}', tensor, persistent=False)

    def signature_index(self):
        """The SignatureIndex of the vocabulary, on the model's device."""
        inverse = (self.index_rows, self.index_unused_ids, self.index_ids, self.index_offsets)
        return SignatureIndex(self.signatures, self.token_mask, *inverse, standard=self.config.num_hashes == 0)

    def get_chunk_sizes(self):
        return self.chunk_sizes or default_chunk_sizes(self.embed.weight.device.type, self.config, self.use_kernels)

    def compile(self, **options):
        """
        Compiles hidden_states, for training and validation, and on a GPU chunk_gradients. On a CPU the many small
        blocks of chunk_gradients would compile for minutes and gain nothing. The loop over chunks stays eager.
        """
        self.hidden_states = torch.compile(self.hidden_states, **options)
        sizes = self.get_chunk_sizes()
        if sizes.block == sizes.chunk:
            self.chunk_gradients = torch.compile(chunk_gradients, fullgraph=True, **options)

    def loss_function(self, loss):
        """The function for the loss 'exact' or 'product', whose arguments are those of exact_nll."""
        # both losses of the Standard model are its cross-entropy
        nll = exact_nll if loss == 'exact' and self.config.num_hashes else cross_entropies
        return functools.partial(nll, index=self.signature_index(), sizes=self.get_chunk_sizes())

    def head_loss(self, h, y):
        nll = self.loss_function(self.config.loss)
        if not torch.is_grad_enabled():
            return sum(nll(o, y_chunk).sum() for o, y_chunk in self.logits_by_chunk(h, y))
        gradients = functools.partial(self.chunk_gradients, nll=nll, hard=self.hash_decoder.hard)
        mixers = self.hash_decoder.parameters()
        return FusedHead.apply(gradients, self.get_chunk_sizes().chunk, h, y, self.head_weight, *mixers)

    def logits_by_chunk(self, h, y):
        """h (n, d), y (n, ...) -> for each chunk: bucket logits, H of (chunk, B), and the chunk of y; no gradients."""
        E = for_matmul(self.head_weight)
        chunk = self.get_chunk_sizes().chunk
        for h_chunk, y_chunk in zip(h.split(chunk), y.split(chunk), strict=True):
            yield self.hash_decoder(h_chunk, E), y_chunk

    @torch.no_grad()
    def token_losses(self, x, y, losses=('product', 'exact')):
        functions = [self.loss_function(loss) for loss in losses]
        results = []
        for o, y_chunk in self.logits_by_chunk(self.hidden_states(x).flatten(0, 1), y.flatten(0, 1)):
            results.append(torch.stack([nll(o, y_chunk) for nll in functions]))
        return list(torch.cat(results, dim=1).unflatten(1, x.shape[:2]))

    @torch.no_grad()
    def predict(self, h, targets):
        """h (n, d), ids (n,) -> three (n,): log P(id) in nats, 1 if id is the likeliest token, and the highest P."""
        index = self.signature_index()
        sizes = self.get_chunk_sizes()
        results = [predictions(o, ids, index, sizes) for o, ids in self.logits_by_chunk(h, targets)]
        return torch.cat(results, dim=1).unbind(0)

    @torch.no_grad()
    def next_token_logits(self, h):
        o = self.hash_decoder(h, for_matmul(self.head_weight))
        if self.config.num_hashes == 0:
            return mask_unused(upcast(o[0]), self.index_unused_ids)
        if h.device.type == 'cpu' and len(h) > 16:
            index = self.signature_index()
            parts = split_positions(o, self.get_chunk_sizes().columns)
            return torch.cat([fused_token_logits(part, index) for part in parts])
        return token_logits(o, self.signatures, self.token_mask)


def for_matmul(parameter):
    """A detached parameter in the precision of autocast, so that it is converted once and not for every chunk."""
    device_type = parameter.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else parameter.dtype
    return parameter.detach().to(dtype)


# -----------------------------------------------------------------------------
# sums over the vocabulary: with kernels, or in columns


@torch.library.custom_op('mhf::vocab_logsumexp', mutates_args=('o',))
def vocab_logsumexp(
    o: list[Tensor], y: Tensor, rows: Tensor, token_mask: Tensor, inverse: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """
    kernels.sum_over_vocabulary as an operator, which torch.compile does not trace; arguments and results are documented
    there. The operator also gathers the token logit of y: torch.compile could move a separate gather after the
    operator, which overwrites o, and would then copy all of o.
    """
    from mhf.kernels import sum_over_vocabulary  # needs the package triton

    return sum_over_vocabulary(o, y, rows, token_mask, inverse)


@vocab_logsumexp.register_fake
def _(o, y, rows, token_mask, inverse):
    dtype = torch.promote_types(o[0].dtype, torch.float32)
    return tuple(o[0].new_empty(len(y), dtype=dtype) for _ in range(2))


def split_positions(o, size):
    """Bucket logits, H of (n, B) -> the same for up to `size` positions at a time, views."""
    return zip(*(o_i.split(size) for o_i in o), strict=True)


def mask_unused(scores, unused_ids):
    """Sets the token logits (m, V) of unused ids to -inf."""
    return scores.index_fill(1, unused_ids, -torch.inf) if len(unused_ids) else scores


def fused_token_logits(o, index):
    """Bucket logits, list of H (m, B) -> token logits sum_i o_i[s_i(w)] in a new tensor (m, V), -inf for unused ids."""
    if index.standard:
        scores = upcast(o[0]).clone()
    else:
        columns = torch.cat([o_i.T for o_i in o])  # (H*B, m)
        scores = F.embedding_bag(index.rows, upcast(columns), mode='sum').T
    return mask_unused(scores, index.unused_ids)


def exact_nll_in_columns(o, y, index, gradient):
    """exact_nll without Triton kernels, for any device: at most m = sizes.columns positions, so (m, V) stays small."""
    H = len(o)
    B = o[0].shape[1]
    target = sum(upcast(o_i.gather(1, y_i)) for o_i, y_i in zip(o, y.split(1, dim=1), strict=True))  # (m, 1)
    scores = fused_token_logits(o, index)  # (m, V)
    top = scores.amax(-1, keepdim=True)
    P = scores.sub_(top).exp_()
    total = P.sum(-1, keepdim=True)
    P.div_(total)  # normalizes P(w); used by training with --loss=exact and by validation
    if gradient:
        columns = P.T.contiguous()
        # (m, H*B): for bucket b of coordinate i the sum of P(w) over all w with s_i(w) = b
        g = F.embedding_bag(index.ids, columns, index.offsets, mode='sum', include_last_offset=True).T
        rows = y + B * torch.arange(H, device=y.device)
        g = g.scatter_add_(1, rows, -torch.ones_like(target).expand(-1, H)).to(o[0].dtype)
        for o_i, g_i in zip(o, g.split(B, dim=1), strict=True):
            o_i.copy_(g_i)
    return (top + total.log() - target)[:, 0]


# -----------------------------------------------------------------------------
# losses and predictions


def exact_nll(o, y, index, sizes, gradient=False):
    """
    The exact loss of a MultiHashFormer: bucket logits o, list of H (n, B); y (n, H) -> -log P(y) (n,), float32 or
    better. With `gradient`, overwrites o with the gradient: for bucket b of coordinate i, the sum of P(w) over all
    tokens w with s_i(w) = b, minus 1 if b = y_i.
    """
    if sizes.use_kernels:
        inverse = [index.ids, index.offsets] if gradient else []
        target, logsumexp = vocab_logsumexp(o, y, index.rows, index.token_mask, inverse)
        return logsumexp - target
    parts = zip(split_positions(o, sizes.columns), y.split(sizes.columns), strict=True)
    return torch.cat([exact_nll_in_columns(part, y_part, index, gradient) for part, y_part in parts])


def cross_entropies(o, y, index, sizes, gradient=False):
    """
    The paper's loss, the sum of the coordinates' cross-entropies: arguments as above -> sum_i -log p_i[y_i] (n,),
    float32 or better. With `gradient`, overwrites o_i with p_i, minus 1 at y_i. For the Standard model it is -log P(y).
    """
    nll = []
    for part, y_part in zip(split_positions(o, sizes.block), y.split(sizes.block), strict=True):
        total = 0
        for block, y_i in zip(part, y_part.split(1, dim=1), strict=True):
            scores = mask_unused(block, index.unused_ids) if index.standard else block
            # log p_i; for Standard it normalizes P(w); used by training and validation
            logp = scores.log_softmax(-1, dtype=torch.promote_types(block.dtype, torch.float32))
            target = logp.gather(1, y_i)
            total -= target[:, 0]
            if gradient:
                block.copy_(logp.exp_().scatter_add_(1, y_i, torch.full_like(target, -1.0)))
        nll.append(total)
    return torch.cat(nll)


def predictions(o, targets, index, sizes):
    """
    Bucket logits o, list of H (n, B); ids (n,) -> (3, n): log P(id), 1 if id is the likeliest token, and the highest P.
    The first of several equally likely tokens counts as the likeliest, as in argmax.
    """
    results = []
    for part, ids in zip(split_positions(o, sizes.columns), targets.split(sizes.columns), strict=True):
        scores = fused_token_logits(part, index)  # (m, V)
        target = scores.gather(1, ids[:, None])[:, 0]
        top, likeliest = scores.max(-1)
        total = scores.sub_(top[:, None]).exp_().sum(-1)  # normalizes P(w); used by evaluation
        results.append(torch.stack([target - top - total.log(), likeliest == ids, 1 / total]))
    return torch.cat(results, dim=1)


# -----------------------------------------------------------------------------
# loss and gradients of a chunk


class MixerActivations(NamedTuple):
    """Activations of a mixer that its gradient needs."""

    x: Tensor  # (n, 2d), [c ; e]
    a: Tensor  # (n, z), before the SiLU
    s: Tensor  # (n, z), after the SiLU


def chunk_gradients(h, y, E, mixers, nll, hard):
    """
    Computes the loss of a chunk and its gradients, in plain operations on new tensors that compile to one graph.

        forward   o_i = E_i c_i    p_i = softmax(o_i)    e_i = E_i^T p_i    c_{i+1} = c_i + mixer_i(c_i, e_i)
        backward  g_i = dL/do_i = (gradient of the loss itself) + p_i * (E_i de_i - <e_i, de_i>)
                  dL/dE_i = g_i c_i^T + p_i de_i^T       dL/dc_i = E_i^T g_i + (gradient through c_{i+1})

    Args: h (n, d); y (n, H); E (H, B, d) and the (Wdn, bdn, Wup, bup) of the mixers, H - 1 or none, in the precision of
        the matrix products; nll, exact_nll or cross_entropies; hard, whether the ablation is hard_embeddings.
    Returns: the sum of the loss, a scalar; dL/dh (n, d); for each coordinate pairs (a, b), where dL/dE_i is the sum of
        a^T b; for each mixer its four gradients. <,> is the inner product over d.
    """
    cs, o, p, activations = cascade(h, E, mixers, hard)
    # overwrites every o_i with the gradient of the loss itself
    loss = nll(o, y, gradient=True).sum()
    dc = torch.zeros_like(h)
    dE = []
    dmixers = []
    for i in reversed(range(len(E))):
        g = o[i]  # (n, B)
        pairs = []
        if i < len(mixers):  # the gradient through e_i and c_{i+1}
            dc, de, dmixer = mixer_gradients(mixers[i], activations[i], dc)
            dmixers.append(dmixer)
            e = upcast(activations[i].x[:, h.shape[1] :])
            inner = (e * de).sum(dim=1, keepdim=True)  # (n, 1)
            g = g.addcmul_(p[i], torch.addmm(-inner.to(E.dtype), de, E[i].T))
            pairs = [(p[i], de)]
        dc = dc + g @ E[i]
        dE.append([(g, cs[i]), *pairs])
    return loss, dc, dE[::-1], dmixers[::-1]


def cascade(h, E, mixers, hard):
    """The forward pass of chunk_gradients: lists of c_i, o_i, p_i and MixerActivations."""
    c = h
    cs = []
    o = []
    p = []
    activations = []
    for i, E_i in enumerate(E):
        cs.append(c.to(E.dtype))
        o.append(cs[i] @ E_i.T)  # (n, B)
        if i < len(mixers):
            down, down_bias, up, up_bias = mixers[i]
            # hard_embeddings: 1 for the likeliest bucket, without a derivative
            p.append(F.one_hot(o[i].argmax(-1), o[i].shape[-1]).to(E.dtype) if hard else o[i].softmax(-1))
            x = torch.cat([cs[i], p[i] @ E_i], dim=1)  # (n, 2d)
            a = F.linear(x, down, down_bias)
            s = F.silu(a)
            activations.append(MixerActivations(x, a, s))
            c = c + F.linear(s, up, up_bias)  # this is c_{i+1}
    return cs, o, p, activations


def mixer_gradients(mixer, activations, dc):
    """
    Args: the (Wdn, bdn, Wup, bup) of a mixer, its MixerActivations, dL/dc_{i+1} (n, d).
    Returns: dL/dc_i through c_{i+1} (n, d); dL/de_i (n, d); the gradients of the four parameters.
    """
    down, _, up, _ = mixer
    dy = dc.to(down.dtype)
    sigmoid = upcast(activations.a).sigmoid()
    da = upcast(dy @ up) * sigmoid * (1 + activations.a * (1 - sigmoid))  # (n, z)
    rounded = da.to(down.dtype)
    # a product with ones sums over rows
    ones = torch.ones_like(da[:, 0])
    gradients = rounded.T @ activations.x, ones @ da, dy.T @ activations.s, ones @ upcast(dc)
    through_c, de = (rounded @ down).split(dc.shape[1], dim=1)
    return dc + through_c, de, gradients


# -----------------------------------------------------------------------------
# the loop over chunks


def add_products(total, pairs):
    """Adds to total (B, d) the sum of a^T b over pairs (n, B), (n, d), which may have a lower precision."""
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
        # += makes a converted copy of products; with 1,024 rows at a time it stays in the cache (16.8 -> 2.5 ms)
        for total_rows, rows in zip(total.split(1024), products.split(1024), strict=True):
            total_rows += rows


class FusedHead(torch.autograd.Function):
    """
    The sum of the loss over n positions, chunk by chunk. forward() also computes the gradients. Matrix products run in
    the precision of autocast; softmaxes, the one-hot term and sums over coordinates and chunks in float32 or better.
    Supports first derivatives and one backward pass.
    """

    @staticmethod
    def forward(ctx, gradients_fn, chunk_size, h, y, E, *mixers):
        """
        Args: gradients_fn, chunk_gradients as a function of (h, y, E, mixers); chunk_size, in positions; h (n, d);
            y (n, H); E (H*B, d); the parameters of the Hash Decoder.
        Returns: the sum of the loss, a scalar.
        """
        H = y.shape[1]
        gradients = [torch.zeros_like(tensor) for tensor in (h, E, *mixers)]
        dh, dE, *dmixers = gradients
        dE = dE.unflatten(0, (H, -1))  # (H, B, d)
        E = for_matmul(E).unflatten(0, (H, -1))
        mixers = [for_matmul(parameter) for parameter in mixers]
        mixers = [mixers[i : i + 4] for i in range(0, len(mixers), 4)]
        loss = torch.zeros((), dtype=upcast(h[:0]).dtype, device=h.device)
        # chunks of equal size where possible, so that one graph is compiled
        num_chunks = -(-len(h) // chunk_size)
        chunks = zip(h.detach().chunk(num_chunks), y.chunk(num_chunks), dh.chunk(num_chunks), strict=True)
        with torch.autocast(h.device.type, enabled=False):
            for h_chunk, y_chunk, dh_chunk in chunks:
                chunk_loss, dc, dE_pairs, dmixers_chunk = gradients_fn(h_chunk, y_chunk, E, mixers)
                loss += chunk_loss
                dh_chunk.copy_(dc)
                for total, pairs in zip(dE, dE_pairs, strict=True):
                    add_products(total, pairs)
                for total, gradient in zip(dmixers, itertools.chain(*dmixers_chunk), strict=True):
                    total += gradient
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx, scale):
        dh, dE, *dmixers = (gradient.mul_(scale) for gradient in ctx.gradients)
        ctx.gradients = None  # they are scaled in place, so a second backward pass must fail
        return None, None, dh, None, dE, *dmixers


# -----------------------------------------------------------------------------
# construction


def make_config(settings, **fields):
    """Returns the MHFConfig of a script's settings and further fields. Raises InputError for settings out of range."""
    fields |= {name: value for name, value in settings.items() if name in MHFConfig.__annotations__}
    try:
        return MHFConfig(**fields)
    except ValueError as e:
        raise InputError(e) from None


def build_on_meta(config, Model=ChunkedMHF):
    """Builds a model on the meta device, without memory and without random draws, for load_weights."""
    with torch.device('meta'):
        return Model(config)


def load_weights(model, state):
    """Assigns the tensors of a state_dict to a model from build_on_meta. Raises RuntimeError if they do not fit."""
    model.load_state_dict(state, assign=True)
    model.set_vocabulary(state['signatures'].numpy(), state['token_mask'].numpy())
