"""
Train and evaluate the runs of a list. The sweep is resumable: rerun the same command after an interruption.

    $ python -m study.sweep study/english.py --jobs=2 --corpus_dir=corpora    # adds a row per run to study/english.csv

A list is Python, like study/english.py. DATA is {folder: settings of prepare.py}; the option replaces {corpus_dir} in a
dataset. RUNS are entries with a name, a group, a config, a dtype, learning rates, seeds, the folder to `train` on and
`corpora`, {name: folder whose held-out split is measured}. Optional keys:

    source      another entry's name: the training of its model of the same seed continues, expanded to the tokenizer of
                the entry's own data
    edit        a module like study.frozen_bias, whose class MHF train.py and eval.py use (study/edit.py)
    recorded    the last commit whose train.py can train the entry: its rows stay, and sweep.py does not run it
    label       the entry's name in the tables of study/report.py

Other keys of an entry are settings of train.py and override the config. The first seed is trained at every learning
rate, the other seeds at the one with the fewest nats on the first corpus. All learning rates are trained first, then
all second seeds, then all third ones.

Group, name, learning rate and seed identify a row; its column `settings` has everything else that decides it, as JSON.
An entry with other settings needs another name. OMP_NUM_THREADS sets the threads of each run; by default the runs share
the cores. Run one sweep of a list at a time.
"""

import argparse
import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from configurator import find_settings, read_config
from mhf.data import Bins
from mhf.errors import InputError, install_excepthook
from mhf.sources import parse_mixture
from study.rows import commit, read_csv, read_rows, write_csv

REPO = Path(__file__).resolve().parent.parent
# what eval.py reports for a corpus
MEASURES = ('tokens', 'nats_per_token', 'bits_per_byte', 'top1_accuracy')
# the keys of an entry that are not settings of train.py
ENTRY_KEYS = {'name', 'group', 'config', 'train', 'corpora', 'learning_rates', 'seeds'}
ENTRY_KEYS |= {'source', 'label', 'edit', 'recorded'}
# settings of train.py that sweep.py sets itself, from the run's key or from DATA
SWEEP_SETTINGS = {'learning_rate', 'seed', 'out_dir', 'data_dir', 'dataset', 'tokenizer', 'init_from'}
# settings of train.py that do not change a row
OTHER_SETTINGS = {'eval_interval', 'log_interval', 'wandb', 'data_format', 'device'}
NOT_RECORDED = ENTRY_KEYS | SWEEP_SETTINGS | OTHER_SETTINGS


