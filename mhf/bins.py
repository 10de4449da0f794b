"""
The format of prepared data, which prepare.py writes, and all reading of it. numpy only.

A folder of bins holds the tokens of a data set as one of two kinds:

    signatures  data/<dataset>_<tokenizer>_H4B16384: (tokens, H) uint16, what a MultiHashFormer of this H and B reads
    ids         data/<dataset>_<tokenizer>: (tokens,) uint16, or uint32 above 65,536 tokens. They serve every model with
                that tokenizer, whatever its H and B; train.py signs them on the device

In a folder are

    train_000000.bin ...  HEADER bytes of .npy, then the tokens: documents back to back, each begins with bos
    val_000000.bin ...    the same of what is held out
    meta.json             what they were made from

Of n machines that share work and folder, the i-th has train_iofn_000000.bin ... and meta_iofn.json. A meta.json holds

    complete                       true; without it train.py refuses the folder
    bins                           signatures or ids; of signatures also num_hashes, num_buckets, num_lsh, single_id
                                   and table_sha256, of the whole table
    dataset, tokenizer, part ...   the settings that decide what the bins hold: prepare.py goes on with no others
    vocab_size, pad_id, gaps       of the tokenizer, and tokenizer_sha256, of its strings; gaps are ids without a token
    made_from                      each source's files, as a sha256 of their names and sizes
    sources                        of each: dataset, tokens_wanted (null is all), tokens
    splits {train, val}            tokens, documents, bytes of text, shards [{file, tokens, digest of its numbers}]
    progress, splits.*.unfinished  only while it is not complete: where prepare.py goes on
"""

import hashlib
import json
import os
import re
import shlex
import sys
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mmh3
import numpy as np

from configurator import InputError, settings_of, wrong_type
from hashing import fingerprint, signature_table
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint

SPLITS = ('train', 'val')
OF_SIGNATURES = ('num_hashes', 'num_buckets', 'num_lsh', 'single_id')
HEADER = 128  # bytes of a shard before its first id; numpy pads it so
_SPLIT = dict(tokens=int, documents=int, bytes=int, shards=[dict(file=str, tokens=int, digest=str)])
# the types of what is read of a complete meta.json
META = dict(
    tokenizer=str, vocab_size=int, pad_id=int, gaps=[int], tokenizer_sha256=str, splits=dict.fromkeys(SPLITS, _SPLIT)
)


def data_folder(config):
    """The folder of a config's bins: data/stdlib_mistral, data/books-txt-4daa1511_mistral of books/*.txt."""
    signatures = holds_signatures(config)
    if config['data_dir']:
        return Path(config['data_dir'])
    name = config['dataset']
    # paths, globs and mixtures: the last words of each, and a digest of the whole
    if re.search(r'[^\w:.-]', name):
        words = '-'.join(map(last_words, name.split(',')))
        name = f'{words[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}'
    name = re.sub(r'[^\w.-]+', '-', name).lstrip('-')
    # of a tokenizer that is called tokenizer.json its folder's name
    tokenizer = Path(re.sub(r'(?<=.)(/tokenizer)?\.(model|json)$', '', config['tokenizer'])).name
    kind = ''
    if signatures:
        kind = f'_H{config["num_hashes"]}B{config["num_buckets"]}'
        kind += f'_lsh{config["num_lsh"]}' if config['num_lsh'] else ''
        kind += '_single' if config['single_id'] else ''
    return Path('data') / f'{name}_{tokenizer}{kind}'


def holds_signatures(config):
    """Whether a config's bins hold signatures; else they hold token ids. A Standard model has no signatures."""
    if config['bins'] not in ('signatures', 'ids'):
        raise InputError(f"bins='{config['bins']}': must be signatures or ids")
    return config['bins'] == 'signatures' and config['num_hashes'] > 0


def last_words(path):
    """The name of a file, of a glob the last two that are not all wildcards: 'a/ar.jsonl@2e9' -> 'ar.jsonl'."""
    path = re.sub(r'@[\d.e+]+$', '', path)
    words = [re.sub(r'[*?[\]]', '', word).strip('.-') for word in path.split('/')]
    return '-'.join(list(filter(None, words))[-2 if re.search(r'[*?[]', path) else -1 :])


def meta_files(folder):
    """The path of meta.json, or those of all parts in their order. Raises InputError where one is missing."""
    names = [re.fullmatch(r'meta_\d+of(\d+)\.json', path.name) for path in folder.glob('meta_*.json')]
    n, paths = max((int(name[1]) for name in names if name), default=0), []
    for i in range(n):
        paths.append(folder / f'meta_{i}of{n}.json')
        if not os.path.exists(paths[i]):
            raise InputError(f'{folder} lacks part {i}/{n}; prepare it with --part={i}/{n}')
    return paths or [folder / 'meta.json']


