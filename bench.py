"""
Benchmarks a config on this machine: MultiHashFormer with the exact and the product loss, and the Standard model.

    $ python bench.py config/mhf_tiny.py                                  # training and inference
    $ python bench.py config/mhf_100m.py --benchmarks=train,infer --tokenizer=tekken    # a vocabulary of 131,072
    $ python bench.py config/mhf_1b.py --benchmarks=train --variants=exact --micro_batch_size=4
    $ python bench.py config/mhf_100m.py --benchmarks=profile             # the longest kernels of a training step
    $ python bench.py config/mhf_100m.py --benchmarks=head                # the sums over the vocabulary

Every field of model.MHFConfig is a setting: --num_buckets=7966. FLOPs are those of matrix products: 2 per multiply-add;
causal attention counts half. The GEMM share is the FLOP/s of a training step divided by that of large matrix products
in the same run. Peak memory, on a GPU only, excludes parameters and optimizer state. A Standard config is compared with
H4B16K.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from configurator import check_numbers, configure, did_you_mean
from mhf import head
from mhf.checkpoint import make_config
from mhf.data import build_table
from mhf.errors import InputError
from mhf.generate import Engine
from mhf.runtime import capture, init_distributed, pick_compile, pick_dtype
from mhf.tokenizers import get_tokenizer
from model import MHF, MHFConfig

benchmarks = 'train,infer'  # also: profile, head
variants = 'exact,product,Standard'
repeats = 3  # measurements; prints their median
json_output = False  # print one JSON object; tables go to stderr
tokenizer = 'mistral'
micro_batch_size = 8
device = None
dtype = None
compile = None
activation_checkpointing = False
# the fields of MHFConfig, except those that the tokenizer determines
globals().update({name: value for name, value in vars(MHFConfig()).items() if name not in ('vocab_size', 'pad_id')})

config = configure(globals())

VARIANTS = ('exact', 'product', 'Standard')
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


def benchmark_interleaved(functions, measure=timed):
    """
    {name: function} -> {name: median seconds}. The functions alternate, A B C A B C ...: one round to warm up, then
    `repeats` rounds. `measure` calls a function and returns seconds.
    """
    rounds = [{name: measure(function) for name, function in functions.items()} for _ in range(1 + repeats)]
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in functions}


def peak_memory(function):
    """Calls a function. Returns the peak of the GPU memory that it allocates, in bytes; None on another device."""
    if device_type != 'cuda':
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def measure_gemm():
    """Returns the FLOP/s of large matrix products."""
    size = 8192 if device_type == 'cuda' else 2048
    calls = 20 if device_type == 'cuda' else 1  # per measurement; a GPU raises its clock under load
    x = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    seconds = [timed(lambda: [x @ x for _ in range(calls)]) for _ in range(9)]
    return calls * 2 * size**3 / min(seconds[1:])


# -----------------------------------------------------------------------------
# models


def variant_configs(c):
    """Returns {variant: MHFConfig} of the models to compare."""
    exact = replace(c, loss='exact', num_hashes=c.num_hashes or 4, num_buckets=c.num_buckets if c.num_hashes else 16384)
    standard = replace(c, loss='exact', num_hashes=0, ablation='')
    configs = dict(exact=exact, product=replace(exact, loss='product'), Standard=standard)
    return {variant: configs[variant] for variant in variants.split(',')}


def random_model(c, tok):
    """Returns a model with random weights."""
    table = build_table(vars(c), tok.tokens, tok.pad) if c.num_hashes else None
    with torch.device(device):
        model = MHF(c, table)
    model.init_weights()
    return model


def random_signatures(model, *shape):
    """Returns signatures (*shape, H) of random token ids."""
    used_ids = model.token_mask.nonzero()[:, 0]
    return model.signatures[used_ids[torch.randint(len(used_ids), shape, device=device)]]


# -----------------------------------------------------------------------------
# training


def training_step(c, tok):
    """
    Returns a model, a function that trains it on one micro-batch, as train.py does: forward, backward, clipping and
    AdamW; its first call's seconds and the peak memory of the second.
    """
    model = random_model(c, tok)
    model.activation_checkpointing = activation_checkpointing
    if compile:
        model.compile(dynamic=False)  # otherwise sizes that differ between variants become symbolic
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    s = random_signatures(model, micro_batch_size, c.block_size + 1)

    def compute_gradients():
        optimizer.zero_grad()
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'):
            mean_loss = model(s[:, :-1], s[:, 1:])
        mean_loss.backward()

    def step():
        compute_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    first_seconds = timed(step)
    optimizer.zero_grad()  # frees the gradients, so that the peak includes them
    memory = peak_memory(step)
    if compile and device_type == 'cuda':
        compute_gradients = capture(compute_gradients)
    return model, step, first_seconds, memory


def bench_train(configs, tok):
    """Prints time and memory of a training step. Returns {variant: dict}."""
    steps = {variant: training_step(c, tok) for variant, c in configs.items()}
    medians = benchmark_interleaved({variant: step for variant, (_, step, *_) in steps.items()})
    block_size = config['block_size']
    print(f'\ntraining step, {micro_batch_size} x {block_size:,} tokens, compile={compile}')
    print('                parameters        ms    tokens/s  GFLOP/token  GEMM share  peak memory  first step')
    rows = {}
    for variant, (model, _, first_seconds, memory) in steps.items():
        seconds = medians[variant]
        parameters = sum(model.num_params())
        flops = model.estimate_flops()
        speed = micro_batch_size * block_size / seconds
        share = flops * speed / gemm_flops
        rows[variant] = dict(parameters=parameters, seconds=seconds, tokens_per_s=speed, flops_per_token=flops)
        rows[variant] |= dict(gemm_share=share, peak_memory=memory, first_seconds=first_seconds)
        shown = 'unknown' if memory is None else f'{memory / 1e9:.2f} GB'
        times = f'{variant:<10}{parameters:>16,}{seconds * 1e3:>10,.1f}{speed:>12,.0f}'
        print(f'{times}{flops / 1e9:>13.3f}{share:>12.0%}{shown:>13}{first_seconds:>10.1f} s')
    return rows


def bench_profile(configs, tok):
    """Prints the longest kernels of a training step. Returns {variant: dict}."""
    on_gpu = device_type == 'cuda'
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    rows = {}
    for variant, c in configs.items():
        model, step, *_ = training_step(c, tok)
        seconds = [timed(step) for _ in range(3)][-1]  # the first compile and warm up
        with torch.profiler.profile(activities=[activity]) as profiled:
            timed(step)
        bound = model.estimate_flops() * micro_batch_size * c.block_size / gemm_flops
        rows[variant] = dict(seconds=seconds, bound=bound)
        print(f'\nprofile, {variant}: {seconds * 1e3:.1f} ms; {bound * 1e3:.1f} at the speed of large matrix products')
        sort_by = 'self_device_time_total' if on_gpu else 'self_cpu_time_total'
        print(profiled.key_averages().table(sort_by=sort_by, row_limit=15))
    return rows


# -----------------------------------------------------------------------------
# inference


def eager_loss(model, s):
    """The loss of signatures s (N, T + 1, H), with compiled blocks as without."""
    with torch.compiler.set_stance('force_eager'):
        return model(s[:, :-1], s[:, 1:])


def time_generation(stream):
    """Times a function's generator of tokens from its second token on; the first needs the prompt. Returns seconds."""
    tokens = stream()
    next(tokens)
    return timed(partial(list, tokens))


