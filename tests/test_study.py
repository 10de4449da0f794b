"""The study's runner and its report, on models of a few thousand parameters."""

import ast
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys

import pytest
from conftest import REPO, ok, snapshot, started

from configurator import InputError
from mhf.tokenizers import get_tokenizer
from study import costs, report
from study.rows import add_row, read_csv, read_rows, write_csv
from study.sweep import Study, sweep

LIST = """
DATA = {'data': dict(dataset='docs.jsonl', val_fraction=0.25)}
RUNS = [
    dict(
        name='H3', group='tiny', config='cfg.py', train='data', corpora=dict(docs='data'), seeds=(1,),
        learning_rates=(1e-3, 1e-2), block_size=16, max_steps=40, eval_interval=5, num_layers=1, num_buckets=100,
        loss='product',
    )
]
"""
RUNS = ('tiny_H3_0.001_1', 'tiny_H3_0.01_1')


def rows(folder):
    """{folder of the run: row} of a finished sweep."""
    written = read_rows(folder / 'runs.csv')
    for row in written.values():
        assert row['docs_tokens']
        # depends on the load of the machine
        del row['tokens_per_s']
    return {'_'.join(map(str, key)): row for key, row in written.items()}


@pytest.fixture
def folder(few, tmp_path, monkeypatch):
    """The working directory, with a list of two runs and what they need."""
    folder = tmp_path / 'folder'
    folder.mkdir()
    for name in ('docs.jsonl', 'cfg.py'):
        shutil.copy(few / name, folder)
    (folder / 'runs.py').write_text(LIST)
    monkeypatch.chdir(folder)
    return folder


def test_killed_sweep_ends_with_the_same_rows(folder):
    """A killed and rerun sweep keeps its finished runs and ends with the rows of an uninterrupted one."""
    killed = shutil.copytree(folder, folder.with_name('killed'))
    command = ('study.sweep', 'runs.py')
    output = ok(*command, '--jobs=2', cwd=folder).stdout
    expected = rows(folder)
    assert sorted(expected) == sorted(RUNS) and {row['dtype'] for row in expected.values()} == {'float32'}
    settings = [json.loads(row['settings']) for row in expected.values()]
    assert settings[0] == settings[1] and settings[0]['loss'] == 'product' and 'learning_rate' not in settings[0]
    assert re.search(r'^tiny, H3, 0.01, 1: \d+\.\d{4} nats per token of docs$', output, re.MULTILINE)
    assert 'nothing is left to do' in ok(*command, cwd=folder).stdout
    process = started(*command, cwd=killed, wait_for=f'out/runs/{RUNS[1]}/ckpt.pt')
    os.kill(process.pid, signal.SIGKILL)  # the train.py that it started keeps running
    process.communicate()
    finished = snapshot(killed / 'out/runs' / RUNS[0])
    ok(*command, cwd=killed)
    assert rows(killed) == expected
    assert snapshot(killed / 'out/runs' / RUNS[0]) == finished
    printed = ok('study.report', 'runs.py', cwd=folder).stdout
    best = min(float(row['docs_nats_per_token']) for row in expected.values())
    assert re.search(rf'\n\| tiny \| H3 \| \S+ M \| {best:.3f} \|', printed)


def test_evaluation_fails_after_training(folder, monkeypatch):
    """A run whose evaluation failed or was killed is only evaluated by the next sweep."""
    monkeypatch.setattr(Study, 'evaluate', lambda *args: dict()['a failure'])
    with pytest.raises(InputError, match='2 runs failed'):
        sweep(Study('runs.py'), 2, '.')
    monkeypatch.setattr(Study, 'evaluate', lambda *args: dict(docs_nats_per_token=5.0))
    sweep(Study('runs.py'), 2, '.')
    assert len(read_csv(Study('runs.py').csv)) == 2


