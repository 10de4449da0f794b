# Vocabulary expansion in minutes on 2 cores: the demo's model learns Arabic, Chinese and Hindi, with 15,354 new tokens.
# The corpora are in the project's shared/ folder; for others set --corpora=... and --dataset=..., one per language.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens, a quarter of each language and of English. For the Standard
# model, set --source_model and --output_dir for expand.py, --num_hashes=0 for prepare.py and train.py, and --init_from
# and --out_dir for train.py.
from config.mhf_tiny import *

source_model = 'out/mhf_tiny'
output_dir = 'out/mhf_tiny_grown'
init_from = output_dir
tokenizer = 'out/tokenizer/tiny_ar_zh_hi.model'
out_dir = 'out/expand_tiny'
base_tokenizer = 'mistral'
_text = '../shared/data/text'
corpora = f'{_text}/ar.jsonl.xz,{_text}/zh.jsonl.xz,{_text}/hi.jsonl.xz'
dataset = ','.join(f'{_text}/{_name}.jsonl.xz@3e5' for _name in ('ar', 'zh', 'hi', 'english_edu'))
# as in expand.py, so that its held-out documents are not in the training data
val_fraction = 0.05
# the settings of the measured expansion
learning_rate = 2e-3
embedding_lr_mult = 1.0
beta2 = 0.95
# train the first and the last of the four layers; E, hash encoder, hash decoder and the final norm are always trained
unfrozen_end_layers = 1

# eval.py, sample.py
tasks = 'bits_per_byte'
text = ','.join(f'out/tokenizer/tiny_ar_zh_hi_{_name}.jsonl' for _name in ('ar', 'zh', 'hi'))
start = 'The '
