# The paper's 1B H3B10K; B = 10,624 in the released code and the appendix; the main text says 10,240.
from config.mhf_1b import *

out_dir = 'out/mhf_1b_h3b10k'
num_hashes = 3
num_buckets = 10624
