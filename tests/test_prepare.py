"""The way of a text to its bins: mhf/sources.py, prepare.py, mhf/meta.py, mhf/bins.py. Most runs are in process."""

import contextlib
import gzip
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import (
    CONFIG,
    FUZZ,
    REPO,
    damaged,
    edited,
    library_texts,
    ok,
    real_documents,
    snapshot,
    start,
    write_jsonl,
)
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator
import prepare
from configurator import InputError
from hashing import fingerprint, signature_table, token_ids
from mhf import bins, sources
from mhf.meta import SPLITS, checked_table, data_folder, load_meta, read_meta, wrong_type


def prepared(folder, **changes):
    """prepare.py with these settings; the split's ids."""
    defaults = configurator.settings_of('prepare.py') | dict(val_fraction=0.1, data_format='ids', data_dir=str(folder))
    prepare.main(defaults | changes)
    return ids_in(folder)


def ids_in(folder):
    meta = read_meta(folder)
    return [bins.Bins(folder, meta['splits'][split])[:].tolist() for split in SPLITS]


def documents_of(ids, tok):
    """Token ids -> the texts between their bos."""
    starts = [i for i, t in enumerate(ids) if t == tok.bos] + [len(ids)]
    return [tok.decode(ids[a + 1 : b]) for a, b in zip(starts, starts[1:], strict=False)]