class Study:
    """A list of runs, and which of them failed in this sweep."""

    def __init__(self, path):
        scope = runpy.run_path(path)
        self.path = Path(path).resolve()
        self.csv = self.path.with_suffix('.csv')
        self.out = Path('out') / self.path.stem
        self.data = scope['DATA']
        self.entries = scope['RUNS']
        self.corpus_dir = ''
        self.failed = set()
        for entry in self.entries:
            entry.setdefault('label', entry['name'])
        for key in ('name', 'label'):
            [(name, count)] = Counter((entry['group'], entry[key]) for entry in self.entries).most_common(1)
            if count > 1:
                raise InputError(f'{path}: {count} entries have the {key} {name}; rename one')

    def settings(self, entry):
        """
        What decides the rows of an entry, besides learning rate and seed: settings of train.py, from its defaults, the
        config and the entry; the recipes of the data; the source. JSON gives the same values back.
        """
        config = {k: v for k, v in read_config(entry['config']).items() if k in train_defaults()}
        settings = train_defaults() | config | entry
        settings = {k: settings[k] for k in settings.keys() - NOT_RECORDED}
        corpora = {corpus: self.data[folder] for corpus, folder in entry['corpora'].items()}
        settings |= dict(train=self.data[entry['train']], corpora=corpora)
        settings |= dict(source=entry.get('source'), edit=entry.get('edit'))
        settings['dtype'] = entry['dtype']  # the default depends on the machine
        if counted := settings['counts_from']:
            settings['counts_from'] = self.data[entry['train'] if counted == 'train' else counted]
        return json.loads(json.dumps(settings, sort_keys=True))

    def dataset(self, folder):
        """The data set of a folder, with the option in place of {corpus_dir}."""
        return self.data[folder]['dataset'].replace('{corpus_dir}', self.corpus_dir)

    def key(self, entry, learning_rate, seed):
        """What identifies a run and its row."""
        return entry['group'], entry['name'], learning_rate, seed

    def source_key(self, entry, seed, rows):
        """The key of the run whose model an entry expands, of the same group if it has an entry of this name."""
        named = [e for e in self.entries if e['name'] == entry['source']]
        source = min(named, key=lambda e: e['group'] != entry['group'])
        return self.key(source, self.best_lr(source, rows), seed)

    def folder(self, key):
        """The folder of a run's checkpoint and output."""
        return self.out / re.sub(r'[^\w.+=-]+', '_', '_'.join(map(str, key)))

    def rows(self):
        """
        {key: row} of the CSV. Raises InputError if a row was trained with other settings than its entry has, or if the
        rows of a group were measured on different texts.
        """
        rows = read_rows(self.csv)
        sizes = {}
        for entry in self.entries:
            settings = self.settings(entry)
            keys = {self.key(entry, lr, seed) for lr in entry['learning_rates'] for seed in entry['seeds']}
            for key in rows.keys() & keys:
                # a setting that is newer than the row had its default
                recorded = train_defaults() | json.loads(rows[key]['settings'])
                if changed := [k for k in settings if recorded[k] != settings[k]]:
                    now = ', '.join(f'{k}={settings[k]} (its row: {recorded[k]})' for k in changed)
                    raise InputError(f'{self.path.name}: the entry of {key} has {now}; give the entry a new name')
                for corpus in entry['corpora']:
                    size = rows[key][f'{corpus}_tokens']
                    if sizes.setdefault((entry['group'], corpus), size) != size:
                        raise InputError(f'{self.csv.name}: {corpus} of {key} is not the text of the other rows')
        return rows

    def best_lr(self, entry, rows, so_far=False):
        """
        The learning rate whose first seed has the fewest nats, or None if none of several is finished. Unless so_far is
        set, None also while a learning rate has neither finished nor failed.
        """
        if len(entry['learning_rates']) == 1:
            return entry['learning_rates'][0]
        keys = {self.key(entry, lr, entry['seeds'][0]): lr for lr in entry['learning_rates']}
        if not so_far and not keys.keys() <= rows.keys() | self.failed:
            return None
        column = f'{next(iter(entry["corpora"]))}_nats_per_token'
        nats = {lr: float(rows[key][column]) for key, lr in keys.items() if key in rows}
        return min(nats, key=lambda lr: (nats[lr], lr), default=None)

    def best_rows(self, entry, rows):
        """The finished runs of an entry at its best learning rate so far, one row per seed."""
        lr = self.best_lr(entry, rows, so_far=True)
        keys = [self.key(entry, lr, seed) for seed in entry['seeds']]
        return [rows[key] for key in keys if key in rows]

    def runs(self, rows):
        """{key: entry} of every run whose learning rate is known: all first seeds, then all second ones."""
        runs = []
        for entry in self.entries:
            if 'recorded' in entry:
                continue
            best = self.best_lr(entry, rows)
            pairs = [(lr, 0) for lr in entry['learning_rates']]
            pairs += [(best, k) for k in range(len(entry['seeds']))] if best else []
            runs += [(k, self.key(entry, lr, entry['seeds'][k]), entry) for lr, k in pairs]
        runs.sort(key=lambda run: run[0])
        return {key: entry for _, key, entry in runs}

    def pending(self, rows):
        """{key: entry} of the runs that have no row yet and have not failed."""
        return {
            key: entry
            for key, entry in self.runs(rows).items()
            if key not in rows.keys() | self.failed
            if 'source' not in entry or self.source_key(entry, key[-1], rows) in rows
        }

    def run(self, key, entry):
        """Trains and evaluates a run; a finished training is kept. Returns its row. Raises InputError."""
        settings = json.dumps(self.settings(entry))
        folder = self.folder(key)
        record = folder / 'settings.json'
        if record.exists() and record.read_text() != settings:
            fix = 'give the entry a new name, or delete the folder'
            raise InputError(f'{folder} contains a run of {key} with other settings; {fix}')
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(settings)
        self.train(folder, key, entry)
        row = dict(zip(('group', 'name', 'learning_rate', 'seed'), key, strict=True))
        row |= dict(settings=settings, threads=os.environ['OMP_NUM_THREADS'], commit=commit())
        row |= training_columns(folder)
        # not needed to resume, expand or evaluate the run
        (folder / 'ckpt_best.pt').unlink(missing_ok=True)
        row |= self.evaluate(folder, entry, row['dtype'])
        nats = [f'{row[f"{corpus}_nats_per_token"]:.4f} nats per token of {corpus}' for corpus in entry['corpora']]
        print(f'{", ".join(map(str, key))}: {", ".join(nats)}', flush=True)
        return row

    def train(self, folder, key, entry):
        """Trains a run, or resumes it."""
        _, _, learning_rate, seed = key
        flags = {k: v for k, v in entry.items() if k not in ENTRY_KEYS}
        flags |= dict(learning_rate=learning_rate, seed=seed, data_dir=entry['train'], out_dir=folder)
        flags['tokenizer'] = self.data[entry['train']].get('tokenizer', 'mistral')
        if 'source' in entry:
            source = self.folder(self.source_key(entry, seed, read_rows(self.csv)))
            flags['init_from'] = folder / 'expanded'
            expansion = dict(source_model=source, output_dir=flags['init_from'], tokenizer=flags['tokenizer'])
            # informed signatures of new tokens: frequencies in as much text as the training data contain
            corpora = [corpus for corpus, _ in parse_mixture(self.dataset(entry['train']))]
            expansion['corpora'] = ','.join(corpora)
            expansion['max_bytes_per_language'] = Bins(entry['train'], 'train').bytes // len(corpora)
            if not flags['init_from'].exists():
                run_script(folder, 'expand.py', *as_flags(expansion))
        run_script(folder, 'train.py', entry['config'], *as_flags(flags), edit=entry.get('edit'))

    def evaluate(self, folder, entry, dtype):
        """Measures a trained run on the corpora, in the dtype of its training, and returns columns of its row."""
        flags = dict(out_dir=folder, dtype=dtype, tasks='bits_per_byte', text=','.join(entry['corpora'].values()))
        run_script(folder, 'eval.py', *as_flags(flags), f'--output_path={folder}/eval', edit=entry.get('edit'))
        # the name contains the date
        results = json.loads(max(folder.glob('eval/*/results_*.json')).read_text())
        row = dict(dtype=results['dtype'], torch=results['packages']['torch'])
        row['device'] = torch.cuda.get_device_name() if 'cuda' in results['device'] else results['device']
        for corpus, path in entry['corpora'].items():
            row |= {f'{corpus}_{name}': results['bits_per_byte'][path][name] for name in MEASURES}
        return row


