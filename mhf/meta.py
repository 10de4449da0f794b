"""
meta.json: what a folder of bins says of itself. prepare.py writes it; here it is read, and compared with a config and
its tokenizer. Its keys are

    complete                       true at the end; before, train.py refuses the folder
    data_format                    signatures or ids; with signatures also num_hashes, num_buckets, num_lsh, single_id
                                   and table_sha256, of the whole table
    dataset, tokenizer, part ...   the settings that decide what the bins hold; prepare.py goes on only with the same
    vocab_size, pad_id, unused_ids       of the tokenizer, and tokenizer_sha256, of its strings; unused_ids are ids without a token
    made_from                      for each source a sha256 of the names and sizes of its files
    sources                        for each source: dataset, tokens_wanted (null is all), tokens
    splits {train, val}            tokens, documents, bytes of text, shards [{file, tokens, digest of its numbers}]
    progress, splits.*.unfinished  only until it is complete: where prepare.py goes on
"""

import hashlib
import json
import os
import re
import shlex
import sys
from pathlib import Path

from configurator import InputError, settings_of
from hashing import fingerprint, frequency_table, signature_table
from mhf.tokenizers import get_tokenizer, tokenizer_facts

SPLITS = ('train', 'val')
OF_SIGNATURES = ('num_hashes', 'num_buckets', 'num_lsh', 'single_id')
# the types of what is read of a complete meta.json
SPLIT_TYPES = dict(tokens=int, documents=int, bytes=int, shards=[dict(file=str, tokens=int, digest=str)])
META_TYPES = dict(
    tokenizer=str,
    vocab_size=int,
    pad_id=int,
    unused_ids=[int],
    tokenizer_sha256=str,
    splits=dict(train=SPLIT_TYPES, val=SPLIT_TYPES),
)

# -----------------------------------------------------------------------------
# the folder of a config


def data_folder(config):
    """The folder of a config's bins: data/stdlib_mistral for ids, data/stdlib_mistral_H4B16384 for signatures."""
    signatures = holds_signatures(config)
    if config['data_dir']:
        return Path(config['data_dir'])
    name = config['dataset']
    # paths, globs and mixtures: the last words of each, and a digest of the whole
    if re.search(r'[^\w:.-]', name):
        words = '-'.join(map(last_words, name.split(',')))
        name = f'{words[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}'
    name = re.sub(r'[^\w.-]+', '-', name).lstrip('-')
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
    """Whether a config's bins hold signatures; else they hold token ids. A Standard model has no signatures."""
    if config['data_format'] not in ('signatures', 'ids'):
        raise InputError(f"data_format='{config['data_format']}': must be signatures or ids")
    return config['data_format'] == 'signatures' and config['num_hashes'] > 0


def last_words(path):
    """
    What data_folder calls a path: the name of a file; of a glob, the last two parts that are not all wildcards.
    'a/ar.jsonl@2e9' -> 'ar.jsonl', 'books/*.txt' -> 'books-txt'
    """
    path = re.sub(r'@[\d.e+]+$', '', path)
    is_glob = re.search(r'[*?[]', path)
    words = []
    for name in path.split('/'):
        word = re.sub(r'[*?[\]]', '', name).strip('.-')
        if word:
            words.append(word)
    return '-'.join(words[-2:] if is_glob else words[-1:])


# -----------------------------------------------------------------------------
# meta.json


def meta_files(folder):
    """The path of meta.json, or those of all parts in their order. Raises InputError where a part is missing."""
    n = 0
    for path in folder.glob('meta_*.json'):
        of_part = re.fullmatch(r'meta_\d+of(\d+)\.json', path.name)
        if of_part:
            n = max(n, int(of_part[1]))
    if n == 0:
        return [folder / 'meta.json']
    paths = [folder / f'meta_{i}of{n}.json' for i in range(n)]
    for i, path in enumerate(paths):
        if not os.path.exists(path):
            raise InputError(f'{folder} lacks part {i}/{n}; prepare it with --part={i}/{n}')
    return paths


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
    if wrong:
        raise InputError(f'{path} is damaged ({wrong}); {again}')
    if 'num_hashes' in meta and 'data_format' not in meta:
        raise InputError(f'{path} is of a much older prepare.py; {again}')
    # the first bins held ids, and meta.json did not say so
    meta.setdefault('data_format', 'ids')
    if meta['complete']:
        wrong = wrong_type(meta, META_TYPES, 'meta') or implausible(meta)
        if wrong:
            raise InputError(f'{path} is damaged ({wrong}); {again}')
    return meta


