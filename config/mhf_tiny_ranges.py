# The demo with signatures that know token frequencies: a bucket is shared by tokens of similar frequency only.
# python prepare.py config/mhf_tiny_ranges.py && python train.py config/mhf_tiny_ranges.py
from config.mhf_tiny import *

out_dir = 'out/mhf_tiny_ranges'
data_format = 'ids'
counts_from = 'data/stdlib_mistral'  # change this with another --dataset