def test_source(folder, capsys):
    """An entry with a source waits for the source's run of the same seed and continues its training."""
    (folder / 'same.model').write_bytes(get_tokenizer('mistral').sp.serialized_model_proto())
    data = "DATA['larger'] = DATA['data'] | dict(tokenizer='same.model')\nRUNS[0] |= dict(learning_rates=(1e-2,))\n"
    entry = "dict(name='continued', source='H3', train='larger', corpora=dict(docs='larger'), learning_rates=(1e-6,))"
    (folder / 'runs.py').write_text(f'{LIST}{data}RUNS.insert(0, RUNS[0] | {entry})\n')
    runs = Study('runs.py')
    assert list(runs.pending({})) == [('tiny', 'H3', 1e-2, 1)]
    row = dict(docs_nats_per_token='5')
    assert runs.source_key(runs.entries[0], 2, {('tiny', 'H3', 1e-2, 1): row}) == ('tiny', 'H3', 1e-2, 2)
    sweep(runs, 2, '.')
    continued, source = (float(runs.best_rows(entry, runs.rows())[0]['docs_nats_per_token']) for entry in runs.entries)
    assert continued == pytest.approx(source, abs=0.01)
    shutil.rmtree(runs.out)
    write_csv(runs.csv, [row for row in read_csv(runs.csv) if row['name'] == 'H3'])
    with pytest.raises(InputError, match='1 runs failed'):
        sweep(runs, 2, '.')
    assert 'the model to expand, does not exist; delete its row in runs.csv' in capsys.readouterr().err


def test_best_learning_rate(folder):
    """A learning rate is chosen when all are finished or have failed; first seeds are trained before second ones."""
    runs = Study('runs.py')
    entry = runs.entries[0]
    first, second = (runs.key(entry, lr, 1) for lr in entry['learning_rates'])
    partial = {first: dict(docs_nats_per_token='5')}
    full = partial | {second: dict(docs_nats_per_token='4')}
    assert runs.best_lr(entry, {}) is None and runs.best_lr(entry, {}, so_far=True) is None
    assert runs.best_lr(entry, partial) is None and runs.best_lr(entry, partial, so_far=True) == 1e-3
    assert runs.best_lr(entry, full) == 1e-2
    assert list(runs.pending(partial)) == [second] and not runs.pending(full)
    # the entry of another group uses its learning rate
    two_seeds = entry | dict(seeds=(1, 2))
    longer = two_seeds | dict(group='longer', max_steps=50, learning_rates='H3')
    runs.entries = [two_seeds, longer]
    assert runs.best_lr(longer, full) == 1e-2 and runs.best_lr(longer, partial) is None
    assert list(runs.pending(full)) == [('longer', 'H3', 1e-2, 1), ('tiny', 'H3', 1e-2, 2), ('longer', 'H3', 1e-2, 2)]
    runs.entries = [entry]
    runs.failed[second] = 'it failed'
    assert runs.best_lr(entry, partial) == 1e-3 and not runs.pending(partial)


def test_rows_belong_to_entries(folder):
    """An entry whose settings differ from those of its rows is refused, and so is a claim without rows."""
    row = dict(group='tiny', name='H3', learning_rate=1e-2, seed=1, docs_nats_per_token=5)
    row['settings'] = '{"num_buckets": 100, "beta2": 0.5}'
    add_row(Study('runs.py').csv, row)
    runs = Study('runs.py')
    assert list(runs.pending(runs.rows())) == [('tiny', 'H3', 1e-3, 1)]
    runs.claims = [('claim', 'H3', 'Z')]
    with pytest.raises(InputError, match='no group has both H3 and Z'):
        report.claims_table([runs])
    (folder / 'runs.py').write_text(LIST.replace('num_buckets=100', 'num_buckets=99'))
    with pytest.raises(InputError, match='has num_buckets=99 .its row: 100.; give the entry a new name'):
        Study('runs.py').rows()


