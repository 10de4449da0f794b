"""
Rewrites the tables and figures of study/RESULTS.md and README.md from the CSVs. The same CSVs give the same bytes.

    $ python -m study.report                     # the report
    $ python -m study.report study/english.py    # prints a list's models, compared with each group's first

A table follows its line `<!-- table: NAME -->`; the text is written by hand. Models are named by the `label` of their
entries. A difference is the mean of a model minus that of its reference, ± the standard error of the difference, with
the 95% interval of Welch's t. A model is better or worse if the interval excludes 0.
"""

import argparse
import math
import re
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

from mhf.errors import install_excepthook
from study.rows import parameters, read_csv, values
from study.sweep import Study

HERE = Path(__file__).resolve().parent
MISSING = '–'
INFORMED = 'MHF H4, informed signatures'
RANGES = 'MHF H4, frequency ranges'
PLAIN = 'MHF H4, plain'
ABLATIONS = ('Single-ID', 'mean gate', 'hard embeddings', 'no cascade', 'LSH', 'product loss')
DEMO = 'MHF H3 B2,048'
SIZES = ('MHF H4 B16,384', DEMO, 'MHF H4')
KINDS = ('informed signatures', 'frequency ranges')
BIAS = 'Standard, frozen bias'
ROWS = 'rows of form and shape'
# where nothing explains the labels
NAMES = {'MHF H4': "MHF H4, the paper's signatures", 'Standard, d=84': 'Standard, hidden size 84'}
ALL = 'counts of 39.5 M tokens'
# lists and patterns of their groups
LARGE = [('large_vocabulary', ''), ('longer', '131,072')]
SMALL = [('english', ''), ('longer', '32,768')]
# {table: (its lists, {reference: the models that are compared with it})}
TABLES = dict(
    large=(LARGE, {'Standard': [INFORMED, RANGES, 'MHF H4', 'Standard with W_s', BIAS]}),
    large_counts=(LARGE, {BIAS: [INFORMED, RANGES], f'{BIAS}, {ALL}': [INFORMED, f'{RANGES}, {ALL}']}),
    large_equal=(LARGE, {'Standard, d=84': [INFORMED, RANGES, 'MHF H4']}),
    small=(SMALL, {'Standard': [INFORMED, RANGES, 'MHF H4', 'Standard with W_s']}),
    control=(SMALL + LARGE, {'Standard with W_s': [INFORMED, RANGES, 'MHF H4']}),
    signatures=(LARGE + SMALL, {name: [f'{name}, {kind}' for kind in KINDS] for name in SIZES}),
    counts=(
        LARGE + SMALL,
        {RANGES: [INFORMED, f'{RANGES}, {ALL}'], f'{DEMO}, frequency ranges': [f'{DEMO}, informed signatures']},
    ),
    spelling=(
        SMALL + LARGE,
        {INFORMED: [f'Standard with W_s and {ROWS}', f'Standard with {ROWS}', 'MHF H4, form and shape without counts']},
    ),
    parts=(
        SMALL,
        {'MHF H4': ['MHF H4, product loss', 'MHF H4, Gaussian W_s'], 'Standard': ['Standard, embeddings x 1']},
    ),
    parts_plain=(
        SMALL,
        {PLAIN: [*(f'{PLAIN}, {part}' for part in ABLATIONS), 'MHF H2 B16,126, plain', 'MHF H3 B10,686, plain']},
    ),
)
# README's table: {(list, group): models}
FRONT = {
    ('english', 'vocabulary of 32,768, 3.07 M tokens'): [INFORMED, 'Standard', 'Standard with W_s'],
    ('large_vocabulary', 'vocabulary of 131,072, 3.07 M tokens'): [
        *(INFORMED, 'Standard', 'Standard with W_s', BIAS, 'Standard, d=84')
    ],
}

# -----------------------------------------------------------------------------
# statistics


def standard_error(numbers):
    """The standard error of the mean over seeds, 0 of one seed."""
    return statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0


