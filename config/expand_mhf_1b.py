# Vocabulary expansion of the paper's 1B H4B16K: 15,354 new tokens, 32,768 -> 48,122, and no new parameter.
# 16,000 steps x 256 sequences x 2,048 tokens = 8.4 B tokens, 2 B of each of 4 languages; bins of 16 GB.
from config.mhf_1b import *

# a model trained here; the released one: --before=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
before = 'out/mhf_1b'
# expand.py writes the grown model and the tokenizer, train.py starts from them
init_from = 'out/mhf_1b_grown'
tokenizer = 'out/tokenizer/ar_zh_hi.model'
out_dir = 'out/expand_mhf_1b'
base = 'mistral'
texts = 'fineweb-2:arb_Arab,fineweb-2:cmn_Hani,fineweb-2:hin_Deva'
dataset = 'fineweb-2:arb_Arab@2e9,fineweb-2:cmn_Hani@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu:sample-100BT@2e9'

# the first two and the last two; always E, hash encoder and decoder, and the final norm
train_layers = 2
max_steps = 16000
warmup_steps = 800
