"""
A control: Standard whose token logits get a frozen bias, the log frequencies of tokens in a prepared folder.

    $ python -m study.edit study.frozen_bias train.py config/mhf_tiny.py --num_hashes=0 --counts_from=data/sample

The bias of token w is log((count of w + 1) / sum), a buffer of the checkpoint.
"""

import sys

import torch

import model


class MHF(model.MHF):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer('bias', torch.zeros(self.config.vocab_size))

    def init_weights(self):
        from mhf.data import Bins, count_tokens  # these modules import model.MHF

        super().init_weights()
        folder = sys.modules['__main__'].counts_from  # the setting of train.py, which ignores it for Standard
        counts = torch.tensor(count_tokens(Bins(folder, 'train')))
        self.bias.copy_(((counts + 1) / (counts + 1).sum()).log())

    def token_logits(self, o):
        return super().token_logits(o) + self.bias
