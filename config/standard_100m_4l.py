# The paper's 100M Standard+4L baseline: 4 more layers to match the MultiHashFormer.
from config.standard_100m import *

out_dir = 'out/standard_100m_4l'
num_layers = 16
