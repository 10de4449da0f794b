"""
Benchmarks a config on this machine: MultiHashFormer with the exact and the product loss, and the Standard model.

    $ python bench.py config/mhf_tiny.py                                  # training steps, generation, P(w)
    $ python bench.py config/mhf_100m.py --tokenizer=tekken               # a vocabulary of 131,072
    $ python bench.py config/mhf_1b.py --benchmarks=train --variants=exact --micro_batch_size=4

The fields of model.MHFConfig are settings (--num_buckets=7966), except vocab_size, pad_id and frequency_ranges.
The variants decide the loss. FLOPs are those of matrix products: 2 per multiply-add; causal attention counts half. Peak
memory, on a GPU only, excludes parameters and optimizer state. A Standard config is compared with H4B16K. For the time
of each kernel, run train.py under torch.profiler.
"""

import statistics
import time
from dataclasses import replace

import torch

from configurator import configure
from mhf.data import build_table
from mhf.generate import Engine
from mhf.runtime import capture, init_distributed, pick_dtype
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
# the fields of MHFConfig, except those that the tokenizer or token counts determine
globals().update({k: v for k, v in vars(MHFConfig()).items() if k not in ('vocab_size', 'pad_id', 'frequency_ranges')})

config = configure(globals())

NEW_TOKENS = 64  # per generated text


def medians(functions):
    """
    {name: function} -> {name: median seconds}. The functions alternate, A B C A B C ...: one round to warm up, then
    `repeats` rounds.
    """
    synchronize = torch.get_device_module(device_type).synchronize
    seconds = {name: [] for name in functions}
    for _ in range(1 + repeats):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def variant_configs(c):
    """Returns {variant: MHFConfig} of the models to compare."""
    exact = replace(c, loss='exact', num_hashes=c.num_hashes or 4, num_buckets=c.num_buckets if c.num_hashes else 16384)
    standard = replace(c, loss='exact', num_hashes=0, ablation='')
    configs = dict(exact=exact, product=replace(exact, loss='product'), Standard=standard)
    return {name: configs[name] for name in variants.split(',')}


def random_model(c):
    """Returns a model with random weights."""
    table = build_table(vars(c), tok.tokens, tok.pad) if c.num_hashes else None
    with torch.device(device):
        model = MHF(c, table)
    model.init_weights()
    return model


def training_step(c):
    """
    Returns a model, a function that trains it on one micro-batch, as train.py does: forward, backward, clipping and
    AdamW; and the peak memory of its second call in bytes, 0 if it is unknown.
    """
    model = random_model(c)
    model.activation_checkpointing = activation_checkpointing
    if compile:
        model.compile(dynamic=False)  # otherwise sizes that differ between variants become symbolic
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    x, y = torch.randint(c.vocab_size, (2, micro_batch_size, c.block_size), device=device)

    def compute_gradients():
        optimizer.zero_grad()
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16'):
            mean_loss = model(x, y)
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


def bench_train(configs):
    """Prints time and memory of a training step."""
    steps = {variant: training_step(c) for variant, c in configs.items()}
    seconds = medians({variant: step for variant, (_, step, _) in steps.items()})
    print(f'\ntraining step, {micro_batch_size} x {config["block_size"]:,} tokens, compile={compile}')
    print('                parameters        ms    tokens/s  MFLOP/token   GFLOP/s  peak memory')
    for variant, (model, _, peak_memory) in steps.items():
        speed = micro_batch_size * config['block_size'] / seconds[variant]
        flops = model.estimate_flops()
        times = f'{seconds[variant] * 1e3:>10,.1f}{speed:>12,.1f}'
        print(f'{variant:<10}{sum(model.num_params()):>16,}{times}{flops / 1e6:>13,.2f}', end='')
        print(f'{flops * speed / 1e9:>10,.0f}{peak_memory / 1e9:>10.2f} GB')


def inference(c):
    """
    Returns a function that generates a text after a prompt of one token, and a function that computes P(w), normalized
    over the vocabulary, for the tokens of one sequence.
    """
    model = random_model(replace(c, loss='exact')).to(getattr(torch, dtype)).eval()
    x, y = torch.randint(c.vocab_size, (2, 1, c.block_size), device=device)
    engine = Engine(model)
    if compile:
        engine.compile(1, 1 + NEW_TOKENS)
    return lambda: list(engine.stream(x[:, :1], NEW_TOKENS)), lambda: model(x, y)


@torch.no_grad()
def bench_infer(configs):
    """Prints the speed of generation at batch size 1, and the latency of P(w)."""
    functions = {}
    # generation and P(w) do not depend on the loss
    models = {'Standard' if variant == 'Standard' else 'MHF': c for variant, c in configs.items()}
    for name, c in models.items():
        functions[name, 'generation'], functions[name, 'P(w)'] = inference(c)
    seconds = medians(functions)
    print(f'\ninference, batch size 1, weights in {dtype}')
    print(f'          generation  P(w) of {config["block_size"]:,} tokens')
    for name in models:
        speed = NEW_TOKENS / seconds[name, 'generation']
        print(f'{name:<10}{speed:.1f} tokens/s{seconds[name, "P(w)"] * 1e3:>12,.1f} ms')


if __name__ == '__main__':
    tok = get_tokenizer(tokenizer)
    fields = {name: config[name] for name in vars(MHFConfig()) if name in config}
    configs = variant_configs(MHFConfig(**fields | dict(vocab_size=len(tok.tokens), pad_id=tok.pad)))
    _, _, device = init_distributed(device)
    device_type = torch.device(device).type
    dtype = pick_dtype(dtype, device)
    compile = device_type == 'cuda' if compile is None else compile
    name = torch.cuda.get_device_name(device) if device_type == 'cuda' else device
    print(f'{name}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads')
    for benchmark in benchmarks.split(','):
        torch.manual_seed(0)
        dict(train=bench_train, infer=bench_infer)[benchmark](configs)
