#!/usr/bin/env bash
# xxhash 3.6.0: for inputs of 1 to 3 and of more than 240 bytes, XXH3-64 is the low half of XXH3-128; in between, it
# is not. Data pipelines take XXH3-64 as a bucket and XXH3-128 as a checksum of a document, or both as two hash
# functions of a token.
# Guess: the halves are unrelated for short inputs and equal for long ones (60 %).
# Expected: one rule for all lengths. Seen: equal for 1 to 3 bytes, different for 4 to 240, equal from 241 on. A test
# with words of usual length passes; tokens of one to three bytes, the most frequent ones, and documents get the same
# id twice.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xxhash==3.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import random

import xxhash

random.seed(0)
equal = {}
for size in [*range(1, 20), 128, 129, 240, 241, 300, 1000]:
    data = random.randbytes(size)
    equal[size] = xxhash.xxh3_64_intdigest(data) == xxhash.xxh3_128_intdigest(data) & (2**64 - 1)
print('equal for lengths', [size for size, same in equal.items() if same])
print('different for lengths', [size for size, same in equal.items() if not same])
assert [size for size, same in equal.items() if same] == [1, 2, 3, 241, 300, 1000], 'changed'
PYTHON
