#!/usr/bin/env bash
# torch 2.13.0, torch.optim.Muon on an embedding table: whether a row with a 1,000 x smaller gradient moves as far as
# the others depends on how many other rows the batch touches.
# Guess: such a row always gets an update of about the same size (60 %).
# Expected: orthogonalization equalizes rows. Seen: with two touched rows the small one moves 0.66 x as far; with more
# rows than columns, the normal case of a table, it moves 0.0012 x as far, so Muon does not help rare rows. Rows
# without a gradient stay.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def update_norms(gradient):
    """Norms of the rows of Muon's first update of a table of zeros."""
    table = torch.nn.Parameter(torch.zeros_like(gradient))
    table.grad = gradient
    torch.optim.Muon([table], lr=1.0, weight_decay=0.0).step()
    return table.detach().norm(dim=1)


torch.manual_seed(0)
few = torch.zeros(512, 64)
few[0] = torch.randn(64)  # a frequent token's row
few[1] = 1e-3 * torch.randn(64)  # a rare token's row
many = torch.randn(512, 64)
many[256:] *= 1e-3
norms_few = update_norms(few)
norms_many = update_norms(many)
ratio_few = (norms_few[1] / norms_few[0]).item()
ratio_many = (norms_many[256:].mean() / norms_many[:256].mean()).item()
print(f'rows with a gradient 1,000 x smaller: update {ratio_few:.2f} x as large with 2 rows in the batch')
print(f'{ratio_many:.4f} x as large with 512 rows')
assert ratio_few > 0.5 and ratio_many < 0.01 and norms_few[2:].max() == 0, 'changed'
PYTHON
