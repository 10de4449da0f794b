# The paper's 3B Standard expanded; the released model: --before=klein9692/raw-3b@checkpoint-200000
from config.expand_mhf_3b import *

before = 'out/standard_3b'
init_from = 'out/standard_3b_grown'
out_dir = 'out/expand_standard_3b'
num_hashes = 0
loss = 'exact'
