#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: loading converts silently to the dtype of the template, even float to
# integer.
# Guess: float32 is rounded to bfloat16 silently (65 %).
# Expected: an error, as for a wrong shape, or at least a warning. Seen: weights are rounded to bfloat16, and
# truncated to integers; entries that the template lacks, such as optimizer moments, are dropped. A resumed run in
# another precision starts from rounded weights, and continues without a message.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter('ignore')  # no process group
saved = {'weight': torch.tensor([1.001, 2.5, -0.3]), 'exp_avg_sq': torch.tensor([1e-12])}
with tempfile.TemporaryDirectory() as folder:
    dcp.save(saved, checkpoint_id=folder)
    for dtype in (torch.bfloat16, torch.int64):
        template = {'weight': torch.zeros(3, dtype=dtype)}
        dcp.load(template, checkpoint_id=folder)
        print(dtype, template['weight'].tolist(), 'keys that were not asked for: dropped')
assert template['weight'].tolist() == [1, 2, 0], 'changed'
PYTHON
