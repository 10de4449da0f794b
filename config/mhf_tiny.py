# The demo: a small MultiHashFormer on the source of the Python standard library, minutes on 2 cores.
out_dir = 'out/mhf_tiny'
dataset = 'stdlib'
val_fraction = 0.02

num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 64
hidden_size = 256
intermediate_size = 768
num_hashes = 3
num_buckets = 2048

block_size = 256
batch_size = 16
micro_batch_size = 16
learning_rate = 2e-3
max_steps = 300
warmup_steps = 30
eval_interval = 100
