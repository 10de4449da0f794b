"""The study's runner and its report, on models of a few thousand parameters."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO, events, ok, run

from configurator import find_settings
from mhf.checkpoint import read_file
from mhf.errors import InputError
from mhf.lm import MHFLM
from mhf.tokenizers import get_tokenizer
from study import card660, rank, report
from study import sweep as sweep_module
from study.rows import parameters, read_csv, values, write_csv
from study.sweep import ENTRY_KEYS, Study, sweep, training_columns
from study.unigram_fit import fit
from test_mhf import random_model

LIST = """
DATA = {'data': dict(dataset='docs.jsonl', val_fraction=0.25)}
RUNS = [
    dict(
        name='H3', group='tiny', config='cfg.py', train='data', corpora=dict(docs='data'), seeds=(1,),
        learning_rates=(1e-3, 1e-2), block_size=16, max_steps=8, eval_interval=4, num_layers=1, num_buckets=100,
        loss='product', dtype='float32',
    )
]
"""


def forked(command, stdout, stderr):
    """subprocess.run for sweep.py, with conftest.run."""
    script, *arguments = map(str, command[2:] if command[1] == '-m' else command[1:])
    done = run(script.removeprefix(f'{REPO}/'), *arguments, cwd='.')
    stdout.write((done.stdout + done.stderr).encode())
    return done


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """The working directory, with a list of two runs. sweep.py runs scripts in forked processes."""
    folder = tmp_path / 'killed'
    folder.mkdir()
    for name in ('docs.jsonl', 'cfg.py'):
        shutil.copy(trained / name, folder)
    (folder / 'runs.py').write_text(LIST)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sweep_module, 'subprocess', SimpleNamespace(run=forked))
    return folder


def test_a_started_run_of_other_settings(folder):
    """A run whose training started with other settings of its entry is neither resumed nor evaluated."""
    runs = Study('runs.py')
    key = next(iter(runs.pending({})))
    runs.folder(key).mkdir(parents=True)
    (runs.folder(key) / 'settings.json').write_text('{}')
    with pytest.raises(InputError, match='with other settings'):
        runs.run(key, runs.entries[0])


def test_source(folder):
    """
    An entry with a source waits for the source's run of the same seed and continues its training. The source's
    signatures are informed, so expand.py needs corpora.
    """
    (folder / 'same.model').write_bytes(get_tokenizer('mistral').sp.serialized_model_proto())
    data = "DATA['larger'] = DATA['data'] | dict(dataset='{corpus_dir}/docs.jsonl', tokenizer='same.model')\n"
    entry = "dict(name='continued', source='H3', train='larger', corpora=dict(docs='larger'), learning_rates=(1e-6,))"
    informed = "RUNS[1] |= dict(counts_from='train', num_buckets=1000)\n"
    (folder / 'runs.py').write_text(f'{LIST}{data}RUNS.insert(0, RUNS[0] | {entry})\n{informed}')
    runs = Study('runs.py')
    assert list(runs.pending({})) == [('tiny', 'H3', 1e-3, 1), ('tiny', 'H3', 1e-2, 1)]
    row = dict(docs_nats_per_token='5')
    first = {key: row for key in runs.pending({})}
    assert runs.source_key(runs.entries[0], 2, first) == ('tiny', 'H3', 1e-3, 2)
    # a source of the same group precedes others of its name
    runs.entries.insert(0, runs.entries[1] | dict(group='other'))
    assert runs.source_key(runs.entries[1], 2, first) == ('tiny', 'H3', 1e-3, 2)
    del runs.entries[0]
    sweep(runs, 1, '.')
    continued, source = (float(runs.best_rows(entry, runs.rows())[0]['docs_nats_per_token']) for entry in runs.entries)
    assert continued == pytest.approx(source, abs=0.01)


def test_best_learning_rate(folder):
    """A learning rate is chosen when all are finished or have failed; first seeds are trained before second ones."""
    runs = Study('runs.py')
    entry = runs.entries[0]
    first, second = (runs.key(entry, lr, 1) for lr in entry['learning_rates'])
    partial = {first: dict(docs_nats_per_token='5')}
    full = partial | {second: dict(docs_nats_per_token='4')}
    assert runs.best_lr(entry, partial) is None and runs.best_lr(entry, partial, so_far=True) == 1e-3
    assert runs.best_lr(entry, full) == 1e-2
    assert list(runs.pending(partial)) == [second] and not runs.pending(full)
    # first seeds of all groups, then second ones
    two_seeds = entry | dict(seeds=(1, 2))
    longer = two_seeds | dict(group='longer', max_steps=50, learning_rates=(1e-2,))
    runs.entries = [two_seeds, longer]
    assert list(runs.pending(full)) == [('longer', 'H3', 1e-2, 1), ('tiny', 'H3', 1e-2, 2), ('longer', 'H3', 1e-2, 2)]
    # rows of an earlier commit
    runs.entries = [entry | dict(recorded='abc')]
    assert not runs.pending({}) and runs.best_rows(runs.entries[0], full) == [full[second]]
    runs.entries = [entry]
    runs.failed.add(second)
    assert runs.best_lr(entry, partial) == 1e-3 and not runs.pending(partial)


def test_rows_belong_to_entries(folder):
    """
    An entry whose settings, data, config or edit differ from those of its rows is refused; the error names each. So are
    rows of other texts. A setting that a row does not record, because it is newer, had its default.
    """
    runs = Study('runs.py')
    settings = runs.settings(runs.entries[0])
    del settings['bottleneck']
    row = dict(group='tiny', name='H3', learning_rate=1e-2, seed=1, docs_tokens=9, settings=json.dumps(settings))
    write_csv(runs.csv, [row, row | dict(learning_rate=1e-3, docs_tokens=10)])
    with pytest.raises(InputError, match='docs of .* is not the text'):
        runs.rows()
    write_csv(runs.csv, [row])
    assert len(runs.rows()) == 1
    entry = LIST.replace('num_buckets=100', "num_buckets=100, beta1=0.8, bottleneck=8, edit='study.frozen_bias'")
    (folder / 'runs.py').write_text(entry.replace('val_fraction=0.25', 'val_fraction=0.3'))
    (folder / 'cfg.py').write_text((folder / 'cfg.py').read_text().replace('num_heads = 2', 'num_heads = 1'))
    with pytest.raises(InputError, match='give the entry a new name') as error:
        Study('runs.py').rows()
    for changed in ('beta1=0.8', 'bottleneck=8', "'val_fraction': 0.3", 'num_heads=1', 'edit=study.frozen_bias'):
        assert re.search(rf'{re.escape(changed)}[^(]*\(its row: ', str(error.value)), changed


# (module, flags, what its checkpoints have)
EDITS = [
    ('frozen_bias', '--num_hashes=0 --counts_from=bins', lambda c: 'bias' in c.model),
    ('no_counts', '--counts_from=train --num_buckets=4096', lambda c: c.model_config.frequency_ranges == []),
    ('spelling_rows', '--num_hashes=0 --encoder_init=normal', lambda c: len(c.model['embed.weight']) > 40000),
    ('spelling_rows', '--num_hashes=0 --encoder_init=orthogonal', lambda c: 'encoder.out.weight' in c.model),
    ('standard_w_s', '--num_hashes=0', lambda c: 'encoder.out.weight' in c.model),
]


@pytest.mark.parametrize('name, flags, is_edited', EDITS)
def test_edits(quick, name, flags, is_edited):
    """
    A module that changes model.py or hashing.py trains a model. eval.py agrees with its validation, and sweep.py counts
    its parameters.
    """
    edit = ('study.edit', f'study.{name}')
    train = (*edit, str(REPO / 'train.py'), 'cfg.py', *flags.split(), '--max_steps=5', '--out_dir=edited')
    started = ok(*train, cwd=quick).stdout
    assert is_edited(read_file(quick / 'edited/ckpt.pt'))
    hashes, decoder = re.search(r'([\d,]+) parameters in E .* \+ ([\d,]+) in layers', started).groups()
    assert parameters(training_columns(quick / 'edited')) == sum(int(n.replace(',', '')) for n in (hashes, decoder))
    bits = ('--tasks=bits_per_byte', '--text=bins', '--out_dir=edited', '--dtype=float32')
    printed = ok(*edit, str(REPO / 'eval.py'), *bits, cwd=quick).stdout
    validated = events(quick, 'edited')[-1]['val_nats']
    # overlapping windows see more context
    assert validated - 0.5 < float(re.search(r'nats_per_token +([\d.]+)', printed)[1]) < validated + 0.02


# -----------------------------------------------------------------------------
# the lists of this repository and their results

# of each list: rows at commit 8e19a3c
RECORDED = dict(english=296, large_vocabulary=21, expansion=16, longer=8)


@pytest.mark.parametrize('name', RECORDED)
def test_the_lists(name, monkeypatch):
    """Each list loads, no recorded row is refused, and every run has a dtype and passes flags that train.py knows."""
    monkeypatch.chdir(REPO)
    study = Study(f'study/{name}.py')
    assert len(study.rows()) >= RECORDED[name]
    runs = study.runs({}) | study.runs(study.rows())
    assert runs
    known = find_settings('train.py').keys() | ENTRY_KEYS
    assert all(entry.keys() <= known and entry['dtype'] == 'bfloat16' for entry in runs.values())


def test_every_figure_is_of_a_table():
    """Every number with ± or an interval in README and RESULTS.md, tables included, is one of the report's."""
    tables = ''.join(report.tables().values())
    for name in ('study/RESULTS.md', 'README.md'):
        for number in re.findall(r'[+-]?\d+\.\d+%? ± [\d.]*\d%?|\[[+-]\d.*?\]', (REPO / name).read_text()):
            assert number in tables, number


