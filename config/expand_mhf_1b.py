# Vocabulary expansion of the paper's 1B H4B16K: 15,354 Arabic, Chinese and Hindi tokens, 32,768 -> 48,122, no new parameter.
# From a model trained here; from the released one: --init_from=expand:klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
# 16,000 steps x 256 sequences x 2,048 tokens = 8.4 B tokens, 2 B of each language and of English; bins of 64 GB.
out_dir = 'out/expand_mhf_1b'
init_from = 'expand:out/mhf_1b'
train_layers = 2  # the first two and the last two; always E, hash encoder and decoder, and the final norm

# expand.py
base = 'mistral'
texts = 'fineweb-2:arb_Arab,fineweb-2:cmn_Hani,fineweb-2:hin_Deva'
tokenizer = 'out/tokenizer/ar_zh_hi.model'

dataset = 'fineweb-2:arb_Arab@2e9,fineweb-2:cmn_Hani@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu:sample-100BT@2e9'
val_fraction = 0.0005

num_layers = 20
num_heads = 16
num_kv_heads = 8
head_dim = 128
hidden_size = 2048
intermediate_size = 6144
num_hashes = 4
num_buckets = 16384

block_size = 2048
batch_size = 256
micro_batch_size = 4  # per GPU; less where memory is short, the update stays the same
loss = 'product'  # the paper's; 'exact' trains the distribution that is sampled from
learning_rate = 3e-4
max_steps = 16000
warmup_steps = 800
weight_decay = 0.1
grad_clip = 1.0
seed = 42