def number(numbers, form='.4f'):
    """The mean over seeds and, if there are several, its standard error."""
    if not numbers:
        return MISSING
    mean = f'{statistics.mean(numbers):{form}}'
    return mean if len(numbers) == 1 else f'{mean} ± {standard_error(numbers):{form}}'


def difference(first, second):
    """Bits per byte of the seeds of two models -> the difference of their means, and a verdict on the first one."""
    mean = statistics.mean(first) - statistics.mean(second)
    if min(len(first), len(second)) < 2:
        return f'{mean:+.4f}', 'one seed'
    error = (standard_error(first) ** 2 + standard_error(second) ** 2) ** 0.5
    low, high = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    verdict = 'better' if high < 0 else 'worse' if low > 0 else 'no difference found'
    return f'{mean:+.4f} ± {error:.4f} [{low:+.4f}, {high:+.4f}]', verdict


def summarize(verdicts):
    """{corpus: verdict} -> 'better', or 'better on english, no difference found on fineweb'."""
    corpora = {}
    for corpus, verdict in verdicts.items():
        corpora.setdefault(verdict, []).append(corpus)
    if len(corpora) == 1:
        return verdict
    return ', '.join(f'{verdict} on {" and ".join(names)}' for verdict, names in corpora.items())


# -----------------------------------------------------------------------------
# tables


def markdown(heads, lines):
    rule = ['---'] * len(heads)
    return '\n'.join(f'| {" | ".join(line)} |' for line in (heads, rule, *lines)) + '\n' if lines else ''


def read_groups(path, pattern=''):
    """A list -> its groups that match, {group: (names of corpora, {label: finished runs, a row per seed})}."""
    study = Study(path)
    rows = study.rows()
    groups = {}
    for entry in (entry for entry in study.entries if re.search(pattern, entry['group'])):
        _, models = groups.setdefault(entry['group'], (list(entry['corpora']), {}))
        if seeds := study.best_rows(entry, rows):
            models[entry['label']] = seeds
    return groups


def split_group(group):
    """'vocabulary of 131,072, 3.07 M tokens' -> ['131,072', '3.07 M tokens']; 'small' -> [MISSING, 'small']."""
    found = re.fullmatch(r'vocabulary of ([\d,]+), (.*)', group)
    return list(found.groups()) if found else [MISSING, group]


def scale(group):
    """What groups are sorted by: vocabulary size, width and training tokens."""
    found = [re.search(pattern, group) for pattern in (r'^vocabulary of ([\d,]+)', r'd=(\d+)', r'([\d.]+) M tokens')]
    return [float(match[1].replace(',', '')) if match else 0 for match in found]


def bits(seeds, corpus):
    return values(seeds, f'{corpus}_bits_per_byte')


def millions(seeds):
    return f'{parameters(seeds[0]) / 1e6:.1f} M'


def comparison_lines(group, corpora, models, reference, compared):
    """The lines of a reference and of the models that are compared with it, the best one first. Both are labels."""
    lines = []
    ranked = sorted(compared, key=lambda label: statistics.mean(bits(models[label], corpora[0])))
    for label in [reference, *ranked]:
        seeds = models[label]
        cells = []
        verdicts = {corpus: 'reference' for corpus in corpora}
        for corpus in corpora:
            text = MISSING
            if label != reference:
                text, verdicts[corpus] = difference(bits(seeds, corpus), bits(models[reference], corpus))
            cells += [number(bits(seeds, corpus)), text]
        top1 = number(values(seeds, f'{corpora[0]}_top1_accuracy'), '.2%')
        lines.append([*split_group(group), label, millions(seeds), str(len(seeds)), *cells, top1, summarize(verdicts)])
    return lines


def comparison_table(groups, references):
    """Items of read_groups, {reference: labels} -> a table; '' without rows."""
    lines = []
    for group, (corpora, models) in sorted(groups, key=lambda item: scale(item[0])):
        for reference, labels in references.items():
            compared = [label for label in labels if label in models]
            if reference in models and (compared or not labels):
                lines += comparison_lines(group, corpora, models, reference, compared)
    columns = [head for corpus in corpora for head in (f'bits per byte, {corpus}', f'difference, {corpus}')]
    return markdown(['vocabulary', 'setup', 'model', 'parameters', 'seeds', *columns, 'top-1', 'verdict'], lines)


