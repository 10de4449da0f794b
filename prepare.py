"""
Text in, signature bins out: tokenises data sets and writes what train.py memory-maps. Stopped at any moment, the same command
goes on and ends with the same bytes.

    $ python prepare.py config/mhf_tiny.py                                # the Python standard library, in seconds
    $ python prepare.py                                                   # FineWeb-Edu sample-10BT for H4B16K
    $ python prepare.py --dataset='books/*.jsonl.xz' --num_hashes=3 --num_buckets=2048
    $ python prepare.py --dataset='fineweb-2:arb_Arab@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu@2e9'      # tokens of each
    $ python prepare.py config/mhf_1b.py --part=0/4                       # on the first of four machines

Writes data_dir/train_000000.bin ... and val_000000.bin (shards in numpy's .npy layout, (tokens, H) uint16; token ids have one
column), signatures.npy (the table) and meta.json (what they were made from, every shard's digest, and where to go on). Every
document is stripped, empty ones are dropped, and each begins with bos; documents are packed back to back.
"""

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import multiprocessing
import os
import platform
import re
import signal
import sys
import sysconfig
import time
import zlib
from bisect import bisect_right
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from pathlib import Path

import mmh3
import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from configurator import InputError, configure, declared, did_you_mean, wrong_type
from hashing import fingerprint, get_tokenizer, signature_table, tokenizer_fingerprint

# what to read: stdlib | fineweb-edu | fineweb-edu:sample-100BT | fineweb-edu-dedup | fineweb-2:arb_Arab | files or globs of
# .txt .jsonl .parquet, the first two also as .gz .xz .zst; several separated by commas, as a mixture with @tokens each
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '' is data/<dataset>_<tokenizer>_<signature>
tokenizer = 'mistral'  # mistral | tekken | gpt2 | cl100k_base | o200k_base | any tiktoken encoding
on_error = 'stop'  # stop | skip: count what cannot be read, and go on behind it
# signatures
num_hashes = 4  # H; 0 writes token ids, for the Standard model, or for train.py to sign as it reads
num_buckets = 16384  # B
num_lsh = 0  # the first num_lsh coordinates from LSH of trigrams (ablation)
single_id = False  # one hash on all coordinates, collisions stay (ablation)
# held-out text: every round(1/val_fraction)-th document until val_bytes; of fewer documents than that, the tail of each
val_fraction = 0.005
val_bytes = 4000000
# how
shard_tokens = 100000000
part = ''  # i/n: reads every n-th file from the i-th (from 0); train.py joins the parts
num_workers = 0  # processes that tokenise; 0 is one per core

config = configure(globals())

# -----------------------------------------------------------------------------

# name: (repository, its configurations as far as they can be listed here, the default)
HUB = {
    'fineweb-edu': (
        'HuggingFaceFW/fineweb-edu',
        ('sample-10BT', 'sample-100BT', 'sample-350BT', 'default'),
        'sample-10BT',
    ),
    'fineweb-edu-dedup': ('HuggingFaceTB/smollm-corpus', ('fineweb-edu-dedup',), 'fineweb-edu-dedup'),
    'fineweb-2': ('HuggingFaceFW/fineweb-2', None, ''),
}
TEXT_SUFFIXES = ('.txt', '.jsonl', '.parquet')
BATCH_CHARS = 1 << 20  # a worker's portion
PIECE_CHARS = 1 << 20  # a longer document is cut at line ends
PAUSES = (1, 2, 4, 8, 16, 32, 64)  # seconds before the network is tried again
COMMIT_SECONDS = 20  # what a kill loses at most
# of a test directory of the standard library no file is used
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
SPLITS = ('train', 'val')


def data_folder(config):
    """The folder of a config's bins."""
    if config['data_dir']:
        return Path(config['data_dir'])
    name = config['dataset']
    if re.search(r'[^\w:.-]', name):  # files: the last one's name, and a digest of the whole
        name = f'{name.split("/")[-1]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}'
    kind = 'ids'
    if config['num_hashes']:
        kind = f'H{config["num_hashes"]}B{config["num_buckets"]}'
        kind += f'lsh{config["num_lsh"]}' * (config['num_lsh'] > 0) + 'single' * config['single_id']
    return Path('data') / '_'.join(
        [re.sub(r'[^\w.-]+', '-', name), Path(config['tokenizer']).name.removesuffix('.model'), kind]
    )


def mixture(dataset):
    """'a@2e9,b@1e9' -> [('a', 2000000000), ('b', 1000000000)]; without any @ one source without a limit."""
    if not re.search(r'@[^/,]*(,|$)', dataset) or os.path.isfile(dataset):
        return [(dataset, None)]
    sources = []
    for item in dataset.split(','):
        name, _, tokens = item.rpartition('@')
        try:
            count = float(tokens)
        except ValueError:
            count = 0
        if not name or not 1 <= count < 1e15:
            raise InputError(
                f"dataset '{item}': every source of a mixture ends with @ and its number of tokens, like @2e9"
            )
        sources.append((name, int(count)))
    return sources


