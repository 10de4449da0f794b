"""Bad input ends a script with one clear line and exit code 1, without a traceback, and changes no file."""

import gzip
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
import torch
from conftest import ok, refused, snapshot
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from mhf.tokenizers import get_tokenizer
from test_mhf import random_model, write_released


@dataclass
class Bad:
    name: str
    command: str
    says: str  # part of the line that is printed
    # changes the folder where the command runs; may return variables of the environment
    setup: Callable = lambda folder: None


def file(path, data):
    """Returns a setup that writes a file."""
    return lambda folder: (folder / path).write_bytes(data)


def bad_parquet(folder):
    pq.write_table(pa.table(dict(content=['x'], url=['y'])), folder / 'x.parquet')


def smaller_mistral(folder):
    """Writes x.model: mistral without its last piece."""
    model = ModelProto.FromString(get_tokenizer('mistral').sp.serialized_model_proto())
    del model.pieces[-1]
    (folder / 'x.model').write_bytes(model.SerializeToString())


def sentencepiece_model(**options):
    """Returns a setup that writes b.model: SentencePiece, by default with a normalization to which \\n is a space."""
    options |= dict(model_type='bpe', hard_vocab_limit=False, minloglevel=2, sentence_iterator=iter(['some words'] * 9))
    return lambda folder: sentencepiece.SentencePieceTrainer.train(model_prefix=str(folder / 'b'), **options)


def released(**changes):
    """Returns a setup that writes small/: a released model whose table is not mistral's."""
    settings = dict(num_buckets=256, dtype=torch.float32) | changes
    return lambda folder: write_released(folder / 'small', random_model(**settings))


def tekken_bins(folder):
    """Prepares tek/ with another tokenizer."""
    ok('prepare.py', 'cfg.py', '--tokenizer=tekken', '--data_dir=tek', cwd=folder)


def ids(folder):
    """Prepares ids/ with token ids."""
    ok('prepare.py', 'cfg.py', '--data_format=ids', '--data_dir=ids', cwd=folder)


truncated = file('piqa_validation.jsonl.gz', gzip.compress(random.Random(0).randbytes(9999))[:500])
# beginnings of commands
PREPARE = 'prepare.py --data_dir=new '
TRAIN = 'train.py cfg.py --out_dir=new '
COUNTS = '--data_format=ids --data_dir=ids --counts_from='
RESUME = 'train.py cfg.py --max_steps=30'
EXPAND = 'expand.py --tokenizer=new.model '
DOCS = EXPAND + '--corpora=docs.jsonl '
SHORTER = 'expand.py --source_model=out --output_dir=grown --tokenizer=x.model'
EVAL = 'eval.py --out_dir=out '
TEXT = EVAL + '--tasks=bits_per_byte --text='

