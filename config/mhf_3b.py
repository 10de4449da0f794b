# The paper's 3B H4B16K: MultiHashFormer with H = 4 hashes of B = 16,384 buckets.
# 200,000 steps x 256 sequences x 2,048 tokens = 104.9 B tokens; the shards take 839 GB, with --data_format=ids 210 GB.
out_dir = 'out/mhf_3b'
dataset = 'fineweb-edu:sample-100BT'
tokenizer = 'mistral'
val_fraction = 0.0005

num_layers = 36
num_heads = 16
num_kv_heads = 2
head_dim = 128
hidden_size = 2048
intermediate_size = 11008
num_hashes = 4
num_buckets = 16384

block_size = 2048
batch_size = 256
micro_batch_size = 8
# without it, micro_batch_size=1 fits in 80 GB, and 2 is at the limit of the estimate of bench.py
activation_checkpointing = True
learning_rate = 2e-4
max_steps = 200000
warmup_steps = 2000
