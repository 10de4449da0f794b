"""
Sources: the files of a data set, and the documents in them.

    for text in read_files(input_files('books/*.jsonl.xz')): ...

A document is a .txt file, a line of a JSON lines file (.jsonl, .ndjson or .json; its field `text`) or a row of a
.parquet file (its column `text`). Text is UTF-8; a byte order mark is dropped, and \\r\\n in a .txt file becomes \\n. A
.txt file is read into memory at once, and separators in it, such as <|endoftext|>, are plain text: write one JSON line
per document instead. To add a data set of the Hugging Face hub, add a line to HUB.
"""

import glob
import gzip
import io
import itertools
import json
import lzma
import math
import os
import re
import sysconfig
from pathlib import Path

from configurator import did_you_mean
from mhf.errors import InputError

# name of a data set: 'OWNER/REPOSITORY/FOLDER' on the hub, or 'OWNER/REPOSITORY', with all .parquet files below it
HUB = {
    'fineweb-edu': 'HuggingFaceFW/fineweb-edu/sample/10BT',
    'fineweb-edu:sample-10BT': 'HuggingFaceFW/fineweb-edu/sample/10BT',
    'fineweb-edu:sample-100BT': 'HuggingFaceFW/fineweb-edu/sample/100BT',
    'fineweb-edu:sample-350BT': 'HuggingFaceFW/fineweb-edu/sample/350BT',
    'fineweb-edu:default': 'HuggingFaceFW/fineweb-edu/data',
    'fineweb-edu-dedup': 'HuggingFaceTB/smollm-corpus/fineweb-edu-dedup',
    'fineweb-2:LANGUAGE': 'HuggingFaceFW/fineweb-2/data/LANGUAGE/train',  # such as fineweb-2:arb_Arab
}
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}  # skipped directories
SUFFIXES = r'\.(parquet|py|(txt|jsonl|ndjson|json)(\.(gz|xz|zst))?)$'
MAX_DOCUMENT_CHARS = 1 << 20  # a longer document is split at line ends, or after twice as many characters

# -----------------------------------------------------------------------------
# files


def hub_folder(dataset):
    """Returns the folder on the hub of a data set such as 'fineweb-2:arb_Arab', '' if HUB does not contain it."""
    name, _, language = dataset.partition(':')
    template = HUB.get(f'{name}:LANGUAGE', '') if re.fullmatch(r'\w+', language) else ''
    return HUB.get(dataset, template.replace('LANGUAGE', language))


def are_on_hub(dataset, units):
    """Returns whether all files of a data set's units are in its folders on the hub."""
    folders = tuple(f'hf://datasets/{hub_folder(name)}/' for name in dataset.split(','))
    return all(re.sub('@[^/]+', '', path, count=1).startswith(folders) for unit in units for path, *_ in unit)


def parse_mixture(dataset):
    """
    Returns the sources of a mixture and their limits in training tokens: 'a@2e9,b' -> [('a', 2000000000), ('b', None)].
    Without any limit, all files are one source.
    """
    items = dataset.split(',')
    matches = [re.fullmatch(r'(.+)@([1-9]\d*(\.\d+)?(e\+?\d+)?)', item) for item in items]
    if not any(matches) or os.path.isfile(dataset):
        return [(dataset, None)]
    return [(m[1], int(float(m[2]))) if m else (item, None) for item, m in zip(items, matches, strict=True)]


def input_files(dataset):
    """
    Returns {path: size in bytes} of a data set's files in a fixed order, each file once. The data set is 'stdlib', a
    name of HUB, a file or a glob, or several of these separated by commas. Raises InputError.
    """
    files = {}
    for name in [dataset] if os.path.isfile(dataset) else dataset.split(','):
        folder = hub_folder(name)
        for path, size in (hub_files(folder) if folder else local_files(name)).items():
            files.setdefault(os.path.realpath(path), (path, size))
    return dict(files.values())


def local_files(name):
    """Returns {path: size in bytes} of 'stdlib', a file or a glob. Raises InputError."""
    if name == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        paths = [path for path in root.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(root).parts)]
    else:
        found = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
        paths = [Path(path) for path in found if os.path.isfile(path)]
    if not paths:
        raise InputError(f'{name}: no such file, glob or data set{did_you_mean(name, ["stdlib", *HUB])}')
    for path in paths:
        if not re.search(SUFFIXES, path.name, re.I):
            raise InputError(f'{path}: expected .parquet, or .txt, .jsonl, .ndjson, .json (also .gz, .xz, .zst)')
    return {str(path): os.path.getsize(path) for path in sorted(paths)}


