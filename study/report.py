"""
RESULTS.md and its pictures, from the CSVs alone: the same CSVs give the same bytes. `study.sweep --report` calls it.

The first page answers the questions of ABOUT. Under each question stand the claims of the lists that name it, first
those that the runs decide. verdict() is the rule by which a claim holds; no line of the page is decided by hand.
"""

import ast
import csv
import os
import statistics
from collections import Counter
from pathlib import Path

from configurator import InputError
from study import pictures
from study.rows import best_rows, curves, parameters, read_rows, values

HERE = Path(__file__).resolve().parent
MISSING = '–'
# the repository's own lists, whose report is RESULTS.md
OWN_LISTS = ['english.py', 'vocabulary.py', 'paper100m.py']
# the questions of the first page, in their order; a claim names one of them as `about`
ABOUT = dict(
    loss='What the exact loss gives',
    standard='Where MultiHashFormer is ahead of Standard, level with it, behind it',
    parts='What each part of the method earns',
    optimizer="What the optimizer's settings and a louder beginning give",
    vocabulary='What a larger vocabulary costs',
    time='What it costs in time',
    other='Other claims',
)
HOLDS = 'Holds'
FAILS = 'Does not hold'
TOO_SMALL = 'Too small to tell'
ONE_SEED = 'One seed'
NOT_RUN = 'Not run'
DECIDED = (HOLDS, FAILS)
OPEN = (TOO_SMALL, ONE_SEED, NOT_RUN)
INTRODUCTION = """# Results

Standard is a small decoder with an embedding matrix. H4 is MultiHashFormer: the same decoder, but it reads and predicts
four hash IDs a token in place of the token. Each was trained from scratch and is measured on text held out of training.

A figure on this page says by how many nats a token the model that a claim names first is better: the difference of the
means over the seeds ± the standard deviation of that difference from seed to seed, and in brackets the seeds of both
models. A claim **holds** where the difference is as large as the claim says and larger than two standard deviations. It
**does not hold** where the difference falls short of the claim by more than two. The rest is open: where it is too
small to tell, the models are level as far as these seeds show, and one seed decides nothing.
"""
HOW = """## How the numbers were made

    $ python -m study.sweep {lists}             # what has no row yet
    $ python -m study.sweep {lists} --report    # this page

Costs, tasks and ranks have their commands in their sections. The CSVs have more columns than this page: calibration
error, and nats, top-1 and ranks by how frequent a token is. Rows by the code and the device that made them:
"""


def number(of_seeds, form):
    """The mean of some values, and if there are several their standard deviation."""
    if not of_seeds:
        return MISSING
    mean = f'{statistics.mean(of_seeds):{form}}'
    if len(of_seeds) == 1:
        return mean
    return f'{mean} ± {statistics.stdev(of_seeds):{form}}'


def table(heads, lines):
    rule = ['---'] * len(heads)
    return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, rule, *lines)) + '\n'


def groups_of(study):
    """{group: its entries}, in the order of the list."""
    groups = {}
    for entry in study.entries:
        groups.setdefault(entry['group'], []).append(entry)
    return groups


# -----------------------------------------------------------------------------
# the first page


def verdict(better, than, by):
    """The nats of two models, a number for each seed -> whether `better` has fewer by `by` or more, and by how many."""
    if not better or not than:
        return NOT_RUN, MISSING
    difference = statistics.mean(than) - statistics.mean(better)
    if len(better) == 1 or len(than) == 1:
        return ONE_SEED, f'{difference:+.3f}'
    deviation = (statistics.variance(better) + statistics.variance(than)) ** 0.5
    figure = f'{difference:+.3f} ± {deviation:.3f}'
    if difference >= by and difference > 2 * deviation:
        return HOLDS, figure
    if by - difference > 2 * deviation:
        return FAILS, figure
    return TOO_SMALL, figure


def verdicts(study, claim, rows):
    """{verdict: figures} of a claim, a figure for each group that has its two models."""
    of_verdicts = {}
    for group, entries in groups_of(study).items():
        of_names = {entry['name']: entry for entry in entries}
        if claim['better'] not in of_names or claim['than'] not in of_names:
            continue
        text = claim.get('on', study.first_text(entries[0]))
        column = f'{text}_{claim.get("measure", "nats_per_token")}'
        better = values(best_rows(study, of_names[claim['better']], rows), column)
        than = values(best_rows(study, of_names[claim['than']], rows), column)
        answer, figure = verdict(better, than, claim.get('by', 0))
        of_verdicts.setdefault(answer, []).append(f'{group} {figure} ({len(better)}+{len(than)})')
    return of_verdicts


