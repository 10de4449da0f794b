"""From text to shards: mhf/sources.py, prepare.py, mhf/data.py. Most runs are in process."""

import gzip
import hashlib
import json
import lzma
import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from conftest import library_texts, ok, real_documents, snapshot, started, write_jsonl
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import eval as evaluation
import prepare
from hashing import fingerprint, signature_table
from mhf import data, sources
from mhf.data import Bins, count_tokens, data_folder
from mhf.errors import InputError
from mhf.tokenizers import get_tokenizer
from test_mhf import handmade_tokenizer


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Paths in these tests are relative to tmp_path."""
    monkeypatch.chdir(tmp_path)


def prepared(data_dir, **changes):
    """Runs prepare.py on all .jsonl files with these settings; returns the ids of both splits."""
    defaults = prepare.config | dict(val_fraction=0.1, data_format='ids', dataset='*.jsonl')
    prepare.main(defaults | dict(data_dir=data_dir) | changes)
    return [Bins(data_dir, split)[:].tolist() for split in data.SPLITS]


def decoded(ids, tok):
    """Returns the texts between the bos of token ids."""
    starts = [i for i, t in enumerate(ids) if t == tok.bos] + [len(ids)]
    return [tok.decode(ids[a + 1 : b]) for a, b in zip(starts, starts[1:], strict=False)]


def test_shards_contain_the_text(tmp_path, mistral, monkeypatch):
    """Shards contain every document in order, each after bos; the unit's json contains their counts and sha256."""
    docs = real_documents()
    write_jsonl(tmp_path / 'docs.jsonl', docs)
    monkeypatch.setattr(prepare, 'BATCH_CHARS', 20_000)  # several batches
    prepared('d')
    unit = json.loads((tmp_path / 'd/000000.json').read_text())
    for split, is_held_out in (('train', False), ('val', True)):
        texts = [t for i, t in enumerate(docs, 1) if (i % 10 == 0) == is_held_out]
        path = tmp_path / f'd/{split}_000000.bin'
        ids = np.load(path)
        assert ids.dtype == np.uint16 and decoded(ids.tolist(), mistral) == texts
        assert path.stat().st_size == data.HEADER + ids.nbytes
        assert unit[split] == dict(
            file=path.name, tokens=len(ids), documents=len(texts), bytes=sum(len(t.encode()) for t in texts),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )  # fmt: skip
    before = snapshot(tmp_path)
    prepared('d')
    assert snapshot(tmp_path) == before
    ids = prepared('large', tokenizer='tekken')
    assert np.load('large/train_000000.bin').dtype == np.uint32 and max(ids[0]) > 65535


@pytest.mark.parametrize('name, H, B', [('mistral', 3, 2048), ('mistral', 12, 8), ('handmade', 6, 16)])
def test_signatures_equal_ids(tmp_path, monkeypatch, name, H, B):
    """Shards of signatures equal table[ids], and are read as these ids; damaged rows and another table are errors."""
    handmade_tokenizer(monkeypatch)  # each document begins with pad, whose signature unused ids have, too
    tok = get_tokenizer(name)
    write_jsonl(tmp_path / 'docs.jsonl', real_documents())
    same = dict(tokenizer=name, num_hashes=H, num_buckets=B)
    ids = prepared('ids', **same)
    assert prepared('s', **same, data_format='signatures') == ids
    table = signature_table(tok.tokens, H, B, pad_id=tok.pad)
    assert Bins('s', 'val').meta['table_sha256'] == fingerprint(table)
    for split, split_ids in zip(data.SPLITS, ids, strict=True):
        signatures = np.load(f's/{split}_000000.bin')
        assert signatures.dtype == np.uint16 and (signatures == table[split_ids]).all()
        assert Bins('s', split)[:].dtype == Bins('ids', split)[:].dtype
    counts = count_tokens(Bins('s', 'train'))
    assert (counts == np.bincount(ids[0], minlength=len(tok.tokens))).all()
    with monkeypatch.context() as patch:
        patch.setattr(data, 'COUNTED_TOKENS', 2)
        assert 256 <= count_tokens(Bins('s', 'train')).sum() <= 512 < len(ids[0])
    shard = np.load('s/train_000000.bin', mmap_mode='r+')
    for hashes, bits in ((1, 0x8004), (slice(None), 0xFFFF)):  # the last is a row above all of the table
        shard[7, hashes] ^= bits
        with pytest.raises(InputError, match='^s/train_000000.bin is damaged .*; delete s/000000.json, then rerun'):
            Bins('s', 'train')[5:9]
        shard[7, hashes] ^= bits
    meta = json.loads(Path('s/meta.json').read_text())
    Path('s/meta.json').write_text(json.dumps(meta | dict(table_sha256='0')))
    with pytest.raises(InputError, match='another version of hashing.py'):
        Bins('s', 'train')[:]


