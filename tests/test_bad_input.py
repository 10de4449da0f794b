"""Bad input ends a script with one clear line and exit code 1, without a traceback, and changes none of the files."""

import pytest
from conftest import refused, snapshot
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from mhf.tokenizers import get_tokenizer

# beginnings of commands
TRAIN = 'train.py cfg.py --out_dir=new '
EXPAND = 'expand.py --tokenizer=new.model '
SHORTER = 'expand.py --source_model=out --output_dir=grown --tokenizer=shorter.model'

# (command, part of the line that is printed)
BAD = {
    'a data set in place of a config': ('prepare.py cfg.py docs.jsonl --data_dir=new', 'docs.jsonl is not a config'),
    'unknown tokenizer': ('prepare.py --data_dir=new --tokenizer=mistrel', "did you mean 'mistral'"),
    'a tokenizer of another kind': ('prepare.py --data_dir=new --tokenizer=./short.txt', 'unknown tokenizer'),
    'val_fraction in percent': ('prepare.py --data_dir=new --val_fraction=50', 'val_fraction=50.0'),
    'too many buckets': ('prepare.py --data_dir=new --dataset=docs.jsonl --num_buckets=65537', 'num_buckets=65537'),
    'shards of another tokenizer': (TRAIN + '--tokenizer=tekken', "another tokenizer ('mistral')"),
    'counts for a model': (TRAIN + '--counts_from=bins --init_from=out', 'need a new model'),
    'no heads': (TRAIN + '--num_heads=0', 'num_heads=0, num_kv_heads'),
    'head_dim': (TRAIN + '--head_dim=15', 'head_dim even'),
    'an ablation of Standard': (TRAIN + '--num_hashes=0 --ablation=mean_gate', 'needs a MultiHashFormer'),
    'block_size over the data': (TRAIN + '--block_size=1000000', 'block_size=1000000'),
    'a batch in unequal parts': (TRAIN + '--batch_size=9', 'batch_size=9: must be a multiple'),
    'warm-up over the schedule': (TRAIN + '--warmup_steps=24', 'warmup_steps=24'),
    'no such dtype': (TRAIN + '--dtype=0', 'dtype=0: must be bfloat16 or float32'),
    'no model': ('sample.py --out_dir=bins', 'bins has no checkpoint'),
    'a model of another tokenizer': ('sample.py --out_dir=out --tokenizer=tekken', "name 'mistral'"),
    'a built-in tokenizer to write': ('expand.py --tokenizer=mistral --corpora=docs.jsonl', 'must end with .model'),
    'expand without text': (EXPAND + '--corpora=short.txt', 'too little text'),
    'expand over a held-out text': (EXPAND + '--corpora=docs.jsonl', 'new_docs.jsonl already exists'),
    'another tokenizer': (SHORTER, "does not extend base_tokenizer='mistral'"),
    'no folder of data': ('eval.py --out_dir=out --benchmark_dir=nowhere', 'nowhere has no lambada_openai_test.jsonl'),
    'a missing text': ('eval.py --out_dir=out --tasks=bits_per_byte --text=no.txt', 'no.txt: no such file'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_input(name, quick):
    """Bad input ends a command with one line that names the problem, and changes none of the files."""
    (quick / 'short.txt').write_text('x')
    (quick / 'new_docs.jsonl').write_text('precious')
    mistral = ModelProto.FromString(get_tokenizer('mistral').definition)
    del mistral.pieces[-1]
    (quick / 'shorter.model').write_bytes(mistral.SerializeToString())
    before = snapshot(quick)
    command, says = BAD[name]
    refused(*command.split(), says=says, cwd=quick)
    assert before.items() <= snapshot(quick).items()
