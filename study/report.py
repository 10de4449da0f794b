"""
Rewrites the tables and figures of study/RESULTS.md and README.md from the CSVs. The same CSVs give the same bytes.

    $ python -m study.report                     # the report
    $ python -m study.report study/english.py    # prints the models and comparisons of a list

A table follows its line `<!-- table: NAME -->`; the text is written by hand. A list's MAIN names the models of its
table, by default all. CLAIMS are tuples (comparison, model, the model that it is compared with); a claim is decided in
each group that has both, and so are those in PARTS, which have a table of their own. MEASURE names the columns. An
entry's `label` is its name in the tables.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from mhf.errors import InputError, install_excepthook
from study.rows import parameters, read_csv, std, values
from study.sweep import Study
from study.vocabulary import VOCABULARY_SIZES

HERE = Path(__file__).resolve().parent
MISSING = '–'
# a measure's name in a table and its format; less is better
MEASURES = {'nats_per_token': ('nats', '.3f'), 'bits_per_byte': ('bits per byte', '.4f')}

# -----------------------------------------------------------------------------
# tables


def table(heads, lines):
    """A Markdown table. Its groups are named without their vocabulary if that is the usual one in all of them."""
    k = heads.index('setup') if 'setup' in heads else None
    usual = 'vocabulary of 32,768, '
    if k is not None and all(usual in line[k] or 'vocabulary' not in line[k] for line in lines):
        lines = [[*line[:k], line[k].removeprefix(usual), *line[k + 1 :]] for line in lines]
    rule = ['---'] * len(heads)
    return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, rule, *lines)) + '\n'


def number(numbers, form):
    """The mean of some seeds and, if there are several, their standard deviation."""
    if not numbers:
        return MISSING
    mean = f'{statistics.mean(numbers):{form}}'
    return mean if len(numbers) == 1 else f'{mean} ± {statistics.stdev(numbers):{form}}'


def label(entry, seeds):
    """An entry's name in a table; it marks rows that were trained in another precision than the entry's."""
    name = entry.get('label', entry['name'])
    others = [row['dtype'] for row in seeds if row['dtype'] != entry['dtype']]
    return f'{name} ({len(others)} of {len(seeds)} seeds in {others[0]})' if others else name


def scale(group):
    """What groups are sorted by: vocabulary size, width and training tokens, from the name of the group."""
    patterns = (r'vocabulary of ([\d,]+)', r'd=(\d+)', r'([\d.]+) M tokens')
    found = [re.search(pattern, group) for pattern in patterns]
    return [float(match[1].replace(',', '')) if match else 0 for match in found]


def model_table(studies, measure):
    """The models in MAIN of some lists that have rows, group by group. An item may be (list, pattern of its groups)."""
    name, form = MEASURES[measure]
    corpora = list_corpora(studies)
    lines = []
    for study, group in select_groups(studies):
        rows = study.rows()
        for entry in study.entries:
            seeds = study.best_rows(entry, rows)
            if seeds and entry['group'] == group and (entry['name'] in study.main or not study.main):
                measured = [number(values(seeds, f'{corpus}_{measure}'), form) for corpus in corpora]
                top1 = number(values(seeds, f'{corpora[0]}_top1_accuracy'), '.1%')
                size = f'{parameters(seeds[0]) / 1e6:.1f} M'
                lines.append([group, label(entry, seeds), size, str(len(seeds)), *measured, top1])
    heads = ['setup', 'model', 'parameters', 'seeds', *(f'{name}, {corpus}' for corpus in corpora), 'top-1']
    return table(heads, lines)


def select_groups(studies):
    """Lists, or tuples (list, pattern of its groups) -> [(list, group)], sorted by scale()."""
    pairs = [item if isinstance(item, tuple) else (item, '') for item in studies]
    selected = [(study, group) for study, pattern in pairs for group in groups(study) if re.search(pattern, group)]
    return sorted(selected, key=lambda pair: scale(pair[1]))


# the models of README's table: list, group, name in the table, name of the entry
FRONT = [
    ('english', '3.07 M tokens', 'Standard', 'Standard, tuned, scale 4'),
    ('english', '3.07 M tokens', 'MHF H4', 'MHF H4 B7,966, tuned, orthogonal'),
    ('english', '3.07 M tokens', 'MHF H4, frequency ranges', 'MHF H4 B7,966, tuned, orthogonal, ranges'),
    ('large_vocabulary', 'vocabulary of 131,072, 3.07 M tokens', 'Standard', 'Standard, scale 4'),
    ('large_vocabulary', 'vocabulary of 131,072, 3.07 M tokens', 'MHF H4', 'MHF H4 B7,966, orthogonal'),
    ('large_vocabulary', 'vocabulary of 131,072, 3.07 M tokens', 'MHF H4, frequency ranges', 'MHF H4 B7,966, ranges'),
]
VOCABULARIES = dict(english='32,768', large_vocabulary='131,072')


def front_rows():
    """Yields the vocabulary, the name and the rows of each model of README's table."""
    studies = {name: Study(HERE / f'{name}.py') for name in VOCABULARIES}
    for list_name, group, model, name in FRONT:
        study = studies[list_name]
        entry = next(entry for entry in study.entries if (entry['group'], entry['name']) == (group, name))
        yield VOCABULARIES[list_name], model, study.best_rows(entry, study.rows())


