"""
Tokenizes text into the shards that train.py reads. prepare.py is resumable: rerun the same command after an
interruption; the output is identical.

    $ python prepare.py config/mhf_tiny.py                      # the Python standard library, in seconds
    $ python prepare.py                                         # FineWeb-Edu sample-10BT
    $ python prepare.py --dataset='books/*.jsonl.xz' --tokenizer=tekken
    $ python prepare.py --dataset='fineweb-2:arb_Arab@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu@2e9'    # tokens of each
    $ python prepare.py config/mhf_1b.py --part=0/4             # on the first of four machines

A unit is one input file, or consecutive small files of up to UNIT_BYTES. It becomes one shard of each split. A rerun
skips finished units and starts an interrupted one over; split a very large file to lose less. mhf/data.py describes
the output, and README.md, "Code", the path from a document to its loss.
"""

import contextlib
import hashlib
import itertools
import os
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import check_numbers, configure
from hashing import fingerprint
from mhf import data, sources
from mhf.data import SPLITS
from mhf.errors import InputError
from mhf.tokenizers import byte_lengths, get_tokenizer, tokenizer_facts, warn_lost

# stdlib | fineweb-edu | fineweb-edu:sample-100BT | fineweb-edu-dedup | fineweb-2:arb_Arab | files and globs of .txt,
# .jsonl (also .gz .xz .zst) or .parquet, separated by commas | a mixture with the tokens of each: a.txt@2e9,b.txt@1e9
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '' is data/<dataset>_<tokenizer>
# mistral | tekken | a tiktoken encoding such as gpt2 | a file *.model or tokenizer.json | a hub id user/name[@revision]
tokenizer = 'mistral'
# signatures: 2 * num_hashes bytes per token | ids: 2 bytes per token (4 above 65,536 token ids), from which train.py
# looks up signatures of any num_hashes and num_buckets. num_hashes=0 (Standard) always writes ids
data_format = 'signatures'
num_hashes = 4
num_buckets = 16384
num_lsh = 0
single_id = False
# held-out text: every n-th document, n = round(1/val_fraction), until val_bytes; with fewer than n, the tail of each
val_fraction = 0.005
val_bytes = 4000000
part = ''  # i/n: prepares every n-th file, starting at file i (from 0); parts may run at the same time

config = configure(globals())

UNIT_BYTES = 1_000_000_000  # maximum size of a unit of several files
BATCH_CHARS = 4 << 20  # per call of the tokenizer, which divides the texts among its threads
FLUSH_TOKENS = 1 << 20  # per write to a shard
DIGEST_BYTES = 1 << 16  # of each end of an input file

# -----------------------------------------------------------------------------
# meta.json


def file_digest(path):
    """Returns a digest of the first and the last DIGEST_BYTES of a file. Raises InputError."""
    with sources.reading(path), open(path, 'rb') as file:
        start = file.read(DIGEST_BYTES)
        file.seek(max(len(start), os.path.getsize(path) - DIGEST_BYTES))
        return hashlib.sha256(start + file.read(DIGEST_BYTES)).hexdigest()[:16]


def group_files(files, parts):
    """
    Groups {path: size} into units. A unit is a list of [path, size, digest], without the digest for a file of the hub.
    With several parts each file is a unit.
    """
    units = []
    total = 0
    for path, size in files.items():
        total += size
        if not units or parts > 1 or total > UNIT_BYTES:
            units.append([])
            total = size
        digest = [] if path.startswith('hf://') else [file_digest(path)]
        units[-1].append([path, size, *digest])
    return units


