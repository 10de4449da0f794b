"""
Trains and evaluates the runs of a list, so many at a time; stopped or killed at any moment, the same command goes on.

    $ python study/sweep.py study/english.py --jobs=2       # appends a row a run to study/english.csv
    $ python study/sweep.py study/english.py --report       # RESULTS.md and its pictures, from the CSV alone

A list is Python: DATA, {folder: settings of prepare.py}, and RUNS, a list of entries like

    dict(name='H4', group='1.02 M tokens', config='config/mhf_tiny.py', train='data/english', rates=(1e-3, 2e-3),
         texts=dict(english='data/english'), seeds=(1, 2, 3), num_hashes=4)

The model is trained on `train` and measured on the held-out split of each of `texts`. The first seed is trained at
every rate, the others at the best of these, by nats on the first text; rates='H3' takes the best rate of the entry H3
of the same group. The rest are settings of train.py, which override the config's; what COMMON has serves all entries.
A run is known by a digest of its settings and data: names may change, and no row is taken for another's.
"""

import argparse
import csv
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import report  # noqa: E402

from bins import replace_durably  # noqa: E402
from configurator import InputError, declared, read_config  # noqa: E402
from plot import read_log  # noqa: E402

# what eval.py says of a text
MEASURES = ('tokens', 'nats_per_token', 'bits_per_byte', 'top1_accuracy', 'expected_calibration_error')
OF_ENTRY = {'name', 'group', 'config', 'train', 'texts', 'rates', 'seeds'}
# what a config says of data, which the list says here
OF_DATA = {'out_dir', 'data_dir', 'dataset', 'tokenizer'}


def read_rows(path):
    """{key: row} of a CSV; a row is a dict of strings."""
    if not path.exists():
        return {}
    with open(path, newline='') as f:
        return {row['key']: row for row in csv.DictReader(f)}


