"""The rows of a study: the CSV to which sweep.py adds a row per run, and which of its rows belong to an entry."""

import contextlib
import csv
import fcntl
import json
import subprocess
from pathlib import Path

from mhf.data import replace_durably

HERE = Path(__file__).resolve().parent
# the columns that add up to a model's parameters
PARAMETERS = ('params_embedding', 'params_hash', 'params_decoder')


def git(*command):
    return subprocess.run(['git', '-C', str(HERE), *command], capture_output=True, text=True).stdout.strip()


def commit():
    """This repository's commit, with '-dirty' if Python files were changed; '' outside of a checkout."""
    changed = git('diff', '--name-only', 'HEAD', '--', ':/*.py')
    return git('rev-parse', '--short', 'HEAD') + ('-dirty' if changed else '')


def read_rows(path):
    """{(group, name, learning rate, seed): row} of a CSV; a row is a dict of strings."""
    if not path.exists():
        return {}
    with open(path, newline='') as f:
        rows = list(csv.DictReader(f))
    return {(row['group'], row['name'], float(row['learning_rate']), int(row['seed'])): row for row in rows}


def add_row(path, row):
    """Rewrites the CSV with one more row, which may have new columns, and renames it into place."""
    with open(path.with_suffix('.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [*read_rows(path).values(), row]
        columns = dict.fromkeys(column for r in rows for column in r)
        with open(path.with_suffix('.tmp'), 'w', newline='') as f:
            writer = csv.DictWriter(f, list(columns), lineterminator='\n')
            writer.writeheader()
            writer.writerows(rows)
        replace_durably(path.with_suffix('.tmp'), path)


def read_log(path):
    """The events of a log.jsonl, a list of dicts, without a line that a crash cut off."""
    events = []
    for line in Path(path).read_text(errors='replace').splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return events


def values(rows, column):
    """The numbers in a column of rows; rows without one are skipped."""
    return [float(row[column]) for row in rows if row.get(column)]


def parameters(row):
    return sum(int(row[column]) for column in PARAMETERS)


def best_rows(study, entry, rows):
    """The finished runs of an entry at its best learning rate so far, one row per seed."""
    lr = study.best_lr(entry, rows, so_far=True)
    keys = [study.key(entry, lr, seed) for seed in entry['seeds']]
    return [rows[key] for key in keys if key in rows]


def learning_rate_nats(study, entries, rows):
    """{name: {learning rate: nats of the first seed on the first text}} of the entries that try several ones."""
    curves = {}
    for entry in entries:
        if study.lr_sweep(entry) is not entry or len(entry['rates']) == 1:
            continue
        column = f'{study.first_text(entry)}_nats_per_token'
        keys = {lr: study.key(entry, lr, entry['seeds'][0]) for lr in entry['rates']}
        curves[entry['name']] = {lr: float(rows[key][column]) for lr, key in keys.items() if key in rows}
    return curves