# -----------------------------------------------------------------------------
# reading


class Source:
    """
    The documents of one data set, file by file in a fixed order. `bar`, if there is one, is moved by the bytes that were read
    of local files, of which there are `total` (None where that is not known).
    """

    def __init__(self, dataset, part=(0, 1), skip_errors=False):
        self.skip_errors, self.bar, self.total = skip_errors, None, None
        self.replaced = 0  # bytes that were not UTF-8
        kind, _, name = dataset.partition(':')
        if dataset == 'stdlib':
            root = Path(sysconfig.get_paths()['stdlib'])
            paths = sorted(p for p in root.rglob('*.py') if not NOT_STDLIB & set(p.relative_to(root).parts))
            self.made_from = {'python': platform.python_version()}
        elif kind in HUB:
            hub_id, known, default = HUB[kind]
            name = name or default
            if known and name not in known:
                raise InputError(
                    f"unknown subset '{name}' of {kind}{did_you_mean(name, known)} (known: {', '.join(known)})"
                )
            if not name:
                raise InputError(f"dataset '{dataset}': which language? For example {kind}:arb_Arab")
            paths = hub_files(hub_id, name)
            self.made_from = {'hub': hub_id, 'name': name}
        else:
            paths = []
            for pattern in dataset.split(','):
                found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
                found = sorted(filter(os.path.isfile, found))
                if not found:
                    hint = did_you_mean(dataset, ['stdlib', *(f'{k}:{n}' for k in HUB for n in HUB[k][1] or ())])
                    raise InputError(f"dataset '{pattern}': no such file, glob or data set{hint}")
                paths += map(Path, found)
            for path in paths:
                if self._suffix(path) not in TEXT_SUFFIXES:
                    raise InputError(f'{path}: expected {" ".join(TEXT_SUFFIXES)}, the first two also .gz .xz .zst')
            self.made_from = {}
        if kind not in HUB:
            self.total = sum(p.stat().st_size for p in paths[part[0] :: part[1]])
        described = [[str(p), p.stat().st_size] if isinstance(p, Path) else p for p in paths]
        if dataset == 'stdlib':
            described = [[str(Path(p).relative_to(root)), size] for p, size in described]
        listed = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        self.made_from |= dict(dataset=dataset, number_of_files=len(paths), files_sha256=listed)
        if len(paths) < part[1]:
            raise InputError(
                f"part={part[0]}/{part[1]}: '{dataset}' has {len(paths)} file(s), of which every part reads its own"
            )
        self.files = paths[part[0] :: part[1]]

    @staticmethod
    def _suffix(path):
        suffixes = path.suffixes[-2:]
        packed = suffixes and suffixes[-1] in ('.gz', '.xz', '.zst')
        if packed and suffixes[0] == '.parquet':
            raise InputError(f'{path}: parquet files are compressed inside; unpack this one first')
        return suffixes[0] if packed else (suffixes or [''])[-1]

    def read(self, file, skip=0):
        """The rows of a file from number `skip` on: (text, {what was wrong with it: how much})."""
        path, n = self.files[file], skip
        remote = not isinstance(path, Path)
        rows = retried(lambda begin: self._parquet(path, begin), skip) if remote else self._local(path, skip)
        try:
            for row in rows:
                yield row
                n += 1
        except InputError:
            raise
        except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error, _zst_error()) as e:
            reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
            if remote and not isinstance(e, ValueError):
                raise InputError(f'{path}, row {n + 1}: the network does not give it {reason}') from None
            if not self.skip_errors:
                raise InputError(
                    f'{path}, row {n + 1} cannot be read {reason}; is it truncated? --on_error=skip goes on behind it'
                ) from None
            yield '', dict(unreadable=1)

    def _local(self, path, skip):
        if path.suffix == '.parquet':
            yield from self._parquet(path, skip)
            self._moved(path.stat().st_size)
            return
        seen = 0
        with open(path, 'rb') as raw:
            unpack = {'.gz': gzip.open, '.xz': lzma.open, '.zst': _open_zst}.get(path.suffix, lambda f: f)
            lines = io.TextIOWrapper(unpack(raw), encoding='utf-8-sig', errors=self._replace(), newline='\n')
            replaced = self.replaced
            for n, (text, wrong) in enumerate(
                self._json(path, lines) if self._suffix(path) == '.jsonl' else ((t, {}) for t in _pieces(lines))
            ):
                if self.replaced > replaced:
                    wrong = wrong | dict(invalid_utf8_bytes=self.replaced - replaced)
                    replaced = self.replaced
                if n >= skip:
                    yield text, wrong
                seen, before = raw.tell(), seen
                self._moved(seen - before)

    def _moved(self, size):
        if self.bar is not None:
            self.bar.update(size)

    def passed(self, files):
        """Moves the bar over the first `files` files, which were read before."""
        self._moved(sum(p.stat().st_size for p in self.files[:files] if isinstance(p, Path)))

    def _replace(self):
        def count(error):
            self.replaced += error.end - error.start
            return '\ufffd', error.end

        codecs.register_error('count_and_replace', count)
        return 'count_and_replace'

    def _json(self, path, lines):
        for n, line in enumerate(lines, 1):
            if not line.strip():
                yield '', {}
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                if not self.skip_errors:
                    raise InputError(f'{path}, line {n}: not JSON ({e}); --on_error=skip goes on behind it') from None
                yield '', dict(unreadable=1)
                continue
            there = list(row) if isinstance(row, dict) else [type(row).__name__]
            if 'text' not in there:
                raise InputError(f"{path}, line {n}: no field 'text'; there are: {', '.join(there)}")
            yield _text_of(row['text'], f'{path}, line {n}')

    def _parquet(self, path, skip):
        """Only the columns that are needed, a batch ahead of its use, from the row group of row `skip` on."""
        import pyarrow
        from fsspec.core import url_to_fs
        from pyarrow import parquet

        system, name = url_to_fs(str(path))
        with system.open(name, 'rb') as f:
            try:
                file = parquet.ParquetFile(f, buffer_size=1 << 22)
                if 'text' not in file.schema_arrow.names:
                    raise InputError(f"{path}: no field 'text'; there are: {', '.join(file.schema_arrow.names)}")
                group = 0
                while group < file.num_row_groups and skip >= file.metadata.row_group(group).num_rows:
                    skip -= file.metadata.row_group(group).num_rows
                    group += 1
                groups = range(group, file.num_row_groups)
                for batch in ahead(file.iter_batches(256, row_groups=groups, columns=['text'])):
                    for text in batch['text'][skip:].to_pylist():
                        yield _text_of(text, path)
                    skip = max(0, skip - len(batch))
            except pyarrow.ArrowException as e:
                raise ValueError(f'damaged parquet: {e}') from None