@pytest.mark.parametrize('shared', [dict(single_id=True), dict(num_lsh=4), dict(num_hashes=0)])
def test_shared_signatures(tmp_path, shared):
    """Where tokens may share a signature, the data are ids, of which every model knows its tokens."""
    write_jsonl(tmp_path / 'docs.jsonl', real_documents()[:20])
    ids = prepared('ids')
    assert prepared('s', **shared, data_format='signatures') == ids
    assert np.load('s/train_000000.bin').ndim == 1


def test_every_format_gives_the_same_shards(tmp_path, monkeypatch):
    """All formats, compressed or not, in one unit or in many, give the same tokens."""
    docs = real_documents()
    write_jsonl(tmp_path / 'a.jsonl', docs)
    raw = (tmp_path / 'a.jsonl').read_bytes()
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(raw))
    # two streams or frames, as pigz-like tools write them
    (tmp_path / 'a.jsonl.xz').write_bytes(lzma.compress(raw[:9999]) + lzma.compress(raw[9999:]))
    (tmp_path / 'a.jsonl.zst').write_bytes(zstandard.compress(raw[:9999]) + zstandard.compress(raw[9999:]))
    pq.write_table(pa.table(dict(text=pa.array([None] * 3, pa.null()))), 'p0.parquet')
    pq.write_table(pa.table(dict(text=docs[:15], score=[3.5] * 15)), 'p1.parquet', row_group_size=4)
    pq.write_table(pa.table(dict(text=docs[15:])), 'p2.parquet')
    for i, text in enumerate(docs):
        (tmp_path / f'{i:02}.txt').write_text('\n ' + text + ' \n', encoding='utf-8', newline='')
    expected = prepared('a')
    # names of C4 and Dolma, and a name that is not UTF-8
    for name, source in {'PART.JSON.GZ': 'a.jsonl.gz', 'b.ndjson': 'a.jsonl', 'caf\udce9.jsonl': 'a.jsonl'}.items():
        shutil.copy(source, name)
        config = prepare.config | dict(val_fraction=0.1, data_format='ids', dataset=name)
        prepare.main(config)
        assert [Bins(data_folder(config), split)[:].tolist() for split in data.SPLITS] == expected, name
        Path(name).unlink()
    for kind in ('gz', 'xz', 'zst', 'parquet', 'txt'):
        assert prepared(kind, dataset=f'*.{kind}') == expected
    monkeypatch.setattr(prepare, 'UNIT_BYTES', 1)
    assert prepared('units', dataset='*.txt') == expected
    assert len(snapshot(tmp_path / 'units')) == 1 + 3 * 30
    bins = Bins('units', 'train')
    first, last = bins.starts[1], bins.starts[4]
    for a, b in [(first, last), (first - 1, last + 2), (len(bins) - 9, len(bins) + 9)]:
        assert bins[a:b].tolist() == expected[0][a:b]


def test_text_that_the_tokenizer_changes(tmp_path, capsys):
    """A warning says that a tokenizer changes text; bits per byte state the lost bytes, white space included."""
    words = {word: i for i, word in enumerate(['<e>', '[UNK]', 'if', 'plain', 'words'])}
    tok = tokenizers.Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # 8 bytes of white space, and in every fourth text a space and an unknown word
    texts = ['if\n        plain words' + ' ыыы' * (k % 4 == 0) for k in range(40)]
    lost = 40 * 8 + 10 * 7
    write_jsonl(tmp_path / 'docs.jsonl', texts)
    (tmp_path / 'tok').mkdir()
    tok.save('tok/tokenizer.json')
    (tmp_path / 'tok/tokenizer_config.json').write_text('{"eos_token": "<e>"}')
    prepared('d', tokenizer='tok')
    (line,) = capsys.readouterr().err.splitlines()
    assert "'tok' changes texts: 'If x:" in line
    tok = get_tokenizer('tok')
    assert evaluation.read_ids('docs.jsonl', SimpleNamespace(tok=tok, bos=tok.bos))[2] == lost
    # characters of the fixed text are tokens, but not all of this data set
    tok = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(['<e>', *sorted(set(prepare.PROBE))])}, []))
    tok.decoder = decoders.Fuse()
    tok.save('tok/tokenizer.json')
    prepared('e', tokenizer='tok')
    (line,) = capsys.readouterr().err.splitlines()
    assert "changes texts: 'if" in line


