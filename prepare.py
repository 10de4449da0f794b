"""
Text in, signatures out: tokenises data sets and writes the bins that train.py memory-maps. It may be stopped at any
moment; the same command then goes on and ends with the same bytes.

    $ python prepare.py config/mhf_tiny.py                      # the Python standard library, in seconds
    $ python prepare.py                                         # FineWeb-Edu sample-10BT
    $ python prepare.py --dataset='books/*.jsonl.xz' --tokenizer=tekken
    $ python prepare.py --dataset='fineweb-2:arb_Arab@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu@2e9'    # tokens of each
    $ python prepare.py config/mhf_1b.py --part=0/4             # on the first of four machines

One thread reads while the tokenizer's threads use all cores. Where one reader cannot feed them, run several parts on
the machine. mhf/bins.py describes the files. A document's way to the loss:

    documents      mhf/sources.py  the stripped text of each document; `batches` says which documents are held out
    tokenise       prepare.py      texts -> token ids (n,), bos before each document, by threads of mhf/tokenizers.py
    sign           hashing.py      token ids -> signatures (n, H), rows of the table; with --data_format=ids train.py does it
    Shards.append  prepare.py      signatures, back to back, into train_000000.bin and the files after it

and then, when train.py reads the bins,

    Bins           mhf/bins.py     the files as one array, memory-mapped
    block_indices      mhf/bins.py     which blocks of tokens a step trains on, in an order that the seed shuffles
    read_batch     train.py        a process's share of them, (n, T + 1, H); inputs_and_targets takes it to the device,
                                   signs ids (MHF.sign), and shifts by one: inputs x and targets y, each (n, T, H)
    MHF.forward    model.py        hidden_states of x, then head_loss of these and y: the mean loss
"""

import contextlib
import json
import math
import os
import sys
import time
from array import array
from pathlib import Path

import mmh3
import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from configurator import InputError, configure
from hashing import fingerprint
from mhf.bins import HEADER, digest_of, prefetch
from mhf.files import replace_durably
from mhf.meta import OF_SIGNATURES, SPLITS, data_folder, holds_signatures, parsed_meta, table_of
from mhf.sources import START, Source, batches, mixture
from mhf.tokenizers import get_tokenizer, tokenizer_facts

# what to read: stdlib | fineweb-edu | fineweb-edu:sample-100BT | fineweb-edu-dedup | fineweb-2:arb_Arab, or files and
# globs of .txt .jsonl (also .gz .xz .zst) or .parquet; commas between several, and @tokens after each of a mixture
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '' is data/<dataset>_<tokenizer>
# mistral | tekken | gpt2 or any other of tiktoken's | a file *.model or tokenizer.json | a hub id user/name[@revision]
tokenizer = 'mistral'
# what the bins hold: signatures, 2 * num_hashes bytes a token, which train.py reads as they are | ids, 2 bytes a token
# (4 with more than 65,536 tokens), which serve every num_hashes and num_buckets. A Standard model's bins hold ids
data_format = 'signatures'
num_hashes = 4
num_buckets = 16384
num_lsh = 0
single_id = False
# held-out text: every round(1/val_fraction)-th document until val_bytes; with fewer documents, the tail of each
val_fraction = 0.005
val_bytes = 4000000
# the run
shard_tokens = 100000000  # tokens of one file
part = ''  # i/n: this run reads every n-th file from file i (from 0); train.py joins the parts

config = configure(globals())

# the settings that decide what the bins hold, and with signatures also OF_SIGNATURES
RECIPE = ('dataset', 'tokenizer', 'data_format', 'part', 'shard_tokens', 'val_fraction', 'val_bytes')
COMMIT_SECONDS = 20  # what a kill, Ctrl-C or an error loses at most


