"""
The rank of log P, contexts x vocabulary, in float64, and its bounds.

    $ python -m study.rank out/mhf_tiny out/standard    # a row for each run's initialization and its trained weights

A row of log P is linear in h (d numbers), in what each of the H - 1 mixers adds to it (z numbers), and in two
constants: the mixers' biases and the normalizer. The logits of a hash lie in the span of E_i, of dimension
min(d, B). So

    rank <= min(d + (H - 1) z + 2, H min(d, B) + 1, V)        Standard: d + 1        the paper: min(B, H d)

`reachable` is what random E and mixers fill. It has H (B - 2) + 2 instead of H B + 1: the buckets of each hash sum
to the same vector of ones, and bucket 0 belongs to the padding token alone. Biases of 0 at initialization take 1.
The columns are 2,048 random tokens, and fewer of them only lower a rank.

rank.csv has runs of config/mhf_tiny_paper.py with --num_layers=2 --num_heads=2 --num_kv_heads=1 --head_dim=16
--intermediate_size=96 --num_buckets=2048 --max_steps=300 --eval_interval=150 --warmup_steps=30 --learning_rate=4e-3
--embedding_lr_mult=1 --beta2=0.95 --encoder_init=normal --embedding_scale=1, and with the d, H and B of each row.
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
import torch

from mhf.checkpoint import read_checkpoint
from mhf.data import Bins, data_folder
from mhf.errors import install_excepthook
from model import MHF

CONTEXTS = 4096
COLUMNS = 2048


def bounds(c):
    """A config -> the bounds of the rank: {whose: number}."""
    d = c.hidden_size
    H = c.num_hashes
    B = c.num_buckets
    V = c.vocab_size
    standard = d + 1
    if not H:
        return dict(standard=standard, bound=standard, reachable=standard, paper=standard)
    cascade = d + (H - 1) * c.bottleneck + 2
    reachable = min(cascade, H * d + 1, H * (B - 2) + 2, V)
    return dict(standard=standard, bound=min(cascade, H * min(d, B) + 1, V), reachable=reachable, paper=min(B, H * d))


def random_tokens(model, count):
    """The padding token, whose buckets no other token has, and random others, a list."""
    pad_id = model.config.pad_id
    excluded = {pad_id, *model.unused_ids.tolist()}
    order = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    return [pad_id, *(i for i in order if i not in excluded)][:count]


@torch.no_grad()
def measure(name, weights, model, ids):
    """
    A model over the contexts ids (N, T) -> its row of the CSV, and the singular values of log P. A rank near the number
    of contexts or columns is limited by it.
    """
    c = model.config
    model.double()
    columns = random_tokens(model, COLUMNS)
    # one sequence at a time, because log_probs returns the whole vocabulary
    matrix = torch.cat([model.log_probs(sequence[None])[0, :, columns] for sequence in ids]).numpy()
    singular = np.linalg.svd(matrix, compute_uv=False)
    # numpy's threshold, that of rounding errors
    rank = int((singular > max(matrix.shape) * np.finfo(np.float64).eps * singular[0]).sum())
    row = dict(model=name, weights=weights, d=c.hidden_size, H=c.num_hashes, B=c.buckets_per_coordinate, z=c.bottleneck)
    return row | dict(V=c.vocab_size, contexts=len(matrix), columns=matrix.shape[1], rank=rank) | bounds(c), singular


def measure_run(folder):
    """The rows of a run's model, at initialization and trained, on contexts of its held-out tokens."""
    trained, ckpt = read_checkpoint(folder / 'ckpt.pt')
    T = trained.config.block_size
    ids = Bins(data_folder(ckpt.settings | ckpt.identity), 'val')[:CONTEXTS]
    contexts = torch.tensor(ids[: len(ids) // T * T].astype(np.int64)).view(-1, T)
    torch.manual_seed(1)
    fresh = MHF(trained.config, **trained.vocabulary())
    fresh.init_weights()
    models = dict(fresh=fresh, trained=trained)
    return [measure(folder, weights, model, contexts)[0] for weights, model in models.items()]


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', nargs='+', type=Path, help='runs of train.py')
    rows = [row for folder in parser.parse_args().folders for row in measure_run(folder)]
    writer = csv.DictWriter(sys.stdout, rows[0].keys(), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)


if __name__ == '__main__':
    main()
