"""
Rank: how many dimensions log P has, contexts x vocabulary, in float64, and its bounds

    $ python prepare.py config/mhf_tiny.py     # the contexts, and what MODELS learn
    $ python -m study.rank                     # trains MODELS; writes study/rank.csv and study/rank.png
    $ python -m study.rank out/mhf_tiny        # checkpoints of train.py instead; writes into the first one's folder

A row of log P is linear in h (d numbers), in what each of H - 1 mixers adds to it (z numbers), and in two constants:
the mixers' biases and the normalizer. The logits of a coordinate lie in the span of E_i, of dimension min(d, B). So

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
from matplotlib.figure import Figure

from configurator import InputError, install_excepthook
from mhf.checkpoint import load_checkpoint
from mhf.data import data_folder, held_out_ids
from mhf.tokenizers import get_tokenizer
from model import MHF
from study.pictures import save_axes

HERE = Path(__file__).resolve().parent
CONTEXTS = 4096
COLUMNS = 2048
# z is 64; every bound is far below CONTEXTS and COLUMNS
_TINY = '--num_layers=2 --num_heads=2 --num_kv_heads=1 --head_dim=16 --intermediate_size=96 --num_buckets=2048'
_TINY += (
    ' --max_steps=300 --eval_interval=150 --warmup_steps=30 --learning_rate=4e-3 --embedding_lr_mult=1 --beta2=0.95'
)
_TINY += ' --encoder_init=normal --embedding_scale=1 --loss=exact'
MODELS = {
    'Standard, d=32': '--hidden_size=32 --num_hashes=0',
    'H4, d=32': '--hidden_size=32 --num_hashes=4',
    'H4, d=32, B=20': '--hidden_size=32 --num_hashes=4 --num_buckets=20',
    'H4, d=128': '--hidden_size=128 --num_hashes=4',
}


def bounds(c):
    """A config -> the bounds of the rank: {whose: number}."""
    d = c.hidden_size
    H = c.num_hashes
    B = c.num_buckets
    V = c.vocab_size
    standard = d + 1
    if not H:
        most = min(standard, V)
        return dict(standard=standard, bound=most, reachable=most, paper=most)
    cascade = d + (H - 1) * c.bottleneck + 2
    return dict(
        standard=standard,
        bound=min(cascade, H * min(d, B) + 1, V),
        reachable=min(cascade, H * d + 1, H * (B - 2) + 2, V),
        paper=min(B, H * d),
    )


@torch.no_grad()
def log_p(model, ids, columns):
    """A model in float64, ids (N, T) -> log P of the tokens `columns` after each: (N T, columns), numpy."""
    # one sequence at a time, because log_probs gives the whole vocabulary
    return torch.cat([model.log_probs(block[None])[0, :, columns] for block in ids]).numpy()


def numerical_rank(singular, shape):
    """Singular values, the largest first -> how many are above numpy's threshold, that of rounding errors."""
    return int((singular > max(shape) * np.finfo(np.float64).eps * singular[0]).sum())


def some_columns(model, number):
    """The padding token, whose buckets no other has, and others at random, (number,). Fewer cannot raise a rank."""
    tokens = model.token_mask.nonzero()[:, 0]
    others = tokens[tokens != model.config.pad_id]
    chosen = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: number - 1]]
    return torch.cat([torch.tensor([model.config.pad_id]), chosen])


def measure(name, weights, model, ids):
    """A model over the contexts ids (N, T) -> its row of the table, and the singular values of log P."""
    matrix = log_p(model.double(), ids, some_columns(model, COLUMNS))
    singular = np.linalg.svd(matrix, compute_uv=False)
    rank = numerical_rank(singular, matrix.shape)
    c = model.config
    row = dict(model=name, weights=weights, d=c.hidden_size, H=c.num_hashes, B=c.buckets_per_coordinate, z=c.bottleneck)
    row |= dict(V=c.vocab_size, contexts=len(matrix), columns=matrix.shape[1], rank=rank) | bounds(c)
    # by the largest: the first one beyond Standard's bound, the last that counts, the first that does not
    relative = np.append(singular, 0) / singular[0]
    places = dict(beyond=row['standard'], above=rank - 1, below=rank)
    row |= {column: f'{relative[k]:.1e}' for column, k in places.items()}
    return row, singular