def hub_files(folder):
    """Returns {address at the current commit: size in bytes} of the files of a folder of HUB."""
    import huggingface_hub

    owner, name, *path = folder.split('/', 2)
    repository = f'{owner}/{name}'
    hub = huggingface_hub.HfApi()
    commit = hub.dataset_info(repository).sha
    entries = hub.list_repo_tree(repository, *path, recursive=True, revision=commit, repo_type='dataset')
    sizes = {entry.path: entry.size for entry in entries if entry.path.endswith('.parquet')}  # folders have no size
    return {f'hf://datasets/{repository}@{commit}/{path}': sizes[path] for path in sorted(sizes)}


# -----------------------------------------------------------------------------
# documents


def read_files(paths, separate_ends=0.0, n=0, start=0):
    """
    Yields the documents of files, stripped and not empty; long ones in pieces. With separate_ends, every (n - 1)-th
    document is two, so the second is number n: the last separate_ends of the characters, if possible from a line end
    on. The first may be empty. Numbers continue from `start`. Raises InputError.
    """
    number = start % n if separate_ends else 0
    for path in paths:
        for text in map(str.strip, read_documents(path)):
            number += bool(text)
            if text and separate_ends and number % (n - 1) == 0:
                end = len(text) - math.ceil(len(text) * separate_ends)
                end = max(end, text.find('\n', end, (end + len(text)) // 2))
                yield text[:end].strip()
                yield text[end:].strip()
            elif text:
                yield text


def read_documents(path):
    """Yields the text of each document of a file, long ones in pieces. Raises InputError."""
    row = 1
    try:
        for text in read_parquet(path) if path.lower().endswith('.parquet') else read_text(path):
            yield from split_long_text(text or '')
            row += 1
    except Exception as e:  # the library of each format raises its own types, which do not name the file
        raise InputError(f'{path}, row {row:,}: cannot be read ({type(e).__name__}: {e!s:.300})') from None


def read_text(path):
    """Yields the field `text` of each line of a JSON lines file; any other text file is one document."""
    import pyarrow

    # each reader raises an error if the end of the compressed file is missing
    readers = {
        '.gz': gzip.open,
        '.xz': lzma.open,
        '.zst': lambda path: pyarrow.CompressedInputStream(open(path, 'rb'), 'zstd'),
    }
    file = readers.get(Path(path).suffix.lower(), lambda path: open(path, 'rb'))(path)
    with io.TextIOWrapper(file, encoding='utf-8-sig') as lines:
        if not re.search(r'\.(jsonl|ndjson|json)(\.\w+)?$', path, re.I):
            yield lines.read()
            return
        for line in lines:
            row = json.loads(line) if line.strip() else dict(text=None)
            text = row['text']
            # an unpaired surrogate becomes a question mark
            yield text.encode('utf-8', 'replace').decode() if isinstance(text, str) else text


def read_parquet(path):
    """Yields the column `text` of a local .parquet file or of one on the hub."""
    import huggingface_hub
    import pyarrow.parquet

    with huggingface_hub.HfFileSystem().open(path) if path.startswith('hf://') else open(path, 'rb') as file:
        table = pyarrow.parquet.ParquetFile(file)
        for batch in table.iter_batches(batch_size=1000, columns=['text']):
            yield from batch['text'].to_pylist()


def split_long_text(text):
    """Yields a text, or the pieces of a long one, split at line ends."""
    start = 0
    while start < len(text):
        max_end = start + 2 * MAX_DOCUMENT_CHARS
        end = text.find('\n', start + MAX_DOCUMENT_CHARS, max_end) + 1 or max_end
        yield text[start:end]
        start = end


# -----------------------------------------------------------------------------
# held-out text


def start_counts(paths, val_fraction):
    """
    Returns the counts before the first document of a source, and how it holds out text: every n-th document, n =
    round(1 / val_fraction). Of fewer than 3 n documents, the ends of three to five are held out, or of all if fewer
    exist. Then n is another number, and read_files makes each end an n-th document.
    """
    n = round(1 / val_fraction)
    found = sum(1 for _ in itertools.islice(read_files(paths), 3 * n))
    every = max(1, found // 3)
    few = dict(n=every + 1, separate_ends=every * val_fraction)
    return dict(documents=0, tokens=0, held_out_bytes=0) | (few if found < 3 * n else dict(n=n, separate_ends=0.0))


def is_held_out(counts, val_bytes):
    """Returns whether a document is held out, until val_bytes. counts: those of the source, with this document."""
    return counts['documents'] % counts['n'] == 0 and counts['held_out_bytes'] < val_bytes
