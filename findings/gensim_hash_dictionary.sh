#!/usr/bin/env bash
# gensim 4.4.0, HashDictionary with a power of two as id_range: 17,576 words have 76 ids.
# Guess: a few hundred ids, and anagrams share one (90 %).
# Expected of a dictionary that hashes: the number of ids that random buckets have. Seen: the default hash is
# zlib.adler32, whose low 16 bits are 1 + the sum of the bytes. With id_range 2^16 or a smaller power of two, words with
# the same sum share an id, so "stop", "spot", "pots" and "tops" are one word. With the default id_range, 32,000, the
# same words have 2,576 ids instead of 13,524. Pass another hash as myhash, such as a keyed one of hashlib.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gensim==4.4.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import itertools

from gensim.corpora import HashDictionary

words = [''.join(letters) for letters in itertools.product('abcdefghijklmnopqrstuvwxyz', repeat=3)]


def ids(words, id_range):
    dictionary = HashDictionary(id_range=id_range)
    return [dictionary.doc2bow([word], allow_update=False)[0][0] for word in words]


for id_range in (65536, 16384, 32000):
    distinct = len(set(ids(words, id_range)))
    expected = id_range * (1 - (1 - 1 / id_range) ** len(words))
    print(f'id_range {id_range:,}: {len(words):,} words have {distinct:,} ids; random buckets: {expected:,.0f}')
    assert id_range == 32000 or distinct < 100, 'changed'
print('stop, spot, pots, tops:', ids(['stop', 'spot', 'pots', 'tops'], 65536))
assert len(set(ids(['stop', 'spot', 'pots', 'tops'], 65536))) == 1, 'changed'
PYTHON
