"""The CSVs of sweep.py; RESULTS.md and its pictures, from them alone: the same CSVs give the same bytes."""

import csv
import fcntl
import os
import statistics
from collections import Counter
from pathlib import Path

from bins import replace_durably

MISSING = '–'
INTRODUCTION = """# Results

Every table and picture is made by `python study/sweep.py {lists} --report` from the CSVs beside these lists, which
`python study/sweep.py LIST --jobs=2` makes. Numbers are means over the seeds, with their standard deviation; {missing}
is what has not been run yet. Speeds are disturbed by whatever else the machine did: bench.py compares costs.
"""


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
        rows = [*read_rows(path).values(), row]
        with open(path.with_suffix('.tmp'), 'w', newline='') as f:
            writer = csv.DictWriter(f, list(dict.fromkeys(column for r in rows for column in r)), lineterminator='\n')
            writer.writeheader()
            writer.writerows(rows)
        replace_durably(path.with_suffix('.tmp'), path)


def number(values, form):
    """The mean of values, and where there are several their standard deviation."""
    if not values:
        return MISSING
    deviation = f' ± {statistics.stdev(values):{form}}' if len(values) > 1 else ''
    return f'{statistics.mean(values):{form}}{deviation}'


def table(heads, lines):
    return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, ['---'] * len(heads), *lines)) + '\n'


def best_rows(study, entry, rows):
    """The finished runs of an entry at its rate, a row a seed."""
    rate = study.best_rate(entry, rows)
    keys = [study.key(entry, study.settings(entry, rate, seed)) for seed in entry['seeds'] if rate]
    return [rows[key] for key in keys if key in rows]


def values(found, column):
    return [float(row[column]) for row in found if row.get(column)]


def likelihoods(study, entries, rows):
    """The table of what the models say of the texts, and of their sizes."""
    texts = list(entries[0]['texts'])
    heads = ['model', 'embedding interface + decoder, M', 'rate', 'seeds']
    heads += [f'{text}: {what}' for text in texts for what in ('nats', 'against the first', 'bits per byte')]
    first, lines = best_rows(study, entries[0], rows), []
    for entry in entries:
        found, line = best_rows(study, entry, rows), [entry['name'], MISSING, MISSING, MISSING]
        if found:
            of = {part: int(found[0][f'params_{part}']) / 1e6 for part in ('embedding', 'hash', 'decoder')}
            line[1:] = (
                f'{of["embedding"] + of["hash"]:.2f} + {of["decoder"]:.2f}',
                found[0]['learning_rate'],
                str(len(found)),
            )
        for text in texts:
            nats = values(found, f'{text}_nats_per_token')
            base = values(first, f'{text}_nats_per_token')
            less = f'{statistics.mean(nats) - statistics.mean(base):+.3f}' if nats and base else MISSING
            line += [number(nats, '.3f'), less, number(values(found, f'{text}_bits_per_byte'), '.4f')]
        lines.append(line)
    return table(heads, lines)


def others(study, entries, rows):
    """The table of top-1, calibration, speed and memory."""
    texts = list(entries[0]['texts'])
    columns = {f'{text}: top-1': (f'{text}_top1_accuracy', '.2%') for text in texts}
    columns |= {f'{text}: calibration error': (f'{text}_expected_calibration_error', '.4f') for text in texts}
    columns |= {'tokens/s': ('tokens_per_s', ',.0f'), 'MB': ('peak_mb', ',.0f')}
    lines = []
    for entry in entries:
        found = best_rows(study, entry, rows)
        lines.append([entry['name'], *(number(values(found, column), form) for column, form in columns.values())])
    return table(['model', *columns], lines)


def by_frequency(study, entries, rows):
    """What details.py says of a group: nats and top-1 of each tenth of the tokens, and temperatures."""
    of_names, parts = {}, []
    for entry in entries:
        if found := [row for row in best_rows(study, entry, rows) if row.get('nats_1')]:
            of_names[entry['name']] = found
    for what, form in (('nats', '.2f'), ('top1', '.1%')) if of_names else ():
        columns = [f'{what}_{k}' for k in range(1, 11)]
        lines = [[n, *(f'{statistics.mean(values(f, c)):{form}}' for c in columns)] for n, f in of_names.items()]
        first = next(iter(of_names.values()))[0]
        heads = [f'{float(first[f"frequency_{k}"]):,.0f}' for k in range(1, 11)]
        parts.append(f'{what}, by how often the target is in the training text, a tenth of the tokens each:\n')
        parts.append(table(['mean frequency', *heads], lines))
    for name, found in of_names.items():
        if chosen := values(found, 'temperature'):
            at_it, without = (number(values(found, column), '.3f') for column in ('nats_at_it', 'nats_without'))
            parts.append(f'{name}: {at_it} nats at temperature {number(chosen, ".2f")}, {without} without.\n')
    return parts


