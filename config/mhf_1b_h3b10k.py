# The paper's 1B H3B10K: MultiHashFormer with H = 3 hashes of B = 10,624 buckets.
# B = 10,624 is the released code's and the appendix's; the main text says 10,240.
# 200,000 steps x 256 sequences x 2,048 tokens = 104.9 B tokens; their bins take 629 GB: 6 bytes a token (3 bucket ids).
out_dir = 'out/mhf_1b_h3b10k'
dataset = 'fineweb-edu:sample-100BT'
tokenizer = 'mistral'
val_fraction = 0.0005

num_layers = 20
num_heads = 16
num_kv_heads = 8
head_dim = 128
hidden_size = 2048
intermediate_size = 6144
num_hashes = 3
num_buckets = 10624

block_size = 2048
batch_size = 256
micro_batch_size = 4  # per GPU; less where memory is short, the update stays the same
loss = 'product'  # the paper's; 'exact' trains the distribution that is sampled from
learning_rate = 3e-4
max_steps = 200000
warmup_steps = 2000
weight_decay = 0.1
grad_clip = 1.0
seed = 42
