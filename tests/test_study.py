"""The study's runner and its report, on models of a few thousand parameters."""

import ast
import contextlib
import csv
import json
import os
import re
import shutil
import signal
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
# what depends on the load of the machine
NOT_REPEATED = ('tokens_per_s', 'peak_mb')
RUNS = ('tiny_H3_0.001_1', 'tiny_H3_0.01_1')


def rows(folder):
    """{folder of the run: row} of a finished sweep."""
    with open(folder / 'runs.csv', newline='') as f:
        written = list(csv.DictReader(f))
    assert all(None not in row.values() and row['docs_tokens'] for row in written)
    repeated = [{k: v for k, v in row.items() if k not in NOT_REPEATED} for row in written]
    return {'_'.join([row['group'], row['name'], row['learning_rate'], row['seed']]): row for row in repeated}


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
    """A killed and rerun sweep keeps its finished runs and ends with the rows of an uninterrupted one."""
    kills = int(os.environ.get('MHF_KILLS', 1))
    seed = int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    random = np.random.default_rng(seed)
    uninterrupted = study('uninterrupted')
    killed = study('killed')
    command = ('study.sweep', 'runs.py', '--jobs=2')
    start_time = time.monotonic()
    output = ok(*command, cwd=uninterrupted).stdout
    seconds = time.monotonic() - start_time
    expected = rows(uninterrupted)
    assert sorted(expected) == sorted(RUNS) and {row['dtype'] for row in expected.values()} == {'float32'}
    settings = [json.loads(row['settings']) for row in expected.values()]
    assert settings[0] == settings[1] and settings[0]['loss'] == 'product' and 'learning_rate' not in settings[0]
    assert re.search(r'^H3, tiny, 0.01, 1, \d+\.\d{4}$', output, re.MULTILINE)
    assert 'nothing is left to do' in ok(*command, cwd=uninterrupted).stdout
    for k in range(kills):
        process = start(*command, cwd=killed)
        end = time.monotonic() + random.uniform(0, seconds)
        # the first kill while a model is trained and has a checkpoint
        while time.monotonic() < end if k else not list(killed.glob('out/runs/*/ckpt.pt')):
            time.sleep(0.01)
        # in half of the kills, the processes that the sweep started keep running
        whole_group = random.integers(2)
        print(f'seed {seed}, kill {k}, {whole_group=}')
        # it may have finished
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if whole_group else os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        finished = rows(killed) if (killed / 'runs.csv').exists() else {}
        before = {name: snapshot(killed / 'out/runs' / name) for name in finished}
    ok(*command, cwd=killed)
    assert rows(killed) == expected
    assert {name: snapshot(killed / 'out/runs' / name) for name in finished} == before
    check_details(uninterrupted)
    check_report(uninterrupted)


