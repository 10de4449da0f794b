# The paper's 100M Standard baseline: one embedding row per token, the ordinary cross-entropy.
from config.mhf_100m import *

out_dir = 'out/standard_100m'
num_hashes = 0
