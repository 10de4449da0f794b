"""The CSV of a list, to which sweep.py adds a row per run."""

import csv
import subprocess
from pathlib import Path

from mhf.data import replace_durably


def git(*command):
    command = ['git', '-C', Path(__file__).resolve().parent, *command]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def commit():
    """This repository's commit, with '-dirty' if Python files were changed; '' outside of a checkout."""
    changed = git('diff', '--name-only', 'HEAD', '--', ':/*.py')
    return git('rev-parse', '--short', 'HEAD') + ('-dirty' if changed else '')


def read_csv(path):
    """The rows of a CSV, dicts of strings; none if it does not exist."""
    if not path.exists():
        return []
    with open(path, newline='', encoding='utf-8') as f:
        return list(csv.DictReader(f))


def write_csv(path, rows):
    """Writes rows, which may have different columns, and renames the file into place."""
    columns = dict.fromkeys(column for row in rows for column in row)
    temporary = path.with_suffix('.tmp')
    with open(temporary, 'w', newline='', encoding='utf-8') as f:
        writer = csv.DictWriter(f, list(columns), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    replace_durably(temporary, path)


def read_rows(path):
    """{(group, name, learning rate, seed): row} of a list's CSV."""
    return {(row['group'], row['name'], float(row['learning_rate']), int(row['seed'])): row for row in read_csv(path)}


def values(rows, column):
    """The numbers in a column of rows, none if a row has no number there."""
    return [float(row[column]) for row in rows] if all(row.get(column) for row in rows) else []


def parameters(row):
    return sum(int(row[f'params_{part}']) for part in ('embedding', 'hash', 'decoder'))
