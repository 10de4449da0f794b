"""eval.py: text in windows and by documents, its numbers by one process and several, bos, Ctrl-C."""

import gzip
import json
import lzma
import math
import shutil
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from conftest import (
    events,
    model_of_lm_eval,
    newest,
    of_ranks,
    ok,
    random_model,
    real_documents,
    run,
    small_tasks,
    write_jsonl,
)

import eval as evaluation
from configurator import InputError
from mhf.bins import held_out_split
from mhf.checkpoint import load_checkpoint
from mhf.lm import MHFLM
from mhf.meta import read_meta
from mhf.released import save_pretrained
from mhf.tokenizers import tokenizer_fingerprint

pytestmark = pytest.mark.xdist_group('eval')


# -----------------------------------------------------------------------------
# text


def test_sliding_windows():
    """A token is scored twice or not at all, or with less context than half of what the model has."""
    m = random_model()  # a context of 24
    for n in (1, 23, 24, 25, 36, 37, 100):
        ids = np.random.default_rng(n).integers(3, 300, n).tolist()
        nats, right, confidence = evaluation.sliding(model_of_lm_eval(m), [1, *ids])
        assert len(nats) == n
        whole = [1, *ids]
        for i in range(n):
            # windows of 24 inputs begin at 0, 12, 24, ...
            begin = 0 if i < 24 else (i - 12) // 12 * 12
            logp = m.log_probs(torch.tensor([whole[begin : i + 1]]))[0, -1]
            assert i + 1 - begin <= 24 and (begin == 0 or i - begin >= 12)
            assert torch.allclose(-logp[whole[i + 1]], nats[i], atol=1e-9)
            assert torch.allclose(logp.max().exp(), confidence[i]) and right[i] == (logp.argmax() == whole[i + 1])


def test_calibration_error():
    """The expected calibration error is not the weighted gap between accuracy and confidence."""
    right = torch.tensor([1.0, 0, 1, 1]).double()
    confidence = torch.tensor([0.9, 0.9, 1.0, 0.31]).double()
    assert evaluation.calibration_error(right, confidence) == pytest.approx((abs(1 - 1.8) + 0 + 0.69) / 4)


def test_prepared_split(trained, mistral, tmp_path):
    """A bin's ids are read back as others than those of its text, or a bin of another tokenizer is accepted."""
    ids, size = held_out_split(trained / 'bins', mistral)
    documents = np.split(ids, np.flatnonzero(np.array(ids) == mistral.bos))[1:]
    texts = [mistral.decode(document[1:].tolist()) for document in documents]
    assert texts and set(texts) <= set(real_documents()) and size == sum(len(t.encode()) for t in texts)
    other = types.SimpleNamespace(name='other', tokens=mistral.tokens[:-1])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(mistral)
    with pytest.raises(InputError, match="tokenizer 'mistral', the model's is 'other'"):
        held_out_split(trained / 'bins', other)
    with pytest.raises(InputError, match='not a folder of prepare.py'):
        held_out_split(tmp_path, mistral)


TEXTS = ['first document, with ünïcode', ' ', 'second\n\nof two paragraphs \n', 'the third\r\none', '日本語 text' * 30]


def text_files(folder):
    """The same documents in all kinds of files, and the folder of prepare.py whose held-out split they are."""
    rows = ''.join(json.dumps(dict(id=k, text=text)) + '\n' for k, text in enumerate(TEXTS)).encode()
    packed = {'': bytes, '.gz': gzip.compress, '.xz': lzma.compress, '.zst': zstandard.compress}
    for suffix, pack in packed.items():
        (folder / f't.jsonl{suffix}').write_bytes(pack(rows))
    pq.write_table(pa.table(dict(text=TEXTS, score=[3.5] * 5)), folder / 't.parquet')
    # every second is held out
    write_jsonl(folder / 'both.jsonl', [text for held_out in filter(str.strip, TEXTS) for text in ('x', held_out)])
    ok('prepare.py', '--dataset=both.jsonl', '--val_fraction=0.5', '--data_dir=d', cwd=folder)
    return [*(f't.jsonl{suffix}' for suffix in packed), 't.parquet']