def bins_of(folder):
    """{file: its bytes} of the shards in a folder."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob('*.bin*'))}


def test_bins_of_signatures(tmp_path, mistral):
    """Bins of signatures hold other tokens than bins of ids, or lie where those of another table do."""
    write_jsonl(tmp_path / 'docs.jsonl', real_documents())
    ids = prepared(tmp_path / 'ids', dataset=f'{tmp_path}/docs.jsonl')
    of_signatures = dict(data_format='signatures', num_hashes=3, num_buckets=2048)
    prepare.main(
        configurator.settings_of('prepare.py')
        | of_signatures
        | dict(dataset=f'{tmp_path}/docs.jsonl', data_dir=str(tmp_path / 's'), val_fraction=0.1, shard_tokens=5000)
    )
    meta = read_meta(tmp_path / 's')
    table = signature_table(mistral.tokens, 3, 2048, pad_id=mistral.pad)
    assert meta['table_sha256'] == fingerprint(table)
    for split, its_ids in zip(SPLITS, ids, strict=True):
        signatures = bins.Bins(tmp_path / 's', meta['splits'][split], num_hashes=3)[:]
        assert signatures.dtype == np.uint16 and (signatures == table[its_ids]).all()
        assert token_ids(signatures, table).tolist() == its_ids
    folders = set()
    for change in ({}, dict(num_buckets=4096), dict(num_lsh=1), dict(single_id=True), dict(data_format='ids')):
        config = configurator.settings_of('train.py') | of_signatures | dict(dataset='stdlib') | change
        folders.add(data_folder(config).name)
    assert len(folders) == 5 and {'stdlib_mistral_H3B2048', 'stdlib_mistral'} < folders
    standard = configurator.settings_of('train.py') | dict(dataset='stdlib', num_hashes=0)
    assert data_folder(standard).name == 'stdlib_mistral'


def test_bins_hold_the_text(tmp_path, mistral):
    """Documents are lost, reordered, cut, or begin without bos; or meta.json counts something else."""
    docs = real_documents()
    write_jsonl(tmp_path / 'docs.jsonl', docs)
    prepared(tmp_path / 'd', dataset=f'{tmp_path}/docs.jsonl')
    meta = json.loads((tmp_path / 'd/meta.json').read_text())
    for split, held_out in (('train', False), ('val', True)):
        texts = [t for i, t in enumerate(docs, 1) if (i % 10 == 0) == held_out]
        ids = np.load(tmp_path / f'd/{split}_000000.bin')
        assert ids.dtype == np.uint16 and documents_of(ids.tolist(), mistral) == texts
        digest = mmh3.hash_bytes(ids.tobytes(), 0, True).hex()
        assert meta['splits'][split] == dict(
            tokens=len(ids), documents=len(texts), bytes=sum(len(t.encode()) for t in texts),
            shards=[dict(file=f'{split}_000000.bin', tokens=len(ids), digest=digest)],
        )  # fmt: skip
    before = snapshot(tmp_path)
    prepared(tmp_path / 'd', dataset=f'{tmp_path}/docs.jsonl')
    assert snapshot(tmp_path) == before


def test_every_format_gives_the_same_bins(tmp_path):
    """A reader of one format changes or drops text."""
    docs = real_documents()
    write_jsonl(tmp_path / 'a.jsonl', docs)
    raw = (tmp_path / 'a.jsonl').read_bytes()
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(raw))
    (tmp_path / 'a.jsonl.xz').write_bytes(lzma.compress(raw))
    # two frames, as pigz-like tools write them
    half = raw.index(b'\n', len(raw) // 2) + 1
    (tmp_path / 'a.jsonl.zst').write_bytes(b''.join(zstandard.compress(p) for p in (raw[:half], raw[half:])))
    for k, some in enumerate((docs[:15], docs[15:])):
        pq.write_table(
            pa.table(dict(text=some, score=[3.5] * 15)), tmp_path / f'p{k}.parquet', row_group_size=4 + 3 * k
        )
    (tmp_path / 'txt').mkdir()
    for i, text in enumerate(docs):
        (tmp_path / f'txt/{i:02}.txt').write_text('\n ' + text + ' \n', encoding='utf-8', newline='')
    prepared(tmp_path / 'a', dataset=f'{tmp_path}/a.jsonl')
    for name in ('a.jsonl.gz', 'a.jsonl.xz', 'a.jsonl.zst', 'p0.parquet,{}/p1.parquet', 'txt/*.txt'):
        prepared(tmp_path / name[:9], dataset=f'{tmp_path}/{name}'.format(tmp_path))
        assert bins_of(tmp_path / name[:9]) == bins_of(tmp_path / 'a')


def test_a_single_text_file(tmp_path, mistral):
    """nanoGPT's first data set is one file: it must give both splits, without loss."""
    text = 'The quick brown fox.\n' * 400
    # a byte order mark, line ends of another system, and a name that is no glob
    (tmp_path / 'in[1]put*.txt').write_bytes(b'\xef\xbb\xbf' + text.replace('\n', '\r\n').encode())
    args = ('prepare.py', '--dataset=in[1]put*.txt', '--data_dir=d', '--data_format=ids')
    ok(*args, cwd=tmp_path)
    decoded = [mistral.decode(ids) for ids in ids_in(tmp_path / 'd')]
    assert '\n'.join(decoded) == text.strip() and 20 < len(decoded[1]) < 200
    assert 'prepared already' in ok(*args, cwd=tmp_path).stdout


def test_preparing_needs_no_torch():
    """prepare.py imports torch: it starts seconds later, and each of several parts on a machine takes its memory."""
    program = 'import sys, prepare; sys.exit("torch" in sys.modules)'
    subprocess.run([sys.executable, '-c', program], cwd=REPO, check=True)


def test_a_long_document_is_cut(monkeypatch):
    """The tokenizer gets a document of 50 MB whole and takes GBs for it, or the pieces are not the whole text."""
    monkeypatch.setattr(sources, 'PIECE_CHARS', 100)
    text = ''.join(f'line {i} ü\n' for i in range(500)) + 'x' * 950 + '\ny'
    pieces = list(sources.pieces(text))
    assert '\n'.join(pieces).replace('x\nx', 'xx') == text and max(map(len, pieces)) <= 200
    assert list(sources.pieces(text[:100])) == [text[:100].strip()]


