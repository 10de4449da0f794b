# The paper's 3B H4B16K expanded; the released model:
# --source_model=klein9692/hf_qwen3_3b-model_16384_4_0_64_twe_32@checkpoint-200000
from config.expand_mhf_1b import *

source_model = 'out/mhf_3b'
output_dir = init_from = 'out/mhf_3b_grown'
out_dir = 'out/expand_mhf_3b'
num_layers = 36
num_kv_heads = 2
intermediate_size = 11008
micro_batch_size = 8
activation_checkpointing = True
learning_rate = 2e-4
