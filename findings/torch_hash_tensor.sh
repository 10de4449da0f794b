#!/usr/bin/env bash
# torch 2.13.0, torch.hash_tensor: a checkpoint with two swapped embedding rows has the same hash, and any tensor in
# which every element occurs twice has the hash 0.
# Guess: the hash ignores the order of elements (60 %).
# Expected of a function called hash: another value for another order. Seen: it is the XOR of the elements' bits, so
# permuted rows, transposed weights and swapped shards are not noticed. Use hashlib on the bytes to compare weights or
# tables.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch

rows = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
values = {
    'rows': torch.hash_tensor(rows).item(),
    'rows in another order': torch.hash_tensor(rows.flip(0)).item(),
    'columns in another order': torch.hash_tensor(rows[:, [1, 0, 2, 3, 4, 5, 6, 7]]).item(),
    'rows twice': torch.hash_tensor(rows.repeat(2, 1)).item(),
    'zeros': torch.hash_tensor(torch.zeros(7)).item(),
}
for name, value in values.items():
    print(f'{name:<26}{value:>22}')
assert values['rows'] == values['rows in another order'] == values['columns in another order'], 'changed'
assert values['rows twice'] == values['zeros'] == 0, 'changed'
PYTHON
