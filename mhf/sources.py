"""
What text is read, all of it by the library `datasets` in streaming mode: local files, parquet files on the hub, the
Python standard library, and mixtures of them.

    for text, progress in documents(Source('books/*.txt')): ...
    for batch, progress in batches(Source('books/*.jsonl.xz'), START, val_fraction=0.005, val_bytes=4_000_000):
        for text, held_out in batch: ...

A document is a .txt file, a line of a .jsonl file (its field `text`) or a row of a .parquet file (its column `text`).
Text is UTF-8; a byte order mark at the beginning of a file is dropped, and \\r\\n in a .txt becomes \\n. A .txt is read
whole: what does not fit into memory belongs into a .jsonl.

A progress is a dict that JSON can hold; from any of them on, both functions give what they would have given without an
interruption. To add a data set on the hub, name it in HUB.
"""

import glob
import hashlib
import itertools
import json
import logging
import os
import re
import sysconfig
import tempfile
from pathlib import Path

from configurator import InputError, did_you_mean

# name: (repository of parquet files with a column `text`, its subsets where they are few; the first is the default)
HUB = {
    'fineweb-edu': ('HuggingFaceFW/fineweb-edu', ['sample-10BT', 'sample-100BT', 'sample-350BT', 'default']),
    'fineweb-edu-dedup': ('HuggingFaceTB/smollm-corpus', ['fineweb-edu-dedup']),
    'fineweb-2': ('HuggingFaceFW/fineweb-2', []),
}
# what `datasets` is told of a kind of file; its own reader of JSON wants the same other fields in all files
OPTIONS = dict(
    txt=dict(path='text', sample_by='document'),
    jsonl=dict(path='text', sample_by='line'),
    parquet=dict(path='parquet', columns=['text'], batch_size=1000),
)
# directories of the standard library of which no file is read
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
PIECE_CHARS = 1 << 20  # a longer document is cut at line ends
BATCH_CHARS = 4 << 20  # what the tokenizer's threads share at once

# The progress before anything is read. `source` is the number of a mixture's source, the rest is of this source: `rows`
# is the state_dict of `datasets`, `pieces` counts those of the next row that were read, `documents` all of them, and
# `held_out` their held-out bytes; `few` says whether there are so few documents that the tail of each is held out.
START = dict(source=0, rows=None, pieces=0, documents=0, held_out=0, few=None)


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

    def __init__(self, dataset, part=(0, 1)):
        name, _, subset = dataset.partition(':')
        self.on_hub = name in HUB
        if self.on_hub:
            self.kind = 'parquet'
            repository, subset = on_hub(name, subset)
            where = f'{repository}, {subset},'
            what = OPTIONS['parquet'] | dict(path=repository, name=subset)
        else:
            self.kind, files = local_files(dataset)
            # the first is looked into when they are opened
            where = files[0]
            # a name may have * or [ in it
            what = OPTIONS[self.kind] | dict(data_files=[glob.escape(os.path.abspath(path)) for path in files])
        try:
            rows, addresses = opened(what)
        # no network, no such subset, a damaged file: the library's own words say which
        except Exception as e:
            raise InputError(f'{where} cannot be read ({type(e).__name__}: {e!s:.200})') from None
        if self.on_hub:
            # each names the commit
            files = described = addresses
        else:
            described = [[path.name, path.stat().st_size] for path in files]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        self.made_from = dict(dataset=dataset, number_of_files=len(files), files_sha256=digest)
        i, n = part
        if len(files) < n:
            raise InputError(f"part={i}/{n}: '{dataset}' has {len(files)} file(s), of which every part reads its own")
        from datasets.distributed import split_dataset_by_node

        self.files = files[i::n]
        self.rows = split_dataset_by_node(rows, i, n, strategy='shards')

    def texts(self):
        """The text of every row, from where self.rows stands; '' where there is none."""
        try:
            for row in self.rows:
                yield self._text(row['text'])
        except InputError:
            raise
        # what opening, unpacking, decoding and the network raise is of many kinds
        except Exception as e:
            file, row = self._position()
            after = f' after row {row:,}' if row else ''
            advice = ''
            if self.on_hub:
                advice = '; the same command goes on'
            elif isinstance(e, UnicodeError):
                advice = '; convert it to UTF-8'
            raise InputError(f'{file} cannot be read{after} ({type(e).__name__}: {e!s:.300}){advice}') from None

    def _text(self, found):
        """The text of what `datasets` found in a row: of a .jsonl file, a line."""
        if isinstance(found, str):
            # a file may begin with a byte order mark
            found = found.removeprefix('\ufeff')
        if self.kind == 'jsonl' and found.strip():
            try:
                row = json.loads(found)
            except (ValueError, RecursionError) as e:
                raise self._bad_row(f'not JSON ({e})') from None
            fields = row if isinstance(row, dict) else [type(row).__name__]
            if 'text' not in fields:
                raise self._bad_row(f"no field 'text'; there are: {', '.join(fields)}")
            found = row['text']
        if not isinstance(found, (str, type(None))):
            raise self._bad_row(f"field 'text' is {type(found).__name__}, expected a string")
        if self.kind == 'jsonl' and found:
            # half a surrogate pair becomes a question mark
            found = found.encode('utf-8', 'replace').decode()
        return found or ''

    def _bad_row(self, what):
        file, row = self._position()
        return InputError(f'{file}, row {row:,}: {what}')

    def _position(self):
        """The file that is being read, and how many of its rows are; of .parquet `datasets` takes many at once."""
        state = self.rows.state_dict()
        while 'shard_idx' not in state:
            state = state['examples_iterable']
        return self.files[state['shard_idx']], state['shard_example_idx']


