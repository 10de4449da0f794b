"""
What a config costs, measured on this machine beside what the machine can do; MultiHashFormer and Standard in turn.

    $ python bench.py config/mhf_tiny.py                                   # everything
    $ python bench.py config/mhf_100m.py --micro_batch_size=1 --parts=train,head
    $ python bench.py config/mhf_100m.py --parts=head --head_tokens=4096,8192,32768
    $ python bench.py config/mhf_100m.py --loss=exact --parts=profile     # where a step's time goes, by kernels
    $ python bench.py config/mhf_3b.py --plan --gpus=8 --gpu=H100          # does it fit, how many days, how much disk

The Standard model is the config's with num_hashes=0; a Standard config is compared with H4B16K. Peak memory is known on
a GPU alone; it is what a step needs beyond parameters and optimizer state. FLOPs are those of matrix products: 2 per
multiply and add, and causal attention counts half. A share of the GEMM rate is FLOPs per second over those of large
products in the same run.
"""

import gc
import re
import sys
from collections import Counter
from dataclasses import replace
from json import dumps

import torch
from tqdm import tqdm

from configurator import InputError, check_numbers, configure, did_you_mean
from mhf.checkpoint import build_on_meta
from mhf.cost import Machine, TrainingSteps, flops_per_token, random_model, random_tokens, step_memory
from mhf.device import pick_device, pick_dtype
from mhf.fused import FusedMHF
from mhf.generate import Writer
from mhf.tokenizers import get_tokenizer
from model import MHF, MHFConfig

# what to do
parts = 'train,head,generate,infer'  # also: profile
repeats = 3  # of each measurement; the median counts
head_tokens = '4096'  # tokens of the head alone, one number or several
json = False  # one JSON object instead of tables
# --plan, without allocating anything
plan = False
gpus = 8
gpu = 'H100'
mfu = 0.0  # the share of the data sheet's FLOP/s that training reaches; 0 is what an H100 reached with 100M
# the rest as in train.py
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
loss = 'exact'
device = None
dtype = None
compile = None
activation_checkpointing = False

config = configure(globals())

# memory in 10^9 bytes and dense bfloat16 in 10^12 FLOP/s, from the makers' data sheets
GPUS = {
    'A100': (80, 312),
    'A100-40GB': (40, 312),
    'H100': (80, 989),
    'H200': (141, 989),
    'B200': (180, 2250),
    'MI300X': (192, 1307),
    'L40S': (48, 362),
    'RTX4090': (24, 165),
}
# of an H100, compiled steps of 8 x 2,048 tokens of the 100M models: 109.3, 61.5 and 44.3 ms
MEASURED_MFU = dict(exact=0.18, product=0.32, Standard=0.29)
# what a kernel does, by its name, in a profile: products are cuBLAS's, what torch.compile has fused is Triton's
KERNELS = {
    'lookups': '^(lay_out|normalise|derive)_kernel',
    'attention': 'flash|fmha|attention',
    'products': 'gemm|nvjet|cutlass|xmma|mm$',
    'update': '(?i)adam|multi_tensor|foreach',
    'fused': '^triton_',
}
NEW_TOKENS = 64  # of generation
RESERVED = 2.0  # GB of a GPU for the CUDA context, its libraries and fragments


def say(line=''):
    if not json:
        print(line, flush=True)


def gigabytes(b):
    return '       ?' if b is None else f'{b / 1e9:5.2f} GB'


def variants_of(tok):
    """{name: MHFConfig} of what is compared: the config's sizes with either loss, and without hashes."""
    sizes = {k: config[k] for k in MHFConfig.__annotations__ if k in config}
    sizes |= dict(vocab_size=len(tok.tokens), pad_id=tok.pad)
    if not num_hashes:
        sizes |= dict(num_hashes=4, num_buckets=16384)
    exact = replace(MHFConfig(**sizes), loss='exact')
    return dict(exact=exact, product=replace(exact, loss='product'), Standard=replace(exact, num_hashes=0))


# -----------------------------------------------------------------------------
# plan: what would it take?


