#!/usr/bin/env bash
# torch 2.13.0 on a CPU: inside one autocast block, matrix products keep using the weights of the first step.
# Guess: an optimizer step inside the block is invisible to later products of the block (80 %).
# Expected: autocast converts the current float32 weight to bfloat16 at each product. Seen: it caches the converted
# weight until the block ends and does not notice updates in place, so the loss stays the same for all steps of the
# block. Nothing warns. A training loop belongs outside: `with autocast:` around each forward pass.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
linear = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
x = torch.randn(2, 4)


def train(steps):
    """Losses of an overfitted batch."""
    losses = []
    for _ in range(steps):
        loss = (linear(x).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


with torch.autocast('cpu', torch.bfloat16):
    around_the_loop = train(4)
with torch.autocast('cpu', torch.bfloat16):
    next_block = train(1)
print('losses of four steps in one autocast block:', around_the_loop)
print('loss of the same weights in the next block: ', next_block)
assert len(set(around_the_loop)) == 1 and next_block[0] != around_the_loop[0], 'changed'
PYTHON
