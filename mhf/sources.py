"""
What text is read: local files, parquet files on the hub, the Python standard library, and mixtures of them. The library
`datasets` reads all of it, in streaming mode.

    for text, progress in documents(Source('books/*.txt')): ...
    for batch, progress in batches(Source('books/*.jsonl.xz'), START, val_fraction=0.005, val_bytes=4_000_000):
        for text, held_out in batch: ...

A document is a .txt file, a line of a .jsonl file (its field `text`) or a row of a .parquet file (its column `text`).
Text is UTF-8; a byte order mark at the beginning of a file is dropped, and \\r\\n in a .txt becomes \\n. A .txt is read
whole: text that does not fit into memory belongs into a .jsonl.

A progress says how far the reading is; it is a dict that JSON can hold. Begun again from it, both functions give what
they would have given without the interruption. To add a data set on the hub, name it in HUB.
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

# name: (repository of parquet files with a column `text`, its subsets). The first subset is the default; no subsets are
# listed where they are many
HUB = {
    'fineweb-edu': ('HuggingFaceFW/fineweb-edu', ['sample-10BT', 'sample-100BT', 'sample-350BT', 'default']),
    'fineweb-edu-dedup': ('HuggingFaceTB/smollm-corpus', ['fineweb-edu-dedup']),
    'fineweb-2': ('HuggingFaceFW/fineweb-2', []),
}
# What load_dataset is told of each file type. A .jsonl is read as lines of text, because the JSON reader of `datasets`
# demands that the other fields are the same in all files.
OPTIONS = dict(
    txt=dict(path='text', sample_by='document'),
    jsonl=dict(path='text', sample_by='line'),
    parquet=dict(path='parquet', columns=['text'], batch_size=1000),
)
# directories of the standard library that are not read
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
PIECE_CHARS = 1 << 20  # a longer document is cut at line ends
BATCH_CHARS = 4 << 20  # what the tokenizer's threads share at once
MOST_CHARS_TO_COUNT = 1 << 26  # of documents that are held in memory to see whether they are few

# the progress before anything is read
START = dict(
    source=0,  # number of the source in the mixture; all that follows is of this source
    rows=None,  # the state_dict of `datasets`
    pieces=0,  # pieces of the next row that were read already
    documents=0,  # documents that were read
    held_out=0,  # bytes of them that were held out
    few=None,  # are there so few documents that the tail of each is held out? None: not known yet
)


def mixture(dataset):
    """'a@2e9,b@1e9' -> [('a', 2000000000), ('b', 1000000000)]; without any @, all of one source: [(dataset, None)]."""
    if not re.search(r'@[^/,]*(,|$)', dataset) or os.path.isfile(dataset):
        return [(dataset, None)]
    sources = []
    for item in dataset.split(','):
        match = re.fullmatch(r'(.+)@(\d+(\.\d+)?(e\+?\d+)?)', item)
        if not match or not 1 <= float(match[2]) < 1e15:
            raise InputError(f"dataset '{item}': each of a mixture ends with @ and its number of tokens, like @2e9")
        name = match[1]
        tokens = int(float(match[2]))
        sources.append((name, tokens))
    return sources


class Source:
    """The rows of one data set, file by file in a fixed order; share=(i, n) has every n-th file from the i-th."""

    def __init__(self, dataset, share=(0, 1)):
        """Raises InputError where there is no such data set, or its first file cannot be read."""
        name, _, subset = dataset.partition(':')
        self.on_hub = name in HUB
        if self.on_hub:
            repository, subset = on_hub(name, subset)
            self.file_type = 'parquet'
            title = f'{repository}, {subset},'
            options = OPTIONS['parquet'] | dict(path=repository, name=subset)
        else:
            self.file_type, files = local_files(dataset)
            # opening looks into the first file
            title = files[0]
            # a name may have * or [ in it
            escaped = [glob.escape(os.path.abspath(path)) for path in files]
            options = OPTIONS[self.file_type] | dict(data_files=escaped)
        try:
            rows, addresses = opened(options)
        # no network, no such subset, a damaged file: the library's own words say which
        except Exception as e:
            raise InputError(f'{title} cannot be read ({type(e).__name__}: {e!s:.200})') from None
        if self.on_hub:
            files = addresses
            # an address names the commit
            described = addresses
        else:
            described = [[path.name, path.stat().st_size] for path in files]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        self.made_from = dict(dataset=dataset, number_of_files=len(files), files_sha256=digest)
        i, n = share
        if len(files) < n:
            raise InputError(f"part={i}/{n}: '{dataset}' has {len(files)} file(s), of which every part reads its own")
        from datasets.distributed import split_dataset_by_node

        self.files = files[i::n]
        self.rows = split_dataset_by_node(rows, i, n, strategy='shards')

    def texts(self):
        """The text of every row, from where self.rows stands; '' for a row without text. Raises InputError."""
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

    def _text(self, value):
        """The text of a row, whose column `text` has this value: of a .jsonl file that is the whole line."""
        if isinstance(value, str):
            # a file may begin with a byte order mark
            value = value.removeprefix('\ufeff')
        if self.file_type == 'jsonl' and value.strip():
            try:
                row = json.loads(value)
            except (ValueError, RecursionError) as e:
                raise self._bad_row(f'not JSON ({e})') from None
            fields = row if isinstance(row, dict) else [type(row).__name__]
            if 'text' not in fields:
                raise self._bad_row(f"no field 'text'; there are: {', '.join(fields)}")
            value = row['text']
        if not isinstance(value, (str, type(None))):
            raise self._bad_row(f"field 'text' is {type(value).__name__}, expected a string")
        if self.file_type == 'jsonl' and value:
            # half a surrogate pair becomes a question mark
            value = value.encode('utf-8', 'replace').decode()
        return value or ''

    def _bad_row(self, problem):
        file, row = self._position()
        return InputError(f'{file}, row {row:,}: {problem}')

    def _position(self):
        """(the file that is being read, how many of its rows were taken); `datasets` takes many of .parquet at once."""
        state = self.rows.state_dict()
        while 'shard_idx' not in state:
            state = state['examples_iterable']
        return self.files[state['shard_idx']], state['shard_example_idx']


def opened(options):
    """(the rows of load_dataset(**options, split='train', streaming=True), the addresses of their files)."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # an InputError's one line says it all
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity(logging.CRITICAL)
    # only locks go into the cache; in the user's they would stay
    with tempfile.TemporaryDirectory() as cache:
        builder = datasets.load_dataset_builder(cache_dir=cache, **options)
        rows = builder.as_streaming_dataset(split='train')
    return rows, [str(file) for file in builder.config.data_files['train']]