def parsed_meta(path):
    """The contents of one meta.json. Raises FileNotFoundError, and InputError where it is damaged or too old."""
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    again = 'delete the folder and prepare it again'
    try:
        meta = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f'{path} is damaged ({e}); {again}') from None
    wrong = wrong_type(meta, dict(complete=bool), 'meta')
    if not wrong and 'num_hashes' in meta and 'bins' not in meta:
        raise InputError(f'{path} is of a much older prepare.py; {again}')
    if not wrong:
        meta.setdefault('bins', 'ids')
    if not wrong and meta['complete']:
        wrong = wrong_type(meta, META, 'meta') or implausible(meta)
    if wrong:
        raise InputError(f'{path} is damaged ({wrong}); {again}')
    return meta


def read_meta(folder):
    """What a complete folder's meta.json says, or those of its parts together. Raises InputError, FileNotFoundError."""
    meta, *others = [parsed_meta(path) for path in meta_files(folder)]
    if not all(m['complete'] for m in (meta, *others)):
        raise InputError(f'{folder} is not finished; run prepare.py again with the same settings')
    for other in others:
        for key in meta.keys() - {'part', 'splits', 'sources'}:
            if other.get(key) != meta[key]:
                raise InputError(f'the parts in {folder} differ: {key}={meta[key]} and {other.get(key)}')
        for split in SPLITS:
            for key in _SPLIT:
                meta['splits'][split][key] += other['splits'][split][key]
    for split in SPLITS:
        digests = json.dumps([shard['digest'] for shard in meta['splits'][split]['shards']])
        meta['splits'][split]['sha256'] = hashlib.sha256(digests.encode()).hexdigest()
    return meta


def implausible(meta):
    """The first number or name in a meta.json that cannot be, or ''."""
    V = meta['vocab_size']
    if not 0 < V < 2**32:
        return f'vocab_size={V}'
    for i in (meta['pad_id'], *meta['gaps']):
        if not 0 <= i < V:
            return f'id {i} of {V} tokens'
    for split in SPLITS:
        tokens, shards = meta['splits'][split]['tokens'], meta['splits'][split]['shards']
        if tokens < 1 or tokens != sum(shard['tokens'] for shard in shards):
            return f'splits.{split}.tokens={tokens}'
        for shard in shards:
            if Path(shard['file']).name != shard['file']:
                return f'a bin called {shard["file"]}'
    return ''


def load_meta(config):
    """What there is to know of a config's data, checked against the config. Raises InputError."""
    folder = data_folder(config)
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        ids = data_folder(config | dict(bins='ids'))
        if ids != folder and (ids / 'meta.json').exists():
            raise InputError(f'{folder} is not there; {ids} has token ids, which --bins=ids reads') from None
        args = [a for a in sys.argv[1:] if a[:2] != '--' or a[2:].partition('=')[0] in settings_of('prepare.py')]
        command = shlex.join(['python', 'prepare.py', *args])
        raise InputError(f'{folder} has no prepared data; make it with: {command}') from None
    made_with, wanted = meta['tokenizer'], config['tokenizer']
    if made_with != wanted:
        raise InputError(f'{folder} was prepared with tokenizer={made_with}, the config has tokenizer={wanted}')
    return meta


def tokenizer_facts(tok):
    """What meta.json says of a tokenizer."""
    gaps = [i for i, w in enumerate(tok.tokens) if w is None]
    return dict(vocab_size=len(tok.tokens), pad_id=tok.pad, gaps=gaps, tokenizer_sha256=tokenizer_fingerprint(tok))


def checked_table(config, meta):
    """
    The signatures (V, H) uint16 of the bins' tokens, None for the Standard model. Raises InputError where the bins are
    of another tokenizer, or hold other signatures.
    """
    for key in OF_SIGNATURES if 'table_sha256' in meta else ():
        if meta.get(key) != config[key]:
            here = f'signatures of {key}={meta.get(key)}, the model has {key}={config[key]}'
            raise InputError(f'{data_folder(config)} holds {here}; bins of --bins=ids serve both')
    if not config['num_hashes']:
        return None
    tok = get_tokenizer(config['tokenizer'])
    for key, value in tokenizer_facts(tok).items():
        if meta[key] != value:
            differs = f'{key}={str(meta[key]):.20}, here {str(value):.20}'
            raise InputError(f"{data_folder(config)} is of another '{config['tokenizer']}' tokenizer: {differs}")
    table = table_of(config, tok)
    if meta.get('table_sha256', fingerprint(table)) != fingerprint(table):
        raise InputError(f'{data_folder(config)} holds signatures of another table; delete it and prepare it again')
    return table


def table_of(config, tok):
    """The signatures (V, H) uint16 of a tokenizer's tokens by a config."""
    settings = [config[key] for key in ('num_hashes', 'num_buckets', 'num_lsh')]
    return signature_table(tok.tokens, *settings, tok.pad, not config['single_id'])


def token_ids(tokens, table):
    """
    Tokens as some Bins hold them -> their ids (n,). Signatures (n, H) are looked up in the table (V, H). Raises
    InputError for one that it has not.
    """
    if tokens.ndim == 1:
        return tokens
    id_of = {row.tobytes(): i for i, row in enumerate(table.astype(np.uint16))}
    try:
        return np.array([id_of[row.tobytes()] for row in tokens])
    except KeyError:
        raise InputError('the bins hold a signature of no token; prepare them again') from None