def test_other_fields_do_not_matter(tmp_path, mistral):
    """A .jsonl is refused, or its text changed, for fields that are not read or look like another type."""
    rows = [dict(text=' 2020-01-01 '), dict(text='b', id=1), dict(id='x', text='c\ud800'), dict(text=None, id={})]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / 'a.jsonl').write_text('\ufeff' + '\n\n'.join(lines[:2]), encoding='utf-8')
    (tmp_path / 'b.jsonl').write_text('\r\n'.join(lines[2:]), newline='')
    source = sources.Source(f'{tmp_path}/a.jsonl,{tmp_path}/b.jsonl')
    assert [text for text, _ in sources.documents(source)] == ['2020-01-01', 'b', 'c?']


RUSSIAN = 'Все счастливые семьи похожи друг на друга.\n'
BAD_FILES = [
    ('a.txt', b'\xfe\xff' + RUSSIAN.encode('utf-16-be'), 'UnicodeDecodeError.*; convert it to UTF-8'),
    ('a.txt.xz', lzma.compress(b'good\n' * 72 + RUSSIAN.encode('cp1251')), 'UnicodeDecodeError'),
    ('a.jsonl.gz', gzip.compress('{"text": "x"}\n'.encode('utf-32')), 'UnicodeDecodeError'),
    ('a.jsonl', b'{"text": "x"}\n[1]\n', "row 2: no field 'text'; there are: list"),
    ('a.jsonl', b'{"text": ' + b'[' * 99_999, 'row 1: not JSON .*recursion'),
]


@pytest.mark.parametrize('name, raw, culprit', BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_stops(tmp_path, name, raw, culprit):
    """Text in another encoding is trained on as garbage, or nobody knows which of many files is damaged."""
    (tmp_path / name).write_bytes(raw)
    good = name.replace('a.', 'b.').removesuffix('.gz').removesuffix('.xz')
    (tmp_path / good).write_text('{"text": "more text"}\n' * 50)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=f'/{name}.*{culprit}'):
        prepared(tmp_path / 'new' / 'd', dataset=f'{tmp_path}/{good},{tmp_path}/{name}')
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize('names, val_fraction', [('ab', 0.1), ('c', 0.001), ('cc', 0.1), ('dd', 0.1)])
def test_reading_goes_on_from_every_state(tmp_path, monkeypatch, names, val_fraction):
    """After an interruption documents are lost, repeated or held out otherwise."""
    monkeypatch.setattr(sources, 'PIECE_CHARS', 300)
    monkeypatch.setattr(sources, 'BATCH_CHARS', 500)
    texts = [f'{i} ' + 'word ' * (i * 37 % 90) for i in range(60)] + ['line of a long one\n' * 99, ' ', 'last']
    write_jsonl(tmp_path / 'a.jsonl', texts)
    (tmp_path / 'b.jsonl.xz').write_bytes(lzma.compress((tmp_path / 'a.jsonl').read_bytes()))
    (tmp_path / 'c.txt').write_bytes(b'one\n' * 2000)
    pq.write_table(pa.table(dict(text=[*texts, None])), tmp_path / 'd.parquet', row_group_size=7)
    dataset = ','.join(str(next(tmp_path.glob(f'{name}.*'))) for name in names)

    whole = list(sources.batches(sources.Source(dataset), sources.START, val_fraction, 3000))
    source = sources.Source(dataset)

    def read(progress):
        return list(sources.batches(source, progress, val_fraction, 3000))

    assert len(whole) > 3 and whole[-1][1]['few'] == (names == 'c')
    # the tokenizer is not given a document of 50 MB whole
    assert max(sum(len(text) for text, _ in batch) for batch, _ in whole) < 500 + 2 * 300
    for k, (_, progress) in enumerate(whole, 1):
        # as meta.json keeps it
        rest = read(json.loads(json.dumps(progress)))
        assert [batch for batch, _ in rest] == [batch for batch, _ in whole[k:]]
        # and once more, from where that one was
        if len(rest) > 1:
            assert [batch for batch, _ in read(rest[0][1])] == [batch for batch, _ in rest[1:]]
    said = [text for batch, _ in whole for text, _ in batch]
    if names != 'c':
        assert ''.join(said).count('line of a long one') == 2 * 99 * (names[0] != 'c')
    held_out = sum(len(text.encode()) for batch, _ in whole for text, out in batch if out)
    assert 0 < held_out < 3000 + 300


