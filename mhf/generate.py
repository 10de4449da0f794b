"""
Generation with a KV cache. model.MHF.generate is the plain version, which recomputes the context for every token.

    for tokens in Engine(model, temperature=0.8).stream(ids, max_new_tokens=200): ...

An Engine accepts prompts of different lengths and can run each decoding step as a CUDA graph.
"""

import torch

from model import sample_token, upcast


class Engine:
    """Generates text with a model; temperature, top_k and top_p as in model.sample_token."""

    def __init__(self, model, temperature=1.0, top_k=None, top_p=None):
        self.model = model
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        # set by compile()
        self.compiled_step = None
        self.cache = None

    def compile(self, N, length):
        """
        Compiles a step for N sequences of up to `length` tokens, including prompts. CUDA captures it as one graph,
        whose replay replaces 700 kernel launches. All streams then share one cache: finish one before starting another.
        """
        self.cache = self.new_cache(N, length)
        # without this, torch.compile captures no CUDA graph of a step that changes its inputs
        torch._dynamo.mark_static_address(self.cache)
        self.compiled_step = torch.compile(self.next_token, mode='reduce-overhead', fullgraph=True, dynamic=False)

    def new_cache(self, N, length):
        """An empty KV cache for N sequences: (layers, 2, N, kv_heads, length, head_dim)."""
        c = self.model.config
        weight = self.model.embed.weight
        device_type = weight.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        shape = (c.num_layers, 2, N, c.num_kv_heads, min(length, c.block_size), c.head_dim)
        # zeros, because attention multiplies masked values by 0, and 0 * NaN would be NaN
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    def next_token(self, ids, cache, positions, mask, noise):
        """Token ids (N, T) -> next token ids (N,); the other arguments as in hidden_states and sample_token."""
        h = self.model.hidden_states(self.model.signatures[ids], cache, positions=positions, mask=mask)[:, -1]
        logits = self.model.next_token_logits(h)
        return sample_token(logits, self.temperature, self.top_k, self.top_p, noise)

    @torch.no_grad()
    def stream(self, ids, max_new_tokens, generator=None, lengths=None):
        """
        Yields the next token ids (N,), max_new_tokens times. Drops the older half of the context when it is full.

        Args:
            ids: (N, T) int64, T >= 1
            lengths: (N,); the prompt of row n is its last lengths[n] ids, after padding
        """
        block_size = self.model.config.block_size
        ids = ids[:, -block_size:]
        cache = self.new_cache(len(ids), ids.shape[1] + max_new_tokens) if self.cache is None else self.cache
        noise = None
        if self.temperature:
            noise = upcast(self.model.embed.weight.new_empty(len(ids), self.model.config.vocab_size))
        positions = None  # those of the last step; None: the cache is empty
        start = None  # (N, 1, 1, 1), where each padded row starts; RoPE is relative, so positions need no shift
        for step in range(max_new_tokens):
            if noise is not None:
                noise.exponential_(generator=generator)
            if ids.shape[1] > block_size:
                ids = ids[:, -(block_size // 2 + 1) :]
                positions = None
            T = ids.shape[1]
            if positions is None:
                positions = torch.arange(T, device=ids.device)
                if lengths is not None:
                    start = (T - step - lengths).clamp(min=0)[:, None, None, None]
                mask = None if start is None else context_mask(positions, T, start)
                token = self.next_token(ids, cache[..., :T, :], positions, mask, noise)
            else:
                positions = positions[-1:] + 1
                # a compiled step needs the tensor of compile(); otherwise read only the filled part
                filled = cache if self.compiled_step else cache[..., :T, :]
                masked = self.compiled_step or start is not None
                mask = context_mask(positions, filled.shape[-2], start) if masked else None
                next_token = self.compiled_step or self.next_token
                # a copy, because the next replay of a CUDA graph overwrites its outputs
                token = next_token(token[:, None], filled, positions, mask, noise).clone()
            ids = torch.cat([ids, token[:, None]], dim=1)
            yield token


def context_mask(positions, length, start):
    """
    The positions below `length` that each of `positions` (T,) attends to, bool: (T, length), or with start (N, 1, 1, 1)
    (N, 1, T, length). Row n starts at start[n].
    """
    key_pos = torch.arange(length, device=positions.device)
    query_pos = positions[:, None]
    mask = key_pos <= query_pos
    if start is None:
        return mask
    # padding attends to itself, because a fully masked row would be NaN
    return mask & (key_pos >= start) | (key_pos == query_pos)
