"""
Cost: time and memory of a training step of each variant

    $ python -m study.costs study/english.py     # minutes, of an idle machine; writes study/costs.csv

The models are those of the list's first group, each shape once, measured in turn as bench.py does: forward, backward,
clipping and AdamW on one micro-batch. Time is the median of 15 repetitions, in times the first model's; memory is what
a step needs beyond the parameters and AdamW's moments. Each device and number of threads has a column here, and the
CSV names the commit that it measured. On a GPU steps as small as these are mostly launches of kernels.
"""

import argparse
import csv
from dataclasses import replace

import torch

from mhf.cost import Machine, TrainingSteps
from mhf.device import pick_device, pick_dtype
from mhf.files import replace_durably
from mhf.tokenizers import get_tokenizer
from model import MHFConfig
from study import sweep
from study.rows import commit

REPETITIONS = 15
# of a step, as mhf/cost.py calls them
COLUMNS = ('parameters', 'tokens_per_s', 'flops_per_token', 'gemm_share', 'peak_memory')


def first_group(study):
    """[(name, settings of train.py)] of the entries of the list's first group."""
    group = study.entries[0]['group']
    return [(entry['name'], study.settings(entry)) for entry in study.entries if entry['group'] == group]


def shapes(entries, tok):
    """{name: MHFConfig} of the entries, each shape once."""
    of_tokenizer = dict(vocab_size=len(tok.tokens), pad_id=tok.pad)
    configs = {}
    for name, settings in entries:
        fields = {k: v for k, v in settings.items() if k in MHFConfig.__annotations__}
        # signatures of another kind cost the same, and so do other weights and settings of training
        same = dict(num_lsh=0, encoder_init='normal', embedding_scale=1.0)
        c = replace(MHFConfig(**of_tokenizer | fields), **same)
        if c not in configs.values():
            configs[name] = c
    return configs


def measure(configs, tok, micro_batch_size):
    """Measures a step of each model of {name: MHFConfig} -> [row of the CSV]. Prints the speed of each."""
    device = pick_device()
    dtype, _ = pick_dtype(None, device)
    machine = Machine(device, dtype, compile=False, repeats=REPETITIONS, progress=False)
    # in every row
    about = dict(
        device=machine.name if machine.on_gpu else device,
        dtype=dtype,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        gemm_flops=machine.gemm_flops,
        commit=commit(),
    )
    costs = TrainingSteps(machine, configs, tok, micro_batch_size).costs()
    first = next(iter(costs.values()))
    rows = []
    for name, cost in costs.items():
        ratio = cost['seconds'] / first['seconds']
        print(f'{name}: {cost["tokens_per_s"]:,.0f} tokens/s, {ratio:.2f} times the first')
        row = {'model': name, 'time / the first': f'{ratio:.3f}'}
        row |= {column: cost[column] for column in COLUMNS}
        rows.append(row | about)
    return rows


def rows_of_others(path, rows):
    """The rows of the CSV that another device, or another number of threads, took."""
    if not path.exists():
        return []
    here = (rows[0]['device'], str(rows[0]['threads']))
    with open(path, newline='') as f:
        return [row for row in csv.DictReader(f) if (row['device'], row['threads']) != here]


def main(path):
    """path: of the list of runs. Raises InputError."""
    study = sweep.Study(path)
    tok = get_tokenizer('mistral')
    entries = first_group(study)
    _, settings = entries[-1]
    rows = measure(shapes(entries, tok), tok, settings['batch_size'])
    table = study.path.with_name('costs.csv')
    beside = table.with_suffix('.tmp')
    with open(beside, 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows_of_others(table, rows) + rows)
    replace_durably(beside, table)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/english.py')
    main(parser.parse_args().list)