def opened(what):
    """(rows, addresses of their files) of what load_dataset(**what, split='train', streaming=True) gives."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # our one line says it all
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity(logging.CRITICAL)
    # nothing goes there but locks, which would stay in the user's cache
    with tempfile.TemporaryDirectory() as cache:
        builder = datasets.load_dataset_builder(cache_dir=cache, **what)
        rows = builder.as_streaming_dataset(split='train')
    return rows, [str(file) for file in builder.config.data_files['train']]


def on_hub(name, subset):
    """(repository, subset) of one of HUB."""
    repository, subsets = HUB[name]
    if not subset and not subsets:
        raise InputError(f"dataset '{name}': which language? For example {name}:arb_Arab")
    subset = subset or subsets[0]
    if subsets and subset not in subsets:
        raise InputError(f"unknown subset '{subset}' of {name}{did_you_mean(subset, subsets)} (known: {subsets})")
    return repository, subset


def local_files(dataset):
    """(kind, paths) of files and globs, separated by commas, or of the standard library; those of a glob are sorted."""
    if dataset == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        return 'txt', sorted(p for p in root.rglob('*.py') if not NOT_STDLIB & set(p.relative_to(root).parts))
    files = []
    for pattern in dataset.split(','):
        found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        found = sorted(map(Path, filter(os.path.isfile, found)))
        if not found:
            names = ['stdlib', *(f'{name}:{subset}' for name, (_, subsets) in HUB.items() for subset in subsets)]
            raise InputError(f"dataset '{pattern}': no such file, glob or data set{did_you_mean(dataset, names)}")
        files += found
    kinds = set()
    for path in files:
        found = re.search(r'\.(parquet|(txt|jsonl)(\.(gz|xz|zst))?)$', path.name)
        if not found:
            raise InputError(f'{path}: expected .txt or .jsonl, also .gz .xz .zst, or .parquet, unpacked')
        kinds.add(found[2] or 'parquet')
    if len(kinds) > 1:
        several = ' and '.join(sorted(kinds))
        raise InputError(f"dataset '{dataset}' has {several} files; read each kind as a source of its own: a@1e9,b@1e9")
    return kinds.pop(), files


def pieces(text):
    """A text as it is, or a longer one than PIECE_CHARS in pieces that end at line ends, each stripped."""
    start = 0
    while start < len(text):
        end = text.find('\n', start + PIECE_CHARS, start + 2 * PIECE_CHARS) + 1 or start + 2 * PIECE_CHARS
        yield text[start:end].strip()
        start = end


def documents(source, progress=START):
    """(text, progress after it) of each document; of a long one, of each piece. A text is stripped and not empty."""
    before, read = progress['rows'], progress['pieces']
    source.rows.load_state_dict(before)
    before = before or source.rows.state_dict()
    for text in source.texts():
        for k, piece in enumerate(pieces(text)):
            if piece and k >= read:
                yield piece, dict(rows=before, pieces=k + 1)
        before, read = source.rows.state_dict(), 0


def divided(source, progress, val_fraction, val_bytes):
    """
    Each document as a list of (text, is it held out?), with the progress after it. Every k-th document is held out,
    k = round(1 / val_fraction), until val_bytes are; of fewer than k documents, the tail of each.
    """
    k = round(1 / val_fraction)
    found, first = documents(source, progress), []
    if progress['few'] is None:
        size = 0
        while len(first) < k and size <= 1 << 26 and (item := next(found, None)):
            first.append(item)
            size += len(item[0])
        progress = progress | dict(few=len(first) < k and size <= 1 << 26)
    for text, after in itertools.chain(first, found):
        number, held_out = progress['documents'] + 1, progress['held_out']
        if progress['few']:
            cut = int(len(text) * (1 - val_fraction))
            # at a line end where there is one
            cut = text.find('\n', cut) + 1 or cut
            parts = [(text[:cut].strip(), False), (text[cut:].strip(), True)]
        else:
            parts = [(text, number % k == 0 and held_out < val_bytes)]
        held_out += sum(len(part.encode()) for part, is_held_out in parts if is_held_out)
        progress = progress | after | dict(documents=number, held_out=held_out)
        yield [part for part in parts if part[0]], progress


def batches(source, progress, val_fraction, val_bytes):
    """What `divided` gives, in batches of documents for the tokenizer's threads, each with the progress after it."""
    batch, size = [], 0
    for parts, after in divided(source, progress, val_fraction, val_bytes):
        batch += parts
        size += sum(len(text) for text, _ in parts)
        if size >= BATCH_CHARS:
            yield batch, after
            batch, size = [], 0
    if batch:
        yield batch, after
