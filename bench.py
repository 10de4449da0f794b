"""
What a config costs, measured on this machine beside what the machine can do; MultiHashFormer and Standard in turn.

    $ python bench.py config/mhf_tiny.py                                   # everything
    $ python bench.py config/mhf_100m.py --micro_batch_size=1 --parts=train,head
    $ python bench.py config/mhf_100m.py --parts=head --head_tokens=4096,8192,32768
    $ python bench.py config/mhf_100m.py --loss=exact --parts=profile     # where a step's time goes, by kernels
    $ python bench.py config/mhf_3b.py --plan --gpus=8 --gpu=H100          # does it fit, how many days, how much disk

The Standard model is the config's with num_hashes=0; a Standard config is compared with H4B16K. Peak memory, known on a
GPU, is what a step needs beyond parameters and optimizer state. FLOPs are those of matrix products (2 per multiply and
add, causal attention counts half); a share of the GEMM rate is FLOPs per second over those of large products in the
same run.
"""

import contextlib
import gc
import os
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import astuple, replace
from json import dumps

import torch
from tqdm import tqdm

from configurator import InputError, configure, did_you_mean
from hashing import signature_table
from mhf.checkpoint import without_weights
from mhf.cost import flops_per_token, step_memory
from mhf.device import pick_device, pick_dtype
from mhf.fast import FastMHF
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


