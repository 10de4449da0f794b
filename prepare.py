"""
Text in, signature bins out: tokenises a data set and writes what train.py memory-maps.

    $ python prepare.py config/mhf_tiny.py                                # the Python standard library, in seconds
    $ python prepare.py                                                   # FineWeb-Edu sample-10BT for H4B16K
    $ python prepare.py --dataset='books/*.jsonl.xz' --num_hashes=3 --num_buckets=2048

Writes data_dir/train.bin and val.bin (numpy's .npy layout, (tokens, H) uint16; the Standard model's have one column, the
token id), signatures.npy (the table) and meta.json (what they were made from). Every document is stripped, empty ones are
dropped, and each begins with bos; documents are packed back to back.
"""

import codecs
import glob
import gzip
import hashlib
import io
import json
import logging
import lzma
import multiprocessing
import os
import platform
import re
import sys
import sysconfig
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from configurator import declared
from hashing import InputError, did_you_mean, fingerprint, get_tokenizer, signature_table, tokenizer_fingerprint

# what to read: stdlib | fineweb-edu:sample-10BT | fineweb-edu:sample-100BT | files or globs of .txt .jsonl .parquet, the
# first two also as .gz .xz .zst, several separated by commas
dataset = 'fineweb-edu:sample-10BT'
data_dir = ''  # where to write; '' is data/<dataset>_<tokenizer>_<signature>
tokenizer = 'mistral'  # mistral | tekken | gpt2 | cl100k_base | o200k_base | any tiktoken encoding
# signatures
num_hashes = 4  # H; 0 writes token ids, for the Standard model
num_buckets = 16384  # B
num_lsh = 0  # the first num_lsh coordinates from LSH of trigrams (ablation)
single_id = False  # one hash on all coordinates, collisions stay (ablation)
# held-out text: every round(1/val_fraction)-th document until val_bytes; of fewer documents than that, the tail of each
val_fraction = 0.005
val_bytes = 4000000
num_workers = 0  # processes that tokenise; 0 is one per core

# -----------------------------------------------------------------------------

HUB = {'fineweb-edu': ('HuggingFaceFW/fineweb-edu', ('sample-10BT', 'sample-100BT', 'sample-350BT', 'default'))}
TEXT_SUFFIXES = ('.txt', '.jsonl', '.parquet')
BATCH_CHARS = 1 << 20  # a worker's portion
PIECE_CHARS = 1 << 23  # a longer .txt is cut at line ends
# of a test directory of the standard library no file is used
NOT_STDLIB = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}


def data_folder(config):
    """The folder of a config's bins."""
    if config['data_dir']:
        return Path(config['data_dir'])
    name = config['dataset']
    if re.search(r'[^\w:.-]', name):  # files: the last one's name, and a digest of the whole
        name = f'{name.split("/")[-1]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}'
    kind = 'ids'
    if config['num_hashes']:
        kind = f'H{config["num_hashes"]}B{config["num_buckets"]}'
        kind += f'lsh{config["num_lsh"]}' * (config['num_lsh'] > 0) + 'single' * config['single_id']
    return Path('data') / '_'.join([re.sub(r'[^\w.-]+', '-', name), config['tokenizer'], kind])


# -----------------------------------------------------------------------------
# reading: every source is an iterator of texts