def train():
    """Trains those of MODELS that are not trained yet. Returns {name: out_dir}."""
    folders = {name: Path('out/rank') / name.replace(', ', '_') for name in MODELS}
    for name, folder in folders.items():
        # train.py writes it last
        if not (folder / 'loss.png').exists():
            flags = f'--auto_resume --out_dir={folder} {_TINY} {MODELS[name]}'.split()
            subprocess.run([sys.executable, HERE.parent / 'train.py', 'config/mhf_tiny.py', *flags], check=True)
    return folders


def read_contexts(folder, config, model):
    """
    Held-out tokens of a run's data, in complete contexts: ids (n, T), int64. config: of the checkpoint. Raises
    InputError if they are too few for the model's bound.
    """
    T = model.config.block_size
    ids, _ = held_out_ids(data_folder(config), get_tokenizer(config['tokenizer']))
    n = min(CONTEXTS, len(ids)) // T
    bound = bounds(model.config)['bound']
    if bound > min(n * T, COLUMNS):
        seen = f'{n * T:,} held-out contexts x {COLUMNS:,} tokens'
        raise InputError(f'{folder}: {seen} cannot show a rank of {bound:,}; prepare more, or raise COLUMNS')
    return torch.tensor(ids[: n * T]).view(n, T)


def measure_run(name, folder):
    """A run of train.py -> what measure gives of its model, before and after training."""
    trained, ckpt = load_checkpoint(folder / 'ckpt.pt')
    ids = read_contexts(folder, ckpt['config'], trained)
    torch.manual_seed(1)
    unused_ids = (~trained.token_mask).nonzero()[:, 0].tolist()
    fresh = MHF(trained.config, trained.signatures.numpy(), unused_ids)
    fresh.init_weights()
    return [measure(name, 'fresh', fresh, ids), measure(name, 'trained', trained, ids)]


def draw(spectra, path):
    """Draws [(row, singular values)]; a bound has the color of its model."""
    fig = Figure(figsize=(9, 5.5))
    ax = fig.add_subplot()
    names = list(dict.fromkeys(row['model'] for row, _ in spectra))
    for row, singular in spectra:
        color = f'C{names.index(row["model"])}'
        style = '-' if row['weights'] == 'trained' else ':'
        label = f'{row["model"]}, {row["weights"]}: {row["rank"]}'
        ax.plot(range(1, len(singular) + 1), singular / singular[0], style, color=color, label=label)
        ax.axvline(row['bound'], color=color, lw=0.6)
    last = max(row['bound'] for row, _ in spectra)
    labels = dict(xlabel='index; vertical lines: the bound of each', ylabel='singular value of log P, by the largest')
    save_axes(
        fig, ax, path, xlim=(0, 1.7 * last), ylim=(1e-18, 2), yscale='log', title='numerical rank of log P', **labels
    )


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', nargs='*', help='checkpoints of train.py in place of MODELS')
    named = parser.parse_args().folders
    folders = {path: Path(path) for path in named} if named else train()
    target = Path(named[0] if named else HERE) / 'rank'
    spectra = []
    for name, folder in folders.items():
        spectra += measure_run(name, folder)
    rows = [row for row, _ in spectra]
    with open(target.with_suffix('.csv'), 'w', newline='') as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
    draw(spectra, target.with_suffix('.png'))
    for line in (rows[0], ['---'] * len(rows[0]), *(row.values() for row in rows)):
        print(f'| {" | ".join(map(str, line))} |')


if __name__ == '__main__':
    main()
