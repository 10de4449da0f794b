"""
What one mean hides: nats and top-1 by how frequent the target is, and the best temperature of the paper's loss.

    $ python study/details.py study/english.py       # of each run at its best rate -> study/english_details.csv

A decile is a tenth of the held-out tokens of the first text, in the order of their frequency in the training text, the
most frequent first. The temperature is chosen on the first half of these tokens and measured on the second: of models
that were trained with loss=product, whose P(w) is too sharp. Needs the weights that sweep.py leaves in out/.
"""

import sys
from pathlib import Path

import sweep
import torch
from report import add_row, read_rows

from bins import Bins, read_meta
from checkpoint import load_checkpoint, pick_device

TEMPERATURES = [k / 10 for k in range(5, 51)]


def of_tokens(model, ids, temperatures):
    """
    Ids (n + 1,) in blocks of the model's context -> of each but the first: nats and is it the likeliest, (2, n); and
    nats at each temperature, (temperatures, n).
    """
    T, parts, tempered = model.config.block_size, [], []
    for b in range(0, len(ids) - 1, T):
        block = ids[b : b + T + 1]
        h = model.hidden_states(model.sign(block[None, :-1]))[0]
        logp, right, _ = model.predict(h, block[1:])
        parts.append(torch.stack([-logp, right]).double())
        if temperatures:
            logits = model.next_token_logits(h)
            target = logits.gather(1, block[1:, None])[:, 0]
            nats = [(logits / t).logsumexp(-1) - target / t for t in temperatures]
            tempered.append(torch.stack(nats).double())
    return torch.cat(parts, 1), torch.cat(tempered, 1) if tempered else None


@torch.no_grad()
def details(study, entry, key):
    """The row of one run."""
    model, ckpt = load_checkpoint(study.out / key / 'ckpt.pt')
    folders = Path(entry['train']), Path(next(iter(entry['texts'].values())))
    splits = [read_meta(folder)['splits'][split] for folder, split in zip(folders, ('train', 'val'), strict=True)]
    train, val = (torch.tensor(Bins(f, s)[:].astype('int64')) for f, s in zip(folders, splits, strict=True))
    product = ckpt['config']['loss'] == 'product' and model.config.num_hashes
    device, dtype = pick_device(None, None)
    model, ids = model.to(device), val.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, dtype == 'bfloat16'):
        (nats, right), tempered = of_tokens(model, ids, TEMPERATURES if product else [])
    nats, right = nats.cpu(), right.cpu()
    frequency = torch.bincount(train, minlength=model.config.vocab_size)[val[1:]]
    row, order = dict(key=key), frequency.argsort(descending=True, stable=True)
    for k, tokens in enumerate(order.tensor_split(10), 1):
        row |= {f'frequency_{k}': frequency[tokens].double().mean().item()}
        row |= {f'nats_{k}': nats[tokens].mean().item(), f'top1_{k}': right[tokens].mean().item()}
    if product:
        first, second = (half.mean(1) for half in tempered.tensor_split(2, dim=1))
        best = first.argmin()
        row |= dict(temperature=TEMPERATURES[best], nats_at_it=second[best].item())
        row |= dict(nats_without=second[TEMPERATURES.index(1)].item())
    return row


for study in map(sweep.Study, sys.argv[1:]):
    target = study.path.with_name(f'{study.path.stem}_details.csv')
    rows = read_rows(study.csv)
    for key, entry, settings in study.runs(rows):
        at_best = settings['learning_rate'] == study.best_rate(entry, rows)
        if at_best and key in rows and key not in read_rows(target):
            add_row(target, details(study, entry, key))
            print(entry['group'], entry['name'], settings['seed'], sep=', ', flush=True)
