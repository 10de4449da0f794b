# The paper's 3B Standard baseline: one embedding row per token.
# 200,000 steps x 256 sequences x 2,048 tokens = 104.9 B tokens; their bins take 210 GB: 2 bytes a token (its id).
out_dir = 'out/standard_3b'
dataset = 'fineweb-edu:sample-100BT'
tokenizer = 'mistral'
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
activation_checkpointing = True  # 80 GB of memory hold only 2 sequences without it
learning_rate = 2e-4
max_steps = 200000
warmup_steps = 2000
weight_decay = 0.1
grad_clip = 1.0
seed = 42
