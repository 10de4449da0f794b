"""
RESULTS.md and its pictures, from the CSVs alone: the same CSVs give the same bytes. `study.sweep --report` calls it.

Its first page is first_page.py's; here are the tables of each list, and the sections of the other CSVs.
"""

import ast
import csv
import os
from collections import Counter
from pathlib import Path

from study import pictures
from study.first_page import MISSING, check, costs_by_device, first_page, number, title_and_text, to_be_run
from study.rows import best_rows, learning_rate_nats, parameters, values

HERE = Path(__file__).resolve().parent
# the repository's own lists, whose report is RESULTS.md
OWN_LISTS = ['english.py', 'vocabulary.py', 'paper100m.py']
HOW = """## How the numbers were made

    $ python -m study.sweep {lists}             # what has no row yet
    $ python -m study.sweep {lists} --report    # this page

Costs, tasks and ranks have their commands in their sections. The CSVs have more columns than this page: calibration
error, and nats, top-1 and ranks by how frequent a token is. Rows by the code and the device that made them:
"""


def table(heads, lines):
    rule = ['---'] * len(heads)
    return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, rule, *lines)) + '\n'


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
    for group, entries in study.groups.items():
        for entry in entries:
            if study.main and entry['name'] not in study.main:
                continue
            seed_rows = best_rows(study, entry, rows)
            size = f'{parameters(seed_rows[0]) / 1e6:.2f} M' if seed_rows else MISSING
            measured = [number(values(seed_rows, f'{text}_{column}'), form) for text in texts]
            top1 = number(values(seed_rows, f'{texts[0]}_top1_accuracy'), '.1%')
            lines.append([group, entry['name'], size, *measured, top1])
    heads = ['trained on', 'model', 'parameters', *(f'{measure}, {text}' for text in texts), 'top-1']
    return table(heads, lines)


def table_of_groups(study, cells):
    """{name: {group: cell}} -> a row a name, a column a group."""
    groups = list(study.groups)
    lines = [[name, *(group_cells.get(group, '') for group in groups)] for name, group_cells in cells.items()]
    return table(['model', *groups], lines)


def other_models(study, rows):
    """The nats on each text of the models that are not in MAIN, without those that the list gives one seed."""
    cells = {}
    for entry in study.entries:
        if entry['name'] in study.main or len(entry['seeds']) == 1:
            continue
        seed_rows = best_rows(study, entry, rows)
        nats = [number(values(seed_rows, f'{text}_nats_per_token'), '.3f') for text in entry['texts']]
        cells.setdefault(entry['name'], {})[entry['group']] = ' / '.join(nats)
    return table_of_groups(study, cells)


def rates_tried(study, rows):
    """The learning rates that were tried, the best one first, with the nats of the first seed."""
    cells = {}
    for group, entries in study.groups.items():
        for name, curve in learning_rate_nats(study, entries, rows).items():
            best_first = sorted(curve, key=curve.get)
            tried = ', '.join(f'{rate:g}: {curve[rate]:.3f}' for rate in best_first)
            cells.setdefault(name, {})[group] = tried or MISSING
    return table_of_groups(study, cells) if cells else None


def costs_table(path):
    """Time and memory of a training step: a row a model, two columns a device."""
    devices = costs_by_device(path)
    names = dict.fromkeys(name for device_rows in devices.values() for name in device_rows)
    heads = ['model', 'parameters']
    for device in devices:
        heads += [f'time, {device}', 'MB']
    lines = []
    for name in names:
        # {} where a device has not run the model
        measured = [device_rows.get(name, {}) for device_rows in devices.values()]
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
    rows = study.rows()
    title, text = title_and_text(study.doc)
    if not rows:
        return [f'## {title}\n', f'{text}\n', f'{to_be_run(study)}\n']
    picture = study.path.with_suffix('.png')
    pictures.draw(study, rows, picture)
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
        pictures.draw_over_tokens(study, rows, picture)
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
        commits = Counter(f'{row["commit"]}, {row["device"]}' for row in study.rows().values())
        listed = '; '.join(f'{count} of {commit}' for commit, count in sorted(commits.items()))
        lines.append(f'* `{os.path.relpath(study.csv)}`: {listed or MISSING}.')
    return '\n'.join(lines) + '\n'


def report_path(studies):
    """RESULTS.md for the repository's own lists, else a file of the first list's name. Both lie beside that list."""
    if [study.path.name for study in studies] == OWN_LISTS:
        return studies[0].path.with_name('RESULTS.md')
    return studies[0].path.with_suffix('.md')


def write(studies):
    """Writes the report of some lists, and a picture beside each CSV. Raises InputError, as check() does."""
    for study in studies:
        check(study)
    target = report_path(studies)
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
