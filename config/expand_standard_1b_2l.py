# The paper's 1B Standard+2L expanded; the released model: --before=klein9692/raw-1b_add2L@checkpoint-200000
from config.expand_standard_1b import *

before = 'out/standard_1b_2l'
init_from = 'out/standard_1b_2l_grown'
out_dir = 'out/expand_standard_1b_2l'
num_layers = 22
