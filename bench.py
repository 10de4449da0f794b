"""
Benchmarks a config on this machine: MultiHashFormer with the exact and the product loss, and the Standard model.

    $ python bench.py config/mhf_tiny.py                                  # training steps, generation, P(w)
    $ python bench.py config/mhf_100m.py --tokenizer=tekken               # a vocabulary of 131,072
    $ python bench.py config/mhf_1b.py --benchmarks=train --variants=exact --micro_batch_size=4

Every field of model.MHFConfig is a setting: --num_buckets=7966. FLOPs are those of matrix products: 2 per multiply-add;
causal attention counts half. Peak memory, on a GPU only, excludes parameters and optimizer state. A Standard config is
compared with H4B16K. For the time of each kernel, run train.py under torch.profiler.
"""

import gc
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from configurator import configure
from mhf.data import build_table
from mhf.generate import Engine
from mhf.runtime import capture, init_distributed, pick_compile, pick_dtype
from mhf.tokenizers import get_tokenizer
from model import MHF, MHFConfig

benchmarks = 'train,infer'
variants = 'exact,product,Standard'
repeats = 3  # measurements; prints their median
tokenizer = 'mistral'
micro_batch_size = 8
device = None
dtype = None
compile = None
activation_checkpointing = False
# the fields of MHFConfig, except those that the tokenizer determines
globals().update({name: value for name, value in vars(MHFConfig()).items() if name not in ('vocab_size', 'pad_id')})

config = configure(globals())

NEW_TOKENS = 64  # per generated text, after the first one

# -----------------------------------------------------------------------------
# time and memory of a function


def timed(function):
    """Calls a function. Returns seconds."""
    synchronize = torch.get_device_module(device_type).synchronize
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def interleaved(functions, measure=timed):
    """
    {name: function} -> {name: median seconds}. The functions alternate, A B C A B C ...: one round to warm up, then
    `repeats` rounds. `measure` calls a function and returns seconds.
    """
    rounds = [{name: measure(function) for name, function in functions.items()} for _ in range(1 + repeats)]
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in functions}


# -----------------------------------------------------------------------------
# models


def variant_configs(c):
    """Returns {variant: MHFConfig} of the models to compare."""
    exact = replace(c, loss='exact', num_hashes=c.num_hashes or 4, num_buckets=c.num_buckets if c.num_hashes else 16384)
    standard = replace(c, loss='exact', num_hashes=0, ablation='')
    configs = dict(exact=exact, product=replace(exact, loss='product'), Standard=standard)
    return {name: configs[name] for name in variants.split(',')}


def random_model(c, tok):
    """Returns a model with random weights."""
    table = build_table(vars(c), tok.tokens, tok.pad) if c.num_hashes else None
    with torch.device(device):
        model = MHF(c, table)
    model.init_weights()
    return model


def random_ids(model, N, T):
    """Returns random token ids (N, T)."""
    return torch.randint(model.config.vocab_size, (N, T), device=device)


# -----------------------------------------------------------------------------
# training


def training_step(c, tok):
    """
    Returns a model, a function that trains it on one micro-batch, as train.py does: forward, backward, clipping and
    AdamW; and the peak memory of its second call in bytes, 0 if it is unknown.
    """
    model = random_model(c, tok)
    model.activation_checkpointing = activation_checkpointing
    if compile:
        model.compile(dynamic=False)  # otherwise sizes that differ between variants become symbolic
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = random_ids(model, micro_batch_size, c.block_size + 1)

    def compute_gradients():
        optimizer.zero_grad()
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'):
            mean_loss = model(ids[:, :-1], ids[:, 1:])
        mean_loss.backward()

    def step():
        compute_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    optimizer.zero_grad()  # frees the gradients, so that the peak includes them
    peak_memory = 0
    if device_type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak_memory = torch.cuda.max_memory_allocated() - before
        if compile:
            compute_gradients = capture(compute_gradients)
    return model, step, peak_memory


def bench_train(configs, tok):
    """Prints time and memory of a training step."""
    steps = {variant: training_step(c, tok) for variant, c in configs.items()}
    medians = interleaved({variant: step for variant, (_, step, _) in steps.items()})
    print(f'\ntraining step, {micro_batch_size} x {config["block_size"]:,} tokens, compile={compile}')
    print('                parameters        ms    tokens/s  MFLOP/token   GFLOP/s  peak memory')
    for variant, (model, _, peak_memory) in steps.items():
        speed = micro_batch_size * config['block_size'] / medians[variant]
        flops = model.estimate_flops()
        times = f'{medians[variant] * 1e3:>10,.1f}{speed:>12,.1f}'
        print(f'{variant:<10}{sum(model.num_params()):>16,}{times}{flops / 1e6:>13,.2f}', end='')
        print(f'{flops * speed / 1e9:>10,.0f}{peak_memory / 1e9:>10.2f} GB')


# -----------------------------------------------------------------------------
# inference


def time_generation(stream):
    """Times a function's generator of tokens from its second token on; the first needs the prompt. Returns seconds."""
    tokens = stream()
    next(tokens)
    return timed(partial(list, tokens))


@torch.no_grad()
def bench_infer(configs, tok):
    """
    Prints the speed of generation at batch size 1, without the prompt, and the latency of P(w), normalized over the
    vocabulary, for the tokens of one sequence.
    """
    # -log P(w) is the exact loss, so a variant's own loss does not matter
    distinct = {'MHF' if c.num_hashes else 'Standard': replace(c, loss='exact') for c in configs.values()}
    prompt = torch.full((1, 16), len(tok.tokens) // 2, device=device)
    generations = {}
    normalizations = {}
    for name, c in distinct.items():
        model = random_model(c, tok).to(getattr(torch, dtype)).eval()
        ids = random_ids(model, 1, c.block_size + 1)
        engine = Engine(model)
        if compile:
            engine.compile(1, prompt.shape[1] + 1 + NEW_TOKENS)
        generations[name] = partial(engine.stream, prompt, 1 + NEW_TOKENS)
        normalizations[name] = partial(model, ids[:, :-1], ids[:, 1:])
    generation_seconds = interleaved(generations, time_generation)
    normalization_seconds = interleaved(normalizations)
    print(f'\ninference, batch size 1, weights in {dtype}')
    print(f'          generation  P(w) of {config["block_size"]:,} tokens')
    for name, seconds in normalization_seconds.items():
        print(f'{name:<10}{NEW_TOKENS / generation_seconds[name]:.1f} tokens/s{seconds * 1e3:>12,.1f} ms')


BENCHMARKS = dict(train=bench_train, infer=bench_infer)

# -----------------------------------------------------------------------------
# main


if __name__ == '__main__':
    tok = get_tokenizer(tokenizer)
    fields = {name: config[name] for name in vars(MHFConfig()) if name in config}
    configs = variant_configs(MHFConfig(**fields | dict(vocab_size=len(tok.tokens), pad_id=tok.pad)))
    _, _, device = init_distributed(device)
    device_type = torch.device(device).type
    dtype = pick_dtype(dtype, device)
    compile = pick_compile(compile, device)
    name = torch.cuda.get_device_name(device) if device_type == 'cuda' else device
    print(f'{name}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads')
    for benchmark in benchmarks.split(','):
        torch.manual_seed(0)
        BENCHMARKS[benchmark](configs, tok)
        gc.collect()
