"""
Prepared data sets, which prepare.py writes and train.py reads. Imports numpy, not torch.

A folder contains token ids or signatures:

    signatures  data/<dataset>_<tokenizer>_H4B16384: (tokens, H) uint16
    ids         data/<dataset>_<tokenizer>: (tokens,) uint16, or uint32 above 65,536 token ids

Bins returns token ids in both cases, so every model with the tokenizer can read either, unless token ids of the folder
share a signature (Single-ID, or LSH only): then a model needs the folder's table.

It contains these files, three for each unit:

    meta.json         settings, tokenizer, and the input files of every unit with size and digest; written first
    train_000012.bin  a .npy file: a header of HEADER bytes, then the tokens of all documents, each document after bos
    val_000012.bin    the same for the held-out documents
    000012.json       tokens, documents, bytes of text and sha256 of each .bin, and the source's counts after this unit;
                      written last

A folder is complete when, for each source, every unit's json exists or the source has reached its token limit and has
held-out text.
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
from filelock import FileLock, Timeout

from configurator import command_line_names
from hashing import fingerprint, hash128, informed_table, signature_table
from mhf.errors import InputError
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint

COUNTED_TOKENS = 2**24  # read at a time to count them
HEADER = 128  # bytes of a shard's .npy header, padded by numpy
SPLITS = ('train', 'val')
SIGNATURE_SETTINGS = ('num_hashes', 'num_buckets', 'num_lsh', 'single_id')

# -----------------------------------------------------------------------------
# the folder of a config


def data_folder(config):
    """Returns the folder of a config: data/stdlib_mistral for ids, data/stdlib_mistral_H4B16384 for signatures."""
    signatures = holds_signatures(config)
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
    if signatures:
        name += f'_H{config["num_hashes"]}B{config["num_buckets"]}'
        if config['num_lsh']:
            name += f'_lsh{config["num_lsh"]}'
        if config['single_id']:
            name += '_single'
    return Path('data') / name


def holds_signatures(config):
    """Returns whether a config's data are signatures, not token ids. A Standard model (num_hashes=0) needs ids."""
    if config['data_format'] not in ('signatures', 'ids'):
        raise InputError(f"data_format='{config['data_format']}': must be signatures or ids")
    return config['data_format'] == 'signatures' and config['num_hashes'] > 0


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
    try:
        temporary.write_text(json.dumps(value, indent=1))
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path):
    """Returns the contents of a JSON file, or None if it does not exist."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_meta(folder):
    """Returns the contents of meta.json, or None if it does not exist."""
    return read_json(Path(folder) / 'meta.json')


def read_unit(folder, number):
    """Returns the contents of a unit's json, or None if the unit is not finished."""
    return read_json(Path(folder) / f'{number:06}.json')


@contextlib.contextmanager
def lock_folder(folder, name):
    """
    Creates a folder and locks it by a file `name` in it. Afterwards deletes the file, and the folder if this process
    created it and it is empty. Raises InputError if another process holds the lock.
    """
    path = folder / name
    creates_folder = not os.path.exists(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f'{folder} is in use by another process, which has locked {path}') from None
    except OSError:  # the file system has no locks; if the folder is not writable, the first write fails
        pass
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        if creates_folder:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty


def read_units(folder, meta):
    """Returns the finished units, {number: contents of the unit's json}, and whether they are complete."""
    finished = {}
    for source in meta['sources']:
        for number in range(source['first_unit'], source['first_unit'] + len(source['units'])):
            unit = read_unit(folder, number)
            if unit is None:
                return finished, False
            finished[number] = unit
            if is_complete(unit['counts'], source):
                break
    return finished, True


def reached_limit(counts, source):
    """Returns whether a source has reached its limit of training tokens."""
    return source['limit'] is not None and counts['tokens'] >= source['limit']


def is_complete(counts, source):
    """Returns whether the rest of a source is not read: it has reached its limit, and some of its text is held out."""
    return reached_limit(counts, source) and counts['held_out_bytes'] > 0


def token_dtype(meta):
    """Returns the dtype of a token in the shards of a folder; that of a signature has the shape (H,)."""
    if meta['data_format'] == 'signatures':
        return np.dtype((np.uint16, (meta['num_hashes'],)))
    return np.dtype(np.uint16 if meta['vocab_size'] <= 65536 else np.uint32)


