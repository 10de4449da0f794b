"""
Text from a model, token by token. The plain twin is model.MHF.generate, which reads the whole context for every token.

    for tokens in Writer(model, temperature=0.8).stream(ids, max_new_tokens=200): ...

A Writer keeps the keys and values of what was read, reads prompts of different lengths at once, and can capture the
step from one token to the next in a CUDA graph.
"""

import torch

from model import sample_token, upcast


class Writer:
    """
    Writes text with a model; temperature, top_k and top_p as in model.sample_token. Sampling is from P(w), normalised
    over the vocabulary.
    """

    def __init__(self, model, temperature=1.0, top_k=None, top_p=None):
        self.model = model
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        # of compile
        self.graph = None
        self.cache = None

    def compile(self, N, length):
        """
        Makes one graph of the step from a token to the next, for N sequences of up to `length` tokens, prompts
        included. CUDA captures it and replays it without launching 700 kernels. Streams then share one cache: finish
        one before the next begins.
        """
        self.cache = self.new_cache(N, length)
        # without it a graph that writes to its arguments is not captured
        torch._dynamo.mark_static_address(self.cache)
        self.graph = torch.compile(self.next_token, mode='reduce-overhead', fullgraph=True, dynamic=False)

    def new_cache(self, N, length):
        """Room for the keys and values of N sequences: (layers, 2, N, kv_heads, length, head_dim)."""
        c = self.model.config
        weight = self.model.embed.weight
        device_type = weight.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
        shape = (c.num_layers, 2, N, c.num_kv_heads, min(length, c.block_size), c.head_dim)
        # zeros, since what a mask hides is multiplied by 0
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    def next_token(self, ids, cache, positions, mask, noise):
        """Token ids (N, T), what hidden_states and sample_token need besides -> the next token (N,)."""
        h = self.model.hidden_states(self.model.signatures[ids], cache, positions=positions, mask=mask)[:, -1]
        logits = self.model.next_token_logits(h)
        return sample_token(logits, self.temperature, self.top_k, self.top_p, noise)

    @torch.no_grad()
    def stream(self, ids, max_new_tokens, generator=None, lengths=None):
        """
        Token ids (N, T), T >= 1, int64: yields the next ids (N,), max_new_tokens times. When the context is full its
        older half is dropped. lengths (N,): row n is its last lengths[n] ids; the ids before them are padding, which
        nothing attends to.
        """
        block_size = self.model.config.block_size
        ids = ids[:, -block_size:]
        cache = self.new_cache(len(ids), ids.shape[1] + max_new_tokens) if self.cache is None else self.cache
        noise = self.new_noise(len(ids))
        position = None  # of the last token in the cache, (1,); None before the context was read
        first = None  # where each padded row begins, (N, 1, 1, 1); rope knows distances alone, so positions stay
        for made in range(max_new_tokens):
            if noise is not None:
                noise.exponential_(generator=generator)
            if ids.shape[1] > block_size:
                ids = ids[:, -(block_size // 2 + 1) :]
                position = None
            T = ids.shape[1]
            if position is None:
                mask = None
                if lengths is not None:
                    first = (T - made - lengths).clamp(min=0)[:, None, None, None]
                    mask = self.mask_of_context(T, first)
                token = self.next_token(ids, cache[..., :T, :], None, mask, noise)
                position = torch.full((1,), T - 1, device=ids.device)
            else:
                position += 1
                # a graph needs the same shapes every time; without one, only what is there is read
                seen = cache if self.graph else cache[..., :T, :]
                token = self.step(token, seen, position, first, noise)
            ids = torch.cat([ids, token[:, None]], dim=1)
            yield token

    def step(self, token, cache, position, first, noise):
        """The token (N,) at `position` (1,) -> the next one (N,). first: where each row of `stream` begins, or None."""
        mask = None
        if self.graph or first is not None:
            there = torch.arange(cache.shape[-2], device=token.device)
            mask = there[None] <= position
            if first is not None:
                mask = mask & (there >= first)
        step = self.graph or self.next_token
        # what a captured graph returns is overwritten by its next replay
        return step(token[:, None], cache, position, mask, noise).clone()

    def mask_of_context(self, T, first):
        """What each of T tokens attends to, (N, 1, T, T) bool, where row n begins at first[n]."""
        there = torch.arange(T, device=first.device)
        here = there[:, None]
        # padding attends to itself: a fully masked row would be NaN
        return (there >= first) & (there <= here) | (there == here)

    def new_noise(self, N):
        """Room for the noise that sample_token divides by, (N, V); None where nothing is drawn."""
        if not self.temperature:
            return None
        return upcast(self.model.embed.weight.new_empty(N, self.model.config.vocab_size))
