"""The CSVs of sweep.py; RESULTS.md and its pictures, from them alone: the same CSVs give the same bytes."""

import ast
import csv
import fcntl
import os
import statistics
import subprocess
from collections import Counter
from pathlib import Path

from bins import replace_durably
from configurator import InputError

HERE = Path(__file__).resolve().parent
MISSING = '–'
INTRODUCTION = """# Results

Every table, picture and verdict is made by `python study/sweep.py {lists} --report` from the CSVs in `study/`, which
`python study/sweep.py LIST --jobs=2` makes, the others the command that their section names. Numbers are means over the
seeds, with their standard deviation; {missing} is what has not been run yet, or what was lost. A model
whose rates are not all tried stands at the best so far.

## What does not hold, and what does

A claim holds where the difference is as large as it says, and larger than two standard deviations, those of both models
together; it does not where it falls short by more than these; else it is too small to tell.

"""
VERDICTS = ('does not hold', 'too small to tell', 'holds', 'one seed', 'not run')
PARTS = ('embedding', 'hash', 'decoder')
# CSVs beside the first list, each made by a script of this folder, whose docstring is the section's text
OTHERS = ('costs', 'tasks', 'rank')


def commit():
    """Of this repository, and whether its Python differs from it; '' where it is no checkout."""

    def git(*command):
        return subprocess.run(['git', '-C', str(HERE), *command], capture_output=True, text=True).stdout.strip()

    changed = git('diff', '--name-only', 'HEAD', '--', ':/*.py')
    return git('rev-parse', '--short', 'HEAD') + ('-dirty' if changed else '')


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


def groups(study):
    """{group: its entries}, in the order of the list."""
    found = {}
    for entry in study.entries:
        found.setdefault(entry['group'], []).append(entry)
    return found


def best_rows(study, entry, rows):
    """The finished runs of an entry at its rate, a row a seed."""
    rate = study.best_rate(entry, rows, so_far=True)
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
            of = {part: int(found[0][f'params_{part}']) / 1e6 for part in PARTS}
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


def summary(study, rows):
    """The table of the models that the list calls MAIN, or of all, which README shows."""
    texts, lines = list(study.entries[0]['texts']), []
    for group, entries in groups(study).items():
        for entry in (e for e in entries if e['name'] in (study.main or [e['name']])):
            seeds, line = best_rows(study, entry, rows), [group, entry['name'], MISSING]
            if seeds:
                line[2] = f'{sum(int(seeds[0][f"params_{part}"]) for part in PARTS) / 1e6:.2f} M'
            line += [number(values(seeds, f'{text}_nats_per_token'), '.3f') for text in texts]
            line.append(number(values(seeds, f'{texts[0]}_top1_accuracy'), '.1%'))
            lines.append(line)
    heads = ['trained on', 'model', 'parameters', *(f'nats, {text}' for text in texts), 'top-1']
    return table(heads, lines)


def temperatures(study, entries, rows):
    """A sentence for each model whose best temperature details.py has measured."""
    parts = []
    for entry in entries:
        found = best_rows(study, entry, rows)
        if chosen := values(found, 'temperature'):
            at_it, without = (number(values(found, column), '.3f') for column in ('nats_at_it', 'nats_without'))
            parts.append(f'{entry["name"]}: {at_it} nats at temperature {number(chosen, ".2f")}, {without} without.\n')
    return parts


def verdict(study, claim, group, entries, rows):
    """(the place in VERDICTS, a line of the table) of a claim in a group, or None where it has no such models."""
    of_names = {entry['name']: entry for entry in entries}
    if not {claim['better'], claim['than']} <= of_names.keys():
        return None
    text, by = claim.get('on', next(iter(entries[0]['texts']))), claim.get('by', 0)
    better, than = (
        values(best_rows(study, of_names[claim[k]], rows), f'{text}_nats_per_token') for k in ('better', 'than')
    )
    kind, less = 4, MISSING
    if better and than:
        kind, difference = 3, statistics.mean(than) - statistics.mean(better)
        less = f'{difference:+.3f}'
        if len(better) > 1 and len(than) > 1:
            deviation = (statistics.variance(better) + statistics.variance(than)) ** 0.5
            less += f' ± {deviation:.3f}'
            kind = 2 if difference >= by and difference > 2 * deviation else 1
            kind = 0 if by - difference > 2 * deviation else kind
    seeds = f'{len(better)} and {len(than)}'
    return kind, [f'**{VERDICTS[kind]}**', claim['says'], group, text, less, f'{by:g}', seeds]