def _text_of(value, where):
    if not isinstance(value, (str, type(None))):
        raise InputError(f"{where}: field 'text' is {type(value).__name__}, expected a string")
    return value or '', {}


def hub_files(hub_id, name):
    """URLs of the parquet files of a configuration of a data set on the hub, in its order, at one commit."""
    import datasets
    import huggingface_hub

    huggingface_hub.logging.set_verbosity(logging.CRITICAL)  # our one line says it all
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        files = datasets.load_dataset_builder(hub_id, name).config.data_files
        return [str(f) for f in files['train']]
    except Exception as e:  # no network, no such configuration: their own words say which
        reason = f'{type(e).__name__}: {" ".join(str(e).split())[:200]}'
        raise InputError(f"dataset '{hub_id}', {name}, cannot be read ({reason})") from None


def retried(read, skip):
    """Rows of read(skip); where the network fails, begins again behind the last one, after growing pauses."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error = HfHubHTTPError.__bases__[0]  # of the client that this version of the hub uses
    failures = 0
    while True:
        try:
            for row in read(skip):
                yield row
                skip += 1
                failures = 0
            return
        except (OSError, http_error) as e:
            if failures == len(PAUSES):
                raise OSError(f'{type(e).__name__}: {e}; tried {failures + 1} times') from None
            time.sleep(PAUSES[failures])
            failures += 1


def ahead(iterable):
    """The same items, each made in a thread while the one before is used."""
    iterator, end = iter(iterable), object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, iterator, end)
            yield item


def _open_zst(raw):
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)


def _zst_error():
    import zstandard

    return zstandard.ZstdError


def _pieces(file):
    while text := file.read(PIECE_CHARS):
        yield text + file.readline(PIECE_CHARS)


def documents(source, file, row):
    """
    From a row of a file on: (file, row, pieces of its text, {what was wrong: how much}). Pieces are stripped, can be encoded as
    UTF-8, and are one where the text is not over PIECE_CHARS; none where the document is dropped.
    """
    for f in range(file, len(source.files)):
        first = row if f == file else 0
        for n, (text, wrong) in enumerate(source.read(f, first), first):
            text = text.strip()
            try:
                text.encode()
            except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape
                wrong = wrong | dict(lone_surrogates=1)
                text = text.encode('utf-8', 'replace').decode()
            if not text and not wrong:
                wrong = dict(empty=1)
            if len(text) <= PIECE_CHARS:
                pieces = [text] if text else []
            else:
                pieces = list(filter(None, map(str.strip, _pieces(io.StringIO(text)))))
            yield f, n, pieces, wrong


# -----------------------------------------------------------------------------
# tokenising, in worker processes


def batches(source, state, val_fraction, val_bytes):
    """
    Batches of (text, held out?), each with the state behind it, from which this goes on with the next one. Held out is every
    k-th document, k = round(1/val_fraction), until val_bytes; of fewer than k documents, the tail of each.
    """
    k_th, state = round(1 / val_fraction), deepcopy(state)
    rows, first = documents(source, state['file'], state['row']), []
    if state['tails'] is None:
        size = found = 0
        for row in rows:
            first.append(row)
            size, found = size + sum(map(len, row[2])), found + len(row[2])
            if found >= k_th or size > 1 << 26:
                break
        state['tails'] = found < k_th and size <= 1 << 26
    batch, size = [], 0
    for file, row, texts, wrong in itertools.chain(first, rows):
        if state['piece'] == 0:
            for key, n in wrong.items():
                state['wrong'][key] = state['wrong'].get(key, 0) + n
        for k, text in enumerate(texts[state['piece'] :], state['piece'] + 1):
            state['documents'] += 1
            if state['tails']:
                cut = int(len(text) * (1 - val_fraction))
                cut = text.find('\n', cut) + 1 or cut  # at a line end where there is one
                batch += [(text[:cut].strip(), False), (text[cut:].strip(), True)]
            else:
                out = state['documents'] % k_th == 0 and state['held_out'] < val_bytes
                state['held_out'] += len(text.encode()) if out else 0
                batch.append((text, out))
            size += len(text)
            if size >= BATCH_CHARS and k < len(texts):
                state['file'], state['row'], state['piece'] = file, row, k
                yield batch, deepcopy(state)
                batch, size = [], 0
        state['file'], state['row'], state['piece'] = file, row + 1, 0
        if size >= BATCH_CHARS:
            yield batch, deepcopy(state)
            batch, size = [], 0
    state['file'], state['row'] = len(source.files), 0
    yield batch, state


def _start_worker(name):
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    _tokenizer = get_tokenizer(name)


def _tokenise(batch):
    """[(text, held out?)] -> per split: ids (uint32), and for each document its tokens and its bytes of text."""
    out = {}
    for key, wanted in (('train', False), ('val', True)):
        texts = [t for t, held in batch if held == wanted and t]
        ids = [np.array([_tokenizer.bos, *i], np.uint32) for i in _tokenizer.encode(texts)]
        lengths = np.array([len(i) for i in ids], np.int64)
        out[key] = np.concatenate(ids or [np.zeros(0, np.uint32)]), lengths, [len(t.encode()) for t in texts]
    return out


@contextlib.contextmanager
def workers(number, tokenizer):
    context = multiprocessing.get_context('spawn')  # no fork: pyarrow has threads
    pool = ProcessPoolExecutor(number, context, initializer=_start_worker, initargs=(tokenizer,))
    try:
        yield pool
    except BrokenProcessPool:
        raise InputError('a worker process was killed, perhaps for want of memory; use fewer --num_workers') from None
    finally:
        pool.shutdown(cancel_futures=True)


def tokenised(pool, most, batches):
    """(what _tokenise makes of a batch, the state behind it), in order, with at most `most` batches in memory."""
    waiting = deque()
    for batch, state in batches:
        waiting.append((pool.submit(_tokenise, batch), state))
        if len(waiting) >= most:
            future, state = waiting.popleft()
            yield future.result(), state
    for future, state in waiting:
        yield future.result(), state


# -----------------------------------------------------------------------------
# shards


class Shards:
    """
    Writes the rows (n, columns) of one split as .npy files of `size` rows, each beside its name until it is whole, fsynced and
    renamed. `state` is its part of meta.json. What was written behind the last commit is cut off when it is opened again.
    """

    HEADER = 128  # bytes; numpy pads it so

    def __init__(self, folder, name, columns, dtype, size, state):
        self.folder, self.name, self.columns, self.dtype, self.size = folder, name, columns, np.dtype(dtype), size
        self.state, self.file, self.rows = state, None, state['unfinished']
        for path in folder.glob(f'{name}_[0-9]*.bin*'):
            number = int(re.search(r'_(\d+)\.bin', path.name)[1])
            if number == len(state['shards']) and self.rows and path.suffix == '.bin':
                os.replace(path, self._unfinished())  # it was finished, but meta.json does not know yet
            elif number > len(state['shards']) or (number == len(state['shards']) and not self.rows):
                path.unlink()
        if self.rows:
            length = self.HEADER + self.rows * columns * self.dtype.itemsize
            if not self._unfinished().exists() or self._unfinished().stat().st_size < length:
                raise InputError(
                    f'{self._unfinished()} is missing or too short; delete {folder} and run prepare.py again'
                )
            self.file = open(self._unfinished(), 'r+b')
            self.file.truncate(length)
            self.digest = digest_of(self.file)
            self.file.seek(0, os.SEEK_END)

    def _path(self):
        return self.folder / f'{self.name}_{len(self.state["shards"]):06}.bin'

    def _unfinished(self):
        return self._path().with_suffix('.bin.tmp')

    def write(self, rows):
        rows = np.ascontiguousarray(rows, self.dtype)
        while len(rows):
            if self.file is None:
                self.file, self.rows, self.digest = open(self._unfinished(), 'wb'), 0, mmh3.mmh3_x64_128()
                self._header()
            now = rows[: self.size - self.rows]
            self.file.write(now)
            self.digest.update(now)
            self.rows += len(now)
            rows = rows[len(now) :]
            if self.rows == self.size:
                self.finish()

    def _header(self):
        header = io.BytesIO()
        shape = (self.rows, self.columns)
        np.lib.format.write_array_header_1_0(header, dict(descr=self.dtype.str, fortran_order=False, shape=shape))
        assert header.tell() == self.HEADER
        self.file.seek(0)
        self.file.write(header.getvalue())

    def sync(self):
        """Makes what was written so far last; returns how much there is of the shard at work."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        return self.rows if self.file else 0

    def finish(self):
        if self.file:
            self._header()
            self.sync()
            self.file.close()
            path = self._path()
            os.replace(self._unfinished(), path)
            self.state['shards'].append(dict(file=path.name, tokens=self.rows, digest=self.digest.digest().hex()))
            self.file = None


