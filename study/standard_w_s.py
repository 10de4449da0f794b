"""
A control: Standard with MHF's matrix W_s between its embedding and its decoder, for a vocabulary of any size.

    $ python -m study.edit study.standard_w_s train.py config/mhf_tiny.py --num_hashes=0

It is the model with num_hashes=1 and num_buckets=vocab_size, which needs at most 65,536 buckets (study/english.py): the
gate's softmax over a single row is 1.
"""

import model


class MHF(model.MHF):
    def __init__(self, config, *args, **options):
        super().__init__(config, *args, **options)
        self.encoder = model.HashEncoder(config)
