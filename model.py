"""
MultiHashFormer (arXiv 2606.28057): a token is a signature of H hash IDs instead of a row of an embedding matrix.

    signature (H ids) -> Hash Encoder -> vector -> Qwen3-style decoder -> h -> Hash Decoder -> H x B bucket logits

The Standard model (one embedding row per token, tied head) is the same class with num_hashes=0: it is the special case of
one coordinate, V buckets and the token id as signature, without gate and cascade.

    $ python model.py          # prints every config's parameter counts
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from configurator import InputError, did_you_mean, wrong_type
from hashing import get_tokenizer, signature_table, tokenizer_fingerprint

LOSSES = ('exact', 'product')


@dataclass
class MHFConfig:
    vocab_size: int = 32768  # V
    block_size: int = 2048  # T, the longest context
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 768  # d
    intermediate_size: int = 2560
    num_hashes: int = 4  # H; 0 is the Standard model
    num_buckets: int = 16384  # B
    num_lsh: int = 0  # how the table was made; the model itself only reads the table
    bottleneck: int = 64  # z, of the gate and of the mixers
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    pad_id: int = 2  # the token whose signature is all zero
    loss: str = 'exact'  # exact: -log P(w); product: the paper's sum over coordinates

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise InputError(f"loss='{self.loss}': must be one of {', '.join(LOSSES)}{did_you_mean(self.loss, LOSSES)}")
        for key, least in asdict(self).items():
            if key not in ('num_hashes', 'num_lsh', 'pad_id', 'loss') and least <= 0:
                raise InputError(f'{key}={least}: must be above 0')
        if self.num_heads % self.num_kv_heads:
            raise InputError(f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}')
        if self.head_dim % 2:
            raise InputError(f'head_dim={self.head_dim}: rotary embeddings need an even number')

    @property
    def coordinates(self):  # ids per token in the bins: H, or 1 for the Standard model
        return self.num_hashes or 1

    @property
    def buckets(self):  # rows of the embedding per coordinate: B, or V for the Standard model
        return self.num_buckets if self.num_hashes else self.vocab_size


def pick_device(device=None, dtype=None):
    """
    (device, dtype) to compute on: what was asked for, else the best there is: cuda, mps or cpu; bfloat16 where the hardware
    has it, else float32. Raises InputError for what is not there.
    """
    if device is None:
        device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'  # torchrun sets it: a GPU for each process
    try:
        kind = torch.zeros(1, device=device).device.type
    except (RuntimeError, AssertionError, TypeError) as e:
        reason = str(e).splitlines()[0][:100]
        raise InputError(f'device={device} is not there ({reason}); leave it out to take what is') from None
    if kind == 'cuda':
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bf16 = kind == 'cpu' and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    dtype = dtype or ('bfloat16' if bf16 else 'float32')
    if dtype not in ('bfloat16', 'float32'):
        raise InputError(f'dtype={dtype}: must be bfloat16 or float32 (float16 would need loss scaling)')
    if dtype == 'bfloat16' and kind == 'cuda' and not bf16:
        raise InputError(f'dtype=bfloat16: {torch.cuda.get_device_name(device)} does not have it; use --dtype=float32')
    return device, dtype


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = at_least_float32(x)
        return F.rms_norm(y, self.weight.shape, self.weight.to(y.dtype), self.eps).to(x.dtype)


def rope_angles(positions, config, dtype):
    """cos and sin of the rotation angles of `positions` (..., T): two tensors (..., 1, T, head_dim/2), for all heads."""
    k = torch.arange(0, config.head_dim, 2, dtype=dtype, device=positions.device)
    frequency = config.rope_theta ** (-k / config.head_dim)
    angle = positions.to(dtype)[..., None, :, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotate the two halves of head_dim against each other; x (N, heads, T, head_dim)."""
    cos, sin = rope
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention without biases; queries and keys are normalised per head, then rotated."""

    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, rope, cache=None, start=0, mask=None):
        N, T, _ = x.shape
        q = self.q_proj(x).view(N, T, -1, self.head_dim)
        k = self.k_proj(x).view(N, T, -1, self.head_dim)
        v = self.v_proj(x).view(N, T, -1, self.head_dim).transpose(1, 2)  # (N, kv_heads, T, head_dim)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)  # (N, heads, T, head_dim)
        k = rotate(self.k_norm(k).transpose(1, 2), rope)  # (N, kv_heads, T, head_dim)
        if cache is not None:  # (2, N, kv_heads, block_size, head_dim); after a prefill, one token at a time
            cache[0, :, :, start : start + T], cache[1, :, :, start : start + T] = k, v
            k, v = cache[0, :, :, : start + T], cache[1, :, :, : start + T]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T > 1 and mask is None, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(N, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, rope, cache=None, start=0, mask=None):
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, start, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class HashEncoder(nn.Module):
    """
    Gated sum of a signature's H bucket vectors k_i:  e = Ws (sum_i alpha_i k_i) + bs,
    alpha = softmax over i of  W2 SiLU(W1 k_i + b1) + b2.
    """

    def __init__(self, c):
        super().__init__()
        d, z = c.hidden_size, c.bottleneck
        self.gate = nn.Sequential(nn.Linear(d, z), nn.SiLU(), nn.Linear(z, 1))
        self.out = nn.Linear(d, d)

    def forward(self, k):  # (N, T, H, d) -> (N, T, d)
        alpha = at_least_float32(self.gate(k)).softmax(dim=2)  # (N, T, H, 1)
        return self.out((alpha * k).sum(dim=2).to(k.dtype))


def softmax(o):
    """Bucket logits (B, n) -> probabilities, in o's precision; float32 or better inside, also under autocast."""
    with torch.autocast(o.device.type, enabled=False):
        return o.softmax(dim=0)