def digest_of(file):
    """MurmurHash3 of the rows of an open .npy file: it is damage that this detects, not malice."""
    digest = mmh3.mmh3_x64_128()
    file.seek(Shards.HEADER)
    while block := file.read(1 << 22):
        digest.update(block)
    return digest


def replace_json(path, content):
    """Atomically, and for good."""
    temporary = path.with_suffix('.tmp')
    with open(temporary, 'w') as f:
        f.write(json.dumps(content, indent=1))
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    if hasattr(os, 'O_DIRECTORY'):
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


# -----------------------------------------------------------------------------
# reading bins


class Bins:
    """The shards of one split as one array of rows, memory-mapped: len(), .columns, and [start:stop]."""

    def __init__(self, folder, split, columns):
        self.shards, self.digests, self.columns = [], [], columns
        for shard in split['shards']:
            path = folder / shard['file']
            try:
                rows = np.load(path, mmap_mode='r')
            except FileNotFoundError:
                raise InputError(f'{path} is missing; delete {folder} and run prepare.py again') from None
            except Exception as e:  # numpy's errors over a damaged header are many
                reason = ' '.join(str(e).split())[:200]
                raise InputError(
                    f'{path} is no whole bin ({reason}); delete {folder} and run prepare.py again'
                ) from None
            if rows.shape != (shard['tokens'], columns) or rows.dtype.kind != 'u':
                raise InputError(
                    f'{path} holds {rows.shape} {rows.dtype}, meta.json says {(shard["tokens"], columns)}: '
                    'not the bin that was prepared here'
                )
            self.shards.append(rows)
            self.digests.append((path, shard['digest']))
        self.ends = np.cumsum([len(s) for s in self.shards]).tolist()

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(len(self))
        parts, k = [], bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[k - 1] if k else 0
            parts.append(self.shards[k][start - begin : stop - begin])
            start, k = self.ends[k], k + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self.shards[0][:0]])

    def verify(self, which=slice(None)):
        """Reads the shards `which` through. Raises InputError at the first whose digest is not that of meta.json."""
        for path, digest in self.digests[which]:
            with open(path, 'rb') as f:
                if (got := digest_of(f).digest().hex()) != digest:
                    raise InputError(
                        f'{path} is damaged: its digest is {got}, meta.json says {digest}; prepare it again'
                    )