def expansion_table():
    """The models before and after the expansion, compared with Standard on each corpus."""
    lines = []
    for group, (corpora, models) in read_groups(HERE / 'expansion.py').items():
        for corpus in corpora:
            row = models['Standard'][0]
            total_bits = float(row[f'{corpus}_tokens']) * float(row[f'{corpus}_nats_per_token']) / math.log(2)
            # `english` of the other lists is another text
            name = f'{corpus.title()}, {total_bits / float(row[f"{corpus}_bits_per_byte"]) / 1000:.0f} kB'
            reference = bits(models['Standard'], corpus)
            for label in ['Standard', *(label for label in models if label != 'Standard')]:
                seeds = models[label]
                compared = (MISSING, 'reference')
                if label != 'Standard':
                    compared = difference(bits(seeds, corpus), reference)
                cells = [name, label, millions(seeds), str(len(seeds)), number(bits(seeds, corpus)), *compared]
                lines.append([*split_group(group), *cells])
    columns = ('parameters', 'seeds', 'bits per byte', 'difference', 'verdict')
    return markdown(['vocabulary', 'setup', 'corpus', 'model', *columns], lines)


def front_table():
    """README's table: models that read as many tokens, and by how much they are behind informed signatures."""
    lines = []
    for (name, group), labels in FRONT.items():
        _, models = read_groups(HERE / f'{name}.py')[group]
        for label in labels:
            if seeds := models.get(label):
                cells = [split_group(group)[0], NAMES.get(label, label), millions(seeds), str(len(seeds))]
                for corpus in ('english', 'fineweb'):
                    gap, _ = difference(bits(seeds, corpus), bits(models[INFORMED], corpus))
                    gap = gap.split(' [')[0].lstrip('+') if label != INFORMED else MISSING
                    cells += [f'{statistics.mean(bits(seeds, corpus)):.4f}', gap]
                lines.append(cells)
    heads = ('bits per byte', 'behind by')
    columns = [f'{head}, {corpus}' for corpus in ('english', 'fineweb') for head in heads]
    return markdown(['vocabulary', 'model', 'parameters', 'seeds', *columns], lines)


def read_tenths():
    """The rows of tenths.csv; a mean of seeds, 1+2, once for each of them."""
    return [row for row in read_csv(HERE / 'tenths.csv') for _ in row['seed'].split('+')]


def tenths_table(group, corpus, labels):
    """Nats per token of each tenth of a corpus."""
    rows = [row for row in read_tenths() if (row['group'], row['corpus']) == (group, corpus)]
    measured = {label: seeds for label in labels if (seeds := [row for row in rows if row['model'] == label])}
    lines = []
    for k in range(1, 11):
        nats = [statistics.mean(values(seeds, f'nats_{k}')) for seeds in measured.values()]
        count = statistics.mean(values(rows, f'count_{k}'))
        lines.append([str(k), f'{count:,.0f}', *(f'{mean:.3f}' for mean in nats)])
    heads = [f'{label} (seeds: {len(seeds)})' for label, seeds in measured.items()]
    return markdown(['tenth', 'mean count', *heads], lines)


def temperature_table():
    """The product loss at the best temperature of P(w), from tenths.csv."""
    rows = [row for row in read_tenths() if row['temperature'] not in ('', '1.0')]
    found = {}
    for row in rows:
        found.setdefault((row['group'], row['model'], row['corpus']), []).append(row)
    columns = ('nats_per_token', 'temperature', 'nats_at_it')
    lines = []
    for (group, *key), seeds in found.items():
        numbers = [number(values(seeds, column), '.2f') for column in columns]
        lines.append([split_group(group)[1], *key, str(len(seeds)), *numbers])
    return markdown(
        ['setup', 'model', 'corpus', 'seeds', 'nats per token', 'best temperature', 'nats at this temperature'], lines
    )