def test_costs(folder, monkeypatch):
    """Step times are relative to the first model's; rows of other lists and devices stay, the others are replaced."""
    (folder / 'runs.py').write_text(LIST + "RUNS.append(RUNS[0] | dict(name='S', num_hashes=0))\n")
    other = dict(list='runs', model='H3', relative_time='1.000', tokens_per_s='1', device='cpu', threads='1')
    write_csv(folder / 'costs.csv', [other, other | dict(device='another'), other | dict(list='another')])

    def measure(shape):
        speed = dict(tokens_per_s=50 if shape['num_hashes'] else 100)
        return dict.fromkeys(costs.COLUMNS + costs.MACHINE, 1) | dict(device='cpu') | speed

    monkeypatch.setattr(costs, 'measure', measure)
    monkeypatch.setattr(costs, 'measure_gpt2', lambda shape: 25)
    monkeypatch.setattr(sys, 'argv', ['costs.py', 'runs.py'])
    costs.main()
    rows = read_csv(folder / 'costs.csv')
    assert [(row['list'], row['model'], row['device']) for row in rows] == [
        ('runs', 'H3', 'another'),
        ('another', 'H3', 'cpu'),
        ('runs', 'H3', 'cpu'),
        ('runs', 'S', 'cpu'),
        ('runs', 'GPT-2', 'cpu'),
    ]
    assert [row['relative_time'] for row in rows[2:]] == ['1.000', '0.500', '2.000']


def table_rows(markdown):
    """The lines of the tables in a text."""
    return [line for line in markdown.splitlines() if line.startswith('|')]


LISTS = ('english', 'vocabulary', 'large_vocabulary', 'expansion')
LANGUAGES = ('english', 'mixture', 'arabic', 'chinese', 'hindi')


def seed_values(group, name, column):
    """The values of a model's seeds in the CSVs, at the learning rate that is best for its first seed."""
    rows = [row for study_list in LISTS for row in read_csv(REPO / f'study/{study_list}.csv')]
    rows = [row for row in rows if (row['group'], row['name']) == (group, name)]
    first = [row for row in rows if row['seed'] == '1']
    selected = 'mixture_nats_per_token' if first[0].get('mixture_nats_per_token') else 'english_nats_per_token'
    best = min(first, key=lambda row: float(row[selected]))['learning_rate']
    return [float(row[column]) for row in rows if row['learning_rate'] == best and row[column]]


def written(values, digits):
    if len(values) < 2:
        return f'{values[0]:.{digits}f}' if values else '–'
    return f'{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}'


def check_model_line(line, measure, digits, corpora=('english', 'fineweb')):
    group, name, size, *cells, top1 = line
    for corpus, cell in zip(corpora, cells, strict=True):
        assert cell == written(seed_values(group, name, f'{corpus}_{measure}'), digits)
    percents = written([100 * v for v in seed_values(group, name, 'english_top1_accuracy')], 1)
    assert top1.replace('%', '') == percents
    total = sum(seed_values(group, name, f'params_{part}')[0] for part in ('embedding', 'hash', 'decoder'))
    assert size == f'{total / 1e6:.2f} M'


def check_claim_line(line, corpora=('english', 'fineweb')):
    _, model, other, group, *cells, unit, seeds, verdict = line
    measure, digits = {'nats': ('nats_per_token', 3), 'bits per byte': ('bits_per_byte', 4)}[unit]
    words = {}
    for corpus, cell in zip(corpora, cells, strict=True):
        if cell == '–':
            assert not seed_values(group, model, f'{corpus}_{measure}')
            continue
        a, b = (seed_values(group, name, f'{corpus}_{measure}') for name in (model, other))
        assert seeds == f'{len(a)} + {len(b)}'
        difference = statistics.mean(b) - statistics.mean(a)
        if min(len(a), len(b)) == 1:
            assert cell == f'{difference:+.{digits}f}' and verdict == 'one seed'
            continue
        deviation = math.hypot(statistics.stdev(a), statistics.stdev(b))
        assert cell == f'{difference:+.{digits}f} ± {deviation:.{digits}f}'
        words[corpus] = 'on par' if abs(difference) <= 2 * deviation else 'ahead' if difference > 0 else 'behind'
    if len(set(words.values())) == 1:
        assert verdict == words['english']
    elif words:
        ahead, behind = (' and '.join(c for c in words if words[c] == word) for word in ('ahead', 'behind'))
        assert verdict == ', '.join([f'ahead on {ahead}'] * bool(ahead) + [f'behind on {behind}'] * bool(behind))