def temperatures(study, rows):
    """A sentence for each model whose best temperature is known: details.py measures it for the paper's loss."""
    lines = []
    for entry in study.entries:
        of_seeds = best_rows(study, entry, rows)
        temperature = values(of_seeds, 'temperature')
        if temperature:
            without = number(values(of_seeds, 'nats_without'), '.3f')
            with_it = number(values(of_seeds, 'nats_at_it'), '.3f')
            best = number(temperature, '.2f')
            lines.append(
                f"The paper's loss ({entry['name']}, {entry['group']}): {without} nats, and {with_it} at its best "
                f'temperature, {best}, which is chosen on one half of the text and measured on the other.'
            )
    return lines


def vocabularies(study, rows):
    """A sentence for each model that the smallest and the largest vocabulary have: what the larger one changes."""
    lines = []
    if not study.vocabularies:
        return lines
    groups = groups_of(study)
    smallest = min(study.vocabularies, key=study.vocabularies.get)
    largest = max(study.vocabularies, key=study.vocabularies.get)
    with_largest = {entry['name']: entry for entry in groups[largest]}
    for entry in groups[smallest]:
        name = entry['name']
        if name not in with_largest:
            continue
        before = best_rows(study, entry, rows)
        after = best_rows(study, with_largest[name], rows)
        if not before or not after:
            continue
        tokens = [f'{study.vocabularies[group]:,} ({group})' for group in (smallest, largest)]
        sizes = [f'{parameters(of_seeds[0]) / 1e6:.2f} M' for of_seeds in (before, after)]
        line = f'{name} from {tokens[0]} to {tokens[1]} tokens: from {sizes[0]} to {sizes[1]} parameters'
        for text in entry['texts']:
            bits = [number(values(of_seeds, f'{text}_bits_per_byte'), '.4f') for of_seeds in (before, after)]
            line += f', from {bits[0]} to {bits[1]} bits per byte of {text}'
        lines.append(line + '.')
    return lines


def times(study):
    """A sentence for each main model in costs.csv: the time of its training step on each device."""
    lines = []
    devices = costs_by_device(study.path.with_name('costs.csv'))
    for name in study.main or ():
        ratios = []
        for device, of_device in devices.items():
            first = next(iter(of_device))
            if name in of_device and name != first:
                ratios.append(f"{of_device[name]['time / the first']} times {first}'s on {device}")
        if ratios:
            lines.append(f'The time of a training step of {name} is {", ".join(ratios)}.')
    return lines


def to_be_run(study):
    """A sentence for a list without rows."""
    title, _ = title_and_text(study.doc)
    return f'{title}: yet to be run, by `python -m study.sweep {os.path.relpath(study.path)}`.'


def first_page(studies):
    """Each question of ABOUT: what holds, what does not, what else was measured, and what is open."""
    facts = {about: [] for about in ABOUT}
    claims = {about: {answer: [] for answer in (*DECIDED, *OPEN)} for about in ABOUT}
    for study in studies:
        rows = read_rows(study.csv)
        if not rows:
            facts['standard'].append(to_be_run(study))
            continue
        facts['loss'] += temperatures(study, rows)
        facts['vocabulary'] += vocabularies(study, rows)
        facts['time'] += times(study)
        for claim in study.claims:
            for answer, figures in verdicts(study, claim, rows).items():
                claims[claim.get('about', 'other')][answer].append(f'{claim["says"]}: {"; ".join(figures)}.')
    parts = [INTRODUCTION]
    for about, heading in ABOUT.items():
        lines = [f'* **{answer}**: {line}' for answer in DECIDED for line in claims[about][answer]]
        lines += [f'* {line}' for line in facts[about]]
        for answer in OPEN:
            if claims[about][answer]:
                lines.append(f'* Open, {answer.lower()}: {" ".join(claims[about][answer])}')
        if lines:
            parts += [f'## {heading}\n', '\n'.join(lines) + '\n']
    return parts


