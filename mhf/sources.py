"""
Sources: the files of a data set, and the documents in them.

    for text in read_documents('books/*.jsonl.xz'): ...

A document is a .txt file, a line of a .jsonl file (its field `text`) or a row of a .parquet file (its column `text`).
Text is UTF-8; a byte order mark is dropped, and \\r\\n becomes \\n. A .txt is read into memory at once: put more text
than fits into a .jsonl. To add a data set on the hub, name it in HUB.
"""

import glob
import json
import lzma
import os
import re
import sysconfig
from pathlib import Path

from configurator import InputError, did_you_mean

# name: (repository of parquet files with a column `text`, its subsets). The first subset is the default; with an empty
# list the user names one.
HUB = {
    'fineweb-edu': ('HuggingFaceFW/fineweb-edu', ['sample-10BT', 'sample-100BT', 'sample-350BT', 'default']),
    'fineweb-edu-dedup': ('HuggingFaceTB/smollm-corpus', ['fineweb-edu-dedup']),
    'fineweb-2': ('HuggingFaceFW/fineweb-2', []),
}
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}  # skipped directories
FILE_TYPES = re.compile(r'.*\.(parquet|py|(txt|jsonl)(\.(gz|xz|zst))?)', re.DOTALL)
MAX_DOCUMENT_CHARS = 1 << 20  # a longer document is split at line ends
LOOKAHEAD_CHARS = 1 << 26  # of documents that are read to find out whether a source has only a few

# -----------------------------------------------------------------------------
# files


def is_on_hub(dataset):
    """Returns whether HUB contains a data set, such as 'fineweb-2:arb_Arab'."""
    return dataset.partition(':')[0] in HUB


def parse_mixture(dataset):
    """'a@2e9,b@1e9' -> [('a', 2000000000), ('b', 1000000000)]. Without any @: [(dataset, None)]. Raises InputError."""
    if not re.search(r'@[^/,]*(,|$)', dataset) or os.path.isfile(dataset):
        return [(dataset, None)]
    sources = []
    for item in dataset.split(','):
        match = re.fullmatch(r'(.+)@(\d+(\.\d+)?(e\+?\d+)?)', item)
        if not match or not 1 <= float(match[2]) < 1e15:
            raise InputError(f"dataset '{item}': end each part of a mixture with @ and its number of tokens, like @2e9")
        sources.append((match[1], int(float(match[2]))))
    return sources


def input_files(dataset):
    """
    Returns the paths of a data set's files in a fixed order, each file once. The data set is 'stdlib', a name of HUB
    with a subset, or files and globs separated by commas. The paths of a hub data set contain the commit. Raises
    InputError if a pattern matches no file, or a file has an unknown type.
    """
    if is_on_hub(dataset):
        return hub_files(dataset)
    if dataset == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        paths = [path for path in root.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(root).parts)]
        return [str(path) for path in sorted(paths)]
    files = {}
    for pattern in [dataset] if os.path.isfile(dataset) else dataset.split(','):
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        paths = sorted(Path(path) for path in paths if not os.path.isdir(path))
        if not paths:
            names = ['stdlib', *(f'{name}:{subset}' for name, (_, subsets) in HUB.items() for subset in subsets)]
            raise InputError(f"dataset '{pattern}': no such file, glob or data set{did_you_mean(dataset, names)}")
        for path in paths:
            files.setdefault(path.resolve(), str(path))  # a symbolic link does not add a second copy
    for path in files.values():
        if not os.path.exists(path):
            raise InputError(f'{path} is a broken link')
        if not FILE_TYPES.fullmatch(path):
            raise InputError(f'{path}: expected .txt or .jsonl, also .gz .xz .zst, or .parquet without compression')
    return list(files.values())


def hub_files(dataset):
    """Returns the addresses of a hub data set's files at its current commit. Raises InputError."""
    name, _, subset = dataset.partition(':')
    repository, subsets = HUB[name]
    if not subset and not subsets:
        raise InputError(f"dataset '{name}' has no default subset; name a language, such as {name}:arb_Arab")
    subset = subset or subsets[0]
    if subsets and subset not in subsets:
        raise InputError(f"unknown subset '{subset}' of {name}{did_you_mean(subset, subsets)} (known: {subsets})")
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity_error()  # the InputError contains the reason
    try:
        builder = datasets.load_dataset_builder(repository, name=subset)
        return [str(file) for file in builder.config.data_files['train']]
    except Exception as e:  # no network, no such subset
        raise InputError(f'{repository}, {subset}, cannot be read ({one_line(e)})') from None


def file_size(path):
    """Returns the size in bytes of a file of input_files."""
    if not path.startswith('hf://'):
        return os.path.getsize(path)
    import huggingface_hub

    return huggingface_hub.HfFileSystem().info(path)['size']


# -----------------------------------------------------------------------------
# documents


def read_documents(dataset):
    """Yields the documents of a data set, as read_files does."""
    return read_files(input_files(dataset))