def test_results_are_what_the_rows_say():
    """Every cell of the tables of RESULTS.md, and every number with ±, follows from the CSVs."""
    text = (REPO / 'study/RESULTS.md').read_text()
    tables = {name: lines for name, lines in re.findall(r'<!-- table: (\w+) -->\n((?:\|.*\n)+)', text)}
    cells = {name: [line.strip('| ').split(' | ') for line in table_rows(lines)[2:]] for name, lines in tables.items()}
    names = {'english', 'vocabulary', 'expansion', 'expansion_claims', 'claims'}
    assert cells.keys() == names and all(cells.values())
    for line in cells['english']:
        check_model_line(line, 'nats_per_token', 3)
    for line in cells['vocabulary']:
        check_model_line(line, 'bits_per_byte', 4)
    for line in cells['expansion']:
        check_model_line(line, 'bits_per_byte', 4, LANGUAGES)
    for line in cells['expansion_claims']:
        check_claim_line(line, LANGUAGES)
    for line in cells['claims']:
        check_claim_line(line)
    # the prose, here and in README
    readme = (REPO / 'README.md').read_text()
    for number in re.findall(r'[+-]?\d+\.\d+ ± \d+\.\d+', f'{text} {readme}'):
        assert number in ''.join(tables.values()), number
    shown = table_rows(re.search(r'\| trained on \|.*?\n\n', readme, re.DOTALL)[0])
    assert len(shown) > 3 and set(shown) <= set(table_rows(tables['english']))
    assert len(text.splitlines()) <= 150


def test_the_report_regenerates(tmp_path, monkeypatch):
    """The CSVs give the same tables and figures, byte by byte."""
    shutil.copytree(REPO / 'study', tmp_path / 'study')
    monkeypatch.setattr(report, 'HERE', tmp_path / 'study')
    text = (REPO / 'study/RESULTS.md').read_text()
    (tmp_path / 'study/RESULTS.md').write_text(re.sub(r'^\|.*\n', '', text, flags=re.MULTILINE))
    monkeypatch.chdir(REPO)
    report.write()
    assert (tmp_path / 'study/RESULTS.md').read_text() == text
    figures = re.findall(r'!\[.*?\]\((.*?)\)', text)
    assert figures == ['vocabulary_size.png', 'large_vocabulary_time.png']
    first = {figure: (tmp_path / 'study' / figure).read_bytes() for figure in figures}
    report.write()
    assert first == {figure: (tmp_path / 'study' / figure).read_bytes() for figure in figures}


# (text of LIST, what replaces it, the error)
WRONG = [
    ('learning_rates=(1e-3, 1e-2)', "learning_rates='H9'", 'names no entry'),
    ("name='H3'", "name='H3', source='H9'", "source='H9' names no entry"),
    ("docs='data'", "docs='other'", "not in DATA: {'other'}"),
    ("='docs.jsonl'", "='{corpus_dir}/english_edu.jsonl.xz@5e6'", 'none/english_edu.jsonl.xz does not exist; name its'),
    ("='docs.jsonl'", "='other.jsonl'", 'prepare.py ended with 1: error: '),
    ('    )\n]', '    )\n]\nRUNS += RUNS', "2 entries are called .'tiny', 'H3'."),
    ('num_buckets=100', 'num_bucket=100', '2 runs failed'),
]


@pytest.mark.parametrize('right, wrong, says', WRONG)
def test_a_wrong_list(folder, right, wrong, says):
    """A wrong list, a corpus that does not exist and a failed run raise an InputError and add no row."""
    (folder / 'runs.py').write_text(LIST.replace(right, wrong))
    with pytest.raises(InputError, match=says):
        sweep(Study('runs.py'), 2, 'none')
    assert not (folder / 'runs.csv').exists()


@pytest.mark.parametrize('name', ['costs', 'kernels', 'rank', 'report', 'sweep'])
def test_help(name, tmp_path):
    """Each script of the study prints its docstring for --help."""
    title = ast.get_docstring(ast.parse((REPO / f'study/{name}.py').read_text())).splitlines()[0]
    assert title in ok(f'study.{name}', '--help', cwd=tmp_path).stdout
