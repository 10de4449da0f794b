#!/usr/bin/env bash
# torch 2.13.0: with lr as a tensor, all parameter groups of an optimizer share one learning rate.
# Guess: with LambdaLR, the last function sets the learning rate of all groups (65 %).
# Expected: a scheduler with a function per group sets a learning rate per group, as it does for a float. Seen: groups
# that take the default contain the same tensor, and schedulers write into it in place, so the last function wins for
# all. A table of embeddings that should learn 4 x as fast learns as fast as the rest, and nothing warns. A tensor is
# the form of lr for a compiled or captured optimizer step. Give each group its own tensor.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def learning_rates(lr, own_tensors=False):
    table, rest = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [dict(params=[table]), dict(params=[rest])]
    if own_tensors:
        groups = [group | dict(lr=lr.clone()) for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 4.0, lambda step: 1.0])
    optimizer.step()
    scheduler.step()
    return [round(float(group['lr']), 6) for group in optimizer.param_groups]


as_float = learning_rates(1e-3)
as_tensor = learning_rates(torch.tensor(1e-3))
fixed = learning_rates(torch.tensor(1e-3), own_tensors=True)
print('table and rest, multipliers 4 and 1, lr a float:   ', as_float)
print('lr a tensor:                                       ', as_tensor)
print('lr a tensor, cloned for each group:                ', fixed)
assert as_float == fixed == [0.004, 0.001] and as_tensor == [0.001, 0.001], 'changed'
PYTHON
