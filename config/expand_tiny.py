# Vocabulary expansion in minutes on 2 cores: the demo's model learns Arabic, Chinese and Hindi, with 15,354 new tokens.
# 240 steps x 8 sequences x 256 tokens = 0.5 M tokens: two epochs of all three corpora and as much Python. For the
# Standard model, set --source_model and --output_dir for expand.py, --num_hashes=0 for prepare.py and train.py, and
# --init_from and --out_dir for train.py.
from config.mhf_tiny import *

source_model = 'out/mhf_tiny'
output_dir = init_from = 'out/mhf_tiny_grown'
tokenizer = 'out/tokenizer/expand_tiny.model'
out_dir = 'out/expand_tiny'
base_tokenizer = 'mistral'
counts_from = ''  # the expanded model has its signatures
# 240 paragraphs each; assets/text/README.md names their source and license
corpora = ','.join(f'assets/text/{_name}.jsonl.xz' for _name in ('ar', 'zh', 'hi')) + ',stdlib@0'
_tokens = {f'assets/text/{_name}.jsonl.xz': _n for _name, _n in dict(ar=44000, zh=34400, hi=46100).items()}
_tokens['stdlib'] = 125000
dataset = ','.join(f'{_source}@{_n}' for _source, _n in _tokens.items())
# as in expand.py, so that its held-out documents are not in the training data. The base model has read most of the
# Python ones: it held out fewer documents
val_fraction = 0.05
max_steps = 240
warmup_steps = 24
eval_interval = 120
# settings of an earlier experiment (study/LOG.md, 2026-11-24), which had other text than study/RESULTS.md
learning_rate = 2e-3
embedding_lr_mult = 1.0
beta2 = 0.95
# train the first and the last of the four layers; E, hash encoder, hash decoder and the final norm are always trained
unfrozen_end_layers = 1

# eval.py, sample.py
tasks = 'bits_per_byte'
text = ','.join(f'out/tokenizer/expand_tiny_{_name}.jsonl' for _name in ('ar', 'zh', 'hi'))
start = 'The '