def front_table():
    """The models of README, in bits per byte, with their number of seeds."""
    lines = []
    for vocabulary, model, seeds in front_rows():
        bits = [number(values(seeds, f'{corpus}_bits_per_byte'), '.4f') for corpus in ('english', 'fineweb')]
        top1 = number(values(seeds, 'english_top1_accuracy'), '.1%')
        lines.append([vocabulary, model, f'{parameters(seeds[0]) / 1e6:.1f} M', str(len(seeds)), *bits, top1])
    heads = ['vocabulary', 'model', 'parameters', 'seeds', 'bits per byte, english', 'bits per byte, fineweb', 'top-1']
    return table(heads, lines)


def groups(study):
    return list(dict.fromkeys(entry['group'] for entry in study.entries))


def list_corpora(studies):
    """The names of all corpora that the lists measure, in order."""
    studies = [item[0] if isinstance(item, tuple) else item for item in studies]
    return list(dict.fromkeys(corpus for study in studies for entry in study.entries for corpus in entry['corpora']))


def verdict(differences):
    """
    {corpus: (difference, its standard deviation or None)}, positive where the first model is better -> the verdict.
    Two models are on par if the difference is below two standard deviations on every corpus.
    """
    words = {}
    one_seed = ''
    for corpus, (difference, deviation) in differences.items():
        if deviation is None:
            one_seed = ' (one seed)'
            deviation = 0
        words[corpus] = 'on par' if abs(difference) <= 2 * deviation else 'better' if difference > 0 else 'worse'
    if len(set(words.values())) == 1:
        return words.popitem()[1] + one_seed
    decided = {word: [corpus for corpus in words if words[corpus] == word] for word in ('better', 'worse')}
    return ', '.join(f'{word} on {" and ".join(corpora)}' for word, corpora in decided.items() if corpora) + one_seed


def claim_line(study, rows, claim, pair):
    """The line of a claim in the table; pair: the entries of its models in a group. None if one of them has no rows."""
    _, form = MEASURES[study.measure]
    seeds = [study.best_rows(entry, rows) for entry in pair]
    if not all(seeds):
        return None
    differences = {}
    cells = []
    for corpus in list_corpora([study]):
        if not all(corpus in entry['corpora'] for entry in pair):
            cells.append(MISSING)
            continue
        first, second = (values(seed_rows, f'{corpus}_{study.measure}') for seed_rows in seeds)
        difference = statistics.mean(second) - statistics.mean(first)
        several = len(first) > 1 and len(second) > 1
        deviation = (statistics.variance(first) + statistics.variance(second)) ** 0.5 if several else None
        differences[corpus] = (difference, deviation)
        cells.append(f'{difference:+{form}} ± {deviation:{form}}' if several else f'{difference:+{form}}')
    counts = ' + '.join(str(len(seed_rows)) for seed_rows in seeds)
    models = map(label, pair, seeds)
    return [claim, *models, pair[0]['group'], *cells, counts, verdict(differences)]


