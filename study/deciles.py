"""
Nats, top-1 accuracy and rank by token frequency.

    $ python -m study.deciles OUT_DIR TRAIN HELD_OUT     # writes OUT_DIR/deciles.json; sweep.py runs it

TRAIN and HELD_OUT are folders of prepare.py with token ids. Column nats_1 is the mean over the tenth of the held-out
tokens that is most frequent in TRAIN, nats_10 over the rarest tenth; likewise top1 and frequency. The rank of a target
is 1 plus the number of likelier tokens; rank_1 to rank_10 are medians.
"""

import argparse
import json
from pathlib import Path

import torch

from configurator import InputError, install_excepthook
from mhf.checkpoint import load_checkpoint
from mhf.data import Bins
from mhf.runtime import pick_device


def read_ids(folder, split, tokenizer_sha256):
    """The token ids of a split, (n,) int64. Raises InputError if the folder is of another format or tokenizer."""
    bins = Bins(folder, split)
    if bins.meta['data_format'] != 'ids':
        raise InputError(f'{folder} contains signatures; prepare it with --data_format=ids in another folder')
    if bins.meta['tokenizer_sha256'] != tokenizer_sha256:
        raise InputError(f"{folder} was prepared with '{bins.meta['tokenizer']}', not with the model's tokenizer")
    return torch.tensor(bins[:].astype('int64'))


def score_tokens(model, ids):
    """Returns nats, top-1 (1 or 0) and rank of each id but the first, (3, n), in blocks of the model's context."""
    T = model.config.block_size
    scores = []
    for start in range(0, len(ids) - 1, T):
        block = ids[start : start + T + 1]
        h = model.hidden_states(model.signatures[block[None, :-1]])[0]
        logits = model.next_token_logits(h)
        target = logits.gather(1, block[1:, None])[:, 0]
        rank = 1 + (logits > target[:, None]).sum(-1)
        scores.append(torch.stack([logits.logsumexp(-1) - target, rank == 1, rank]).double())
    return torch.cat(scores, 1).cpu()


def decile_columns(frequency, nats, top1, rank):
    """Frequency in the training corpus, nats, top-1 and rank of each token, (n,) each -> columns per decile."""
    columns = {}
    order = frequency.argsort(descending=True, stable=True)
    for k, tokens in enumerate(order.tensor_split(10), start=1):
        columns[f'frequency_{k}'] = frequency[tokens].double().mean().item()
        columns[f'nats_{k}'] = nats[tokens].mean().item()
        columns[f'top1_{k}'] = top1[tokens].mean().item()
        columns[f'rank_{k}'] = rank[tokens].median().item()
    return columns


@torch.no_grad()
def frequency_deciles(out_dir, train, held_out):
    """The columns of the model in out_dir, {name: number}."""
    model, ckpt = load_checkpoint(out_dir / 'ckpt.pt')
    train_ids = read_ids(train, 'train', ckpt['data']['tokenizer_sha256'])
    val_ids = read_ids(held_out, 'val', ckpt['data']['tokenizer_sha256'])
    device = pick_device()
    model.to(device)
    # the precision of training
    bfloat16 = ckpt['config']['dtype'] == 'bfloat16'
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bfloat16):
        scores = score_tokens(model, val_ids.to(device))
    frequency = torch.bincount(train_ids, minlength=model.config.vocab_size)[val_ids[1:]]
    return decile_columns(frequency, *scores)


if __name__ == '__main__':
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', type=Path, help='a run of train.py')
    parser.add_argument('train', type=Path, help='the folder of its training data')
    parser.add_argument('held_out', type=Path, help='a folder whose held-out split is measured')
    args = parser.parse_args()
    (args.out_dir / 'deciles.json').write_text(json.dumps(frequency_deciles(args.out_dir, args.train, args.held_out)))
