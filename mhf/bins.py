"""
Bins: the tokens of a data set, as prepare.py writes them and train.py reads them. numpy only.

A folder of bins holds one of two kinds:

    signatures  data/<dataset>_<tokenizer>_H4B16384: (tokens, H) uint16, what a MultiHashFormer of this H and B reads
    ids         data/<dataset>_<tokenizer>: (tokens,) uint16, or uint32 above 65,536 tokens. They serve every model with
                that tokenizer, whatever its H and B; train.py signs them on the device

It has these files:

    train_000000.bin ...  HEADER bytes of .npy, then the tokens: documents back to back, each begins with bos
    val_000000.bin ...    the same for the held-out documents
    meta.json             what the bins were made from; meta.py describes it

Of n machines that share the work and the folder, machine i writes train_iofn_000000.bin ... and meta_iofn.json.
"""

import hashlib
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

import mmh3
import numpy as np

from configurator import InputError
from hashing import token_ids
from mhf.meta import data_folder, read_meta, table_of
from mhf.tokenizers import tokenizer_fingerprint

HEADER = 128  # bytes of a shard before its first token; numpy pads it to this

# -----------------------------------------------------------------------------
# the shards


def open_bins(config, meta, split):
    """The Bins of 'train' or 'val'. Raises InputError where a shard is not whole."""
    return Bins(data_folder(config), meta['splits'][split], meta.get('num_hashes', 0))


