# Vocabulary expansion of the paper's 3B Standard baseline: 15,354 Arabic, Chinese and Hindi tokens, 32,768 -> 48,122: as
# many new rows, each the mean of the embeddings of its token's old pieces.
# From a model trained here; from the released one: --init_from=expand:klein9692/raw-3b
# 16,000 steps x 256 sequences x 2,048 tokens = 8.4 B tokens, 2 B of each language and of English; bins of 16 GB.
out_dir = 'out/expand_standard_3b'
init_from = 'expand:out/standard_3b'
train_layers = 2  # the first two and the last two; always E and the final norm

# expand.py
base = 'mistral'
texts = 'fineweb-2:arb_Arab,fineweb-2:cmn_Hani,fineweb-2:hin_Deva'
tokenizer = 'out/tokenizer/ar_zh_hi.model'

dataset = 'fineweb-2:arb_Arab@2e9,fineweb-2:cmn_Hani@2e9,fineweb-2:hin_Deva@2e9,fineweb-edu:sample-100BT@2e9'
val_fraction = 0.0005

num_layers = 36
num_heads = 16
num_kv_heads = 2
head_dim = 128
hidden_size = 2048
intermediate_size = 11008
num_hashes = 0  # the Standard model

block_size = 2048
batch_size = 256
micro_batch_size = 8  # per GPU; less where memory is short, the update stays the same
activation_checkpointing = True
learning_rate = 2e-4
max_steps = 16000
warmup_steps = 800
weight_decay = 0.1
grad_clip = 1.0
seed = 42
