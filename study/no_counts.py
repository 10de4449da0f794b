"""
A control: informed signatures without counts. Hash 0 is that of a token's form and hash 1 that of its shape; the other
hashes are the paper's.

    $ python -m study.no_counts train.py config/mhf_tiny.py --counts_from=data/sample

Runs a script with another hashing.informed_table, which ignores the counts.
"""

import runpy
import sys

import hashing


def table_without_counts(tokens, counts, num_hashes, num_buckets, pad_id=None):
    table = hashing.signature_table(tokens, num_hashes, num_buckets, pad_id=pad_id)
    used = [i for i, token in enumerate(tokens) if token is not None and i != pad_id]
    for i, key_of in enumerate(hashing.PROPERTIES):
        table[used, i] = hashing.hash_buckets([key_of(tokens[k]) for k in used], i, num_buckets)
    hashing.rehash_collisions(table, tokens, used, num_buckets)
    return table, []


if __name__ == '__main__':
    del sys.argv[0]  # the script with its own arguments remains
    hashing.informed_table = table_without_counts
    runpy.run_path(sys.argv[0], run_name='__main__')
