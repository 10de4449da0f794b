#!/usr/bin/env bash
# safetensors 0.8.0: the same tensors with the same metadata are other bytes in every process.
# Guess: the order of the metadata changes (65 %).
# Expected: a format without timestamps, whose tensors are sorted, is reproducible, so a SHA-256 identifies weights.
# Seen: tensors are sorted, metadata is written in the random order of a hash map, so six entries give another checksum
# in each process, and in each call. With one entry, such as format: pt of transformers, bytes are equal. Store facts
# about a model in one entry (a JSON text), or compare tensors instead of files.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import hashlib

import numpy as np
import safetensors.numpy

tensors = {'table': np.ones((4, 2), np.float32), 'norm': np.zeros(2, np.float32)}
six = {key: str(i) for i, key in enumerate(('format', 'source', 'dtype', 'vocab_size', 'seed', 'step'))}
counts = {}
for name, metadata in (('none', None), ('one entry', {'format': 'pt'}), ('six entries', six)):
    files = [safetensors.numpy.save(tensors, metadata) for _ in range(20)]
    counts[name] = len({hashlib.sha256(file).hexdigest() for file in files})
    print(f'metadata: {name}: {counts[name]} different checksums of 20 saves')
assert counts['none'] == counts['one entry'] == 1 < counts['six entries'], 'changed'
PYTHON
