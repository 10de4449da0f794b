# The paper's 100M H4B16K: MultiHashFormer with H = 4 hashes of B = 16,384 buckets.
# Ablations: --num_hashes=3 --num_buckets=4096, --num_lsh=2, --single_id, each with another --out_dir.
# 20,000 steps x 256 sequences x 2,048 tokens = 10.5 B tokens; the shards take 84 GB, with --data_format=ids 21 GB.
out_dir = 'out/mhf_100m'
dataset = 'fineweb-edu:sample-10BT'
tokenizer = 'mistral'
val_fraction = 0.0005

num_layers = 12
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768
intermediate_size = 2560
num_hashes = 4
num_buckets = 16384

block_size = 2048
batch_size = 256
# per GPU; reduce it if memory is short: the update stays the same
micro_batch_size = 8
learning_rate = 5e-4
max_steps = 20000
warmup_steps = 2000