def test_long_documents_are_split(monkeypatch):
    """A long document is split at line ends, and the pieces joined are the document."""
    monkeypatch.setattr(sources, 'MAX_DOCUMENT_CHARS', 100)
    text = ''.join(f'line {i} ü\n' for i in range(500)) + 'x' * 950 + '\ny'
    pieces = list(sources.split_long_text(text))
    assert ''.join(pieces) == text and max(map(len, pieces)) <= 200
    assert list(sources.split_long_text(text[:100])) == [text[:100]]


def test_other_fields_do_not_matter(tmp_path):
    """Only the field `text` of a .jsonl is read, and it stays text."""
    rows = [dict(text=' 2020-01-01 '), dict(text='b', id=1), dict(id='x', text='c\ud800'), dict(text=None, id={})]
    (tmp_path / 'a.jsonl').write_text('\ufeff' + '\r\n\n'.join(map(json.dumps, rows)), encoding='utf-8', newline='')
    assert list(sources.read_files(sources.input_files('a.jsonl'))) == ['2020-01-01', 'b', 'c?']


def test_a_file_is_read_once(tmp_path):
    """Overlapping patterns and symbolic links add no second copy of a file, and no two sources share one."""
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(name)
    (tmp_path / 'self').symlink_to('.')
    (tmp_path / 'e.txt').symlink_to('a.txt')
    for dataset in ('**/*.txt', 'a.txt,*.txt,self/b.txt', f'{tmp_path}/*.txt,b.txt'):
        assert list(sources.read_files(sources.input_files(dataset))) == ['a', 'b']
    with pytest.raises(InputError, match='two sources contain .*; name each file once'):
        prepared('d', dataset='*.txt@1e6,self/a.txt@1e6')


BAD_FILES = [
    ('a.jsonl', b'{"text": "x"}\n{"content": "y"}\n', "row 2: .*KeyError: 'text'"),
    # the second stream or frame lacks its end
    ('a.txt.xz', lzma.compress(b'good\n') + lzma.compress(b'lost' * 99)[:-1], 'EOFError'),
    ('a.txt.zst', zstandard.compress(b'good\n') + zstandard.compress(random.Random(0).randbytes(9999))[:-1], 'Trunc'),
]