def verdicts(studies):
    """The table of all claims; what does not hold first."""
    found = []
    for study in studies:
        rows = read_rows(study.csv)
        for claim in study.claims:
            found += [verdict(study, claim, group, entries, rows) for group, entries in groups(study).items()]
    lines = [line for _, line in sorted(filter(None, found), key=lambda kind_and_line: kind_and_line[0])]
    return table(['', 'claim', 'models', 'text', 'nats below', 'at least', 'seeds'], lines)


def shortened(cell):
    """A number of a CSV, as a reader wants it; other text as it is."""
    try:
        return f'{int(cell):,}' if cell.isdecimal() else f'{float(cell):.4g}'
    except ValueError:
        return cell


def other(path):
    """The section of a CSV: the docstring of the script that made it, with its commands, a picture and the table."""
    title, *paragraphs = ast.get_docstring(ast.parse((HERE / f'{path.stem}.py').read_text())).split('\n\n')
    with open(path, newline='') as f:
        heads, *lines = csv.reader(f)
    lines = [
        [shortened(cell) if head != 'commit' else cell for head, cell in zip(heads, line, strict=True)]
        for line in lines
    ]
    parts = [f'## {title.rstrip(".")}\n', *(f'{paragraph}\n' for paragraph in paragraphs), table(heads, lines)]
    if path.with_suffix('.png').exists():
        parts.insert(-1, f'![{path.stem}]({os.path.relpath(path.with_suffix(".png"))})\n')
    return parts


