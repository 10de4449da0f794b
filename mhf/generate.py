"""
Generation with a KV cache. model.MHF.generate is the plain version, which recomputes the context for every token.

    for tokens in Engine(model, temperature=0.8).stream(ids, max_new_tokens=200): ...
"""

from contextlib import nullcontext
from copy import copy

import torch
import torch.nn as nn

from mhf.head import allow_compilations, product_dtype, upcast
from mhf.runtime import capture
from model import sample_token


class Engine:
    """Generates text with a model; temperature, top_k and top_p as in model.sample_token."""

    def __init__(self, model, temperature=1.0, top_k=None, top_p=None):
        self.model = model
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.compiled_step = None  # set by compile()

    @torch.no_grad()
    def compile(self, N, length):
        """
        Compiles blocks, head and sampling for steps of N sequences of up to `length` tokens, with prompts. On a GPU,
        captures a step as a CUDA graph, whose replay replaces hundreds of kernel launches. All streams then share one
        cache: finish one before starting another.
        """
        # a multiple of 8, for attention on a GPU
        self.cache = self.new_cache(N, (length + 7) // 8 * 8)
        self.noise = self.new_noise(N)
        self.token = torch.zeros(N, dtype=torch.int64, device=self.cache.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        # blocks of the engine's own with the same parameters, because compile() changes a block; copy() shares _modules
        self.model = copy(self.model)
        self.model._modules = self.model._modules | dict(layers=nn.ModuleList(map(copy, self.model.layers)))
        allow_compilations(len(self.model.layers))
        for layer in self.model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.sample = torch.compile(self.sample, fullgraph=True, dynamic=False)
        self.compiled_step = self.step
        if self.cache.is_cuda:
            with torch.cuda.device(self.cache.device):  # a graph is captured on the current GPU
                self.compiled_step = capture(self.step)

    def step(self):
        """Replaces token by the next one of each sequence, and advances position. Reads and writes only attributes."""
        is_later = torch.arange(self.cache.shape[-2], device=self.cache.device) > self.position
        # float, added to the attention scores, because each block would convert a bool mask
        mask = torch.zeros_like(is_later, dtype=self.cache.dtype).masked_fill(is_later, -torch.inf)[None]
        token = self.next_token(self.token[:, None], self.cache, self.position, mask, self.noise)
        self.token.copy_(token)
        self.position.add_(1)
        return self.token

    def new_cache(self, N, length):
        """An empty KV cache for N sequences: (layers, 2, N, kv_heads, length, head_dim)."""
        c = self.model.config
        weight = self.model.embed.weight
        shape = (c.num_layers, 2, N, c.num_kv_heads, min(length, c.block_size), c.head_dim)
        # zeros, because attention multiplies masked values by 0, and 0 * NaN would be NaN
        return torch.zeros(shape, dtype=product_dtype(weight), device=weight.device)

    def new_noise(self, N):
        """Memory for the noise of sample_token (N, V); None if sampling is greedy."""
        V = self.model.config.vocab_size
        return upcast(self.model.embed.weight.new_ones(N, V)) if self.temperature else None

    def next_token(self, ids, cache, slots, mask, noise):
        """Token ids (N, T) -> next token ids (N,); the other arguments as in hidden_states and sample_token."""
        h = self.model.hidden_states(ids, cache, slots, positions=slots, mask=mask)
        return self.sample(h[:, -1], noise)

    def sample(self, h, noise):
        """h (N, d) -> next token ids (N,)."""
        return sample_token(self.model.next_token_logits(h), self.temperature, self.top_k, self.top_p, noise)

    @torch.no_grad()
    def stream(self, ids, max_new_tokens, generator=None):
        """
        Yields the token ids (N,) that follow ids (N, T), T >= 1, max_new_tokens times. Drops the older half of the
        context when it is full.
        """
        block_size = self.model.config.block_size
        ids = ids[:, -block_size:]
        if self.compiled_step:
            cache = self.cache
            noise = self.noise
        else:
            cache = self.new_cache(len(ids), ids.shape[1] + max_new_tokens)
            noise = self.new_noise(len(ids))
        cached = 0  # positions in the cache
        for _ in range(max_new_tokens):
            if noise is not None:
                noise.exponential_(generator=generator)
            if ids.shape[1] > block_size:
                ids = ids[:, -(block_size // 2 + 1) :]
                cached = 0
            T = ids.shape[1]
            if self.compiled_step and cached:
                token = self.compiled_step().clone()  # the next step overwrites it
            else:
                slots = torch.arange(cached, T, device=ids.device)
                # prompts have many lengths, so they are not compiled. With T slots, a whole prompt needs no mask
                with torch.compiler.set_stance('force_eager') if self.compiled_step else nullcontext():
                    token = self.next_token(ids[:, cached:], cache[..., :T, :], slots, None, noise)
                if self.compiled_step:  # continues from here
                    self.token.copy_(token)
                    self.position.fill_(T)
            cached = T
            ids = torch.cat([ids, token[:, None]], dim=1)
            yield token
