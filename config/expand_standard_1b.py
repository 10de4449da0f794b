# The paper's 1B Standard expanded: 15,354 new rows, each the mean of the embeddings of its token's old pieces.
# The released model: --source_model=klein9692/hf_qwen3_1b-model_ori_twe@checkpoint-200000
from config.expand_mhf_1b import *

source_model = 'out/standard_1b'
output_dir = init_from = 'out/standard_1b_grown'
out_dir = 'out/expand_standard_1b'
num_hashes = 0
