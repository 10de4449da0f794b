"""
Rank: how many dimensions log P has, contexts x vocabulary, in float64, and its bounds

    $ python prepare.py config/mhf_tiny.py     # the contexts, and what MODELS learn
    $ python study/rank.py                     # trains MODELS; writes study/rank.csv and study/rank.png
    $ python study/rank.py out/mhf_tiny        # checkpoints of train.py instead; writes into the first one's folder

A row of log P is linear in h (d numbers), in what each of H - 1 mixers adds to it (z numbers), and in two constants:
the mixers' biases and the normaliser. The logits of a coordinate lie in the span of E_i, of dimension min(d, B). So

    rank <= min(d + (H - 1) z + 2, H min(d, B) + 1, V)        Standard: d + 1        the paper: min(B, H d)

Random E and mixers fill what is called reachable. It has H (B - 2) + 2 in place of H B + 1: the buckets of each
coordinate sum to the same vector of ones, and bucket 0 belongs to the padding token alone. Fresh biases are 0, which
takes 1. The last columns are singular values by the largest: the first beyond Standard's bound, the last above numpy's
threshold of 9.1e-13, and the first below it. Columns are 2,048 random tokens; fewer columns only lower a rank.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from configurator import InputError  # noqa: E402
from hashing import token_ids  # noqa: E402
from mhf.bins import open_bins  # noqa: E402
from mhf.checkpoint import load_checkpoint  # noqa: E402
from mhf.meta import load_meta  # noqa: E402
from mhf.plot import figure, save  # noqa: E402
from model import MHF  # noqa: E402

CONTEXTS, COLUMNS = 4096, 2048
# z is 64; every bound is far below both numbers
_TINY = '--num_layers=2 --num_heads=2 --num_kv_heads=1 --head_dim=16 --intermediate_size=96 --num_buckets=2048'
_TINY += ' --max_steps=300 --eval_interval=150 --warmup_steps=30 --learning_rate=4e-3 --embedding_rate=1 --beta2=0.95'
MODELS = {
    'Standard, d=32': '--hidden_size=32 --num_hashes=0',
    'H4, d=32': '--hidden_size=32 --num_hashes=4',
    'H4, d=32, B=20': '--hidden_size=32 --num_hashes=4 --num_buckets=20',
    'H4, d=128': '--hidden_size=128 --num_hashes=4',
}


def bounds(c):
    """A config -> the bounds of the rank: {whose: number}."""
    d, H, B, z, V = c.hidden_size, c.num_hashes, c.num_buckets, c.bottleneck, c.vocab_size
    if not H:
        return dict(standard=d + 1, bound=min(d + 1, V), reachable=min(d + 1, V), paper=min(d + 1, V))
    cascade = d + (H - 1) * z + 2
    bound, reachable = min(cascade, H * min(d, B) + 1, V), min(cascade, H * d + 1, H * (B - 2) + 2, V)
    return dict(standard=d + 1, bound=bound, reachable=reachable, paper=min(B, H * d))


@torch.no_grad()
def log_p(model, ids, columns):
    """A model in float64, ids (N, T) -> log P of the tokens `columns` after each: (N T, columns), numpy."""
    # of the whole vocabulary there is only a sequence's at a time
    return torch.cat([model.log_probs(block[None])[0, :, columns] for block in ids]).numpy()


def rank_of(singular, shape):
    """Singular values, the largest first -> how many are above numpy's threshold, that of rounding errors."""
    return int((singular > max(shape) * np.finfo(np.float64).eps * singular[0]).sum())


def some_columns(model, number):
    """The padding token, whose buckets no other has, and others at random, (number,). Fewer cannot raise a rank."""
    tokens = model.is_token.nonzero()[:, 0]
    others = tokens[tokens != model.config.pad_id]
    chosen = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: number - 1]]
    return torch.cat([torch.tensor([model.config.pad_id]), chosen])


