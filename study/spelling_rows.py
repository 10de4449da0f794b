"""
A control: Standard that knows the spelling of tokens. The input and output row of a token is the sum of its own row and
those of its form and of its shape (hashing.PROPERTIES), which it shares with other tokens.

    $ python -m study.edit study.spelling_rows train.py config/mhf_tiny.py --num_hashes=0 --embedding_scale=4

For the tokenizers mistral and tekken. Initially, a row's sum has Standard's variance. With encoder_init=orthogonal, as
in this config, MHF's matrix W_s follows the sum of the input rows; with --encoder_init=normal, the model has no W_s.
"""

import torch
import torch.nn.functional as F
from torch import nn

import model
from hashing import PROPERTIES

TOKENIZERS = {32768: 'mistral', 131072: 'tekken'}


class SumOfRows(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.scale = config.embedding_scale
        has_w_s = config.encoder_init == 'orthogonal'
        self.out = nn.Linear(d, d) if has_w_s else None  # W_s; init_weights() sets its scale

    def forward(self, k):  # (..., 3, d) -> (..., d)
        return self.out(k.sum(-2)) if self.out else k.sum(-2) * self.scale


class MHF(model.MHF):
    def set_vocabulary(self, table, unused_ids=()):
        """Creates E, with a row for each token, form and shape; self.rows (V, 3) are those of a token."""
        from mhf.tokenizers import get_tokenizer  # imports modules that import model.MHF

        super().set_vocabulary(table, unused_ids)
        tokens = get_tokenizer(TOKENIZERS[self.config.vocab_size]).tokens
        row_of_key = {}
        rows = []
        for i, token in enumerate(tokens):
            keys = [i] + [i if token is None else (key_of.__name__, key_of(token)) for key_of in PROPERTIES]
            rows.append([row_of_key.setdefault(key, len(row_of_key)) for key in keys])
        self.register_buffer('rows', torch.tensor(rows), persistent=False)
        self.embed = nn.Embedding(len(row_of_key), self.config.hidden_size)
        self.encoder = SumOfRows(self.config)

    def init_weights(self):
        encoder = self.encoder
        self.encoder = encoder if encoder.out else None  # there may be no W_s to initialize
        super().init_weights()
        self.encoder = encoder
        self.embed.weight.data.div_(3**0.5)

    def head_matrices(self):
        return [F.embedding(self.rows, self.embed.weight).sum(1)]
