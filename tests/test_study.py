"""The study's runner and its report, on models of a few thousand parameters."""

import ast
import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import REPO, events, ok, random_model, run, snapshot, start

LIST = '''"""
A title

What was done.
"""
DATA = {'data': dict(dataset='docs.jsonl', val_fraction=0.25)}
RUNS = [
    dict(
        name='H3', group='tiny', config='cfg.py', train='data', texts=dict(docs='data'), rates=(1e-3, 1e-2), seeds=(1,),
        block_size=16, max_steps=40, eval_interval=5, num_layers=1, num_buckets=100, loss='product',
    )
]
'''
# what the machine's other work changes
NOT_REPEATED = ('tokens_per_s', 'peak_mb')


def rows(folder):
    with open(folder / 'runs.csv', newline='') as f:
        written = {row['key']: row for row in csv.DictReader(f)}
    assert all(None not in row.values() and row['docs_tokens'] for row in written.values())
    return {key: {k: v for k, v in row.items() if k not in NOT_REPEATED} for key, row in written.items()}


@pytest.fixture
def study(few, tmp_path):
    """Makes a folder with a list of two runs, and what they need."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / 'docs.jsonl').write_bytes((few / 'docs.jsonl').read_bytes())
        (folder / 'cfg.py').write_bytes((few / 'cfg.py').read_bytes())
        (folder / 'runs.py').write_text(LIST)
        return folder

    return make


def test_killed_sweep_ends_with_the_same_rows(study):
    """
    A killed sweep repeats what is finished, loses or halves a row, runs one twice at a time or ends with other numbers;
    or a report of the same CSV is another one. MHF_KILLS=30 kills thirty times.
    """
    kills = int(os.environ.get('MHF_KILLS', 1))
    seed = int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    draw = np.random.default_rng(seed)
    straight = study('straight')
    killed = study('killed')
    command = ('study.sweep', 'runs.py', '--jobs=2')
    began = time.monotonic()
    said = ok(*command, cwd=straight).stdout
    seconds = time.monotonic() - began
    expected = rows(straight)
    # that of training, whatever this machine measures
    assert len(expected) == 2 and {row['dtype'] for row in expected.values()} == {'float32'}
    says_what_it_does(said, ok(*command, cwd=straight).stdout)
    for k in range(kills):
        process = start(*command, cwd=killed)
        began = time.monotonic()
        end = began + draw.uniform(0, seconds)
        # the first one while a model is trained, with a checkpoint to go on from
        while time.monotonic() < end if k else not list(killed.glob('out/runs/*/ckpt.pt')):
            time.sleep(0.01)
        # every second time what it started goes on without it
        whole_group = draw.integers(2)
        whose = 'with' if whole_group else 'without'
        print(f'seed {seed}, kill {k} after {time.monotonic() - began:.2f} s, {whose} its processes')
        # it may have finished
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if whole_group else os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        finished = rows(killed) if (killed / 'runs.csv').exists() else {}
        before = {key: snapshot(killed / 'out/runs' / key) for key in finished}
    ok(*command, cwd=killed)
    assert rows(killed) == expected
    assert {key: snapshot(killed / 'out/runs' / key) for key in finished} == before
    details(straight)
    report(straight)


def says_what_it_does(first, second):
    """A sweep is silent until its first run has ended or when nothing is left to do, or its rows have no heading."""
    lines = first.splitlines()
    assert lines[:2] == ['preparing data', 'name, group, learning_rate, seed, docs_nats_per_token']
    assert sorted(lines[2:4]) == ['starting H3, tiny, 0.001, 1', 'starting H3, tiny, 0.01, 1']
    assert all(re.fullmatch(r'H3, tiny, 0\.0(01|1), 1, \d+\.\d{4}', line) for line in lines[4:])
    assert len(lines) == 6 and second == 'runs.py: nothing is left to do, runs.csv has every run\n'


def details(folder):
    """Tokens are lost, or scored otherwise than in training's validation; or the temperature is no help."""
    key, row = next(iter(rows(folder).items()))
    row = {
        k: float(v) for k, v in row.items() if k[-1].isdecimal() or k in ('temperature', 'nats_at_it', 'nats_without')
    }
    tokens = int(rows(folder)[key]['docs_tokens'])
    sizes = [tokens // 10 + (k < tokens % 10) for k in range(10)]
    nats = sum(row[f'nats_{k}'] * size for k, size in enumerate(sizes, 1)) / tokens
    assert nats == pytest.approx(events(folder, f'out/runs/{key}')[-1]['val_nats'], rel=1e-3)
    frequencies = [row[f'frequency_{k}'] for k in range(1, 11)]
    assert frequencies == sorted(frequencies, reverse=True) and row['nats_1'] < row['nats_10']
    assert row['temperature'] != 1 and row['nats_at_it'] < row['nats_without']


def test_details_of_tokens():
    """Nats, top-1 or ranks are not those of log P, or a temperature is not the distribution sharpened by it."""
    from study.details import of_tokens

    m = random_model()
    ids = torch.randint(3, 300, (60,))
    T = m.config.block_size
    blocks = [ids[b : b + T + 1] for b in range(0, len(ids) - 1, T)]
    logp = torch.cat([m.log_probs(block[None, :-1])[0] for block in blocks]).detach()
    ordered = logp.argsort(descending=True)
    target = ids[1:, None]
    with torch.no_grad():
        (nats, right, rank), tempered = of_tokens(m, ids, [1.0, 2.0])
    assert torch.allclose(nats, -logp.gather(1, target)[:, 0])
    assert torch.equal(rank, 1 + (ordered == target).double().argmax(1)) and torch.equal(right, (rank == 1).double())
    assert torch.allclose(tempered[0], nats)
    assert torch.allclose(tempered[1], -(logp / 2).log_softmax(-1).gather(1, target)[:, 0])


def report(folder):
    """A report of the same CSV is another one, or a run that is missing from it is not said to be."""
    read = []
    pictures = []
    for _ in range(2):
        ok('study.sweep', 'runs.py', '--report', cwd=folder)
        read.append((folder / 'runs.md').read_text())
        pictures.append((folder / 'runs.png').read_bytes())
    nats = {float(row['learning_rate']): float(row['docs_nats_per_token']) for row in rows(folder).values()}
    best, other = sorted(nats, key=nats.get)
    assert read[0] == read[1] and pictures[0] == pictures[1]
    assert '## A title' in read[0] and '–' not in read[0]
    assert f'| H3 | {best:g}: {nats[best]:.3f}, {other:g}: {nats[other]:.3f} |' in read[0]
    assert re.search(rf'\| tiny \| H3 \| \S+ M \| {nats[best]:.3f} \|', read[0])
    header, first, _ = (folder / 'runs.csv').read_text().splitlines()
    (folder / 'runs.csv').write_text(f'{header}\n{first}\n')
    ok('study.sweep', 'runs.py', '--report', cwd=folder)
    assert re.search(r'\n\| H3 \| [\d.]+: [\d.]+ \|\n', (folder / 'runs.md').read_text())
    (folder / 'runs.csv').write_text(f'{header}\n')
    ok('study.sweep', 'runs.py', '--report', cwd=folder)
    text = (folder / 'runs.md').read_text()
    assert '* A title: yet to be run, by' in text and '\n|' not in text


CLAIMS = '''"""
Claims

Made up.
"""
DATA = {'data': dict(dataset='docs.jsonl')}
_COMMON = dict(group='all', config='cfg.py', train='data', texts=dict(docs='data'), rates=(1e-3,), seeds=(1, 2, 3))
RUNS = [_COMMON | dict(name=name, num_buckets=ord(name)) for name in 'ABCDE']
CLAIMS = [
    dict(says='A below D', better='A', than='D'),
    dict(says='A below C', better='A', than='C', about='parts'),
    dict(says='A 0.1 below B', better='A', than='B', by=0.1),
    dict(says='A 0.1 below C', better='A', than='C', by=0.1),
    dict(says='B below A', better='B', than='A'),
    dict(says='A 0.3 below B', better='A', than='B', by=0.3),
]
_ALL = dict(group='all', better='A')
SENTENCES = dict(
    time=('A {0.word} E ({0.figure}), {time}.', [_ALL | dict(than='E')]),
    parts=(
        'A {0.word} B ({0.figure}), B {1.word} A, A {2.word} C, D {3.word} A ({3.sizes[1]}).',
        [_ALL | dict(better=better, than=than) for better, than in ('AB', 'BA', 'AC', 'DA')],
    ),
)
'''


def test_verdicts_come_from_the_rows(few, tmp_path, monkeypatch):
    """A claim holds that does not, or within the noise, or unrun; decided is not first; a sentence has a wrong word."""
    from study.rows import add_row
    from study.sweep import Study

    (tmp_path / 'claims.py').write_text(CLAIMS)
    (tmp_path / 'cfg.py').write_bytes((few / 'cfg.py').read_bytes())
    monkeypatch.chdir(tmp_path)
    study = Study('claims.py')
    nats = dict(A=(5.0, 5.01, 4.99), B=(5.2, 5.21, 5.19), C=(4.9, 5.01, 5.15), E=(4.9,))
    same = dict(commit='c', device='d', learning_rate=1e-3, params_embedding=2000000, params_hash=0, params_decoder=1)
    for entry in study.entries:
        for seed, value in zip(entry['seeds'], nats.get(entry['name'], ()), strict=False):
            key = study.key(entry, study.settings(entry, 1e-3, seed))
            add_row(study.csv, dict(key=key, docs_nats_per_token=value) | same)
    ok('study.sweep', 'claims.py', '--report', cwd=tmp_path)
    page = (tmp_path / 'claims.md').read_text().split('## ')
    assert page[1].splitlines()[-3:] == [
        '1. A ahead of B (+0.200 ± 0.014), B behind A, A level with C, D not yet compared with A (2.0 M).',
        '2. A behind E (-0.100, one seed), –.',
        '',
    ]
    assert page[2].startswith('Every claim')
    assert page[3].splitlines() == [
        'What each part of the method earns',
        '',
        '* Open, too small to tell: A below C: all +0.020 ± 0.126 (3+3).',
        '',
    ]
    assert page[4].splitlines() == [
        'Other claims',
        '',
        '* **Holds**: A 0.1 below B: all +0.200 ± 0.014 (3+3).',
        '* **Does not hold**: B below A: all -0.200 ± 0.014 (3+3).',
        '* **Does not hold**: A 0.3 below B: all +0.200 ± 0.014 (3+3).',
        '* Open, too small to tell: A 0.1 below C: all +0.020 ± 0.126 (3+3).',
        '* Open, not run: A below D: all – (3+0).',
        '',
    ]


def test_the_best_rate(study, monkeypatch):
    """A rate is chosen while another one is still tried, or none is because one of them failed."""
    from study.sweep import Study

    monkeypatch.chdir(study('rates'))
    of_list = Study('runs.py')
    entry = of_list.entries[0]
    first, second = (of_list.key(entry, of_list.settings(entry, rate, 1)) for rate in entry['rates'])
    one = {first: dict(docs_nats_per_token='5')}
    both = one | {second: dict(docs_nats_per_token='4')}
    assert of_list.best_rate(entry, {}) is None and of_list.best_rate(entry, {}, so_far=True) is None
    assert of_list.best_rate(entry, one) is None and of_list.best_rate(entry, one, so_far=True) == 1e-3
    assert of_list.best_rate(entry, both) == 1e-2
    assert [key for key, _, _ in of_list.left(one)] == [second] and of_list.left(both) == []
    # another group's entry has its rate, and each entry's first seed comes before a second one
    seeds = entry | dict(seeds=(1, 2))
    longer = seeds | dict(group='longer', max_steps=50, rates='H3')
    of_list.entries = [seeds, longer]
    assert of_list.best_rate(longer, both) == 1e-2 and of_list.best_rate(longer, one) is None
    left = [(run['max_steps'], run['learning_rate'], run['seed']) for _, _, run in of_list.left(both)]
    assert left == [(50, 1e-2, 1), (40, 1e-2, 2), (50, 1e-2, 2)]
    of_list.entries = [entry]
    of_list.failed[second] = 'it failed'
    assert of_list.best_rate(entry, one) == 1e-3 and of_list.left(one) == []


def test_rows_from_before_a_token_could_enter_louder(study, monkeypatch):
    """A run that begins as the paper's is run again, though it has a row, or a run that does not takes that row."""
    from study.sweep import Study

    monkeypatch.chdir(study('louder'))
    of_list = Study('runs.py')
    entry = of_list.entries[0]
    by_default = of_list.settings(entry, 1e-3, 1)
    papers = dict(encoder_init='normal', embedding_scale=1.0)
    before = {name: value for name, value in by_default.items() if name not in papers}
    assert of_list.key(entry, before | papers) == of_list.key(entry, before)
    keys = {of_list.key(entry, before | papers | dict(embedding_scale=scale)) for scale in (1.0, 4.0, 16.0)}
    keys.add(of_list.key(entry, by_default))
    assert len(keys) == 4


@pytest.mark.skipif(not shutil.which('git'), reason='no git here')
def test_a_row_names_the_code(tmp_path, monkeypatch):
    """A row says that the code was changed where only rows were added, or does not say so where it was."""
    from study import rows

    def git(*command):
        subprocess.run(['git', '-C', tmp_path, '-c', 'user.name=a', '-c', 'user.email=a@b', *command], check=True)

    (tmp_path / 'study').mkdir()
    monkeypatch.setattr(rows, 'HERE', tmp_path / 'study')
    for name in ('model.py', 'study/runs.csv'):
        (tmp_path / name).write_text('1')
    git('init', '-q')
    git('add', '.')
    git('commit', '-qm', 'a')
    (tmp_path / 'study/runs.csv').write_text('2')
    assert re.fullmatch('[0-9a-f]{7,}', rows.commit())
    (tmp_path / 'model.py').write_text('2')
    assert rows.commit().endswith('-dirty')


def test_costs_and_tasks_are_sections(study):
    """A variant's cost or a task is missing from the report, or models of other documents are compared."""
    from configurator import InputError
    from study.tasks import main

    folder = study('sections')
    (folder / 'runs.py').write_text(LIST + "RUNS.append(RUNS[0] | dict(name='S', num_hashes=0))\n")
    ok('study.costs', 'runs.py', cwd=folder)
    # what another device took stays, what this one took is measured again
    heads, measured = (folder / 'costs.csv').read_text().split('\n', 1)
    kept = f'{heads}\n{measured.replace(",cpu,", ",another,")}'
    (folder / 'costs.csv').write_text(kept + measured)
    ok('study.costs', 'runs.py', cwd=folder)
    assert (folder / 'costs.csv').read_text().startswith(kept)
    with open(folder / 'costs.csv', newline='') as f:
        rows = list(csv.DictReader(f))
        costs = {row['model']: row for row in rows[len(rows) // 2 :]}
    assert len(rows) == 4 and {row['device'] for row in rows} == {'cpu', 'another'}
    assert float(costs['H3']['time / the first']) == 1 and float(costs['S']['time / the first']) > 0
    assert int(costs['H3']['parameters']) < int(costs['S']['parameters'])
    for name, documents in (('a', 6), ('b', 6), ('c', 7)):
        accuracy = {'acc,none': 0.5, 'acc_stderr,none': 0.25}
        results = {'results': {'copa': accuracy}, 'n-samples': {'copa': dict(original=100, effective=documents)}}
        (folder / f'{name}.json').write_text(json.dumps(results))
    main(dict(A=folder / 'a.json', B=folder / 'b.json'), folder / 'tasks.csv')
    for wrong, says in (('c.json', 'A 6, B 7'), ('none.json', 'B=.*none.json cannot be read')):
        with pytest.raises(InputError, match=says):
            main(dict(A=folder / 'a.json', B=folder / wrong), folder / 'tasks.csv')
    ok('study.sweep', 'runs.py', '--report', cwd=folder)
    text = (folder / 'runs.md').read_text()
    assert '| copa | acc | 6 | 50.0% | 50.0% ± 25.0% | 50.0% ± 25.0% |' in text
    assert '| above chance | – | – | – | 0 of 1 | 0 of 1 |' in text
    ratio = costs['S']['time / the first']
    assert re.search(rf'\| S \| {int(costs["S"]["parameters"]):,} \| \S+ \| \S+ \| {ratio} \| \S+ \|\n', text)


def table_rows(markdown):
    """The lines of the tables in a text."""
    return [line for line in markdown.splitlines() if line.startswith('|')]


OWN_LISTS = 'english', 'vocabulary', 'paper100m'


def test_results_are_what_the_rows_say(tmp_path):
    """RESULTS.md is not what the CSVs make, a row of README's is not in it, or another list's report replaces it."""
    for folder in ('study', 'config'):
        shutil.copytree(REPO / folder, tmp_path / folder)
    (tmp_path / 'study' / 'RESULTS.md').unlink()
    ok('study.sweep', *(f'study/{name}.py' for name in OWN_LISTS), '--report', cwd=tmp_path)
    results = (REPO / 'study' / 'RESULTS.md').read_text()
    assert (tmp_path / 'study' / 'RESULTS.md').read_text() == results
    # its pictures are where it says, in a folder of their own
    pictures = re.findall(r'!\[.*?\]\((.*?)\)', results)
    assert len(pictures) > 3 and all((REPO / 'study' / picture).is_file() for picture in pictures)
    # a list of one's own, and one of the three alone, leave it as it is
    shutil.copy(REPO / 'study' / 'vocabulary.py', tmp_path / 'study' / 'mine.py')
    for name in ('mine', 'english'):
        said = ok('study.sweep', f'study/{name}.py', '--report', cwd=tmp_path).stdout
        assert said == f'study/{name}.md\n' and (tmp_path / 'study' / f'{name}.md').exists()
    assert (tmp_path / 'study' / 'RESULTS.md').read_text() == results
    # README's table has the same columns and some of the rows
    readme = re.search(r'\| trained on \|.*?\n\n', (REPO / 'README.md').read_text(), re.DOTALL)[0]
    shown = table_rows(readme)
    assert len(shown) > 3 and set(shown) <= set(table_rows(results))


def test_a_wrong_list_ends_in_one_line(study):
    """A list that names what is not there, or a run that fails, ends in a traceback or counts as finished."""
    folder = study('wrong')
    for right, wrong, says in (
        ('rates=(1e-3, 1e-2)', "rates='H9'", 'names no entry'),
        ("docs='data'", "docs='other'", "lacks {'other'}"),
        ('seeds=(1,)', 'seed=1', "lacks {'seeds'}"),
        ('RUNS = [', 'RUNS = []\nOTHERS = [', 'RUNS is empty'),
        ('DATA = ', 'DATUM = ', 'no DATA'),
        ('num_buckets=100', 'num_bucket=100', '2 runs failed'),
    ):
        (folder / 'runs.py').write_text(LIST.replace(right, wrong))
        done = run('study.sweep', 'runs.py', cwd=folder)
        assert done.returncode == 1 and says in done.stderr and 'Traceback' not in done.stderr, done.stderr
    assert not (folder / 'runs.csv').exists()
    done = run('study.sweep', 'runs.py', '--jobs=0', cwd=folder)
    assert done.returncode == 1 and '--jobs=0: must be 1 or more' in done.stderr, done.stderr
    # such a claim, or a line of README's table, would be missing without a word
    for more, says in (
        ("MAIN = ('H9',)", "no entry has the name 'H9'"),
        ("CLAIMS = [dict(says='', better='H3', than='H9')]", "no entry has the name 'H9'"),
        ("CLAIMS = [dict(says='', better='H3', than='H3', about='price')]", "about='price' of a claim: must be one of"),
        ("SENTENCES = dict(loss=('', [dict(better='H3', than='H3', group='long')]))", "no ('H3', 'long') among"),
        ("SENTENCES = dict(loss=('', [dict(better='H3', than='H3')]))", "no 'group' among the entries, or none in"),
    ):
        (folder / 'runs.py').write_text(f'{LIST}{more}\n')
        done = run('study.sweep', 'runs.py', '--report', cwd=folder)
        assert done.returncode == 1 and says in done.stderr and 'Traceback' not in done.stderr, done.stderr
        assert not (folder / 'runs.md').exists()
    # in an interpreter of its own, which is told nothing of the repository but the working folder
    command = [sys.executable, '-m', 'study.costs', 'none.py']
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | dict(PYTHONPATH=''))
    assert done.returncode == 1 and done.stderr.startswith('error: none.py: no such file'), done.stderr


def test_the_picture_of_signatures(tmp_path):
    """The script behind README's picture of signatures does not run."""
    from study import signatures

    signatures.draw(tmp_path / 'signatures.png')
    assert (tmp_path / 'signatures.png').read_bytes()[:4] == b'\x89PNG'


def test_threads(monkeypatch):
    """A sweep sets OMP_NUM_THREADS over the user's own value, or leaves a run more than its share of the cores."""
    from study.sweep import threads_of_a_run

    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    assert threads_of_a_run(2) == '3'
    monkeypatch.delenv('OMP_NUM_THREADS')
    assert threads_of_a_run(2) == '4' and threads_of_a_run(100) == '1'


def test_scripts_run_from_any_folder(tmp_path, monkeypatch):
    """What a sweep starts finds the repository's modules only from its root, or PYTHONPATH loses the user's folders."""
    from study.sweep import Scripts

    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'own.py').write_text('print("found")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'mine'))
    with open(tmp_path / 'lock', 'w') as lock:
        scripts = Scripts(tmp_path, lock, environment={})
        for name in ('study.details', 'train.py', 'own'):
            assert scripts.run(name, '--help') > 0
    assert 'What one mean hides' in (tmp_path / 'study.details.out').read_text()
    assert '--max_steps' in (tmp_path / 'train.py.out').read_text()
    assert (tmp_path / 'own.out').read_text() == 'found\n'


MODULES = """
    costs details english kernels rank report signatures sweep tasks tfree vocabulary
""".split()


@pytest.mark.parametrize('name', MODULES)
def test_help(name, tmp_path):
    """A script of the study takes --help for a file, has a traceback for it, or says nothing."""
    title = ast.get_docstring(ast.parse((REPO / f'study/{name}.py').read_text())).splitlines()[0]
    assert title in ok(f'study.{name}', '--help', cwd=tmp_path).stdout


def test_help_of_report_alone():
    """study/report.py finds the repository's modules only where another script has said where they are."""
    command = [sys.executable, '-m', 'study.report', '--help']
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=os.environ | dict(PYTHONPATH=''))
    assert done.returncode == 0 and done.stdout.startswith('RESULTS.md and its pictures'), done.stderr