@pytest.mark.parametrize('name, raw, culprit', BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_stops(tmp_path, name, raw, culprit):
    """A file without texts, or truncated, is an error that names it; a run with a correct one succeeds."""
    (tmp_path / name).write_bytes(raw)
    (tmp_path / 'b.jsonl').write_text('{"text": "more text"}\n' * 50)
    with pytest.raises(InputError, match=f'{name}.*{culprit}'):
        prepared('d', dataset=f'b.jsonl,{name}')
    with pytest.raises(InputError, match='run prepare.py'):
        Bins('d', 'train')
    assert prepared('d', dataset='b.jsonl') == prepared('e', dataset='b.jsonl')


def test_held_out_documents(tmp_path, mistral, monkeypatch):
    """Every n-th document of a source is held out, up to val_bytes, in one unit or many."""
    texts = [f'{i} ' + 'word ' * (i * 37 % 90) + '.' for i in range(60)]
    write_jsonl(tmp_path / 'texts.jsonl', texts)
    train, val = prepared('d', val_bytes=900)
    held_out = decoded(val, mistral)
    assert held_out == texts[9::10][: len(held_out)] and 900 <= sum(map(len, held_out)) < 900 + 500
    assert decoded(train, mistral) == [text for text in texts if text not in held_out]
    monkeypatch.setattr(prepare, 'UNIT_BYTES', 1)
    for i, text in enumerate(texts):
        (tmp_path / f'{i:02}.txt').write_text(text)
    assert prepared('many', dataset='*.txt', val_bytes=900) == [train, val]


@pytest.mark.parametrize('unit_bytes, fraction', [(1, 0.02), (1, 0.1), (10**9, 0.02), (10**9, 0.1)])
def test_few_documents(tmp_path, mistral, monkeypatch, unit_bytes, fraction):
    """Of fewer than 3 n documents, long ends of three are held out. No text is lost."""
    monkeypatch.setattr(prepare, 'UNIT_BYTES', unit_bytes)
    monkeypatch.setattr(sources, 'MAX_DOCUMENT_CHARS', 900)
    texts = [*(f'text {i}\n' + 'some words\n' * 80 * (i != 9) for i in range(28)), 'x']
    for name, documents in dict(ten=texts, one=[''.join(texts)]).items():
        for i, text in enumerate(documents):
            (tmp_path / f'{name}_{i:02}.txt').write_text(text)
        train, val = (decoded(ids, mistral) for ids in prepared(name, dataset=f'{name}_*.txt', val_fraction=fraction))
        assert 0.5 < sum(map(len, val)) / sum(map(len, texts)) / fraction < 1.1
        assert len(val) == 3 and min(map(len, val)) > 50
        ends = dict(zip(range(len(train) // 3, len(train) + 1, len(train) // 3), val, strict=True))
        pieces = [text + ends.get(i, '') for i, text in enumerate(train, 1)]
        assert ''.join(''.join(pieces).split()) == ''.join(''.join(texts).split())


def test_mixtures(tmp_path, mistral, capsys, monkeypatch):
    """
    A source ends with the document that reaches its token limit, or the first that is held out; later text is not read.
    """
    monkeypatch.setattr(prepare, 'UNIT_BYTES', 1)
    monkeypatch.setattr(prepare, 'BATCH_CHARS', 300)
    texts = [t[k : k + 2000] for t in library_texts(2e5) for k in range(0, len(t), 2000)]
    for i in range(3):
        write_jsonl(tmp_path / f'{i}.jsonl', texts[i::3])
    for name in ('0.jsonl', '1.jsonl'):
        with open(name, 'a') as file:
            file.write('no JSON')
    train, val = prepared('m', dataset='[01].jsonl@4e3,2.jsonl@2e3', val_fraction=0.3)
    lines = re.findall(r'([0-9,]+) of ([0-9,]+) training tokens', capsys.readouterr().out)
    numbers = [[int(number.replace(',', '')) for number in line] for line in lines]
    longest = max(map(len, mistral.encode(texts))) + 1
    assert all(wanted <= n < wanted + longest for n, wanted in numbers) and len(train) == sum(n for n, _ in numbers)
    # the first document that is held out comes after the limit
    train, val = prepared('late', dataset='2.jsonl@9', val_fraction=0.3)
    in_order = list(sources.read_files(sources.input_files('2.jsonl')))
    assert [decoded(ids, mistral) for ids in (train, val)] == [in_order[:1], in_order[2:3]]


def test_hub(tmp_path, mistral, monkeypatch):
    """A hub data set is read at the first run's commit; a rerun after a network failure gives the same bytes."""
    monkeypatch.setattr(prepare, 'UNIT_BYTES', 1)
    texts = [f'{i} {t[:400]}' for i, t in enumerate(library_texts(3e6))]
    files = [f'data/arb_Arab/train/{i}.parquet' for i in range(3)]
    Path(files[0]).parent.mkdir(parents=True)
    for i, file in enumerate(files):
        pq.write_table(pa.table(dict(text=texts[i::3], score=[2.5] * len(texts[i::3]))), file, row_group_size=5)
    hub = MagicMock()
    hub.dataset_info.return_value.sha = 'c0ffee'
    hub.list_repo_tree.return_value = [MagicMock(path=path, size=9) for path in [*reversed(files), 'README.md']]
    hub.list_repo_tree.return_value.append(SimpleNamespace(path='data/arb_Arab/train'))  # folders have no size
    hub.open = lambda address: open(address.removeprefix('hf://datasets/HuggingFaceFW/fineweb-2@c0ffee/'), 'rb')
    for name in ('HfApi', 'HfFileSystem'):
        monkeypatch.setattr(huggingface_hub, name, lambda: hub)
    train, _ = prepared('good', dataset='fineweb-2:arb_Arab')
    in_order = [t.strip() for i in range(3) for t in texts[i::3]]
    assert decoded(train, mistral) == [t for i, t in enumerate(in_order, 1) if i % 10]

    Path(files[1]).rename('unreachable')
    both = 'fineweb-2:arb_Arab,fineweb-2:arb_Arab'  # each file once
    for name, dataset in dict(broken='fineweb-2:arb_Arab', list=both).items():
        with pytest.raises(InputError, match=r'1.parquet, row 1: cannot be read'):
            prepared(name, dataset=dataset)
        assert (tmp_path / name / '000000.json').exists() and not (tmp_path / name / '000001.json').exists()
    Path('unreachable').rename(files[1])
    # a later commit has other files
    hub.list_repo_tree.side_effect = AssertionError('listed again')
    prepared('broken', dataset='fineweb-2:arb_Arab')
    assert snapshot(tmp_path / 'broken') == snapshot(tmp_path / 'good')
    assert prepared('list', dataset=both)[0] == train
    monkeypatch.setitem(sources.HUB, 'fineweb-2:LANGUAGE', 'HuggingFaceFW/fineweb-2/data/LANGUAGE/test')
    with pytest.raises(AssertionError, match='listed again'):
        prepared('good', dataset='fineweb-2:arb_Arab')


# each file is a unit, because it is reported as larger
UNITS = 'import os; size = os.path.getsize; os.path.getsize = lambda path: size(path) + 10**9\n'
# a unit takes a while
SLOW = 'from mhf import sources; import time; split = sources.split_long_text\n'
SLOW += 'sources.split_long_text = lambda text: (time.sleep(0.002), split(text))[1]'


def test_kills(tmp_path):
    """Killed in its first unit and in a later one, prepare.py ends with the same bytes."""
    texts = library_texts(1.1e6)
    texts.insert(3, ''.join(texts))  # longer than a piece
    for i in range(12):
        write_jsonl(tmp_path / f'{i:02}.jsonl', texts[i::12])
    args = ('prepare.py', '--dataset=*.jsonl', '--val_fraction=0.03')
    ok(*args, '--data_dir=straight', cwd=tmp_path, patch=UNITS)
    expected = snapshot(tmp_path / 'straight')
    assert len(expected) == 1 + 3 * 12
    for file in ('train_000000.bin.tmp', '000004.json'):
        process = started(*args, '--data_dir=killed', cwd=tmp_path, wait_for=f'killed/{file}', patch=UNITS + SLOW)
        os.kill(process.pid, signal.SIGKILL)
        assert process.communicate().returncode == -signal.SIGKILL
        assert not (tmp_path / 'killed/000011.json').exists()
    ok(*args, '--data_dir=killed', cwd=tmp_path, patch=UNITS)
    assert snapshot(tmp_path / 'killed') == expected


def test_other_files(tmp_path):
    """A folder of other input files, or in use, is refused, and shards without meta.json are kept."""
    write_jsonl(tmp_path / 'a.jsonl', real_documents())
    prepared('d')
    with FileLock('d/.prepare.lock'), pytest.raises(OSError, match='d/.prepare.lock'):
        prepared('d')
    # the same size and time
    raw = (tmp_path / 'a.jsonl').read_bytes()
    middle = len(raw) // 2
    (tmp_path / 'a.jsonl').write_bytes(raw[:middle] + raw[middle:].replace(b'e', b'E', 1))
    with pytest.raises(InputError, match='sources=.*a.jsonl.*, now it is .*a.jsonl.*; delete'):
        prepared('d')
    # a user's files in data_dir are not units
    (tmp_path / 'own').mkdir()
    write_jsonl(tmp_path / 'own/2024.json', real_documents())
    prepared('own', dataset='own/2024.json')
    (tmp_path / 'foreign').mkdir()
    (tmp_path / 'foreign/train_000007.bin').write_text('x')
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match='train_000007.bin could be overwritten'):
        prepared('foreign')
    assert snapshot(tmp_path) == before


def test_damaged_shards(tmp_path):
    """
    A shard of another size is named with what to delete, and prepared again, but not from other files. A shard that
    shrinks is an error.
    """
    write_jsonl(tmp_path / 'a.jsonl', real_documents())
    prepared('d')
    before = snapshot(tmp_path / 'd')
    train = Bins('d', 'train')
    os.truncate('d/train_000000.bin', 1000)
    with pytest.raises(ValueError):
        train[:]
    with pytest.raises(InputError, match='train_000000.bin is damaged .*; delete d/000000.json, then rerun prepare.py'):
        prepared('d')
    (tmp_path / 'd/000000.json').unlink()
    prepared('d')
    assert snapshot(tmp_path / 'd') == before
    (tmp_path / 'd/000000.json').unlink()
    write_jsonl(tmp_path / 'a.jsonl', real_documents()[1:])
    before = snapshot(tmp_path / 'd')
    with pytest.raises(InputError, match='was prepared with sources='):
        prepared('d')
    assert snapshot(tmp_path / 'd') == before


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 2**31))
def test_epochs(n, batch_size, seed):
    """An epoch reads every sequence once, in another order than the epoch before."""
    steps = range(-(-2 * n // batch_size))
    order = np.concatenate([data.sequence_indices(step, batch_size, n, seed) for step in steps])
    assert sorted(order[:n]) == sorted(order[n : 2 * n]) == list(range(n))
    assert n < 10 or (order[:n] != order[n : 2 * n]).any()


def test_the_permutation_is_fixed():
    """The order of sequences does not change between commits."""
    assert data.feistel_permute(np.arange(5), 10000, 42).tolist() == [6814, 3188, 9857, 7018, 4674]
    expected = [43193186363, 53595994680, 26334769426, 57026049564, 57824253611]
    assert data.feistel_permute(np.arange(5), 10**11, 42, 1).tolist() == expected