def measure(name, weights, model, ids):
    """The row of the table, and the singular values."""
    matrix, c = log_p(model.double(), ids, some_columns(model, COLUMNS)), model.config
    singular = np.linalg.svd(matrix, compute_uv=False)
    rank = rank_of(singular, matrix.shape)
    row = dict(model=name, weights=weights, d=c.hidden_size, H=c.num_hashes, B=c.buckets, z=c.bottleneck)
    row |= dict(V=c.vocab_size, contexts=len(matrix), columns=matrix.shape[1], rank=rank) | bounds(c)
    # the first one beyond Standard's bound, the last that counts and the first that does not, by the largest
    places = dict(beyond=row['standard'], above=rank - 1, below=rank)
    relative = np.append(singular, 0) / singular[0]
    return row | {key: f'{relative[k]:.1e}' for key, k in places.items()}, singular


def train():
    """Trains those of MODELS that are not there yet; {name: out_dir}."""
    folders = {name: Path('out/rank') / name.replace(', ', '_') for name in MODELS}
    for name, folder in folders.items():
        # which train.py writes last of all
        if not (folder / 'loss.png').exists():
            flags = f'--auto_resume --out_dir={folder} {_TINY} {MODELS[name]}'.split()
            subprocess.run([sys.executable, HERE.parent / 'train.py', 'config/mhf_tiny.py', *flags], check=True)
    return folders


def draw(spectra, path):
    """[(row, singular values)] -> the picture; a bound has the colour of its model."""
    fig, ax = figure(9, 5.5)
    names = list(dict.fromkeys(row['model'] for row, _ in spectra))
    for row, singular in spectra:
        colour, style = f'C{names.index(row["model"])}', '-' if row['weights'] == 'trained' else ':'
        label = f'{row["model"]}, {row["weights"]}: {row["rank"]}'
        ax.plot(range(1, len(singular) + 1), singular / singular[0], style, color=colour, label=label)
        ax.axvline(row['bound'], color=colour, lw=0.6)
    last = max(row['bound'] for row, _ in spectra)
    labels = dict(xlabel='index; vertical lines: the bound of each', ylabel='singular value of log P, by the largest')
    save(fig, ax, path, xlim=(0, 1.7 * last), ylim=(1e-18, 2), yscale='log', title='numerical rank of log P', **labels)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', nargs='*', help='checkpoints of train.py in place of MODELS')
    named = {path: Path(path) for path in parser.parse_args().folders}
    folders, spectra = named or train(), []
    for name, folder in folders.items():
        trained, ckpt = load_checkpoint(folder / 'ckpt.pt')
        # a checkpoint of an older train.py names no kind of bins
        config = dict(bins='ids') | ckpt['config']
        T, val = trained.config.block_size, open_bins(config, load_meta(config), 'val')
        n = min(CONTEXTS, len(val)) // T
        if (bound := bounds(trained.config)['bound']) > min(n * T, COLUMNS):
            seen = f'{n * T:,} held-out contexts x {COLUMNS:,} tokens'
            raise InputError(f'{folder}: {seen} cannot show a rank of {bound:,}; prepare more, or raise COLUMNS')
        ids = token_ids(val[: n * T], trained.signatures.numpy())
        ids = torch.tensor(ids.astype(np.int64)).view(n, T)
        torch.manual_seed(1)
        fresh = MHF(trained.config, trained.signatures.numpy(), (~trained.is_token).nonzero()[:, 0].tolist())
        spectra += [measure(name, 'fresh', fresh, ids), measure(name, 'trained', trained, ids)]
    rows, target = [row for row, _ in spectra], next(iter(named.values()), HERE) / 'rank'
    with open(target.with_suffix('.csv'), 'w', newline='') as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    draw(spectra, target.with_suffix('.png'))
    for line in (rows[0], ['---'] * len(rows[0]), *(row.values() for row in rows)):
        print(f'| {" | ".join(map(str, line))} |')
