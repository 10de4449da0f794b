#!/usr/bin/env bash
# torch 2.13.0 on a CPU: Categorical.sample and torch.multinomial with replacement never draw rare tokens at the end of
# a large vocabulary.
# Guess: probabilities that are small compared with the running sum are lost (75 %).
# Expected: frequencies do not depend on the order of ids. Seen: the 131,070 last tokens, with 0.2 % of the mass
# together, are drawn 0 times in a million instead of about 2,000 times; as the first tokens they are drawn. The draw is
# a search in a cumulative sum in float32, where 1.5e-8 added to 0.998 is lost; in vocabularies of BPE rare tokens come
# last. The error of torch.multinomial is known (pytorch issue 43115), but Categorical uses it too. argmax of p over
# exponential noise draws them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch

V = 131072
N = 1_000_000
p = torch.full((V,), 0.002 / (V - 2))
p[0] = 0.5
p[1] = 0.498


def count_rare(draws, frequent):
    return sum((draws != i).long() for i in frequent).eq(len(frequent)).sum().item()


torch.manual_seed(0)
last = count_rare(torch.distributions.Categorical(p).sample((N,)), (0, 1))
last_multinomial = count_rare(torch.multinomial(p, N, replacement=True), (0, 1))
first = count_rare(torch.distributions.Categorical(p.flip(0)).sample((N,)), (V - 1, V - 2))
double = count_rare(torch.distributions.Categorical(p.double()).sample((N,)), (0, 1))
noise = torch.stack([(p / torch.empty(V).exponential_()).argmax() for _ in range(2000)])
print(f'rare tokens last: {last:,} and {last_multinomial:,} of {N:,} draws; expected about 2,000')
print(f'rare tokens first: {first:,}; last, in float64: {double:,}')
print(f'argmax of p over exponential noise: {count_rare(noise, (0, 1))} of 2,000; expected about 4')
assert last == last_multinomial == 0 and first > 1500 and double > 1500, 'changed'
PYTHON