BAD = [
    # settings
    Bad('unknown config', PREPARE + 'config/mhf_tini.py', says="did you mean 'config/mhf_tiny.py'"),
    Bad('setting of another script', TRAIN + '--temperature=1', says="unknown setting '--temperature' of train.py"),
    # prepare.py
    Bad('unknown tokenizer', PREPARE + '--tokenizer=mistrel', says="did you mean 'mistral'"),
    Bad('a truncated tokenizer.json', PREPARE + '--tokenizer=x.json', "'x.json' could not", file('x.json', b'{')),
    Bad('unknown data set', PREPARE + '--dataset=stdlibb', says="did you mean 'stdlib'"),
    Bad('hub out of reach', PREPARE + '--dataset=fineweb-edu:sample-10BT', says='HuggingFaceFW/fineweb-edu'),
    Bad('val_bytes below the sources', PREPARE + '--dataset=a.txt@9,b.txt@9 --val_bytes=1', says='val_bytes=1: must'),
    Bad('a folder', PREPARE + '--dataset=bins', says="bins is a folder; name its files, like 'bins/*.parquet'"),
    Bad('parquet without text', PREPARE + '--dataset=x.parquet', 'the columns are: content, url', bad_parquet),
    Bad('too many buckets', PREPARE + '--dataset=docs.jsonl --num_buckets=65537', says='num_buckets=65537'),
    # train.py
    Bad('text of another config', TRAIN + 'x.py', 'prepared from docs.jsonl, not from x', file('x.py', b'dataset="x"')),
    Bad('bins of another tokenizer', TRAIN + '--tokenizer=tekken', says="another tokenizer ('mistral')"),
    Bad('no such data_format', TRAIN + '--data_format=tokens', says="data_format='tokens': must be signatures or ids"),
    Bad('counts for a model', TRAIN + COUNTS + 'ids --init_from=out', 'init_from=out: the signatures of a model', ids),
    Bad('counts for LSH', TRAIN + '--counts_from=bins --num_lsh=1', says='counts_from=bins: informed signatures need'),
    Bad('heads that do not divide', TRAIN + '--num_kv_heads=3', says='num_kv_heads=3'),
    Bad('no steps', TRAIN + '--max_steps=0', says='max_steps=0'),
    Bad('block_size over the data', TRAIN + '--block_size=1000000', says='block_size=1000000'),
    Bad('a batch in unequal parts', TRAIN + '--batch_size=9', says='batch_size=9: must be a multiple'),
    Bad('no GPU', TRAIN + '--device=cuda', says='has 0 GPUs'),
    Bad('warm-up over the schedule', TRAIN + '--warmup_steps=24', says='warmup_steps=24'),
    Bad('two processes on a GPU', TRAIN + '--device=cuda:0', 'use --device=cuda', lambda f: dict(LOCAL_WORLD_SIZE='2')),
    Bad('no such dtype', TRAIN + '--dtype=0', says='dtype=0: must be bfloat16 or float32'),
    Bad('more unfrozen layers than layers', TRAIN + '--unfrozen_end_layers=9', says='at most half of num_layers=2'),
    Bad('init_from too small a vocabulary', TRAIN + '--init_from=small', '32768 tokens, expected 300', released()),
    Bad('init_from another table', TRAIN + '--init_from=small', 'its table is not', released(vocab_size=32768)),
    # resuming
    Bad(
        'resume with another tokenizer', RESUME + ' --tokenizer=tekken --data_dir=tek', 'tokenizer_sha256=', tekken_bins
    ),
    # mhf/export.py
    Bad('export over a folder', 'mhf.export out bins', says='bins already exists'),
    # sample.py
    Bad('nothing to sample from', 'sample.py', 'no ckpt.pt', lambda f: shutil.rmtree(f / 'out')),
    Bad('missing checkpoint', 'sample.py cfg.py --out_dir=nowhere', says='nowhere: no such folder'),
    Bad('missing prompt', 'sample.py cfg.py --start=FILE:no.txt', says='no.txt'),
    # expand.py
    Bad('expand without corpora', EXPAND, says='corpora is empty'),
    Bad('a folder without a model', DOCS + '--output_dir=grown', says='set both, or omit both'),
    Bad('two corpora of one name', EXPAND + '--corpora=a/train.jsonl,a/train.txt', says="named 'train'"),
    Bad('expand by too many tokens', EXPAND + '--corpora=docs.jsonl@2000000000', says='at most 1,000,000'),
    Bad('expand without text', EXPAND + '--corpora=x.jsonl', 'too little text', file('x.jsonl', b'{"text": "x"}')),
    Bad('expand over a held-out text', DOCS, 'new_docs.jsonl already exists', file('new_docs.jsonl', b'precious')),
    Bad('expand without line breaks', DOCS + '--base_tokenizer=b.model', 'drops line breaks', sentencepiece_model()),
    Bad('expand another kind of tokenizer', DOCS + '--base_tokenizer=tekken', says="base_tokenizer='tekken'"),
    Bad('another tokenizer', SHORTER, "does not extend base_tokenizer='mistral'", smaller_mistral),
    # eval.py and bench.py
    Bad('no folder of data', EVAL + '--benchmark_dir=nowhere', says='nowhere has no lambada_openai_test.jsonl'),
    Bad('no text to evaluate', EVAL + '--tasks=bits_per_byte', says="tasks=bits_per_byte, text=''"),
    Bad('a missing text', TEXT + 'no.txt', says='no.txt: no such file, glob or data set'),
    Bad('not card660', EVAL + '--tasks=card660 --benchmark_dir=bins', says='dataset.tsv'),
    Bad('eval with another tokenizer', EVAL + '--tokenizer=tekken', says="is not the model's, 'mistral'"),
    Bad('a truncated benchmark', EVAL + '--tasks=piqa --benchmark_dir=.', 'piqa: its data cannot be read', truncated),
    Bad('unknown benchmark', 'bench.py --benchmarks=trian', says="did you mean 'train'"),
]


@pytest.mark.parametrize('bad', BAD, ids=lambda bad: bad.name)
def test_bad_input(bad, copy):
    """Bad input ends a command with one line that names the problem, and changes no file."""
    variables = bad.setup(copy) or {}
    before = snapshot(copy)
    refused(*bad.command.split(), says=bad.says, cwd=copy, **variables if isinstance(variables, dict) else {})
    assert snapshot(copy) == before
