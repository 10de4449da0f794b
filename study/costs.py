"""
Measure the training step of each model of a list with bench.py, relative to the first model's.

    $ python -m study.costs study/english.py     # minutes, on an idle machine; writes study/costs.csv

The models are those of the list's first group, each shape once. A step is forward, backward, clipping and AdamW on one
micro-batch; relative_time is of the median of 15 repetitions. Rows of this device and number of threads are replaced.
"""

import argparse
import json
import subprocess
import sys

from configurator import InputError, install_excepthook, settings_of
from model import MHFConfig
from study.rows import commit, read_csv, write_csv
from study.sweep import REPO, Study, as_flags

REPETITIONS = 15
# of bench.py's section `train`, and of its top level
COLUMNS = ('parameters', 'tokens_per_s', 'flops_per_token', 'gemm_share', 'peak_memory')
MACHINE = ('device', 'dtype', 'torch', 'threads', 'gemm_flops')


def shapes(study):
    """{name: settings of bench.py} of the list's first group, each shape once."""
    known = settings_of('bench.py').keys() & MHFConfig.__annotations__
    distinct = {}
    for entry in study.entries:
        settings = study.settings(entry)
        shape = {k: settings[k] for k in sorted(known & settings.keys())} | dict(
            micro_batch_size=settings['batch_size']
        )
        if entry['group'] == study.entries[0]['group'] and shape not in distinct.values():
            distinct[entry['name']] = shape
    return distinct


def measure(shape):
    """Runs bench.py on a shape. Returns its JSON, and the section `train` of the shape. Raises InputError."""
    variant = shape['loss'] if shape['num_hashes'] else 'Standard'
    flags = shape | dict(benchmarks='train', variants=variant, repeats=REPETITIONS, compile=False, json_output=True)
    done = subprocess.run([sys.executable, REPO / 'bench.py', *as_flags(flags)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f'bench.py ended with {done.returncode}: {done.stderr[-500:]}')
    results = json.loads(done.stdout)
    return results, results['train'][variant]


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('list', help='a list of runs, like study/english.py')
    study = Study(parser.parse_args().list)
    path = study.path.with_name('costs.csv')
    rows = []
    for name, shape in shapes(study).items():
        results, step = measure(shape)
        first = rows[0] if rows else step
        ratio = f'{first["tokens_per_s"] / step["tokens_per_s"]:.3f}'
        row = dict(model=name, relative_time=ratio) | {column: step[column] for column in COLUMNS}
        rows.append(row | {column: results[column] for column in MACHINE} | dict(commit=commit()))
        print(f'{name}: {step["tokens_per_s"]:,.0f} tokens/s, {ratio} x the time of the first', flush=True)
    machine = (rows[0]['device'], str(rows[0]['threads']))
    write_csv(path, [row for row in read_csv(path) if (row['device'], row['threads']) != machine] + rows)


if __name__ == '__main__':
    main()