def test_parts_and_mixtures(tmp_path, mistral, capsys):
    """Machines that share the work read the same files or lose some; a mixture has other shares than were asked for."""
    texts = [t[k : k + 2000] for t in library_texts(2e5) for k in range(0, len(t), 2000)]
    for i in range(3):
        write_jsonl(tmp_path / f'{i}.jsonl', texts[i::3])
    both = dict(dataset=f'{tmp_path}/*.jsonl', shard_tokens=5000)
    with pytest.raises(InputError, match='lacks part 0/2'):
        prepared(tmp_path / 'd', **both, part='1/2')
    with pytest.raises(InputError, match='no place for part'):
        prepared(tmp_path / 'd', **both)
    said = [documents_of(ids, mistral) for ids in prepared(tmp_path / 'd', **both, part='0/2')]
    stripped = [t.strip() for t in texts if t.strip()]
    assert sorted(said[0] + said[1]) == sorted(stripped)
    for split in read_meta(tmp_path / 'd')['splits'].values():
        ids = bins.Bins(tmp_path / 'd', split)
        whole = np.concatenate(ids.shards)
        assert len(ids) == len(whole) and (ids[:] == whole).all()
        assert all((ids[a:b] == whole[a:b]).all() for a, b in ((0, 5001), (4999, 10002), (len(ids) - 9, len(ids) + 9)))

    ids = prepared(tmp_path / 'large', dataset=f'{tmp_path}/0.jsonl', tokenizer='tekken')
    assert np.load(tmp_path / 'large/train_000000.bin').dtype == np.uint32 and max(ids[0]) > 65535

    mixed = f'{tmp_path}/0.jsonl@4e3,{tmp_path}/1.jsonl@2e3'
    train, _ = prepared(tmp_path / 'm', dataset=mixed, val_fraction=0.3)
    entries = read_meta(tmp_path / 'm')['sources']
    longest = max(len(i) for i in mistral.encode(stripped)) + 1
    assert all(w <= e['tokens'] < w + longest for e, w in zip(entries, (4000, 2000), strict=True))
    assert len(train) == sum(e['tokens'] for e in entries)
    assert not capsys.readouterr().err
    prepared(tmp_path / 'dry', dataset=f'{tmp_path}/2.jsonl@1e9')
    assert capsys.readouterr().err == f'warning: {tmp_path}/2.jsonl ran dry: it has no more text\n'
    for bad in ('a.jsonl@1e3,b.jsonl', 'a.jsonl@many,b.jsonl@5', '@5', 'a.jsonl@nan', 'a.jsonl@1e999'):
        with pytest.raises(InputError, match='number of tokens'):
            prepared(tmp_path / 'n', dataset=bad)


def test_a_mixture_goes_on(tmp_path, monkeypatch):
    """A mixture that is stopped anywhere has other shares after it, or other tokens; or it reads all of each source."""
    for name in 'ab':
        write_jsonl(tmp_path / f'{name}.jsonl', [f'{name} {i} some words' for i in range(300)])
    # beyond the share nothing is read
    with open(tmp_path / 'a.jsonl', 'a') as file:
        file.write('no JSON')
    monkeypatch.setattr(sources, 'BATCH_CHARS', 300)
    monkeypatch.setattr(prepare, 'COMMIT_SECONDS', 0)
    mixed = dict(dataset=f'{tmp_path}/a.jsonl@700,{tmp_path}/b.jsonl@900', shard_tokens=250)
    prepared(tmp_path / 'straight', **mixed)
    append = prepare.Shards.append
    calls = []

    def stopped(self, *args):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        append(self, *args)

    monkeypatch.setattr(prepare.Shards, 'append', stopped)
    for _ in range(40):
        with contextlib.suppress(KeyboardInterrupt):
            prepared(tmp_path / 'd', **mixed)
            break
    assert len(calls) > 9 and snapshot(tmp_path / 'd') == snapshot(tmp_path / 'straight')