def test_text_by_documents(tmp_path, mistral):
    """A file's markup is measured, its documents are run together, or it has other numbers than in training."""
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral)
    files = text_files(tmp_path)
    folder, size = held_out_split(tmp_path / 'd', mistral)
    measured = evaluation.bits_per_byte(lm, folder, size)
    texts = [text.strip() for text in TEXTS if text.strip()]
    ids = [i for document in mistral.encode(texts) for i in (mistral.bos, *document)]
    assert folder == ids and size == sum(len(text.encode()) for text in texts)
    assert (measured['tokens'], measured['bytes'], measured['bos']) == (len(ids) - 1, size, True)
    nats, _, _ = evaluation.sliding(lm, ids)
    assert measured['bits_per_byte'] == pytest.approx(nats.sum().item() / math.log(2) / size)
    for name in files:
        assert evaluation.text_file(tmp_path / name, mistral) == (ids, size), name
    # a .txt is one document
    (tmp_path / 't.txt').write_text('\n' + '\n\n'.join(texts) + '\n', encoding='utf-8', newline='')
    assert evaluation.text_file(tmp_path / 't.txt', mistral)[0].count(mistral.bos) == 1


# -----------------------------------------------------------------------------
# the command


def command(monkeypatch, **settings):
    """What eval.py writes, given these settings, in this process."""
    with monkeypatch.context() as patch:
        for key, value in settings.items():
            patch.setattr(evaluation, key, value)
            patch.setitem(evaluation.config, key, value)
        evaluation.main()
    return newest(settings['output_path'])


def test_eval(trained, tmp_path, monkeypatch, capsys):
    """The command's numbers depend on the number of processes, or are not those of train.py."""
    out = tmp_path / 'out, of this run'
    shutil.copytree(trained / 'out', out)
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    text = tmp_path / 'text.txt'
    bins = trained / 'bins'
    text.write_text(real_documents()[0][:2000])
    settings = dict(device='cpu', dtype='float32', out_dir=str(out), data_dir=str(tmp_path), text=f'{text},{bins}')
    settings |= dict(tasks='lambada_openai,hellaswag,record,bits_per_byte,card660', output_path=str(tmp_path / 'one'))
    one = command(monkeypatch, **settings)
    said = capsys.readouterr().out
    for words in ('|lambada_openai|', 'bits_per_byte', 'published: 100M H3B10K', '4 of 10,042 documents', '1B H3B10K'):
        assert words in said
    args = [f'--{key}={value}' for key, value in (settings | dict(output_path='many')).items()]
    done = of_ranks(2, 'eval.py', *args, cwd=tmp_path)
    assert [code for code, _, _ in done] == [0, 0] and done[1][1] == '', done
    many = newest(tmp_path / 'many')
    assert set(one['results']) == {'lambada_openai', 'hellaswag', 'record'} and one['bos'] is True
    assert one['n-samples'] == many['n-samples'] and many['card660'] == pytest.approx(one['card660'], rel=1e-4)
    for task, scores in one['results'].items():
        other = many['results'][task]
        # a batch rounds as its shapes are; the error of a perplexity is drawn in the order of the documents
        for metric in scores.keys() - {'alias', 'name', 'perplexity_stderr,none'}:
            tolerance = 1e-4 if metric == 'perplexity,none' else 1e-9
            assert other[metric] == pytest.approx(scores[metric], rel=tolerance), (task, metric)
    for path in map(str, (text, bins)):
        assert many['bits_per_byte'][path] == pytest.approx(one['bits_per_byte'][path], rel=1e-5)
    held_out = read_meta(bins)['splits']['val']
    values = one['bits_per_byte'][str(bins)]
    assert values['bytes'] == held_out['bytes'] and values['tokens'] == held_out['tokens'] - 1
    # windows that overlap see more context than those of train.py's validation, which do not
    validated = [e['val_nats'] for e in events(trained) if 'val_nats' in e][-1]
    assert validated - 0.5 < values['nats_per_token'] < validated + 0.02