def identity(meta, table):
    """What a resumed run compares of its data: the tokenizer, the signature table and the text."""
    data = {key: meta[key] for key in ('tokenizer', 'tokenizer_sha256')}
    data['table_sha256'] = None if table is None else fingerprint(table)
    data['train_sha256'] = meta['splits']['train']['sha256']
    return data


class Bins:
    """
    The shards of a split as one array: len(), and [a:b], memory-mapped within a shard: token ids (b - a,) uint16 or
    uint32, or signatures (b - a, num_hashes) uint16.
    """

    def __init__(self, folder, split, num_hashes=0):
        self.shards, self.digests, again = [], [], f'delete {folder} and run prepare.py again'
        for shard in split['shards']:
            path = folder / shard['file']
            try:
                ids = np.load(path, mmap_mode='r')
            except FileNotFoundError:
                raise InputError(f'{path} is missing; {again}') from None
            # numpy's errors over a damaged header are many
            except Exception as e:
                raise InputError(f'{path} is no whole bin ({e!s:.200}); {again}') from None
            shape = (shard['tokens'], num_hashes) if num_hashes else (shard['tokens'],)
            if ids.shape != shape or ids.dtype not in (np.uint16, np.uint32):
                raise InputError(f'{path} holds {ids.shape} {ids.dtype}, meta.json says {shape}; {again}')
            self.shards.append(ids)
            self.digests.append((path, shard['digest']))
        self.ends = np.cumsum([len(ids) for ids in self.shards]).tolist()

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, span):
        start, stop, _ = span.indices(len(self))
        pieces, k = [], bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[k] - len(self.shards[k])
            pieces.append(self.shards[k][start - begin : stop - begin])
            start, k = self.ends[k], k + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self.shards[0][:0]])

    def verify(self, which=slice(None)):
        """Reads the shards `which` through. Raises InputError at the first whose digest is not that of meta.json."""
        for path, digest in self.digests[which]:
            with open(path, 'rb') as f:
                found = digest_of(f).digest().hex()
            if found != digest:
                raise InputError(f'{path} is damaged: its digest is {found}, meta.json says {digest}; prepare it again')


def held_out_split(folder, tok):
    """(token ids, bytes of text) of the held-out split of a folder of bins. Raises InputError for another tokenizer."""
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        raise InputError(f'{folder}: not a folder of prepare.py') from None
    if meta['tokenizer_sha256'] != tokenizer_fingerprint(tok):
        raise InputError(f"{folder} was made with tokenizer '{meta['tokenizer']}', the model's is '{tok.name}'")
    split = meta['splits']['val']
    table = table_of(meta, tok) if meta['bins'] == 'signatures' else None
    tokens = Bins(folder, split, meta.get('num_hashes', 0))[:]
    return token_ids(tokens, table).tolist(), split['bytes']


class Verified:
    """
    Reads this process's share of the shards of some Bins through, in a thread, while training goes on. `damage` is the
    InputError that it has found so far, or None.
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
        """Waits so long for the thread to end. Raises the damage that it has found by then."""
        self.thread.join(seconds)
        if self.damage:
            raise self.damage


def open_bins(config, meta, split):
    """The Bins of 'train' or 'val'. Raises InputError where a shard is not whole."""
    return Bins(data_folder(config), meta['splits'][split], meta.get('num_hashes', 0))


def digest_of(file):
    """MurmurHash3 of the numbers of an open shard, to go on with: it is damage that this detects, not malice."""
    file.seek(HEADER)
    return hashlib.file_digest(file, mmh3.mmh3_x64_128)


def shuffled(index, n, seed, epoch=0):
    """Where `index` (int64 array) lands in the permutation of 0..n-1 that is named by (seed, epoch), int64."""
    # a Feistel network over the next power of 4, with cycle walking: no permutation is too large for the memory
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)

    def once(x):
        left, right = x >> np.uint64(half), x & mask
        for key in keys:
            # splitmix64's finaliser as the round function
            z = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, (left ^ z ^ (z >> np.uint64(31))) & mask
        return left << np.uint64(half) | right

    x = once(np.atleast_1d(np.asarray(index, np.uint64)))
    while (outside := x >= n).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


def blocks_of(step, batch_size, num_blocks, seed):
    """The blocks of update `step`, (batch_size,) int64, by seed and step alone; each epoch is a fresh permutation."""
    i = np.arange(step * batch_size, (step + 1) * batch_size)
    blocks = np.empty_like(i)
    for epoch in np.unique(i // num_blocks):
        of_epoch = i // num_blocks == epoch
        blocks[of_epoch] = shuffled(i[of_epoch] % num_blocks, num_blocks, seed, int(epoch))
    return blocks


def read_ahead(iterable):
    """The same items, each made in a thread while the one before is used."""
    iterator, end = iter(iterable), object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, iterator, end)
            yield item
