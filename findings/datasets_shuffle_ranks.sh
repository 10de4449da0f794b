#!/usr/bin/env bash
# datasets 5.2.0: shuffle(buffer_size=...) without a seed, then split_dataset_by_node: two processes read a quarter of
# the data twice, and a quarter never.
# Guess: the parts of the processes overlap (70 %).
# Expected: split_dataset_by_node gives every example to one process, as its name says. Seen: without a seed each
# process shuffles the order of shards by its own random numbers and then takes its share of that order: of 120 examples
# in 4 shards, 30 to 60 are read twice and as many are missing, or all is right by chance. A seed, equal in all
# processes, repairs it; nothing asks for one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
"$folder/venv/bin/python" - <<'PYTHON'
import datasets
from datasets.distributed import split_dataset_by_node

datasets.logging.set_verbosity_error()


def read(rank, seed):
    stream = datasets.Dataset.from_dict({'i': list(range(120))}).to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=seed, buffer_size=20)
    return {row['i'] for row in split_dataset_by_node(stream, rank=rank, world_size=2)}


def missing(seed):
    return 120 - len(read(0, seed) | read(1, seed))


without_seed = [missing(None) for _ in range(12)]
with_seed = [missing(seed) for seed in range(12)]
print('examples of 120 that no process read, 12 runs without a seed:', without_seed)
print('with a seed:', with_seed)
assert sum(n > 0 for n in without_seed) >= 3 and not any(with_seed), 'changed'
PYTHON