class Bins:
    """
    The shards of a split as one array of token ids, whatever the format of the folder: bins[a:b] is (b - a,) uint16 or
    uint32. `tokens`, `documents` and `bytes` (of text) are totals, `fingerprint` is a SHA-256 of the shards' SHA-256,
    `meta` is meta.json. Keeps no shard open: a data set may have more shards than a process may have open files. Raises
    InputError if the folder is absent, incomplete or damaged, or of another tokenizer than `tok` (default: the one that
    meta.json names).
    """

    def __init__(self, folder, split, tok=None):
        self.folder = folder
        self.tok = tok
        self.meta = read_meta(folder)
        if self.meta is None:
            raise InputError(f'{folder} has no prepared data (meta.json); run prepare.py with the same settings')
        units, are_complete = read_units(folder, self.meta)
        if not are_complete:
            raise InputError(f'{folder} is incomplete; rerun prepare.py to resume')
        shards = [unit[split] for unit in units.values()]
        self.tokens = sum(shard['tokens'] for shard in shards)
        self.documents = sum(shard['documents'] for shard in shards)
        self.bytes = sum(shard['bytes'] for shard in shards)
        if self.tokens < 2:
            fix = 'delete the folder, then prepare more text or change --val_fraction'
            raise InputError(f'{folder} has {self.tokens} {split} tokens: too little text; {fix}')
        digests = json.dumps([shard['sha256'] for shard in shards])
        self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()
        if tok:
            check_tokenizer(folder, self.meta, tok)
        self.dtype = token_dtype(self.meta)
        self.paths = [Path(folder) / shard['file'] for shard in shards]
        # indices of the first token of each shard, and the end
        self.starts = list(itertools.accumulate((shard['tokens'] for shard in shards), initial=0))
        for number, path, shard in zip(units, self.paths, shards, strict=True):
            expected = HEADER + shard['tokens'] * self.dtype.itemsize
            size = path.stat().st_size
            if size != expected:
                fix = f'delete {folder}/{number:06}.json, then rerun prepare.py'
                raise InputError(f'{path} is damaged ({size:,} bytes, expected {expected:,}); {fix}')

    def __len__(self):
        return self.tokens

    def __getitem__(self, span):
        start, stop, _ = span.indices(len(self))
        pieces = []
        k = bisect_right(self.starts, start) - 1
        while start < stop:
            path = self.paths[k]
            count = min(stop, self.starts[k + 1]) - start
            offset = HEADER + (start - self.starts[k]) * self.dtype.itemsize
            pieces.append(np.fromfile(path, self.dtype, count, offset=offset))  # ids or signatures
            if len(pieces[-1]) < count:
                raise InputError(f'{path}: only {len(pieces[-1]):,} of {count:,} tokens could be read')
            start += count
            k += 1
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return tokens if self.lookup is None else self.lookup.find(tokens)

    @functools.cached_property
    def lookup(self):
        """The SignatureLookup of a folder of signatures, None for a folder of ids. Raises InputError."""
        if self.meta['data_format'] == 'ids':
            return None
        return SignatureLookup(self.folder, self.meta, self.tok or get_tokenizer(self.meta['tokenizer']))

    def check_table(self, table):
        """
        Raises InputError if token ids of the folder share a signature, and the `table` of a model is not the folder's:
        another model would need the ids. None is the table of a Standard model.
        """
        if self.lookup and self.lookup.is_ambiguous:
            if table is None or fingerprint(table[: self.meta['vocab_size']]) != self.meta['table_sha256']:
                fix = 'prepare it with --data_format=ids'
                raise InputError(f'{self.folder} contains signatures that several token ids share; {fix}')


class SignatureLookup:
    """Finds the token ids of signatures. Raises InputError if the table of a folder cannot be built again."""

    def __init__(self, folder, meta, tok):
        table = build_table(meta, tok.tokens, meta['pad_id'])
        if fingerprint(table) != meta['table_sha256']:
            fix = 'prepare it again, in another --data_dir'
            raise InputError(f'{folder} contains signatures of another version of hashing.py; {fix}')
        # the zero row is pad_id's, although unused ids have it, too
        ids = [i for i, token in enumerate(tok.tokens) if i == meta['pad_id'] or token is not None]
        keys = pack(table[ids])
        order = keys.argsort(kind='stable')
        self.folder = folder
        self.keys = keys[order]
        self.ids = np.array(ids, token_dtype(meta | dict(data_format='ids')))[order]
        self.table = table
        self.is_ambiguous = bool((self.keys[1:] == self.keys[:-1]).any())

    def find(self, signatures):
        """Signatures (n, H) -> token ids (n,); of several with the same signature, the first. Raises InputError."""
        ids = self.ids[np.minimum(self.keys.searchsorted(pack(signatures)), len(self.keys) - 1)]
        if (self.table[ids] != signatures).any():
            raise InputError(f'{self.folder} is damaged: it contains a signature of no token; prepare it again')
        return ids


