"""
Measure the training step of each model of a list with bench.py, relative to the first model's.

    $ python -m study.costs study/english.py     # minutes, on an idle machine; writes study/costs.csv

The models are those of the list's first group, each shape once, and transformers' GPT-2 (nanoGPT's architecture) of
Standard's width and depth. A step is forward, backward, clipping and AdamW on one micro-batch. The models alternate for
ROUNDS rounds, and the median counts. Rows of this list, device and number of threads are replaced.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from mhf.errors import InputError, install_excepthook
from mhf.runtime import pick_device, pick_dtype
from mhf.tokenizers import get_tokenizer
from model import MHFConfig
from study.rows import commit, read_csv, write_csv
from study.sweep import REPO, Study, as_flags

ROUNDS = 3
REPETITIONS = 5  # steps per round, of which the median counts
GPT2 = 'GPT-2'
# fields of MHFConfig that can change the time of a step
SHAPE = MHFConfig.__annotations__.keys() - {'encoder_init', 'embedding_scale'}
MACHINE = ('device', 'dtype', 'torch', 'threads', 'gemm_flops')


def shapes(study):
    """{name: settings of bench.py} of the list's first group, each shape once, under its shortest name."""
    names = {}
    for entry in study.entries:
        if entry['group'] == study.entries[0]['group']:
            settings = study.settings(entry)
            shape = {k: settings[k] for k in sorted(SHAPE & settings.keys())}
            shape |= dict(micro_batch_size=settings['batch_size'])
            shape |= dict(tokenizer=study.data[entry['train']].get('tokenizer', 'mistral'))
            names.setdefault(tuple(shape.items()), []).append(entry['name'])
    return {min(same, key=len): dict(shape) for shape, same in names.items()}


def measure(shape):
    """Runs bench.py on a shape. Returns its columns of costs.csv, read from the table. Raises InputError."""
    variant = shape['loss'] if shape['num_hashes'] else 'Standard'
    flags = shape | dict(benchmarks='train', variants=variant, repeats=REPETITIONS, compile=False)
    done = subprocess.run([sys.executable, REPO / 'bench.py', *as_flags(flags)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f'bench.py ended with {done.returncode}: {done.stderr[-500:]}')
    machine = re.match(r'(.*), (\w+), torch (\S+), (\d+) CPU threads\n', done.stdout).groups()
    gemm_flops = 1e9 * float(re.search(r'^matrix products: (\S+)', done.stdout, re.M)[1].replace(',', ''))
    row = re.search(rf'^{variant} .*', done.stdout, re.M)[0].replace(',', '').split()
    parameters, _, speed, megaflops, _, gigabytes = (float(cell.rstrip('%')) for cell in row[1:7])
    flops = 1e6 * megaflops
    results = dict(parameters=int(parameters), tokens_per_s=speed, flops_per_token=flops)
    results |= dict(gemm_share=flops * speed / gemm_flops, peak_memory=1e9 * gigabytes or '')
    return results | dict(zip(MACHINE, (*machine, gemm_flops), strict=True))


def measure_gpt2(shape):
    """Measures GPT-2 with the width, depth, context and vocabulary of a shape. Returns its tokens per second."""
    from transformers import GPT2Config, GPT2LMHeadModel

    device = pick_device(None)
    dtype = pick_dtype(None, device)
    length = shape['block_size']
    V = len(get_tokenizer(shape['tokenizer']).tokens)
    sizes = dict(n_embd=shape['hidden_size'], n_layer=shape['num_layers'], n_head=shape['num_heads'])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=length, **sizes)).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(V, (shape['micro_batch_size'], length), device=device)
    seconds = []
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == 'bfloat16'):
            loss = F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return ids.numel() / statistics.median(seconds[1:])


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/english.py')
    study = Study(parser.parse_args().list)
    models = shapes(study)
    standard = next((shape for shape in models.values() if not shape['num_hashes']), next(iter(models.values())))
    rounds = {name: [] for name in (*models, GPT2)}
    for i in range(ROUNDS):
        for name, shape in models.items():
            rounds[name].append(measure(shape))
        rounds[GPT2].append(dict(tokens_per_s=measure_gpt2(standard)))
        print(f'round {i + 1}:', *(f'{name}: {r[-1]["tokens_per_s"]:,.0f}' for name, r in rounds.items()), flush=True)
    rows = []
    for name, results in rounds.items():
        speed = statistics.median_low(result['tokens_per_s'] for result in results)
        row = next(result for result in results if result['tokens_per_s'] == speed)
        ratio = f'{rows[0]["tokens_per_s"] / speed:.3f}' if rows else '1.000'
        rows.append(dict(list=study.path.stem, model=name, relative_time=ratio) | row | dict(commit=commit()))
    for column in MACHINE:
        rows[-1][column] = rows[0][column]
    path = study.path.with_name('costs.csv')
    key = ('list', 'device', 'threads')
    measured = [str(rows[0][column]) for column in key]
    write_csv(path, [row for row in read_csv(path) if [row[column] for column in key] != measured] + rows)


if __name__ == '__main__':
    main()
