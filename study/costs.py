"""
Cost: time and memory of a training step of each variant

    $ python -m study.costs study/english.py     # minutes, of an idle machine; writes study/costs.csv

The models are those of the list's first group, each shape once. bench.py measures each: forward, backward, clipping and
AdamW on one micro-batch. Time is the median of 15 repetitions, as a multiple of the first model's; memory is what a
step needs beyond the parameters and AdamW's moments. Each device and number of threads has a column here, and the CSV
names the commit that it measured. (In those of 2026-11-22 the models took turns within one process.)
On a GPU steps as small as these are mostly launches of kernels.
"""

import argparse
import csv
import json
import subprocess
import sys

from configurator import InputError, install_excepthook, settings_of
from mhf.data import replace_durably
from model import MHFConfig
from study.rows import commit
from study.sweep import REPO, Study

REPETITIONS = 15
# of bench.py's section `train`, and of its top level
COLUMNS = ('parameters', 'tokens_per_s', 'flops_per_token', 'gemm_share', 'peak_memory')
MACHINE = ('device', 'dtype', 'torch', 'threads', 'gemm_flops')


def shapes(study):
    """{name: settings of bench.py} of the list's first group, each shape once."""
    known = settings_of('bench.py').keys() & MHFConfig.__annotations__
    distinct = {}
    for entry in next(iter(study.groups.values())):
        settings = study.settings(entry)
        shape = {k: settings[k] for k in sorted(known & settings.keys())}
        shape['micro_batch_size'] = settings['batch_size']
        if not shape['num_hashes']:
            del shape['num_buckets']
        if shape not in distinct.values():
            distinct[entry['name']] = shape
    return distinct


def measure(shape):
    """Runs bench.py on a shape. Returns its JSON, and the section `train` of the shape. Raises InputError."""
    variant = shape['loss'] if shape['num_hashes'] else 'Standard'
    flags = shape | dict(benchmarks='train', variants=variant, repeats=REPETITIONS, compile=False, json_output=True)
    command = [sys.executable, REPO / 'bench.py', *(f'--{name}={value}' for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f'bench.py ended with {done.returncode}: {done.stderr[-500:]}')
    results = json.loads(done.stdout)
    return results, results['train'][variant]


def measure_all(study):
    """[row of the CSV] of each shape. Prints the speed of each."""
    rows = []
    first_seconds = None
    for name, shape in shapes(study).items():
        results, step = measure(shape)
        first_seconds = first_seconds or step['seconds']
        ratio = step['seconds'] / first_seconds
        print(f'{name}: {step["tokens_per_s"]:,.0f} tokens/s, {ratio:.2f} times the first', flush=True)
        row = {'model': name, 'time / the first': f'{ratio:.3f}'}
        row |= {column: step[column] for column in COLUMNS}
        row |= {column: results[column] for column in MACHINE}
        rows.append(row | dict(commit=commit()))
    return rows


def other_rows(path, rows):
    """The rows of the CSV from another device, or another number of threads."""
    if not path.exists():
        return []
    measured = (rows[0]['device'], str(rows[0]['threads']))
    with open(path, newline='') as f:
        return [row for row in csv.DictReader(f) if (row['device'], row['threads']) != measured]


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/english.py')
    study = Study(parser.parse_args().list)
    rows = measure_all(study)
    path = study.path.with_name('costs.csv')
    temporary = path.with_suffix('.tmp')
    with open(temporary, 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(other_rows(path, rows) + rows)
    replace_durably(temporary, path)


if __name__ == '__main__':
    main()
