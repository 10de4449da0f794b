"""
Benchmarks a config on this machine: MultiHashFormer with the exact and the product loss, and the Standard model.

    $ python bench.py config/mhf_tiny.py                                  # training and inference
    $ python bench.py config/mhf_100m.py --benchmarks=profile             # the longest kernels of a training step
    $ python bench.py config/mhf_100m.py --variants=exact,Standard --json_output
    $ python bench.py config/mhf_3b.py --plan --gpus=8 --gpu=H100         # memory, days and disk, estimated

FLOPs are those of matrix products: 2 per multiply-add; causal attention counts half; a plan with
activation_checkpointing counts the second forward pass. A plan is for bfloat16 and for training all layers. The GEMM
share is the FLOP/s of a training step divided by that of large matrix products in the same run. Peak memory, on a GPU
only, excludes parameters and optimizer state. A Standard config is compared with H4B16K.
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

from configurator import InputError, check_numbers, configure, did_you_mean
from mhf.chunked import ChunkedMHF, build_on_meta, default_chunk_sizes, make_config
from mhf.data import build_table
from mhf.generate import Engine
from mhf.runtime import GPU_PEAKS, init_distributed, pick_compile, pick_dtype
from mhf.tokenizers import get_tokenizer

# what to measure
benchmarks = 'train,infer'  # also: profile
variants = 'exact,product,Standard'
repeats = 3  # measurements; prints their median
json_output = False  # print one JSON object; tables go to stderr
# estimates instead of measurements
plan = False
gpus = 8
gpu = 'H100'
# settings of train.py
tokenizer = 'mistral'
batch_size = 256
micro_batch_size = 8
block_size = 2048
max_steps = 20000
num_layers = 12
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768
intermediate_size = 2560
num_hashes = 4
num_buckets = 16384
num_lsh = 0
single_id = False
ablation = ''
loss = 'product'
device = None
dtype = None
compile = None
activation_checkpointing = False

config = configure(globals())

VARIANTS = ('exact', 'product', 'Standard')
GPU_MEMORY = {'A100': 80, 'H100': 80, 'H200': 141, 'B200': 180, 'MI300X': 192, 'L40S': 48, 'RTX 4090': 24}  # 10^9 bytes
RESERVED_MEMORY = 2  # 10^9 bytes per GPU for the CUDA context, libraries and fragmentation
# compiled steps of 8 x 2,048 tokens of the 100M models on an H100: 109.3, 61.5 and 44.3 ms
MEASURED_MFU = dict(exact=0.18, product=0.32, Standard=0.29)
NEW_TOKENS = 64  # per generated text

# -----------------------------------------------------------------------------
# plan: memory, days and disk in closed form


def step_memory(c, parameters, sequences, all_gradients):
    """
    Estimates the memory of a GPU in an eager bfloat16 training step with `sequences` per micro-batch. all_gradients:
    whether all gradients exist next to the activations, as with DDP or gradient accumulation. Returns {item: bytes}.

    The formulas count the tensors that autograd keeps. From 100M to 3B, with 1 or 8 sequences of 2,048 tokens, they are
    within 13 % of a trace of the allocations; the peak on an H100 agreed with the trace.
    """
    d = c.hidden_size
    width = c.num_heads * c.head_dim
    kv_width = c.num_kv_heads * c.head_dim
    rows = c.num_coordinates * c.buckets_per_coordinate  # of E
    tokens = sequences * c.block_size
    chunk = min(tokens, default_chunk_sizes('cuda', c).chunk)
    # per token of a block: norms and residual stream; queries and attention output; keys and values; MLP
    block = 18 * d + 8 * width + 8 * kv_width + 8 * c.intermediate_size
    kept = 4 * d if activation_checkpointing else block
    # per token: rows of E in both precisions and the gate's products
    encoder = 14 * c.num_hashes * d
    # autocast keeps the matrices in bfloat16
    matrices = 2 * c.num_layers * d * (2 * width + 2 * kv_width + 3 * c.intermediate_size)
    # per token of a chunk: bucket logits, probabilities and gradients; token logits of the exact loss
    logits = 10 * rows + (4 * c.vocab_size if c.num_hashes and c.loss == 'exact' else 0)
    # E in bfloat16 and its gradient; the chunk's logits; h and its gradient
    head = 6 * rows * d + chunk * logits + 8 * tokens * d
    return {
        'parameters': 4 * parameters,
        'AdamW': 8 * parameters,
        'gradients': 4 * parameters if all_gradients else 0,
        'activations': tokens * (c.num_layers * kept + encoder + 8 * d) + matrices,
        'max(head, recomputed block)': max(head, tokens * block if activation_checkpointing else 0),
    }


def plan_memory(c, parameters):
    """Prints the memory per GPU. Returns a dict."""
    if batch_size % (micro_batch_size * gpus):
        product = f'micro_batch_size={micro_batch_size} x gpus={gpus}'
        raise InputError(f'batch_size={batch_size} is not a multiple of {product}; change one of them')
    memory = step_memory(c, parameters, micro_batch_size, gpus > 1 or batch_size > micro_batch_size)
    total = sum(memory.values())
    print(f'\nmemory per GPU, eager, micro-batches of {micro_batch_size} x {block_size:,} tokens')
    for item, size in memory.items():
        print(f'  {item:<28}{size / 1e9:8.2f} GB')
    available = (GPU_MEMORY[gpu] - RESERVED_MEMORY) * 1e9
    verdict = 'fits' if total <= available else 'DOES NOT FIT; reduce micro_batch_size'
    print(f'  {"total":<28}{total / 1e9:8.2f} GB of {available / 1e9:.1f}: {verdict}')
    return dict(memory=memory, total=total)


def plan_training(c):
    """Prints memory, days and disk. Returns a dict."""
    model = build_on_meta(c)
    hash_params, layer_params = model.num_params()
    parameters = hash_params + layer_params
    print(f'{parameters:,} parameters; {gpus} x {gpu}, {GPU_MEMORY[gpu]} GB each')
    results = dict(parameters=parameters) | plan_memory(c, parameters)
    flops = model.estimate_flops()
    if activation_checkpointing:
        # the forward pass of the layers once more: 2 FLOPs per weight, and causal attention
        flops += 2 * layer_params + 2 * c.num_layers * c.num_heads * c.head_dim * (c.block_size + 1)
    tokens = max_steps * batch_size * block_size
    mfu = MEASURED_MFU[c.loss if c.num_hashes else 'Standard']
    speed = mfu * gpus * GPU_PEAKS[gpu] / flops
    days = tokens / speed / 86400
    print(f'\n{flops / 1e9:,.3g} GFLOP per token, {tokens / 1e9:,.4g} billion tokens')
    print(f'at {mfu:.0%} of {GPU_PEAKS[gpu] / 1e12:,.0f} TFLOP/s per GPU: {speed:,.0f} tokens/s, {days:.3g} days')
    disk = dict(ids=tokens * (2 if c.vocab_size <= 65536 else 4))
    if c.num_hashes:
        disk['signatures'] = tokens * 2 * c.num_hashes
    for data_format, size in disk.items():
        print(f'{size / 1e9:,.4g} GB of disk for bins of {data_format}')
    return results | dict(flops_per_token=flops, tokens_per_s=speed, days=days, disk_bytes=disk)


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


def benchmark_interleaved(functions):
    """
    {name: function} -> {name: median seconds}. The functions alternate, A B C A B C ...: one round to warm up, then
    `repeats` timed rounds.
    """
    rounds = [{name: timed(function) for name, function in functions.items()} for _ in range(1 + repeats)]
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
        model = ChunkedMHF(c, table)
    model.init_weights()
    return model


def random_signatures(model, *shape):
    """Returns signatures (*shape, H) of random ids in the upper half of the vocabulary, which has no special tokens."""
    V = model.config.vocab_size
    return model.signatures[torch.randint(V // 2, V, shape, device=device)]


# -----------------------------------------------------------------------------
# training


def training_step(c, tok):
    """Returns a model and a function that trains it on one micro-batch: forward, backward, clipping and AdamW."""
    model = random_model(c, tok)
    model.activation_checkpointing = activation_checkpointing
    if compile:
        model.compile(dynamic=False)  # otherwise sizes that differ between variants become symbolic
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    s = random_signatures(model, micro_batch_size, block_size + 1)

    def step():
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'):
            mean_loss = model(s[:, :-1], s[:, 1:])
        mean_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def bench_train(configs, tok):
    """Prints time and memory of a training step. Returns {variant: dict}."""
    steps = {variant: training_step(c, tok) for variant, c in configs.items()}
    medians = benchmark_interleaved({variant: step for variant, (_, step) in steps.items()})
    print(f'\ntraining step, {micro_batch_size} x {block_size:,} tokens, compile={compile}')
    print('                parameters        ms    tokens/s  GFLOP/token  GEMM share  peak memory')
    rows = {}
    for variant, (model, step) in steps.items():
        seconds = medians[variant]
        parameters = sum(model.num_params())
        flops = model.estimate_flops()
        speed = micro_batch_size * block_size / seconds
        share = flops * speed / gemm_flops
        memory = peak_memory(step)
        rows[variant] = dict(parameters=parameters, seconds=seconds, tokens_per_s=speed, flops_per_token=flops)
        rows[variant] |= dict(gemm_share=share, peak_memory=memory)
        shown = 'unknown' if memory is None else f'{memory / 1e9:.2f} GB'
        times = f'{variant:<10}{parameters:>16,}{seconds * 1e3:>10,.1f}{speed:>12,.0f}'
        print(f'{times}{flops / 1e9:>13.3f}{share:>12.0%}{shown:>13}')
    return rows


def bench_profile(configs, tok):
    """Prints the longest kernels of a training step. Returns {variant: dict}."""
    on_gpu = device_type == 'cuda'
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    rows = {}
    for variant, c in configs.items():
        model, step = training_step(c, tok)
        seconds = [timed(step) for _ in range(3)][-1]  # the first compile and warm up
        with torch.profiler.profile(activities=[activity]) as profiled:
            timed(step)
        bound = model.estimate_flops() * micro_batch_size * block_size / gemm_flops
        rows[variant] = dict(seconds=seconds, bound=bound)
        print(f'\nprofile, {variant}: {seconds * 1e3:.1f} ms; {bound * 1e3:.1f} at the speed of large matrix products')
        sort_by = 'self_device_time_total' if on_gpu else 'self_cpu_time_total'
        print(profiled.key_averages().table(sort_by=sort_by, row_limit=15))
    return rows


# -----------------------------------------------------------------------------
# inference


@torch.no_grad()
def bench_infer(configs, tok):
    """
    Prints the speed of generation at batch size 1, and the latency of P(w), normalized over the vocabulary, for the
    tokens of one sequence. Returns {'MHF' and 'Standard': dict}.
    """
    # -log P(w) is the exact loss, so a variant's own loss does not matter
    distinct = {'MHF' if c.num_hashes else 'Standard': replace(c, loss='exact') for c in configs.values()}
    prompt = torch.full((1, 16), len(tok.tokens) // 2, device=device)
    generations = {}
    normalizations = {}
    for name, c in distinct.items():
        model = random_model(c, tok).to(getattr(torch, dtype)).eval()
        s = random_signatures(model, 1, block_size + 1)
        engine = Engine(model)
        if compile:
            engine.compile(1, prompt.shape[1] + NEW_TOKENS)
        generations[name] = lambda engine=engine: list(engine.stream(prompt, NEW_TOKENS))
        normalizations[name] = partial(model, s[:, :-1], s[:, 1:])
    generation_seconds = benchmark_interleaved(generations)
    normalization_seconds = benchmark_interleaved(normalizations)
    print(f'\ninference, batch size 1, weights in {dtype}')
    print(f'          generation  P(w) of {block_size:,} tokens')
    rows = {}
    for name, seconds in normalization_seconds.items():
        speed = NEW_TOKENS / generation_seconds[name]
        rows[name] = dict(tokens_per_s=speed, seconds=seconds)
        print(f'{name:<10}{speed:.1f} tokens/s{seconds * 1e3:>12,.1f} ms')
    return rows


BENCHMARKS = dict(train=bench_train, profile=bench_profile, infer=bench_infer)

# -----------------------------------------------------------------------------
# main


def check_settings():
    check_numbers(config, 'repeats gpus batch_size micro_batch_size block_size max_steps', low=1)
    check_numbers(config, 'num_hashes')
    for setting, names in dict(benchmarks=BENCHMARKS, variants=VARIANTS, gpu=GPU_MEMORY).items():
        chosen = {gpu} if setting == 'gpu' else set(config[setting].split(','))
        for name in chosen.difference(names):
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
    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        if plan:
            results = dict(plan=plan_training(c))
        else:
            _, _, device = init_distributed(device)
            device_type = torch.device(device).type
            dtype = pick_dtype(dtype, device)
            compile = pick_compile(compile, device)
            gemm_flops = measure_gemm()
            results = run_benchmarks(variant_configs(c), tok)
    if json_output:
        print(json.dumps(dict(config=config) | results))