def speed_table(name, commit):
    """The training steps of a CSV at a commit, and their time relative to Standard's with the same tokens."""
    rows = [row for row in read_csv(HERE / name) if row['commit'] == commit]
    lines = []
    for row in rows:
        same = [other for other in rows if other['tokens'] == row['tokens'] and 'Standard' in other['name']]
        same = [other for other in same if ('tekken' in other['name']) == ('tekken' in row['name'])]
        ratio = f'{float(row["ms"]) / float(same[0]["ms"]):.2f}' if same else MISSING
        name = row['name'].replace(', kernels', '').replace('with tekken', 'with a vocabulary of 131,072')
        lines.append([name, row['tokens'].replace('2048', '2,048'), row['ms'], row['memory_gb'], ratio])
    return markdown(['model', 'tokens', 'step, ms', 'memory, GB', "time / Standard's"], lines)


def tables():
    """{name: Markdown}."""
    found = {}
    for name, (sources, references) in TABLES.items():
        lists = [read_groups(HERE / f'{source}.py', pattern) for source, pattern in sources]
        found[name] = comparison_table([group for groups in lists for group in groups.items()], references)
    found |= dict(front=front_table(), expansion=expansion_table(), temperature=temperature_table())
    labels = ['Standard', RANGES, 'MHF H4', BIAS, f'{BIAS}, {ALL}']
    found |= dict(tenths=tenths_table('vocabulary of 131,072, 3.07 M tokens', 'english', labels))
    for corpus in ('english', 'fineweb'):
        labels = [INFORMED, 'Standard with W_s']
        found[f'tenths_{corpus}'] = tenths_table('vocabulary of 32,768, 10.2 M tokens', corpus, labels)
    found |= dict(gpu=speed_table('gpu_speed.csv', 'c9fd018'), cpu=speed_table('cpu_speed.csv', 'b87d0d2'))
    return found


# -----------------------------------------------------------------------------
# figures


def draw_parameters(path):
    """Bits per byte of english against parameters, with a vocabulary of 131,072."""
    _, models = read_groups(HERE / 'large_vocabulary.py')['vocabulary of 131,072, 3.07 M tokens']
    # text stays text, and the bytes do not depend on the date
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'parameters'}):
        fig = Figure(figsize=(7, 3.4), facecolor='white')
        ax = fig.subplots()
        for label in ('Standard', 'Standard with W_s', 'Standard, d=84', 'MHF H4', RANGES, INFORMED):
            if seeds := models.get(label):
                mean = statistics.mean(bits(seeds, 'english'))
                x = parameters(seeds[0]) / 1e6
                color = 'C0' if label.startswith('Standard') else 'C1'
                ax.errorbar(x, mean, yerr=standard_error(bits(seeds, 'english')), marker='o', capsize=4, color=color)
                text = f'{NAMES.get(label, label)}: {mean:.3f}'
                ax.annotate(text, (x, mean), xytext=(9, 0), textcoords='offset points', va='center')
        ax.set(xlabel='parameters, millions', ylabel='bits per byte, english', xlim=(0, 56))
        ax.margins(y=0.1)
        ax.grid(alpha=0.3)
        fig.tight_layout()
        fig.savefig(path, metadata=dict(Date=None, Creator=None))


def write():
    """Rewrites the tables and figures of RESULTS.md and README.md."""
    for path in (HERE / 'RESULTS.md', HERE.parent / 'README.md'):
        text = path.read_text(encoding='utf-8')
        for name, lines in tables().items():
            text = re.sub(rf'(?<=<!-- table: {name} -->\n)(\|.*\n)*', lambda _, lines=lines: lines, text)
        path.write_text(text, encoding='utf-8')
    draw_parameters(HERE / 'parameters.svg')


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('lists', nargs='*', help='lists of runs whose models are printed instead')
    paths = parser.parse_args().lists
    for path in paths:
        for group, (corpora, models) in read_groups(path).items():
            reference, *others = models or ['']
            print(comparison_table([(group, (corpora, models))], {reference: others}))
    if not paths:
        write()


if __name__ == '__main__':
    main()
