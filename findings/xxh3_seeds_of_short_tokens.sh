#!/usr/bin/env bash
# xxhash 4.1.0, XXH3-64 with the seeds 1 to 4 as four hash functions: all four 64-bit hashes of a token of three letters
# are also hashes of another token, with other seeds.
# Guess: signatures of tokens of one to three bytes are permutations of each other (85 %).
# Expected: 4 x 17,576 different values for all tokens of three lower-case letters. Seen: 18,928. For three bytes, the
# seed is added to a constant, and the sum is combined with the token by XOR before all mixing, so seed and last letter
# are exchangeable. Where the hashes select rows of one shared table and the rows are added, as in Bloom embeddings,
# "the" and three other tokens have the same embedding, for any number of buckets. Seeds 0 to 3: 20,956 values. The
# numbers 000 to 999, tokens of many vocabularies, have 1,200 values instead of 4,000. Lower-case tokens of one, two or
# four letters, and XXH64, have no equal values.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet xxhash==4.1.0
"$folder/venv/bin/python" - <<'PYTHON'
import itertools
from collections import Counter

import xxhash

tokens = [bytes(t) for t in itertools.product(range(97, 123), repeat=3)]
for name in ('xxh3_64_intdigest', 'xxh64_intdigest'):
    function = getattr(xxhash, name)
    for seeds in (range(1, 5), range(4)):
        signatures = {token: [function(token, seed) for seed in seeds] for token in tokens}
        values = {value for signature in signatures.values() for value in signature}
        sets = Counter(frozenset(signature) for signature in signatures.values())
        same = sum(count for count in sets.values() if count > 1)
        print(f'{name}, seeds {list(seeds)}: {len(values):,} different values of {4 * len(tokens):,};', end=' ')
        print(f'{same:,} tokens have the four values of another token')
        if name == 'xxh3_64_intdigest' and seeds == range(1, 5):
            the = frozenset(signatures[b'the'])
            print('  the four values of b"the":', [t for t in tokens if frozenset(signatures[t]) == the])
            assert len(values) == 18928 and same == len(tokens), 'changed'
assert len(values) == 4 * len(tokens)
numbers = [b'%03d' % i for i in range(1000)]
values = {xxhash.xxh3_64_intdigest(number, seed) for number in numbers for seed in range(1, 5)}
print(f'numbers 000 to 999, XXH3-64, seeds 1 to 4: {len(values):,} different values of 4,000')
assert len(values) == 1200, 'changed'
PYTHON
