"""
Prepared data sets, which prepare.py writes and train.py reads. Imports numpy, not torch.

A folder contains token ids or signatures:

    signatures  data/<dataset>_<tokenizer>_H4B16384: (tokens, H) uint16
    ids         data/<dataset>_<tokenizer>: (tokens,) uint16, or uint32 above 65,536 token ids

Bins returns token ids in both cases, so every model with the tokenizer can read either. meta.json and the files of
each unit:

    meta.json         settings, tokenizer, and the input files of every unit with size and digest; written first, and
                      again with the shards of both splits when the folder is complete
    train_000012.bin  a .npy file: a header of HEADER bytes, then the tokens of all documents, each document after bos
    val_000012.bin    the same for the held-out documents
    000012.json       tokens, documents, bytes of text and sha256 of each .bin, and the source's counts after this unit;
                      written last
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hashing import fingerprint, informed_table, signature_table
from mhf.errors import InputError
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint

COUNTED_TOKENS = 2**20  # read at a time to count them, up to 256 times
HEADER = 128  # bytes of a shard's .npy header, padded by numpy
SPLITS = ('train', 'val')

# -----------------------------------------------------------------------------
# the folder of a config


def data_folder(config):
    """Returns the folder of a config: data/stdlib_mistral for ids, data/stdlib_mistral_H4B16384 for signatures."""
    if config['data_dir']:
        return Path(config['data_dir'])
    name = config['dataset']
    # paths, globs and mixtures: the file names without @tokens, and a digest
    if re.search(r'[^\w:.-]', name):
        files = '-'.join(re.sub(r'@[\d.e+]+$', '', path).split('/')[-1] for path in name.split(','))
        name = f'{files[:60]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}'
    name = re.sub(r'[^\w.-]+', '-', name).strip('-.')
    # a tokenizer file that is called tokenizer.json is named after its folder
    tokenizer = Path(re.sub(r'(?<=.)(/tokenizer)?\.(model|json)$', '', config['tokenizer'])).name
    name = f'{name}_{tokenizer}'
    if holds_signatures(config):
        name += f'_H{config["num_hashes"]}B{config["num_buckets"]}'
        if config['num_lsh']:
            name += f'_lsh{config["num_lsh"]}'
    return Path('data') / name


def holds_signatures(config):
    """
    Returns whether a config's shards contain signatures. Otherwise they contain token ids: with data_format='ids', and
    where tokens may share a signature (only LSH hashes, single_id) or have none (Standard).
    """
    if config['data_format'] not in ('signatures', 'ids'):
        raise InputError(f"data_format='{config['data_format']}': must be signatures or ids")
    are_unique = config['num_hashes'] > config['num_lsh'] and not config['single_id']
    return config['data_format'] == 'signatures' and are_unique


# -----------------------------------------------------------------------------
# the files of a folder


def replace_durably(temporary, path):
    """Renames a file. Even after a crash of the machine `path` exists only with complete contents."""
    with open(temporary, 'rb') as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)  # from here on, `path` is the new file
    with contextlib.suppress(OSError):  # Windows and some network file systems cannot fsync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path, value):
    """Writes a JSON file that is complete once it exists."""
    temporary = path.with_name(f'{path.name}.tmp')
    temporary.write_text(json.dumps(value, indent=1))
    replace_durably(temporary, path)


def read_json(path):
    """Returns the contents of a JSON file, or None if it does not exist."""
    return json.loads(path.read_bytes()) if path.exists() else None


def token_dtype(meta):
    """Returns the dtype of a token in the shards of a folder; that of a signature has the shape (H,)."""
    if meta['data_format'] == 'signatures':
        return np.dtype((np.uint16, (meta['num_hashes'],)))
    return np.dtype(np.uint16 if meta['vocab_size'] <= 65536 else np.uint32)


def damage_error(path, reason):
    """Returns the InputError of a damaged shard."""
    fix = f'delete {path.parent}/{path.stem[-6:]}.json, then rerun prepare.py'
    return InputError(f'{path} is damaged ({reason}); {fix}')


class Bins:
    """
    The shards of a split as one array of token ids, whatever the format of the folder: bins[a:b] is (b - a,) uint16 or
    uint32. `documents` and `bytes` (of text) are totals, `fingerprint` is a SHA-256 of the shards' SHA-256, `meta` is
    meta.json. Keeps no shard open: a data set may have more shards than a process may have open files. Raises
    InputError if the folder is absent, incomplete or damaged, or of another tokenizer than `tok` (default: the one that
    meta.json names).
    """

    def __init__(self, folder, split, tok=None):
        self.meta = read_json(Path(folder) / 'meta.json')
        if split not in (self.meta or {}):
            raise InputError(f'{folder} has no prepared data, or only a part; run prepare.py with the same settings')
        self.tok = tok or get_tokenizer(self.meta['tokenizer'])
        check_tokenizer(folder, self.meta, self.tok)
        shards = self.meta[split]
        # indices of the first token of each shard, and the end
        self.starts = list(itertools.accumulate((shard['tokens'] for shard in shards), initial=0))
        self.documents = sum(shard['documents'] for shard in shards)
        self.bytes = sum(shard['bytes'] for shard in shards)
        if len(self) < 2:
            fix = 'delete the folder, then prepare more text or change --val_fraction'
            raise InputError(f'{folder} has {len(self)} {split} tokens: too little text; {fix}')
        digests = json.dumps([shard['sha256'] for shard in shards])
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()
        self.dtype = token_dtype(self.meta)
        self.paths = [Path(folder) / shard['file'] for shard in shards]
        for path, shard in zip(self.paths, shards, strict=True):
            expected = HEADER + shard['tokens'] * self.dtype.itemsize
            size = path.stat().st_size
            if size != expected:
                raise damage_error(path, f'{size:,} bytes, expected {expected:,}')

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, span):
        start, stop, _ = span.indices(len(self))
        pieces = []
        k = bisect_right(self.starts, start) - 1
        while start < stop:
            count = min(stop, self.starts[k + 1]) - start
            # not np.fromfile, which returns fewer values if the disk fails or the file has become shorter
            with open(self.paths[k], 'rb') as file:
                file.seek(HEADER + (start - self.starts[k]) * self.dtype.itemsize)
                raw = file.read(count * self.dtype.itemsize)
            values = np.frombuffer(raw, self.dtype, count)  # ids (count,) or signatures (count, H)
            pieces.append(values if self.meta['data_format'] == 'ids' else self.find_ids(values, self.paths[k]))
            start += count
            k += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def find_ids(self, signatures, path):
        """Returns the token ids (n,) of signatures (n, H) of a shard. Raises InputError if the table lacks one."""
        known, ids = self.sorted_signatures
        keys = signatures.view(known.dtype)[:, 0]
        places = known.searchsorted(keys).clip(max=len(known) - 1)
        if (known[places] != keys).any():
            raise damage_error(path, 'a signature belongs to no token')
        return ids[places]

    @functools.cached_property
    def sorted_signatures(self):
        """The signatures of the folder's table, each as one value, sorted, and their token ids. Raises InputError."""
        table = build_table(self.meta, self.tok.tokens, self.meta['pad_id'])
        if fingerprint(table) != self.meta['table_sha256']:
            differs = f'{self.paths[0].parent} contains signatures of another version of hashing.py or torch'
            raise InputError(f'{differs}; prepare it again, in another --data_dir')
        # the zero row is pad_id's, although unused ids have it, too
        ids = [i for i, token in enumerate(self.tok.tokens) if i == self.meta['pad_id'] or token is not None]
        keys = table[ids].view(f'V{self.dtype.itemsize}')[:, 0]  # 2 H bytes, which numpy can sort and search
        order = keys.argsort(kind='stable')
        return keys[order], np.array(ids, token_dtype(self.meta | dict(data_format='ids')))[order]


