"""
MultiHashFormer (arXiv 2606.28057): a token is a signature of H hash IDs instead of a row of an embedding matrix.

    signature (H ids) -> Hash Encoder -> vector -> Qwen3-style decoder -> h -> Hash Decoder -> H x B bucket logits

The Standard model (one embedding row per token, tied head) is the same class with num_hashes=0: it is the special
case of one coordinate, V buckets and the token id as signature, without gate and cascade.

Everything here is plain: it computes what the formulas say, and autograd makes the gradients. It trains (train.py
--plain), gives log P and generates text, slowly. mhf/fused.py has the same numbers fast, mhf/generate.py the same text;
tests hold each against this file.

    $ python model.py          # prints every config's parameter counts
"""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from configurator import InputError, did_you_mean, read_config

LOSSES = ('exact', 'product')
ABLATIONS = ('', 'mean_gate', 'hard_embeddings', 'no_cascade')
ENCODER_INITS = ('normal', 'orthogonal')


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
    encoder_init: str = 'normal'  # how Ws begins: normal (the paper's, deviation 0.02) | orthogonal
    # a token enters the residual stream so many times as large: Ws begins so, Standard's row is multiplied by it
    embedding_scale: float = 1.0
    pad_id: int = 2  # the token whose signature is all zero
    loss: str = 'exact'  # exact: -log P(w); product: the paper's sum over coordinates
    # mean_gate: alpha_i = 1/H; hard_embeddings: e_i is the likeliest bucket's row; no_cascade: every c_i is h
    ablation: str = ''

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise InputError(f"loss='{self.loss}': must be one of {', '.join(LOSSES)}{did_you_mean(self.loss, LOSSES)}")
        if self.ablation not in ABLATIONS or self.ablation and not self.num_hashes:
            known = f'must be one of {", ".join(ABLATIONS[1:])}, and num_hashes above 0'
            raise InputError(f"ablation='{self.ablation}': {known}{did_you_mean(self.ablation, ABLATIONS)}")
        if self.encoder_init not in ENCODER_INITS:
            known = f'must be one of {", ".join(ENCODER_INITS)}{did_you_mean(self.encoder_init, ENCODER_INITS)}'
            raise InputError(f"encoder_init='{self.encoder_init}': {known}")
        may_be_zero = 'num_hashes', 'num_lsh', 'pad_id'
        for key, least in asdict(self).items():
            if key not in may_be_zero and not isinstance(least, str) and not least > 0:
                raise InputError(f'{key}={least}: must be above 0')
        if self.num_heads % self.num_kv_heads:
            raise InputError(f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}')
        if self.head_dim % 2:
            raise InputError(f'head_dim={self.head_dim}: rotary embeddings need an even number')

    @property
    def num_coordinates(self):  # ids of a signature: H, or 1 for the Standard model
        return self.num_hashes or 1

    @property
    def buckets_per_coordinate(self):  # rows of the embedding per coordinate: B, or V for the Standard model
        return self.num_buckets if self.num_hashes else self.vocab_size


def upcast(x):
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

    def forward(self, x, rope, mask=None, cache=None, positions=None):
        N, T, _ = x.shape
        q = self.q_proj(x).view(N, T, -1, self.head_dim)
        k = self.k_proj(x).view(N, T, -1, self.head_dim)
        v = self.v_proj(x).view(N, T, -1, self.head_dim).transpose(1, 2)  # (N, kv_heads, T, head_dim)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)  # (N, heads, T, head_dim)
        k = rotate(self.k_norm(k).transpose(1, 2), rope)  # (N, kv_heads, T, head_dim)
        if cache is not None:  # (2, N, kv_heads, positions, head_dim)
            k, v = (kept.index_copy_(2, positions, new) for kept, new in zip(cache, (k, v), strict=True))
        if T == 1:  # a group's query heads are rows of their one key head
            y = F.scaled_dot_product_attention(q.view(N, k.shape[1], -1, self.head_dim), k, v, mask)
            return self.o_proj(y.reshape(N, 1, -1))
        if mask is not None:  # the fast kernels for masks have no groups
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
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
# the method, the paper's section 3: signature -> vector, and hidden state -> signature


