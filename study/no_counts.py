"""
A control: informed signatures without counts. Hash 0 is that of a token's form and hash 1 that of its shape; the other
hashes are the paper's.

    $ python -m study.edit study.no_counts train.py config/mhf_tiny.py --counts_from=data/sample
"""

import hashing


def informed_table(tokens, counts, num_hashes, num_buckets, pad_id=None):
    table = hashing.signature_table(tokens, num_hashes, num_buckets, pad_id=pad_id)
    used = [i for i, token in enumerate(tokens) if token is not None and i != pad_id]
    for i, key_of in enumerate(hashing.PROPERTIES):
        table[used, i] = hashing.hash_buckets([key_of(tokens[k]) for k in used], i, num_buckets)
    hashing.rehash_collisions(table, tokens, used, num_buckets)
    return table, []