def print_plan(variants):
    """Prints whether a config fits the GPUs, how many days it takes, and how much disk -> the same as a dict."""
    variant = loss if num_hashes else 'Standard'
    c = variants[variant]
    sizes = possible_micro_batches()
    parameters = sum(build_on_meta(c).num_params())
    say(f'{parameters:,} parameters; {gpus} x {gpu}, {GPUS[gpu][0]} GB each')
    return dict(parameters=parameters) | plan_memory(c, parameters, sizes) | plan_time(c, variant) | plan_disk(c)


def possible_micro_batches():
    """
    The sizes of micro-batches that the GPUs can split a batch into. Raises InputError where micro_batch_size is not one
    of them.
    """
    sizes = [size for size in range(1, batch_size // gpus + 1) if batch_size % (size * gpus) == 0]
    if not sizes:
        raise InputError(f'batch_size={batch_size} is not a multiple of gpus={gpus}')
    if micro_batch_size not in sizes:
        product = f'micro_batch_size={micro_batch_size} x gpus={gpus}'
        largest = max(size for size in sizes if size <= micro_batch_size)
        raise InputError(f'batch_size={batch_size} is not a multiple of {product}; use --micro_batch_size={largest}')
    return sizes


def plan_memory(c, parameters, sizes):
    """Prints what a step needs of a GPU's memory, and which of the micro-batches' sizes fit -> the same as a dict."""
    memory, _ = GPUS[gpu]
    room = (memory - RESERVED) * 1e9

    def needs_of(size):
        accumulates = batch_size > size * gpus
        return step_memory(c, parameters, size, accumulates, activation_checkpointing, free=room / 2)

    needs = needs_of(micro_batch_size)
    total = sum(needs.values())
    fits = total <= room
    fitting = [size for size in sizes if sum(needs_of(size).values()) <= room]
    say(f'\nmemory per GPU, micro-batches of {micro_batch_size} x {block_size:,} tokens; compiled it is less')
    for name, bytes_needed in needs.items():
        say(f'  {name:<28}{bytes_needed / 1e9:8.2f} GB')
    verdict = 'fits' if fits else 'DOES NOT FIT'
    say(f'  {"total":<28}{total / 1e9:8.2f} GB of {room / 1e9:.1f}: {verdict}')
    say(f'largest micro_batch_size that fits: {max(fitting, default="none")}')
    if not activation_checkpointing:
        say('--activation_checkpointing needs less, and computes every block twice')
    return dict(memory=needs, total=total, fits=fits, largest_micro_batch_size=max(fitting, default=0))


def plan_time(c, variant):
    """Prints how fast the GPUs are, and how many days training takes -> the same as a dict."""
    _, peak = GPUS[gpu]
    flops = flops_per_token(c)
    share = mfu or MEASURED_MFU[variant]
    tokens = max_steps * batch_size * block_size
    speed = share * gpus * peak * 1e12 / flops
    days = tokens / speed / 86400
    measured = '--mfu' if mfu else 'what an H100 reached with 100M'
    say(f'\n{flops / 1e9:,.3g} GFLOP a token, {tokens / 1e9:,.4g} billion tokens')
    say(f'at {share:.0%} of {peak} TFLOP/s a GPU ({measured}): {speed:,.0f} tokens/s, {days:.3g} days')
    return dict(flops_per_token=flops, tokens_per_s=speed, days=days)


def plan_disk(c):
    """Prints how much disk either kind of bins takes -> the same as a dict."""
    tokens = max_steps * batch_size * block_size
    disk = {}
    if num_hashes:
        disk['signatures'] = tokens * 2 * num_hashes
    disk['ids'] = tokens * (2 if c.vocab_size <= 65536 else 4)
    for name, size in disk.items():
        say(f'{size / 1e9:,.4g} GB of disk for bins of {name}')
    return dict(disk_bytes=disk)


# -----------------------------------------------------------------------------
# the parts: each measures, prints, and returns what it prints as a dict or a list


def describe(machine, why_dtype):
    """Prints what the machine is and what it can do -> the same as a dict."""
    say(f'{machine.device} ({machine.name}), {machine.dtype_name}, torch {torch.__version__}')
    if why_dtype:
        say(f'dtype={machine.dtype_name}: {why_dtype}')
    say(f'GEMM {machine.gemm_size}^3: {machine.gemm_flops / 1e9:,.0f} GFLOP/s')
    numbers = dict(device=machine.device, dtype=machine.dtype_name)
    return numbers | dict(torch=torch.__version__, gemm_flops=machine.gemm_flops)


def compared(names, time_ratio, flop_ratio):
    """Prints how much more time and how many more FLOPs the first of two models takes -> the same as a dict."""
    ratio = time_ratio / flop_ratio
    say(f'{names}: time {time_ratio:.2f}, FLOPs {flop_ratio:.2f}, time over FLOPs {ratio:.2f}')
    return dict(time=time_ratio, flops=flop_ratio, time_over_flops=ratio)


def bench_train(machine, variants, tok):
    """Training steps: tokens a second, and peak memory beside what the formulas of mhf/cost.py say."""
    rows = TrainingSteps(machine, variants, tok, micro_batch_size, activation_checkpointing).costs()
    say(f'\ntraining step, {micro_batch_size} x {block_size:,} tokens, compile={machine.compiles}')
    say('                parameters  tokens/s  GFLOP/token  of GEMM rate  peak memory   planned')
    for name, row in rows.items():
        speed = f'{row["tokens_per_s"]:>10,.0f}{row["flops_per_token"] / 1e9:>13.3f}{row["gemm_share"]:>14.0%}'
        memory = f'{gigabytes(row["peak_memory"]):>13}{gigabytes(row["planned_memory"]):>10}'
        say(f'{name:<12}{row["parameters"]:>14,}{speed}{memory}')
    ratios = {}
    for a, b in (('exact', 'Standard'), ('product', 'Standard'), ('exact', 'product')):
        times = rows[a]['seconds'] / rows[b]['seconds']
        flops = rows[a]['flops_per_token'] / rows[b]['flops_per_token']
        ratios[f'{a}/{b}'] = compared(f'{a} / {b}', times, flops)
    return rows | ratios


def bench_profile(machine, variants, tok):
    """Where the time of a training step goes: the kernels that take most of it, by name and by what they do."""
    steps = TrainingSteps(machine, variants, tok, micro_batch_size, activation_checkpointing)
    activity = torch.profiler.ProfilerActivity.CUDA if machine.on_gpu else torch.profiler.ProfilerActivity.CPU
    rows = {}
    for name in tqdm(variants, leave=False, disable=machine.hide_bars):
        for _ in range(3):  # compiles, and fills caches
            seconds = steps.run(machine.timed, name)
        with torch.profiler.profile(activities=[activity]) as profiled:
            steps.run(machine.timed, name)
        kernels = []
        for event in profiled.key_averages():
            busy = (event.self_device_time_total if machine.on_gpu else event.self_cpu_time_total) / 1e6
            if busy:
                kernels.append((busy, event.count, event.key))
        kernels.sort(reverse=True)
        flops = flops_per_token(variants[name]) * micro_batch_size * block_size
        rows[name] = dict(seconds=seconds, bound=flops / machine.gemm_flops, kernels=kernels)
        print_profile(name, **rows[name])
    return rows


def print_profile(name, seconds, bound, kernels):
    """
    Prints a step's time by what its kernels do, and the 15 kernels that take most of it. kernels is [(seconds, calls,
    name)]; bound: the seconds that the step's products and attention would take at the rate of a large product.
    """
    by_purpose = Counter()
    for busy, _, kernel in kernels:
        by_purpose[purpose_of(kernel)] += busy
    busy = sum(by_purpose.values())
    say(f'\nprofile of a step, {name}: {seconds * 1e3:.1f} ms, {busy * 1e3:.1f} in kernels; bound {bound * 1e3:.1f}')
    say(', '.join(f'{purpose} {busy * 1e3:.1f} ms' for purpose, busy in by_purpose.most_common()))
    for busy, calls, kernel in kernels[:15]:
        say(f'{busy * 1e3:9.2f} ms {calls:6} x  {kernel[:90]}')


def purpose_of(kernel):
    """What a kernel of that name does: a key of KERNELS, or 'other'."""
    for purpose, pattern in KERNELS.items():
        if re.search(pattern, kernel):
            return purpose
    return 'other'


def bench_head(machine, variants, tok):
    """Forward and backward of the head alone: the fast one (lean), and the plain one by autograd."""
    say('\nhead alone, forward and backward; memory beyond parameters and their gradients')
    say(f'{"":<12}{"tokens":>8}{"lean us/token":>15}{"plain":>8}{"lean/plain":>12}{"lean memory":>13}{"plain":>10}')
    rows = []
    for name, c in variants.items():
        model = random_model(replace(c, num_layers=1), tok).to(machine.device)
        for tokens in map(int, head_tokens.split(',')):
            row = dict(loss=name, tokens=tokens, **measure_head(machine, model, tokens))
            rows.append(row)
            lean = row['lean']
            time = '-'
            ratio = '-'
            memory = 'no room'
            if plain := row.get('plain'):
                time = f'{plain["seconds"] / tokens * 1e6:.0f}'
                ratio = f'{lean["seconds"] / plain["seconds"]:.2f}'
                memory = gigabytes(plain['memory'])
            figures = f'{name:<12}{tokens:>8,}{lean["seconds"] / tokens * 1e6:>15.0f}{time:>8}{ratio:>12}'
            say(f'{figures}{gigabytes(lean["memory"]):>13}{memory:>10}')
    return rows


def measure_head(machine, model, tokens):
    """{'lean': {seconds, memory}, 'plain': the same}; 'plain' is left out where its logits find no room."""
    c = model.config
    h = torch.randn(tokens, c.hidden_size, device=machine.device, requires_grad=True)
    y = random_tokens(model, tokens)

    def run(measure, head_loss):
        def work():
            with machine.autocast():
                total = head_loss(model, h, y)
            (total / tokens).backward()

        measured = measure(work)
        model.zero_grad(set_to_none=True)
        h.grad = None
        return measured

    heads = dict(lean=FusedMHF.head_loss)
    logits = c.num_coordinates * c.buckets_per_coordinate
    if c.num_hashes and c.loss == 'exact':
        # also one of each token of the vocabulary
        logits += c.vocab_size
    if 24 * tokens * logits <= machine.free_memory():
        heads['plain'] = MHF.head_loss
    gradients = 4 * sum(t.numel() for t in (h, model.embed.weight, *model.hash_decoder.parameters()))
    rows = {}
    for name, (seconds, memory) in machine.in_turn(run, heads).items():
        rows[name] = dict(seconds=seconds, memory=None if memory is None else max(0, memory - gradients))
    return rows


def models_to_infer(machine, variants, tok):
    """The two models in the machine's precision, without autocast."""
    models = {name: random_model(variants[name], tok) for name in ('exact', 'Standard')}
    return {name: model.to(machine.device, machine.dtype).eval() for name, model in models.items()}


def bench_generate(machine, variants, tok):
    """Tokens one by one at batch 1, weights in the machine's precision."""
    models = models_to_infer(machine, variants, tok)
    # 256 MiB to read
    x = torch.ones(2**25, dtype=torch.int64, device=machine.device)
    bandwidth = x.nbytes / machine.best_of(x.sum)

    def run(measure, model):
        ids = torch.full((1, 16), len(tok.tokens) // 2, device=machine.device)
        stream = Writer(model).stream(ids, NEW_TOKENS + 1)
        next(stream)
        return measure(lambda: list(stream))

    measured = machine.in_turn(run, models)
    say(f'\ngeneration, batch 1, weights in {machine.dtype_name}; reading runs at {bandwidth / 1e9:.1f} GB/s')
    say(f'{"":<12}{"tokens/s":>10}{"GB of weights touched":>24}{"of bandwidth":>14}')
    rows = {}
    for name, model in models.items():
        E = model.embed.weight
        coordinates = model.config.num_coordinates
        # each soft embedding reads its part of E a second time; of the embedding itself only H rows are read
        numbers = sum(model.num_params()) + E.numel() // coordinates * (coordinates - 1)
        touched = numbers * E.element_size()
        seconds = measured[name][0] / NEW_TOKENS
        share = touched / seconds / bandwidth
        rows[name] = dict(tokens_per_s=1 / seconds, bytes=touched, bandwidth_share=share)
        say(f'{name:<12}{1 / seconds:>10.1f}{touched / 1e9:>24.3f}{share:>14.0%}')
    return dict(bandwidth=bandwidth, **rows)


def bench_infer(machine, variants, tok):
    """-log P(w) of every token of one sequence, normalised over the vocabulary."""
    models = models_to_infer(machine, variants, tok)

    @torch.no_grad()
    def run(measure, model):
        s = random_tokens(model, 1, block_size + 1)
        return measure(lambda: model(s[:, :-1], s[:, 1:]))

    seconds = {name: median for name, (median, _) in machine.in_turn(run, models).items()}
    say(f'\ninference: normalised P(w) of a sample of {block_size:,} tokens, weights in {machine.dtype_name}')
    say(f'MultiHashFormer {seconds["exact"] * 1e3:,.1f} ms, Standard {seconds["Standard"] * 1e3:,.1f} ms')
    flops = flops_per_token(variants['exact']) / flops_per_token(variants['Standard'])
    ratios = compared('exact / Standard', seconds['exact'] / seconds['Standard'], flops)
    # the paper's appendix
    published = 97.38 / 96.42
    say(f'published, 1B on one MI300X: 97.38 ms / 96.42 ms = {published:.2f}')
    return dict(seconds=seconds, **ratios, published_time_1B=published)


PARTS = dict(train=bench_train, head=bench_head, generate=bench_generate, infer=bench_infer, profile=bench_profile)


# -----------------------------------------------------------------------------
# the whole


def peak_of_process():
    """The most bytes that this process had so far; None where Python cannot tell, on Windows."""
    try:
        import resource
    except ImportError:
        return None
    # macOS counts bytes, Linux kilobytes
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_settings():
    """Raises InputError."""
    check_numbers(config, above_zero='repeats gpus batch_size micro_batch_size block_size max_steps')
    if not 0 <= mfu <= 1:
        raise InputError(f'mfu={mfu}: must be a share, from 0 to 1')
    for name in parts.split(','):
        if name not in PARTS:
            raise InputError(f"parts={parts}: '{name}' must be one of {', '.join(PARTS)}{did_you_mean(name, PARTS)}")
    if not all(tokens.isdecimal() and int(tokens) for tokens in head_tokens.split(',')):
        raise InputError(f'head_tokens={head_tokens}: must be numbers of tokens, separated by commas')
    if plan and gpu not in GPUS:
        raise InputError(f"gpu='{gpu}': must be one of {', '.join(GPUS)}{did_you_mean(gpu, GPUS)}")
    if compile not in (None, True, False):
        raise InputError(f'compile={compile}: must be True or False')


def measure_parts(variants, tok):
    """Measures and prints the parts that `parts` names -> a dict."""
    on_device = pick_device(device)
    name_of_dtype, why_dtype = pick_dtype(dtype, on_device)
    machine = Machine(on_device, name_of_dtype, compile, repeats, progress=not json)
    results = describe(machine, why_dtype)
    for name, bench_part in PARTS.items():
        if name in parts.split(','):
            results[name] = bench_part(machine, variants, tok)
            gc.collect()
            if machine.on_gpu:
                torch.cuda.empty_cache()
    results['peak_of_process'] = peak_of_process()
    say(f'\nthis process had {gigabytes(results["peak_of_process"])} at most')
    return results


def main():
    check_settings()
    tok = get_tokenizer(tokenizer)
    variants = variants_of(tok)
    results = dict(config=config)
    if plan:
        results['plan'] = print_plan(variants)
    else:
        results |= measure_parts(variants, tok)
    if json:
        print(dumps(results))


if __name__ == '__main__':
    main()