class Source:
    """Iterates over the texts of `dataset`. `bar` is moved by what was read; `replaced` counts bytes that were not UTF-8."""

    def __init__(self, dataset):
        self.replaced = 0
        self.bar = None
        self.read = None  # () -> iterator of texts
        self.total = None  # what the bar will reach, in bytes; None where that is not known
        kind, _, name = dataset.partition(':')
        if dataset == 'stdlib':
            root = Path(sysconfig.get_paths()['stdlib'])
            paths = sorted(p for p in root.rglob('*.py') if not NOT_STDLIB & set(p.relative_to(root).parts))
            self.made_from = {'python': platform.python_version(), 'files': len(paths)}
            self._use_files(paths)
        elif kind in HUB:
            hub_id, names = HUB[kind]
            name = name or 'sample-10BT'
            if name not in names:
                raise InputError(
                    f"unknown subset '{name}' of {kind}{did_you_mean(name, names)} (known: {', '.join(names)})"
                )
            self.made_from = {'hub': hub_id, 'name': name}
            self.read = lambda: self._hub(hub_id, name=name)
        else:
            paths = []
            for pattern in dataset.split(','):
                found = (
                    [pattern]
                    if os.path.isfile(pattern)
                    else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
                )
                if not found:
                    hint = did_you_mean(dataset, ['stdlib', *(f'{k}:{n}' for k in HUB for n in HUB[k][1])])
                    raise InputError(f"dataset '{pattern}': no such file, glob or data set{hint}")
                paths += map(Path, found)
            for path in paths:
                if self._suffix(path) not in TEXT_SUFFIXES:
                    raise InputError(f'{path}: expected {" ".join(TEXT_SUFFIXES)}, the first two also .gz .xz .zst')
            self.made_from = {'files': [[str(p), p.stat().st_size] for p in paths]}
            self._use_files(paths)

    def _use_files(self, paths):
        self.total = sum(p.stat().st_size for p in paths)
        self.read = lambda: (text for p in paths for text in self._file(p))

    @staticmethod
    def _suffix(path):
        suffixes = path.suffixes[-2:]
        packed = suffixes and suffixes[-1] in ('.gz', '.xz', '.zst')
        if packed and suffixes[0] == '.parquet':
            raise InputError(f'{path}: parquet files are compressed inside; unpack this one first')
        return suffixes[0] if packed else (suffixes or [''])[-1]

    def _file(self, path):
        if path.suffix == '.parquet':
            yield from self._hub('parquet', data_files=str(path))
            self.bar.update(path.stat().st_size)
            return
        seen = 0
        try:
            with open(path, 'rb') as raw:
                unpack = {'.gz': gzip.open, '.xz': lzma.open, '.zst': _open_zst}.get(path.suffix, lambda f: f)
                lines = io.TextIOWrapper(unpack(raw), encoding='utf-8-sig', errors=self._replace(), newline='\n')
                for text in _json_texts(path, lines) if self._suffix(path) == '.jsonl' else _pieces(lines):
                    yield text
                    seen, before = raw.tell(), seen
                    self.bar.update(seen - before)
        except (EOFError, OSError, lzma.LZMAError, _zst_error()) as e:
            raise InputError(f'{path} cannot be read to its end ({type(e).__name__}: {e}); is it truncated?') from None

    def _replace(self):
        def count(error):
            self.replaced += error.end - error.start
            return '\ufffd', error.end

        codecs.register_error('count_and_replace', count)
        return 'count_and_replace'

    def _hub(self, path, **where):
        """Parquet files, of the hub or local, through `datasets`: only the text column is read, as a stream."""
        import datasets
        import huggingface_hub

        huggingface_hub.logging.set_verbosity(logging.CRITICAL)  # our one line says it all
        datasets.logging.set_verbosity(logging.CRITICAL)
        try:
            rows = datasets.load_dataset(path, split='train', streaming=True, **where)
            if rows.column_names and 'text' not in rows.column_names:
                raise InputError(f"{where or path}: no field 'text'; there are: {', '.join(rows.column_names)}")
            for row in rows.select_columns(['text']):
                yield row['text'] or ''
        except InputError:
            raise
        except Exception as e:  # no network, no such data set, a damaged file: their own words say which
            what = where.get('data_files') or f"dataset '{path}'"
            raise InputError(f'{what} cannot be read ({type(e).__name__}: {" ".join(str(e).split())[:200]})') from None


def _open_zst(raw):
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)


def _zst_error():
    import zstandard

    return zstandard.ZstdError


def _json_texts(path, lines):
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InputError(f'{path}, line {n}: not JSON ({e})') from None
        if not isinstance(row, dict) or 'text' not in row:
            there = ', '.join(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{path}, line {n}: no field 'text'; there are: {there}")
        if not isinstance(row['text'], (str, type(None))):
            raise InputError(f"{path}, line {n}: field 'text' is {type(row['text']).__name__}, expected a string")
        yield row['text'] or ''


def _pieces(file):
    while text := file.read(PIECE_CHARS):
        yield text + file.readline(PIECE_CHARS)


def documents(source, stats):
    """Stripped, non-empty texts that can be encoded as UTF-8."""
    for text in source.read():
        text = text.strip()
        if text:
            try:
                text.encode()
            except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape
                stats['surrogates'] += 1
                text = text.encode('utf-8', 'replace').decode()
            yield text


def split(texts, fraction, most_bytes):
    """Texts -> (text, held out?): every k-th document, k = 1/fraction; of fewer than k documents, the tail of each."""
    k, first, size, held = round(1 / fraction), [], 0, 0
    for text in texts:
        first.append(text)
        size += len(text)
        if len(first) == k or size > 1 << 26:
            break
    else:
        for text in first:
            cut = int(len(text) * (1 - fraction))
            cut = text.find('\n', cut) + 1 or cut  # at a line end where there is one
            yield text[:cut].strip(), False
            yield text[cut:].strip(), True
        return

    def every():
        yield from first
        yield from texts

    for i, text in enumerate(every(), 1):
        out = i % k == 0 and held < most_bytes
        held += len(text.encode()) if out else 0
        yield text, out


# -----------------------------------------------------------------------------
# tokenising, in worker processes


def _start_worker(name):
    global _tokenizer
    _tokenizer = get_tokenizer(name)


def _tokenise(batch):
    """[(text, held out?)] -> per split: ids (uint32), documents, bytes of text."""
    out = {}
    for key, wanted in (('train', False), ('val', True)):
        texts = [t for t, held in batch if held == wanted and t]
        ids = [np.array([_tokenizer.bos, *i], np.uint32) for i in _tokenizer.encode(texts)]
        out[key] = np.concatenate(ids or [np.zeros(0, np.uint32)]), len(texts), sum(len(t.encode()) for t in texts)
    return out


def batches(pairs):
    batch, size = [], 0
    for text, held in pairs:
        batch.append((text, held))
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise(pairs, name, workers):
    """The results of _tokenise in the order of the text, with at most 3 batches per worker in memory."""
    context = multiprocessing.get_context('spawn')  # no fork: `datasets` has threads
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(name,)) as pool:
        waiting = deque()
        try:
            for batch in batches(pairs):
                waiting.append(pool.submit(_tokenise, batch))
                if len(waiting) >= 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -----------------------------------------------------------------------------
