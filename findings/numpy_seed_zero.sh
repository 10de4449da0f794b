#!/usr/bin/env bash
# numpy 2.3.5: default_rng((seed, 0)) is the stream of default_rng(seed).
# Guess: trailing zeros of a seed sequence do not count (92 %).
# Expected by users who seed by (seed, epoch) or (seed, rank): every pair is another stream. Seen: epoch 0 of rank 0 has
# the stream that the script itself draws from with default_rng(seed), and (seed, 0, 0) is the same again, because the
# entropy is padded with zeros to four 32-bit words. A seed from 2^32 on is two words, so (2^32 + 5, 7) is (5, 1, 7). So
# the initialization and the first shuffle may use the same random numbers. Adding a constant number of words, for
# example (seed, epoch, 1), avoids it, as do spawned SeedSequences.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np


def draw(seed):
    return np.random.default_rng(seed).random(4).round(4).tolist()


for seed in (7, (7, 0), (7, 0, 0), (7, 1), (0, 7), (2**32 + 5, 7), (5, 1, 7)):
    print(f'{seed!s:<16}', draw(seed))
spawned = [np.random.default_rng(child).random() for child in np.random.SeedSequence(7).spawn(2)]
print('spawned         ', [round(x, 4) for x in spawned])
assert draw(7) == draw((7, 0)) == draw((7, 0, 0)) != draw((7, 1)), 'changed'
assert draw((2**32 + 5, 7)) == draw((5, 1, 7)), 'changed'
PYTHON
