#!/usr/bin/env bash
# zlib.crc32 of Python 3.11, its second argument used as a seed: tokens of one length that share a bucket with one
# seed share it with every seed, if the number of buckets is a power of two.
# Guess: the same (95 %), because a CRC is linear, so a seed adds a constant to all tokens of one length.
# Expected by users of seeded hashes: a collision with one seed says nothing about the next. Seen: all of 31,488 pairs
# again. A signature of H such hashes is no longer than one hash, and no rehashing with a further seed ends.
set -eu
python3 - <<'PYTHON'
import zlib
from collections import defaultdict

B = 65536
buckets = defaultdict(list)
for i in range(100000):
    token = b'tok%05d' % i
    buckets[zlib.crc32(token, 0) % B].append(token)
pairs = [tokens[:2] for tokens in buckets.values() if len(tokens) > 1]
for seed in (1, 2, 12345):
    again = sum(zlib.crc32(a, seed) % B == zlib.crc32(b, seed) % B for a, b in pairs)
    print(f'seed {seed}: {again:,} of {len(pairs):,} pairs collide again; expected {len(pairs) / B:.1f}')
    assert again == len(pairs), 'changed'
PYTHON