def test_difference():
    """A difference of means has a standard error, Welch's 95% interval, and a verdict where the interval excludes 0."""
    # the two variances are equal, so there are 2 degrees of freedom: t = 4.3027
    assert report.difference([5.0, 5.2], [6.0, 6.2]) == ('-1.0000 ± 0.1414 [-1.6085, -0.3915]', 'better')
    assert report.difference([6.0, 6.2], [5.0, 5.2])[1] == 'worse'
    assert report.difference([5.0, 5.2], [5.4, 5.6]) == ('-0.4000 ± 0.1414 [-1.0085, +0.2085]', 'no difference found')
    assert report.difference([5.0], [6.0, 6.2]) == ('-1.1000', 'one seed')
    # a mean over seeds has all of them
    assert report.number(values([dict(a='1'), dict(a='')], 'a')) == report.MISSING


def test_the_report_regenerates(tmp_path, monkeypatch):
    """The CSVs give the same tables, byte by byte, and every figure that is shown."""
    shutil.copytree(REPO / 'study', tmp_path / 'study', ignore=shutil.ignore_patterns('*.png', '*.svg'))
    monkeypatch.setattr(report, 'HERE', tmp_path / 'study')
    texts = {name: (REPO / name).read_text() for name in ('study/RESULTS.md', 'README.md')}
    for name, text in texts.items():
        (tmp_path / name).write_text(re.sub(r'(?<= -->\n)(\|.*\n)*', '', text))
    monkeypatch.chdir(REPO)
    report.write()
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    shown = re.findall(r'(?<=study/)\w+\.(?:png|svg)|(?<=\]\()\w+\.png', ''.join(texts.values()))
    assert set(shown) <= {path.name for path in (tmp_path / 'study').iterdir()}


