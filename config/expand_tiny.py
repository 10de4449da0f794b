# Vocabulary expansion in minutes on 2 cores: the demo's model learns Arabic, Chinese and Hindi, with 15,354 new tokens.
# The texts are those of the project's shared/ folder; others: --texts=..., --dataset=..., one source a language.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens, a quarter of each language and of English. For the Standard
# model give expand.py --before=<its out_dir>, prepare.py and train.py --num_hashes=0, expand.py and train.py an
# --init_from and train.py an --out_dir of its own.
from config.mhf_tiny import *

before = 'out/mhf_tiny'
init_from = 'out/mhf_tiny_grown'
tokenizer = 'out/tokenizer/tiny_ar_zh_hi.model'
out_dir = 'out/expand_tiny'
base = 'mistral'
_text = '../shared/data/text'
texts = f'{_text}/ar.jsonl.xz,{_text}/zh.jsonl.xz,{_text}/hi.jsonl.xz'
dataset = ','.join(f'{_text}/{_name}.jsonl.xz@3e5' for _name in ('ar', 'zh', 'hi', 'english_edu'))
# the same as expand.py's, so that the documents that it holds out are not trained on
val_fraction = 0.05
# the rates that the results of the expansion were measured with
learning_rate = 2e-3
embedding_lr_mult = 1.0
beta2 = 0.95
# trains the first and the last of the four layers; E, hash encoder and decoder, and the final norm always train
unfrozen_end_layers = 1

# eval.py, sample.py
tasks = 'bits_per_byte'
text = ','.join(f'out/tokenizer/tiny_ar_zh_hi_{_name}.jsonl' for _name in ('ar', 'zh', 'hi'))
start = 'The '
