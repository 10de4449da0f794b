# The paper's 3B Standard expanded; the released model: --source_model=klein9692/raw-3b@checkpoint-200000
from config.expand_mhf_3b import *

source_model = 'out/standard_3b'
output_dir = init_from = 'out/standard_3b_grown'
out_dir = 'out/expand_standard_3b'
num_hashes = 0
