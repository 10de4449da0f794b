# The paper's 1B H3B10K expanded; the released model: --source_model=klein9692/hash-1b-h3b10624@checkpoint-200000
from config.expand_mhf_1b import *

source_model = 'out/mhf_1b_h3b10k'
output_dir = init_from = 'out/mhf_1b_h3b10k_grown'
out_dir = 'out/expand_mhf_1b_h3b10k'
num_hashes = 3
num_buckets = 10624
