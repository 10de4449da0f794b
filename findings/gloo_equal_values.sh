#!/usr/bin/env bash
# torch 2.13.0, gloo with four processes: all_reduce of a tensor whose elements are all equal returns unequal elements.
# Guess: sums differ between positions, because the order of addition does (70 %).
# Expected: the same four numbers have the same sum at every position. Seen: in bfloat16, half of the sums of 1 and
# three times 0.0023 are 1.0, the other half 1.0078; float32 has the same in its last bit. Each part of a tensor is
# summed in an order of its own. So rows that start equal and get equal gradients do not stay equal, and bits depend on
# where a gradient lies in DDP's buckets, that is, on bucket_cap_mb. With two processes there is only one order.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import subprocess
import sys
import tempfile

WORKER = '''
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for dtype, small in ((torch.bfloat16, 0.6 * 2**-8), (torch.float32, 2**-24)):
    x = torch.full((1000,), small if rank else 1.0, dtype=dtype)
    dist.all_reduce(x)
    if rank == 0:
        sums, counts = x.unique(return_counts=True)
        print(f"{dtype}, {dist.get_world_size()} processes:", dict(zip(sums.tolist(), counts.tolist())), flush=True)
dist.destroy_process_group()
'''
with tempfile.NamedTemporaryFile('w', suffix='.py') as f:
    f.write(WORKER)
    f.flush()
    lines = []
    for processes in (2, 4):
        torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
        run = subprocess.run([*torchrun, f.name], capture_output=True, text=True, check=True)
        lines += [line for line in run.stdout.splitlines() if 'processes:' in line]
print(*lines, sep='\n')
assert [line.count(',') for line in lines] == [1, 1, 2, 2], 'changed'
assert '{1.0: 500, 1.0078125: 500}' in lines[2], 'changed'
PYTHON