def read_files(paths):
    """Yields the documents of files, stripped and not empty; long ones in pieces. Raises InputError."""
    for path in paths:
        for text in read_file(path):
            for piece in split_long_text(text):
                if piece := piece.strip():
                    yield piece


def read_file(path):
    """Yields the text of each document of a file, '' if it has none. Raises InputError."""
    row = 1
    try:
        for text in read_parquet(path) if path.endswith('.parquet') else read_text(path):
            if not isinstance(text, str | None):
                raise InputError(f"'text' is {type(text).__name__}, expected a string")
            yield text or ''
            row += 1
    except Exception as e:  # the libraries for decompression, parquet and the hub have errors of their own
        reason = str(e) if isinstance(e, InputError) else f'cannot be read ({one_line(e)})'
        if isinstance(e, UnicodeError):
            reason += '; convert it to UTF-8'
        if path.startswith('hf://'):
            reason += '; rerun the same command to resume'
        raise InputError(f'{path}, row {row:,}: {reason}') from None


class XzFile(lzma.LZMAFile):
    """An .xz file of any number of streams. Raises LZMAError for other bytes after one, which LZMAFile ignores."""

    def __init__(self, file, **_):
        super().__init__(file)
        self._buffer.raw._trailing_error = ()


def read_text(path):
    """Yields the field `text` of each line of a .jsonl file; any other text file is one document."""
    import pyarrow
    from fsspec.compression import register_compression
    from fsspec.implementations.local import LocalFileSystem

    # fsspec's own readers do not notice a missing end of .zst, or a damaged stream in an .xz
    register_compression('xz', XzFile, 'xz', force=True)
    register_compression('zstd', lambda f, **_: pyarrow.CompressedInputStream(f, 'zstd'), 'zst', force=True)
    with LocalFileSystem().open(path, 'rt', encoding='utf-8-sig', compression='infer') as file:
        if not re.search(r'\.jsonl(\.\w+)?$', path):
            yield file.read()
            return
        for line in file:
            yield parse_line(line)


def parse_line(line):
    """Returns the field `text` of a line of a .jsonl file, None if the line is empty."""
    line = line.strip().removeprefix('\ufeff')  # a byte order mark, if files were joined
    if not line:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError(f'not JSON ({e})') from None
    fields = row if isinstance(row, dict) else [type(row).__name__]
    if 'text' not in fields:
        raise InputError(f"no field 'text'; the fields are: {', '.join(fields)}")
    text = row['text']
    # half of a surrogate pair becomes a question mark
    return text.encode('utf-8', 'replace').decode() if isinstance(text, str) else text


def read_parquet(path):
    """Yields the column `text` of a local .parquet file or of one on the hub."""
    import pyarrow.parquet
    from datasets.utils.file_utils import xopen

    # xopen retries when the network fails
    with xopen(path, 'rb') if path.startswith('hf://') else open(path, 'rb') as file:
        table = pyarrow.parquet.ParquetFile(file)
        if 'text' not in table.schema_arrow.names:
            raise InputError(f"no column 'text'; the columns are: {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=1000, columns=['text']):
            yield from batch['text'].to_pylist()


def split_long_text(text):
    """Yields a text, or the pieces of a long one, split at line ends."""
    start = 0
    while start < len(text):
        longest = start + 2 * MAX_DOCUMENT_CHARS
        end = text.find('\n', start + MAX_DOCUMENT_CHARS, longest) + 1 or longest
        yield text[start:end]
        start = end


def one_line(error):
    """Returns an exception's type and message, shortened."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'


# -----------------------------------------------------------------------------
# held-out text


def start_counts(texts, val_fraction):
    """
    Returns the initial counts of split_holdout: documents, and bytes of held-out text. `few` is whether the first
    LOOKAHEAD_CHARS characters of a source, whose documents are `texts`, contain fewer than 1 / val_fraction documents.
    """
    every = round(1 / val_fraction)
    chars = 0
    documents = 0
    for text in texts:
        chars += len(text)
        documents += 1
        if documents == every or chars > LOOKAHEAD_CHARS:
            break
    return dict(documents=0, held_out=0, few=documents < every)


def split_holdout(texts, val_fraction, val_bytes, counts):
    """
    Yields the parts of each document of a source: [(text, is_held_out)]. Every round(1 / val_fraction)-th document is
    held out, up to val_bytes; if counts['few'], the tail of each document is. Updates `counts`, from start_counts or
    from an earlier call.
    """
    every = round(1 / val_fraction)
    for text in texts:
        counts['documents'] += 1
        parts = [(text, counts['documents'] % every == 0 and counts['held_out'] < val_bytes)]
        if counts['few']:
            cut = int(len(text) * (1 - val_fraction))
            cut = text.find('\n', cut) + 1 or cut  # at a line end if there is one
            parts = [(text[:cut].strip(), False), (text[cut:].strip(), True)]
        counts['held_out'] += sum(len(part.encode()) for part, is_held_out in parts if is_held_out)
        yield [(part, is_held_out) for part, is_held_out in parts if part]
