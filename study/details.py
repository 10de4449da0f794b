"""
What one mean hides: nats, top-1 and rank by how frequent the target is, and the best temperature of the paper's loss.

    $ python study/details.py OUT_DIR TRAIN TEXT      # a model, its data, a folder with held-out text; sweep.py does

A decile is a tenth of the held-out tokens, in the order of their frequency in the training text, the most frequent
first. A rank is 1 and how many tokens are likelier than the target; the median counts. The temperature is chosen on the
first half of these tokens and measured on the second: of models that were trained with loss=product, whose P(w) is too
sharp. Writes OUT_DIR/details.json.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mhf.bins import Bins, read_meta
from mhf.checkpoint import load_checkpoint
from mhf.device import pick_device

TEMPERATURES = [k / 10 for k in range(5, 51)]


def of_tokens(model, ids, temperatures):
    """
    Ids (n + 1,) in blocks of the model's context -> of each but the first: nats, is it the likeliest, and its rank,
    (3, n); and nats at each temperature, (temperatures, n).
    """
    T, parts, tempered = model.config.block_size, [], []
    for b in range(0, len(ids) - 1, T):
        block = ids[b : b + T + 1]
        h = model.hidden_states(model.sign(block[None, :-1]))[0]
        logp, right, _ = model.predict(h, block[1:])
        logits = model.next_token_logits(h)
        target = logits.gather(1, block[1:, None])[:, 0]
        parts.append(torch.stack([-logp, right, 1 + (logits > target[:, None]).sum(-1)]).double())
        if temperatures:
            nats = [(logits / t).logsumexp(-1) - target / t for t in temperatures]
            tempered.append(torch.stack(nats).double())
    return torch.cat(parts, 1).cpu(), torch.cat(tempered, 1).cpu() if tempered else None


@torch.no_grad()
def details(out_dir, train, text):
    """A dict of numbers."""
    model, ckpt = load_checkpoint(out_dir / 'ckpt.pt')
    found = ((folder, read_meta(folder)['splits'][split]) for folder, split in ((train, 'train'), (text, 'val')))
    train, val = (torch.tensor(Bins(folder, split)[:].astype('int64')) for folder, split in found)
    product = ckpt['config']['loss'] == 'product' and model.config.num_hashes
    device = pick_device()
    # that of training: a measured one may be another in the next run
    dtype = ckpt['config']['dtype']
    with torch.autocast(torch.device(device).type, torch.bfloat16, dtype == 'bfloat16'):
        (nats, right, rank), tempered = of_tokens(model.to(device), val.to(device), TEMPERATURES if product else [])
    frequency = torch.bincount(train, minlength=model.config.vocab_size)[val[1:]]
    numbers, order = {}, frequency.argsort(descending=True, stable=True)
    for k, tokens in enumerate(order.tensor_split(10), 1):
        numbers |= {f'frequency_{k}': frequency[tokens].double().mean().item()}
        numbers |= {f'nats_{k}': nats[tokens].mean().item(), f'top1_{k}': right[tokens].mean().item()}
        numbers |= {f'rank_{k}': rank[tokens].median().item()}
    if product:
        first, second = (half.mean(1) for half in tempered.tensor_split(2, dim=1))
        best = first.argmin()
        numbers |= dict(temperature=TEMPERATURES[best], nats_at_it=second[best].item())
        numbers |= dict(nats_without=second[TEMPERATURES.index(1)].item())
    return numbers


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', type=Path, help='a run of train.py')
    parser.add_argument('train', type=Path, help='the folder of its training data')
    parser.add_argument('text', type=Path, help='a folder whose held-out split is measured')
    args = parser.parse_args()
    (args.out_dir / 'details.json').write_text(json.dumps(details(args.out_dir, args.train, args.text)))
