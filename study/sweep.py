"""
Trains and evaluates the runs of a list, so many at a time; stopped or killed at any moment, the same command goes on.

    $ python -m study.sweep study/english.py --jobs=2                      # appends a row a run to study/english.csv
    $ python -m study.sweep study/english.py study/vocabulary.py study/paper100m.py --report     # study/RESULTS.md
    $ python -m study.sweep study/mine.py --report                         # study/mine.md of a list of your own

A list is Python, as study/english.py: DATA, {folder: settings of prepare.py}, and RUNS, entries with a name, a group, a
config, seeds and rates, the folder to `train` on and `texts`, {name: folder whose held-out split is measured}. All else
in an entry overrides the config. The first seed is trained at every rate, the others at the rate that had the fewest
nats on the first text; rates='H3' is the best rate of the entry H3 of the same group, or if it has none, of the first
other group. First come the rates, then the second seeds of all entries, then the third. CLAIMS, SENTENCES, MAIN,
VOCABULARIES and OVER_TOKENS are for the report. A run is known by a digest of its settings and data: names may change,
and no row is taken for another's.

Each run has as many threads as OMP_NUM_THREADS says, or else its share of the cores.
"""

import argparse
import fcntl
import hashlib
import json
import os
import runpy
import statistics
import subprocess
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from configurator import InputError, read_config, settings_of
from mhf.files import replace_durably
from mhf.plot import read_log
from study import report
from study.rows import add_row, commit, read_rows

REPO = Path(__file__).resolve().parent.parent
# what eval.py says of a text
MEASURES = ('tokens', 'nats_per_token', 'bits_per_byte', 'top1_accuracy', 'expected_calibration_error')
# the parts of an entry that are no settings of train.py
OF_ENTRY = {'name', 'group', 'config', 'train', 'texts', 'rates', 'seeds'}
# settings that a config may have, but that the list decides here
OF_DATA = {'out_dir', 'data_dir', 'dataset', 'tokenizer'}
# a run's digest leaves these out: every run was so before there were such settings
NOT_IN_DIGEST = dict(encoder_init='normal', embedding_scale=1.0)


