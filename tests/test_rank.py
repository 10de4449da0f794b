"""study/rank.py: the numerical rank of log P, in float64, of small random models."""

import pytest
import torch

from study import rank
from study.rows import read_csv
from test_mhf import random_model

SHAPE = dict(vocab_size=512, hidden_size=16, num_layers=1)
# (settings, the rank)
CASES = {
    # d + 1: logits and the normalizer
    'Standard': (dict(num_hashes=0), 17),
    # H - 1 mixers add z each, their biases and the normalizer 1 each: neither the paper's 64 nor Standard's 17
    'z below d': (dict(num_hashes=4, num_buckets=64, bottleneck=4), 16 + 3 * 4 + 2),
    # a mixer fills all d: H d + 1
    'z above d': (dict(num_hashes=4, num_buckets=64, bottleneck=24), 4 * 16 + 1),
    # above the paper's 10: H (B - 2) + 2
    'B below d': (dict(num_hashes=4, num_buckets=10, bottleneck=24), 4 * 8 + 2),
}


@pytest.mark.parametrize('case', CASES)
def test_rank(case):
    """The rank equals the reachable bound: z per mixer, 1 for the biases and 1 for the normalizer."""
    settings, expected = CASES[case]
    m = random_model(**SHAPE | settings)
    # 384 contexts
    ids = torch.randint(m.config.vocab_size, (16, m.config.block_size), generator=torch.Generator().manual_seed(0))
    row, singular = rank.measure('', '', m, ids)
    assert row['rank'] == row['reachable'] == expected <= row['bound']
    assert list(row) == list(read_csv(rank.HERE / 'rank.csv')[0])
    # the threshold lies within a gap, not somewhere on a slope
    assert singular[expected] < 1e-3 * singular[expected - 1]