def wrong_type(value, like, name='it'):
    """
    The first place in a value read from a file that has another type than `like` says, or ''. `like` is a type, a tuple
    of types, {key: like}, whose keys must be there, or [like], any number of them.
    """
    needed = type(like) if isinstance(like, (dict, list)) else like
    is_of_type = isinstance(value, needed)
    # True is an int for Python
    if isinstance(value, bool) and needed is not bool:
        is_of_type = False
    if not is_of_type:
        return f'{name}={value!r:.50}'
    inner = []
    if isinstance(like, dict):
        missing = like.keys() - value.keys()
        if missing:
            return f'{name} without {", ".join(sorted(missing))}'
        inner = [(value[key], like[key], f'{name}.{key}') for key in like]
    elif isinstance(like, list):
        inner = [(item, like[0], f'{name}[{k}]') for k, item in enumerate(value)]
    for item, like_this, place in inner:
        wrong = wrong_type(item, like_this, place)
        if wrong:
            return wrong
    return ''


def implausible(meta):
    """The first number or name in a meta.json that cannot be, or ''."""
    V = meta['vocab_size']
    if not 0 < V < 2**32:
        return f'vocab_size={V}'
    for i in (meta['pad_id'], *meta['unused_ids']):
        if not 0 <= i < V:
            return f'id {i} of {V} tokens'
    for split in SPLITS:
        tokens = meta['splits'][split]['tokens']
        shards = meta['splits'][split]['shards']
        if tokens < 1 or tokens != sum(shard['tokens'] for shard in shards):
            return f'splits.{split}.tokens={tokens}'
        for shard in shards:
            if Path(shard['file']).name != shard['file']:
                return f'a bin called {shard["file"]}'
    return ''


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
            for key in SPLIT_TYPES:
                meta['splits'][split][key] += other['splits'][split][key]
    for split in SPLITS:
        digests = json.dumps([shard['digest'] for shard in meta['splits'][split]['shards']])
        meta['splits'][split]['sha256'] = hashlib.sha256(digests.encode()).hexdigest()
    return meta


def load_meta(config):
    """What there is to know of a config's bins, with the config's tokenizer. Raises InputError."""
    folder = data_folder(config)
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        raise no_bins(config, folder) from None
    made_with = meta['tokenizer']
    configured = config['tokenizer']
    if made_with != configured:
        raise InputError(f'{folder} was prepared with tokenizer={made_with}, the config has tokenizer={configured}')
    return meta


def no_bins(config, folder):
    """The InputError of a folder without bins: which other folder has some, or the command that makes them."""
    folder_of_ids = data_folder(config | dict(data_format='ids'))
    if folder_of_ids != folder and (folder_of_ids / 'meta.json').exists():
        return InputError(f'{folder} is not there; {folder_of_ids} has token ids, which --data_format=ids reads')
    # config files, and those settings on the command line that prepare.py has as well
    args = []
    for arg in sys.argv[1:]:
        name, _, _ = arg.removeprefix('--').partition('=')
        if not arg.startswith('--') or name in settings_of('prepare.py'):
            args.append(arg)
    command = shlex.join(['python', 'prepare.py', *args])
    return InputError(f'{folder} has no prepared data; make it with: {command}')


# -----------------------------------------------------------------------------
# the tokenizer and the signature table that bins belong to


def table_of(config, tok):
    """The signatures (V, H) uint16 that a config, or the meta.json of signatures, gives a tokenizer's tokens."""
    return signature_table(
        tok.tokens,
        num_hashes=config['num_hashes'],
        num_buckets=config['num_buckets'],
        num_lsh=config['num_lsh'],
        pad_id=tok.pad,
        unique=not config['single_id'],
    )


def checked_table(config, meta, frequencies=None):
    """
    The signatures (V, H) uint16 of the bins' tokens; None for the Standard model. With the frequencies (V,) of ids they
    are those of frequency_table. Raises InputError where the bins were made with another tokenizer, or hold other
    signatures.
    """
    folder = data_folder(config)
    if 'table_sha256' in meta:
        for key in OF_SIGNATURES:
            if meta.get(key) != config[key]:
                differs = f'signatures of {key}={meta.get(key)}, the model has {key}={config[key]}'
                raise InputError(f'{folder} holds {differs}; bins of --data_format=ids serve both')
    if not config['num_hashes']:
        return None
    tok = get_tokenizer(config['tokenizer'])
    for key, value in tokenizer_facts(tok).items():
        if meta[key] != value:
            differs = f'{key}={str(meta[key]):.20}, here {str(value):.20}'
            raise InputError(f"{folder} is of another '{config['tokenizer']}' tokenizer: {differs}")
    if frequencies is not None:
        if config['num_lsh'] or config['single_id']:
            raise InputError('by_frequency=True is a table of its own: leave out num_lsh and single_id')
        return frequency_table(tok.tokens, frequencies, config['num_hashes'], config['num_buckets'], tok.pad)
    table = table_of(config, tok)
    if 'table_sha256' in meta and meta['table_sha256'] != fingerprint(table):
        raise InputError(f'{folder} holds signatures of another table; delete it and prepare it again')
    return table


def identity(meta, table):
    """What a checkpoint keeps of its data, and a resumed run compares: tokenizer, signature table and text."""
    return dict(
        tokenizer=meta['tokenizer'],
        tokenizer_sha256=meta['tokenizer_sha256'],
        table_sha256=None if table is None else fingerprint(table),
        train_sha256=meta['splits']['train']['sha256'],
    )