def vocabulary_chunk(kind):
    """Tokens whose V logits exist at a time, on a device of this kind; on a CPU few enough for its cache: 4 MB at V = 32,768."""
    return 32 if kind == 'cpu' else 512


def add(total, part):
    """total += part, of which part may be of lower precision; in rows that a CPU's cache holds, since it converts first."""
    rows = 1024 if total.device.type == 'cpu' else len(total)
    for t, p in zip(total.split(rows), part.split(rows)):
        t += p


class LeanHead(torch.autograd.Function):
    """
    The sum of the loss over n tokens, without ever holding their n x H x B logits: goes through the tokens in chunks and
    computes a chunk's gradients at once, so that nothing outlives a chunk but dL/dh and dL/dE. MHF.cascade and its derivative
    by hand; logits and p_i are (B, chunk), <,> is over d:

        forward   o_i = E_i c_i    p_i = softmax(o_i)    e_i = E_i^T p_i    c_{i+1} = c_i + mixer_i(c_i, e_i)
        backward  g_i = dL/do_i = (the loss's own gradient) + p_i * (E_i de_i - <e_i, de_i>)
                  dL/dE_i = g_i c_i^T + p_i de_i^T       dL/dc_i = E_i^T g_i + (by way of c_{i+1})

    Matrix products run in the precision of autocast; softmaxes, the one-hot term and the sums over coordinates and chunks in
    float32 or better. First derivatives only, and backward only once.
    """

    @staticmethod
    def forward(ctx, model, h, y, weight, *mixers):
        H, gradients = model.config.coordinates, [torch.zeros_like(t) for t in (h, weight, *mixers)]
        dh, dE, *dmixers = gradients
        E, dE = model.low_precision(weight), dE.unflatten(0, (H, -1))
        loss = torch.zeros((), dtype=at_least_float32(h[:0]).dtype, device=h.device)
        for c, y_, dh_ in zip(*(t.split(model.head_chunk) for t in (h.detach(), y, dh))):
            o, p, mixed = [], [], []
            for i in range(H):
                o.append(E[i] @ c.T.to(E.dtype))
                if i == H - 1:
                    break
                p.append(softmax(o[i]))
                with torch.enable_grad():  # the mixers, which are small, are left to autograd
                    c, e = c.detach().requires_grad_(), (p[i].T @ E[i]).to(c.dtype).requires_grad_()
                    mixed.append((c, e, model.mix(i, c, e)))
                c = mixed[i][-1].detach()
            loss += model.loss_of(o, y_, gradient=True).sum()  # o_i becomes the loss's gradient
            dc = torch.zeros_like(c)
            for i in reversed(range(H)):
                g = o.pop()
                if i < H - 1:
                    c, e, next_c = mixed.pop()
                    dc, de, *dmixer = torch.autograd.grad(next_c, [c, e, *model.mixers[i].parameters()], dc)
                    for total, part in zip(dmixers[i * len(dmixer) :], dmixer):
                        total += part
                    inner = (e.detach() * de).sum(dim=1)
                    g.addcmul_(p[i], torch.addmm(-inner.to(E.dtype), E[i], de.T.to(E.dtype)))
                part = g @ c.detach().to(E.dtype)
                add(dE[i], part.addmm_(p.pop(), de.to(E.dtype)) if i < H - 1 else part)
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
        return None, dh, None, *rest


def vocabulary(c, table=None, gaps=()):
    """(V, H) int64 signatures and (V,) bool, which ids are tokens; checks the table against the config."""
    shape = (c.vocab_size, c.coordinates)
    if c.num_hashes == 0:
        table = np.arange(c.vocab_size)[:, None]
    table = np.zeros(shape, np.int64) if table is None else np.asarray(table, np.int64)
    if table.shape != shape or table.max() >= c.buckets:
        raise InputError(
            f'the signature table has shape {table.shape} and largest bucket {table.max()}, the model has '
            f'vocab_size={shape[0]}, num_hashes={shape[1]} and num_buckets={c.buckets}'
        )
    is_token = table.any(axis=1) | (c.num_hashes == 0)
    is_token[c.pad_id : c.pad_id + 1] = True
    is_token[list(gaps)] = False
    return table, is_token