def tokenise(tok, batch, most):
    """
    A batch of (text, is it held out?) -> {split: (ids (n,) uint32, number of documents, bytes of text)}. Each document
    begins with bos. The batch ends early with the document that gives train its `most`-th id.
    """
    # an array takes over a list in a seventh of the time that numpy needs
    ids = {split: array('I') for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    size = dict.fromkeys(SPLITS, 0)
    texts = [text for text, _ in batch]
    for (text, held_out), ids_of_text in zip(batch, tok.encode(texts), strict=True):
        if len(ids['train']) >= most:
            break
        split = 'val' if held_out else 'train'
        ids[split].append(tok.bos)
        ids[split].fromlist(ids_of_text)
        documents[split] += 1
        size[split] += len(text.encode())
    return {split: (np.asarray(ids[split]), documents[split], size[split]) for split in SPLITS}


class Shards:
    """
    Writes the tokens of a split as .npy files of `size` tokens. Each has another name until it is whole and fsynced.
    `token` is an array with the shape and dtype of every token: () for an id, (H,) for a signature.
    """

    def __init__(self, folder, name, token, size, state):
        self.folder = folder
        self.name = name
        self.token = token
        self.size = size
        # what meta.json says of the split; it goes on from there
        self.state = state
        self.file = None
        self.tokens = state['unfinished']  # in the shard at work
        self.has_finished = False  # a shard, since the last commit
        self._roll_back()

    def _roll_back(self):
        """To the last commit: deletes later shards, reopens one that was finished since, cuts off later tokens."""
        if self.tokens and self._path().exists():
            os.replace(self._path(), self._unfinished())
        committed = {shard['file'] for shard in self.state['shards']}
        if self.tokens:
            committed.add(self._unfinished().name)
        for path in self.files():
            if path.name not in committed:
                path.unlink()
        if self.tokens:
            path = self._unfinished()
            length = HEADER + self.tokens * self.token.nbytes
            if not path.exists() or path.stat().st_size < length:
                raise InputError(f'{path} is missing or too short; delete {self.folder} and prepare it again')
            self.file = open(path, 'r+b')
            self.file.truncate(length)
            self.digest = digest_of(self.file)
            self.file.seek(0, os.SEEK_END)

    def files(self):
        return list(self.folder.glob(f'{self.name}_[0-9]*.bin*'))

    def _path(self):
        return self.folder / f'{self.name}_{len(self.state["shards"]):06}.bin'

    def _unfinished(self):
        return self._path().with_suffix('.bin.tmp')

    def append(self, tokens, documents, size):
        """Writes tokens, ids (n,) or signatures (n, H), that are so many documents with so many bytes of text."""
        self.state['tokens'] += len(tokens)
        self.state['documents'] += documents
        self.state['bytes'] += size
        tokens = tokens.astype(self.token.dtype)
        while len(tokens):
            if self.file is None:
                self.file = open(self._unfinished(), 'wb')
                self.tokens = 0
                self.digest = mmh3.mmh3_x64_128()
                self._write_header()
            room = self.size - self.tokens
            self.file.write(tokens[:room])
            self.digest.update(tokens[:room])
            self.tokens += len(tokens[:room])
            tokens = tokens[room:]
            if self.tokens == self.size:
                self.finish()

    def _write_header(self):
        self.file.seek(0)
        header = dict(descr=self.token.dtype.str, fortran_order=False, shape=(self.tokens, *self.token.shape))
        np.lib.format.write_array_header_1_0(self.file, header)
        assert self.file.tell() == HEADER

    def sync(self):
        """Makes what was written so far outlast a crash; `state` then says how much is in the shard at work."""
        self.has_finished = False
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.state['unfinished'] = self.tokens if self.file else 0

    def finish(self):
        """Gives the shard at work its name."""
        if self.file:
            self._write_header()
            self.sync()
            self.file.close()
            path = self._path()
            replace_durably(self._unfinished(), path)
            self.state['shards'].append(dict(file=path.name, tokens=self.tokens, digest=self.digest.digest().hex()))
            self.file = None
            self.has_finished = True


def commit(path, meta, shards, progress):
    """
    Writes meta.json: all that was written so far counts, and the next run reads on from `progress`. None completes the
    bins.
    """
    for split in shards.values():
        if progress:
            split.sync()
        else:
            split.finish()
    if progress:
        meta['progress'] = progress
    else:
        del meta['progress']
        for split in SPLITS:
            del meta['splits'][split]['unfinished']
    meta['complete'] = progress is None
    temporary = path.with_suffix('.tmp')
    with open(temporary, 'w') as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    replace_durably(temporary, path)


@contextlib.contextmanager
def locked(folder, name):
    """Makes the folder if need be, and keeps any other prepare.py from the same meta.json. Raises InputError."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f'.{name}.lock', timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(f'another prepare.py is at work in {folder}') from None
    except OSError as e:
        raise InputError(f'{folder} cannot be written ({e})') from None
    try:
        yield
    except OSError as e:
        raise InputError(f'{folder} cannot be written ({e}); the same command goes on from the last commit') from None
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        # a run that wrote nothing leaves no folders; rmdir refuses one with files in it
        with contextlib.suppress(OSError):
            for path in new_folders:
                path.rmdir()


def previous_meta(path, recipe):
    """The meta.json of a run before this one, or None. Raises InputError if its recipe, {setting: value}, differs."""
    try:
        meta = parsed_meta(path)
    except FileNotFoundError:
        return None
    if not meta['complete'] and set(meta.get('progress') or ()) != set(START):
        raise InputError(f'{path} was begun by an older prepare.py; delete the folder and prepare it again')
    for key, value in recipe.items():
        if meta.get(key) != value:
            raise InputError(f'{path.parent} has {key}={meta.get(key)}, not {value}; delete it or change --data_dir')
    return meta


def new_meta(recipe, facts, mixed):
    """The meta.json of a run that has read nothing yet, from the sources of a mixture."""
    sources = [dict(dataset=name, tokens_wanted=tokens, tokens=0) for name, tokens in mixed]
    splits = {split: dict(tokens=0, documents=0, bytes=0, shards=[], unfinished=0) for split in SPLITS}
    return recipe | facts | dict(complete=False, sources=sources, splits=splits, progress=START)


def read_and_tokenise(sources, meta, config, tok, parts):
    """Yields (what tokenise makes of a batch, the progress after it) from meta['progress'] on, source by source."""
    tokens_wanted = sum(entry['tokens_wanted'] or 0 for entry in meta['sources'])
    val_bytes = config['val_bytes'] // (parts * len(sources))  # of each source
    progress = meta['progress']
    bar = tqdm(
        desc='prepare',
        total=tokens_wanted or None,
        initial=meta['splits']['train']['tokens'],
        unit=' tokens',
        unit_scale=True,
        leave=False,
        delay=1,
        mininterval=0.2 if sys.stderr.isatty() else 20,
    )
    with bar:
        for k in range(progress['source'], len(sources)):
            entry = meta['sources'][k]
            limit = math.inf if entry['tokens_wanted'] is None else entry['tokens_wanted']
            # a thread reads the next batch while the tokenizer's threads work at this one
            coming = prefetch(batches(sources[k], progress, config['val_fraction'], val_bytes))
            with contextlib.closing(coming):
                while entry['tokens'] < limit and (item := next(coming, None)):
                    batch, progress_after = item
                    tokenised = tokenise(tok, batch, limit - entry['tokens'])
                    new_tokens = len(tokenised['train'][0])
                    entry['tokens'] += new_tokens
                    bar.update(new_tokens)
                    yield tokenised, progress_after
            progress = START | dict(source=k + 1)


def write_bins(path, meta, results, table):
    """
    Writes what read_and_tokenise yields, beside meta.json at `path`. The next run cuts off what was not committed.
    table: the signatures (V, H) uint16 of all tokens; None writes ids.
    """
    if table is not None:
        token = table[0]
    elif meta['vocab_size'] <= 65536:
        token = np.zeros((), np.uint16)
    else:
        token = np.zeros((), np.uint32)
    shards = {}
    for split, state in meta['splits'].items():
        # meta_0of4.json goes with train_0of4_000000.bin
        name = path.stem.replace('meta', split)
        shards[split] = Shards(path.parent, name, token, meta['shard_tokens'], state)
    committed = time.monotonic()
    try:
        for tokenised, progress in results:
            for split in SPLITS:
                ids, documents, size = tokenised[split]
                tokens = ids if table is None else table[ids]
                shards[split].append(tokens, documents, size)
            if any(s.has_finished for s in shards.values()) or time.monotonic() > committed + COMMIT_SECONDS:
                commit(path, meta, shards, progress)
                committed = time.monotonic()
        for split, state in meta['splits'].items():
            if state['tokens'] < 2:
                too_little = f"dataset '{meta['dataset']}' gave {state['tokens']} {split} tokens: too little text"
                raise InputError(f'{too_little}; take more of it, or change val_fraction={meta["val_fraction"]}')
        commit(path, meta, shards, None)
    finally:
        for split in shards.values():
            if split.file:
                split.file.close()
        # a run that never committed leaves no files
        if not path.exists():
            for leftover in (*shards['train'].files(), *shards['val'].files(), path.with_suffix('.tmp')):
                leftover.unlink(missing_ok=True)


def check_settings(config):
    """Raises InputError where a number is outside its range."""
    for key, least in dict(val_bytes=0, shard_tokens=1).items():
        if config[key] < least:
            raise InputError(f'{key}={config[key]}: must be {least} or more')
    if not 0 < config['val_fraction'] < 1:
        raise InputError(f'val_fraction={config["val_fraction"]}: must be between 0 and 1')


def parsed_part(text):
    """'1/4' -> (1, 4), and '', all in one part, -> (0, 1). Raises InputError."""
    i, _, n = (text or '0/1').partition('/')
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise InputError(f"part='{text}': must be like 0/4, the first of four, to 3/4")
    return int(i), int(n)


def recipe_of(config):
    """{setting: value} of all settings that decide what the bins hold."""
    recipe = {key: config[key] for key in RECIPE}
    if holds_signatures(config):
        recipe |= {key: config[key] for key in OF_SIGNATURES}
    else:
        recipe['data_format'] = 'ids'
    return recipe


def main(config):
    """Reads, tokenises and writes the part of the data set that config names. Raises InputError."""
    check_settings(config)
    i, n = parsed_part(config['part'])
    folder = data_folder(config)
    path = folder / (f'meta_{i}of{n}.json' if config['part'] else 'meta.json')
    for other in folder.glob('meta*.json'):
        if (other.name == 'meta.json') == bool(config['part']):
            raise InputError(f"{folder} holds {other.name}, no place for part='{config['part']}'; change --data_dir")
    with locked(folder, path.stem):
        recipe = recipe_of(config)
        meta = previous_meta(path, recipe)
        if meta and meta['complete']:
            print(f'{folder} is prepared already; delete it to make it again')
            return
        mixed = [(name, tokens and tokens // n) for name, tokens in mixture(config['dataset'])]
        tok = get_tokenizer(config['tokenizer'])
        table = table_of(config, tok) if holds_signatures(config) else None
        sources = [Source(name, share=(i, n)) for name, _ in mixed]
        facts = tokenizer_facts(tok) | dict(made_from=[source.made_from for source in sources])
        if table is not None:
            facts['table_sha256'] = fingerprint(table)
        if meta is None:
            meta = new_meta(recipe, facts, mixed)
        for key, value in facts.items():
            if meta.get(key) != value:
                raise InputError(f'{folder} was begun with other text or tokenizer: its {key} differs; delete it')
        with contextlib.closing(read_and_tokenise(sources, meta, config, tok, parts=n)) as results:
            write_bins(path, meta, results, table)
    report(meta, folder)


def report(meta, folder):
    """Prints what was read of each source of a mixture, and what was written."""
    for entry in meta['sources']:
        tokens_wanted = entry['tokens_wanted']
        if tokens_wanted:
            share = entry['tokens'] / max(1, meta['splits']['train']['tokens'])
            print(f'{entry["dataset"]}: {entry["tokens"]:,} of {tokens_wanted:,} tokens, {share:.2%} of all')
            if entry['tokens'] < tokens_wanted:
                print(f'warning: {entry["dataset"]} ran dry: it has no more text', file=sys.stderr)
    for name, split in meta['splits'].items():
        more = ' ...' if len(split['shards']) > 1 else ''
        counts = f'{split["tokens"]:,} tokens, {split["documents"]:,} documents, {split["bytes"]:,} bytes of text'
        print(f'{name}: {counts} -> {folder}/{split["shards"][0]["file"]}{more}')


if __name__ == '__main__':
    try:
        main(config)
    except KeyboardInterrupt:
        print(f'interrupted; the same command goes on, at most {COMMIT_SECONDS} seconds before this', file=sys.stderr)
        sys.exit(130)
