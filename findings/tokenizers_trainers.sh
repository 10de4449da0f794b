#!/usr/bin/env bash
# tokenizers 0.23.3: BpeTrainer returns the same tokenizer each time, UnigramTrainer other ids, WordPieceTrainer other
# tokens.
# Guess: Unigram differs between processes (60 %); WordPiece, which trains by BPE, does not.
# Expected: as for BPE, since no trainer takes a seed. Seen, in five processes with the same text: BPE one tokenizer;
# Unigram one set of tokens in several orders, because scores differ in their last digits; WordPiece several sets of
# tokens, because the "##" letters get ids in the order of a hash map, and ids decide ties of merges (tokenizers issue
# 1794). A checkpoint with a table of ids does not fit a tokenizer that is trained again from the same text; signatures
# that are hashed from strings do, for Unigram.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import subprocess
import sys

TRAIN = '''
import hashlib, pydoc_data.topics, sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
kind = sys.argv[1]
lines = chr(10).join(pydoc_data.topics.topics.values()).split(chr(10))  # the help texts of Python
kinds = dict(BPE=trainers.BpeTrainer, Unigram=trainers.UnigramTrainer, WordPiece=trainers.WordPieceTrainer)
options = dict(unk_token="[UNK]") if kind == "Unigram" else {}
tokenizer = Tokenizer(getattr(models, kind)())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
trainer = kinds[kind](vocab_size=2000, special_tokens=["[UNK]"], show_progress=False, **options)
tokenizer.train_from_iterator(lines, trainer)
ids = tokenizer.get_vocab()
for tokens in (sorted(ids), sorted(ids, key=ids.get)):
    print(hashlib.md5(repr(tokens).encode()).hexdigest()[:8])
'''
counts = {}
for kind in ('BPE', 'Unigram', 'WordPiece'):
    command = [sys.executable, '-c', TRAIN, kind]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    counts[kind] = tuple(len({run[i] for run in runs}) for i in (0, 1))
    print(f'{kind}: {counts[kind][0]} sets of tokens and {counts[kind][1]} orders in 5 processes')
assert counts['BPE'] == (1, 1) and counts['Unigram'][0] == 1, 'changed'
assert counts['Unigram'][1] > 1 and counts['WordPiece'][0] > 1, 'changed'
PYTHON