def claims_table(studies, kind='claims'):
    """
    A line for each of the lists' claims, or `parts`, and each group whose two models have rows. An item may be (list,
    pattern of its groups). Raises InputError if no group has both models.
    """
    lines = {}  # by claim, in the order of the first one
    for study, group in select_groups(studies):
        rows = study.rows()
        entries = {(entry['group'], entry['name']): entry for entry in study.entries}
        for claim, *names in getattr(study, kind):
            if not any(all((other, name) in entries for name in names) for other in groups(study)):
                raise InputError(f'{study.path.name}: no group has both {" and ".join(names)}, the models of a claim')
            pair = [entries.get((group, name)) for name in names]
            line = all(pair) and claim_line(study, rows, claim, pair)
            lines.setdefault(claim, []).extend([line] if line else [])
    unit = MEASURES[next(study.measure for study, _ in select_groups(studies))][0]
    corpora = [f'difference in {unit}, {corpus}' for corpus in list_corpora(studies)]
    heads = ['comparison', 'model', 'compared with', 'setup', *corpora, 'seeds', 'verdict']
    return table(heads, [line for lines_of_claim in lines.values() for line in lines_of_claim])


# -----------------------------------------------------------------------------
# figures


def save(fig, path):
    fig.tight_layout()
    # without matplotlib's version, so that the bytes do not depend on it
    fig.savefig(path, dpi=110, metadata=dict(Software=None))


def draw_points(ax, k, name, points, line='-'):
    """Draws the points (x, mean, standard deviation) of a model in color k."""
    if points:
        x, means, deviations = zip(*sorted(points), strict=True)
        ax.errorbar(x, means, yerr=deviations, marker='o', capsize=3, color=f'C{k}', label=name, linestyle=line)
    ax.grid(alpha=0.3)


def draw_front(path):
    """The bits per byte of the models of README: a panel for each corpus, a color for each vocabulary."""
    models = list(front_rows())
    fig = Figure(figsize=(9, 2.8))
    for ax, corpus in zip(fig.subplots(1, 2, sharey=True), ('english', 'fineweb'), strict=True):
        for vocabulary, model, seeds in reversed(models):
            bits = values(seeds, f'{corpus}_bits_per_byte')
            color = 'C0' if vocabulary == '32,768' else 'C1'
            name = f'{vocabulary}: {model}, {parameters(seeds[0]) / 1e6:.1f} M parameters'
            ax.errorbar(statistics.mean(bits), name, xerr=std(bits), marker='o', capsize=3, color=color)
        ax.set(xlabel=f'bits per byte, {corpus}')
        ax.grid(alpha=0.3)
    save(fig, path)


def draw_vocabularies(study, path):
    """Bits per byte, and parameters, against the size of the vocabulary; a group is a tokenizer."""
    rows = study.rows()
    fig = Figure(figsize=(9, 3.4))
    left, right = fig.subplots(1, 2)
    for k, name in enumerate(dict.fromkeys(entry['label'] for entry in study.entries)):
        points = []
        sizes = []
        for entry in study.entries:
            seeds = study.best_rows(entry, rows)
            if entry['label'] == name and seeds:
                bits = values(seeds, 'english_bits_per_byte')
                # models side by side, so that none hides another
                tokens = VOCABULARY_SIZES[entry['group']] * (1 + 0.03 * k)
                points.append((tokens, statistics.mean(bits), std(bits)))
                sizes.append((tokens, parameters(seeds[0]) / 1e6, 0))
        draw_points(left, k, name, points)
        draw_points(right, k, name, sizes)
    for ax, label in ((left, 'bits per byte, held-out english'), (right, 'parameters, millions')):
        ax.set(xscale='log', xlabel='tokens in the vocabulary', ylabel=label)
        ax.set_xticks(list(VOCABULARY_SIZES.values()), [f'{size // 1000} K' for size in VOCABULARY_SIZES.values()])
        ax.minorticks_off()
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, loc='upper left')
    save(fig, path)


