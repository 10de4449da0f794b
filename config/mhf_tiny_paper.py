# The demo with the paper's signatures, which hash the string of a token and nothing else. It reads the demo's data.
# python train.py config/mhf_tiny_paper.py
from config.mhf_tiny import *

out_dir = 'out/mhf_tiny_paper'
counts_from = ''
