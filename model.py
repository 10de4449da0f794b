"""
MultiHashFormer (arXiv 2606.28057): instead of its own embedding row, each token has a signature of H hash ids. Hash id
i, also called coordinate i, is the index of a bucket, 0 to B - 1.

    signature (H ids) -> Hash Encoder -> vector -> Qwen3-style decoder -> h -> Hash Decoder -> H x B bucket logits

The Standard model (one embedding row per token, tied head) is the same class with num_hashes=0: one coordinate, V
buckets and the token id as signature, without gate and cascade.

This file is the method in plain PyTorch; hashing.py computes the signatures. Training, evaluation and generation run
the functions of this file: mhf/chunked.py calls them for a chunk of positions at a time, and mhf/generate.py with a KV
cache. An edit of this file therefore trains, validates and samples as written. Only token_logits and log_normalizer
have a faster second version (mhf/chunked.py), which the first call of a model compares with this file.
"""

from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ABLATIONS = ('', 'mean_gate', 'hard_embeddings', 'no_cascade')


@dataclass
class MHFConfig:
    """The defaults are the paper's 100M H4B16K."""

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
    num_lsh: int = 0  # LSH coordinates of the signature table (hashing.py)
    single_id: bool = False  # the signature table has one hash on all coordinates
    bottleneck: int = 64  # z, the hidden size of the gate and of the mixers
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    encoder_init: str = 'normal'  # initialization of W_s (HashEncoder.out): normal (std 0.02) | orthogonal
    embedding_scale: float = 1.0  # MHF: multiplies the initial W_s; Standard: multiplies each embedding row in forward
    pad_id: int = 2  # the token whose signature is all zero
    loss: str = 'product'  # product: the paper's sum over coordinates | exact: -log P(w)
    # mean_gate: alpha_i = 1/H; hard_embeddings: e_i is the row of the likeliest bucket; no_cascade: every c_i is h
    ablation: str = ''

    def __post_init__(self):
        choices = dict(loss=('exact', 'product'), ablation=ABLATIONS, encoder_init=('normal', 'orthogonal'))
        for key, known in choices.items():
            value = getattr(self, key)
            if value not in known:
                raise ValueError(f"{key}='{value}': must be one of {', '.join(filter(None, known))}")
        if self.ablation and not self.num_hashes:
            raise ValueError(f"ablation='{self.ablation}' needs a MultiHashFormer: set num_hashes above 0")
        may_be_zero = ('num_hashes', 'num_lsh', 'pad_id', 'single_id')
        for key, value in asdict(self).items():
            if key not in may_be_zero and not isinstance(value, str) and not value > 0:
                raise ValueError(f'{key}={value}: must be above 0')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}')
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim}: rotary embeddings need an even number')

    @property
    def num_coordinates(self):
        """Ids per signature: H, or 1 for the Standard model."""
        return self.num_hashes or 1

    @property
    def buckets_per_coordinate(self):
        """Embedding rows per coordinate: B, or V for the Standard model."""
        return self.num_buckets if self.num_hashes else self.vocab_size


def upcast(x):
    """Converts to float32, unless x is already float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = upcast(x)
        return F.rms_norm(y, self.weight.shape, self.weight.to(y.dtype), self.eps).to(x.dtype)


def rope_angles(positions, config, dtype):
    """cos and sin of the rotation angles of `positions` (..., T): two tensors (..., 1, T, head_dim/2)."""
    k = torch.arange(0, config.head_dim, 2, dtype=dtype, device=positions.device)
    frequency = config.rope_theta ** (-k / config.head_dim)
    angle = positions.to(dtype)[..., None, :, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """RoPE: rotates each pair (x[j], x[j + head_dim/2]) by its angle; x (N, heads, T, head_dim)."""
    cos, sin = rope
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention without biases; queries and keys are normalized per head, then rotated."""

    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        N, T, _ = x.shape
        q = self.q_proj(x).view(N, T, -1, self.head_dim)
        k = self.k_proj(x).view(N, T, -1, self.head_dim)
        v = self.v_proj(x).view(N, T, -1, self.head_dim).transpose(1, 2)  # (N, kv_heads, T, head_dim)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)  # (N, heads, T, head_dim)
        k = rotate(self.k_norm(k).transpose(1, 2), rope)  # (N, kv_heads, T, head_dim)
        if cache is not None:  # two tensors (N, kv_heads, length, head_dim)
            k = cache[0].index_copy_(2, positions, k)
            v = cache[1].index_copy_(2, positions, v)
        if T == 1:  # one query, so no causal mask: fold the query heads of a group into positions, which is faster
            y = F.scaled_dot_product_attention(q.view(N, k.shape[1], -1, self.head_dim), k, v, mask)
            return self.o_proj(y.reshape(N, 1, -1))
        if mask is not None:  # PyTorch has no fast attention kernel for masks and grouped heads together
            groups = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=mask is None)
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

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


