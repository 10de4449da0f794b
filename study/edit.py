"""
Runs a script with another model.MHF or another hashing.informed_table: those that a module defines.

    $ python -m study.edit study.frozen_bias train.py config/mhf_tiny.py --num_hashes=0 --counts_from=data/sample
    $ python -m study.edit study.frozen_bias eval.py --out_dir=out/mhf_tiny --tasks=bits_per_byte --text=data/sample
"""

import importlib
import runpy
import sys

import hashing
import model

if __name__ == '__main__':
    edit = importlib.import_module(sys.argv[1])
    del sys.argv[:2]  # the script with its own arguments remains
    # before other modules import them
    model.MHF = getattr(edit, 'MHF', model.MHF)
    hashing.informed_table = getattr(edit, 'informed_table', hashing.informed_table)
    runpy.run_path(sys.argv[0], run_name='__main__')