def add_row(path, row):
    """The CSV is written anew beside itself: no kill leaves half a row, and a new column is no trouble."""
    with open(path.with_suffix('.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows, temporary = [*read_rows(path).values(), row], path.with_suffix('.tmp')
        with open(temporary, 'w', newline='') as f:
            writer = csv.DictWriter(f, list(dict.fromkeys(column for r in rows for column in r)), lineterminator='\n')
            writer.writeheader()
            writer.writerows(rows)
        replace_durably(temporary, path)


class Study:
    """A list of runs, and which of them failed in this sweep."""

    def __init__(self, path):
        self.path, self.failed = Path(path).resolve(), {}
        read = runpy.run_path(str(self.path))
        self.data, self.entries = read['DATA'], [read.get('COMMON', {}) | entry for entry in read['RUNS']]
        self.doc = read['__doc__'] or self.path.stem
        self.csv, self.out = self.path.with_suffix('.csv'), Path('out') / self.path.stem
        # by group and name, those with rates of their own
        self.curves = {(e.get('group'), e.get('name')): e for e in self.entries if isinstance(e.get('rates'), tuple)}
        for e in self.entries:
            if missing := OF_ENTRY - e.keys() or {e['train'], *e['texts'].values()} - self.data.keys():
                raise InputError(f'{path}: entry {e} lacks {missing}')
            if self.curve(e) is None:
                raise InputError(f'{path}: rates={e["rates"]!r}: no entry of {e["group"]!r} with rates is called so')

    def curve(self, entry):
        """The entry whose rates are tried for this one, or None."""
        return entry if isinstance(entry['rates'], tuple) else self.curves.get((entry['group'], entry['rates']))

    def settings(self, entry, rate, seed):
        """What a run's config and entry say of its training; all else is train.py's default."""
        config = {k: v for k, v in read_config(entry['config']).items() if k in declared('train.py')}
        settings = config | entry | dict(learning_rate=rate, seed=seed)
        return {k: settings[k] for k in sorted(settings.keys() - OF_ENTRY - OF_DATA)}

    def key(self, entry, settings):
        """The digest of all that decides a run's numbers; of data files only their names, wherever they lie."""
        recipes = [self.data[folder] for folder in (entry['train'], *entry['texts'].values())]
        recipes = [recipe | dict(dataset=recipe['dataset'].split('/')[-1]) for recipe in recipes]
        return hashlib.sha256(json.dumps([settings, recipes]).encode()).hexdigest()[:12]

    def best_rate(self, entry, rows):
        """The rate whose first seed has the fewest nats; None while one of these is neither finished nor failed."""
        curve = self.curve(entry)
        keys = {rate: self.key(curve, self.settings(curve, rate, curve['seeds'][0])) for rate in curve['rates']}
        if any(key not in rows and key not in self.failed for key in keys.values()):
            return None
        first = f'{next(iter(curve["texts"]))}_nats_per_token'
        nats = {rate: float(rows[key][first]) for rate, key in keys.items() if key in rows}
        return min(nats, key=nats.get, default=None)

    def runs(self, rows):
        """(key, entry, settings) of every run whose rate is known by now, in the order of the list."""
        for entry in self.entries:
            tried = [(rate, entry['seeds'][0]) for rate in entry['rates'] if self.curve(entry) is entry]
            rate = self.best_rate(entry, rows)
            best = [(rate, seed) for seed in entry['seeds'] if rate and (rate, seed) not in tried]
            for settings in (self.settings(entry, *rate_and_seed) for rate_and_seed in tried + best):
                yield self.key(entry, settings), entry, settings

    def run(self, key, entry, settings, threads):
        """Trains, evaluates and appends the row. Raises InputError with what a script said last."""
        folder = self.out / key
        folder.mkdir(parents=True, exist_ok=True)
        # a process of a sweep that was killed may be at work still: it holds the lock until it ends
        with open(folder / 'lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if key in read_rows(self.csv):
                return
            git = ['git', '-C', str(HERE), 'describe', '--always', '--dirty', '--exclude=*']
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
            row = dict(name=entry['name'], group=entry['group'], key=key, commit=commit, threads=threads) | settings
            how = dict(pass_fds=[lock.fileno()], env=os.environ | dict(OMP_NUM_THREADS=str(threads)))
            tokenizer, peak = self.data[entry['train']].get('tokenizer', 'mistral'), folder / 'peak_mb'
            if not peak.exists():
                # by a process that nobody measured, because its sweep was killed
                is_trained = (folder / 'loss.png').exists()
                flags = settings | dict(data_dir=entry['train'], tokenizer=tokenizer, out_dir=folder, keep=0)
                needed = script('train.py', folder, '--auto_resume', *[f'--{k}={v}' for k, v in flags.items()], **how)
                peak.write_text('' if is_trained else str(needed))
            row |= dict(peak_mb=peak.read_text()) | weights_only(folder)
            save, text = folder / 'results.json', ','.join(entry['texts'].values())
            where = f'--out_dir={folder}', f'--save={save}', f'--text={text}'
            script('eval.py', folder, '--tasks=bits_per_byte', *where, **how)
            results = json.loads(save.read_text())
            row |= dict(dtype=results['dtype'], torch=results['versions']['torch'])
            for text, path in entry['texts'].items():
                row |= {f'{text}_{name}': results['bits_per_byte'][path][name] for name in MEASURES}
            add_row(self.csv, row)
        nats = ', '.join(f'{text} {row[f"{text}_nats_per_token"]:.4f}' for text in entry['texts'])
        print(f'{row["group"]}, {row["name"]}, {row["learning_rate"]:g}, seed {row["seed"]}: {nats}', flush=True)


def script(name, folder, *args, **how):
    """Runs a script of ours with its output in `folder` -> its peak memory in MB."""
    with open(folder / f'{name}.out', 'ab') as out:
        process = subprocess.Popen([sys.executable, str(HERE.parent / name), *args], stdout=out, stderr=out, **how)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = (folder / f'{name}.out').read_text(errors='replace').strip().split('\n')[-1]
        raise InputError(f'{folder}: {name} ended with {process.returncode}: {said[-300:]}')
    return usage.ru_maxrss // 1024


def weights_only(folder):
    """Takes the optimizer, two thirds of it, out of a finished run's checkpoint -> what it and the log tell the row."""
    import torch

    from checkpoint import digest_of_state

    state = torch.load(folder / 'ckpt.pt', weights_only=True)
    state['optimizer'] = dict(state={}, param_groups=[{}])
    state['sha256'] = {k: digest_of_state(v) for k, v in state.items() if k != 'sha256'}
    torch.save(state, folder / 'ckpt.pt.tmp')
    replace_durably(folder / 'ckpt.pt.tmp', folder / 'ckpt.pt')
    (folder / 'ckpt_best.pt').unlink(missing_ok=True)
    parts, numbers = dict(embed='embedding', encoder='hash', mixers='hash'), Counter(embedding=0, hash=0, decoder=0)
    for name, tensor in state['model'].items():
        numbers[parts.get(name.split('.')[0], 'decoder')] += tensor.numel() * tensor.is_floating_point()
    speeds = [event['tokens_per_s'] for event in read_log(folder / 'log.jsonl') if 'tokens_per_s' in event]
    row = dict(trained_tokens=state['step'] * state['config']['batch_size'] * state['config']['block_size'])
    row |= {f'params_{part}': number for part, number in numbers.items()}
    return row | dict(tokens_per_s=statistics.median(speeds))


def sweep(study, jobs):
    threads, running = max(1, os.cpu_count() // jobs), {}
    for folder, recipe in study.data.items():
        flags = [f'--{k}={v}' for k, v in recipe.items()]
        if subprocess.run([sys.executable, HERE.parent / 'prepare.py', f'--data_dir={folder}', *flags]).returncode:
            raise InputError(f'{folder} could not be prepared')
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            rows = read_rows(study.csv)
            for key, *run in study.runs(rows):
                if len(running) < jobs and not any(key in known for known in (rows, study.failed, running.values())):
                    running[pool.submit(study.run, key, *run, threads)] = key
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                if error := future.exception():
                    study.failed[key] = error
                    print(error, file=sys.stderr, flush=True)
    if study.failed:
        raise InputError(f'{len(study.failed)} runs failed; the same command tries them again')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('lists', nargs='+', help='lists of runs, like study/english.py')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time, which share the cores')
    parser.add_argument('--report', action='store_true', help='write RESULTS.md and its pictures instead')
    args = parser.parse_args()
    studies = [Study(path) for path in args.lists]
    if args.report:
        report.write(studies, read_rows)
    else:
        for study in studies:
            sweep(study, args.jobs)