# -----------------------------------------------------------------------------
# the tables


def main_table(study, rows):
    """The models that the list calls MAIN, or all, group by group. README shows rows of the first list's table."""
    texts = list(study.entries[0]['texts'])
    measure = 'nats'
    column = 'nats_per_token'
    form = '.3f'
    # nats per token are another quantity for each tokenizer
    if study.vocabularies:
        measure = 'bits per byte'
        column = 'bits_per_byte'
        form = '.4f'
    lines = []
    for group, entries in groups_of(study).items():
        for entry in entries:
            if study.main and entry['name'] not in study.main:
                continue
            of_seeds = best_rows(study, entry, rows)
            size = f'{parameters(of_seeds[0]) / 1e6:.2f} M' if of_seeds else MISSING
            measured = [number(values(of_seeds, f'{text}_{column}'), form) for text in texts]
            top1 = number(values(of_seeds, f'{texts[0]}_top1_accuracy'), '.1%')
            lines.append([group, entry['name'], size, *measured, top1])
    heads = ['trained on', 'model', 'parameters', *(f'{measure}, {text}' for text in texts), 'top-1']
    return table(heads, lines)


def table_of_groups(study, cells):
    """{name: {group: cell}} -> a row a name, a column a group."""
    groups = list(groups_of(study))
    lines = [[name, *(of_groups.get(group, '') for group in groups)] for name, of_groups in cells.items()]
    return table(['model', *groups], lines)


def other_models(study, rows):
    """The nats on each text of the models that are not in MAIN, without those that the list gives one seed."""
    cells = {}
    for entry in study.entries:
        if entry['name'] in study.main or len(entry['seeds']) == 1:
            continue
        of_seeds = best_rows(study, entry, rows)
        nats = [number(values(of_seeds, f'{text}_nats_per_token'), '.3f') for text in entry['texts']]
        cells.setdefault(entry['name'], {})[entry['group']] = ' / '.join(nats)
    return table_of_groups(study, cells)


def rates_tried(study, rows):
    """The learning rates that were tried, the best one first, with the nats of the first seed."""
    cells = {}
    for group, entries in groups_of(study).items():
        for name, curve in curves(study, entries, rows).items():
            best_first = sorted(curve, key=curve.get)
            tried = ', '.join(f'{rate:g}: {curve[rate]:.3f}' for rate in best_first)
            cells.setdefault(name, {})[group] = tried or MISSING
    return table_of_groups(study, cells) if cells else None


def costs_by_device(path):
    """{device: {model: row}} of costs.csv, or {}."""
    devices = {}
    if path.exists():
        with open(path, newline='') as f:
            for row in csv.DictReader(f):
                device = row['device']
                if device == 'cpu':
                    device = 'a CPU with 1 thread' if row['threads'] == '1' else f'a CPU with {row["threads"]} threads'
                devices.setdefault(device, {})[row['model']] = row
    return devices


def costs_table(path):
    """Time and memory of a training step: a row a model, two columns a device."""
    devices = costs_by_device(path)
    names = dict.fromkeys(name for of_device in devices.values() for name in of_device)
    heads = ['model', 'parameters']
    for device in devices:
        heads += [f'time, {device}', 'MB']
    lines = []
    for name in names:
        # {} where a device has not run the model
        measured = [of_device.get(name, {}) for of_device in devices.values()]
        sizes = [row['parameters'] for row in measured if row]
        line = [name, f'{int(sizes[0]):,}']
        for row in measured:
            memory = row.get('peak_memory')
            line.append(row.get('time / the first') or MISSING)
            line.append(f'{int(memory) / 1e6:,.0f}' if memory else MISSING)
        lines.append(line)
    return table(heads, lines)


def shortened(cell):
    """A number of a CSV with commas between its thousands; other text as it is."""
    return f'{int(cell):,}' if cell.isdecimal() else cell


def whole_table(path):
    """A CSV as it is."""
    with open(path, newline='') as f:
        heads, *lines = csv.reader(f)
    return table(heads, [[shortened(cell) for cell in line] for line in lines])


# The CSVs beside the first list. The script of the same name makes each, and its docstring is the section's text.
TABLES = dict(costs=costs_table, tasks=whole_table, rank=whole_table)


