# The demo: a small MultiHashFormer on the source of the Python standard library, minutes on 2 cores.
# 700 steps x 8 sequences x 256 tokens = 1.4 M tokens; its bins take 23 MB.
out_dir = 'out/mhf_tiny'
dataset = 'stdlib'
tokenizer = 'mistral'
val_fraction = 0.01

num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 64
hidden_size = 256
intermediate_size = 768
num_hashes = 3
num_buckets = 2048

block_size = 256
batch_size = 8
micro_batch_size = 4  # small enough that a CPU's caches and allocator like it: 1.5 times the tokens/s of 16
learning_rate = 2e-3
beta2 = 0.95  # a short run
max_steps = 700
warmup_steps = 50
eval_interval = 350

# the paper's loss makes P(w) sharp by itself, so that temperature 1 samples like a lower one
temperature = 1.0
top_p = 0.95
