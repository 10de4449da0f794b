#!/usr/bin/env bash
# torch 2.13.0 on a CPU: eager code loses ten additions of 0.001 to 1 in bfloat16, compiled code keeps them.
# Guess: inductor keeps float32 between fused bfloat16 operations (75 %).
# Expected: torch.compile changes the speed, not the result. Seen: 1.0 eager, 1.0078125 compiled, because the fused
# loop rounds once at the end. A residual stream in bfloat16 therefore trains better compiled than eager, and a
# comparison of two models, of which one is compiled, compares roundings.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def small_updates(x):
    for _ in range(10):
        x = x + 1e-3
    return x


x = torch.ones(64, dtype=torch.bfloat16)
eager = small_updates(x)[0].item()
compiled = torch.compile(small_updates)(x)[0].item()
print(f'ten times + 0.001 in bfloat16: eager {eager}, compiled {compiled}')
assert eager == 1.0 and compiled > 1.005, 'changed'
PYTHON
