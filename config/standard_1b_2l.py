# The paper's 1B Standard+2L baseline: 2 more layers to match the MultiHashFormer.
from config.standard_1b import *

out_dir = 'out/standard_1b_2l'
num_layers = 22
