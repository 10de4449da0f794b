"""
What a config costs, measured on this machine beside what the machine can do; MultiHashFormer and Standard in turn.

    $ python bench.py config/mhf_tiny.py                                   # everything
    $ python bench.py config/mhf_100m.py --micro_batch_size=1 --parts=train,head
    $ python bench.py config/mhf_100m.py --parts=head --head_tokens=4096,8192,32768
    $ python bench.py config/mhf_3b.py --plan --gpus=8 --gpu=H100          # memory, days and disk, nothing is allocated

The Standard model is the config's with num_hashes=0; a Standard config is compared with H4B16K. Peak memory is what a step
needs beyond parameters and optimizer state. FLOPs are those of matrix products (2 per multiply and add, causal attention
counts half); a model's share of the GEMM rate is its FLOPs per second over those of a 2048^3 product in the same run.
"""

import contextlib
import ctypes
import functools
import gc
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import astuple, replace
from json import dumps
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from configurator import InputError, configure, declared, did_you_mean
from hashing import get_tokenizer, signature_table
from model import MHF, MHFConfig, pick_device, vocabulary_chunk
import prepare as preparing
from prepare import Bins, ahead, batches, read_meta

# what to do
parts = 'train,head,generate,infer,prepare'
repeats = 3  # of each measurement; the median counts
head_tokens = '4096'  # tokens of the head alone, one number or several
new_tokens = 64  # of generation
json = False  # one JSON object instead of tables
# --plan, without allocating anything
plan = False
gpus = 8
gpu = 'H100'
mfu = 0.4  # share of the GPU's peak that training reaches
# the rest as in train.py
dataset = 'fineweb-edu:sample-10BT'  # of the part prepare, which takes stdlib for what is on the hub
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

# memory in 10^9 bytes, dense bfloat16 in 10^12 FLOP/s, from the makers' data sheets
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
PARTS = ('train', 'head', 'generate', 'infer', 'prepare')
PUBLISHED_1B = 97.38, 96.42  # ms of inference, MultiHashFormer and Standard: the paper's appendix, one MI300X
RESERVED = 2.0  # GB of a GPU for the CUDA context, its libraries and fragments

for key in ('repeats', 'new_tokens', 'gpus', 'mfu', 'batch_size', 'micro_batch_size', 'block_size', 'max_steps'):
    if config[key] <= 0:
        raise InputError(f'{key}={config[key]}: must be above 0')