def draw_times(study, path):
    """Bits per byte against training time on one CPU thread, at the step times of study/costs.py."""
    rows = study.rows()
    costs = [row for row in read_csv(HERE / 'costs.csv') if row['list'] == study.path.stem]
    speeds = {int(row['parameters'] or 0): float(row['tokens_per_s']) for row in costs}
    models = {}
    for entry in study.entries:
        seeds = study.best_rows(entry, rows)
        # a model with frequency ranges takes as long as without
        if seeds and not entry.get('counts_from') and entry['group'] == study.entries[0]['group']:
            models.setdefault(parameters(seeds[0]), []).append((entry['label'], seeds))
    corpora = study.entries[0]['corpora']
    fig = Figure(figsize=(9, 3.8))
    for ax, corpus in zip(fig.subplots(1, len(corpora)), corpora, strict=True):
        for k, (size, runs) in enumerate(models.items()):
            points = []
            for _, seeds in runs:
                bits = values(seeds, f'{corpus}_bits_per_byte')
                hours = int(seeds[0]['trained_tokens']) / speeds[size] / 3600
                points.append((hours, statistics.mean(bits), std(bits)))
            name = min((name for name, _ in runs), key=len)
            draw_points(ax, k, f'{name}: {size / 1e6:.1f} M parameters', points, line='')
        ax.set(xlabel='training time, hours on one CPU thread', ylabel=f'bits per byte, held-out {corpus}')
    ax.legend(fontsize=7)
    save(fig, path)


def draw_validations(study, path):
    """Validation bits per byte against training tokens: a panel for each group, a line for each seed."""
    rows = study.rows()
    colors = {name: f'C{k}' for k, name in enumerate(dict.fromkeys(entry['name'] for entry in study.entries))}
    fig = Figure(figsize=(9, 3.6))
    panels = fig.subplots(1, len(groups(study)), sharey=True, squeeze=False)[0]
    for ax, group in zip(panels, groups(study), strict=True):
        for entry in study.entries:
            seeds = study.best_rows(entry, rows) if entry['group'] == group else []
            for k, row in enumerate(seeds):
                tokens, bits = zip(*json.loads(row['validation']), strict=True)
                millions = [count / 1e6 for count in tokens]
                name = None if k else f'{label(entry, seeds)}: {parameters(row) / 1e6:.2f} M parameters'
                ax.plot(millions, bits, marker='.', color=colors[entry['name']], label=name)
        ax.set(title=group, xlabel='training tokens, millions', ylabel='bits per byte, validation without overlap')
        ax.label_outer()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    save(fig, path)


def write():
    """Rewrites the tables and figures of RESULTS.md and README.md."""
    names = ('english', 'vocabulary', 'large_vocabulary', 'expansion', 'longer')
    english, vocabulary, large, expansion, longer = (Study(HERE / f'{name}.py') for name in names)
    tables = dict(
        front=front_table(),
        small=model_table([english, (longer, '32,768')], 'bits_per_byte'),
        small_claims=claims_table([english, (longer, '32,768')]),
        large=model_table([vocabulary, large, (longer, '131,072')], 'bits_per_byte'),
        large_claims=claims_table([vocabulary, large, (longer, '131,072')]),
        expansion=model_table([expansion], 'bits_per_byte'),
        expansion_claims=claims_table([expansion]),
        parts=claims_table([english], 'parts'),
    )
    for path in (HERE / 'RESULTS.md', HERE.parent / 'README.md'):
        text = path.read_text(encoding='utf-8')
        for name, lines in tables.items():
            text = re.sub(rf'(?<=<!-- table: {name} -->\n)(\|.*\n)*', lines, text)
        path.write_text(text, encoding='utf-8')
    draw_front(HERE / 'front.png')
    draw_validations(longer, HERE / 'longer.png')
    draw_vocabularies(vocabulary, HERE / 'vocabulary_size.png')
    draw_times(large, HERE / 'large_vocabulary_time.png')


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('lists', nargs='*', help='lists of runs whose models and comparisons are printed instead')
    studies = [Study(path) for path in parser.parse_args().lists]
    if studies:
        print(model_table(studies, studies[0].measure))
        print(claims_table(studies))
    else:
        write()


if __name__ == '__main__':
    main()
