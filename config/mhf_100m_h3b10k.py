# The paper's 100M H3B10K: MultiHashFormer with H = 3 hashes of B = 10,624 buckets.
# B = 10,624 is the released code's and the appendix's; the main text says 10,240.
# 20,000 steps x 256 sequences x 2,048 tokens = 10.5 B tokens; their bins take 63 GB: 6 bytes a token (3 bucket ids).
out_dir = 'out/mhf_100m_h3b10k'
dataset = 'fineweb-edu:sample-10BT'
tokenizer = 'mistral'
val_fraction = 0.0005

num_layers = 12
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768
intermediate_size = 2560
num_hashes = 3
num_buckets = 10624

block_size = 2048
batch_size = 256
micro_batch_size = 8  # per GPU; less where memory is short, the update stays the same
loss = 'product'  # the paper's; 'exact' trains the distribution that is sampled from
learning_rate = 5e-4
max_steps = 20000
warmup_steps = 2000
weight_decay = 0.1
grad_clip = 1.0
seed = 42
