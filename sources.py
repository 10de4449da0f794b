"""
What text is read: local files, parquet files on the hub, the Python standard library, and mixtures of them.

    for batch, state_after in batches(Source('books/*.jsonl.xz'), ReadState(), val_fraction=0.005, val_bytes=4_000_000):
        for text, held_out in batch: ...

From any state_after on, `batches` gives what it would have given without an interruption. To add a data set on the hub,
name it in HUB; for another kind of data, list its files in local_files and read one in Source.read.
"""

import codecs
import glob
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import os
import re
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import zstandard

from bins import read_ahead
from configurator import InputError, did_you_mean

# name: (repository of parquet files with a field `text`, its subsets where they are few; the first is the default)
HUB = {
    'fineweb-edu': ('HuggingFaceFW/fineweb-edu', ['sample-10BT', 'sample-100BT', 'sample-350BT', 'default']),
    'fineweb-edu-dedup': ('HuggingFaceTB/smollm-corpus', ['fineweb-edu-dedup']),
    'fineweb-2': ('HuggingFaceFW/fineweb-2', []),
}
PIECE_CHARS = 1 << 20  # a longer document is cut at line ends
BATCH_CHARS = 8 << 20  # what the tokenizer's threads share at once
PAUSES = (1, 2, 4, 8, 16, 32, 64)  # seconds before the network is tried again
# directories of the standard library of which no file is read
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
UNPACK = {
    '.gz': gzip.open,
    '.xz': lzma.open,
    '.zst': lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}