class Bins:
    """
    The shards of a split as one array: len(), and [a:b], memory-mapped within a shard: token ids (b - a,) uint16 or
    uint32, or signatures (b - a, num_hashes) uint16.
    """

    def __init__(self, folder, split, num_hashes=0):
        """`split` is that of meta.json; num_hashes=0 says that its shards hold token ids."""
        self.shards = []
        self.digests = []
        again = f'delete {folder} and run prepare.py again'
        for shard in split['shards']:
            path = folder / shard['file']
            try:
                tokens = np.load(path, mmap_mode='r')
            except FileNotFoundError:
                raise InputError(f'{path} is missing; {again}') from None
            # numpy's errors over a damaged header are many
            except Exception as e:
                raise InputError(f'{path} is no whole bin ({e!s:.200}); {again}') from None
            shape = (shard['tokens'], num_hashes) if num_hashes else (shard['tokens'],)
            if tokens.shape != shape or tokens.dtype not in (np.uint16, np.uint32):
                raise InputError(f'{path} holds {tokens.shape} {tokens.dtype}, meta.json says {shape}; {again}')
            self.shards.append(tokens)
            self.digests.append((path, shard['digest']))
        # of each shard, the number of its last token + 1
        self.ends = np.cumsum([len(tokens) for tokens in self.shards]).tolist()

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, span):
        start, stop, _ = span.indices(len(self))
        pieces = []
        k = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[k] - len(self.shards[k])
            pieces.append(self.shards[k][start - begin : stop - begin])
            start = self.ends[k]
            k += 1
        if not pieces:
            return self.shards[0][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def verify(self, which=slice(None)):
        """Reads the shards `which` through. Raises InputError at the first whose digest is not that of meta.json."""
        for path, digest in self.digests[which]:
            with open(path, 'rb') as f:
                of_file = digest_of(f).digest().hex()
            if of_file != digest:
                differs = f'its digest is {of_file}, meta.json says {digest}'
                raise InputError(f'{path} is damaged: {differs}; prepare it again')


def frequencies(tokens, V):
    """How often each id is among the first 2^24 tokens of some Bins, (V,) int64. Raises InputError for signatures."""
    ids = tokens[: 2**24]
    if ids.ndim > 1:
        raise InputError(
            'by_frequency=True: these bins hold signatures, whose tokens nobody counted; use --data_format=ids'
        )
    return np.bincount(ids, minlength=V)[:V]


class Verified:
    """
    Reads this process's share of the shards of some Bins through, in a thread, while training goes on. `damage` is the
    InputError that the thread has met so far, or None.
    """

    def __init__(self, all_bins, rank=0, world_size=1):
        self.all_bins = all_bins
        self.share = slice(rank, None, world_size)
        self.damage = None
        self.thread = threading.Thread(target=self._verify, daemon=True)
        self.thread.start()

    def _verify(self):
        try:
            for bins in self.all_bins:
                bins.verify(self.share)
        except InputError as e:
            self.damage = e
        except OSError as e:
            self.damage = InputError(f'a bin cannot be read ({e})')

    def wait(self, seconds):
        """Waits so many seconds for the thread to end. Raises the damage that it has met by then."""
        self.thread.join(seconds)
        if self.damage:
            raise self.damage


def digest_of(file):
    """MurmurHash3 of the numbers of an open shard, as an object to go on with. It detects damage, not malice."""
    file.seek(HEADER)
    return hashlib.file_digest(file, mmh3.mmh3_x64_128)


def held_out_split(folder, tok):
    """(token ids, bytes of text) of the held-out split of a folder of bins. Raises InputError for another tokenizer."""
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        raise InputError(f'{folder}: not a folder of prepare.py') from None
    if meta['tokenizer_sha256'] != tokenizer_fingerprint(tok):
        raise InputError(f"{folder} was made with tokenizer '{meta['tokenizer']}', the model's is '{tok.name}'")
    split = meta['splits']['val']
    table = table_of(meta, tok) if meta['data_format'] == 'signatures' else None
    tokens = Bins(folder, split, meta.get('num_hashes', 0))[:]
    return token_ids(tokens, table).tolist(), split['bytes']


# -----------------------------------------------------------------------------
# the order of blocks, and reading ahead


def block_indices(step, batch_size, num_blocks, seed):
    """
    The blocks that update `step` (the first is 0) trains on, (batch_size,) int64. Block b is the T + 1 tokens from
    token b * T on: T inputs, and each one's target.

    The run trains on its sequences in the order of their numbers, batch_size of them an update. Sequence i is block
    number i % num_blocks in the shuffled order of epoch i // num_blocks, and that order follows from (seed, epoch). So
    the blocks of a step depend on no other step and on no number of processes: a resumed run reads what a straight run
    would have read.

    train.py shares them out: process `rank` takes blocks.reshape(accumulation, processes, micro_batch_size)[:, rank].
    For example, with batch_size=16, micro_batch_size=4 and 2 processes accumulation is 2. At step 17, rank 1 then sees
    block_indices(17, ...)[4:8] and after them [12:16]: the sequences 276 to 279 and 284 to 287 of the run.
    """
    i = np.arange(step * batch_size, (step + 1) * batch_size)
    blocks = np.empty_like(i)
    for epoch in np.unique(i // num_blocks):
        of_epoch = i // num_blocks == epoch
        blocks[of_epoch] = shuffled(i[of_epoch] % num_blocks, num_blocks, seed, int(epoch))
    return blocks


def shuffled(index, n, seed, epoch=0):
    """
    Where `index` (int64 array) lands in the permutation of 0..n-1 that (seed, epoch) names, int64. The permutation is
    computed for `index` alone, so none is too large for the memory.
    """
    # a Feistel network permutes 0..4^k-1, the next power of 4; what lands outside 0..n-1 goes round again
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)

    def once(x):
        left = x >> np.uint64(half)
        right = x & mask
        for key in keys:
            # splitmix64's finaliser as the round function
            z = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = left ^ z ^ (z >> np.uint64(31))
            left = right
            right = mixed & mask
        return left << np.uint64(half) | right

    x = once(np.atleast_1d(np.asarray(index, np.uint64)))
    while (outside := x >= n).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


def prefetch(iterable):
    """The same items; a thread makes the next one while the caller uses this one."""
    iterator = iter(iterable)
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, iterator, end)
            yield item