class Study:
    """A list of runs, and which of them failed in this sweep."""

    def __init__(self, path):
        if not Path(path).is_file():
            raise InputError(f'{path}: no such file; a list of runs is Python, like study/english.py')
        read = runpy.run_path(path)
        if missing := {'DATA', 'RUNS'} - read.keys():
            raise InputError(f'{path}: no {" and no ".join(sorted(missing))}; a list has both, like study/english.py')
        self.path = Path(path).resolve()
        self.csv = self.path.with_suffix('.csv')
        self.out = Path('out') / self.path.stem
        self.doc = read['__doc__'] or self.path.stem
        self.data = read['DATA']
        self.entries = read['RUNS']
        self.main = read.get('MAIN')
        self.claims = read.get('CLAIMS', [])
        self.sentences = read.get('SENTENCES', {})
        self.vocabularies = read.get('VOCABULARIES', {})
        self.over_tokens = read.get('OVER_TOKENS', {})
        self.failed = {}
        if not self.entries:
            raise InputError(f'{path}: RUNS is empty; a list has entries, like study/english.py')
        for entry in self.entries:
            missing = OF_ENTRY - entry.keys()
            # folders that DATA does not make
            if not missing:
                missing = {entry['train'], *entry['texts'].values()} - self.data.keys()
            if missing:
                raise InputError(f'{path}: entry {entry} lacks {missing}')
            self.curve(entry)

    def curve(self, entry):
        """The entry whose rates are tried for this one: itself, or the one that it names."""
        if isinstance(entry['rates'], tuple):
            return entry
        named = [e for e in self.entries if e['name'] == entry['rates'] and isinstance(e['rates'], tuple)]
        if not named:
            raise InputError(f'{entry["name"]}: rates={entry["rates"]!r} names no entry with rates')
        of_its_group = [e for e in named if e['group'] == entry['group']]
        return (of_its_group or named)[0]

    def first_text(self, entry):
        """The name of the text that chooses an entry's rate."""
        return next(iter(entry['texts']))

    def settings(self, entry, rate, seed):
        """The settings of a run that its config and entry name, and how it begins; others are train.py's defaults."""
        defaults = settings_of('train.py')
        config = {k: v for k, v in read_config(entry['config']).items() if k in defaults}
        settings = {k: defaults[k] for k in NOT_IN_DIGEST} | config | entry | dict(learning_rate=rate, seed=seed)
        return {k: settings[k] for k in sorted(settings.keys() - OF_ENTRY - OF_DATA)}

    def key(self, entry, settings):
        """The digest of all that decides a run's numbers. Of data files it has the names and not the folders."""
        recipes = [self.data[folder] for folder in (entry['train'], *entry['texts'].values())]
        recipes = [recipe | dict(dataset=recipe['dataset'].split('/')[-1]) for recipe in recipes]
        settings = {k: v for k, v in settings.items() if k not in NOT_IN_DIGEST or v != NOT_IN_DIGEST[k]}
        return hashlib.sha256(json.dumps([settings, recipes]).encode()).hexdigest()[:12]

    def best_rate(self, entry, rows, so_far=False):
        """
        The rate whose first seed has the fewest nats, or None where no rate is finished. Unless so_far is set, it is
        None also while a rate is neither finished nor failed.
        """
        curve = self.curve(entry)
        rates = {self.key(curve, self.settings(curve, rate, curve['seeds'][0])): rate for rate in curve['rates']}
        ended = rows.keys() | self.failed.keys()
        if not so_far and not rates.keys() <= ended:
            return None
        column = f'{self.first_text(curve)}_nats_per_token'
        nats = {rate: float(rows[key][column]) for key, rate in rates.items() if key in rows}
        return min(nats, key=lambda rate: (nats[rate], rate), default=None)

    def runs(self, rows):
        """(key, entry, settings) of every run whose rate is known by now: all first seeds, then all second ones."""
        of_seeds = {}
        for entry in self.entries:
            seeds = entry['seeds']
            pairs = []
            if self.curve(entry) is entry:
                pairs += [(rate, seeds[0]) for rate in entry['rates']]
            best = self.best_rate(entry, rows)
            if best:
                pairs += [(best, seed) for seed in seeds]
            for rate, seed in dict.fromkeys(pairs):
                settings = self.settings(entry, rate, seed)
                run = self.key(entry, settings), entry, settings
                of_seeds.setdefault(seeds.index(seed), []).append(run)
        return [run for place in sorted(of_seeds) for run in of_seeds[place]]

    def left(self, rows):
        """The runs that have no row yet and have not failed."""
        return [run for run in self.runs(rows) if run[0] not in rows and run[0] not in self.failed]

    def run(self, key, entry, settings, threads):
        """Trains, evaluates and appends the row. Raises InputError where a script fails."""
        folder = self.out / key
        folder.mkdir(parents=True, exist_ok=True)
        # a process of a sweep that was killed may be at work still: it holds the lock until it ends
        with open(folder / 'lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if key in read_rows(self.csv):
                return
            scripts = Scripts(folder, lock, dict(OMP_NUM_THREADS=threads))
            row = dict(name=entry['name'], group=entry['group'], key=key, threads=threads) | settings
            row['commit'] = commit()
            # train.py writes it last of all. The memory of a training that a killed sweep had started is not known
            if not (folder / 'loss.png').exists():
                row['peak_mb'] = self.train(scripts, entry, settings)
            row |= weights_only(folder)
            row |= self.evaluate(scripts, entry, row['dtype'])
            add_row(self.csv, row)
        nats = [row[f'{text}_nats_per_token'] for text in entry['texts']]
        print(', '.join([described(entry, settings), *map('{:.4f}'.format, nats)]), flush=True)

    def train(self, scripts, entry, settings):
        """Trains a run -> the peak memory in MB."""
        tokenizer = self.data[entry['train']].get('tokenizer', 'mistral')
        flags = settings | dict(
            data_dir=entry['train'], tokenizer=tokenizer, out_dir=scripts.folder, keep_checkpoints=0
        )
        return scripts.run('train.py', '--auto_resume', *as_flags(flags))

    def evaluate(self, scripts, entry, dtype):
        """Measures a trained run on the texts, in the dtype of its training -> columns of its row."""
        folder = scripts.folder
        flags = dict(out_dir=folder, dtype=dtype, tasks='bits_per_byte', text=','.join(entry['texts'].values()))
        scripts.run('eval.py', *as_flags(flags), f'--output_path={folder}/eval.json')
        scripts.run('study.details', folder, entry['train'], entry['texts'][self.first_text(entry)])
        # eval.py puts the date into the name
        results = json.loads(max(folder.glob('eval_*.json')).read_text())
        row = dict(dtype=results['dtype'], torch=results['packages']['torch'])
        row['device'] = torch.cuda.get_device_name() if 'cuda' in results['device'] else results['device']
        for text, path in entry['texts'].items():
            row |= {f'{text}_{name}': results['bits_per_byte'][path][name] for name in MEASURES}
        return row | json.loads((folder / 'details.json').read_text())


def described(entry, settings):
    return f'{entry["name"]}, {entry["group"]}, {settings["learning_rate"]}, {settings["seed"]}'


def as_flags(settings):
    return [f'--{name}={value}' for name, value in settings.items()]


class Scripts:
    """
    Runs scripts of this repository, by their files, and modules of study/, by their names, from any working folder.
    What they say goes into `folder`. They keep the file `lock` open, and with it its lock, until they end.
    """

    def __init__(self, folder, lock, environment):
        self.folder = folder
        self.lock = lock
        python_path = [str(REPO), *filter(None, [os.environ.get('PYTHONPATH')])]
        self.environment = os.environ | environment | dict(PYTHONPATH=os.pathsep.join(python_path))

    def run(self, name, *args):
        """Runs one to its end -> its peak memory in MB. Raises InputError where it fails."""
        command = [str(REPO / name)] if name.endswith('.py') else ['-m', name]
        with open(self.folder / f'{name}.out', 'ab') as out:
            process = subprocess.Popen(
                [sys.executable, *command, *args],
                stdout=out,
                stderr=out,
                pass_fds=[self.lock.fileno()],
                env=self.environment,
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise InputError(f'{name} ended with {process.returncode}; see {out.name}')
        return usage.ru_maxrss // 1024


def weights_only(folder):
    """Takes the optimizer, two thirds of it, out of a finished run's checkpoint -> what it and the log tell the row."""
    state = torch.load(folder / 'ckpt.pt', weights_only=True)
    state['optimizer'] = dict(state={}, param_groups=[{}])
    torch.save(state, folder / 'ckpt.pt.tmp')
    (folder / 'ckpt.pt.sha256').unlink(missing_ok=True)
    replace_durably(folder / 'ckpt.pt.tmp', folder / 'ckpt.pt')
    (folder / 'ckpt_best.pt').unlink(missing_ok=True)
    # `mixers` is what older checkpoints called the Hash Decoder
    groups = dict(embed='embedding', encoder='hash', hash_decoder='hash', mixers='hash')
    numbers = Counter(embedding=0, hash=0, decoder=0)
    for name, tensor in state['model'].items():
        if tensor.is_floating_point():
            numbers[groups.get(name.split('.')[0], 'decoder')] += tensor.numel()
    log = read_log(folder / 'log.jsonl')
    last = log[-1]
    row = dict(tokens_per_s=statistics.median(event['tokens_per_s'] for event in log if 'tokens_per_s' in event))
    # a GPU's
    if 'peak_gpu_mb' in last:
        row['peak_gpu_mb'] = last['peak_gpu_mb']
    row['dtype'] = state['config']['dtype']
    row['trained_tokens'] = last['tokens']
    return row | {f'params_{group}': number for group, number in numbers.items()}


def prepare(study):
    """Prepares the data of a list; what is there already is kept."""
    with open(study.out / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scripts = Scripts(study.out, lock, environment={})
        for folder, recipe in study.data.items():
            print(f'preparing {folder}', flush=True)
            # token ids serve every model of the list
            scripts.run('prepare.py', *as_flags(recipe | dict(data_format='ids', data_dir=folder)))


def threads_of_a_run(jobs):
    """OMP_NUM_THREADS, where the user has set it; else a run's share of the cores."""
    return os.environ.get('OMP_NUM_THREADS') or str(max(1, os.cpu_count() // jobs))


def sweep(study, jobs):
    """Runs what has no row yet, `jobs` at a time. Raises InputError at the end if runs failed."""
    if not study.left(read_rows(study.csv)):
        print(f'{study.path.name}: nothing is left to do, {study.csv.name} has every run', flush=True)
        return
    study.out.mkdir(parents=True, exist_ok=True)
    prepare(study)
    threads = threads_of_a_run(jobs)
    nats = [f'{text}_nats_per_token' for text in study.entries[0]['texts']]
    print(', '.join(['name', 'group', 'learning_rate', 'seed', *nats]), flush=True)
    running = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            for key, entry, settings in study.left(read_rows(study.csv)):
                if len(running) < jobs and key not in running.values():
                    print(f'starting {described(entry, settings)}', flush=True)
                    running[pool.submit(study.run, key, entry, settings, threads)] = key
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                if error := future.exception():
                    study.failed[key] = error
                    print(error, file=sys.stderr, flush=True)
    if study.failed:
        raise InputError(f'{len(study.failed)} runs failed; the same command tries them again')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('lists', nargs='+', help='lists of runs, like study/english.py')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time, which share the cores')
    parser.add_argument('--report', action='store_true', help='write the report and its pictures instead')
    args = parser.parse_args()
    if args.jobs < 1:
        raise InputError(f'--jobs={args.jobs}: must be 1 or more')
    studies = [Study(path) for path in args.lists]
    if args.report:
        report.write(studies)
        return
    try:
        for study in studies:
            sweep(study, args.jobs)
    except KeyboardInterrupt:
        sys.exit('interrupted; the same command goes on')


if __name__ == '__main__':
    main()