wanted = parts.split(',')
for part in wanted:
    if part not in PARTS:
        raise InputError(f"parts={parts}: '{part}' must be one of {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
try:
    head_sizes = [int(n) for n in head_tokens.split(',')]
except ValueError:
    head_sizes = [0]
if min(head_sizes) < 1:
    raise InputError(f'head_tokens={head_tokens}: must be numbers of tokens, separated by commas')
if plan and gpu not in GPUS:
    raise InputError(f"gpu='{gpu}': must be one of {', '.join(GPUS)}{did_you_mean(gpu, GPUS)}")

tok = get_tokenizer(tokenizer)
settings = {k: config[k] for k in MHFConfig.__annotations__ if k in config}
H, B = (num_hashes, num_buckets) if num_hashes else (4, 16384)
kinds = {
    name: MHFConfig(**settings | dict(vocab_size=len(tok.tokens), pad_id=tok.pad, num_hashes=h, num_buckets=B, loss=l))
    for name, h, l in (('exact', H, 'exact'), ('product', H, 'product'), ('Standard', 0, 'exact'))
}
results = dict(config=config)


def say(line=''):
    if not json:
        print(line, flush=True)


def flops_per_token(c, context):
    """Forward FLOPs per token by part, at sequences of `context` tokens; training takes three times as many."""
    d, z, width = c.hidden_size, c.bottleneck, c.num_heads * c.head_dim
    kv_width = c.num_kv_heads * c.head_dim
    flops = dict(
        decoder=c.num_layers * 2 * d * (2 * width + 2 * kv_width + 3 * c.intermediate_size),
        attention=c.num_layers * 2 * 2 * width * (context + 1) / 2,
        head=2 * c.coordinates * c.buckets * d,
    )
    if c.num_hashes:
        flops['head'] += (c.num_hashes - 1) * (2 * c.num_buckets * d + 2 * 3 * d * z)  # soft embeddings and mixers
        flops['encoder'] = c.num_hashes * 2 * z * (d + 1) + 2 * d * d
    return flops


# -----------------------------------------------------------------------------
# plan: what would it take?


@functools.cache
def saved_by_forward(fields, n):
    """For MHFConfig(*fields), bytes that one sequence of n tokens keeps for the backward pass, autocast's copies of weights included."""
    storages = {}

    def note(t):
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    c = MHFConfig(*fields)
    with FakeTensorMode():
        model = MHF(c)
        x = torch.zeros(1, n, c.coordinates, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast('cpu', torch.bfloat16):
            model.hidden(x)
    of_the_model = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    return sum(s.nbytes() for k, s in storages.items() if k not in of_the_model)


def memory_plan(c, sequences, kind='cuda'):
    """Bytes by part on a device of this kind, training micro-batches of `sequences` sequences of c.block_size tokens."""
    with torch.device('meta'):
        model = MHF(c)
    P, n, d, E = sum(model.num_params()), sequences * c.block_size, c.hidden_size, model.embed.weight.numel()
    # linear in layers and tokens: four small models give the slopes
    short = c.block_size // 2
    probe = {(L, t): saved_by_forward(astuple(replace(c, num_layers=L)), t) for L in (1, 2) for t in (short, 2 * short)}
    weights = lambda L: 2 * probe[L, short] - probe[L, 2 * short]  # what does not grow with the tokens
    per_token = lambda L: (probe[L, 2 * short] - probe[L, short]) / short
    layer = per_token(2) - per_token(1)
    outside = per_token(1) - layer
    copies = weights(1) + (weights(2) - weights(1)) * (c.num_layers - 1)
    if activation_checkpointing:
        activations = n * (outside + c.num_layers * 4 * d + layer)
    else:
        activations = n * (outside + c.num_layers * layer)
    chunk, block = min(n, model.head_chunk), min(n, vocabulary_chunk(kind))
    logits = 2 * chunk * c.buckets * (2 * c.coordinates - (c.coordinates == 1))  # o_i and p_i, and one at work
    head = (
        2 * E
        + 4 * E
        + 8 * n * d
        + logits
        + 2 * E // c.coordinates
        + 4 * block * (c.vocab_size + 2 * c.coordinates * c.buckets)
    )
    return dict(
        parameters=4 * P,
        gradients=4 * P,
        optimizer=8 * P,
        **{'bfloat16 copies of weights': copies, 'activations': activations, 'head': head},
    )


def print_plan():
    c = kinds[loss if num_hashes else 'Standard']
    memory, peak = GPUS[gpu]
    room = (memory - RESERVED) * 1e9
    fits = 0
    candidates = [m for m in range(1, batch_size // gpus + 1) if batch_size % (m * gpus) == 0]
    if not candidates:
        raise InputError(f'batch_size={batch_size} is not a multiple of gpus={gpus}')
    for m in tqdm(candidates, desc='plan', disable=json or not sys.stderr.isatty(), leave=False):
        if sum(memory_plan(c, m).values()) > room:
            break
        fits = m
    need = memory_plan(c, micro_batch_size)
    flops = 3 * sum(flops_per_token(c, block_size).values())
    tokens = max_steps * batch_size * block_size
    days = tokens * flops / (gpus * peak * 1e12 * mfu) / 86400
    disk = tokens * 2 * (num_hashes or (1 if c.vocab_size <= 65536 else 2))
    with torch.device('meta'):
        P = sum(MHF(c).num_params())
    say(f'{P:,} parameters; {gpus} x {gpu}, {memory} GB each; activation_checkpointing={activation_checkpointing}')
    say(
        f'\nmemory per GPU, micro_batch_size={micro_batch_size} x {block_size:,} tokens, bfloat16 autocast, DDP, not compiled'
    )
    for name, size in need.items():
        say(f'  {name:<28}{size / 1e9:8.1f} GB')
    total = sum(need.values())
    verdict = 'fits' if total <= room else 'DOES NOT FIT'
    say(f'  {"total":<28}{total / 1e9:8.1f} GB of {room / 1e9:.1f}: {verdict}')
    hint = '' if activation_checkpointing else '; more with --activation_checkpointing'
    say(f'largest micro_batch_size that fits: {fits or "none"}{hint}')
    say(
        f'\n{flops * batch_size * block_size:.3g} FLOPs a step of {batch_size * block_size:,} tokens, {flops / 1e9:.2f} G a token'
    )
    say(f'{days:.1f} days for {tokens / 1e9:.1f} B tokens at {mfu:.0%} of {peak} TFLOP/s each')
    say(f'{disk / 1e9:,.0f} GB of disk for its bins')
    results['plan'] = dict(
        parameters=P,
        memory={k: int(v) for k, v in need.items()},
        total=int(total),
        fits=total <= room,
        largest_micro_batch_size=fits,
        flops_per_token=flops,
        days=days,
        disk_bytes=disk,
    )


# -----------------------------------------------------------------------------
# measuring


def synchronize():
    if device_type == 'cuda':
        torch.cuda.synchronize()


def timed(f):
    synchronize()
    began = time.perf_counter()
    f()
    synchronize()
    return time.perf_counter() - began


def best_of(f, n=8):
    f()
    return min(timed(f) for _ in range(n))


def gemm_rate():
    """FLOP/s of a 2048^3 product, the best of a few."""
    x = torch.randn(2048, 2048, device=device, dtype=getattr(torch, dtype))
    return 2 * 2048**3 / best_of(lambda: x @ x)


def bandwidth():
    """Bytes/s of reading 256 MiB, the best of a few."""
    x = torch.ones(2**25, dtype=torch.int64, device=device)
    return x.nbytes / best_of(x.sum)


def peak_memory(f):
    """Bytes of f: the largest memory in use while it runs, over that before; None where it is not known."""
    gc.collect()
    if device_type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    status = Path('/proc/self/status')
    if not status.exists():
        return f()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # gives what was freed back to the system, so that `before` is true
    read = lambda key: 1024 * int(status.read_text().split(key)[1].split()[0])
    Path('/proc/self/clear_refs').write_text('5')  # the peak begins anew
    before = read('VmRSS:')
    f()
    return read('VmHWM:') - before


def gigabytes(b):
    return '       ?' if b is None else f'{b / 1e9:5.2f} GB'


def build(c):
    table = signature_table(tok.tokens, H, B, pad_id=tok.pad) if c.num_hashes else None
    torch.manual_seed(0)
    return MHF(c, table, [i for i, t in enumerate(tok.tokens) if t is None])


def autocast():
    return torch.autocast(device_type, torch.bfloat16) if dtype == 'bfloat16' else contextlib.nullcontext()


def random_tokens(model, *shape):
    return model.signatures[torch.randint(len(tok.tokens) // 2, len(tok.tokens), shape, device=device)]


def in_turn(runs):
    """
    {name: run} -> {name: (median seconds, peak memory)}. run(measure) calls measure(its work) and returns what that gives:
    in turn, A B C A B C ..., once to warm up, once for the memory and then for the time.
    """
    seconds, memory = {name: [] for name in runs}, {}
    for k in tqdm(range(repeats + 2), leave=False, disable=json or not sys.stderr.isatty()):
        for name, run in runs.items():
            if k == 1:
                memory[name] = run(peak_memory)
            else:
                seconds[name].append(run(timed))
    return {name: (statistics.median(seconds[name][1:]), memory[name]) for name in runs}


def bench_train():
    """A whole step of one micro-batch: forward, backward, clipping, AdamW."""
    mhf, standard = build(kinds['exact']), build(kinds['Standard'])
    runs, tokens = {}, micro_batch_size * block_size
    for name, model in (('exact', mhf), ('product', mhf), ('Standard', standard)):
        if name != 'product':
            model.to(device).activation_checkpointing = activation_checkpointing
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=device_type != 'mps')
            if compile:
                model.compile()

        def step(measure, name=name, model=model, optimizer=optimizer):
            model.config.loss = kinds[name].loss
            s = random_tokens(model, micro_batch_size, block_size + 1)

            def work():
                with autocast():
                    loss = model(s[:, :-1], s[:, 1:])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            result = measure(work)
            optimizer.zero_grad(set_to_none=True)
            return result

        runs[name] = step
    got, flops = in_turn(runs), {k: 3 * sum(flops_per_token(c, block_size).values()) for k, c in kinds.items()}
    say(f'\ntraining step, {micro_batch_size} x {block_size:,} tokens, compile={compile}')
    say(
        f'{"":<12}{"parameters":>14}{"tokens/s":>10}{"GFLOP/token":>13}{"of GEMM rate":>14}{"peak memory":>13}{"planned":>10}'
    )
    rows = {}
    for name, model in (('exact', mhf), ('product', mhf), ('Standard', standard)):
        seconds, memory = got[name]
        share = flops[name] * tokens / seconds / rate
        needs = memory_plan(kinds[name], micro_batch_size, device_type)
        planned = sum(needs.values()) - needs['parameters'] - needs['optimizer']  # as measured: beyond these
        rows[name] = dict(
            parameters=sum(model.num_params()),
            tokens_per_s=tokens / seconds,
            flops_per_token=flops[name],
            gemm_share=share,
            peak_memory=memory,
            planned_memory=planned,
            seconds=seconds,
        )
        say(
            f'{name:<12}{rows[name]["parameters"]:>14,}{tokens / seconds:>10,.0f}{flops[name] / 1e9:>13.3f}{share:>14.0%}'
            f'{gigabytes(memory):>13}{gigabytes(planned):>10}'
        )
    for a, b in (('exact', 'Standard'), ('product', 'Standard'), ('exact', 'product')):
        time_ratio, flop_ratio = rows[a]['seconds'] / rows[b]['seconds'], flops[a] / flops[b]
        rows[f'{a}/{b}'] = dict(time=time_ratio, flops=flop_ratio, time_over_flops=time_ratio / flop_ratio)
        say(f'{a} / {b}: time {time_ratio:.2f}, FLOPs {flop_ratio:.2f}, time over FLOPs {time_ratio / flop_ratio:.2f}')
    results['train'] = rows


def bench_head():
    """Forward and backward of the head alone, lean and plain."""
    say('\nhead alone, forward and backward; memory beyond parameters and their gradients')
    say(f'{"":<12}{"tokens":>8}{"lean us/token":>15}{"plain":>8}{"lean/plain":>12}{"lean memory":>13}{"plain":>10}')
    rows = []
    for name, c in kinds.items():
        model = build(replace(c, num_layers=1)).to(device)
        for n in head_sizes:
            h = torch.randn(n, c.hidden_size, device=device, requires_grad=True)
            y = random_tokens(model, n)
            gradients = 4 * (h.numel() + model.embed.weight.numel() + sum(p.numel() for p in model.mixers.parameters()))

            def run(measure, plain):
                def work():
                    model.plain_head = plain
                    with autocast():
                        total = model.head_loss(h, y)
                    (total / n).backward()

                result = measure(work)
                model.zero_grad(set_to_none=True)
                h.grad = None
                return result

            runs = dict(lean=lambda measure: run(measure, plain=False), plain=lambda measure: run(measure, plain=True))
            numbers = n * (c.coordinates * c.buckets + (c.vocab_size if name == 'exact' else 0))
            if 24 * numbers > free_memory():
                runs.pop('plain')
            got = {k: (t, None if m is None else max(0, m - gradients)) for k, (t, m) in in_turn(runs).items()}
            row = dict(loss=name, tokens=n, **{k: dict(seconds=t, memory=m) for k, (t, m) in got.items()})
            rows.append(row)
            lean, plain = got['lean'], got.get('plain')
            us = lambda x: f'{x[0] / n * 1e6:.0f}'
            say(
                f'{name:<12}{n:>8,}{us(lean):>15}{us(plain) if plain else "-":>8}'
                f'{f"{lean[0] / plain[0]:.2f}" if plain else "-":>12}{gigabytes(lean[1]):>13}'
                f'{gigabytes(plain[1]) if plain else "no room":>10}'
            )
    results['head'] = rows


def free_memory():
    if device_type == 'cuda':
        return torch.cuda.mem_get_info()[0]
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (ValueError, OSError, AttributeError):
        return 8e9


def bench_generate():
    """Tokens one by one at batch 1, weights in `dtype`."""
    speed = bandwidth()
    say(f'\ngeneration, batch 1, weights in {dtype}; reading runs at {speed / 1e9:.1f} GB/s')
    say(f'{"":<12}{"tokens/s":>10}{"GB of weights touched":>24}{"of bandwidth":>14}')
    models = {name: build(kinds[name]).to(device, getattr(torch, dtype)).eval() for name in ('exact', 'Standard')}

    def run(measure, model):
        ids = torch.full((1, 16), len(tok.tokens) // 2, device=device)
        stream = model.stream(ids, new_tokens + 1)
        next(stream)
        return measure(lambda: [None for _ in stream])

    got, rows = in_turn({name: lambda f, m=m: run(f, m) for name, m in models.items()}), {}
    for name, model in models.items():
        E, c = model.embed.weight, model.config
        # each soft embedding reads its part of E a second time; of the embedding itself only H rows are read
        numbers = sum(model.num_params()) + E.numel() // c.coordinates * (c.coordinates - 1)
        touched, seconds = numbers * E.element_size(), got[name][0] / new_tokens
        rows[name] = dict(tokens_per_s=1 / seconds, bytes=touched, bandwidth_share=touched / seconds / speed)
        say(f'{name:<12}{1 / seconds:>10.1f}{touched / 1e9:>24.3f}{touched / seconds / speed:>14.0%}')
    results['generate'] = dict(bandwidth=speed, **rows)


def bench_infer():
    """-log P(w) of every token of one sequence, normalised over the vocabulary."""
    say(f'\ninference: normalised P(w) of a sample of {block_size:,} tokens, weights in {dtype}')
    models = {name: build(kinds[name]).to(device, getattr(torch, dtype)).eval() for name in ('exact', 'Standard')}

    @torch.no_grad()
    def run(measure, model):
        s = random_tokens(model, 1, block_size + 1)
        return measure(lambda: model(s[:, :-1], s[:, 1:]))

    got = {k: t for k, (t, _) in in_turn({name: lambda f, m=m: run(f, m) for name, m in models.items()}).items()}
    flops = {name: sum(flops_per_token(kinds[name], block_size).values()) for name in models}
    ratio, flop_ratio = got['exact'] / got['Standard'], flops['exact'] / flops['Standard']
    say(f'MultiHashFormer {got["exact"] * 1e3:,.1f} ms, Standard {got["Standard"] * 1e3:,.1f} ms')
    say(f'exact / Standard: time {ratio:.2f}, FLOPs {flop_ratio:.2f}, time over FLOPs {ratio / flop_ratio:.2f}')
    ours, theirs = PUBLISHED_1B
    say(f'published, 1B on one MI300X: {ours} ms / {theirs} ms = {ours / theirs:.2f}')
    results['infer'] = dict(
        seconds=got, time=ratio, flops=flop_ratio, time_over_flops=ratio / flop_ratio, published_time_1B=ours / theirs
    )


def bench_prepare():
    """prepare.py on all cores against the bare tokenizer; reading against training."""
    globals()['__file__'] = None  # or worker processes would run this file again
    what = 'stdlib' if dataset.partition(':')[0] in preparing.HUB else dataset
    cores = os.cpu_count()
    settings = declared('prepare.py') | dict(
        dataset=what, tokenizer=tokenizer, num_hashes=0, val_fraction=0.01, num_workers=0, shard_tokens=5000000
    )
    with tempfile.TemporaryDirectory() as folder, preparing.workers(cores, tokenizer) as pool:
        folder = Path(folder)
        made = [b for b, _ in batches(preparing.Source(what), preparing.at_start(0), 0.01, 4e6)]
        size = sum(len(t.encode()) for b in made for t, _ in b)
        list(pool.map(preparing._tokenise, made[: 2 * cores]))  # every worker has its tokenizer

        def whole():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                preparing.main(settings | dict(data_dir=str(folder / 'ids')))

        seconds = {'the tokenizer alone': [], 'prepare.py': []}
        for k in range(repeats):
            works = (lambda: list(pool.map(preparing._tokenise, made)), whole)
            for times, work in zip(seconds.values(), works):
                shutil.rmtree(folder / 'ids', ignore_errors=True)
                begin = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin)
        rates = {name: size / statistics.median(times) for name, times in seconds.items()}
        say(f'\nprepare: {size / 1e6:.1f} MB of text ({what}), {tokenizer}, {cores} cores')
        for name, rate in rates.items():
            say(f'{name:<28}{rate / 1e6:>8.2f} MB/s{rates["prepare.py"] / rate:>8.2f} times as fast is prepare.py')

        whole()
        rows, n = Bins(folder / 'ids', read_meta(folder / 'ids')['splits']['train'], 1), 0
        starts = np.random.default_rng(0).integers(0, max(1, len(rows) - block_size), 64)
        begin = time.perf_counter()
        for batch in ahead(
            np.stack([rows[b : b + block_size + 1] for b in starts]).astype(np.int64) for _ in range(50)
        ):
            n += batch.shape[0] * block_size
        loading = n / (time.perf_counter() - begin)
        trained = results.get('train', {}).get('exact', {}).get('tokens_per_s')
        share = f', {trained / loading:.1%} of the time of a training step' if trained else ''
        say(f'reading: {loading / 1e6:.1f} M tokens/s{share}')
    results['prepare'] = dict(bytes_per_s=rates, reading_tokens_per_s=loading)


# -----------------------------------------------------------------------------

if plan:
    print_plan()
else:
    device, dtype = pick_device(device, dtype)
    device_type = torch.device(device).type
    if device_type == 'cuda':
        torch.set_float32_matmul_precision('high')
    compile = device_type == 'cuda' if compile is None else compile
    if type(compile) is not bool:
        raise InputError(f'compile={compile}: must be True or False')
    rate = gemm_rate()
    name = torch.cuda.get_device_name() if device_type == 'cuda' else f'{torch.get_num_threads()} CPU threads'
    say(f'{device} ({name}), {dtype}, torch {torch.__version__}')
    say(f'GEMM 2048^3: {rate / 1e9:,.0f} GFLOP/s')
    results |= dict(device=device, dtype=dtype, torch=torch.__version__, gemm_flops=rate)
    for part in PARTS:
        if part in wanted:
            globals()[f'bench_{part}']()
            gc.collect()
if json:
    print(dumps(results))