# -----------------------------------------------------------------------------
# Hash Encoder and Hash Decoder (section 3 of the paper)


class HashEncoder(nn.Module):
    """
    Gated sum of the H bucket vectors k_i = E[i*B + s_i] of a signature:

        a_i = W2 SiLU(W1 k_i + b1) + b2      alpha = softmax over i of a_i      e = W_s (sum_i alpha_i k_i) + b_s
    """

    def __init__(self, c):
        super().__init__()
        d = c.hidden_size
        z = c.bottleneck
        mean_gate = c.ablation == 'mean_gate'  # alpha_i = 1/H
        self.gate = None if mean_gate else nn.Sequential(nn.Linear(d, z), nn.SiLU(), nn.Linear(z, 1))
        self.out = nn.Linear(d, d)  # W_s, b_s

    def forward(self, k):  # (N, T, H, d) -> (N, T, d)
        if self.gate is None:
            return self.out(k.mean(dim=2))
        alpha = upcast(self.gate(k)).softmax(dim=2)  # (N, T, H, 1), the gate's softmax
        return self.out((alpha * k).sum(dim=2).to(k.dtype))


class HashDecoder(nn.ModuleList):
    """
    Computes the bucket logits o_i of each coordinate. Mixer i updates c_i by the expected row e_i:

        c_0 = h      o_i = E_i c_i      e_i = E_i^T softmax(o_i)
        c_{i+1} = c_i + mixer_i([c_i ; e_i]),      mixer_i(v) = Wup_i SiLU(Wdn_i v + bdn_i) + bup_i
    """

    def __init__(self, c):
        d = c.hidden_size
        z = c.bottleneck
        mixers = range(c.num_coordinates - 1 if c.ablation != 'no_cascade' else 0)
        super().__init__(nn.Sequential(nn.Linear(2 * d, z), nn.SiLU(), nn.Linear(z, d)) for _ in mixers)
        self.hard = c.ablation == 'hard_embeddings'

    def forward(self, h, E):  # (n, d), H of (B, d) -> list of H bucket logits (n, B)
        c = h
        o = []
        for i, E_i in enumerate(E):
            o.append(c.to(E_i.dtype) @ E_i.T)
            if i < len(self):
                e = E_i[o[i].argmax(-1)] if self.hard else o[i].softmax(-1) @ E_i  # (n, d)
                c = c + self[i](torch.cat([c, e.to(c.dtype)], dim=-1))  # this is c_{i+1}
        return o


# -----------------------------------------------------------------------------
# the paper's loss and the signature table


def product_loss(o, y):
    """The paper's loss: o, list of H (n, B), targets y (n, H) -> sum_i -log p_i[y_i] (n,) with p_i = softmax(o_i)."""
    return sum(F.cross_entropy(upcast(o_i), y_i, reduction='none') for o_i, y_i in zip(o, y.T, strict=True))


def validate_table(c, table=None, unused_ids=()):
    """
    Returns signatures (V, H) int64 and token_mask (V,) bool; without a table, signatures are zero until a checkpoint is
    loaded. Raises ValueError if the table does not fit.
    """
    shape = (c.vocab_size, c.num_coordinates)
    if c.num_hashes == 0:
        table = np.arange(c.vocab_size)[:, None]
    table = np.zeros(shape, np.int64) if table is None else np.asarray(table, np.int64)
    if table.shape != shape or table.max() >= c.buckets_per_coordinate:
        expected = f'vocab_size={shape[0]}, num_hashes={shape[1]} and num_buckets={c.buckets_per_coordinate}'
        raise ValueError(f'the table has shape {table.shape} and largest bucket {table.max()}, the model {expected}')
    token_mask = table.any(axis=1) | (c.num_hashes == 0)
    token_mask[c.pad_id] = True  # although its signature is all zero
    token_mask[list(unused_ids)] = False
    return table, token_mask


