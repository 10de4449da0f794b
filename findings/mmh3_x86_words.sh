#!/usr/bin/env bash
# mmh3 5.3.1, MurmurHash3 x86_128: three of the four 32-bit words of a short token are the same number. A model that
# needs four hash ids of a token may take the four 32-bit words of one 128-bit hash.
# Guess: the x86 and the x64 variant both give four independent words; the x86 one only for longer tokens (85 %).
# Expected: four different words. Seen: words 2 to 4 are equal for every token of at most 4 bytes, words 3 and 4 for 5
# to 8 bytes, because each word mixes 4 bytes of the input, and the final mixing treats equal words alike. So three of
# four coordinates collide together. The x64 variant, mmh3's default, has no such tokens.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mmh3==5.3.1
"$folder/venv/bin/python" - <<'PYTHON'
import mmh3

words = {token: [mmh3.hash128(token, x64arch=False) >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)] for token in (
    b'a', b' the', b'hello', b' because', b' language')}
for token, ids in words.items():
    print(f'{len(token)} bytes {token!r}: {len(set(ids))} different words', [i % 1000 for i in ids])
tokens = [bytes([97 + i // 676 % 26, 97 + i // 26 % 26, 97 + i % 26]) for i in range(17576)]
x86, x64 = (
    [[mmh3.hash128(t, x64arch=arch) >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)] for t in tokens]
    for arch in (False, True)
)
assert all(w[1] == w[2] == w[3] for w in x86), 'changed: the words of the x86 variant differ'
assert sum(len(set(w)) < 4 for w in x64) < 3
assert len(set(words[b'hello'])) == 3 and len(set(words[b' language'])) == 4
PYTHON