def test_hub_parquet_and_its_failures(tmp_path, mistral, monkeypatch):
    """Rows are lost or read twice, or a network that fails for long loses what was read."""
    texts = [f'{i} {t[:400]}' for i, t in enumerate(library_texts(1e6))]
    # FineWeb-Edu's repository: a README that names its configurations, parquet in row groups
    (tmp_path / 'hub/sample').mkdir(parents=True)
    (tmp_path / 'hub/README.md').write_text(
        '---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/*\n---\n'
    )
    for i in range(3):
        columns = dict(text=texts[i::3], score=[2.5] * len(texts[i::3]))
        pq.write_table(pa.table(columns), tmp_path / f'hub/sample/{i:03}.parquet', row_group_size=5)
    monkeypatch.setitem(sources.HUB, 'fineweb-edu', (str(tmp_path / 'hub'), ['sample-10BT']))
    monkeypatch.setattr(sources, 'BATCH_CHARS', 2000)
    monkeypatch.setattr(prepare, 'COMMIT_SECONDS', 0)
    train, _ = prepared(tmp_path / 'good', dataset='fineweb-edu')
    in_order = [t.strip() for i in range(3) for t in texts[i::3]]
    assert documents_of(train, mistral) == [t for i, t in enumerate(in_order, 1) if i % 10]

    tables = Parquet._generate_tables
    read = []

    def shaky(*args, **kwargs):
        for table in tables(*args, **kwargs):
            read.append(1)
            if len(read) == 5:
                raise ConnectionError('the network is down')
            yield table

    monkeypatch.setattr(Parquet, '_generate_tables', shaky)
    with pytest.raises(InputError, match='001.parquet cannot be read.*the network is down.*; the same command goes on'):
        prepared(tmp_path / 'broken', dataset='fineweb-edu')
    assert json.loads((tmp_path / 'broken/meta.json').read_text())['splits']['train']['tokens'] > 100
    with pytest.raises(InputError, match='is not finished'):
        read_meta(tmp_path / 'broken')
    prepared(tmp_path / 'broken', dataset='fineweb-edu')
    assert bins_of(tmp_path / 'broken') == bins_of(tmp_path / 'good')


NAMES = {
    # as they always were
    'stdlib': 'stdlib',
    'fineweb-edu:sample-10BT': 'fineweb-edu-sample-10BT',
    'docs.jsonl': 'docs.jsonl',
    '../text/docs.jsonl.xz': 'docs.jsonl.xz-88f86e61',
    'books/*.txt': 'books-txt-4daa1511',
    'books/**/*': 'books-',
    '*.txt': 'txt-79e81fa3',
    'fineweb-2:hin_Deva@2e9,ar/docs.jsonl@1e9': 'fineweb-2-hin_Deva-docs.jsonl-',
}


def test_names_of_data_folders():
    """A folder's name says nothing of its text or begins with -, or what was prepared before has another name."""
    for dataset, name in NAMES.items():
        folder = data_folder(dict(data_dir='', dataset=dataset, tokenizer='mistral', data_format='ids'))
        assert str(folder).startswith(f'data/{name}') and folder.name.endswith('_mistral')


# so that a run of seconds has many commits
SMALL_BATCHES = 'from mhf import sources; sources.BATCH_CHARS = 1 << 15'


