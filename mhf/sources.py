"""
Sources: the files of a data set, and the documents in them.

    for text in read_documents('books/*.jsonl.xz'): ...

A document is a .txt file, a line of a .jsonl file (its field `text`) or a row of a .parquet file (its column `text`).
Text is UTF-8; a byte order mark is dropped, and \\r\\n in a .txt file becomes \\n. A .txt file is read into memory at
once; put text that does not fit into a .jsonl. To add a data set of the Hugging Face hub, add a line to HUB.
"""

import glob
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
from pathlib import Path

from configurator import did_you_mean
from mhf.errors import InputError

# name of a data set: 'OWNER/REPOSITORY/FOLDER' on the Hugging Face hub, or 'OWNER/REPOSITORY'. The data set consists of
# all .parquet files in that folder and its subfolders; their column `text` contains the documents. 'fineweb-2:arb_Arab'
# replaces LANGUAGE by arb_Arab.
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
COMPRESSED = ('.gz', '.xz', '.zst')
MAX_DOCUMENT_CHARS = 1 << 20  # a longer document is split at line ends, or after twice as many characters
# expand.py holds out this share of a corpus, up to this limit in bytes. prepare.py holds out at least these documents
# if val_fraction=HELD_OUT and val_bytes / sources >= HELD_OUT_BYTES, as in config/expand_*.py
HELD_OUT = 0.05
HELD_OUT_BYTES = 400_000

# -----------------------------------------------------------------------------
# files


def hub_folder(dataset):
    """Returns the folder on the hub of a data set such as 'fineweb-2:arb_Arab', '' if HUB does not contain it."""
    name, _, language = dataset.partition(':')
    template = HUB.get(f'{name}:LANGUAGE', '') if re.fullmatch(r'\w+', language) else ''
    return HUB.get(dataset, template.replace('LANGUAGE', language))


def parse_mixture(dataset):
    """'a@2e9,b@1e9' -> [('a', 2000000000), ('b', 1000000000)]. Without any @: [(dataset, None)]. Raises InputError."""
    if not re.search(r'@[^/,]*(,|$)', dataset) or os.path.isfile(dataset):
        return [(dataset, None)]
    sources = []
    for item in dataset.split(','):
        match = re.fullmatch(r'(.+)@(\d+(\.\d+)?(e\+?\d+)?)', item)
        if not match or not 1 <= float(match[2]) < 1e15:
            raise InputError(f"dataset '{item}': append @ and its number of tokens to each source, like @2e9")
        sources.append((match[1], int(float(match[2]))))
    return sources


def input_files(dataset):
    """
    Returns {path: size in bytes} of a data set's files in a fixed order, each file once. The data set is 'stdlib', a
    name of HUB, or files and globs separated by commas. Raises InputError if a pattern matches no file, or a file has
    an unknown type.
    """
    if folder := hub_folder(dataset):
        return hub_files(folder)
    if dataset == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        paths = [path for path in root.rglob('*.py') if not NOT_STDLIB & set(path.relative_to(root).parts)]
        return {str(path): path.stat().st_size for path in sorted(paths)}
    files = {}
    for pattern in [dataset] if os.path.isfile(dataset) else dataset.split(','):
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        paths = sorted(Path(path) for path in paths if not os.path.isdir(path))
        if not paths and os.path.isdir(pattern):
            raise InputError(f"{pattern} is a folder; name its files, like '{pattern.rstrip('/')}/*.parquet'")
        if not paths and (pattern == 'stdlib' or hub_folder(pattern)):
            raise InputError(f"dataset '{dataset}': to mix data sets, append @ and a token count, like {pattern}@2e9")
        if not paths:
            raise InputError(f'{pattern}: no such file, glob or data set{did_you_mean(pattern, ["stdlib", *HUB])}')
        for path in paths:
            files.setdefault(file_id(path), str(path))
    sizes = {path: os.path.getsize(path) for path in files.values()}
    for path, size in sizes.items():
        if not re.search(r'\.(parquet|py|(txt|jsonl)(\.(gz|xz|zst))?)$', path):
            raise InputError(f'{path}: expected .parquet, or .txt or .jsonl, which may end in .gz, .xz or .zst')
        if not size and path.endswith(COMPRESSED):
            raise InputError(f'{path} is truncated: it has 0 bytes; download or compress it again')
    return sizes


def file_id(path):
    """Returns what all names of a file have in common: symbolic links, hard links, other spellings of its path."""
    file = os.stat(os.path.realpath(path))  # a link may contain itself
    return file.st_dev, file.st_ino


def hub_files(folder):
    """Returns {address at the current commit: size in bytes} of the files of a folder of HUB. Raises InputError."""
    import huggingface_hub

    owner, name, *path = folder.split('/', 2)
    repository = f'{owner}/{name}'
    hub = huggingface_hub.HfApi()
    try:
        commit = hub.dataset_info(repository).sha
        entries = list(hub.list_repo_tree(repository, *path, recursive=True, revision=commit, repo_type='dataset'))
    except Exception as e:  # no network, no such folder
        raise InputError(f'{folder} cannot be read from the hub ({type(e).__name__}: {e!s:.300})') from None
    sizes = {entry.path: entry.size for entry in entries if entry.path.endswith('.parquet')}
    return {f'hf://datasets/{repository}@{commit}/{file}': sizes[file] for file in sorted(sizes)}


