# Vocabulary expansion of the paper's 1B H4B16K: 15,354 new tokens, 32,768 -> 48,122, and no new parameter.
# 16,000 steps x 256 sequences x 2,048 tokens = 8.389 B tokens: one epoch of 2.1 B tokens in each of 4 languages.
# Their bins take 67 GB, with --data_format=ids 16.8 GB.
from config.mhf_1b import *

# a model trained here; the released one: --before=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
before = 'out/mhf_1b'
# expand.py writes the grown model and the tokenizer, train.py starts from them
init_from = 'out/mhf_1b_grown'
tokenizer = 'out/tokenizer/ar_zh_hi.model'
out_dir = 'out/expand_mhf_1b'
base = 'mistral'
texts = 'fineweb-2:arb_Arab,fineweb-2:cmn_Hani,fineweb-2:hin_Deva'
dataset = ','.join(f'{_source}@2.1e9' for _source in (*texts.split(','), 'fineweb-edu:sample-10BT'))
# the same as expand.py's, so that the documents that it holds out are not trained on
val_fraction = 0.05

# trains the first two and the last two layers; E, hash encoder and decoder, and the final norm always train
unfrozen_end_layers = 2
max_steps = 16000
warmup_steps = 800