UNREADABLE = (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
SKIP = 'prepare.py goes on after it with --on_error=skip'
# UTF-32's mark may begin with UTF-16's
MARKS = {b'\xff\xfe\0\0': 'UTF-32', b'\0\0\xfe\xff': 'UTF-32', b'\xff\xfe': 'UTF-16', b'\xfe\xff': 'UTF-16'}


def mixture(dataset):
    """'a@2e9,b@1e9' -> [('a', 2000000000), ('b', 1000000000)]; without any @, all of one source: [(dataset, None)]."""
    if not re.search(r'@[^/,]*(,|$)', dataset) or os.path.isfile(dataset):
        return [(dataset, None)]
    sources = []
    for item in dataset.split(','):
        found = re.fullmatch(r'(.+)@(\d+(\.\d+)?(e\+?\d+)?)', item)
        if not found or not 1 <= float(found[2]) < 1e15:
            raise InputError(f"dataset '{item}': each of a mixture ends with @ and its number of tokens, like @2e9")
        sources.append((found[1], int(float(found[2]))))
    return sources


class Source:
    """The rows of one data set, file by file in a fixed order; part=(i, n) has every n-th file. Raises InputError."""

    def __init__(self, dataset, part=(0, 1), skip_errors=False):
        self.skip_errors, self.invalid_bytes = skip_errors, 0
        self.moved = lambda size: None  # is told the bytes that were read
        name, _, subset = dataset.partition(':')
        self.on_hub = name in HUB
        files = hub_files(name, subset) if self.on_hub else local_files(dataset)
        described = files if self.on_hub else [[p.name, p.stat().st_size] for p in files]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        self.made_from = dict(dataset=dataset, number_of_files=len(files), files_sha256=digest)
        i, n = part
        if len(files) < n:
            raise InputError(f"part={i}/{n}: '{dataset}' has {len(files)} file(s), of which every part reads its own")
        self.files = files[i::n]
        self.size = None if self.on_hub else sum(p.stat().st_size for p in self.files)

    def read(self, file, skip=0):
        """(text, {what was wrong: how often}) of the rows of a file from number `skip` on. Raises one of UNREADABLE."""
        path = self.files[file]
        if self.on_hub:
            yield from retried(path, skip)
        elif path.suffix == '.parquet':
            yield from parquet_rows(path, skip)
            self.moved(path.stat().st_size)
        else:
            yield from itertools.islice(self._text_rows(path), skip, None)

    def _text_rows(self, path):
        """The lines of a .jsonl, or the pieces of any other text, unpacked."""
        seen, counted, self.invalid_bytes = 0, 0, 0
        with open(path, 'rb', buffering=0) as raw:
            file = io.BufferedReader(UNPACK.get(path.suffix, lambda raw: raw)(raw), 1 << 16)
            for mark, encoding in MARKS.items():
                if file.peek(4).startswith(mark):
                    raise UnicodeError(f'it seems to be {encoding}, by its byte order mark; convert it to UTF-8')
            codecs.register_error('count_and_replace', self._count_and_replace)
            lines = io.TextIOWrapper(file, encoding='utf-8-sig', errors='count_and_replace', newline='\n')
            is_json = '.jsonl' in path.suffixes[-2:]
            for text, wrong in self._json_rows(path, lines) if is_json else ((text, {}) for text in pieces(lines)):
                if self.invalid_bytes > counted:
                    wrong = wrong | dict(invalid_utf8_bytes=self.invalid_bytes - counted)
                    counted = self.invalid_bytes
                    # of packed text, what was read so far
                    size = max(path.stat().st_size, file.tell())
                    if counted > size / 10 and not self.skip_errors:
                        raise UnicodeError(f'{counted:,} or more of its {size:,} bytes are not UTF-8; convert it')
                yield text, wrong
                seen, seen_before = raw.tell(), seen
                self.moved(seen - seen_before)

    def _count_and_replace(self, error):
        self.invalid_bytes += error.end - error.start
        return '\ufffd', error.end

    def _json_rows(self, path, lines):
        for n, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else dict(text='')
            except (ValueError, RecursionError) as e:
                if not self.skip_errors:
                    raise InputError(f'{path}, line {n}: not JSON ({e}); {SKIP}') from None
                yield '', dict(unreadable=1)
                continue
            fields = row if isinstance(row, dict) else [type(row).__name__]
            if 'text' not in fields:
                raise InputError(f"{path}, line {n}: no field 'text'; there are: {', '.join(fields)}")
            yield row['text'], {}


def parquet_rows(path, skip):
    """Of a path or URL, only the texts, a batch ahead of its use, from the row group of row `skip` on."""
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
            for batch in read_ahead(file.iter_batches(256, row_groups=groups, columns=['text'])):
                for text in batch['text'][skip:].to_pylist():
                    yield text, {}
                skip = max(0, skip - len(batch))
        except pyarrow.ArrowException as e:
            raise ValueError(f'damaged parquet: {e}') from None


def pieces(file):
    while text := file.read(PIECE_CHARS):
        yield text + file.readline(PIECE_CHARS)


def local_files(dataset):
    """The paths of files and globs, separated by commas, or of the standard library; those of a glob are sorted."""
    if dataset == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        return sorted(p for p in root.rglob('*.py') if not NOT_STDLIB & set(p.relative_to(root).parts))
    files = []
    for pattern in dataset.split(','):
        found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        found = sorted(map(Path, filter(os.path.isfile, found)))
        if not found:
            names = ['stdlib', *(f'{name}:{subset}' for name, (_, subsets) in HUB.items() for subset in subsets)]
            raise InputError(f"dataset '{pattern}': no such file, glob or data set{did_you_mean(dataset, names)}")
        files += found
    for path in files:
        if not re.search(r'\.(parquet|(txt|jsonl)(\.(gz|xz|zst))?)$', path.name):
            raise InputError(f'{path}: expected .txt or .jsonl, also .gz .xz .zst, or .parquet, unpacked')
    return files


def hub_files(name, subset):
    """URLs of the parquet files of a subset of one of HUB, in its order, at one commit."""
    import datasets
    import huggingface_hub

    repository, subsets = HUB[name]
    if not subset and not subsets:
        raise InputError(f"dataset '{name}': which language? For example {name}:arb_Arab")
    subset = subset or subsets[0]
    if subsets and subset not in subsets:
        raise InputError(f"unknown subset '{subset}' of {name}{did_you_mean(subset, subsets)} (known: {subsets})")
    # our one line says it all
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity(logging.CRITICAL)
    try:
        return [str(f) for f in datasets.load_dataset_builder(repository, subset).config.data_files['train']]
    # no network, no such subset: their own words say which
    except Exception as e:
        raise InputError(f'{repository}, {subset}, cannot be read ({type(e).__name__}: {e!s:.200})') from None


def retried(path, skip):
    """parquet_rows of what is on the hub; where the network fails, goes on after the last row, after growing pauses."""
    from huggingface_hub.errors import HTTPError

    failures = 0
    while True:
        try:
            for row in parquet_rows(path, skip):
                yield row
                skip += 1
                failures = 0
            return
        except (OSError, HTTPError) as e:
            if failures == len(PAUSES):
                raise OSError(f'{type(e).__name__}: {e}; tried {failures + 1} times') from None
            time.sleep(PAUSES[failures])
            failures += 1


@dataclass(frozen=True)
class ReadState:
    """Where reading goes on, and all that decides what comes then. meta.json keeps it as `progress`."""

    source: int = 0  # of a mixture; the rest is of this source
    file: int = 0
    row: int = 0
    piece: int = 0  # of the row's document
    documents: int = 0  # that were read; the pieces of a long one count each
    held_out: int = 0  # bytes of them
    tails: bool | None = None  # are the documents few, and the tail of each is held out? None: not known yet
    wrong: dict = field(default_factory=dict)  # what was wrong: how often


def documents(source, file=0, row=0, piece=0):
    """
    (text, {what was wrong: how often}, (file, row, piece) after it) from a piece of a row of a file on. A text is
    stripped, can be encoded as UTF-8, and '' where it is dropped; a longer one than PIECE_CHARS comes in pieces.
    """
    for f in range(file, len(source.files)):
        path, n = source.files[f], row
        try:
            for text, wrong in source.read(f, row):
                n += 1
                if not isinstance(text, (str, type(None))):
                    raise InputError(f"{path}, row {n}: field 'text' is {type(text).__name__}, expected a string")
                text, wrong = stripped(text or '', wrong)
                texts = [text]
                if len(text) > PIECE_CHARS:
                    texts = list(filter(None, map(str.strip, pieces(io.StringIO(text)))))
                for k in range(piece, len(texts)):
                    after = (f, n - 1, k + 1) if k + 1 < len(texts) else (f, n, 0)
                    yield texts[k], wrong if k == 0 else {}, after
                piece = 0
        except InputError:
            raise
        except UNREADABLE as e:
            reason = f'({type(e).__name__}: {e!s:.200})'
            if source.on_hub and not isinstance(e, ValueError):
                raise InputError(f'{path}, row {n + 1}: the network does not give it {reason}') from None
            if not source.skip_errors:
                raise InputError(f'{path}, row {n + 1} cannot be read {reason}; {SKIP}') from None
            yield '', dict(unreadable=1), (f + 1, 0, 0)
        row = 0


def stripped(text, wrong):
    """The text of a document, which can be encoded as UTF-8, and what was wrong with it."""
    text = text.strip()
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape
        return text.encode('utf-8', 'replace').decode(), wrong | dict(lone_surrogates=1)
    return text, wrong if text or wrong else dict(empty=1)


def batches(source, state, val_fraction, val_bytes):
    """
    Batches of (text, is it held out?), each with the ReadState after it. Every k-th document is held out,
    k = round(1 / val_fraction), until val_bytes are; of fewer than k documents, the tail of each. A batch may end
    within a long document, so that the tokenizer is not given one of 50 MB whole.
    """
    k = round(1 / val_fraction)
    rows, first = documents(source, state.file, state.row, state.piece), []
    if state.tails is None:
        number = size = 0
        while number < k and size <= 1 << 26 and (item := next(rows, None)):
            first.append(item)
            number, size = number + bool(item[0]), size + len(item[0])
        state = replace(state, tails=number < k and size <= 1 << 26)
    batch, size, documents_read, held_out = [], 0, state.documents, state.held_out
    for text, wrong, after in itertools.chain(first, rows):
        if wrong:
            state = replace(state, wrong=dict(Counter(state.wrong) + Counter(wrong)))
        if text and state.tails:
            cut = int(len(text) * (1 - val_fraction))
            # at a line end where there is one
            cut = text.find('\n', cut) + 1 or cut
            batch += [(text[:cut].strip(), False), (text[cut:].strip(), True)]
        elif text:
            documents_read += 1
            is_held_out = documents_read % k == 0 and held_out < val_bytes
            held_out += len(text.encode()) if is_held_out else 0
            batch.append((text, is_held_out))
        size += len(text)
        if size >= BATCH_CHARS:
            file, row, piece = after
            state = replace(state, file=file, row=row, piece=piece, documents=documents_read, held_out=held_out)
            yield batch, state
            batch, size = [], 0
    state = replace(state, file=len(source.files), row=0, piece=0)
    yield batch, state
