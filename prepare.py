"""
Text in, signatures out: tokenises data sets and writes the bins that train.py memory-maps. Stopped at any moment, the
same command goes on and ends with the same bytes.

    $ python prepare.py config/mhf_tiny.py                      # the Python standard library, in seconds
    $ python prepare.py                                         # FineWeb-Edu sample-10BT
    $ python prepare.py --dataset='books/*.jsonl.xz' --tokenizer=tekken
    $ python prepare.py --dataset='fineweb-2:arb_Arab@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu@2e9'    # tokens of each
    $ python prepare.py config/mhf_1b.py --part=0/4             # on the first of four machines

One thread reads while those of the tokenizer use all cores; where one reader cannot feed them, run several parts on the
machine. bins.py describes what is written. A document's way to the loss:

    documents -> batches          sources.py: the text of files, stripped; which of it is held out
    tokenise -> Shards.write      here: token ids, bos before each document; their signatures, back to back in files
    blocks_of -> read_batch       bins.py, train.py: blocks of tokens in their shuffled order; ids are signed there
    MHF.forward                   model.py: hidden states, the loss
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
from mhf.bins import (
    HEADER,
    OF_SIGNATURES,
    SPLITS,
    data_folder,
    digest_of,
    holds_signatures,
    parsed_meta,
    read_ahead,
    table_of,
    tokenizer_facts,
)
from mhf.files import replace_durably
from mhf.sources import START, Source, batches, mixture
from mhf.tokenizers import get_tokenizer

# what to read: stdlib | fineweb-edu | fineweb-edu:sample-100BT | fineweb-edu-dedup | fineweb-2:arb_Arab | files, globs
# of .txt .jsonl .parquet, the first two also .gz .xz .zst; several of a kind with commas, a mixture with @tokens each
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '' is data/<dataset>_<tokenizer>
# mistral | tekken | gpt2, or any of tiktoken's | a file *.model or tokenizer.json | the latter's user/name[@revision]
tokenizer = 'mistral'
# signatures: num_hashes numbers of 2 bytes a token, which train.py reads as they are | ids: 2 bytes a token, 4 above
# 65,536 tokens, which serve every num_hashes and num_buckets. The bins of a Standard model hold ids
bins = 'signatures'
num_hashes = 4
num_buckets = 16384
num_lsh = 0
single_id = False
# held-out text: every round(1/val_fraction)-th document until val_bytes; of fewer documents than that, the tail of each
val_fraction = 0.005
val_bytes = 4000000
shard_tokens = 100000000  # of a file of bins
part = ''  # i/n: reads every n-th file from the i-th (from 0); train.py joins the parts

config = configure(globals())

# what decides what the bins hold
RECIPE = ('dataset', 'tokenizer', 'bins', 'part', 'shard_tokens', 'val_fraction', 'val_bytes')
COMMIT_SECONDS = 20  # what a kill, Ctrl-C or an error loses at most


def tokenise(tok, batch, most):
    """
    A batch of (text, is it held out?) -> {split: (ids (n,) uint32, number of documents, bytes of text)}, up to the
    document with which train has `most` ids. Each document begins with bos.
    """
    # takes over a list in a seventh of numpy's time
    ids = {split: array('I') for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    size = dict.fromkeys(SPLITS, 0)
    texts = [text for text, _ in batch]
    for (text, held_out), found in zip(batch, tok.encode(texts), strict=True):
        if len(ids['train']) >= most:
            break
        split = 'val' if held_out else 'train'
        ids[split].append(tok.bos)
        ids[split].fromlist(found)
        documents[split] += 1
        size[split] += len(text.encode())
    return {split: (np.asarray(ids[split]), documents[split], size[split]) for split in SPLITS}


class Shards:
    """
    Writes the tokens of a split as .npy files of `size` tokens, each under another name until it is whole and fsynced.
    A token is like `one`, an array: a number, or a signature.
    """

    def __init__(self, folder, name, one, size, state):
        self.folder = folder
        self.name = name
        self.one = one
        self.size = size
        # of the split, in meta.json
        self.state = state
        self.file = None
        self.tokens = state['unfinished']
        self.has_finished = False
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
            length = HEADER + self.tokens * self.one.nbytes
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

    def write(self, tokens, documents, size):
        """The tokens, ids (n,) or signatures (n, H), of so many documents with so many bytes of text."""
        self.state['tokens'] += len(tokens)
        self.state['documents'] += documents
        self.state['bytes'] += size
        tokens = tokens.astype(self.one.dtype)
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
        about = dict(descr=self.one.dtype.str, fortran_order=False, shape=(self.tokens, *self.one.shape))
        np.lib.format.write_array_header_1_0(self.file, about)
        assert self.file.tell() == HEADER

    def sync(self):
        """What was written so far outlasts a crash; `state` says how much there is of the shard at work."""
        self.has_finished = False
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.state['unfinished'] = self.tokens if self.file else 0

    def finish(self):
        """The shard at work gets its name."""
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
    """All that was written so far counts, and reading goes on from `progress`; without one, the run is complete."""
    for split in shards.values():
        split.sync() if progress else split.finish()
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
    """The folder, made if need be, with no other prepare.py at work on the same meta.json."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
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
        # of a run that wrote nothing, nothing is left
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()


def previous_meta(path, recipe):
    """The meta.json that a run before this one left, or None. Raises InputError where it is of another recipe."""
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
    """The meta.json of nothing read yet."""
    sources = [dict(dataset=name, tokens_wanted=tokens, tokens=0) for name, tokens in mixed]
    splits = {split: dict(tokens=0, documents=0, bytes=0, shards=[], unfinished=0) for split in SPLITS}
    return recipe | facts | dict(complete=False, sources=sources, splits=splits, progress=START)