# -----------------------------------------------------------------------------
# the model


class MHF(nn.Module):
    """
    MultiHashFormer, or the Standard model. Call init_weights() to train from scratch.

    Args:
        table: (V, H) integers, the signature of every token id (hashing.signature_table); ignored by the Standard model
        unused_ids: ids without a token, such as the gaps of a tiktoken encoding; their probability is 0. Ids other than
            pad_id with an all-zero row of the table are unused, too.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__()
        self.config = c = config
        rows = c.num_coordinates * c.buckets_per_coordinate
        # nn.Embedding draws normal numbers; drawing on the meta device imports torch's compiler (1.4 s)
        on_meta = torch.get_default_device().type == 'meta'
        E = torch.empty(rows, c.hidden_size) if on_meta else None
        self.embed = nn.Embedding(rows, c.hidden_size, _weight=E)  # E: coordinate i's bucket b is row i*B + b
        self.encoder = HashEncoder(c) if c.num_hashes else None
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hash_decoder = HashDecoder(c)  # of the Standard model: no mixers, o_0 = E h, the tied head
        self.activation_checkpointing = False  # recompute the blocks in backward instead of storing their activations
        self.set_vocabulary(*validate_table(c, table, unused_ids))

    @torch.no_grad()
    def init_weights(self):
        """
        Initializes for training from scratch: weights N(0, 0.02), biases 0; W_s is N(0, 0.02) or orthogonal, times
        config.embedding_scale.
        """
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)
        if self.encoder:
            W = self.encoder.out.weight  # W_s
            if self.config.encoder_init == 'orthogonal':
                # on the CPU, because not every device has the QR decomposition
                W.copy_(nn.init.orthogonal_(torch.empty(W.shape, device='cpu')))
            W.mul_(self.config.embedding_scale)

    @property
    def head_weight(self):
        """
        The Hash Decoder's E (H*B, d), tied to the Hash Encoder's. To untie the head, create a second nn.Embedding of
        this size in __init__ and return its weight here. init_weights then draws it from N(0, 0.02), and the optimizer
        uses weight decay but not embedding_lr_mult for it. The released format and expand.py do not support an untied
        head, and estimate_flops would count the Hash Encoder's E as a matrix.
        """
        return self.embed.weight

    def head_matrices(self):
        """The Hash Decoder's E_i (B, d), H of them."""
        return self.head_weight.chunk(self.config.num_coordinates)

    def num_params(self):
        """Counts the parameters of E, Hash Encoder and Hash Decoder, and those of the layers and the final norm."""
        decoder = sum(p.numel() for m in (self.layers, self.norm) for p in m.parameters())
        return sum(p.numel() for p in self.parameters()) - decoder, decoder

    def estimate_flops(self):
        """
        Training FLOPs per token at full context: 2 per multiply-add of the matrix products, x 3 for forward and
        backward. Causal attention counts half. Recomputation, table lookups and the gradients of frozen matrices do not
        count.
        """
        c = self.config
        matrices = {name: p.numel() for name, p in self.named_parameters() if p.dim() == 2}
        gate = sum(size for name, size in matrices.items() if name.startswith('encoder.gate.'))
        attention = c.num_layers * c.num_heads * c.head_dim * (c.block_size + 1)
        soft_embeddings = 0 if self.hash_decoder.hard else len(self.hash_decoder) * c.num_buckets * c.hidden_size
        # each matrix is applied once per token, the gate H times; E counts as the head
        multiply_adds = sum(matrices.values()) + (c.num_coordinates - 1) * gate + attention + soft_embeddings
        frozen = sum(p.numel() for p in self.parameters() if p.dim() == 2 and not p.requires_grad)
        return 3 * 2 * multiply_adds - 2 * frozen

    # ---- vocabulary

    def set_vocabulary(self, signatures, token_mask):
        """Registers the result of validate_table, (V, H) int64 and (V,) bool, as buffers of the state_dict."""
        device = self.embed.weight.device
        self.register_buffer('signatures', torch.tensor(signatures, device=device))
        self.register_buffer('token_mask', torch.tensor(token_mask, device=device))

    def replace_vocabulary(self, table, pad_id, unused_ids=()):
        """
        Replaces the table by that of another vocabulary, (V', H). The parameters of a MultiHashFormer do not change, so
        an optimizer stays valid. The E of a Standard model must have V' rows already (expand.py).
        """
        self.config = replace(self.config, vocab_size=len(table), pad_id=pad_id)
        self.set_vocabulary(*validate_table(self.config, table, unused_ids))

    # ---- signatures to loss

    def hidden_states(self, x, cache=None, positions=None, mask=None):
        """
        Signatures x (N, T, H) -> h (N, T, d), after the final norm.

        Args:
            cache: (layers, 2, N, kv_heads, length, head_dim); keys and values are stored at `positions`
            positions: (N, T), or (T,) with a cache; default 0 .. T - 1
            mask: bool, (N, 1, T, T), or (N, 1, T, length) with a cache: the positions that a position attends to; or
                float, added to the attention scores. Default: a position and all earlier ones, for which a cache must
                end at the last of `positions`
        """
        H = self.config.num_coordinates
        B = self.config.buckets_per_coordinate
        rows = x + torch.arange(0, H * B, B, device=x.device)
        k = F.embedding(rows, self.embed.weight)  # (N, T, H, d)
        # the residual stream keeps the precision of the parameters under autocast
        e = self.encoder(k).to(k.dtype) if self.encoder else k.squeeze(2) * self.config.embedding_scale
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                e = checkpoint(layer, e, rope, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                # keys and values apart, because compiled code would copy a tensor that two writes change
                e = layer(e, rope, mask, None if cache is None else cache[i].unbind(), positions)
        return self.norm(e)

    def forward(self, x, y):
        """
        Signatures x, y (N, T, H) -> mean of config.loss over all positions, in nats. For the Standard model both losses
        are the cross-entropy.
        """
        return self.head_loss(self.hidden_states(x).flatten(0, 1), y.flatten(0, 1)) / y[..., 0].numel()

    def head_loss(self, h, y):
        """h (n, d), target signatures y (n, H) -> sum of the loss over positions, in nats."""
        return self.loss_per_position(self.bucket_logits(h), y, self.config.loss).sum()

    @torch.no_grad()
    def token_losses(self, x, y, losses=('product', 'exact')):
        """Signatures x, y (N, T, H) -> a list with (N, T) for each named loss, in nats, float32 or better."""
        results = self.losses_per_position(self.hidden_states(x).flatten(0, 1), y.flatten(0, 1), losses)
        return [result.view(x.shape[:2]) for result in results]

    def losses_per_position(self, h, y, losses):
        """h (n, d), target signatures y (n, H) -> a list with (n,) for each named loss."""
        o = self.bucket_logits(h)
        return [self.loss_per_position(o, y, loss) for loss in losses]

    def bucket_logits(self, h):
        """h (n, d) -> list of H bucket logits o_i (n, B)."""
        return self.hash_decoder(h, self.head_matrices())

    def loss_per_position(self, o, y, loss):
        """Bucket logits o, list of H (n, B), targets y (n, H), 'product' or 'exact' -> (n,), float32 or better."""
        if not self.config.num_hashes:  # both losses are the cross-entropy
            return product_loss([self.token_logits(o)], y)
        if loss == 'product':
            return product_loss(o, y)
        target = sum(upcast(F.nll_loss(o_i, y_i, reduction='none')) for o_i, y_i in zip(o, y.T, strict=True))
        return self.log_normalizer(o) + target  # -log P(y); nll_loss is -o_i[y_i]

    # ---- probabilities and text

    def token_logits(self, o):
        """
        Bucket logits o, list of H (n, B) -> the logits of P(w), sum_i o_i[s_i(w)] (n, V), float32 or better, -inf for
        ids without a token. With log p_i in place of o_i, P(w) would be the same.
        """
        if not self.config.num_hashes:  # token w is bucket w
            return upcast(o[0]).masked_fill(~self.token_mask, -torch.inf)
        logits = sum(upcast(o_i)[:, s_i] for o_i, s_i in zip(o, self.signatures.T, strict=True))
        return logits.masked_fill(~self.token_mask, -torch.inf)

    def log_normalizer(self, o):
        """Bucket logits o, list of H (n, B) -> the logsumexp of the token logits (n,), which normalizes P(w)."""
        return self.token_logits(o).logsumexp(dim=1)

    @torch.no_grad()
    def next_token_logits(self, h):
        """h (n, d) -> token logits (n, V), float32 or better."""
        return self.token_logits(self.bucket_logits(h))

    @torch.no_grad()
    def predict(self, h, ids):
        """
        h (n, d), token ids (n,) -> three (n,): log P(id) in nats; whether id is the likeliest token, the first of
        several; and the highest P.
        """
        return self.predict_from_logits(self.bucket_logits(h), ids)

    def predict_from_logits(self, o, ids):
        """Bucket logits o, list of H (n, B), token ids (n,) -> the result of predict."""
        logits = self.token_logits(o)
        target = logits.gather(1, ids[:, None])[:, 0]
        top, likeliest = logits.max(dim=1)
        total = (logits - top[:, None]).exp_().sum(dim=1)
        return target - top - total.log(), likeliest == ids, 1 / total

    @torch.no_grad()
    def log_probs(self, ids):
        """Token ids (N, T) -> log P(next token) (N, T, V), float32 or better."""
        logits = self.next_token_logits(self.hidden_states(self.signatures[ids]).flatten(0, 1))
        return logits.log_softmax(-1).unflatten(0, ids.shape)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """
        Token ids (N, T) -> (N, T + max_new_tokens), sampled from P(w). Recomputes the complete context for every token.
        A full context is cut to its last block_size // 2 + 1 tokens.
        """
        T = ids.shape[1]
        start = max(0, T - self.config.block_size)
        for end in range(T, T + max_new_tokens):
            if end - start > self.config.block_size:
                start = end - (self.config.block_size // 2 + 1)
            logits = self.next_token_logits(self.hidden_states(self.signatures[ids[:, start:]])[:, -1])
            noise = torch.empty_like(logits).exponential_(generator=generator) if temperature else None
            token = sample_token(logits, temperature, top_k, top_p, noise)
            ids = torch.cat([ids, token[:, None]], dim=1)
        return ids


def check_sampling(V, temperature=1.0, top_k=None, top_p=None):
    """Raises ValueError if a setting of sample_token is out of range for a vocabulary of V token ids."""
    if not 0 <= temperature < 1e30:
        raise ValueError(f'temperature={temperature}: must be 0 (greedy) or above, and below 1e30')
    if top_k is not None and not (type(top_k) is int and 1 <= top_k <= V):
        raise ValueError(f'top_k={top_k}: must be an integer from 1 to the vocabulary size {V}')
    if top_p is not None and not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise ValueError(f'top_p={top_p}: must be a number above 0 and at most 1')


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, noise=None):
    """
    Samples one token id per row: logits (N, V) -> (N,).

    Args:
        temperature: 0 is greedy, and so are values below 1e-6
        top_k: sample among the k likeliest tokens
        top_p: sample among the fewest likeliest tokens whose total probability is at least top_p
        noise: (N, V), exponentially distributed; drawn if None
    Raises ValueError for settings out of range.
    """
    check_sampling(logits.shape[-1], temperature, top_k, top_p)
    if temperature < 1e-6:  # division would overflow
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        top = logits.topk(top_k)  # k tokens, also if more have the same logit
        logits = torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values)
    p = logits.softmax(-1)  # P(w)
    if top_p is not None:
        ordered, order = p.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # 0 for the likeliest token, which is kept even if top_p underflows to 0
        ordered = ordered.masked_fill((before >= top_p) & (before > 0), 0)
        p = torch.zeros_like(p).scatter(1, order, ordered)
    if noise is None:
        noise = torch.empty_like(p).exponential_()
    # with exponential noise, the argmax is w with probability p[w]; torch.multinomial would wait for the GPU
    return (p / noise).argmax(-1)