def check_details(folder):
    """The deciles contain all held-out tokens, scored as in training's validation; a best temperature is found."""
    name, row = next(iter(rows(folder).items()))
    tokens = int(row['docs_tokens'])
    row = {
        k: float(v) for k, v in row.items() if k[-1].isdecimal() or k in ('temperature', 'nats_at_it', 'nats_without')
    }
    sizes = [tokens // 10 + (k < tokens % 10) for k in range(10)]
    nats = sum(row[f'nats_{k}'] * size for k, size in enumerate(sizes, 1)) / tokens
    assert nats == pytest.approx(events(folder, f'out/runs/{name}')[-1]['val_nats'], rel=1e-3)
    frequencies = [row[f'frequency_{k}'] for k in range(1, 11)]
    assert frequencies == sorted(frequencies, reverse=True) and row['nats_1'] < row['nats_10']
    assert row['temperature'] != 1 and row['nats_at_it'] < row['nats_without']


def test_details_of_tokens():
    """Nats, top-1 and ranks are those of log P; a temperature divides the logits."""
    from study.details import score_tokens

    m = random_model()
    ids = torch.randint(3, 300, (60,))
    T = m.config.block_size
    blocks = [ids[b : b + T + 1] for b in range(0, len(ids) - 1, T)]
    logp = torch.cat([m.log_probs(block[None, :-1])[0] for block in blocks]).detach()
    ordered = logp.argsort(descending=True)
    target = ids[1:, None]
    with torch.no_grad():
        (nats, right, rank), tempered = score_tokens(m, ids, [1.0, 2.0])
    assert torch.allclose(nats, -logp.gather(1, target)[:, 0])
    assert torch.equal(rank, 1 + (ordered == target).double().argmax(1)) and torch.equal(right, (rank == 1).double())
    assert torch.allclose(tempered[0], nats)
    assert torch.allclose(tempered[1], -(logp / 2).log_softmax(-1).gather(1, target)[:, 0])


def test_details_needs_token_ids(quick):
    """Bins of signatures, such as the demo's, and bins of another tokenizer end in one line with the fix."""
    done = run('study.details', 'out', 'bins', 'bins', cwd=quick)
    assert done.returncode == 1 and 'prepare it with --data_format=ids' in done.stderr and 'delete' not in done.stderr
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', cwd=quick)
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=tekken', '--tokenizer=tekken', cwd=quick)
    ok('study.details', 'out', 'ids', 'ids', cwd=quick)
    done = run('study.details', 'out', 'ids', 'tekken', cwd=quick)
    assert "tekken was prepared with 'tekken', not with the model's tokenizer" in done.stderr


def check_report(folder):
    """The same CSV gives the same report; missing runs are reported as such."""
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
CLAIMS = dict(
    other=[
        ('A below D', 'A', 'D'),
        ('A 0.1 below B', 'A', 'B', dict(by=0.1)),
        ('A 0.1 below C', 'A', 'C', dict(by=0.1)),
        ('B below A', 'B', 'A'),
        ('A 0.3 below B', 'A', 'B', dict(by=0.3)),
    ],
    parts=[('A below C', 'A', 'C')],
)
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
    """Claims and sentences follow from means and standard deviations over the seeds."""
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
            row = dict(group=entry['group'], name=entry['name'], seed=seed, docs_nats_per_token=value, settings='{}')
            add_row(study.csv, row | same)
    ok('study.sweep', 'claims.py', '--report', cwd=tmp_path)
    page = (tmp_path / 'claims.md').read_text()
    sentences = """
1. A ahead of B (+0.200 ± 0.014), B behind A, A level with C, D not yet compared with A (2.0 M).
2. A behind E (-0.100, one seed), –.

## Every claim
"""
    claims = """
## What each part of the method earns

* Open, too small to tell: A below C: all +0.020 ± 0.126 (3+3).

## Other claims

* **Holds**: A 0.1 below B: all +0.200 ± 0.014 (3+3).
* **Does not hold**: B below A: all -0.200 ± 0.014 (3+3).
* **Does not hold**: A 0.3 below B: all +0.200 ± 0.014 (3+3).
* Open, too small to tell: A 0.1 below C: all +0.020 ± 0.126 (3+3).
* Open, not run: A below D: all – (3+0).
"""
    assert sentences in page and claims in page


def test_best_learning_rate(study, monkeypatch):
    """A learning rate is chosen when all are finished or have failed; first seeds are trained before second ones."""
    from study.sweep import Study

    monkeypatch.chdir(study('rates'))
    runs = Study('runs.py')
    entry = runs.entries[0]
    first, second = (runs.key(entry, lr, 1) for lr in entry['rates'])
    one = {first: dict(docs_nats_per_token='5')}
    both = one | {second: dict(docs_nats_per_token='4')}
    assert runs.best_lr(entry, {}) is None and runs.best_lr(entry, {}, so_far=True) is None
    assert runs.best_lr(entry, one) is None and runs.best_lr(entry, one, so_far=True) == 1e-3
    assert runs.best_lr(entry, both) == 1e-2
    assert list(runs.pending(one)) == [second] and not runs.pending(both)
    # the entry of another group uses its learning rate
    two_seeds = entry | dict(seeds=(1, 2))
    longer = two_seeds | dict(group='longer', max_steps=50, rates='H3')
    runs.entries = [two_seeds, longer]
    assert runs.best_lr(longer, both) == 1e-2 and runs.best_lr(longer, one) is None
    assert list(runs.pending(both)) == [('longer', 'H3', 1e-2, 1), ('tiny', 'H3', 1e-2, 2), ('longer', 'H3', 1e-2, 2)]
    runs.entries = [entry]
    runs.failed[second] = 'it failed'
    assert runs.best_lr(entry, one) == 1e-3 and not runs.pending(one)


def test_rows_belong_to_entries(study, monkeypatch):
    """Entries can share rows; an entry whose settings differ from those of its rows is refused."""
    from configurator import InputError
    from study.rows import add_row, best_rows
    from study.sweep import Study

    path = study('shared') / 'runs.py'
    monkeypatch.chdir(path.parent)
    shared = "RUNS.append(RUNS[0] | dict(name='H3 again', rates=(1e-2,), rows='H3'))\n"
    path.write_text(LIST + shared)
    row = dict(group='tiny', name='H3', learning_rate=1e-2, seed=1, docs_nats_per_token=5)
    row['settings'] = '{"num_buckets": 100, "beta2": 0.5}'
    add_row(Study('runs.py').csv, row)
    runs = Study('runs.py')
    assert best_rows(runs, runs.entries[1], runs.rows()) == best_rows(runs, runs.entries[0], runs.rows())
    assert list(runs.pending(runs.rows())) == [('tiny', 'H3', 1e-3, 1)]
    path.write_text(LIST.replace('num_buckets=100', 'num_buckets=99'))
    with pytest.raises(InputError, match='has num_buckets=99 .its row: 100.; give the entry a new name'):
        Study('runs.py').rows()


def test_costs_and_tasks_are_sections(study):
    """costs.csv and tasks.csv are sections of the report; models of other documents are not compared."""
    from configurator import InputError
    from study.tasks import main

    folder = study('sections')
    (folder / 'runs.py').write_text(LIST + "RUNS.append(RUNS[0] | dict(name='S', num_hashes=0))\n")
    # rows of another device stay, those of this device are measured again
    heads = 'model,time / the first,parameters,tokens_per_s,flops_per_token,gemm_share,peak_memory,device,dtype,torch,'
    heads += 'threads,gemm_flops,commit\n'
    other = 'H3,1.000,5,1,1,1,1,another,float32,2,1,1,a\n'
    (folder / 'costs.csv').write_text(heads + other + other.replace('another', 'cpu'))
    ok('study.costs', 'runs.py', cwd=folder)
    assert (folder / 'costs.csv').read_text().startswith(heads + other)
    with open(folder / 'costs.csv', newline='') as f:
        rows = list(csv.DictReader(f))
        costs = {row['model']: row for row in rows[1:]}
    assert [row['device'] for row in rows] == ['another', 'cpu', 'cpu']
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
    assert re.search(rf'\| S \| {int(costs["S"]["parameters"]):,} \| – \| – \| {ratio} \| – \|\n', text)


def table_rows(markdown):
    """The lines of the tables in a text."""
    return [line for line in markdown.splitlines() if line.startswith('|')]


OWN_LISTS = 'english', 'vocabulary', 'paper100m'


def test_results_are_what_the_rows_say(tmp_path):
    """RESULTS.md follows from the CSVs, README's table from RESULTS.md; another list has its own report."""
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
    """A wrong list and a failed run end in one line, without a row."""
    folder = study('wrong')
    for right, wrong, says in (
        ('rates=(1e-3, 1e-2)', "rates='H9'", 'names no entry'),
        ("docs='data'", "docs='other'", "lacks {'other'}"),
        ('DATA = ', 'DATUM = ', 'no DATA'),
        ('    )\n]', '    )\n]\nRUNS += RUNS', "2 entries are called ('tiny', 'H3')"),
        ('num_buckets=100', 'num_bucket=100', '2 runs failed'),
    ):
        (folder / 'runs.py').write_text(LIST.replace(right, wrong))
        done = run('study.sweep', 'runs.py', cwd=folder)
        assert done.returncode == 1 and says in done.stderr and 'Traceback' not in done.stderr, done.stderr
    assert not (folder / 'runs.csv').exists()
    # such a claim, or a line of README's table, would be missing silently
    for more, says in (
        ("CLAIMS = dict(other=[('', 'H3', 'H9')])", "no entry has the name 'H9'"),
        ("CLAIMS = dict(price=[('', 'H3', 'H3')])", "about='price' of a claim: must be one of"),
        ("SENTENCES = dict(loss=('', [dict(better='H3', than='H3')]))", "no 'group' among the entries, or none in"),
    ):
        (folder / 'runs.py').write_text(f'{LIST}{more}\n')
        done = run('study.sweep', 'runs.py', '--report', cwd=folder)
        assert done.returncode == 1 and says in done.stderr and 'Traceback' not in done.stderr, done.stderr
        assert not (folder / 'runs.md').exists()


def test_the_picture_of_signatures(tmp_path):
    """study/signatures.py draws README's figure of signatures."""
    from study import signatures

    signatures.draw(tmp_path / 'signatures.png')
    assert (tmp_path / 'signatures.png').read_bytes()[:4] == b'\x89PNG'


def test_scripts_run_from_any_folder(tmp_path, monkeypatch):
    """Scripts that a sweep starts find the repository's modules from any folder; PYTHONPATH is kept."""
    from study.sweep import Scripts

    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'own.py').write_text('import model; print("found")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'folder'))
    with open(tmp_path / 'lock', 'w') as lock:
        assert Scripts(tmp_path, lock, environment={}).run('own') > 0
    assert (tmp_path / 'own.out').read_text() == 'found\n'


MODULES = 'costs details kernels rank sweep tasks tfree'.split()


@pytest.mark.parametrize('name', MODULES)
def test_help(name, tmp_path):
    """Each script of the study prints its docstring for --help."""
    title = ast.get_docstring(ast.parse((REPO / f'study/{name}.py').read_text())).splitlines()[0]
    assert title in ok(f'study.{name}', '--help', cwd=tmp_path).stdout