def meta_files(folder):
    """meta.json, or those of all parts in their order. Raises InputError where one is missing."""
    found = {}
    for path in folder.glob('meta*.json'):
        if part := re.fullmatch(r'meta_(\d+)of(\d+)\.json', path.name):
            found[int(part[2]), int(part[1])] = path
        elif path.name == 'meta.json':
            found[1, 0] = path
    number = max(found, default=(1, 0))[0]
    if number > 1 and (missing := [i for i in range(number) if (number, i) not in found]):
        raise InputError(f'{folder} lacks part {missing[0]}/{number}; prepare it with --part={missing[0]}/{number}')
    return [found.get((number, i), folder / 'meta.json') for i in range(number)]


_SHARD = dict(file=str, tokens=int, digest=str)
_SPLIT = dict(tokens=int, documents=int, bytes=int, shards=[_SHARD])
META = dict(  # what train.py reads of meta.json
    tokenizer=str,
    num_hashes=int,
    vocab_size=int,
    pad_id=int,
    gaps=[int],
    tokenizer_sha256=str,
    table_sha256=(str, type(None)),
    splits={p: _SPLIT for p in SPLITS},
)


def read_meta(folder):
    """What the meta.json of a finished folder, or those of its parts together, say. Raises InputError, and FileNotFoundError."""
    metas = []
    for path in meta_files(folder):
        try:
            metas.append(json.loads(path.read_text()))
        except FileNotFoundError:
            raise
        except (ValueError, OSError, RecursionError) as e:
            raise InputError(f'{path} is damaged ({e}); delete the folder and prepare it again') from None
        if wrong := wrong_type(metas[-1], dict(complete=bool), 'meta'):
            raise InputError(f'{path} is damaged ({wrong}); delete the folder and prepare it again')
        if not metas[-1]['complete']:
            raise InputError(f'{folder} is not finished; run prepare.py again with the same settings')
        if wrong := wrong_type(metas[-1], META, 'meta') or unlikely(metas[-1]):
            raise InputError(f'{path} is damaged ({wrong}); delete the folder and prepare it again')
    meta, *others = metas
    for other in others:
        for key in meta.keys() - {'part', 'splits', 'sources'}:
            if other.get(key) != meta[key]:
                raise InputError(f'the parts in {folder} differ: {key}={meta[key]} and {other.get(key)}')
        for p in SPLITS:
            for key in ('tokens', 'documents', 'bytes', 'shards'):
                meta['splits'][p][key] += other['splits'][p][key]
    for p in SPLITS:
        listed = json.dumps([s['digest'] for s in meta['splits'][p]['shards']])
        meta['splits'][p]['sha256'] = hashlib.sha256(listed.encode()).hexdigest()
    return meta


