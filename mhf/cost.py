"""What a training step needs, by formulas: FLOPs and bytes. `python bench.py CONFIG --plan` prints them."""

import math
import os

from configurator import InputError
from mhf.fast import cpu_chunk, gpu_chunk


def machine_memory():
    """Bytes of memory that this machine has; infinite where Python cannot tell, on Windows."""
    if not hasattr(os, 'sysconf'):
        return math.inf
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def flops_per_token(c):
    """
    FLOPs of matrix products that the training of a MHFConfig's model takes for a token, 2 per multiply and add, causal
    attention half. What is computed twice, or is a product only to move numbers, does not count.
    """
    d = c.hidden_size
    width = c.num_heads * c.head_dim
    layer = 2 * d * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    attention = 2 * width * (c.block_size + 1)
    forward = c.num_layers * (layer + attention) + 2 * c.coordinates * c.buckets * d
    if c.num_hashes:
        encoder = c.num_hashes * 2 * c.bottleneck * (d + 1) + 2 * d * d
        soft_embedding_and_mixer = 2 * c.num_buckets * d + 2 * 3 * d * c.bottleneck
        mixers = 0 if c.ablation == 'no_cascade' else c.num_hashes - 1
        forward += encoder + mixers * soft_embedding_and_mixer
    return 3 * forward


def step_memory(c, parameters, sequences, accumulates, checkpointing=False, free=None):
    """
    Bytes that a step of a MHFConfig's model needs, by what takes them -> dict. Products are in bfloat16, nothing is
    compiled. sequences: of a micro-batch; accumulates: whether an update has several; free: the GPU's free bytes,
    None on a CPU.

    The formulas count what autograd keeps. Of 100M to 3B parameters, with 1 or 8 sequences of 2,048 tokens, they are
    within 13 % of a trace that an H100's peaks met (LOG.md).
    """
    d = c.hidden_size
    width = c.num_heads * c.head_dim
    keys = c.num_kv_heads * c.head_dim
    tokens = sequences * c.block_size
    # norms and the residual stream; queries and attention's result; keys and values; the MLP's four tensors
    block = 18 * d + 8 * width + 8 * keys + 8 * c.intermediate_size
    # the rows of E in both precisions, the gate's products
    encoder = 14 * c.num_hashes * d
    kept = 4 * d if checkpointing else block
    # autocast keeps the matrices in bfloat16
    matrices = 2 * c.num_layers * d * (2 * width + 2 * keys + 3 * c.intermediate_size)
    # bucket logits, probabilities and gradients of a chunk; the token logits that a GPU's exact loss keeps
    logits = 10 * c.coordinates * c.buckets
    if c.num_hashes and c.loss == 'exact' and free is not None:
        logits += 4 * c.vocab_size
    if free is None:
        chunk = cpu_chunk(c.coordinates, c.buckets)
    else:
        chunk = gpu_chunk(c.coordinates, c.buckets, c.vocab_size, free)
    chunk = min(tokens, chunk)
    # E in bfloat16 and its gradient; h and its gradient
    head = 6 * c.coordinates * c.buckets * d + chunk * logits + 8 * tokens * d
    return {
        'parameters': 4 * parameters,
        'AdamW': 8 * parameters,
        # without accumulation they come as the activations go
        'gradients': 4 * parameters if accumulates else 0,
        'activations': tokens * (c.num_layers * kept + encoder + 8 * d) + matrices,
        'head, or a block': max(head, tokens * block * checkpointing),
    }


def check_memory(model, device, micro_batch_size, accumulation, checkpointing):
    """Raises InputError where a training step of this CPU's processes needs more memory than the machine has."""
    if device != 'cpu':
        return
    parameters = sum(model.num_params())
    needs = step_memory(model.config, parameters, micro_batch_size, accumulation > 1, checkpointing)
    processes = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    need = processes * sum(needs.values())
    if need > machine_memory():
        has = f'a step needs {need / 1e9:,.1f} GB, this machine has {machine_memory() / 1e9:,.1f}'
        raise InputError(f'micro_batch_size={micro_batch_size}: {has}; use a smaller one')
