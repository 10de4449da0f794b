#!/usr/bin/env bash
# transformers 5.23.0, CANINE, the character model with hash embeddings: its eight hash functions are one.
# Guess: characters whose code points differ by a multiple of 16,384 have the same embedding (97 %).
# Expected of eight hash functions with 16,384 buckets each: two characters agree in all of them with probability
# 16384^-8. Seen: two characters agree in all eight or in none. A hash is (code point + 1) * prime modulo 2^14, and
# multiplication by an odd number is a permutation modulo 2^14, so every function merges the same characters. 10,000
# buckets do not help: each function still depends on the code point modulo the number of buckets only.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import itertools

import torch
from transformers import CanineConfig
from transformers.models.canine.modeling_canine import CanineEmbeddings

config = CanineConfig(hidden_size=64, num_attention_heads=4)
torch.manual_seed(0)
embeddings = CanineEmbeddings(config).eval()


def embed(characters):
    ids = torch.tensor([[ord(c) for c in characters]])
    with torch.no_grad():
        return embeddings._embed_hash_buckets(ids, 64, config.num_hash_functions, config.num_hash_buckets)[0]


B = config.num_hash_buckets
characters = ['a', chr(ord('a') + B), 'b', chr(ord('b') + B)]
for (i, first), (j, second) in itertools.combinations(enumerate(characters), 2):
    e = embed(characters)
    print(f'U+{ord(first):04X} and U+{ord(second):04X}: same embedding {torch.equal(e[i], e[j])}')
chinese = [chr(c) for c in range(0x4E00, 0xA000)]
rows = torch.unique(embed(chinese), dim=0)
print(f'{len(chinese):,} Chinese characters have {len(rows):,} different embeddings')
hashes = embeddings._hash_bucket_tensors(torch.tensor([[97, 10097]]), config.num_hash_functions, 10000)
print('10,000 buckets, code points 97 and 10,097:', [h[0].tolist() for h in hashes])
assert config.num_hash_functions == 8 and B == 16384
assert torch.equal(embed('a'), embed(chr(ord('a') + B))) and len(rows) == B, 'changed'
assert all(h[0, 0] == h[0, 1] for h in hashes), 'changed'
PYTHON