# -----------------------------------------------------------------------------
# the tokenizer and the signature table of a folder


def build_table(config, tokens, pad_id):
    """Returns the signatures (V, H) uint16 of a tokenizer. `config`: a config, meta.json or fields of an MHFConfig."""
    sizes = (config[key] for key in ('num_hashes', 'num_buckets', 'num_lsh'))
    return cached_table(tuple(tokens), *sizes, pad_id, unique=not config['single_id'])


cached_table = functools.lru_cache(maxsize=2)(signature_table)  # of a model and of its data, which often are the same


def check_tokenizer(folder, meta, tok):
    """Raises InputError if a folder was prepared with another tokenizer. Its contents decide, not its name."""
    if meta['tokenizer_sha256'] != tokenizer_fingerprint(tok):
        differs = f"another tokenizer ('{meta['tokenizer']}') than '{tok.name}'"
        raise InputError(f'{folder} was prepared with {differs}; change --tokenizer or the folder')


def get_table(config):
    """
    Returns the signatures (V, H) uint16 of the config's tokenizer, None for the Standard model, and their frequency
    ranges, [] without counts_from. Raises InputError.
    """
    if not config['num_hashes']:
        return None, []
    tok = get_tokenizer(config['tokenizer'])
    if not config['counts_from']:
        return build_table(config, tok.tokens, tok.pad), []
    own = data_folder(config)
    folder = own if config['counts_from'] == 'train' else Path(config['counts_from'])
    counts = count_tokens(Bins(folder, 'train', tok))
    print(f'{counts.sum():,} tokens counted in {folder}')
    return informed_table(tok.spellings, counts, config['num_hashes'], config['num_buckets'], tok.pad)


