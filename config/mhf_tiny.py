# The demo: a small MultiHashFormer on the source of the Python standard library, in minutes on 2 cores.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens; the shards take 8 MB.
# config/mhf_tiny_paper.py has the paper's signatures
from config.additions import *

out_dir = 'out/mhf_tiny'
dataset = 'stdlib'
tokenizer = 'mistral'
data_format = 'ids'
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
# on a CPU, 1.5 x as fast as micro-batches of 16 in a larger batch, because the activations fit in its cache
micro_batch_size = 4
learning_rate = 1e-3
max_steps = 450
warmup_steps = 50
eval_interval = 225

# sample.py
start = 'def __init__(self'
temperature = 0.6
top_p = 0.95