# bins


class BinWriter:
    """Appends rows (n, columns) to a .npy file; its header is written again when the number of rows is known."""

    def __init__(self, path, columns, dtype):
        self.columns, self.dtype, self.rows, self.documents, self.bytes = columns, np.dtype(dtype), 0, 0, 0
        self.digest = hashlib.sha256()
        self.file = open(path, 'wb')
        self._header()

    def _header(self):  # numpy pads it so that a longer row count still fits
        self.file.seek(0)
        shape = (self.rows, self.columns)
        description = dict(descr=self.dtype.str, fortran_order=False, shape=shape)
        np.lib.format.write_array_header_1_0(self.file, description)

    def write(self, rows):
        data = np.ascontiguousarray(rows, self.dtype)
        self.file.write(data)
        self.digest.update(data)
        self.rows += len(rows)

    def close(self):
        self._header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def summary(self):
        return dict(tokens=self.rows, documents=self.documents, bytes=self.bytes, sha256=self.digest.hexdigest())


def load_meta(config):
    """meta.json of a config's data, checked against the config. Raises InputError."""
    folder = data_folder(config)
    try:
        meta = json.loads((folder / 'meta.json').read_text())
    except FileNotFoundError:
        mine = declared('prepare.py')
        args = [a for a in sys.argv[1:] if not a.startswith('--') or a[2:].partition('=')[0] in mine]
        raise InputError(f'{folder} has no prepared data; make it with: python prepare.py {" ".join(args)}') from None
    except ValueError as e:
        raise InputError(f'{folder}/meta.json is damaged ({e}); delete the folder and prepare it again') from None
    keys = (
        ('tokenizer', 'num_hashes', 'num_buckets', 'num_lsh', 'single_id')
        if config['num_hashes']
        else ('tokenizer', 'num_hashes')
    )
    for key in keys:
        if meta.get(key) != config[key]:
            raise InputError(
                f'the bins in {folder} were made with {key}={meta.get(key)}, the config has {key}={config[key]}; '
                'change the one or prepare the data again'
            )
    return meta


def open_bin(config, meta, part):
    """Memory map of split `part` ('train' or 'val'): (tokens, H) uint16, or (tokens, 1) ids. Raises InputError."""
    path = data_folder(config) / f'{part}.bin'
    try:
        rows = np.load(path, mmap_mode='r')
    except FileNotFoundError:
        raise InputError(f'{path} is missing; delete {path.parent} and run prepare.py again') from None
    except (ValueError, OSError, EOFError, SyntaxError) as e:
        raise InputError(
            f'{path} is no whole bin ({" ".join(str(e).split())[:200]}); delete {path.parent} and run prepare.py again'
        ) from None
    wanted = (meta['splits'][part]['tokens'], meta['num_hashes'] or 1)
    if rows.shape != wanted or rows.dtype.kind != 'u':
        raise InputError(
            f'{path} holds {rows.shape} {rows.dtype}, meta.json says {wanted}: not the bin that was prepared here'
        )
    return rows


def load_table(config, meta):
    """The signature table (V, H) uint16 of prepared data; None for the Standard model. Raises InputError."""
    if not config['num_hashes']:
        return None
    path = data_folder(config) / 'signatures.npy'
    try:
        table = np.load(path)
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f'{path} cannot be read ({e}); delete {path.parent} and run prepare.py again') from None
    if fingerprint(table) != meta['table_sha256']:
        raise InputError(
            f'{path} has fingerprint {fingerprint(table)[:12]}, meta.json says {meta["table_sha256"][:12]}'
        )
    return table