def curves(study, entries, rows):
    """{entry's name: {rate: nats of its first seed on the first text}} of the entries that try several rates."""
    found = {}
    for entry in entries:
        if study.curve(entry) is entry and len(entry['rates']) > 1:
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
    """A row of two pictures a group: nats with deviations of what is finished, and the curves of the rates."""
    from matplotlib.figure import Figure

    finished = {group: [e for e in entries if best_rows(study, e, rows)][::-1] for group, entries in groups.items()}
    heights = [max(2.8, 0.9 + 0.2 * len(entries)) for entries in finished.values()]
    fig = Figure(figsize=(13, sum(heights)))
    axes = fig.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    for (group, entries), (left, right) in zip(finished.items(), axes, strict=True):
        text = next(iter(groups[group][0]['texts']))
        found = [values(best_rows(study, entry, rows), f'{text}_nats_per_token') for entry in entries]
        # what is far off is written at the edge
        edge = min((statistics.mean(nats) for nats in found), default=0) + 0.6
        for place, nats in enumerate(found):
            if statistics.mean(nats) > edge:
                left.text(edge, place, f'{statistics.mean(nats):.2f} \N{RIGHTWARDS ARROW}', ha='right', va='center')
            else:
                deviation = statistics.stdev(nats) if len(nats) > 1 else 0
                left.errorbar(statistics.mean(nats), place, xerr=deviation, fmt='o', capsize=3, color='C0')
        left.set_yticks(range(len(entries)), [entry['name'] for entry in entries])
        left.set(title=group, xlabel=f'nats per token, {text}', ylim=(-0.5, len(entries) - 0.5))
        rates = {}
        for k, (name, of_entry) in enumerate(curves(study, groups[group], rows).items()):
            rates |= of_entry
            if of_entry and min(of_entry.values()) < edge:
                style = dict(marker='o', color=f'C{k % 10}', linestyle='-' if k < 10 else '--')
                right.plot(*zip(*sorted(of_entry.items()), strict=True), **style, label=name)
                right.legend(fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
        right.set(title='the first seed', xlabel='learning rate', ylabel='nats per token', xscale='log')
        right.set_xticks(sorted(rates), [f'{rate:g}' for rate in sorted(rates)])
        right.minorticks_off()
        left.grid(alpha=0.3)
        right.grid(alpha=0.3)
    fig.tight_layout()
    # without matplotlib's version
    fig.savefig(path, dpi=110, metadata=dict(Software=None))


def draw_vocabularies(study, rows, path):
    """Bits per byte, and parameters, against the vocabulary: a group a tokenizer, whose tokens the list counts."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(9, 3.4))
    left, right = fig.subplots(1, 2)
    text = next(iter(study.entries[0]['texts']))
    for k, name in enumerate(dict.fromkeys(entry['name'] for entry in study.entries)):
        points = []
        for entry in study.entries:
            found = best_rows(study, entry, rows) if entry['name'] == name else []
            if bits := values(found, f'{text}_bits_per_byte'):
                millions = sum(int(found[0][f'params_{part}']) for part in PARTS) / 1e6
                deviation = statistics.stdev(bits) if len(bits) > 1 else 0
                points.append((study.vocabularies[entry['group']], statistics.mean(bits), deviation, millions))
        if points:
            tokens, bits, deviations, millions = zip(*sorted(points), strict=True)
            left.errorbar(tokens, bits, yerr=deviations, marker='o', capsize=3, color=f'C{k}', label=name)
            right.plot(tokens, millions, marker='o', color=f'C{k}', label=name)
    for ax, label in ((left, f'bits per byte of held-out {text}'), (right, 'parameters, millions')):
        ax.set(xscale='log', xlabel='tokens in the vocabulary', ylabel=label)
        ax.set_xticks(list(study.vocabularies.values()), [f'{n // 1000} K' for n in study.vocabularies.values()])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    right.set_ylim(bottom=0)
    left.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=110, metadata=dict(Software=None))


def write(studies, target='RESULTS.md'):
    """
    Writes the report of the lists, into the working folder, and a picture beside each CSV. Raises InputError where a
    claim or MAIN names no entry.
    """
    for study in studies:
        named = {*(study.main or ()), *(claim[k] for claim in study.claims for k in ('better', 'than'))}
        if unknown := named - {entry['name'] for entry in study.entries}:
            raise InputError(f'{study.path}: no entry has the name {sorted(unknown)[0]!r}, which a claim or MAIN has')
    lists = ' '.join(os.path.relpath(study.path) for study in studies)
    parts = [INTRODUCTION.format(lists=lists, missing=MISSING) + verdicts(studies), '## In short\n']
    parts.append(summary(studies[0], read_rows(studies[0].csv)))
    for study in studies:
        rows, picture = read_rows(study.csv), study.path.with_suffix('.png')
        title, _, text = study.doc.strip().partition('\n')
        draw(study, groups(study), rows, picture)
        commits = Counter(f'{row["commit"]}, {row["device"]}' for row in rows.values())
        listed = '; '.join(f'{number} of {commit}' for commit, number in sorted(commits.items()))
        parts.append(f'## {title}\n\n{text.strip()}\n\nRuns by commit: {listed or MISSING}.\n')
        parts.append(f'![{title}]({os.path.relpath(picture)})\n')
        if study.vocabularies:
            picture = study.path.with_name(f'{study.path.stem}_size.png')
            draw_vocabularies(study, rows, picture)
            parts.append(f'![bits per byte by vocabulary]({os.path.relpath(picture)})\n')
        for group, entries in groups(study).items():
            parts += [f'### {group}\n', likelihoods(study, entries, rows)]
            parts += temperatures(study, entries, rows)
            if found := curves(study, entries, rows):
                rates = sorted({rate for entry in entries if entry['name'] in found for rate in entry['rates']})
                parts += ['Nats of the first seed by learning rate:\n', curve_table(found, rates)]
    for path in (studies[0].path.with_name(f'{name}.csv') for name in OTHERS):
        if path.exists():
            parts += other(path)
    Path(target).write_text('\n'.join(parts))
    print(target)
