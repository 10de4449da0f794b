#!/usr/bin/env bash
# transformers 5.23.0 and tokenizers 0.23.3: one call with truncation=True changes the tokenizer.json that is saved
# later, and tokenizers then cuts every document at that length.
# Guess: so (70 %).
# Expected: arguments of a call do not end in a file. Seen: a tokenizer called with max_length=8 and padding, then
# saved, encodes a document of 1,000 words as 8 tokens when the file is read by tokenizers, and "a" as 8 tokens too,
# padded. transformers itself resets both at each call, so its users do not notice; a pipeline that prepares a corpus
# with tokenizers.Tokenizer.from_file loses all but the beginning of each document. Call no_truncation() and
# no_padding(). transformers issue 24441 reports that calls change the object.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile

os.environ['HF_HUB_OFFLINE'] = '1'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(models.WordLevel({'<pad>': 0, 'a': 1, 'b': 2}, unk_token='<pad>'))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token='<pad>')
document = 'a b ' * 500
fast(['a', document], truncation=True, max_length=8, padding='max_length')
with tempfile.TemporaryDirectory() as folder:
    fast.save_pretrained(folder)
    read = Tokenizer.from_file(f'{folder}/tokenizer.json')
    again = PreTrainedTokenizerFast.from_pretrained(folder)
lengths = dict(
    transformers=len(fast(document)['input_ids']),
    reloaded_transformers=len(again(document)['input_ids']),
    reloaded_tokenizers=len(read.encode(document).ids),
    one_token=len(read.encode('a').ids),
)
print('tokens of 1,000 words:', lengths)
read.no_truncation()
read.no_padding()
print('after no_truncation() and no_padding():', len(read.encode(document).ids), len(read.encode('a').ids))
assert list(lengths.values()) == [1000, 1000, 8, 8], 'changed'
PYTHON