def main(config):
    from tqdm import tqdm

    if not 0 < config['val_fraction'] < 1:
        raise InputError(f'val_fraction={config["val_fraction"]}: must be between 0 and 1')
    if config['num_workers'] < 0 or config['num_hashes'] < 0:
        raise InputError(
            f'num_workers={config["num_workers"]}, num_hashes={config["num_hashes"]}: must not be negative'
        )
    source, folder = Source(config['dataset']), data_folder(config)
    tok = get_tokenizer(config['tokenizer'])
    V, H = len(tok.tokens), config['num_hashes']
    table = None
    if H:
        table = signature_table(
            tok.tokens, H, config['num_buckets'], config['num_lsh'], tok.pad, not config['single_id']
        )

    recipe = {k: config[k] for k in ('dataset', 'tokenizer', 'num_hashes')}
    if H:
        recipe |= {k: config[k] for k in ('num_buckets', 'num_lsh', 'single_id')}
    recipe |= dict(val_fraction=config['val_fraction'], val_bytes=config['val_bytes'])
    if (folder / 'meta.json').exists():
        there = json.loads((folder / 'meta.json').read_text())
        for key in recipe:
            if there.get(key) != recipe[key]:
                raise InputError(
                    f'{folder} holds data with {key}={there.get(key)}, not {recipe[key]}; delete it, or choose another --data_dir'
                )
        print(f'{folder} is prepared already; delete it to make it again')
        return

    columns, dtype = (H, np.uint16) if H else (1, np.uint16 if V <= 65536 else np.uint32)
    stats = dict(surrogates=0)
    parts = ('train', 'val')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writers = {p: BinWriter(folder / f'{p}.bin.tmp', columns, dtype) for p in parts}
    except OSError as e:
        raise InputError(f'{folder} cannot be written ({e})') from None
    try:
        bar = tqdm(
            total=source.total,
            unit='B',
            unit_scale=True,
            desc='prepare',
            delay=1,
            mininterval=0.2 if sys.stderr.isatty() else 20,
        )
        with bar as source.bar:
            pairs = split(documents(source, stats), config['val_fraction'], config['val_bytes'])
            for result in tokenise(pairs, config['tokenizer'], config['num_workers'] or os.cpu_count()):
                for p in parts:
                    ids, docs, size = result[p]
                    writers[p].write(table[ids] if H else ids[:, None])
                    writers[p].documents += docs
                    writers[p].bytes += size
                source.bar.set_postfix_str(f'{writers["train"].rows:,} tokens')
        for p in parts:
            writers[p].close()
            if writers[p].rows < 2:
                raise InputError(
                    f"dataset '{config['dataset']}' gave {writers[p].rows} {p} tokens from {writers[p].documents} documents: too little text"
                )
        if H:
            np.save(folder / 'signatures.npy', table)
        meta = recipe | dict(
            vocab_size=V,
            pad_id=tok.pad,
            gaps=[i for i, w in enumerate(tok.tokens) if w is None],
            tokenizer_sha256=tokenizer_fingerprint(tok),
            table_sha256=fingerprint(table) if H else None,
            splits={p: writers[p].summary() for p in parts},
            invalid_utf8=dict(bytes_replaced=source.replaced, documents_with_lone_surrogates=stats['surrogates']),
            made_from=source.made_from,
        )
        for p in parts:
            os.replace(folder / f'{p}.bin.tmp', folder / f'{p}.bin')
        temporary = folder / 'meta.json.tmp'
        temporary.write_text(json.dumps(meta, indent=1))
        os.replace(temporary, folder / 'meta.json')  # last: its presence says that the data is whole
    except OSError as e:
        raise InputError(f'{folder} cannot be written ({e})') from None
    finally:
        for leftover in folder.glob('*.tmp'):
            leftover.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()

    if source.replaced or stats['surrogates']:
        print(
            f'invalid UTF-8: {source.replaced} bytes and {stats["surrogates"]} documents with lone surrogates were replaced'
        )
    for p in parts:
        s = meta['splits'][p]
        print(
            f'{p}: {s["tokens"]:,} tokens, {s["documents"]:,} documents, {s["bytes"]:,} bytes of text -> {folder}/{p}.bin'
        )


if __name__ == '__main__':
    exec(open(Path(__file__).with_name('configurator.py'), encoding='utf-8').read())
    try:
        main(config)
    except KeyboardInterrupt:
        sys.exit('interrupted: nothing was written')
