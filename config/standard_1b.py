# The paper's 1B Standard baseline: one embedding row per token, the ordinary cross-entropy.
from config.mhf_1b import *

out_dir = 'out/standard_1b'
num_hashes = 0