def variants_of(tok):
    """{name: MHFConfig} of what is compared: the config's sizes, with either loss and without hashes."""
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
    kind = loss if num_hashes else 'Standard'
    c = variants[kind]
    memory, peak = GPUS[gpu]
    room = (memory - RESERVED) * 1e9
    candidates = [m for m in range(1, batch_size // gpus + 1) if batch_size % (m * gpus) == 0]
    if not candidates:
        raise InputError(f'batch_size={batch_size} is not a multiple of gpus={gpus}')
    if micro_batch_size not in candidates:
        product = f'micro_batch_size={micro_batch_size} x gpus={gpus}'
        largest = max(m for m in candidates if m <= micro_batch_size)
        raise InputError(f'batch_size={batch_size} is not a multiple of {product}; use --micro_batch_size={largest}')
    parameters = sum(without_weights(c).num_params())

    def need(sequences):
        accumulates = batch_size > sequences * gpus
        return step_memory(c, parameters, sequences, accumulates, activation_checkpointing, free=room / 2)

    needs = need(micro_batch_size)
    total = sum(needs.values())
    fitting = [m for m in candidates if sum(need(m).values()) <= room]
    largest = max(fitting, default='none')
    say(f'{parameters:,} parameters; {gpus} x {gpu}, {memory} GB each')
    say(f'\nmemory per GPU, micro-batches of {micro_batch_size} x {block_size:,} tokens; compiled it is less')
    for name, size in needs.items():
        say(f'  {name:<28}{size / 1e9:8.2f} GB')
    verdict = 'fits' if total <= room else 'DOES NOT FIT'
    say(f'  {"total":<28}{total / 1e9:8.2f} GB of {room / 1e9:.1f}: {verdict}')
    say(f'largest micro_batch_size that fits: {largest}')
    if not activation_checkpointing:
        say('--activation_checkpointing needs less, and computes every block twice')

    flops = flops_per_token(c)
    share = mfu or MEASURED_MFU[kind]
    tokens = max_steps * batch_size * block_size
    speed = share * gpus * peak * 1e12 / flops
    days = tokens / speed / 86400
    measured = '--mfu' if mfu else 'what an H100 reached with 100M'
    say(f'\n{flops / 1e9:,.3g} GFLOP a token, {tokens / 1e9:,.4g} billion tokens')
    say(f'at {share:.0%} of {peak} TFLOP/s a GPU ({measured}): {speed:,.0f} tokens/s, {days:.3g} days')
    disk = {'ids': tokens * (2 if c.vocab_size <= 65536 else 4)}
    if num_hashes:
        disk = {'signatures': tokens * 2 * num_hashes} | disk
    for name, size in disk.items():
        say(f'{size / 1e9:,.4g} GB of disk for bins of {name}')
    results = dict(parameters=parameters, memory=needs, total=total, fits=total <= room)
    results |= dict(largest_micro_batch_size=max(fitting, default=0), flops_per_token=flops)
    return results | dict(tokens_per_s=speed, days=days, disk_bytes=disk)


# -----------------------------------------------------------------------------
# measuring


class Machine:
    """What is measured on: a device and a precision, a clock, and a meter of memory."""

    def __init__(self, device, dtype, why=''):
        self.device, self.device_type = device, torch.device(device).type
        self.dtype_name, self.dtype = dtype, getattr(torch, dtype)
        self.why = why
        self.compiles = self.device_type == 'cuda' if compile is None else compile
        self.synchronize = torch.cuda.synchronize if self.device_type == 'cuda' else lambda: None

    def describe(self):
        """Prints what it is and what it can do -> the same as a dict."""
        name = f'{torch.get_num_threads()} CPU threads'
        if self.device_type == 'cuda':
            torch.set_float32_matmul_precision('high')
            torch.cuda.set_device(self.device)
            name = torch.cuda.get_device_name(self.device)
        say(f'{self.device} ({name}), {self.dtype_name}, torch {torch.__version__}')
        if self.why:
            say(f'dtype={self.dtype_name}: {self.why}')
        # large enough for the device, and in one timing enough of them
        size, times = (8192, 20) if self.device_type == 'cuda' else (2048, 1)
        x = torch.randn(size, size, device=self.device, dtype=self.dtype)
        rate = times * 2 * size**3 / self.best_of(lambda: [x @ x for _ in range(times)])
        say(f'GEMM {size}^3: {rate / 1e9:,.0f} GFLOP/s')
        return dict(device=self.device, dtype=self.dtype_name, torch=torch.__version__, gemm_flops=rate)

    def autocast(self):
        return torch.autocast(self.device_type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def timed(self, f):
        """Seconds of f."""
        self.synchronize()
        began = time.perf_counter()
        f()
        self.synchronize()
        return time.perf_counter() - began

    def peak_memory(self, f):
        """Bytes of f: the largest memory in use while it runs, over that before; None on a CPU, which does not say."""
        gc.collect()
        if self.device_type != 'cuda':
            f()
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before

    def free_memory(self):
        if self.device_type == 'cuda':
            return torch.cuda.mem_get_info()[0]
        with contextlib.suppress(ValueError, OSError, AttributeError):
            return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        return 8e9

    def best_of(self, f, n=8):
        f()
        return min(self.timed(f) for _ in range(n))

    def in_turn(self, run, items):
        """
        {name: item} -> {name: (median seconds, peak memory)}. run(measure, item) calls measure(its work) and returns
        what that gives: in turn, A B C A B C ..., once to warm up, once for the memory and then for the time.
        """
        seconds, memory = {name: [] for name in items}, {}
        for k in tqdm(range(repeats + 2), leave=False, disable=json or None):
            for name, item in items.items():
                if k == 1:
                    memory[name] = run(self.peak_memory, item)
                else:
                    seconds[name].append(run(self.timed, item))
        return {name: (statistics.median(seconds[name][1:]), memory[name]) for name in items}


def peak_of_process():
    """Bytes that this process had at most so far; None where Python cannot tell, on Windows."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def gigabytes(b):
    return '       ?' if b is None else f'{b / 1e9:5.2f} GB'


def build(c, tok):
    """A model with random weights, always the same."""
    table = signature_table(tok.tokens, c.num_hashes, c.num_buckets, pad_id=tok.pad) if c.num_hashes else None
    torch.manual_seed(0)
    # a copy of the config: bench_train changes its model's loss, and must not change what is compared
    return FastMHF(replace(c), table, [i for i, t in enumerate(tok.tokens) if t is None])


def random_tokens(model, *shape):
    """Signatures (*shape, H) of tokens from the later half of the vocabulary, where no special ones are."""
    V = model.config.vocab_size
    return model.sign(torch.randint(V // 2, V, shape, device=model.signatures.device))


def training_runs(machine, variants, tok):
    """
    -> {name: model} of the variants, and run(measure, name), which gives back measure(step): a whole step of one
    micro-batch, forward, backward, clipping and AdamW.
    """
    # one model of those that differ in their loss alone
    built, models, optimizers = {}, {}, {}
    for name, c in variants.items():
        shape = astuple(replace(c, loss='exact'))
        if shape not in built:
            built[shape] = model = build(c, tok)
            model.to(machine.device).activation_checkpointing = activation_checkpointing
            fused = machine.device_type in ('cuda', 'cpu')
            optimizers[model] = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
            if machine.compiles:
                model.compile()
        models[name] = built[shape]

    def run(measure, name):
        model, optimizer = models[name], optimizers[models[name]]
        model.config.loss = variants[name].loss
        s = random_tokens(model, micro_batch_size, block_size + 1)

        def step():
            with machine.autocast():
                loss = model(s[:, :-1], s[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        result = measure(step)
        optimizer.zero_grad(set_to_none=True)
        return result

    return models, run


def bench_train(machine, variants, tok, results):
    """Training steps: tokens a second, and peak memory beside what cost.py plans."""
    models, run = training_runs(machine, variants, tok)
    got = machine.in_turn(run, {name: name for name in models})
    tokens = micro_batch_size * block_size
    say(f'\ntraining step, {micro_batch_size} x {block_size:,} tokens, compile={machine.compiles}')
    say('                parameters  tokens/s  GFLOP/token  of GEMM rate  peak memory   planned')
    rows = {}
    for name, model in models.items():
        seconds, memory = got[name]
        flops = flops_per_token(variants[name])
        parameters = sum(model.num_params())
        speed = tokens / seconds
        share = flops * speed / results['gemm_flops']
        # as measured: beyond parameters and the optimizer's state
        free = machine.free_memory() if machine.device_type == 'cuda' else None
        needs = step_memory(variants[name], parameters, micro_batch_size, False, activation_checkpointing, free)
        planned = needs['activations'] + needs['head, or a block']
        rows[name] = dict(parameters=parameters, tokens_per_s=speed, seconds=seconds)
        rows[name] |= dict(flops_per_token=flops, gemm_share=share, peak_memory=memory, planned_memory=planned)
        figures = f'{parameters:>14,}{speed:>10,.0f}{flops / 1e9:>13.3f}{share:>14.0%}'
        say(f'{name:<12}{figures}{gigabytes(memory):>13}{gigabytes(planned):>10}')
    for a, b in (('exact', 'Standard'), ('product', 'Standard'), ('exact', 'product')):
        if {a, b} <= models.keys():
            flops = rows[a]['flops_per_token'] / rows[b]['flops_per_token']
            rows[f'{a}/{b}'] = compared(f'{a} / {b}', rows[a]['seconds'] / rows[b]['seconds'], flops)
    return rows


def bench_profile(machine, variants, tok, results):
    """Where the time of a training step goes: the kernels that take most of it, by name and by what they do."""
    _, run = training_runs(machine, variants, tok)
    on_gpu = machine.device_type == 'cuda'
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    rows = {}
    for name in tqdm(variants, leave=False, disable=json or None):
        for _ in range(3):  # compiles, and fills caches
            seconds = run(machine.timed, name)
        with torch.profiler.profile(activities=[activity]) as profiled:
            run(machine.timed, name)
        kernels = []
        for event in profiled.key_averages():
            busy = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
            if busy:
                kernels.append((busy, event.count, event.key))
        flops = flops_per_token(variants[name]) * micro_batch_size * block_size
        rows[name] = dict(seconds=seconds, bound=flops / results['gemm_flops'], kernels=sorted(kernels, reverse=True))
        print_profile(name, **rows[name])
    return rows


def print_profile(name, seconds, bound, kernels):
    """
    A step's time by kinds of kernels, and the 15 that take most of it: (seconds, calls, name) of each. bound: seconds
    that its products and attention would take at the rate of a large product.
    """
    kinds = Counter()
    for busy, _, kernel in kernels:
        kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, kernel)), 'other')
        kinds[kind] += busy
    busy = sum(kinds.values())
    say(f'\nprofile of a step, {name}: {seconds * 1e3:.1f} ms, {busy * 1e3:.1f} in kernels; bound {bound * 1e3:.1f}')
    say(', '.join(f'{kind} {busy * 1e3:.1f} ms' for kind, busy in kinds.most_common()))
    for busy, calls, kernel in kernels[:15]:
        say(f'{busy * 1e3:9.2f} ms {calls:6} x  {kernel[:90]}')


def compared(what, time_ratio, flop_ratio):
    ratio = time_ratio / flop_ratio
    say(f'{what}: time {time_ratio:.2f}, FLOPs {flop_ratio:.2f}, time over FLOPs {ratio:.2f}')
    return dict(time=time_ratio, flops=flop_ratio, time_over_flops=ratio)


def bench_head(machine, variants, tok, results):
    """Forward and backward of the head alone: the fast one (lean), and the plain one by autograd."""
    say('\nhead alone, forward and backward; memory beyond parameters and their gradients')
    say(f'{"":<12}{"tokens":>8}{"lean us/token":>15}{"plain":>8}{"lean/plain":>12}{"lean memory":>13}{"plain":>10}')
    rows = []
    for name, c in variants.items():
        model = build(replace(c, num_layers=1), tok).to(machine.device)
        for n in map(int, head_tokens.split(',')):
            got = bench_one_head(machine, model, n)
            rows.append(dict(loss=name, tokens=n, **got))
            figures = f'{name:<12}{n:>8,}{got["lean"]["seconds"] / n * 1e6:>15.0f}'
            time, ratio, memory = '-', '-', 'no room'
            if plain := got.get('plain'):
                time, ratio = f'{plain["seconds"] / n * 1e6:.0f}', f'{got["lean"]["seconds"] / plain["seconds"]:.2f}'
                memory = gigabytes(plain['memory'])
            say(f'{figures}{time:>8}{ratio:>12}{gigabytes(got["lean"]["memory"]):>13}{memory:>10}')
    return rows


def bench_one_head(machine, model, n):
    """{'lean': {seconds, memory}, 'plain': the same} of n tokens; without plain, where its logits find no room."""
    c = model.config
    heads = dict(lean=FastMHF.head_loss)
    h = torch.randn(n, c.hidden_size, device=machine.device, requires_grad=True)
    y = random_tokens(model, n)

    def run(measure, head_loss):
        def work():
            with machine.autocast():
                total = head_loss(model, h, y)
            (total / n).backward()

        result = measure(work)
        model.zero_grad(set_to_none=True)
        h.grad = None
        return result

    # the exact loss also has a logit of each token of the vocabulary
    logits = n * (c.coordinates * c.buckets + (c.vocab_size if c.num_hashes and c.loss == 'exact' else 0))
    if 24 * logits <= machine.free_memory():
        heads['plain'] = MHF.head_loss
    found, gradients = {}, 4 * sum(t.numel() for t in (h, model.embed.weight, *model.hash_decoder.parameters()))
    for name, (seconds, memory) in machine.in_turn(run, heads).items():
        found[name] = dict(seconds=seconds, memory=None if memory is None else max(0, memory - gradients))
    return found


def models_to_infer(machine, variants, tok):
    """The two models in the machine's precision, without autocast."""
    return {n: build(variants[n], tok).to(machine.device, machine.dtype).eval() for n in ('exact', 'Standard')}


def bench_generate(machine, variants, tok, results):
    """Tokens one by one at batch 1, weights in the machine's precision."""
    models, x = models_to_infer(machine, variants, tok), torch.ones(2**25, dtype=torch.int64, device=machine.device)
    # bytes a second of reading 256 MiB
    speed = x.nbytes / machine.best_of(x.sum)

    def run(measure, model):
        ids = torch.full((1, 16), len(tok.tokens) // 2, device=machine.device)
        stream = Writer(model).stream(ids, NEW_TOKENS + 1)
        next(stream)
        return measure(lambda: list(stream))

    got, rows = machine.in_turn(run, models), {}
    say(f'\ngeneration, batch 1, weights in {machine.dtype_name}; reading runs at {speed / 1e9:.1f} GB/s')
    say(f'{"":<12}{"tokens/s":>10}{"GB of weights touched":>24}{"of bandwidth":>14}')
    for name, model in models.items():
        E, c = model.embed.weight, model.config
        # each soft embedding reads its part of E a second time; of the embedding itself only H rows are read
        numbers = sum(model.num_params()) + E.numel() // c.coordinates * (c.coordinates - 1)
        touched, seconds = numbers * E.element_size(), got[name][0] / NEW_TOKENS
        rows[name] = dict(tokens_per_s=1 / seconds, bytes=touched, bandwidth_share=touched / seconds / speed)
        say(f'{name:<12}{1 / seconds:>10.1f}{touched / 1e9:>24.3f}{touched / seconds / speed:>14.0%}')
    return dict(bandwidth=speed, **rows)


def bench_infer(machine, variants, tok, results):
    """-log P(w) of every token of one sequence, normalised over the vocabulary."""
    models = models_to_infer(machine, variants, tok)

    @torch.no_grad()
    def run(measure, model):
        s = random_tokens(model, 1, block_size + 1)
        return measure(lambda: model(s[:, :-1], s[:, 1:]))

    got = {name: seconds for name, (seconds, _) in machine.in_turn(run, models).items()}
    say(f'\ninference: normalised P(w) of a sample of {block_size:,} tokens, weights in {machine.dtype_name}')
    say(f'MultiHashFormer {got["exact"] * 1e3:,.1f} ms, Standard {got["Standard"] * 1e3:,.1f} ms')
    ratios = compared(
        'exact / Standard',
        got['exact'] / got['Standard'],
        flops_per_token(variants['exact']) / flops_per_token(variants['Standard']),
    )
    # the paper's appendix
    published = 97.38 / 96.42
    say(f'published, 1B on one MI300X: 97.38 ms / 96.42 ms = {published:.2f}')
    return dict(seconds=got, **ratios, published_time_1B=published)


PARTS = dict(train=bench_train, head=bench_head, generate=bench_generate, infer=bench_infer, profile=bench_profile)


def main():
    for key in 'repeats gpus batch_size micro_batch_size block_size max_steps'.split():
        if config[key] <= 0:
            raise InputError(f'{key}={config[key]}: must be above 0')
    if not 0 <= mfu <= 1:
        raise InputError(f'mfu={mfu}: must be a share, from 0 to 1')
    wanted = parts.split(',')
    for part in wanted:
        if part not in PARTS:
            raise InputError(f"parts={parts}: '{part}' must be one of {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
    if not all(n.isdecimal() and int(n) for n in head_tokens.split(',')):
        raise InputError(f'head_tokens={head_tokens}: must be numbers of tokens, separated by commas')
    if plan and gpu not in GPUS:
        raise InputError(f"gpu='{gpu}': must be one of {', '.join(GPUS)}{did_you_mean(gpu, GPUS)}")
    if compile not in (None, True, False):
        raise InputError(f'compile={compile}: must be True or False')
    tok = get_tokenizer(tokenizer)
    variants, results = variants_of(tok), dict(config=config)
    if plan:
        results['plan'] = print_plan(variants)
    else:
        on_device = pick_device(device)
        machine = Machine(on_device, *pick_dtype(dtype, on_device))
        results |= machine.describe()
        for part, measure in PARTS.items():
            if part in wanted:
                results[part] = measure(machine, variants, tok, results)
                gc.collect()
                if machine.device_type == 'cuda':
                    torch.cuda.empty_cache()
        results['peak_of_process'] = peak_of_process()
        say(f'\nthis process had {gigabytes(results["peak_of_process"])} at most')
    if json:
        print(dumps(results))


if __name__ == '__main__':
    main()
