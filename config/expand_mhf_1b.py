# Vocabulary expansion of the paper's 1B H4B16K: 15,354 new tokens, 32,768 -> 48,122, and no new parameter.
# 16,000 steps x 256 sequences x 2,048 tokens = 8.389 B tokens: one epoch of 2.1 B tokens in each of 4 languages.
# The shards take 67 GB, with --data_format=ids 16.8 GB.
from config.mhf_1b import *

# trained here; released: --source_model=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
source_model = 'out/mhf_1b'
# expand.py writes the expanded model and the tokenizer; train.py starts from them
output_dir = init_from = 'out/mhf_1b_grown'
tokenizer = 'out/tokenizer/ar_zh_hi.model'
out_dir = 'out/expand_mhf_1b'
base_tokenizer = 'mistral'
_corpora = ['fineweb-2:arb_Arab', 'fineweb-2:cmn_Hani', 'fineweb-2:hin_Deva']
corpora = ','.join((*_corpora, 'fineweb-edu:sample-10BT@0'))
dataset = ','.join(f'{_source}@2.1e9' for _source in (*_corpora, 'fineweb-edu:sample-10BT'))
# as in expand.py, so that its held-out documents are not in the training data. The base model may have read most
# of the English ones: it held out fewer documents
val_fraction = 0.05

# train the first two and the last two layers; E, hash encoder, hash decoder and the final norm are always trained
unfrozen_end_layers = 2
max_steps = 16000
warmup_steps = 800