class MHF(nn.Module):
    """
    table: (V, H) integer array, the signature of every token id (hashing.signature_table); not used by the Standard model.
    gaps:  ids that are no token (holes of a tiktoken encoding); they get probability 0. All-zero rows other than pad_id's
           are gaps by definition.
    """

    def __init__(self, config, table=None, gaps=()):
        super().__init__()
        self.config = c = config
        H, B, d, z = c.coordinates, c.buckets, c.hidden_size, c.bottleneck
        self.embed = nn.Embedding(H * B, d)  # E: bucket b of coordinate i is row i*B + b; also the output head
        self.encoder = HashEncoder(c) if c.num_hashes else None
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(d, c.norm_eps)
        self.mixers = nn.ModuleList(
            [nn.Sequential(nn.Linear(2 * d, z), nn.SiLU(), nn.Linear(z, d)) for _ in range(H - 1)]
        )
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)

        signatures, is_token = vocabulary(c, table, gaps)
        self.register_buffer('signatures', torch.tensor(signatures))  # (V, H) int64, in the checkpoint
        self.register_buffer('is_token', torch.tensor(is_token))  # (V,) bool
        self._index = None  # made at first use
        self.activation_checkpointing = False  # keep only the blocks' inputs and compute the rest again in backward
        # tokens whose H*B logits exist at a time; each chunk adds H*B*d numbers to dE, so not too few
        self.head_chunk = max(64, min(1024, 2**25 // (H * B)))

    def num_params(self):
        """(embedding interface, decoder): E, hash encoder and decoder; the layers and the final norm. E counts once."""
        decoder = sum(p.numel() for m in (self.layers, self.norm) for p in m.parameters())
        return sum(p.numel() for p in self.parameters()) - decoder, decoder

    def extend_vocabulary(self, table, gaps=(), made_of=None):
        """
        Takes a larger table (V', H) whose first V rows are the present ones. No parameter is added or changed, so an optimizer
        made before stays good. A Standard model needs no table but made_of, for each new token the ids of the old ones that its
        string is split into: its new row of E is their mean, and an optimizer has to be made anew. Raises InputError for other
        old rows, or where the one or the other is missing.
        """
        V = int(self.is_token.nonzero()[-1]) + 1  # without unused rows at the end, which released tables have
        if not self.config.num_hashes:
            if made_of is None:
                raise InputError(
                    f"the Standard model's embedding has {V} rows; for more tokens say which old ones the new are made_of"
                )
            old = self.embed.weight.data[:V]
            new = [old[torch.tensor(ids, device=old.device)].mean(0, keepdim=True) for ids in made_of]
            self.embed = nn.Embedding.from_pretrained(torch.cat([old, *new]), freeze=False)
            table = np.arange(V + len(made_of))[:, None]
        old, is_token = self.signatures[:V], self.is_token[:V]
        if len(table) < V or not np.array_equal(np.asarray(table)[:V], old.cpu().numpy()):
            raise InputError(
                f'the larger table has {len(table)} rows, of which the first {V} must be those of the model'
            )
        self.replace_vocabulary(table, self.config.pad_id, gaps)
        self.is_token[:V] = is_token

    def replace_vocabulary(self, table, pad_id, gaps=()):
        """Takes the table (V', H) of any other vocabulary, whose tokens get buckets that were trained for others."""
        config = replace(self.config, vocab_size=len(table), pad_id=pad_id)
        signatures, is_token = (torch.tensor(t, device=self.signatures.device) for t in vocabulary(config, table, gaps))
        self.config, self.signatures, self.is_token = config, signatures, is_token

    # ---- signatures in, hidden states out

    def rows(self, signatures):
        """Signatures (..., H) -> their rows of E (..., H): coordinate i's bucket b is row i*B + b."""
        H, B = self.config.coordinates, self.config.buckets
        return signatures + torch.arange(0, H * B, B, device=signatures.device)

    def hidden(self, x, cache=None, start=0, states=None, positions=None, mask=None):
        """
        x (N, T, H) signatures -> h (N, T, d), after the final norm. cache: from new_cache, holding positions before start.
        states: a list that receives the input of every block, each (N, T, d). positions (N, T) and mask (N, 1, T, T), bool, of
        what each token attends to: where they are given, instead of start, start+1, ... and the causal triangle.
        """
        k = F.embedding(self.rows(x), self.embed.weight)  # (N, T, H, d)
        # the residual stream stays in the parameters' precision, whatever autocast does to the encoder
        e = self.encoder(k).to(k.dtype) if self.encoder else k.squeeze(2)
        dtype = torch.promote_types(e.dtype, torch.float32)
        if positions is None:
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        rope = rope_angles(positions, self.config, dtype)
        for i, layer in enumerate(self.layers):
            if states is not None:
                states.append(e)
            if self.activation_checkpointing and torch.is_grad_enabled():
                e = checkpoint(layer, e, rope, use_reentrant=False)
            else:
                e = layer(e, rope, None if cache is None else cache[i], start, mask)
        return self.norm(e)

    def mix(self, i, c, e):
        """c_{i+1} of the Hash Decoder, from c_i and the soft embedding e_i, all (n, d)."""
        return c + self.mixers[i](torch.cat([c, e], dim=-1))

    def cascade(self, h, E=None):
        """
        The Hash Decoder: h (n, d) -> list of H bucket logits (B, n), nats; E as from low_precision where it is given.
        o_i = E_i c_i,  e_i = E_i^T softmax(o_i),  c_{i+1} = c_i + Wup SiLU(Wdn [c_i ; e_i] + bdn) + bup,  c_1 = h
        """
        E = self.embed.weight.unflatten(0, (self.config.coordinates, -1)) if E is None else E  # (H, B, d)
        c, logits = h, []
        for i, E_i in enumerate(E):
            logits.append(E_i @ c.T.to(E.dtype))
            if i < len(self.mixers):
                c = self.mix(i, c, (softmax(logits[i]).T @ E_i).to(c.dtype))
        return logits

    def low_precision(self, weight):
        """E (H*B, d) -> a constant (H, B, d) in the precision of autocast, so that chunks need not convert it again."""
        kind = weight.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return weight.detach().to(low).unflatten(0, (self.config.coordinates, -1))

    # ---- probabilities

    def train_loss(self, x, y):
        """
        Signatures x, y (N, T, H) -> the mean loss over all tokens, nats: -log P(y), or the paper's sum_i -log p_i[y_i]
        (config.loss). For the Standard model both are the ordinary cross-entropy. Raises InputError where there is no target.
        """
        if x.shape != y.shape or not y.numel():
            raise InputError(
                f'inputs {tuple(x.shape)} and targets {tuple(y.shape)}: both must be (N, T, H), none of them 0'
            )
        return self.head_loss(self.hidden(x).flatten(0, 1), y.flatten(0, 1)) / y[..., 0].numel()

    forward = train_loss  # what DDP and torch.compile call

    def compile(self, **options):
        """nn.Module.compile, of all but the head, whose loops would take a minute to trace."""
        self.head_loss = torch.compiler.disable(self.head_loss)
        super().compile(**options)

    def head_loss(self, h, y):
        """h (n, d), target signatures y (n, H) -> the sum over tokens of the loss, nats."""
        if torch.is_grad_enabled():
            return LeanHead.apply(self, h, y, self.embed.weight, *self.mixers.parameters())
        E = self.low_precision(self.embed.weight)
        chunks = zip(h.split(self.head_chunk), y.split(self.head_chunk))
        return sum(self.loss_of(self.cascade(h_, E), y_).sum() for h_, y_ in chunks)

    def loss_of(self, o, y, gradient=False):
        """Bucket logits, list of H (B, n), y (n, H) -> the loss of each token (n,); see exact_nll."""
        exact = self.config.loss == 'exact' and self.config.num_hashes
        return (self.exact_nll if exact else self.product_nll)(o, y, gradient)

    def token_scores(self, oT):
        """
        Bucket logits oT (H*B, n) -> token logits sum_i o_i[s_i(w)], (V, n), -inf where there is no token. Their softmax is
        P(w): the per-coordinate normalisers are the same for every w and cancel. A bucket is a row of n contiguous numbers,
        so that gathering runs at memory speed.
        """
        rows, gaps, _, _ = self.index()
        scores = F.embedding_bag(rows, oT, mode='sum') if self.config.num_hashes else oT.clone()
        return scores.index_fill_(0, gaps, -torch.inf) if len(gaps) else scores

    def token_logits(self, o):
        """Bucket logits, list of H (B, n) -> token logits (n, V), float32 or better."""
        return self.token_scores(at_least_float32(torch.cat(o))).T

    def index(self):
        """
        The table as the head reads it: rows of E by token (V, H); ids that are no token; and backwards: ids sorted by row
        of E, (tokens * H,), and where each of the H*B rows begins among them.
        """
        made_of = self.signatures, self.signatures._version
        if self._index is None or self._index[0] is not made_of[0] or self._index[1] != made_of[1]:
            rows, ids = self.rows(self.signatures), self.is_token.nonzero()[:, 0]
            by_row = rows[ids].T.flatten()
            begins = torch.bincount(by_row, minlength=self.embed.num_embeddings).cumsum(0)
            begins = torch.cat([begins.new_zeros(1), begins[:-1]])
            sorted_ids = ids.repeat(rows.shape[1])[by_row.argsort(stable=True)]
            self._index = *made_of, rows, (~self.is_token).nonzero()[:, 0], sorted_ids, begins
        return self._index[2:]

    def exact_nll(self, o, y, gradient=False):
        """
        Bucket logits o, list of H (B, n), y (n, H) -> -log P(y) (n,), float32 or better. With `gradient`, o is overwritten by
        d/do: of bucket b of coordinate i, the sum of P(w) over the tokens w with s_i(w) = b, minus 1 if b = y_i.
        """
        nll, m = [], vocabulary_chunk(y.device.type)
        _, _, ids, begins = self.index()
        for k in range(0, len(y), m):
            block = slice(k, k + m)
            oT = torch.cat([at_least_float32(o_i[:, block]) for o_i in o])  # (H*B, m)
            scores, target = self.token_scores(oT), self.rows(y[block]).T  # (V, m), (H, m)
            top = scores.amax(0)
            P = scores.sub_(top).exp_()
            total = P.sum(0)
            nll.append(total.log() + top - oT.gather(0, target).sum(0))
            if gradient:
                g = F.embedding_bag(ids, P, begins, mode='sum').div_(total)  # (H*B, m)
                g.scatter_add_(0, target, torch.full_like(oT[: len(target)], -1.0))
                for o_i, g_i in zip(o, g.chunk(len(o))):
                    o_i[:, block] = g_i
        return torch.cat(nll)

    def product_nll(self, o, y, gradient=False):
        """As exact_nll, but the paper's loss sum_i -log p_i[y_i], whose gradient is p_i, minus 1 at y_i."""
        nll, m = [], 64 if y.device.type == 'cpu' else len(y)
        for k in range(0, len(y), m):
            block, total = slice(k, k + m), 0
            for o_i, y_i in zip(o, y[block].T):
                scores, target = o_i[:, block], y_i[None]  # (B, m), (1, m)
                if not self.config.num_hashes:
                    scores = scores.index_fill(0, self.index()[1], -torch.inf)
                logp = at_least_float32(scores).log_softmax(0)
                total -= logp.gather(0, target)[0]
                if gradient:
                    o_i[:, block] = logp.exp_().scatter_add_(0, target, torch.full_like(logp[:1], -1.0))
            nll.append(total)
        return torch.cat(nll)

    @torch.no_grad()
    def nll(self, x, y):
        """
        Signatures x, y (N, T, H) -> two (N, T) in nats, float32 or better: the paper's loss of each token, and -log P(y),
        normalised over the vocabulary.
        """
        h, parts, E = self.hidden(x).flatten(0, 1), [], self.low_precision(self.embed.weight)
        for h_, y_ in zip(h.split(self.head_chunk), y.flatten(0, 1).split(self.head_chunk)):
            o = self.cascade(h_, E)
            product = self.product_nll(o, y_)
            parts.append(torch.stack([product, self.exact_nll(o, y_) if self.config.num_hashes else product]))
        return torch.cat(parts, dim=1).unflatten(1, x.shape[:2]).unbind(0)

    @torch.no_grad()
    def bucket_logits(self, ids):
        """Token ids (N, T) -> bucket logits (N, T, H, B)."""
        o = self.cascade(self.hidden(self.signatures[ids]).flatten(0, 1))
        return torch.stack(o).permute(2, 0, 1).unflatten(0, ids.shape)

    @torch.no_grad()
    def log_probs(self, ids):
        """Token ids (N, T) -> log P(next token) (N, T, V), normalised over real tokens, float32 or better."""
        o = self.cascade(self.hidden(self.signatures[ids]).flatten(0, 1))
        return self.token_logits(o).log_softmax(-1).unflatten(0, ids.shape)

    # ---- generation

    def new_cache(self, N):
        """Room for the keys and values of N sequences: (layers, 2, N, kv_heads, block_size, head_dim)."""
        c, w = self.config, self.embed.weight
        autocast = torch.is_autocast_enabled(w.device.type)
        dtype = torch.get_autocast_dtype(w.device.type) if autocast else w.dtype
        shape = (c.num_layers, 2, N, c.num_kv_heads, c.block_size, c.head_dim)
        return torch.empty(shape, dtype=dtype, device=w.device)

    @torch.no_grad()
    def stream(self, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, use_cache=True):
        """
        Token ids (N, T), T >= 1, int64: yields (N,) next ids, max_new_tokens times, sampled from P(w).
        temperature 0 is greedy; top_k keeps the k likeliest tokens; top_p the fewest whose probability reaches p.
        When the context is full its older half is dropped. use_cache=False recomputes everything: the slow twin.
        """
        block = self.config.block_size
        ids = ids[:, -block:]
        cache, start = (self.new_cache(len(ids)) if use_cache else None), 0
        for _ in range(max_new_tokens):
            if ids.shape[1] > block:
                ids, start = ids[:, -(block + 1) // 2 :], 0
            h = self.hidden(self.signatures[ids[:, start:]], cache, start)[:, -1]
            start = ids.shape[1] if use_cache else 0
            logits = self.token_logits(self.cascade(h))  # (N, V)
            token = sample_token(logits, temperature, top_k, top_p, generator)
            ids = torch.cat([ids, token[:, None]], dim=1)
            yield token

    def generate(self, ids, max_new_tokens, **options):
        """Token ids (N, T) -> (N, T + max_new_tokens); options as for stream."""
        return torch.cat([ids, *[t[:, None] for t in self.stream(ids, max_new_tokens, **options)]], dim=1)

    # ---- weights from elsewhere

    @classmethod
    def from_checkpoint(cls, path, whole=False):
        """
        A train.py checkpoint -> (model, the checkpoint's dict), on the CPU. The digest of the model is checked, that of the
        optimizer and the rest only if `whole`. Raises InputError.
        """
        try:
            ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
            if 'sha256' not in ckpt:
                raise ValueError('it has no sha256: an older train.py wrote it')
            digests = ckpt.pop('sha256')
            if wrong := wrong_type(ckpt, CHECKPOINT, 'checkpoint'):
                raise ValueError(wrong)
            for key in digests if whole else ('model', 'model_config'):
                if digest_of_state(ckpt[key]) != digests[key]:
                    raise ValueError(f"the digest of its '{key}' is not the one that was written")
            config = MHFConfig(**ckpt['model_config'])
            layers = sum(k.endswith('.input_layernorm.weight') for k in ckpt['model'])
            there = *ckpt['model']['signatures'].shape, layers
            if there != (config.vocab_size, config.coordinates, config.num_layers):
                raise ValueError(f'its tensors are of V, H, layers = {there}, its config says otherwise')
            with torch.device('meta'):
                model = cls(config)
            # copies, because the mapped file may be replaced while a training run goes on
            model.load_state_dict({k: v.clone() for k, v in ckpt['model'].items()}, assign=True)
        except FileNotFoundError:
            raise InputError(f'no checkpoint at {path}; train one with: python train.py config/mhf_tiny.py') from None
        except InputError:
            raise
        except Exception as e:  # torch.load's errors are many: zip, pickle, missing keys
            reason = ' '.join(str(e).split())[:200]
            raise InputError(
                f'{path} is no checkpoint of train.py, or is damaged ({type(e).__name__}: {reason})'
            ) from None
        return model, ckpt

    def export(self, folder, tokenizer):
        """
        Writes the authors' released format into a new folder: config.json, with the name of the tokenizer, and model.safetensors.
        from_pretrained reads back the same bits. Raises InputError.
        """
        from safetensors.torch import save_file

        c, folder, weights = self.config, Path(folder), {}
        for name, tensor in self.state_dict().items():
            prefix = next((p for p, ours in RELEASED_NAMES.items() if name.startswith(ours)), None)
            if prefix and (name != 'signatures' or c.num_hashes):
                weights[prefix + name[len(RELEASED_NAMES[prefix]) :]] = tensor.contiguous()
        fields = dict(
            model_type='qwen3', architectures=['Qwen3ForCausalLM'], vocab_size=c.vocab_size, hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
            max_position_embeddings=c.block_size, pad_token_id=c.pad_id, hidden_act='silu', attention_bias=False,
            tie_word_embeddings=True, torch_dtype='float32', tokenizer=tokenizer, trained_loss=c.loss,
        )  # fmt: skip
        if c.num_hashes:
            fields |= dict(
                num_hashes=c.num_hashes, num_buckets=c.num_buckets, num_lsh=c.num_lsh, bottle_neck_dim=c.bottleneck
            )
        try:
            folder.mkdir(parents=True)
            save_file(weights, folder / 'model.safetensors', metadata=dict(format='pt'))
            (folder / 'config.json').write_text(json.dumps(fields, indent=1) + '\n')
        except FileExistsError:
            raise InputError(f'export={folder} is there already; choose another folder') from None
        except OSError as e:
            raise InputError(f'export={folder} cannot be written ({e})') from None

    @classmethod
    def from_pretrained(cls, path_or_hub_id, revision=None):
        """
        The authors' released format (config.json and safetensors, one file or sharded), from a folder or from the Hugging
        Face hub (a revision may also stand behind the id, after @); a plain Qwen3 model with tied embeddings becomes a Standard model. float32. Raises InputError.
        """
        from safetensors.torch import load_file

        folder = _fetch(path_or_hub_id, revision)
        try:
            released = json.loads((folder / 'config.json').read_text())
        except (OSError, ValueError) as e:
            raise InputError(f'{path_or_hub_id}: no readable config.json ({e})') from None
        index = folder / 'model.safetensors.index.json'
        names = ['model.safetensors']
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as e:
                raise InputError(f'{index} is no index of weights ({type(e).__name__}: {e})') from None
        weights = {}
        for name in names:
            if Path(str(name)).name != name:
                raise InputError(f'{index} names {name!r}, which is not a file beside it')
            try:
                weights.update(load_file(folder / name))
            except Exception as e:  # missing, truncated, not safetensors
                raise InputError(f'{folder / name} cannot be read: {" ".join(str(e).split())[:200]}') from None
        return _from_released(cls, released, weights, str(path_or_hub_id))


def digest_of_state(state):
    """SHA-256 of a tensor, a number, a string or a nest of dicts and lists of them; hashlib lets other threads run meanwhile."""
    digest = hashlib.sha256()

    def add(x):
        if isinstance(x, torch.Tensor):
            digest.update(f'{x.dtype} {tuple(x.shape)}'.encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(x, (dict, list, tuple)):
            digest.update(f'{type(x).__name__} {len(x)}'.encode())
            for key, value in x.items() if isinstance(x, dict) else enumerate(x):
                digest.update(repr(key).encode())
                add(value)
        else:
            digest.update(repr(x).encode())

    add(state)
    return digest.hexdigest()


# what from_checkpoint finds in a checkpoint of train.py
CHECKPOINT = dict(
    model=dict,
    model_config=dict,
    optimizer=dict(state=dict, param_groups=[dict]),
    config=dict(tokenizer=str),
    step=int,  # updates done
    first_step=int,  # of the present data
    best_val=(int, float),
    recent=[float],  # the last losses
    data=dict(tokenizer=str, tokenizer_sha256=str, table_sha256=(str, type(None)), train_sha256=str),
)

# released name -> ours, by prefix; the rest of each name is the same
RELEASED_NAMES = {
    'model.embed_tokens.': 'embed.',
    'model.hash_map': 'signatures',
    'model.combiner.scorer.': 'encoder.gate.',
    'model.combiner.output_proj.0.': 'encoder.out.',
    'model.layers.': 'layers.',
    'model.norm.': 'norm.',
    'hash_head.cascade_mixer.': 'mixers.',
}


def _fetch(path_or_hub_id, revision):
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    path_or_hub_id, _, branch = str(path_or_hub_id).partition('@')
    revision = revision or branch or None
    if folder.parent != Path() and folder.parent.is_dir():
        raise InputError(f'{path_or_hub_id}: no such folder in {folder.parent}')
    if str(path_or_hub_id).count('/') != 1 or str(path_or_hub_id).startswith(('.', '/', '~')):
        raise InputError(f'{path_or_hub_id}: no such folder, and not a hub id (user/name)')
    import huggingface_hub

    patterns = ['config.json', '*.safetensors', '*.safetensors.index.json']
    try:
        return Path(huggingface_hub.snapshot_download(str(path_or_hub_id), revision=revision, allow_patterns=patterns))
    except Exception as e:  # offline, unknown id, unknown revision, no permission: the hub's own words say which
        reason = ' '.join(str(e).split())[:200]
        raise InputError(
            f"'{path_or_hub_id}' could not be fetched from the hub ({type(e).__name__}: {reason})"
        ) from None


def _from_released(cls, released, weights, where):
    def want(key):
        if key not in released:
            raise InputError(f"{where}: config.json has no '{key}'")
        return released[key]

    rope = released.get('rope_parameters') or {}
    for key, value, ours in (
        ('lsh_only_embed', released.get('lsh_only_embed'), False),
        ('attention_bias', released.get('attention_bias'), False),
        ('use_sliding_window', released.get('use_sliding_window'), False),
        ('hidden_act', released.get('hidden_act'), 'silu'),
        ('rope_type', rope.get('rope_type'), 'default'),
    ):
        if value not in (None, ours):
            raise InputError(f'{where}: {key}={value} in config.json, this code has only {ours}')
    pad = released.get('pad_token_id')
    pad = released.get('eos_token_id') if pad is None else pad
    pad = pad[0] if isinstance(pad, list) else pad
    head = weights.pop('lm_head.weight', None)
    E = weights.get('model.embed_tokens.weight')
    if E is None:
        raise InputError(f'{where}: the weights have no model.embed_tokens.weight')
    if head is not None and not torch.equal(head, E):
        raise InputError(f'{where}: lm_head.weight differs from the embedding; only tied models are supported')
    config = MHFConfig(
        vocab_size=want('vocab_size') if 'model.hash_map' not in weights else len(weights['model.hash_map']),
        block_size=released.get('max_position_embeddings', 2048),
        num_layers=want('num_hidden_layers'),
        num_heads=want('num_attention_heads'),
        num_kv_heads=want('num_key_value_heads'),
        head_dim=released.get('head_dim') or want('hidden_size') // want('num_attention_heads'),
        hidden_size=want('hidden_size'),
        intermediate_size=want('intermediate_size'),
        num_hashes=released.get('num_hashes') or 0,
        num_buckets=released.get('num_buckets') or MHFConfig.num_buckets,
        num_lsh=released.get('num_lsh') or 0,
        bottleneck=released.get('bottle_neck_dim') or MHFConfig.bottleneck,
        rope_theta=released.get('rope_theta') or rope.get('rope_theta') or MHFConfig.rope_theta,
        norm_eps=released.get('rms_norm_eps', MHFConfig.norm_eps),
        pad_id=MHFConfig.pad_id if pad is None else pad,
        loss=released.get('trained_loss', 'product'),  # product is what the authors train with
    )
    state = {}
    for name, tensor in weights.items():
        prefix = next((p for p in RELEASED_NAMES if name.startswith(p)), None)
        if prefix is None:
            raise InputError(f'{where}: unknown tensor {name}')
        state[RELEASED_NAMES[prefix] + name[len(prefix) :]] = tensor.float() if tensor.is_floating_point() else tensor
    if config.num_hashes and 'signatures' not in state:
        raise InputError(f'{where}: num_hashes={config.num_hashes} but no model.hash_map')
    table = state['signatures'].numpy() if config.num_hashes else None
    state['signatures'], state['is_token'] = map(torch.tensor, vocabulary(config, table))
    with torch.device('meta'):
        model = cls(config)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as e:
        raise InputError(f'{where}: weights and config.json disagree: {" ".join(str(e).split())[:300]}') from None
    return model


def open_model(out_dir='', released='', revision='', tokenizer=''):
    """
    (model, its tokenizer, what it is in words), from a checkpoint of train.py, the newest under the working folder if no
    out_dir is given, or from a released model. The tokenizer must be the one whose table is in the model. Raises InputError.
    """
    if released:
        model, trained_with = MHF.from_pretrained(released, revision or None), None
        which = f'{released}, a released model'
    else:
        if not out_dir:
            found = [p for depth in ('', '*/', '*/*/') for p in Path().glob(f'{depth}ckpt.pt')]
            if not found:
                raise InputError('no ckpt.pt under this folder; train one with: python train.py config/mhf_tiny.py')
            out_dir = max(found, key=lambda p: p.stat().st_mtime).parent
        model, ckpt = MHF.from_checkpoint(Path(out_dir) / 'ckpt.pt')
        trained_with, which = ckpt['data'], f'{Path(out_dir) / "ckpt.pt"}, step {ckpt["step"]}'
    tok, c = get_tokenizer(tokenizer or (trained_with['tokenizer'] if trained_with else 'mistral')), model.config
    if trained_with and tokenizer_fingerprint(tok) != trained_with['tokenizer_sha256']:
        raise InputError(
            f"tokenizer '{tok.name}' has another vocabulary than the '{trained_with['tokenizer']}' this model was trained with"
        )
    V = len(tok.tokens)
    if V > c.vocab_size:
        raise InputError(
            f"tokenizer '{tok.name}' has {V} tokens, the model {c.vocab_size}: not the one it was trained with"
        )
    if released and c.num_hashes > c.num_lsh + 1:  # coordinates that were neither LSH nor rehashed
        theirs = model.signatures[:V, c.num_lsh : -1].numpy()
        ours = signature_table(tok.tokens, c.num_hashes, c.num_buckets, 0, c.pad_id, unique=False)
        if (theirs[:, :1] != theirs).any() or (theirs[:, 0] != ours[:, 0]).any():  # not Single-ID
            ours = signature_table(tok.tokens, c.num_hashes, c.num_buckets, 0, c.pad_id)[:, c.num_lsh : -1]
            if (ours != theirs).any():
                raise InputError(
                    f"{released} has another signature table than tokenizer '{tok.name}' gives; name its own with --tokenizer"
                )
    return model, tok, which


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Logits (N, V) -> sampled ids (N,). Raises InputError for settings that mean nothing."""
    V = logits.shape[-1]
    if temperature < 0:
        raise InputError(f'temperature={temperature}: must be 0 (greedy) or above')
    if top_k is not None and not 1 <= top_k <= V:
        raise InputError(f'top_k={top_k}: must be from 1 to the vocabulary size {V}')
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f'top_p={top_p}: must be above 0 and at most 1')
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None:
        ordered, order = p.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0  # the token that reaches top_p stays
        p = torch.zeros_like(p).scatter(1, order, ordered)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


if __name__ == '__main__':
    from configurator import read_config

    print(f'{"config":<20}{"embedding interface":>21}{"decoder":>16}{"total":>16}')
    for path in sorted(Path(__file__).parent.glob('config/*.py')):
        settings = read_config(path)
        if 'init_from' in settings:  # goes on from a model of another config
            continue
        with torch.device('meta'):
            interface, decoder = MHF(
                MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__})
            ).num_params()
        print(f'{path.stem:<20}{interface:>21,}{decoder:>16,}{interface + decoder:>16,}')
