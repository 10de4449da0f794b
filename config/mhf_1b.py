# The paper's 1B H4B16K: MultiHashFormer with H = 4 hashes of B = 16,384 buckets.
# Ablations: --num_hashes=3 --num_buckets=4096, --num_lsh=2, --single_id, each with another --out_dir.
# 200,000 steps x 256 sequences x 2,048 tokens = 104.9 B tokens; the shards take 839 GB, with --data_format=ids 210 GB.
out_dir = 'out/mhf_1b'
dataset = 'fineweb-edu:sample-100BT'
tokenizer = 'mistral'
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
micro_batch_size = 4
learning_rate = 3e-4
max_steps = 200000
warmup_steps = 2000
