# The paper's 100M Standard+4L baseline: one embedding row per token, 4 more layers to match the MultiHashFormer.
# 20,000 steps x 256 sequences x 2,048 tokens = 10.5 B tokens; their bins take 21 GB: 2 bytes a token (its id).
out_dir = 'out/standard_100m_4l'
dataset = 'fineweb-edu:sample-10BT'
tokenizer = 'mistral'
val_fraction = 0.0005

num_layers = 16
num_heads = 12
num_kv_heads = 2
head_dim = 64
hidden_size = 768
intermediate_size = 2560
num_hashes = 0  # the Standard model

block_size = 2048
batch_size = 256
micro_batch_size = 8  # per GPU; less where memory is short, the update stays the same
learning_rate = 5e-4
max_steps = 20000
warmup_steps = 2000
weight_decay = 0.1
grad_clip = 1.0
seed = 42
