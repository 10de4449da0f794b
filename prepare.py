"""
Tokenizes text into the shards that train.py reads. prepare.py is resumable: rerun the same command after an
interruption; the output is identical.

    $ python prepare.py config/mhf_tiny.py                      # the Python standard library, in seconds
    $ python prepare.py                                         # FineWeb-Edu sample-10BT
    $ python prepare.py --dataset='books/*.jsonl.xz' --tokenizer=tekken
    $ python prepare.py --dataset='fineweb-2:arb_Arab@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu@2e9'    # tokens of each

A unit is one input file, or consecutive small files of up to UNIT_BYTES. It becomes one shard of each split. A rerun
skips finished units and starts an interrupted one over; split a very large file to lose less. mhf/sources.py describes
the input, mhf/data.py the output.
"""

import hashlib
import itertools
import math
import os
import sys
from collections import Counter

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import configure
from hashing import fingerprint
from mhf import data, sources
from mhf.data import SPLITS
from mhf.errors import InputError
from mhf.tokenizers import find_change, get_tokenizer, tokenizer_fingerprint

# stdlib | fineweb-edu | fineweb-edu:sample-100BT | fineweb-edu-dedup | fineweb-2:arb_Arab | files and globs, separated
# by commas: .txt (one document), .jsonl, .ndjson, .json (a document per line), also .gz .xz .zst, or .parquet | a
# mixture with the tokens of each: a.jsonl@2e9,b.txt@1e9. Without @, all files are one source
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '': data/<dataset>_<tokenizer>, for signatures with a suffix such as _H4B16384
# mistral | tekken | a tiktoken encoding such as gpt2 | *.model, tokenizer.json or its folder | user/name[@revision]
tokenizer = 'mistral'
# signatures: 2 * num_hashes bytes per token | ids: 2 bytes per token (4 above 65,536 token ids). Every model with the
# tokenizer reads either. num_hashes=0, single_id and num_lsh=num_hashes always write ids
data_format = 'signatures'
num_hashes = 4
num_buckets = 16384
num_lsh = 0
single_id = False
# held-out text: every n-th document, n = round(1/val_fraction), until val_bytes, of which the sources of a mixture have
# equal shares; of a source with fewer than 3 n documents, the ends of up to five
val_fraction = 0.005
val_bytes = 4000000

config = configure(globals())

UNIT_BYTES = 1_000_000_000  # maximum size of a unit of several files
BATCH_CHARS = 4 << 20  # per call of the tokenizer, which divides the texts among its threads
PROBE = 'If x:\n        e\u0301 \u00bd \u4e2d\u6587'  # what a tokenizer may change: case, white space, forms of Unicode

# -----------------------------------------------------------------------------
# meta.json


def file_digest(path):
    """Returns the SHA-256 of a file."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def group_files(files):
    """Groups {path: size} into units. A unit is a list of [path, size, digest], without the digest for a hub file."""
    units = []
    total = 0
    for path, size in files.items():
        total += size
        if not units or total > UNIT_BYTES:
            units.append([])
            total = size
        digest = [] if path.startswith('hf://') else [file_digest(path)[:16]]
        units[-1].append([path, size, *digest])
    return units


def describe_sources(config, existing):
    """
    Returns each source of the mixture and its units. Hub data sets, and lists of them alone, keep the commit in the
    `existing` meta.json, unless HUB names another folder now.
    """
    previous = existing['sources'] if existing else []
    pinned = {s['dataset']: s['units'] for s in previous if sources.are_on_hub(s['dataset'], s['units'])}
    described = []
    known = set()
    for name, limit in sources.parse_mixture(config['dataset']):
        units = pinned.get(name) or group_files(sources.input_files(name))
        files = {os.path.realpath(path) for unit in units for path, *_ in unit}
        if common := known & files:
            raise InputError(f'dataset: two sources contain {min(common)}; name each file once')
        known |= files
        first_unit = sum(len(source['units']) for source in described)
        described.append(dict(dataset=name, limit=limit, first_unit=first_unit, units=units))
    return described


def describe(config, tok, table, existing):
    """Returns the contents of meta.json: the settings, tokenizer facts and files that determine the shards."""
    meta = {key: config[key] for key in ('dataset', 'tokenizer', 'val_fraction', 'val_bytes')}
    meta['data_format'] = 'ids' if table is None else 'signatures'
    if table is not None:
        settings = ('num_hashes', 'num_buckets', 'num_lsh', 'single_id')
        meta |= {key: config[key] for key in settings} | dict(table_sha256=fingerprint(table))
    meta |= dict(vocab_size=len(tok.tokens), pad_id=tok.pad)
    meta['unused_ids'] = [i for i, token in enumerate(tok.tokens) if token is None]
    meta['tokenizer_sha256'] = tokenizer_fingerprint(tok)
    return meta | dict(sources=describe_sources(config, existing))


def write_meta(folder, meta, tok):
    """Writes meta.json, unless there are shards of it: then the existing one must be the same. Raises InputError."""
    existing = data.read_json(folder / 'meta.json')
    shards = sorted(folder.glob('*_[0-9]*.bin'))
    if shards and not existing:
        raise InputError(f'{shards[0]} could be overwritten, because {folder} has no meta.json; change --data_dir')
    if not (existing and (shards or any(folder.glob('[0-9]*.json')))):  # nothing is prepared yet
        data.write_json(folder / 'meta.json', meta)
        return
    data.check_tokenizer(folder, existing, tok)
    for key, value in meta.items():
        if key != 'tokenizer' and existing.get(key) != value:
            values = f'{key}={existing.get(key)!s:.400}, now it is {value!s:.400}'
            raise InputError(f'{folder} was prepared with {values}; delete the folder, or change --data_dir')


# -----------------------------------------------------------------------------
# shards


class ShardWriter:
    """Writes the documents of one split of a unit to a file in the .npy format, with a temporary name until close()."""

    def __init__(self, path, dtype):
        self.path = path
        self.temporary = path.with_suffix('.bin.tmp')
        self.dtype = dtype  # of a token, from data.token_dtype
        self.counts = Counter(tokens=0, documents=0, bytes=0)  # bytes of text
        self.file = open(self.temporary, 'wb')
        self.file.seek(data.HEADER)  # close() writes the header, which contains the number of tokens

    def add(self, text, values):
        """Adds a document, whose tokens are stored as `values`: ids (n,) or signatures (n, H)."""
        self.file.write(np.ascontiguousarray(values, self.dtype.base))
        self.counts.update(tokens=len(values), documents=1, bytes=len(text.encode()))

    def close(self):
        """Completes and renames the file; returns its entry in the unit's json."""
        header = dict(descr=self.dtype.base.str, fortran_order=False, shape=(self.counts['tokens'], *self.dtype.shape))
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)
        self.file.close()
        data.replace_durably(self.temporary, self.path)
        return dict(file=self.path.name, **self.counts, sha256=file_digest(self.path))


