"""
The rank of log P, contexts x vocabulary, in float64, and its bounds.

    $ python prepare.py config/mhf_tiny.py     # the contexts, and the training data of MODELS
    $ python -m study.rank                     # trains MODELS; writes study/rank.csv
    $ python -m study.rank out/mhf_tiny        # runs of train.py instead; prints the rows

A row of log P is linear in h (d numbers), in what each of the H - 1 mixers adds to it (z numbers), and in two
constants: the mixers' biases and the normalizer. The logits of a coordinate lie in the span of E_i, of dimension
min(d, B). So

    rank <= min(d + (H - 1) z + 2, H min(d, B) + 1, V)        Standard: d + 1        the paper: min(B, H d)

`reachable` is what random E and mixers fill. It has H (B - 2) + 2 instead of H B + 1: the buckets of each coordinate
sum to the same vector of ones, and bucket 0 belongs to the padding token alone. Biases of 0 at initialization take 1.
The columns are 2,048 random tokens, and fewer of them only lower a rank.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from mhf.checkpoint import read_checkpoint
from mhf.data import Bins, data_folder
from mhf.errors import InputError, install_excepthook
from mhf.tokenizers import get_tokenizer
from model import MHF
from study.rows import write_csv

HERE = Path(__file__).resolve().parent
CONTEXTS = 4096
COLUMNS = 2048
# z is 64; every bound is far below CONTEXTS and COLUMNS
_TINY = '--num_layers=2 --num_heads=2 --num_kv_heads=1 --head_dim=16 --intermediate_size=96 --num_buckets=2048'
_TINY += ' --max_steps=300 --eval_interval=150 --warmup_steps=30 --learning_rate=4e-3 --embedding_lr_mult=1'
_TINY += ' --beta2=0.95 --encoder_init=normal --embedding_scale=1 --loss=exact'
MODELS = {
    'Standard, d=32': '--hidden_size=32 --num_hashes=0',
    'MHF H4 B2,048, d=32': '--hidden_size=32 --num_hashes=4',
    'MHF H4 B20, d=32': '--hidden_size=32 --num_hashes=4 --num_buckets=20',
    'MHF H4 B2,048, d=128': '--hidden_size=128 --num_hashes=4',
}


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
    """The padding token, whose buckets no other token has, and random others, (count,)."""
    excluded = {model.config.pad_id, *model.unused_ids.tolist()}
    pad_id = torch.tensor([model.config.pad_id])
    tokens = torch.tensor([i for i in range(model.config.vocab_size) if i not in excluded])
    chosen = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[: count - 1]
    return torch.cat([pad_id, tokens[chosen]])


@torch.no_grad()
def measure(name, weights, model, ids):
    """A model over the contexts ids (N, T) -> its row of the CSV, and the singular values of log P."""
    model.double()
    columns = random_tokens(model, COLUMNS)
    # one sequence at a time, because log_probs returns the whole vocabulary
    matrix = torch.cat([model.log_probs(block[None])[0, :, columns] for block in ids]).numpy()
    singular = np.linalg.svd(matrix, compute_uv=False)
    # numpy's threshold, that of rounding errors
    rank = int((singular > max(matrix.shape) * np.finfo(np.float64).eps * singular[0]).sum())
    c = model.config
    row = dict(model=name, weights=weights, d=c.hidden_size, H=c.num_hashes, B=c.buckets_per_coordinate, z=c.bottleneck)
    return row | dict(V=c.vocab_size, contexts=len(matrix), columns=matrix.shape[1], rank=rank) | bounds(c), singular


def train():
    """Trains MODELS, or resumes them. Returns {name: out_dir}."""
    folders = {name: Path('out/rank') / name.replace(', ', '_').replace(' ', '_') for name in MODELS}
    for name, folder in folders.items():
        flags = f'--out_dir={folder} {_TINY} {MODELS[name]}'.split()
        done = subprocess.run([sys.executable, HERE.parent / 'train.py', 'config/mhf_tiny_paper.py', *flags])
        if done.returncode:
            sys.exit(done.returncode)  # train.py has printed the error
    return folders


def read_contexts(folder, config, model):
    """Complete contexts of a run's held-out tokens, (n, T). Raises InputError if they are too few for the bound."""
    T = model.config.block_size
    val = Bins(data_folder(config), 'val', get_tokenizer(config['tokenizer']))
    ids = val[:].tolist()
    n = min(CONTEXTS, len(ids)) // T
    bound = bounds(model.config)['bound']
    if bound > min(n * T, COLUMNS):
        contexts = f'{n * T:,} held-out contexts x {COLUMNS:,} tokens'
        raise InputError(f'{folder}: {contexts} cannot show a rank of {bound:,}; prepare more, or raise COLUMNS')
    return torch.tensor(ids[: n * T]).view(n, T)


def measure_run(name, folder):
    """The rows of a run's model, at initialization and trained."""
    trained, ckpt = read_checkpoint(folder / 'ckpt.pt')
    ids = read_contexts(folder, ckpt.settings | ckpt.identity, trained)
    torch.manual_seed(1)
    fresh = MHF(trained.config, **trained.vocabulary())
    fresh.init_weights()
    return [measure(name, weights, model, ids)[0] for weights, model in (('fresh', fresh), ('trained', trained))]


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', nargs='*', help='runs of train.py instead of MODELS')
    named = parser.parse_args().folders
    rows = []
    for name, folder in ({path: Path(path) for path in named} or train()).items():
        rows += measure_run(name, folder)
        for row in rows[-2:]:
            print(', '.join(f'{column} {value}' for column, value in row.items()), flush=True)
    if not named:
        write_csv(HERE / 'rank.csv', rows)


if __name__ == '__main__':
    main()
