"""
Trains and evaluates the runs of a list, so many at a time; stopped or killed at any moment, the same command goes on.

    $ python study/sweep.py study/english.py --jobs=2                      # appends a row a run to study/english.csv
    $ python study/sweep.py study/english.py study/vocabulary.py --report  # RESULTS.md and its pictures, from the CSVs
    $ python study/sweep.py study/mine.py --report                         # study/mine.md of a list of your own

A list is Python, as study/english.py: DATA, {folder: settings of prepare.py}, and RUNS, entries with a name, a group, a
config, seeds and rates, the folder to `train` on and `texts`, {name: folder whose held-out split is measured}; the rest
overrides the config. The first seed is trained at every rate, the others at the best one, by nats on the first text;
rates='H3' is the best one of the entry H3 of the same group. CLAIMS, MAIN and VOCABULARIES are for the report. A run is
known by a digest of its settings and data: names may change, and no row is taken for another's.

Each run has the threads of OMP_NUM_THREADS, or else its share of the cores.
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import report  # noqa: E402
import torch  # noqa: E402
from rows import add_row, commit, read_rows  # noqa: E402

from configurator import InputError, read_config, settings_of  # noqa: E402
from mhf.files import replace_durably  # noqa: E402
from mhf.plot import read_log  # noqa: E402

# what eval.py says of a text
MEASURES = ('tokens', 'nats_per_token', 'bits_per_byte', 'top1_accuracy', 'expected_calibration_error')
OF_ENTRY = {'name', 'group', 'config', 'train', 'texts', 'rates', 'seeds'}
# of a config; here the list says it
OF_DATA = {'out_dir', 'data_dir', 'dataset', 'tokenizer'}


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
        self.vocabularies = read.get('VOCABULARIES', {})
        self.failed = {}
        if not self.entries:
            raise InputError(f'{path}: RUNS is empty; a list has entries, like study/english.py')
        for entry in self.entries:
            if missing := OF_ENTRY - entry.keys() or {entry['train'], *entry['texts'].values()} - self.data.keys():
                raise InputError(f'{path}: entry {entry} lacks {missing}')
            self.curve(entry)

    def curve(self, entry):
        """The entry whose rates are tried for this one: itself, or the one that it names."""
        for e in [entry, *(e for e in self.entries if (e['group'], e['name']) == (entry['group'], entry['rates']))]:
            if isinstance(e['rates'], tuple):
                return e
        raise InputError(f'{entry["name"]}: rates={entry["rates"]!r} names no entry of its group with rates')

    def first_text(self, entry):
        """The name of the text that chooses an entry's rate."""
        return next(iter(entry['texts']))

    def settings(self, entry, rate, seed):
        """What a run's config and entry say of its training; all else is train.py's default."""
        config = {k: v for k, v in read_config(entry['config']).items() if k in settings_of('train.py')}
        settings = config | entry | dict(learning_rate=rate, seed=seed)
        return {k: settings[k] for k in sorted(settings.keys() - OF_ENTRY - OF_DATA)}

    def key(self, entry, settings):
        """The digest of all that decides a run's numbers; of data files only their names, wherever they lie."""
        recipes = [self.data[folder] for folder in (entry['train'], *entry['texts'].values())]
        recipes = [recipe | dict(dataset=recipe['dataset'].split('/')[-1]) for recipe in recipes]
        return hashlib.sha256(json.dumps([settings, recipes]).encode()).hexdigest()[:12]

    def best_rate(self, entry, rows, so_far=False):
        """The rate whose first seed has the fewest nats; None while one is neither finished nor failed, but so_far."""
        curve = self.curve(entry)
        rates = {self.key(curve, self.settings(curve, rate, curve['seeds'][0])): rate for rate in curve['rates']}
        if not (so_far or rates.keys() <= rows.keys() | self.failed.keys()) or not rates.keys() & rows.keys():
            return None
        column = f'{self.first_text(curve)}_nats_per_token'
        nats = {rate: float(rows[key][column]) for key, rate in rates.items() if key in rows}
        return min(nats, key=lambda rate: (nats[rate], rate))

    def runs(self, rows):
        """(key, entry, settings) of every run whose rate is known by now, in the order of the list."""
        for entry in self.entries:
            rate, seeds = self.best_rate(entry, rows), entry['seeds']
            curve = [(rate, seeds[0]) for rate in entry['rates'] if self.curve(entry) is entry]
            for rate_and_seed in dict.fromkeys([*curve, *((rate, seed) for seed in seeds if rate)]):
                settings = self.settings(entry, *rate_and_seed)
                yield self.key(entry, settings), entry, settings

    def left(self, rows):
        """The runs that have no row yet and have not failed."""
        return [run for run in self.runs(rows) if run[0] not in rows and run[0] not in self.failed]

    def run(self, key, entry, settings, threads):
        """Trains, evaluates and appends the row. Raises InputError with what a script said last."""
        folder = self.out / key
        folder.mkdir(parents=True, exist_ok=True)
        # a process of a sweep that was killed may be at work still: it holds the lock until it ends
        with open(folder / 'lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if key in read_rows(self.csv):
                return
            how = dict(pass_fds=[lock.fileno()], env=os.environ | dict(OMP_NUM_THREADS=threads))
            row = dict(name=entry['name'], group=entry['group'], key=key, threads=threads) | settings
            row['commit'] = commit()
            # train.py writes it last of all; of a sweep that was killed since then, nobody knows the memory
            if not (folder / 'loss.png').exists():
                row['peak_mb'] = self.train(folder, entry, settings, how)
            row |= weights_only(folder)
            row |= self.evaluate(folder, entry, row['dtype'], how)
            add_row(self.csv, row)
        nats = [f'{row[f"{text}_nats_per_token"]:.4f}' for text in entry['texts']]
        print(', '.join([described(entry, settings), *nats]), flush=True)

    def train(self, folder, entry, settings, how):
        """Trains a run -> the peak memory in MB."""
        tokenizer = self.data[entry['train']].get('tokenizer', 'mistral')
        flags = settings | dict(data_dir=entry['train'], tokenizer=tokenizer, out_dir=folder, keep=0)
        return script('train.py', folder, '--auto_resume', *(f'--{k}={v}' for k, v in flags.items()), **how)

    def evaluate(self, folder, entry, dtype, how):
        """Measures a trained run on the texts, in the dtype of its training -> columns of its row."""
        flags = dict(out_dir=folder, dtype=dtype, tasks='bits_per_byte', text=','.join(entry['texts'].values()))
        flags['output_path'] = f'{folder}/eval.json'
        script('eval.py', folder, *(f'--{k}={v}' for k, v in flags.items()), **how)
        script('study/details.py', folder, folder, entry['train'], entry['texts'][self.first_text(entry)], **how)
        # eval.py puts the date into the name
        results = json.loads(max(folder.glob('eval_*.json')).read_text())
        row = dict(dtype=results['dtype'], torch=results['packages']['torch'])
        row['device'] = torch.cuda.get_device_name() if 'cuda' in results['device'] else results['device']
        for text, path in entry['texts'].items():
            row |= {f'{text}_{name}': results['bits_per_byte'][path][name] for name in MEASURES}
        return row | json.loads((folder / 'details.json').read_text())


def described(entry, settings):
    return f'{entry["name"]}, {entry["group"]}, {settings["learning_rate"]}, {settings["seed"]}'


def script(name, folder, *args, **how):
    """Runs a script of ours with its output in `folder` -> its peak memory in MB."""
    with open(folder / f'{Path(name).name}.out', 'ab') as out:
        process = subprocess.Popen([sys.executable, str(HERE.parent / name), *args], stdout=out, stderr=out, **how)
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
    parts = dict(embed='embedding', encoder='hash', hash_decoder='hash')
    numbers = Counter(embedding=0, hash=0, decoder=0)
    for name, tensor in state['model'].items():
        numbers[parts.get(name.split('.')[0], 'decoder')] += tensor.numel() * tensor.is_floating_point()
    log = read_log(folder / 'log.jsonl')
    row = dict(tokens_per_s=statistics.median(event['tokens_per_s'] for event in log if 'tokens_per_s' in event))
    row |= {k: log[-1][k] for k in ('peak_gpu_mb',) if k in log[-1]}
    row['dtype'] = state['config']['dtype']
    return row | dict(trained_tokens=log[-1]['tokens']) | {f'params_{part}': n for part, n in numbers.items()}


def prepare(study):
    """Prepares the data of a list; what is there already is kept."""
    with open(study.out / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder, recipe in study.data.items():
            print(f'preparing {folder}', flush=True)
            # token ids serve every model of the list
            flags = [f'--{k}={v}' for k, v in (recipe | dict(bins='ids', data_dir=folder)).items()]
            script('prepare.py', study.out, *flags, pass_fds=[lock.fileno()])


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
