"""eval.py: bits per byte, lm-eval's tasks, bos, results."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import events, ok, small_tasks, write_jsonl

import eval as evaluation
from mhf.checkpoint import read_checkpoint
from mhf.errors import InputError
from mhf.lm import MHFLM
from test_mhf import random_model, write_released

# -----------------------------------------------------------------------------
# text


def test_windows(mistral):
    """Each token is scored once, in windows that overlap by half, with at least half a context from the second on."""
    m = random_model()  # a context of 24
    for n in (1, 23, 24, 25, 36, 37, 100):
        ids = [1, *np.random.default_rng(n).integers(3, 300, n).tolist()]
        nats, is_best = evaluation.score_windows(MHFLM(m, mistral), ids)
        assert len(nats) == n
        for i in range(n):
            # windows of 24 inputs start at 0, 12, 24, ...
            start = 0 if i < 24 else (i - 12) // 12 * 12
            logp = m.log_probs(torch.tensor([ids[start : i + 1]]))[0, -1]
            assert i + 1 - start <= 24 and (start == 0 or i - start >= 12)
            assert torch.allclose(-logp[ids[i + 1]], nats[i], atol=1e-9)
            assert is_best[i] == (logp.argmax() == ids[i + 1])


TEXTS = ['first document, with ünïcode', ' ', 'second\n\nof two paragraphs \n', 'the third\r\none', '日本語 text' * 30]


def test_text_formats(tmp_path, mistral):
    """A file and the shards of the same documents give the same ids: bos in front of each, as in training."""
    write_jsonl(tmp_path / 't.jsonl', TEXTS)
    # every second document is held out
    write_jsonl(tmp_path / 'both.jsonl', [text for held_out in filter(str.strip, TEXTS) for text in ('x', held_out)])
    ok('prepare.py', '--dataset=both.jsonl', '--val_fraction=0.5', '--data_dir=d', cwd=tmp_path)
    texts = [text.strip() for text in TEXTS if text.strip()]
    ids = [i for document in mistral.encode(texts) for i in (mistral.bos, *document)]
    num_bytes = sum(len(text.encode()) for text in texts)
    model = random_model(vocab_size=32768, num_buckets=300)
    lm = MHFLM(model, mistral, mistral.bos)
    no_bos = MHFLM(model, mistral)
    without_bos = [i for i in ids if i != mistral.bos]
    for name in ('t.jsonl', 't.js*', 'd'):
        assert evaluation.read_ids(tmp_path / name, lm) == (ids, num_bytes, 0), name
        # a model trained without bos, which does not score the first token
        assert evaluation.read_ids(tmp_path / name, no_bos) == (without_bos, num_bytes - len('first'), 0), name
    (tmp_path / 'one.txt').write_text('word')
    with pytest.raises(InputError, match='too little text'):
        evaluation.read_ids(tmp_path / 'one.txt', no_bos)
    for scorer in (lm, no_bos):
        measured = evaluation.bits_per_byte(scorer, ids, num_bytes, 0)
        nats, is_best = evaluation.score_windows(scorer, ids)
        assert (measured['tokens'], measured['bytes']) == (len(ids) - 1, num_bytes)
        assert measured['bits_per_byte'] == pytest.approx(nats.sum().item() / math.log(2) / num_bytes)
        assert measured['top1_accuracy'] == pytest.approx(is_best.mean().item())
        assert measured['perplexity'] == pytest.approx(math.exp(nats.mean().item()))


# -----------------------------------------------------------------------------
# the script


def evaluate(monkeypatch, **settings):
    """Runs eval.py with these settings in this process -> its results."""
    with monkeypatch.context() as patch:
        for key, value in settings.items():
            patch.setattr(evaluation, key, value)
            patch.setitem(evaluation.config, key, value)
        evaluation.main()
    (path,) = Path(settings['output_path']).glob('**/results_*.json')
    return json.loads(path.read_text())


def test_eval(trained, tmp_path, monkeypatch, capsys):
    """Scores of tasks and text are printed and written, and agree with the validation of train.py."""
    small_tasks(tmp_path)
    bins = str(trained / 'bins')
    settings = dict(device='cpu', dtype='float32', out_dir=str(trained / 'out'), benchmark_dir=str(tmp_path), text=bins)
    settings |= dict(tasks='lambada_openai,record,bits_per_byte', limit=3, output_path=str(tmp_path / 'results'))
    results = evaluate(monkeypatch, **settings)
    printed = capsys.readouterr().out
    for words in ('|lambada_openai|', 'bits_per_byte', 'published: 100M H3B10K', '3 of 5,153, test'):
        assert words in printed
    assert set(results['results']) == {'lambada_openai', 'record'} and results['bos'] is True
    assert len(results['samples']['record']) == 3
    # a pattern of task names; the results are written before they are printed
    pattern = settings | dict(tasks='recor?', text='', output_path=str(tmp_path / 'pattern'))
    assert evaluate(monkeypatch, **pattern)['results'] == {'record': results['results']['record']}
    assert 'published: 100M H3B10K' in capsys.readouterr().out
    evaluation.print_results(results | {'n-shot': dict(lambada_openai=1, record=1)})
    assert 'published' not in capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(evaluation, 'make_table', lambda *_: 1 / 0)
        evaluate(monkeypatch, **pattern)
    assert len(list((tmp_path / 'pattern').glob('**/results_*.json'))) == 2
    # overlapping windows see more context than the validation of train.py
    validated = [e['val_nats'] for e in events(trained) if 'val_nats' in e][-1]
    nats = results['bits_per_byte'][bins]['nats_per_token']
    assert validated - 0.5 < nats < validated + 0.02
    # a file that cannot be created is found before scoring; the path of its folder has 4,080 of 4,095 characters
    monkeypatch.setattr(MHFLM, 'score_requests', None)
    (folder,) = (tmp_path / 'results').iterdir()
    deep = '/'.join(['x' * 200] * 20)[: 4078 - len(f'{tmp_path}{folder.name}')]
    with pytest.raises(OSError, match='too long: .*results_'):
        evaluate(monkeypatch, **settings | dict(output_path=str(tmp_path / deep)))


def test_bos(trained, tmp_path, monkeypatch):
    """A model trained here gets bos in front of every context, a released one none, unless --bos is given."""
    small_tasks(tmp_path)
    model, _ = read_checkpoint(trained / 'out/ckpt.pt')
    # the authors' config.json does not say how a model was trained
    write_released(tmp_path / 'authors', model)
    monkeypatch.chdir(trained)
    settings = dict(benchmark_dir=str(tmp_path), tasks='lambada_openai', device='cpu', dtype='float32')
    models = dict(authors=str(tmp_path / 'authors'), run='out')
    scores = {}
    for name, bos in (('run', None), ('authors', None), ('authors', True), ('run', False)):
        path = str(tmp_path / f'{name} {bos}')
        results = evaluate(monkeypatch, **settings, out_dir=models[name], bos=bos, output_path=path)
        assert results['bos'] == (name == 'run' if bos is None else bos)
        scores[name, bos] = results['results']['lambada_openai']
    assert scores['run', None] == scores['authors', True]
    assert scores['authors', None] == scores['run', False] != scores['run', None]
