"""
A control: Standard whose token logits get a frozen bias, the log frequencies of tokens in a prepared folder.

    $ python -m study.frozen_bias train.py config/mhf_tiny.py --num_hashes=0 --counts_from=data/sample
    $ python -m study.frozen_bias eval.py --out_dir=out/mhf_tiny --tasks=bits_per_byte --text=data/sample

Runs a script with another model.MHF. The bias of token w is log((count of w + 1) / sum), a buffer of the checkpoint.
"""

import runpy
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
        flag = '--counts_from='  # which train.py ignores for Standard
        folder = next(argument.removeprefix(flag) for argument in sys.argv if argument.startswith(flag))
        counts = torch.tensor(count_tokens(Bins(folder, 'train')))
        self.bias.copy_(((counts + 1) / (counts + 1).sum()).log())

    def token_logits(self, o):
        return super().token_logits(o) + self.bias


if __name__ == '__main__':
    del sys.argv[0]  # the script with its own arguments remains
    model.MHF = MHF
    runpy.run_path(sys.argv[0], run_name='__main__')
