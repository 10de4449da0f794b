# The demo: a small MultiHashFormer on the source of the Python standard library, minutes on 2 cores.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens; its bins take 23 MB, with --data_format=ids 8 MB.
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
# a CPU's caches and allocator like small ones: 1.5 times the tokens/s of 16
micro_batch_size = 4
# tuned for a short run (study/RESULTS.md, "tuned"); the paper has one rate for all parameters, and beta2 0.999
learning_rate = 1e-3
embedding_lr_mult = 4.0
beta2 = 0.99
max_steps = 450
warmup_steps = 50
eval_interval = 225

# sample.py
start = 'def __init__(self'
temperature = 0.6
top_p = 0.95