def read_and_tokenise(sources, meta, config, tok, parts):
    """(what tokenise made of a batch, the progress after it), from meta['progress'] on, source by source, in order."""
    wanted = sum(entry['tokens_wanted'] or 0 for entry in meta['sources']) or None
    often = 0.2 if sys.stderr.isatty() else 20
    how = dict(unit=' tokens', unit_scale=True, delay=1, mininterval=often, leave=False)
    progress = meta['progress']
    with tqdm(desc='prepare', total=wanted, initial=meta['splits']['train']['tokens'], **how) as bar:
        for k in range(progress['source'], len(sources)):
            entry = meta['sources'][k]
            limit = math.inf if entry['tokens_wanted'] is None else entry['tokens_wanted']
            val_bytes = config['val_bytes'] // (parts * len(sources))
            # a thread reads the next batch while those of the tokenizer work at this one
            feed = read_ahead(batches(sources[k], progress, config['val_fraction'], val_bytes))
            with contextlib.closing(feed):
                while entry['tokens'] < limit and (item := next(feed, None)):
                    batch, progress_after = item
                    made = tokenise(tok, batch, limit - entry['tokens'])
                    entry['tokens'] += len(made['train'][0])
                    bar.update(len(made['train'][0]))
                    yield made, progress_after
            progress = START | dict(source=k + 1)


def write_bins(path, meta, results, table):
    """
    Writes what read_and_tokenise gives, beside meta.json, `path`; the next run cuts off what no commit followed.
    table: the signatures (V, H) uint16 to write for ids; None writes the ids.
    """
    one = np.zeros((), np.uint16 if meta['vocab_size'] <= 65536 else np.uint32)
    if table is not None:
        one = table[0]
    shards = {}
    for split, state in meta['splits'].items():
        # meta_0of4.json goes with train_0of4_000000.bin
        shards[split] = Shards(path.parent, path.stem.replace('meta', split), one, meta['shard_tokens'], state)
    committed = time.monotonic()
    try:
        for made, progress in results:
            for split in SPLITS:
                ids, documents, size = made[split]
                shards[split].write(ids if table is None else table[ids], documents, size)
            if any(s.has_finished for s in shards.values()) or time.monotonic() > committed + COMMIT_SECONDS:
                commit(path, meta, shards, progress)
                committed = time.monotonic()
        for split, found in meta['splits'].items():
            if found['tokens'] < 2:
                gave = f"dataset '{meta['dataset']}' gave {found['tokens']} {split} tokens: too little text"
                raise InputError(f'{gave}; take more of it, or change val_fraction={meta["val_fraction"]}')
        commit(path, meta, shards, None)
    finally:
        for split in shards.values():
            if split.file:
                split.file.close()
        # where nothing was ever committed, nothing is left
        if not path.exists():
            for leftover in (*shards['train'].files(), *shards['val'].files(), path.with_suffix('.tmp')):
                leftover.unlink(missing_ok=True)


def main(config):
    """Reads, tokenises and writes the part of the data set that config names. Raises InputError."""
    for key, least in dict(val_bytes=0, shard_tokens=1).items():
        if config[key] < least:
            raise InputError(f'{key}={config[key]}: must be {least} or more')
    if not 0 < config['val_fraction'] < 1:
        raise InputError(f'val_fraction={config["val_fraction"]}: must be between 0 and 1')
    i, _, n = (config['part'] or '0/1').partition('/')
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise InputError(f"part='{config['part']}': must be like 0/4, the first of four, to 3/4")
    i, n = int(i), int(n)
    folder = data_folder(config)
    path = folder / (f'meta_{i}of{n}.json' if config['part'] else 'meta.json')
    for other in folder.glob('meta*.json'):
        if (other.name == 'meta.json') == bool(config['part']):
            raise InputError(f"{folder} holds {other.name}, no place for part='{config['part']}'; change --data_dir")
    with locked(folder, path.stem):
        recipe = {key: config[key] for key in RECIPE}
        if holds_signatures(config):
            recipe |= {key: config[key] for key in OF_SIGNATURES}
        else:
            recipe['bins'] = 'ids'
        meta = previous_meta(path, recipe)
        if meta and meta['complete']:
            print(f'{folder} is prepared already; delete it to make it again')
            return
        mixed = [(name, tokens and tokens // n) for name, tokens in mixture(config['dataset'])]
        tok = get_tokenizer(config['tokenizer'])
        table = table_of(config, tok) if holds_signatures(config) else None
        sources = [Source(name, (i, n)) for name, _ in mixed]
        facts = tokenizer_facts(tok) | dict(made_from=[source.made_from for source in sources])
        if table is not None:
            facts['table_sha256'] = fingerprint(table)
        for key, value in facts.items():
            if meta and meta.get(key) != value:
                raise InputError(f'{folder} was begun with other text or tokenizer: its {key} differs; delete it')
        meta = meta or new_meta(recipe, facts, mixed)
        with contextlib.closing(read_and_tokenise(sources, meta, config, tok, n)) as results:
            write_bins(path, meta, results, table)
    report(meta, folder)


def report(meta, folder):
    for entry in meta['sources']:
        wanted = entry['tokens_wanted']
        if wanted:
            share = entry['tokens'] / max(1, meta['splits']['train']['tokens'])
            print(f'{entry["dataset"]}: {entry["tokens"]:,} of {wanted:,} tokens, {share:.2%} of all')
            if entry['tokens'] < wanted:
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
