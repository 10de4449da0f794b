# Vocabulary expansion in minutes on 2 cores: the demo's model learns Arabic, Chinese and Hindi, with 15,354 new tokens.
# The texts are those of the project's shared/ folder; others: --texts=..., --dataset=..., one source a language.
# 450 steps x 8 sequences x 256 tokens = 0.9 M tokens, a quarter of each language and of English. The Standard model of the same
# backbone: --num_hashes=0 --init_from=expand:<its out_dir>, with an --out_dir of its own.
out_dir = 'out/expand_tiny'
init_from = 'expand:out/mhf_tiny'
train_layers = 1  # of the four the first and the last; always E, hash encoder and decoder, and the final norm

# expand.py
base = 'mistral'
texts = '../shared/data/text/ar.jsonl.xz,../shared/data/text/zh.jsonl.xz,../shared/data/text/hi.jsonl.xz'
tokenizer = 'out/tokenizer/tiny_ar_zh_hi.model'

dataset = (
    '../shared/data/text/ar.jsonl.xz@3e5,../shared/data/text/zh.jsonl.xz@3e5,../shared/data/text/hi.jsonl.xz@3e5,'
    '../shared/data/text/english_edu.jsonl.xz@3e5'
)
val_fraction = 0.05

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
micro_batch_size = 4
learning_rate = 2e-3
beta2 = 0.95
max_steps = 450
warmup_steps = 50
eval_interval = 225