def test_unigram_fit():
    """A bucket per token fits any frequencies; two buckets for four tokens of different frequencies do not."""
    counts = np.array([1000, 100, 10, 1])
    used = np.ones(4, bool)
    kl, decrease = fit(np.arange(4)[:, None], counts, used)
    assert abs(kl) < 3e-4 and abs(decrease) < 1e-6
    kl, _ = fit(np.array([[0], [1], [0], [1]]), counts, used)
    shared = np.array([505, 50.5, 505, 50.5]) / 1111
    assert kl == pytest.approx((counts / 1111 * np.log(counts / 1111 / shared)).sum())


def test_card660(mistral):
    """Card-660 compares hidden states of the last token of a word, after bos if the model has it."""
    model = random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32)
    lm = MHFLM(model, mistral, mistral.bos)
    pairs = [('red', 'blue', 3.5), ('new_york', 'city', 2.0), ('sun', 'moon', 1.0)]
    with_bos = card660.card660(lm, pairs)
    without = card660.card660(MHFLM(model, mistral), pairs)
    assert with_bos['last_pearson'] != without['last_pearson']
    h = model.hidden_states(torch.tensor([[1, *mistral.encode(['new york'])[0]]]))
    assert torch.allclose(card660.word_states(lm, 'new_york')['last'], h[0, -1], atol=1e-6)


# (settings, the rank)
CASES = {
    # d + 1: logits and the normalizer
    'Standard': (dict(num_hashes=0), 17),
    # H - 1 mixers add z each, their biases and the normalizer 1 each: neither the paper's 64 nor Standard's 17
    'z below d': (dict(num_hashes=4, num_buckets=64, bottleneck=4), 16 + 3 * 4 + 2),
    # a mixer fills all d: H d + 1
    'z above d': (dict(num_hashes=4, num_buckets=64, bottleneck=24), 4 * 16 + 1),
    # above the paper's 10: H (B - 2) + 2
    'B below d': (dict(num_hashes=4, num_buckets=10, bottleneck=24), 4 * 8 + 2),
}


@pytest.mark.parametrize('case', CASES)
def test_rank(case):
    """The rank equals the reachable bound: z per mixer, 1 for the biases and 1 for the normalizer."""
    settings, expected = CASES[case]
    m = random_model(vocab_size=512, hidden_size=16, num_layers=1, **settings)
    # 384 contexts
    ids = torch.randint(m.config.vocab_size, (16, m.config.block_size), generator=torch.Generator().manual_seed(0))
    row, singular = rank.measure('', '', m, ids)
    assert row['rank'] == row['reachable'] == expected <= row['bound']
    assert list(row) == list(read_csv(REPO / 'study/rank.csv')[0])
    # the threshold lies within a gap, not somewhere on a slope
    assert singular[expected] < 1e-3 * singular[expected - 1]