class HashEncoder(nn.Module):
    """
    Gated sum of a signature's H bucket vectors k_i = E[i*B + s_i]:

        a_i = W2 SiLU(W1 k_i + b1) + b2      alpha = softmax over i of a_i      e = Ws (sum_i alpha_i k_i) + bs
    """

    def __init__(self, c):
        super().__init__()
        d = c.hidden_size
        z = c.bottleneck
        gated = c.ablation != 'mean_gate'
        self.gate = nn.Sequential(nn.Linear(d, z), nn.SiLU(), nn.Linear(z, 1)) if gated else None
        self.out = nn.Linear(d, d)

    @torch.no_grad()
    def begin(self, c):
        """
        Ws as training from scratch begins, once all weights are drawn. Drawn small, as the paper's, it makes a token
        enter the residual stream far below the deviation of E. An
        orthogonal Ws turns it away from the rows that the tied head compares it with.
        """
        if c.encoder_init == 'orthogonal':
            # drawn on the CPU, for not every device has the QR decomposition (pytorch/pytorch issue 141287)
            W = torch.empty(self.out.weight.shape, device='cpu')
            nn.init.orthogonal_(W)
            self.out.weight.copy_(W)
        self.out.weight.mul_(c.embedding_scale)

    def forward(self, k):  # (N, T, H, d) -> (N, T, d)
        if self.gate is None:
            return self.out(k.mean(dim=2))
        alpha = upcast(self.gate(k)).softmax(dim=2)  # (N, T, H, 1)
        return self.out((alpha * k).sum(dim=2).to(k.dtype))


class HashDecoder(nn.ModuleList):
    """
    A cascade of H - 1 mixers over E, which gives the bucket logits o_i of each coordinate.

        c_1 = h      o_i = E_i c_i      e_i = E_i^T softmax(o_i)
        c_{i+1} = c_i + Wup_i SiLU(Wdn_i [c_i ; e_i] + bdn_i) + bup_i
    """

    def __init__(self, c):
        d = c.hidden_size
        z = c.bottleneck
        mixers = range(c.num_coordinates - 1 if c.ablation != 'no_cascade' else 0)
        super().__init__(nn.Sequential(nn.Linear(2 * d, z), nn.SiLU(), nn.Linear(z, d)) for _ in mixers)
        self.num_coordinates = c.num_coordinates
        self.hard = c.ablation == 'hard_embeddings'

    def soft_embedding(self, o, E_i):  # (n, B), (B, d) -> (n, d)
        return E_i[o.argmax(-1)] if self.hard else o.softmax(-1) @ E_i

    def forward(self, h, E):  # (n, d), (H*B, d) -> list of H bucket logits (n, B)
        c = h
        o = []
        for i, E_i in enumerate(E.chunk(self.num_coordinates)):  # (B, d)
            o.append(c.to(E.dtype) @ E_i.T)
            if i < len(self):
                e = self.soft_embedding(o[i], E_i).to(c.dtype)
                c = c + self[i](torch.cat([c, e], dim=-1))  # c_{i+1}
        return o


# -----------------------------------------------------------------------------
# the losses of each token, (n,), in nats


def token_logits(o, signatures, token_mask):
    """
    Bucket logits o, list of H (n, B); signatures (V, H); token_mask (V,) bool -> token logits sum_i o_i[s_i(w)] (n, V),
    float32 or better, -inf for ids that are no token. Their softmax is P(w): the normalisers of the coordinates are the
    same for every w and cancel.
    """
    scores = sum(upcast(o_i)[:, s_i] for o_i, s_i in zip(o, signatures.T, strict=True))
    return scores.masked_fill(~token_mask, -torch.inf)


def product_loss(o, y):
    """The paper's: o, list of H (n, B), targets y (n, H) -> sum_i -log p_i[y_i], p_i = softmax(o_i)."""
    return sum(F.cross_entropy(upcast(o_i), y_i, reduction='none') for o_i, y_i in zip(o, y.T, strict=True))


def exact_loss(o, y, signatures, token_mask):
    """-log P(y) of the distribution that is sampled from. The logsumexp normalises P over the vocabulary."""
    target = sum(upcast(o_i.gather(1, y_i[:, None])) for o_i, y_i in zip(o, y.T, strict=True))
    return token_logits(o, signatures, token_mask).logsumexp(dim=1) - target[:, 0]


def validate_table(c, table=None, unused_ids=()):
    """(V, H) int64 signatures and (V,) bool, which ids are tokens. Raises InputError for another config's table."""
    shape = (c.vocab_size, c.num_coordinates)
    if c.num_hashes == 0:
        table = np.arange(c.vocab_size)[:, None]
    table = np.zeros(shape, np.int64) if table is None else np.asarray(table, np.int64)
    if table.shape != shape or table.max() >= c.buckets_per_coordinate:
        ours = f'vocab_size={shape[0]}, num_hashes={shape[1]} and num_buckets={c.buckets_per_coordinate}'
        raise InputError(f'the table has shape {table.shape} and largest bucket {table.max()}, the model {ours}')
    token_mask = table.any(axis=1) | (c.num_hashes == 0)
    token_mask[c.pad_id : c.pad_id + 1] = True
    token_mask[list(unused_ids)] = False
    return table, token_mask


