# The paper's 1B H3B10K; 10,624 is the released code's and the appendix's B, the main text says 10,240.
from config.mhf_1b import *

out_dir = 'out/mhf_1b_h3b10k'
num_hashes = 3
num_buckets = 10624