@torch.no_grad()
def bench_infer(configs, tok):
    """
    Prints the speed of generation at batch size 1, without the prompt, and the latency of P(w), normalized over the
    vocabulary, for the tokens of one sequence. Returns {'MHF' and 'Standard': dict}.
    """
    # -log P(w) is the exact loss, so a variant's own loss does not matter
    distinct = {'MHF' if c.num_hashes else 'Standard': replace(c, loss='exact') for c in configs.values()}
    prompt = torch.full((1, 16), len(tok.tokens) // 2, device=device)
    generations = {}
    normalizations = {}
    for name, c in distinct.items():
        model = random_model(c, tok).to(getattr(torch, dtype)).eval()
        s = random_signatures(model, 1, c.block_size + 1)
        engine = Engine(model)
        if compile:
            seconds = timed(partial(engine.compile, 1, prompt.shape[1] + 1 + NEW_TOKENS))
            print(f'{name}: a step of generation compiles in {seconds:.1f} s')
        generations[name] = partial(engine.stream, prompt, 1 + NEW_TOKENS)
        normalizations[name] = partial(eager_loss, model, s)
    generation_seconds = benchmark_interleaved(generations, time_generation)
    normalization_seconds = benchmark_interleaved(normalizations)
    print(f'\ninference, batch size 1, weights in {dtype}')
    print(f'          generation  P(w) of {config["block_size"]:,} tokens')
    rows = {}
    for name, seconds in normalization_seconds.items():
        speed = NEW_TOKENS / generation_seconds[name]
        rows[name] = dict(tokens_per_s=speed, seconds=seconds)
        print(f'{name:<10}{speed:.1f} tokens/s{seconds * 1e3:>12,.1f} ms')
    return rows


# -----------------------------------------------------------------------------
# sums over the vocabulary


def bench_head(configs, tok):
    """Prints the time of -log P(y) for one chunk, with and without its gradient. Returns {name: seconds}."""
    c = next((c for c in configs.values() if c.num_hashes), None)
    if c is None:
        raise InputError('benchmarks=head: needs a MultiHashFormer; add exact to variants')
    index = list(random_model(c, tok).index.tensors())
    n = head.chunk_size(device_type, c)
    o = [torch.randn(n, c.num_buckets, device=device, dtype=getattr(torch, dtype)) for _ in range(c.num_hashes)]
    y = torch.zeros(n, c.num_hashes, dtype=torch.int64, device=device)
    ways = dict(columns=head.in_columns)
    if head.has_kernels(o[0].device):
        ways = dict(kernels=head.fast_negative_log_likelihood) | ways
    functions = {}
    for way, function in ways.items():
        for gradient in (True, False):
            name = f'{way}, {"-log P and gradient" if gradient else "-log P"}'
            functions[name] = partial(function, o, y, index if way == 'kernels' else head.Index(*index), gradient)
    medians = benchmark_interleaved(functions)
    print(f'\n-log P, {n:,} positions, H={c.num_hashes}, B={c.num_buckets:,}, V={c.vocab_size:,}')
    for name, seconds in medians.items():
        print(f'{name:<36}{seconds * 1e3:>10.2f} ms')
    return medians


BENCHMARKS = dict(train=bench_train, profile=bench_profile, infer=bench_infer, head=bench_head)

# -----------------------------------------------------------------------------
# main


def check_settings():
    check_numbers(config, 'repeats micro_batch_size block_size', low=1)
    check_numbers(config, 'num_hashes')
    for setting, names in dict(benchmarks=BENCHMARKS, variants=VARIANTS).items():
        for name in set(config[setting].split(',')).difference(names):
            near = did_you_mean(name, names)
            raise InputError(f"{setting}={config[setting]}: '{name}' must be one of {', '.join(names)}{near}")


def run_benchmarks(configs, tok):
    """Prints the device and runs the benchmarks. Returns a dict."""
    name = torch.cuda.get_device_name(device) if device_type == 'cuda' else device
    threads = torch.get_num_threads()
    print(f'{name}, {dtype}, torch {torch.__version__}, {threads} CPU threads; GEMM {gemm_flops / 1e9:,.0f} GFLOP/s')
    results = dict(device=name, dtype=dtype, torch=torch.__version__, threads=threads, gemm_flops=gemm_flops)
    for benchmark in benchmarks.split(','):
        torch.manual_seed(0)
        results[benchmark] = BENCHMARKS[benchmark](configs, tok)
        gc.collect()
    return results


if __name__ == '__main__':
    check_settings()
    tok = get_tokenizer(tokenizer)
    c = make_config(config, vocab_size=len(tok.tokens), pad_id=tok.pad)
    _, _, device = init_distributed(device)
    device_type = torch.device(device).type
    dtype = pick_dtype(dtype, device)
    compile = pick_compile(compile, device)
    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        gemm_flops = measure_gemm()
        results = run_benchmarks(variant_configs(c), tok)
    if json_output:
        print(json.dumps(dict(config=config) | results))