def test_kill_prepare(tmp_path):
    """A killed prepare.py begins anew, loses or repeats text, or leaves other bytes; MHF_KILLS=20: often."""
    kills = int(os.environ.get('MHF_KILLS', 3))
    seed = int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    texts = library_texts(2e6)
    # longer than a piece
    texts.insert(3, ''.join(texts[:40]))
    write_jsonl(tmp_path / 'docs.jsonl', texts)
    args = ['--dataset=docs.jsonl', '--shard_tokens=10000', '--val_fraction=0.01']
    ok('prepare.py', *args, '--data_dir=straight', cwd=tmp_path)
    expected = bins_of(tmp_path / 'straight')
    draw = np.random.default_rng(seed)
    killed = tmp_path / 'killed'
    survived = 0
    while survived < kills:
        shards = len(list(killed.glob('*.bin'))) + draw.integers(0, len(expected) // 3)
        process = start('prepare.py', *args, '--data_dir=killed', cwd=tmp_path, patch=SMALL_BATCHES)
        while process.poll() is None and len(list(killed.glob('*.bin'))) < shards:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        if process.poll() is not None:
            # it finished: from the beginning again
            assert process.returncode == 0 and bins_of(killed) == expected
            shutil.rmtree(killed)
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        survived += 1
        print(f'seed {seed}, killed at {len(list(killed.glob("*.bin")))} of {len(expected)} shards')
    ok('prepare.py', *args, '--data_dir=killed', cwd=tmp_path)
    assert bins_of(killed) == expected and len(expected) > 20
    metas = [json.loads((tmp_path / d / 'meta.json').read_text()) for d in ('straight', 'killed')]
    assert metas[0] == metas[1] and {p.suffix for p in killed.iterdir()} == {'.bin', '.json'}


def test_disk_full_while_preparing(tmp_path, monkeypatch):
    """A full disk loses whole shards, or the same command can't go on; or does with other text, or beside another."""
    write_jsonl(tmp_path / 'docs.jsonl', library_texts(3e5))
    same = dict(dataset=f'{tmp_path}/docs.jsonl', shard_tokens=8000)
    monkeypatch.setattr(sources, 'BATCH_CHARS', 20000)
    prepared(tmp_path / 'good', **same)
    with prepare.locked(tmp_path / 'full', 'meta'), pytest.raises(InputError, match='another prepare.py is at work'):
        prepared(tmp_path / 'full', **same)
    append = prepare.Shards.append

    def full(self, *args):
        if len(self.state['shards']) >= room:
            raise OSError(28, 'No space left on device')
        append(self, *args)

    monkeypatch.setattr(prepare.Shards, 'append', full)
    for room in (0, 3):
        with pytest.raises(InputError, match='No space left.*the same command goes on'):
            prepared(tmp_path / 'full', **same)
        assert (tmp_path / 'full').exists() == (room > 0)
    assert len(json.loads((tmp_path / 'full/meta.json').read_text())['splits']['train']['shards']) >= 2
    monkeypatch.setattr(prepare.Shards, 'append', append)
    raw = (tmp_path / 'docs.jsonl').read_bytes()
    (tmp_path / 'docs.jsonl').write_bytes(raw + b'{"text": "one more"}')
    with pytest.raises(InputError, match='made_from differs'):
        prepared(tmp_path / 'full', **same)
    (tmp_path / 'docs.jsonl').write_bytes(raw)
    prepared(tmp_path / 'full', **same)
    assert bins_of(tmp_path / 'full') == bins_of(tmp_path / 'good')


@pytest.fixture(scope='module', params=['signatures', 'ids'])
def small(tmp_path_factory, request):
    """A folder with bins, and the config that train.py reads them by."""
    folder = tmp_path_factory.mktemp('small')
    write_jsonl(folder / 'docs.jsonl', real_documents()[:12])
    (folder / 'cfg.py').write_text(CONFIG)
    of_config = configurator.read_config(folder / 'cfg.py')
    prepare.main(
        configurator.settings_of('prepare.py')
        | {k: of_config[k] for k in ('num_hashes', 'num_buckets')}
        | dict(dataset=f'{folder}/docs.jsonl', data_dir=str(folder / 'bins'), data_format=request.param)
        | dict(shard_tokens=9000, val_fraction=0.1)
    )
    config = configurator.settings_of('train.py') | configurator.read_config(folder / 'cfg.py')
    return folder, config | dict(data_dir=str(folder / 'bins'))


def test_the_table_is_of_the_tokenizer(small, mistral):
    """train.py signs ids with the table of another tokenizer than the bins were made with, or takes a file for bins."""
    folder, config = small
    meta = load_meta(config)
    expected = signature_table(mistral.tokens, 3, 256, 0, mistral.pad)
    assert (checked_table(config, meta) == expected).all()
    if meta['data_format'] == 'ids':
        assert checked_table(config | dict(num_hashes=0), meta) is None
    for wrong in (dict(vocab_size=32769), dict(pad_id=3), dict(tokenizer_sha256='0'), dict(unused_ids=[5])):
        with pytest.raises(InputError, match=f"another 'mistral' tokenizer: {next(iter(wrong))}="):
            checked_table(config, meta | wrong)
    for data_dir in ('nothing', str(folder / 'docs.jsonl')):
        with pytest.raises(InputError, match='no prepared data'):
            load_meta(config | dict(data_dir=data_dir))


def test_wrong_type():
    """A damaged file's values are taken for what they are not, or whole ones are refused."""
    like = dict(a=int, b=[dict(c=(str, type(None)))], d=dict, e=list, f=bool)
    whole = dict(a=1, b=[dict(c='x'), dict(c=None)], d=dict(x=1), e=[2], f=True, more=0)
    assert wrong_type(whole, like) == '' and wrong_type(whole | dict(a=True), like, 'm') == 'm.a=True'
    assert wrong_type(whole | dict(b=[dict(c='x'), dict(c=3)]), like) == 'it.b[1].c=3'
    assert wrong_type(whole | dict(b=[{}]), like) == 'it.b[0] without c' and wrong_type([], like) == 'it=[]'
    assert wrong_type(whole | dict(d=[]), like) == 'it.d=[]' and wrong_type({}, dict(b=int, a=int)) == 'it without a, b'


@settings(max_examples=FUZZ, deadline=None)
@given(st.data())
def test_fuzz_bins(small, tmp_path_factory, data):
    """Damaged bins or a damaged meta.json end in a traceback, write something, or are read as if they were whole."""
    original, config = small
    folder = tmp_path_factory.mktemp('b')
    shutil.copytree(original / 'bins', folder / 'bins')
    path = folder / 'bins' / data.draw(st.sampled_from(['meta.json', 'train_000001.bin', 'val_000000.bin']))
    raw = path.read_bytes()
    if path.name == 'meta.json' and data.draw(st.booleans()):
        path.write_text(json.dumps(edited(data.draw, json.loads(raw))))
    else:
        path.write_bytes(damaged(data.draw, raw))
    before = snapshot(folder)
    config = config | dict(data_dir=str(folder / 'bins'))
    try:
        meta = load_meta(config)
        checked_table(config, meta)
        whole = config | dict(data_dir=str(original / 'bins'))
        for split in SPLITS:
            tokens = bins.open_bins(config, meta, split)
            tokens.verify()
            assert (tokens[:] == bins.open_bins(whole, load_meta(whole), split)[:]).all()
    except InputError as e:
        assert '\n' not in str(e)
    assert snapshot(folder) == before


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31), st.integers(0, 9))
def test_shuffled_is_a_bijection(n, seed, epoch):
    """An epoch would read some blocks twice and others never."""
    assert sorted(bins.shuffled(np.arange(n), n, seed, epoch)) == list(range(n))


def test_shuffled_is_fixed_and_shuffles():
    """The order of the data changes between versions (no run could be resumed), or is hardly a shuffle."""
    first = [43193186363, 53595994680, 26334769426, 57026049564, 57824253611]
    assert bins.shuffled(np.arange(5), 10**11, 42, 1).tolist() == first
    order = bins.shuffled(np.arange(10000), 10000, 42)
    assert abs(np.corrcoef(order, np.arange(10000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_reading_ahead():
    """An item is lost or repeated, or an error of its making is swallowed."""
    assert list(bins.prefetch(iter(range(5)))) == [0, 1, 2, 3, 4] and list(bins.prefetch([])) == []
    with pytest.raises(ZeroDivisionError):
        list(bins.prefetch(1 // (3 - i) for i in range(5)))