def unlikely(meta):
    """The first number or name in a meta.json that cannot be, or ''."""
    V, shards = meta['vocab_size'], [s for p in SPLITS for s in meta['splits'][p]['shards']]
    found = [f'vocab_size={V}'] * (not 0 < V < 2**32) + [f'num_hashes={meta["num_hashes"]}'] * (meta['num_hashes'] < 0)
    found += ['no table_sha256'] * (meta['num_hashes'] > 0 and meta['table_sha256'] is None)
    found += [f'id {i} of {V} tokens' for i in (meta['pad_id'], *meta['gaps']) if not 0 <= i < V]
    found += [f'a bin called {s["file"]}' for s in shards if Path(s['file']).name != s['file']]
    found += [f'{p} of no tokens' for p in SPLITS if meta['splits'][p]['tokens'] < 1]
    for p in SPLITS:
        if sum(s['tokens'] for s in meta['splits'][p]['shards']) != meta['splits'][p]['tokens']:
            found.append(f'splits.{p}.tokens={meta["splits"][p]["tokens"]}, not the sum of its shards')
    return next(iter(found), '')


def load_meta(config):
    """What there is to know of a config's data, checked against the config. Raises InputError."""
    folder = data_folder(config)
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        mine = declared('prepare.py')
        args = [a for a in sys.argv[1:] if not a.startswith('--') or a[2:].partition('=')[0] in mine]
        raise InputError(f'{folder} has no prepared data; make it with: python prepare.py {" ".join(args)}') from None
    keys = ['tokenizer']
    if meta.get('num_hashes') != 0:  # token ids fit every signature
        keys += ['num_hashes', 'num_buckets', 'num_lsh', 'single_id'] if config['num_hashes'] else ['num_hashes']
    for key in keys:
        if meta.get(key) != config[key]:
            raise InputError(
                f'the bins in {folder} were made with {key}={meta.get(key)}, the config has {key}={config[key]}; '
                'change the one or prepare the data again'
            )
    return meta


def open_bin(config, meta, split):
    """The rows of 'train' or 'val': (tokens, H) uint16, or (tokens, 1) ids. Raises InputError."""
    return Bins(data_folder(config), meta['splits'][split], meta['num_hashes'] or 1)


def load_table(config, meta):
    """The signature table (V, H) uint16 of prepared data, made here for token ids; None for Standard. Raises InputError."""
    if not config['num_hashes']:
        return None
    if not meta['num_hashes']:
        tok = get_tokenizer(config['tokenizer'])
        if tokenizer_fingerprint(tok) != meta['tokenizer_sha256']:
            raise InputError(
                f"{data_folder(config)} was made with another '{config['tokenizer']}' tokenizer than is here"
            )
        return table_of(config, tok)
    path = data_folder(config) / 'signatures.npy'
    try:
        table = np.load(path)
    except Exception as e:  # numpy's errors over a damaged header are many
        raise InputError(f'{path} cannot be read ({e}); delete {path.parent} and run prepare.py again') from None
    if fingerprint(table) != meta['table_sha256']:
        raise InputError(
            f'{path} has fingerprint {fingerprint(table)[:12]}, meta.json says {meta["table_sha256"][:12]}'
        )
    return table


def table_of(config, tok):
    settings = [config[k] for k in ('num_hashes', 'num_buckets', 'num_lsh')]
    return signature_table(tok.tokens, *settings, tok.pad, not config['single_id']) if settings[0] else None


# -----------------------------------------------------------------------------
# writing them