def count_tokens(bins):
    """Counts each token id in Bins, or in 128 to 256 parts, evenly spaced, of more than 268 M tokens -> (V,) int64."""
    counts = np.zeros(len(bins.tok.tokens), np.int64)
    starts = range(0, len(bins), COUNTED_TOKENS)
    for start in starts[:: (len(starts) - 1) // 256 + 1]:
        counts += np.bincount(bins[start : start + COUNTED_TOKENS], minlength=len(counts))
    return counts


# -----------------------------------------------------------------------------
# the order of sequences, prefetching


def sequence_indices(step, batch_size, num_sequences, seed):
    """
    Returns the indices of the sequences of a step (from 0), (batch_size,) int64. Sequence b of the data contains the
    T + 1 tokens from token b * T on: T inputs and their targets. Sequences cross documents and shards; bos is the only
    separator.

    Each epoch trains on all num_sequences sequences, in an order that depends only on (seed, epoch). Each step trains
    on the next batch_size sequences, and a batch may cross epochs. A batch therefore depends only on (seed, step), and
    a run can resume on a different number of GPUs.
    """
    k = np.arange(step * batch_size, (step + 1) * batch_size)  # counts sequences from the start of the run
    indices = np.empty_like(k)
    for epoch in np.unique(k // num_sequences):
        in_epoch = k // num_sequences == epoch
        indices[in_epoch] = feistel_permute(k[in_epoch] % num_sequences, num_sequences, seed, int(epoch))
    return indices


def feistel_permute(index, n, seed, epoch=0):
    """
    Returns the images of `index` (int64 array) in the permutation of 0..n-1 that (seed, epoch) defines, int64. The
    permutation is a function, so it needs no memory.
    """
    # a Feistel network permutes 0..4^k-1, up to the next power of 4; images outside 0..n-1 are permuted again
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)

    def permute(x):
        left = x >> np.uint64(half)
        right = x & mask
        for key in keys:
            # the finalizer of splitmix64 is the round function
            z = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = left ^ z ^ (z >> np.uint64(31))
            left = right
            right = mixed & mask
        return left << np.uint64(half) | right

    x = permute(np.atleast_1d(np.asarray(index, np.uint64)))
    while (outside := x >= n).any():
        x[outside] = permute(x[outside])
    return x.astype(np.int64)


def prefetch(iterable):
    """Yields the same items; a thread computes the next one while the caller uses this one."""
    iterator = iter(iterable)
    end = object()
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, iterator, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, iterator, end)
            yield item