def pack(signatures):
    """Packs signatures (n, H) into integers (n,) uint64: up to H = 4 exactly, above with random factors."""
    factors = [1 << 16 * i if i < 4 else hash128(str(i), 0) % 2**64 for i in range(signatures.shape[1])]
    return signatures.astype(np.uint64) @ np.array(factors, np.uint64)  # modulo 2^64


def open_bins(config):
    """Returns the Bins of train and val, and meta.json, of a config. Raises InputError."""
    folder = data_folder(config)
    tok = get_tokenizer(config['tokenizer'])
    train = Bins(folder, 'train', tok)
    meta = train.meta
    # --data_dir alone means the data of that folder, whatever dataset a config file has
    given = command_line_names()
    if meta['dataset'] != config['dataset'] and ('dataset' in given or 'data_dir' not in given):
        differs = f'{meta["dataset"]}, not from {config["dataset"]}'
        raise InputError(f'{folder} was prepared from {differs}; change --data_dir or --dataset')
    return train, Bins(folder, 'val', tok), meta


# -----------------------------------------------------------------------------
# the tokenizer and the signature table of a folder


def build_table(config, tokens, pad_id):
    """Returns the signatures (V, H) uint16 of a tokenizer. `config` is a config or the contents of meta.json."""
    sizes = (config[key] for key in ('num_hashes', 'num_buckets', 'num_lsh'))
    return cached_table(tuple(tokens), *sizes, pad_id, unique=not config['single_id'])


cached_table = functools.lru_cache(maxsize=2)(signature_table)  # of a model and of its data, which often are the same


def check_tokenizer(folder, meta, tok):
    """Raises InputError if a folder was prepared with another tokenizer. Its contents decide, not its name."""
    if meta['tokenizer_sha256'] != tokenizer_fingerprint(tok):
        differs = f"another tokenizer ('{meta['tokenizer']}') than '{tok.name}'"
        raise InputError(f'{folder} was prepared with {differs}; change --tokenizer or the folder')


def get_table(config, meta):
    """
    Returns the signatures (V, H) uint16 of the config's tokenizer, None for the Standard model, and their frequency
    ranges, [] without counts_from. Raises InputError.
    """
    if not config['num_hashes']:
        return None, []
    tok = get_tokenizer(config['tokenizer'])
    if not config['counts_from']:
        return build_table(config, tok.tokens, meta['pad_id']), []
    counts = counts_of_config(config, tok)
    return informed_table(tok.tokens, counts, config['num_hashes'], config['num_buckets'], meta['pad_id'])


def counts_of_config(config, tok):
    """
    Returns the counts of the token ids (V,) int64 in the folder of counts_from, and prints how many tokens were counted
    and how many of the run's training tokens never occurred. Raises InputError.
    """
    own = data_folder(config)
    folder = own if config['counts_from'] == 'train' else Path(config['counts_from'])
    counts = count_tokens(folder, tok)
    print(f'{counts.sum():,} tokens counted in {folder}')
    if folder != own:
        never = (counts[Bins(own, 'train', tok)[:COUNTED_TOKENS]] == 0).mean()
        print(f'{never:.1%} of the training tokens in {own} never occurred in {folder}')
    return counts


def count_tokens(folder, tok):
    """Counts each token id in the training split of a folder. Returns (V,) int64. Raises InputError."""
    train = Bins(folder, 'train', tok)
    train.check_table(None)
    counts = np.zeros(len(tok.tokens), np.int64)
    for start in range(0, len(train), COUNTED_TOKENS):
        counts += np.bincount(train[start : start + COUNTED_TOKENS], minlength=len(counts))
    return counts


# -----------------------------------------------------------------------------
# the order of blocks, prefetching


def block_indices(step, batch_size, num_blocks, seed):
    """
    Returns the indices of the blocks of a step (from 0), (batch_size,) int64. Block b contains the T + 1 tokens from
    token b * T on: T inputs and their targets. Blocks cross documents and shards; bos is the only separator.

    Sequence k of a run is element k % num_blocks of the shuffled list of blocks of epoch k // num_blocks. The order
    depends only on (seed, epoch). Step i trains on the batch_size sequences from i * batch_size on. So its batch
    depends only on (seed, i), and a run can resume on a different number of GPUs.
    """
    i = np.arange(step * batch_size, (step + 1) * batch_size)
    blocks = np.empty_like(i)
    for epoch in np.unique(i // num_blocks):
        in_epoch = i // num_blocks == epoch
        blocks[in_epoch] = feistel_permute(i[in_epoch] % num_blocks, num_blocks, seed, int(epoch))
    return blocks


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