@contextlib.contextmanager
def locked(folder, name):
    """The folder, made if need be, with no other prepare.py at work on the same meta.json."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f'.{name}.lock', timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(f'another prepare.py is at work in {folder}') from None
    except OSError as e:
        raise InputError(f'{folder} cannot be written ({e})') from None
    try:
        yield
    except OSError as e:
        raise InputError(
            f'{folder} cannot be written ({e}); the shards that are whole are kept: the same command goes on from there'
        ) from None
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        if new and not any(folder.iterdir()):
            folder.rmdir()


def recipe_of(config):
    """The settings that decide what the bins hold."""
    keys = ['dataset', 'tokenizer', 'num_hashes', 'part', 'shard_tokens', 'val_fraction', 'val_bytes']
    return {k: config[k] for k in keys + ['num_buckets', 'num_lsh', 'single_id'] * (config['num_hashes'] > 0)}


def vocabulary_facts(tok, table):
    return dict(
        vocab_size=len(tok.tokens),
        pad_id=tok.pad,
        gaps=[i for i, w in enumerate(tok.tokens) if w is None],
        tokenizer_sha256=tokenizer_fingerprint(tok),
        table_sha256=None if table is None else fingerprint(table),
    )


def begun(path, recipe):
    """The meta.json that a run before this one left, or None. Raises InputError where it is of another recipe."""
    try:
        there = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as e:
        raise InputError(f'{path} is damaged ({e}); delete the folder and prepare it again') from None
    for key in recipe:
        if there.get(key) != recipe[key]:
            raise InputError(
                f'{path.parent} holds data with {key}={there.get(key)}, not {recipe[key]}; delete it, or choose another --data_dir'
            )
    return there


def save_table(folder, table):
    if table is not None:
        np.save(folder / f'signatures.{os.getpid()}.tmp.npy', table)
        os.replace(folder / f'signatures.{os.getpid()}.tmp.npy', folder / 'signatures.npy')


def at_start(source):
    return dict(source=source, file=0, row=0, piece=0, tails=None, documents=0, held_out=0, wrong={})


def prepare(config):
    """Reads, tokenises, signs and writes the part of the data set that config names."""
    try:
        i, n = map(int, (config['part'] or '0/1').split('/'))
    except ValueError:
        i, n = 0, 0
    if not 0 <= i < n:
        raise InputError(f"part='{config['part']}': must be like 0/4, the first of four, to 3/4")
    folder, columns = data_folder(config), config['num_hashes'] or 1
    path = folder / (f'meta_{i}of{n}.json' if config['part'] else 'meta.json')
    there = [p.name for p in folder.glob('meta*.json') if (p.name == 'meta.json') == bool(config['part'])]
    if there:
        raise InputError(
            f"{folder} holds {there[0]}, which does not go with part='{config['part']}'; choose another --data_dir"
        )
    recipe = recipe_of(config)
    meta = begun(path, recipe)
    if meta and meta['complete']:
        print(f'{folder} is prepared already; delete it to make it again')
        return
    tok = get_tokenizer(config['tokenizer'])
    table = table_of(config, tok)
    wanted = mixture(config['dataset'])
    sources = [Source(name, (i, n), config['on_error'] == 'skip') for name, _ in wanted]
    made_from = [s.made_from for s in sources]
    facts = vocabulary_facts(tok, table)
    with locked(folder, path.stem):
        meta = begun(path, recipe)
        for what, now in dict(made_from=made_from, **facts).items():
            if meta and meta[what] != now:
                raise InputError(
                    f'{folder} was begun with other data or another tokenizer: its {what} differs; delete it'
                )
        known = meta is not None
        meta = meta or recipe | facts | dict(
            complete=False,
            made_from=made_from,
            sources=[dict(dataset=name, wanted=w and w // n, tokens=0) for name, w in wanted],
            splits={p: dict(tokens=0, documents=0, bytes=0, shards=[], unfinished=0) for p in SPLITS},
            progress=at_start(0),
        )
        dtype = np.uint16 if table is not None or len(tok.tokens) <= 65536 else np.uint32
        names = {p: f'{p}_{i}of{n}' if config['part'] else p for p in SPLITS}
        shards = {
            p: Shards(folder, names[p], columns, dtype, config['shard_tokens'], meta['splits'][p]) for p in SPLITS
        }
        state, whole, committed = meta['progress'], True, time.monotonic()
        known_shards = sum(len(meta['splits'][p]['shards']) for p in SPLITS)

        def commit():
            for p in SPLITS:
                meta['splits'][p]['unfinished'] = shards[p].sync()
            meta['progress'] = state
            replace_json(path, meta)

        totals = [s.total for s in sources]
        measured = not (None in totals or any(entry['wanted'] for entry in meta['sources']))  # by what was read
        bar = tqdm(
            total=sum(totals) if measured else sum(entry['wanted'] or 0 for entry in meta['sources']) or None,
            initial=0 if measured else meta['splits']['train']['tokens'],
            unit='B' if measured else ' tokens',
            unit_scale=True,
            desc='prepare',
            delay=1,
            mininterval=0.2 if sys.stderr.isatty() else 20,
        )
        number = config['num_workers'] or os.cpu_count()
        try:
            with workers(number, config['tokenizer']) as pool:
                for at in range(state['source'], len(sources)):
                    source, entry = sources[at], meta['sources'][at]
                    if measured:
                        source.bar = bar
                        source.passed(state['file'])
                    feed = batches(source, state, config['val_fraction'], config['val_bytes'] // (n * len(sources)))
                    for result, behind in tokenised(pool, 3 * number, feed):
                        whole = False
                        if entry['wanted']:  # up to the document that reaches it
                            ids, lengths, sizes = result['train']
                            keep = 1 + int(np.searchsorted(lengths.cumsum(), entry['wanted'] - entry['tokens']))
                            result['train'] = ids[: lengths[:keep].sum()], lengths[:keep], sizes[:keep]
                        for p, (ids, lengths, sizes) in result.items():
                            shards[p].write(ids[:, None] if table is None else table[ids])
                            split = meta['splits'][p]
                            split['tokens'] += len(ids)
                            split['documents'] += len(lengths)
                            split['bytes'] += sum(sizes)
                        entry['tokens'] += len(result['train'][0])
                        entry['wrong'] = behind['wrong']
                        state, whole, known = behind, True, True
                        if measured:
                            bar.set_postfix_str(f'{meta["splits"]["train"]["tokens"]:,} tokens', refresh=False)
                        else:
                            bar.update(len(result['train'][0]))
                        if entry['wanted'] and entry['tokens'] >= entry['wanted']:
                            break
                        finished = sum(len(meta['splits'][p]['shards']) for p in SPLITS)
                        if finished > known_shards or time.monotonic() > committed + COMMIT_SECONDS:
                            commit()
                            known_shards, committed = finished, time.monotonic()
                    feed.close()
                    state = at_start(at + 1)
            for p in SPLITS:
                split = meta['splits'][p]
                if split['tokens'] < 2:
                    known = False
                    raise InputError(
                        f"dataset '{config['dataset']}' gave {split['tokens']} {p} tokens from {split['documents']} documents: "
                        'too little text'
                    )
            for p in SPLITS:
                shards[p].finish()
                del meta['splits'][p]['unfinished']
            save_table(folder, table)
            del meta['progress']
            meta['complete'], whole = True, False
            replace_json(path, meta)
        finally:
            if not meta['complete']:  # the error's line stands alone
                bar.leave, bar.disable = False, not sys.stderr.isatty()
            bar.close()
            if whole and known and not meta['complete']:  # stopped between two batches
                with contextlib.suppress(OSError):
                    commit()
            for s in shards.values():
                if s.file:
                    s.file.close()
            if meta['complete'] or not path.exists():
                leftovers = []
                if not meta['complete']:
                    leftovers += [folder.glob(f'{names[p]}_[0-9]*.bin*') for p in SPLITS] + [
                        folder.glob(f'{path.stem}.tmp')
                    ]
                for leftover in itertools.chain(*leftovers):
                    leftover.unlink()
    report(meta, folder)


def report(meta, folder):
    for entry in meta['sources']:
        wrong = ', '.join(f'{k.replace("_", " ")} {n:,}' for k, n in entry.get('wrong', {}).items())
        if len(meta['sources']) > 1:
            share = entry['tokens'] / max(1, meta['splits']['train']['tokens'])
            print(f'{entry["dataset"]}: {entry["tokens"]:,} of {entry["wanted"]:,} tokens, {share:.2%} of all')
        if wrong:
            print(f'{entry["dataset"]}: {wrong}')
    for p in SPLITS:
        s = meta['splits'][p]
        print(
            f'{p}: {s["tokens"]:,} tokens, {s["documents"]:,} documents, {s["bytes"]:,} bytes of text -> '
            f'{folder}/{s["shards"][0]["file"]}{" ..." if len(s["shards"]) > 1 else ""}'
        )


def main(config):
    for key in ('num_workers', 'num_hashes', 'val_bytes'):
        if config[key] < 0:
            raise InputError(f'{key}={config[key]}: must not be negative')
    if config['shard_tokens'] < 1:
        raise InputError(f'shard_tokens={config["shard_tokens"]}: must be 1 or more')
    if not 0 < config['val_fraction'] < 1:
        raise InputError(f'val_fraction={config["val_fraction"]}: must be between 0 and 1')
    if config['on_error'] not in ('stop', 'skip'):
        raise InputError(f"on_error='{config['on_error']}': must be stop or skip")
    prepare(config)


if __name__ == '__main__':
    try:
        main(config)
    except KeyboardInterrupt:
        print('interrupted; the same command goes on from here', file=sys.stderr)
        sys.exit(130)
