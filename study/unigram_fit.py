"""
How well signatures can express token frequencies: a tool to choose H, B and the vocabulary without training.

    $ python prepare.py --dataset=my.jsonl --tokenizer=tekken --data_format=ids --data_dir=data/my
    $ python -m study.unigram_fit data/my --num_hashes=4 --num_buckets=7966

A token's logit is a sum of H bucket logits. The tool fits these H x B numbers to the unigram frequencies of the
training split by maximum likelihood, which is convex (L-BFGS, float64): for the paper's table, for informed signatures,
and for those by counts alone, the frequency ranges. It prints the remaining KL divergence in nats: above 0.1, expect a
loss on rare tokens. This is an indicator, not a bound, since a model has other bucket logits in every context. The
decrease over the last 100 iterations tells whether the fit has converged.
"""

import argparse

import numpy as np
import torch

import hashing
from hashing import informed_table, signature_table
from mhf.data import Bins, count_tokens
from mhf.errors import install_excepthook


def fit(table, counts, used):
    """
    Fits bucket logits to token counts.

    Args: table (V, H) integers; counts (V,); used (V,) bool, the ids that have a token.

    Returns the KL divergence of the frequencies from the fit in nats, and its decrease over the last 100 iterations.
    """
    s = torch.tensor(table.astype(np.int64))
    used = torch.tensor(used)
    p = torch.tensor(counts, dtype=torch.float64) * used
    p /= p.sum()
    o = torch.zeros(s.shape[1], int(s.max()) + 1, dtype=torch.float64, requires_grad=True)
    options = dict(history_size=20, line_search_fn='strong_wolfe', tolerance_grad=1e-10, tolerance_change=1e-13)
    optimizer = torch.optim.LBFGS([o], max_iter=100, max_eval=10**9, **options)

    def closure():
        optimizer.zero_grad()
        logits = sum(o_i[s_i] for o_i, s_i in zip(o, s.T, strict=True))
        loss = logits[used].logsumexp(0) - p @ logits
        loss.backward()
        return loss

    # step() continues the fit for 100 iterations, and returns the loss before the first of them
    losses = [optimizer.step(closure).item() for _ in range(16)]
    return losses[-1] - torch.special.entr(p).sum().item(), losses[-2] - losses[-1]


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data_dir', help='a folder of token ids from prepare.py')
    parser.add_argument('--num_hashes', type=int, default=4)
    parser.add_argument('--num_buckets', type=int, default=16384)
    args = parser.parse_args()
    train = Bins(args.data_dir, 'train')
    tok = train.tok
    counts = count_tokens(train)
    used = np.array([token is not None for token in tok.tokens])
    sizes = (args.num_hashes, args.num_buckets)
    tables = {
        "the paper's": signature_table(tok.tokens, *sizes, pad_id=tok.pad),
        'informed': informed_table(tok.spellings, counts, *sizes, pad_id=tok.pad)[0],
    }
    hashing.PROPERTIES = ()  # all hashes depend on the complete token
    tables['informed by counts alone'] = informed_table(tok.spellings, counts, *sizes, pad_id=tok.pad)[0]
    print(f'{used.sum():,} tokens in the vocabulary, H={args.num_hashes}, B={args.num_buckets}')
    for name, table in tables.items():
        kl, decrease = fit(table, counts, used)
        print(f'{name}: KL {kl:.4f} nats (decreased by {decrease:.4f} in the last 100 iterations)')


if __name__ == '__main__':
    main()