def describe_sources(config, parts, existing):
    """Returns each source of the mixture and its units. Hub data sets keep the commit in the `existing` meta.json."""
    previous = existing['sources'] if existing else []
    pinned = {s['dataset']: s['units'] for s in previous if sources.hub_folder(s['dataset'])}
    described = []
    first_unit = 0
    source_by_file = {}
    for name, limit in sources.parse_mixture(config['dataset']):
        units = pinned.get(name) or group_files(sources.input_files(name), parts)
        if len(units) < parts:
            raise InputError(f"part={config['part']}: '{name}' has {len(units)} file(s); use at most that many parts")
        for path, *_ in itertools.chain(*units):
            file = path if path.startswith('hf://') else sources.file_id(path)
            other_unit, other = source_by_file.setdefault(file, (first_unit, name))
            if other_unit != first_unit:
                raise InputError(f"'{other}' and '{name}' both contain {path}; name each file once")
        described.append(dict(dataset=name, limit=limit and limit // parts, first_unit=first_unit, units=units))
        first_unit += len(units)
    return described


def describe(config, parts, tok, table, existing):
    """Returns the contents of meta.json: the settings, tokenizer facts and files that determine the shards."""
    meta = {key: config[key] for key in ('dataset', 'tokenizer', 'val_fraction', 'val_bytes')}
    meta |= dict(parts=parts, data_format='ids' if table is None else 'signatures')
    if table is not None:
        meta |= {key: config[key] for key in data.SIGNATURE_SETTINGS} | dict(table_sha256=fingerprint(table))
    return meta | tokenizer_facts(tok) | dict(sources=describe_sources(config, parts, existing))


def check_same(folder, existing, meta, tok):
    """Raises InputError with the first difference between the existing meta.json and that of this run."""
    data.check_tokenizer(folder, existing, tok)
    change = f'delete {folder} to start over, or change --data_dir'
    for key in meta:
        if key not in ('sources', 'tokenizer') and existing.get(key) != meta[key]:
            values = f'{key}={existing.get(key)!s:.60}, now it is {meta[key]!s:.60}'
            raise InputError(f'{folder} was prepared with {values}; {change}')
    before, now = ({f[0]: f[1:] for s in m['sources'] for u in s['units'] for f in u} for m in (existing, meta))
    for path in sorted(before | now):
        # zip() ignores the digest if meta.json is of an earlier version, which has only sizes
        if any(a != b for a, b in zip(before.get(path, [None]), now.get(path, [None]), strict=False)):
            raise InputError(f'{folder}: the input file {path} is new, missing or has other contents; {change}')


# -----------------------------------------------------------------------------
# one unit


@dataclass
class Job:
    """The state that all units share."""

    folder: Path
    meta: dict
    part: int
    tok: object  # from get_tokenizer
    table: np.ndarray | None  # signatures (V, H) uint16; None writes ids
    byte_lengths: np.ndarray  # of the text of each id, (V,)
    bar: tqdm


class ShardWriter:
    """Writes the documents of one split of a unit to a .npy file. The file has a temporary name until close()."""

    def __init__(self, job, path):
        self.job = job
        self.path = path
        self.temporary = path.with_suffix('.bin.tmp')
        self.dtype = data.token_dtype(job.meta)
        self.ids = array('I')  # not written yet; an array is 7 x as fast to extend by a list as a numpy array
        self.tokens = 0
        self.documents = 0
        self.bytes = 0  # of text
        self.kept_bytes = 0  # of the text that the ids encode
        self.file = open(self.temporary, 'wb')
        self.file.seek(data.HEADER)  # close() writes the header, which contains the number of tokens

    def add(self, text, ids):
        """Adds a document: bos and its ids."""
        self.ids.append(self.job.tok.bos)
        self.ids.fromlist(ids)
        self.tokens += 1 + len(ids)
        self.documents += 1
        self.bytes += len(text.encode())
        if len(self.ids) >= FLUSH_TOKENS:
            self.flush()

    def flush(self):
        ids = np.asarray(self.ids)
        self.kept_bytes += int(self.job.byte_lengths[ids].sum())
        tokens = ids if self.job.table is None else self.job.table[ids]
        self.file.write(np.ascontiguousarray(tokens, self.dtype.base))
        self.ids = array('I')

    def close(self):
        """Completes and renames the file; returns its entry in the unit's json."""
        self.flush()
        header = dict(descr=self.dtype.base.str, fortran_order=False, shape=(self.tokens, *self.dtype.shape))
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)
        self.file.close()
        data.replace_durably(self.temporary, self.path)
        with open(self.path, 'rb') as f:
            sha256 = hashlib.file_digest(f, 'sha256').hexdigest()
        counts = dict(tokens=self.tokens, documents=self.documents, bytes=self.bytes)
        lost_bytes = max(0, self.bytes - self.kept_bytes)
        return dict(file=self.path.name, **counts, lost_bytes=lost_bytes, sha256=sha256)

    def discard(self):
        """Deletes the file unless close() has renamed it."""
        self.temporary.unlink(missing_ok=True)
        self.file.close()  # raises an error on a full disk if its buffer is not empty


def batches(documents):
    """Groups documents, each a list of its pieces (text, is_held_out), into lists of about BATCH_CHARS characters."""
    batch = []
    size = 0
    for pieces in documents:
        batch.append(pieces)
        size += sum(len(text) for text, _ in pieces)
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    yield batch


def encode(tok, documents):
    """Yields each document as a list of its pieces (text, token ids, is_held_out)."""
    # a thread reads the next batch while the tokenizer's threads encode this one
    for batch in data.prefetch(batches(documents)):
        encoded = iter(tok.encode([text for pieces in batch for text, _ in pieces]))
        for pieces in batch:
            yield [(text, next(encoded), is_held_out) for text, is_held_out in pieces]
        del encoded  # frees the ids before the next batch


def prepare_unit(job, source, number, unit, counts):
    """Writes the shards of a unit, then its json, which marks it as finished. Updates the source's counts."""
    meta = job.meta
    val_bytes = meta['val_bytes'] // (meta['parts'] * len(meta['sources']))
    texts = sources.read_files(path for path, *_ in unit)
    documents = sources.split_holdout(texts, meta['val_fraction'], val_bytes, counts)
    writers = {}
    with contextlib.ExitStack() as cleanup:
        for split in SPLITS:
            writers[split] = ShardWriter(job, job.folder / f'{split}_{number:06}.bin')
            cleanup.callback(writers[split].discard)
        # the thread of prefetch() updates counts; closing() waits for it
        with contextlib.closing(encode(job.tok, documents)) as encoded:
            for pieces in encoded:
                for text, ids, is_held_out in pieces:
                    writers['val' if is_held_out else 'train'].add(text, ids)
                    if not is_held_out:
                        counts['tokens'] += 1 + len(ids)
                        job.bar.update(1 + len(ids))
                if data.reached_limit(counts, source):
                    break
        summary = {split: writer.close() for split, writer in writers.items()}
        data.write_json(job.folder / f'{number:06}.json', summary | dict(counts=counts), job.part)


def own_units(job, source):
    """Returns [(number, unit)] of a source that belong to this part."""
    return list(enumerate(source['units'], source['first_unit']))[job.part :: job.meta['parts']]


def read_source(job, source):
    """Yields the documents of a source that belong to this part."""
    return sources.read_files(path for _, unit in own_units(job, source) for path, *_ in unit)


def start_counts(job, source):
    """
    Returns the counts before the first unit of a source that belongs to this part, None if that unit is finished.
    Prints a warning if the source can reach its limit of tokens before its first held-out document.
    """
    number, _ = own_units(job, source)[0]
    if data.read_unit(job.folder, number):
        return None
    counts = sources.initial_counts(read_source(job, source), job.meta['val_fraction']) | dict(tokens=0)
    if source['limit'] is not None and not counts['hold_out_tails']:
        before = itertools.islice(read_source(job, source), round(1 / job.meta['val_fraction']) - 1)
        if source['limit'] <= sum(len(text.encode()) for text in before):  # a token is at least one byte
            name = f'{source["dataset"]}@{source["limit"]}'
            fix = 'use more tokens or a larger --val_fraction'
            print(f'warning: {name} may end before its first held-out document; {fix}', file=sys.stderr)
    return counts


def prepare_source(job, source, counts):
    """Prepares the units of a source that belong to this part and are not finished."""
    for number, unit in own_units(job, source):
        if finished := data.read_unit(job.folder, number):
            counts = finished['counts']
            job.bar.update(finished['train']['tokens'])
        else:
            prepare_unit(job, source, number, unit, counts)
        if data.reached_limit(counts, source):
            break
    if source['limit'] is not None:
        job.bar.write(f'{source["dataset"]}: {counts["tokens"]:,} of {source["limit"]:,} training tokens')


# -----------------------------------------------------------------------------
# the run


def parse_part(text):
    """'1/4' -> (1, 4). No part, '', -> (0, 1). Raises InputError."""
    i, _, n = (text or '0/1').partition('/')
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise InputError(f"part='{text}': must be like 0/4, the first of four parts, up to 3/4")
    return int(i), int(n)


@contextlib.contextmanager
def locked(folder, meta, part):
    """
    Locks the part in a folder against another prepare.py, and creates meta.json. A run without --part that fails before
    its first unit is finished leaves no files. Raises InputError.
    """
    with data.lock_folder(folder, f'.part_{part}.lock'):
        creates_meta = not (folder / 'meta.json').exists()
        try:
            if creates_meta:
                data.write_json(folder / 'meta.json', meta, part)
            yield
        except OSError as e:
            raise InputError(f'{folder} cannot be written ({e}); fix this, then rerun the same command') from None
        finally:
            if creates_meta and meta['parts'] == 1 and not data.read_units(folder, meta)[0]:
                for name in ('train_000000.bin', 'val_000000.bin', 'meta.json'):
                    (folder / name).unlink(missing_ok=True)


def report(job):
    """Prints the totals of both splits, and what the tokenizer drops or changes."""
    units, incomplete = data.read_units(job.folder, job.meta)
    entries = [unit[split] for unit in units.values() for split in SPLITS]
    warn_lost(job.tok, sum(entry['lost_bytes'] for entry in entries), sum(entry['bytes'] for entry in entries))
    if incomplete:
        print(f'{job.folder}: this part is complete, other parts are not')
        return
    for split in SPLITS:
        bins = data.Bins(job.folder, split)
        totals = f'{bins.tokens:,} tokens, {bins.documents:,} documents, {bins.bytes:,} bytes of text'
        print(f'{split}: {totals} -> {job.folder}/{split}_*.bin')


def main(config):
    """Prepares the part of the data set that the config names. Raises InputError."""
    part, parts = parse_part(config['part'])
    check_numbers(config, 'num_hashes')
    check_numbers(config, 'val_fraction', low=1e-9, below=1)
    check_numbers(config, 'val_bytes', low=parts * len(sources.parse_mixture(config['dataset'])))
    folder = data.data_folder(config)
    tok = get_tokenizer(config['tokenizer'])
    table = data.build_table(config, tok.tokens, tok.pad) if data.holds_signatures(config) else None
    # list shards before reading meta.json, because a part that starts in between writes meta.json first
    shards = list(folder.glob('*_[0-9]*.bin*'))
    existing = data.read_meta(folder)
    if shards and not existing:
        raise InputError(f'{min(shards)} could be overwritten, because {folder} has no meta.json; change --data_dir')
    meta = describe(config, parts, tok, table, existing)
    total = sum(source['limit'] or 0 for source in meta['sources']) or None
    bar = tqdm(desc='prepare', total=total, unit=' tokens', unit_scale=True, leave=False, disable=None)
    with locked(folder, meta, part), bar:
        check_same(folder, data.read_meta(folder), meta, tok)
        job = Job(folder, meta, part, tok, table, np.array(byte_lengths(tok)), bar)
        counts = [start_counts(job, source) for source in meta['sources']]
        for source, source_counts in zip(meta['sources'], counts, strict=True):
            prepare_source(job, source, source_counts)
    report(job)


if __name__ == '__main__':
    main(config)