def title_and_text(docstring):
    title, _, text = docstring.strip().partition('\n')
    return title.rstrip('.'), text.strip('\n')


def image(text, path, target):
    """A picture, by its path from the report's folder."""
    return f'![{text}]({os.path.relpath(path, target.parent)})\n'


def section(path, target):
    """The section of a CSV in TABLES."""
    title, text = title_and_text(ast.get_docstring(ast.parse((HERE / f'{path.stem}.py').read_text())))
    parts = [f'## {title}\n', f'{text}\n']
    picture = path.with_suffix('.png')
    if picture.exists():
        parts.append(image(path.stem, picture, target))
    return [*parts, TABLES[path.stem](path)]


# -----------------------------------------------------------------------------
# the report


def study_section(study, target):
    """A list's docstring, its tables and its pictures, which are drawn here."""
    rows = read_rows(study.csv)
    title, text = title_and_text(study.doc)
    if not rows:
        return [f'## {title}\n', f'{text}\n', f'{to_be_run(study)}\n']
    picture = study.path.with_suffix('.png')
    pictures.draw(study, groups_of(study), rows, picture)
    parts = [f'## {title}\n', f'{text}\n', main_table(study, rows)]
    if study.main:
        texts = ' / '.join(study.entries[0]['texts'])
        about = f'The other models that the list gives several seeds, nats on {texts} (no ±: one seed so far):\n'
        parts += [about, other_models(study, rows)]
    if rates := rates_tried(study, rows):
        parts += ['The learning rates that were tried, the best one first, with the nats of the first seed:\n', rates]
    parts.append(image(title, picture, target))
    if study.over_tokens:
        picture = study.path.with_name(f'{study.path.stem}_tokens.png')
        pictures.draw_over_tokens(study, groups_of(study), rows, picture)
        parts.append(image('nats by tokens of training', picture, target))
    if study.vocabularies:
        picture = study.path.with_name(f'{study.path.stem}_size.png')
        pictures.draw_vocabularies(study, rows, picture)
        parts.append(image('bits per byte by vocabulary', picture, target))
    return parts


def how_it_was_made(studies):
    """The commands, and how many rows each commit and device have made."""
    lines = [HOW.format(lists=' '.join(os.path.relpath(study.path) for study in studies))]
    for study in studies:
        commits = Counter(f'{row["commit"]}, {row["device"]}' for row in read_rows(study.csv).values())
        listed = '; '.join(f'{count} of {commit}' for commit, count in sorted(commits.items()))
        lines.append(f'* `{os.path.relpath(study.csv)}`: {listed or MISSING}.')
    return '\n'.join(lines) + '\n'


def check(study):
    """Raises InputError where a claim or MAIN names no entry, or where a claim is about no question of ABOUT."""
    named = {*(study.main or ()), *study.over_tokens.get('models', ())}
    for claim in study.claims:
        named |= {claim['better'], claim['than']}
        about = claim.get('about', 'other')
        if about not in ABOUT:
            raise InputError(f'{study.path}: about={about!r} of a claim: must be one of {", ".join(ABOUT)}')
    if unknown := named - {entry['name'] for entry in study.entries}:
        raise InputError(f'{study.path}: no entry has the name {sorted(unknown)[0]!r}, which a claim or MAIN has')


def target_of(studies):
    """RESULTS.md for the repository's own lists, else a file of the first list's name. Both lie beside that list."""
    if [study.path.name for study in studies] == OWN_LISTS:
        return studies[0].path.with_name('RESULTS.md')
    return studies[0].path.with_suffix('.md')


def write(studies):
    """Writes the report of some lists, and a picture beside each CSV. Raises InputError, as check() does."""
    for study in studies:
        check(study)
    target = target_of(studies)
    parts = first_page(studies)
    for study in studies:
        parts += study_section(study, target)
    for name in TABLES:
        path = studies[0].path.with_name(f'{name}.csv')
        if path.exists():
            parts += section(path, target)
    parts.append(how_it_was_made(studies))
    target.write_text('\n'.join(parts), encoding='utf-8')
    print(os.path.relpath(target))


if __name__ == '__main__':
    print(__doc__.strip())