def train_defaults():
    """Returns {name: default} of the settings of train.py."""
    return {name: ast.literal_eval(node.value) for name, node in find_settings('train.py').items()}


def as_flags(settings):
    return [f'--{name}={value}' for name, value in settings.items()]


def run_script(folder, name, *args, edit=None):
    """Runs a script, edited by a module; its output goes to `folder`. Raises InputError with its last line."""
    output = folder / f'{name}.out'
    command = ['-m', 'study.edit', edit, REPO / name] if edit else [REPO / name]
    with open(output, 'ab') as out:
        done = subprocess.run([sys.executable, *command, *args], stdout=out, stderr=out)
    if done.returncode:
        *_, last_line = ['', *output.read_text(errors='replace').splitlines()]
        raise InputError(f'{name} ended with {done.returncode}: {last_line}; see {output}')


def training_columns(folder):
    """Returns columns from a finished run's checkpoint and log."""
    state = torch.load(folder / 'ckpt.pt', weights_only=True, mmap=True)
    parts = dict(embed='embedding', encoder='hash', hash_decoder='hash')
    counts = Counter(embedding=0, hash=0, decoder=0)
    for name, tensor in state['model'].items():
        if tensor.is_floating_point() and name != 'bias':  # frozen_bias.py's
            counts[parts.get(name.split('.')[0], 'decoder')] += tensor.numel()
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    row = dict(dtype=state['settings']['dtype'], trained_tokens=log[-1]['tokens'])
    validations = [(event['tokens'], round(event['val_bpb'], 5)) for event in log if 'val_bpb' in event]
    row['validation'] = json.dumps(validations)  # training tokens, bits per byte
    return row | {f'params_{part}': count for part, count in counts.items()}


def prepare(study):
    """Prepares the data of a list; complete folders are skipped. Raises InputError."""
    study.out.mkdir(parents=True, exist_ok=True)
    for folder, recipe in study.data.items():
        print(f'preparing {folder}', flush=True)
        # every model of the list can read token ids
        flags = recipe | dict(dataset=study.dataset(folder), data_format='ids', data_dir=folder)
        run_script(study.out, 'prepare.py', *as_flags(flags))


def sweep(study, jobs, corpus_dir):
    """Runs what has no row yet, `jobs` runs at a time. Raises InputError at the end if runs failed."""
    if not study.pending(study.rows()):
        print(f'{study.path.name}: no run is left that can start; finished ones are in {study.csv.name}', flush=True)
        return
    os.environ.setdefault('OMP_NUM_THREADS', str(max(1, os.cpu_count() // jobs)))  # of each run
    study.corpus_dir = corpus_dir
    prepare(study)
    running = {}
    with ThreadPoolExecutor(jobs) as pool:
        while (pending := study.pending(study.rows())) or running:
            waiting = [key for key in pending if key not in running.values()]
            for key in waiting[: jobs - len(running)]:
                print(f'starting {", ".join(map(str, key))}', flush=True)
                running[pool.submit(study.run, key, pending[key])] = key
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                try:
                    write_csv(study.csv, [*read_csv(study.csv), future.result()])
                except InputError as error:
                    study.failed.add(key)
                    print(error, file=sys.stderr, flush=True)
    if study.failed:
        raise InputError(f'{len(study.failed)} runs failed; rerun the same command to retry them')


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('lists', nargs='+', help='lists of runs, like study/english.py')
    parser.add_argument('--jobs', type=int, default=1, help='parallel runs')
    parser.add_argument('--corpus_dir', default='../shared/data/text', help="the folder of a list's corpora")
    args = parser.parse_args()
    for study in map(Study, args.lists):
        sweep(study, args.jobs, args.corpus_dir)


if __name__ == '__main__':
    main()
