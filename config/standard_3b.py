# The paper's 3B Standard baseline: one embedding row per token, the ordinary cross-entropy.
from config.mhf_3b import *

out_dir = 'out/standard_3b'
num_hashes = 0
