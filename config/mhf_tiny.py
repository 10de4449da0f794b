# The demo: a small MultiHashFormer on the source of the Python standard library, in minutes on 2 cores.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens; the shards take 8 MB.
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

# These settings differ from the paper (study/RESULTS.md); config/mhf_tiny_paper.py has the paper's signatures:
# informed signatures: in a short run, tokens that share a form, a shape or a frequency learn from each other
counts_from = 'train'
# the paper's loss makes P(w) overconfident; the exact loss trains the distribution that is sampled from
loss = 'exact'
# with the paper's W_s (std 0.02) a token enters the residual stream at a much smaller scale than its rows of E
encoder_init = 'orthogonal'
embedding_scale = 8.0
# in a short run, most rows of E get few updates
embedding_lr_mult = 4.0
# 0.999 averages over more steps than this run has
beta2 = 0.99

# sample.py
start = 'def __init__(self'
temperature = 0.6
top_p = 0.95
