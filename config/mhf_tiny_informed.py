# The demo with informed signatures: they know how a token is spelled and how often it occurs (hashing.py).
# python prepare.py config/mhf_tiny_informed.py && python train.py config/mhf_tiny_informed.py
from config.mhf_tiny import *

out_dir = 'out/mhf_tiny_informed'
data_format = 'ids'
counts_from = 'train'