# -----------------------------------------------------------------------------
# documents


def read_documents(dataset):
    """Yields the documents of a data set, stripped and not empty; long ones in pieces. Raises InputError."""
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
    except Exception as e:  # the library of each format raises its own types
        reason = str(e) if isinstance(e, InputError) else f'cannot be read ({type(e).__name__}: {e!s:.300})'
        if path.endswith(COMPRESSED) and not isinstance(e, ValueError) and getattr(e, 'errno', None) is None:
            reason += '; download it again, or compress it again with the default options'
        raise InputError(f'{path}, row {row:,}: {reason}') from None


def read_text(path):
    """Yields the field `text` of each line of a .jsonl file; any other text file is one document."""
    import pyarrow

    # each reader raises an error if the end of the compressed file is missing
    readers = {
        '.gz': gzip.open,
        '.xz': lambda path: io.BufferedReader(XzFile(path)),
        '.zst': lambda path: pyarrow.input_stream(path, compression='zstd'),
    }
    file = readers.get(Path(path).suffix, lambda path: open(path, 'rb'))(path)
    # numbers are not used; int() refuses more than 4,300 digits
    decode = json.JSONDecoder(parse_int=float).decode
    with io.TextIOWrapper(file, encoding='utf-8-sig') as lines:
        if not re.search(r'\.jsonl(\.\w+)?$', path):
            yield lines.read()
            return
        for line in lines:
            line = line.strip().removeprefix('\ufeff')  # joined files contain byte order marks
            try:
                row = decode(line or '{"text": null}')
            except RecursionError:
                raise InputError('its fields are nested too deeply; delete this row, or all fields but text') from None
            if not isinstance(row, dict) or 'text' not in row:
                raise InputError(f"expected an object with the field 'text', not {line:.80}")
            text = row['text']
            # an unpaired surrogate becomes a question mark
            yield text.encode('utf-8', 'replace').decode() if isinstance(text, str) else text


class XzFile(io.RawIOBase):
    """The contents of a .xz file. lzma.open() would drop the rest of a file whose second stream is damaged."""

    def __init__(self, path):
        self.file = open(path, 'rb')
        self.stream = lzma.LZMADecompressor()

    def readable(self):
        return True

    def readinto(self, buffer):
        data = b''
        while not data:
            if self.stream.eof:
                chunk = self.stream.unused_data.lstrip(b'\0')  # without padding between streams
                while not chunk and (read := self.file.read(len(buffer))):
                    chunk = read.lstrip(b'\0')
                if not chunk:
                    return 0
                self.stream = lzma.LZMADecompressor()
            else:
                chunk = self.file.read(len(buffer)) if self.stream.needs_input else b''
                if not chunk and self.stream.needs_input:
                    raise EOFError('the end of the file is missing')
            data = self.stream.decompress(chunk, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_parquet(path):
    """Yields the column `text` of a local .parquet file or of one on the hub."""
    import huggingface_hub
    import pyarrow.parquet

    with huggingface_hub.HfFileSystem().open(path) if path.startswith('hf://') else open(path, 'rb') as file:
        table = pyarrow.parquet.ParquetFile(file)
        if 'text' not in table.schema_arrow.names:
            raise InputError(f"no column 'text'; the columns are: {', '.join(table.schema_arrow.names)}")
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


def is_held_out(counts, val_fraction, val_bytes):
    """
    Returns whether the next document of a source is held out: every n-th one, n = round(1 / val_fraction), until
    val_bytes. counts: the documents and held_out_bytes before it.
    """
    return (counts['documents'] + 1) % round(1 / val_fraction) == 0 and counts['held_out_bytes'] < val_bytes


def split_last(dataset, text, counts, val_fraction, val_bytes):
    """
    Splits the last document of a source that has too few for is_held_out, in its second half, at a line break, else at
    a space. Returns (training text, held-out text); the second is about val_fraction of the source. Raises InputError.
    """
    half = len(text) // 2
    start = len(text) - min(int(counts['characters'] * val_fraction), val_bytes, half)
    cuts = (text.find('\n', start), text.rfind('\n', half), text.find(' ', start), text.rfind(' ', half))
    cut = next((cut for cut in cuts if cut > 0), None)
    if cut is None:
        few = f'{counts["documents"]} documents are too few to hold out one in {round(1 / val_fraction):,}'
        fix = 'use more documents, or prepare.py with a larger --val_fraction'
        raise InputError(f'{dataset}: {few}, and the last has no line break or space where it could be split; {fix}')
    return text[:cut].rstrip(), text[cut:].lstrip()