# the second process opens other weights
OTHER_WEIGHTS = """
import os
from mhf import released
whole = released.open_model
def open_other(*args, **others):
    opened = whole(*args, **others)
    opened.model.norm.weight.data += os.environ['RANK'] == '1'
    return opened
released.open_model = open_other
"""


def test_processes_open_the_same_weights(few, tmp_path):
    """While a run goes on, processes open different checkpoints of it, and a score is of neither."""
    args = ['--tasks=bits_per_byte', '--text=docs.jsonl', '--device=cpu', f'--output_path={tmp_path}']
    (code, said, first), (other, _, second) = of_ranks(2, 'eval.py', *args, cwd=few, patch=OTHER_WEIGHTS)
    assert (code, other, said, second) == (1, 1, '', '')
    assert first.startswith('error: process 1 has weights=') and first.count('\n') == 1


def test_bos(trained, tmp_path, monkeypatch):
    """bos is given to a released model, which lm-eval gave none, or not to one trained here; or its setting is deaf."""
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    save_pretrained(load_checkpoint(trained / 'out/ckpt.pt')[0], tmp_path / 'export', 'mistral')
    # the authors' config.json does not say how a model was trained
    shutil.copytree(tmp_path / 'export', tmp_path / 'authors')
    fields = json.loads((tmp_path / 'export/config.json').read_text())
    del fields['trained_loss']
    (tmp_path / 'authors/config.json').write_text(json.dumps(fields))
    monkeypatch.chdir(trained)
    settings = dict(data_dir=str(tmp_path), tasks='lambada_openai,card660', device='cpu', dtype='float32')
    models = dict(out=dict(out_dir='out'), run=dict(released='out'), export=dict(released=str(tmp_path / 'export')))
    models |= dict(authors=dict(released=str(tmp_path / 'authors')))
    scores = {}
    pearson = {}
    for name, bos in [(name, None) for name in models] + [('authors', True), ('export', False)]:
        results = command(monkeypatch, **settings, **models[name], bos=bos, output_path=str(tmp_path / name))
        assert results['bos'] == (name != 'authors' if bos is None else bos)
        # of the hidden states of a word every model has bos, unless it is told otherwise
        assert results['card660']['bos'] == (bos is not False)
        scores[name, bos] = results['results']['lambada_openai']
        pearson[name, bos] = results['card660']['last_pearson']
    assert scores['out', None] == scores['run', None] == scores['export', None] == scores['authors', True]
    assert scores['authors', None] == scores['export', False] != scores['export', None]
    # of three words, whose float32 products round otherwise where a file's tensors lie otherwise in memory
    with_bos = pytest.approx(pearson['out', None], rel=1e-3)
    assert all(value == with_bos for key, value in pearson.items() if key != ('export', False))
    assert pearson['export', False] != with_bos


def test_ctrl_c_is_one_line(few):
    """Ctrl-C in a command of hours ends with a traceback."""
    patch = 'def stop(*args, **others): raise KeyboardInterrupt\n'
    for script, args, where in (
        ('eval.py', ['--tasks=bits_per_byte', '--text=docs.jsonl'], 'from mhf import lm; lm.MHFLM.by_token = stop'),
        ('mhf.lm', ['ls', 'tasks'], 'import lm_eval.tasks; lm_eval.tasks.TaskManager = stop'),
    ):
        done = run(script, *args, cwd=few, patch=patch + where)
        assert done.returncode == 130 and done.stderr.startswith('interrupted; ') and done.stderr.count('\n') == 1