class MHF(nn.Module):
    """
    table: (V, H) integer array, the signature of every token id (hashing.signature_table); not used by the Standard
    model.
    unused_ids: ids that are no token (holes of a tiktoken encoding); they get probability 0. All-zero rows other than
    pad_id's are unused_ids by definition.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__()
        self.config = c = config
        H = c.num_coordinates
        B = c.buckets_per_coordinate
        self.embed = nn.Embedding(H * B, c.hidden_size)  # E: coordinate i's bucket b is row i*B + b
        self.encoder = HashEncoder(c) if c.num_hashes else None
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hash_decoder = HashDecoder(c)  # the Standard model's has no mixer: it is a tied head
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)
        if self.encoder:
            self.encoder.begin(c)

        # keep only the inputs of the blocks, and compute the rest again in backward
        self.activation_checkpointing = False
        self.set_vocabulary(*validate_table(c, table, unused_ids))

    @property
    def head_weight(self):
        """
        E as the Hash Decoder reads it, (H*B, d): the embedding's, so the head is tied. To untie it, make a second
        nn.Embedding of this size in __init__, which draws it, and return its weight here. AdamW then treats it as any
        matrix. The released format (mhf/released.py) has no name for it, and expand.py does not grow it.
        """
        return self.embed.weight

    def num_params(self):
        """(embedding interface, decoder): E, hash encoder and decoder; the layers and the final norm. E counts once."""
        decoder = sum(p.numel() for m in (self.layers, self.norm) for p in m.parameters())
        return sum(p.numel() for p in self.parameters()) - decoder, decoder

    # ---- the vocabulary

    def set_vocabulary(self, signatures, token_mask):
        """Takes a table from validate_table: (V, H) int64 and (V,) bool, which the checkpoint keeps."""
        device = self.embed.weight.device
        self.register_buffer('signatures', torch.tensor(signatures, device=device))
        self.register_buffer('token_mask', torch.tensor(token_mask, device=device))

    def replace_vocabulary(self, table, pad_id, unused_ids=()):
        """
        Takes the table (V', H) of a larger, or of any other vocabulary: a MultiHashFormer gets no new parameter, its
        optimizer stays good, and a token whose row is the same keeps its signature. A Standard model must have been
        given its new rows of E before (expand.py).
        """
        self.config = replace(self.config, vocab_size=len(table), pad_id=pad_id)
        self.set_vocabulary(*validate_table(self.config, table, unused_ids))

    def embedding_rows(self, signatures):
        """Signatures (..., H) -> their rows of E (..., H)."""
        H = self.config.num_coordinates
        B = self.config.buckets_per_coordinate
        return signatures + torch.arange(0, H * B, B, device=signatures.device)

    # ---- signatures in, loss out

    def hidden_states(self, x, cache=None, states=None, positions=None, mask=None):
        """
        x (N, T, H) signatures -> h (N, T, d), after the final norm.

        states: a list that receives each block's input (N, T, d).
        positions (N, T) and mask (N, 1, T, T), bool, what each token attends to: both take the place of 0, 1, ... and
        the causal triangle.
        cache (layers, 2, N, kv_heads, length, head_dim): takes keys and values at positions (T,); all of it is attended
        to, or what the mask says.
        """
        k = F.embedding(self.embedding_rows(x), self.embed.weight)  # (N, T, H, d)
        # the residual stream stays in the parameters' precision, whatever autocast does to the encoder
        e = self.encoder(k).to(k.dtype) if self.encoder else k.squeeze(2) * self.config.embedding_scale
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for i, layer in enumerate(self.layers):
            if states is not None:
                states.append(e)
            if self.activation_checkpointing and torch.is_grad_enabled():
                e = checkpoint(layer, e, rope, use_reentrant=False)
            else:
                e = layer(e, rope, mask, None if cache is None else cache[i], positions)
        return self.norm(e)

    def forward(self, x, y):
        """
        Signatures x, y (N, T, H) -> the mean loss over all tokens, nats: -log P(y), or the paper's sum_i -log p_i[y_i]
        (config.loss); for Standard the ordinary cross-entropy. Raises InputError where there is no target.
        """
        if x.shape != y.shape or not y.numel():
            shapes = f'inputs {tuple(x.shape)} and targets {tuple(y.shape)}'
            raise InputError(f'{shapes}: both must be (N, T, H), none of them 0')
        return self.head_loss(self.hidden_states(x).flatten(0, 1), y.flatten(0, 1)) / y[..., 0].numel()

    def head_loss(self, h, y):
        """h (n, d), target signatures y (n, H) -> the sum over tokens of the loss, nats."""
        o = self.hash_decoder(h, self.head_weight)
        # Standard's one coordinate is its vocabulary: both losses are the same, but only the exact one leaves out unused_ids
        if self.config.loss == 'product' and self.config.num_hashes:
            return product_loss(o, y).sum()
        return exact_loss(o, y, self.signatures, self.token_mask).sum()

    @torch.no_grad()
    def token_losses(self, x, y):
        """Signatures x, y (N, T, H) -> two (N, T), nats, float32 or better: the paper's loss, and -log P(y)."""
        o = self.hash_decoder(self.hidden_states(x).flatten(0, 1), self.head_weight)
        exact = exact_loss(o, y.flatten(0, 1), self.signatures, self.token_mask)
        product = product_loss(o, y.flatten(0, 1)) if self.config.num_hashes else exact
        return product.view(x.shape[:2]), exact.view(x.shape[:2])

    # ---- probabilities, text

    @torch.no_grad()
    def bucket_logits(self, ids):
        """Token ids (N, T) -> bucket logits (N, T, H, B)."""
        o = self.hash_decoder(self.hidden_states(self.signatures[ids]).flatten(0, 1), self.head_weight)
        return torch.stack(o, dim=1).unflatten(0, ids.shape)

    @torch.no_grad()
    def next_token_logits(self, h):
        """h (n, d) -> token logits (n, V), float32 or better."""
        return token_logits(self.hash_decoder(h, self.head_weight), self.signatures, self.token_mask)

    @torch.no_grad()
    def log_probs(self, ids):
        """Token ids (N, T) -> log P(next token) (N, T, V), normalised over real tokens, float32 or better."""
        logits = self.next_token_logits(self.hidden_states(self.signatures[ids]).flatten(0, 1))
        return logits.log_softmax(-1).unflatten(0, ids.shape)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """
        Token ids (N, T) -> (N, T + max_new_tokens), sampled from P(w). Every token is computed from the whole context,
        whose older half is dropped when it is full.
        """
        T = ids.shape[1]
        begin = max(0, T - self.config.block_size)
        for end in range(T, T + max_new_tokens):
            if end - begin > self.config.block_size:
                begin = end - (self.config.block_size // 2 + 1)
            h = self.hidden_states(self.signatures[ids[:, begin:]])[:, -1]
            logits = self.next_token_logits(h)
            noise = torch.empty_like(logits).exponential_(generator=generator) if temperature else None
            token = sample_token(logits, temperature, top_k, top_p, noise)
            ids = torch.cat([ids, token[:, None]], dim=1)
        return ids


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, noise=None):
    """
    Logits (N, V) -> sampled ids (N,). temperature 0 is greedy; top_k keeps the k likeliest tokens, top_p the fewest
    whose probability reaches p. noise (N, V): of the exponential distribution; None draws it. Raises InputError for
    settings that mean nothing.
    """
    V = logits.shape[-1]
    if not temperature >= 0:
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
    # here sampling normalises P over the vocabulary, or a power of P
    p = logits.softmax(-1)
    if top_p is not None:
        ordered, order = p.sort(descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)  # the token that reaches top_p stays
        p = torch.zeros_like(p).scatter(1, order, ordered)
    # multinomial does the same, but a GPU would have to wait for its checks of p
    return (p / (torch.empty_like(p).exponential_() if noise is None else noise)).argmax(-1)


if __name__ == '__main__':
    if sys.argv[1:]:
        raise InputError(f'{sys.argv[1]}: model.py counts the parameters of config/*.py and has no settings')
    print(f'{"config":<20}{"embedding interface":>21}{"decoder":>16}{"total":>16}')
    for path in sorted(Path(__file__).parent.glob('config/*.py')):
        settings = read_config(path)
        if 'init_from' in settings:  # goes on from a model of another config
            continue
        fields = {name: value for name, value in settings.items() if name in MHFConfig.__annotations__}
        with torch.device('meta'):  # shapes without numbers
            interface, decoder = MHF(MHFConfig(**fields)).num_params()
        print(f'{path.stem:<20}{interface:>21,}{decoder:>16,}{interface + decoder:>16,}')