def on_hub(name, subset):
    """(repository, subset) of a data set in HUB, the first subset for ''. Raises InputError."""
    repository, subsets = HUB[name]
    if not subset and not subsets:
        raise InputError(f"dataset '{name}': which language? For example {name}:arb_Arab")
    subset = subset or subsets[0]
    if subsets and subset not in subsets:
        raise InputError(f"unknown subset '{subset}' of {name}{did_you_mean(subset, subsets)} (known: {subsets})")
    return repository, subset


def local_files(dataset):
    """
    (file type, paths) of files and globs, separated by commas, or of the standard library; the files of a glob are
    sorted. Raises InputError where a pattern matches no file, or the files are of several types.
    """
    if dataset == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        paths = [path for path in root.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(root).parts)]
        return 'txt', sorted(paths)
    files = []
    for pattern in dataset.split(','):
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        paths = sorted(Path(path) for path in paths if os.path.isfile(path))
        if not paths:
            names = ['stdlib', *(f'{name}:{subset}' for name, (_, subsets) in HUB.items() for subset in subsets)]
            raise InputError(f"dataset '{pattern}': no such file, glob or data set{did_you_mean(dataset, names)}")
        files += paths
    types = set()
    for path in files:
        ending = re.search(r'\.(parquet|(txt|jsonl)(\.(gz|xz|zst))?)$', path.name)
        if not ending:
            raise InputError(f'{path}: expected .txt or .jsonl, also .gz .xz .zst, or .parquet, unpacked')
        types.add(ending[2] or 'parquet')
    if len(types) > 1:
        several = ' and '.join(sorted(types))
        raise InputError(f"dataset '{dataset}' has {several} files; read each kind as a source of its own: a@1e9,b@1e9")
    return types.pop(), files


def pieces(text):
    """Yields a text as it is, or one longer than PIECE_CHARS in pieces that end at line ends; each is stripped."""
    start = 0
    while start < len(text):
        longest = start + 2 * PIECE_CHARS
        end = text.find('\n', start + PIECE_CHARS, longest) + 1 or longest
        yield text[start:end].strip()
        start = end


def documents(source, progress=START):
    """
    Yields (text, progress after it) for each document, or for each piece of a long one. A text is stripped and not
    empty.
    """
    # a progress names the row of its document by the state in front of that row
    before = progress['rows']
    pieces_read = progress['pieces']
    source.rows.load_state_dict(before)
    before = before or source.rows.state_dict()
    for text in source.texts():
        for k, piece in enumerate(pieces(text)):
            if piece and k >= pieces_read:
                yield piece, dict(rows=before, pieces=k + 1)
        before = source.rows.state_dict()
        pieces_read = 0


def divided(source, progress, val_fraction, val_bytes):
    """
    Yields each document as a list of (text, is it held out?), with the progress after it. With k = round(1 /
    val_fraction), every k-th document is held out until val_bytes are; of fewer than k documents, the tail of each.
    """
    k = round(1 / val_fraction)
    first = []  # documents that are read to see whether there are k
    rest = documents(source, progress)
    if progress['few'] is None:
        size = 0
        while len(first) < k and size <= MOST_CHARS_TO_COUNT and (item := next(rest, None)):
            first.append(item)
            size += len(item[0])
        progress = progress | dict(few=len(first) < k and size <= MOST_CHARS_TO_COUNT)
    for text, after in itertools.chain(first, rest):
        number = progress['documents'] + 1
        held_out = progress['held_out']
        if progress['few']:
            cut = int(len(text) * (1 - val_fraction))
            # at a line end where there is one
            cut = text.find('\n', cut) + 1 or cut
            parts = [(text[:cut].strip(), False), (text[cut:].strip(), True)]
        else:
            parts = [(text, number % k == 0 and held_out < val_bytes)]
        held_out += sum(len(excerpt.encode()) for excerpt, is_held_out in parts if is_held_out)
        progress = progress | after | dict(documents=number, held_out=held_out)
        yield [(excerpt, is_held_out) for excerpt, is_held_out in parts if excerpt], progress


def batches(source, progress, val_fraction, val_bytes):
    """
    Yields lists of (text, is it held out?) from many documents, for the tokenizer's threads to share, each list with
    the progress after it.
    """
    batch = []
    size = 0
    for parts, after in divided(source, progress, val_fraction, val_bytes):
        batch += parts
        size += sum(len(text) for text, _ in parts)
        if size >= BATCH_CHARS:
            yield batch, after
            batch = []
            size = 0
    if batch:
        yield batch, after