def batches(texts):
    """Groups texts into lists of about BATCH_CHARS characters."""
    batch = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    yield batch


def encode(tok, texts):
    """Yields each text and its token ids."""
    # a thread reads the next batch while the tokenizer's threads encode this one
    for batch in data.prefetch(batches(texts)):
        yield from zip(batch, tok.encode(batch), strict=True)


def is_complete(counts, limit):
    """Returns whether a source is complete: it has as many tokens as its limit, and holds out at least a document."""
    return counts['tokens'] >= limit and counts['held_out_bytes'] > 0


def split_documents(documents, counts, limit, val_bytes):
    """Documents, (text, ids) -> (split, text, ids), until the source is complete. Updates the source's counts."""
    for text, ids in documents:
        counts['documents'] += 1
        if sources.is_held_out(counts, val_bytes):
            counts['held_out_bytes'] += len(text.encode())
            yield 'val', text, ids
        elif counts['tokens'] < limit:
            counts['tokens'] += 1 + len(ids)
            yield 'train', text, ids
        if is_complete(counts, limit):
            break


def prepare_source(folder, meta, source, tok, table, bar):
    """
    Writes the shards of each unit of a source that is not finished, then its json, which marks it as finished. Without
    a table, shards contain ids. Returns the contents of the json files.
    """
    limit = source['limit'] or math.inf
    units = []
    counts = None  # after the unit before
    for number, unit in enumerate(source['units'], source['first_unit']):
        finished = folder / f'{number:06}.json'
        if not finished.exists():
            if counts is None:
                all_paths = [path for unit in source['units'] for path, *_ in unit]
                counts = sources.start_counts(all_paths, meta['val_fraction'])
                first_texts = [text[:2000].rstrip() for text in itertools.islice(sources.read_files(all_paths), 8)]
                if change := find_change(tok, [PROBE, *first_texts]):
                    bar.write(f"warning: tokenizer '{tok.name}' changes texts: {change}", sys.stderr)
            paths = [path for path, *_ in unit]
            texts = sources.read_files(paths, counts['separate_ends'], counts['n'], counts['documents'])
            dtype = data.token_dtype(meta)
            writers = {split: ShardWriter(folder / f'{split}_{number:06}.bin', dtype) for split in SPLITS}
            val_bytes = meta['val_bytes'] // len(meta['sources'])
            for split, text, ids in split_documents(encode(tok, texts), counts, limit, val_bytes):
                ids = np.array([tok.bos, *ids])
                writers[split].add(text, ids if table is None else table[ids])
                bar.update(len(ids))
            shards = {split: writer.close() for split, writer in writers.items()}
            data.write_json(finished, shards | dict(counts=counts))
        units.append(data.read_json(finished))
        counts = units[-1]['counts']
        if is_complete(counts, limit):
            break
    if source['limit']:
        bar.write(f'{source["dataset"]}: {counts["tokens"]:,} of {source["limit"]:,} training tokens')
    return units


def main(config):
    """Prepares the data set that the config names. Raises InputError."""
    if not 0 < config['val_fraction'] < 1 or config['val_bytes'] < len(sources.parse_mixture(config['dataset'])):
        limits = 'must be between 0 and 1, and at least 1 for each source'
        raise InputError(f'val_fraction={config["val_fraction"]}, val_bytes={config["val_bytes"]}: {limits}')
    folder = data.data_folder(config)
    tok = get_tokenizer(config['tokenizer'])
    table = data.build_table(config, tok.tokens, tok.pad) if data.holds_signatures(config) else None
    meta = describe(config, tok, table, data.read_json(folder / 'meta.json'))
    bar = tqdm(desc='prepare', unit=' tokens', unit_scale=True, leave=False, disable=None)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / '.prepare.lock', timeout=0), bar:
        write_meta(folder, meta, tok)
        units = [unit for source in meta['sources'] for unit in prepare_source(folder, meta, source, tok, table, bar)]
        shards = {split: [unit[split] for unit in units] for split in SPLITS}
        data.write_json(folder / 'meta.json', data.read_json(folder / 'meta.json') | shards)
    for split in SPLITS:
        bins = data.Bins(folder, split, tok)
        totals = f'{len(bins):,} tokens, {bins.documents:,} documents, {bins.bytes:,} bytes of text'
        print(f'{split}: {totals} -> {folder}/{split}_*.bin')


if __name__ == '__main__':
    main(config)
