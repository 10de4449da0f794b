"""Bad input ends a script with one clear line and exit code 1, without a traceback, and changes none of the files."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import refused, snapshot
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from mhf.tokenizers import get_tokenizer
from test_mhf import random_model, write_released


@dataclass
class Bad:
    name: str
    command: str
    says: str  # part of the line that is printed
    # changes the folder where the command runs
    setup: Callable = lambda folder: None


def file(path, data):
    """Returns a setup that writes a file."""
    return lambda folder: (folder / path).write_bytes(data)


def smaller_mistral(folder):
    """Writes x.model: mistral without its last piece."""
    model = ModelProto.FromString(get_tokenizer('mistral').sp.serialized_model_proto())
    del model.pieces[-1]
    (folder / 'x.model').write_bytes(model.SerializeToString())


def released(**changes):
    """Returns a setup that writes small/: a released model whose table is not mistral's."""
    settings = dict(num_buckets=256, dtype=torch.float32) | changes
    return lambda folder: write_released(folder / 'small', random_model(**settings))


# beginnings of commands
PREPARE = 'prepare.py --data_dir=new '
TRAIN = 'train.py cfg.py --out_dir=new '
EXPAND = 'expand.py --tokenizer=new.model '
DOCS = EXPAND + '--corpora=docs.jsonl '
SHORTER = 'expand.py --source_model=out --output_dir=grown --tokenizer=x.model'
EVAL = 'eval.py --out_dir=out '

BAD = [
    # prepare.py
    Bad('unknown tokenizer', PREPARE + '--tokenizer=mistrel', says="did you mean 'mistral'"),
    Bad('too many buckets', PREPARE + '--dataset=docs.jsonl --num_buckets=65537', says='num_buckets=65537'),
    Bad('val_fraction in percent', PREPARE + '--dataset=docs.jsonl --val_fraction=50', says='val_fraction=50.0'),
    # train.py
    Bad('shards of another tokenizer', TRAIN + '--tokenizer=tekken', says="another tokenizer ('mistral')"),
    Bad('counts for a model', TRAIN + '--counts_from=bins --init_from=out', says='need a new model'),
    Bad('heads that do not divide', TRAIN + '--num_kv_heads=3', says='num_kv_heads=3: the first must be'),
    Bad('no heads for keys', TRAIN + '--num_kv_heads=0', says='num_kv_heads=0: the first must be'),
    Bad('no heads for queries', TRAIN + '--num_heads=0', says='num_heads=0, num_kv_heads'),
    Bad('an ablation of Standard', TRAIN + '--num_hashes=0 --ablation=mean_gate', says='needs a MultiHashFormer'),
    Bad('block_size over the data', TRAIN + '--block_size=1000000', says='block_size=1000000'),
    Bad('a batch in unequal parts', TRAIN + '--batch_size=9', says='batch_size=9: must be a multiple'),
    Bad('warm-up over the schedule', TRAIN + '--warmup_steps=24', says='warmup_steps=24'),
    Bad('no such dtype', TRAIN + '--dtype=0', says='dtype=0: must be bfloat16 or float32'),
    Bad('init_from another table', TRAIN + '--init_from=small', 'its table is not', released(vocab_size=32768)),
    # sample.py
    Bad('nothing to sample from', 'sample.py', 'no ckpt.pt', lambda f: shutil.rmtree(f / 'out')),
    # expand.py
    Bad('expand without text', EXPAND + '--corpora=x.jsonl', 'too little text', file('x.jsonl', b'{"text": "x"}')),
    Bad('expand over a held-out text', DOCS, 'new_docs.jsonl already exists', file('new_docs.jsonl', b'precious')),
    Bad('another tokenizer', SHORTER, "does not extend base_tokenizer='mistral'", smaller_mistral),
    # eval.py
    Bad('no folder of data', EVAL + '--benchmark_dir=nowhere', says='nowhere has no lambada_openai_test.jsonl'),
    Bad('a missing text', EVAL + '--tasks=bits_per_byte --text=no.txt', says='no.txt: no such file, glob or data set'),
]


@pytest.mark.parametrize('bad', BAD, ids=lambda bad: bad.name)
def test_bad_input(bad, quick):
    """Bad input ends a command with one line that names the problem, and changes none of the files."""
    bad.setup(quick)
    before = snapshot(quick)
    refused(*bad.command.split(), says=bad.says, cwd=quick)
    assert before.items() <= snapshot(quick).items()