def curves(study, entries, rows):
    """{entry's name: {rate: nats of its first seed on the first text}} of the entries with rates of their own."""
    found = {}
    for entry in entries:
        if study.curve(entry) is entry:
            keys = {rate: study.key(entry, study.settings(entry, rate, entry['seeds'][0])) for rate in entry['rates']}
            column = f'{next(iter(entry["texts"]))}_nats_per_token'
            found[entry['name']] = {rate: float(rows[k][column]) for rate, k in keys.items() if k in rows}
    return found


def curve_table(found, rates):
    lines = []
    for name, of_entry in found.items():
        best = min(of_entry.values(), default=0)
        numbers = {rate: f'{nats:.3f}' for rate, nats in of_entry.items()}
        numbers |= {rate: f'**{numbers[rate]}**' for rate, nats in of_entry.items() if nats == best}
        lines.append([name, *(numbers.get(rate, MISSING) for rate in rates)])
    return table(['rate', *(f'{rate:g}' for rate in rates)], lines)


def draw(study, groups, rows, path):
    """A row of two pictures a group: nats with deviations, and the curves of the rates."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(11, 3.6 * len(groups)))
    axes = fig.subplots(len(groups), 2, squeeze=False)
    for (group, entries), (left, right) in zip(groups.items(), axes, strict=True):
        names, text = [entry['name'] for entry in entries][::-1], next(iter(entries[0]['texts']))
        for place, entry in enumerate(entries[::-1]):
            if nats := values(best_rows(study, entry, rows), f'{text}_nats_per_token'):
                deviation = statistics.stdev(nats) if len(nats) > 1 else 0
                left.errorbar(statistics.mean(nats), place, xerr=deviation, fmt='o', capsize=3, color='C0')
        left.set_yticks(range(len(names)), names)
        left.set(title=group, xlabel=f'nats per token, {text}', ylim=(-0.5, len(names) - 0.5))
        for name, of_entry in curves(study, entries, rows).items():
            if of_entry:
                right.plot(*zip(*sorted(of_entry.items()), strict=True), marker='o', label=name)
                right.legend(fontsize=8)
        right.set(title='the first seed', xlabel='learning rate', ylabel='nats per token', xscale='log')
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    fig.tight_layout()
    # without matplotlib's version
    fig.savefig(path, dpi=110, metadata=dict(Software=None))


def write(studies, target='RESULTS.md'):
    """Writes the report of the lists, into the working folder, and a picture beside each CSV."""
    lists = ' '.join(os.path.relpath(study.path) for study in studies)
    parts = [INTRODUCTION.format(lists=lists, missing=MISSING)]
    for study in studies:
        rows, groups, picture = read_rows(study.csv), {}, study.path.with_suffix('.png')
        for entry in study.entries:
            groups.setdefault(entry['group'], []).append(entry)
        title, _, text = study.doc.strip().partition('\n')
        draw(study, groups, rows, picture)
        commits = Counter(row['commit'] for row in rows.values())
        listed = ', '.join(f'{commit} ({number})' for commit, number in sorted(commits.items()))
        parts.append(f'## {title}\n\n{text.strip()}\n\nRuns by commit: {listed or MISSING}.\n')
        parts.append(f'![{title}]({os.path.relpath(picture)})\n')
        for group, entries in groups.items():
            parts += [f'### {group}\n', likelihoods(study, entries, rows), others(study, entries, rows)]
            parts += by_frequency(study, entries, rows)
            rates = sorted({rate for entry in entries for rate in study.curve(entry)['rates']})
            if found := curves(study, entries, rows):
                parts += ['Nats of the first seed by learning rate:\n', curve_table(found, rates)]
    Path(target).write_text('\n'.join(parts))
    print(target)
