# The paper's 100M H3B10K; B = 10,624 in the released code and the appendix; the main text says 10,240.
from config.mhf_100m import *

out_dir = 'out/mhf_100m_h3b10k'
num_hashes = 3
num_buckets = 10624
