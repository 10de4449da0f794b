"""
Signatures: what turns the *string* of a token into hash IDs (section 3 of the paper).

    from hashing import signature_table
    from mhf.tokenizers import get_tokenizer
    tok = get_tokenizer('mistral')
    table = signature_table(tok.tokens, num_hashes=4, num_buckets=16384, pad_id=tok.pad)   # (V, H) uint16
    signatures = table[ids]                                                               # (n, H) uint16
"""

import hashlib

import mmh3
import numpy as np

from configurator import InputError

MAX_BUCKETS = 65536  # a bucket id must fit in uint16
TRIGRAM_ROWS = 16000  # rows of the LSH projection
LSH_BITS = 512  # signs per LSH function


# -----------------------------------------------------------------------------
# signatures


def signature_table(tokens, num_hashes, num_buckets, num_lsh=0, pad_id=None, unique=True):
    """
    The signature of every token: h_j(w) = mmh3.hash128(w, seed=j) % (B - 1) + 1.

    tokens:      V token strings in id order (str or bytes; None for an id without a token, whose row stays zero)
    num_hashes:  H, coordinates of a signature
    num_buckets: B, buckets per coordinate; bucket 0 is never hashed to
    num_lsh:     the first num_lsh coordinates come from locality-sensitive hashing of character trigrams
    pad_id:      the padding token, whose signature is all zero
    unique:      rehash the last coordinate until the signature is free; False is the Single-ID ablation: one hash
                 (seed 0) on all coordinates, and collisions stay. With num_lsh == num_hashes no coordinate can be
                 rehashed, so collisions stay too.
    Returns (V, H) uint16. Raises InputError for H < 1, B outside 2..65536, or a prefix with no free signature.
    """
    if num_hashes < 1:
        raise InputError(f'num_hashes={num_hashes}: a signature needs at least 1 hash')
    return extend_table(np.zeros((0, num_hashes), np.uint16), tokens, num_buckets, num_lsh, pad_id, unique)


def extend_table(table, tokens, num_buckets, num_lsh=0, pad_id=None, unique=True):
    """
    `table` (V, H), any integers, with `tokens` registered after it: (V + len(tokens), H) uint16. The old rows are
    unchanged, and extending in two steps gives the same table as extending in one. Arguments and errors are those of
    signature_table; pad_id counts from the start of the whole table.
    """
    V, H = table.shape
    B = num_buckets
    if not 2 <= B <= MAX_BUCKETS:
        raise InputError(f'num_buckets={B}: must be from 2 to {MAX_BUCKETS} (bucket 0 is padding, ids are uint16)')
    if not 0 <= num_lsh <= H:
        raise InputError(f'num_lsh={num_lsh}: must be from 0 to num_hashes={H}')
    if not unique and num_lsh:
        raise InputError(f'num_lsh={num_lsh}: Single-ID signatures (unique=False) use one MMH3 hash; set num_lsh=0')
    if V and int(table.max()) >= B:
        raise InputError(f'the table to extend has bucket {int(table.max())}, num_buckets={B}: not made with this B')
    table = np.asarray(table, np.uint16)

    real = [i for i, w in enumerate(tokens) if w is not None and V + i != pad_id]
    words = [tokens[i] for i in real]
    rows = np.zeros((len(tokens), H), np.uint16)
    if not unique:
        rows[real] = np.array([mmh3.hash128(w, 0) % (B - 1) + 1 for w in words], np.uint16).reshape(-1, 1)
        return np.concatenate([table, rows])
    if num_lsh:
        rows[real, :num_lsh] = _lsh(words, num_lsh, B)
    for j in range(num_lsh, H):
        rows[real, j] = [mmh3.hash128(w, j) % (B - 1) + 1 for w in words]
    table = np.concatenate([table, rows])
    if num_lsh < H:
        _rehash(table, V, tokens, B)
    return table


def _rehash(table, start, tokens, B):
    """Makes the rows from `start` on unique, in place and in id order, by rehashing the last coordinate."""
    H = table.shape[1]
    packed = table.tobytes()
    width = 2 * H  # bytes of a signature
    of_pad = bytes(width)
    taken = set()  # signatures, as bytes
    crowd = {}  # prefix: how many signatures begin with it
    for i in range(len(table)):
        key = packed[i * width : (i + 1) * width]
        if key == of_pad:
            continue
        prefix = key[:-2]
        if i >= start and key in taken:
            if crowd[prefix] == B - 1:
                full = f'token {tokens[i - start]!r} (id {i}): its hash prefix {tuple(map(int, table[i, :-1]))} is full'
                taken_up = f'all {B - 1} signatures in it are taken'
                raise InputError(f'{full}, {taken_up}; raise num_buckets={B} or num_hashes={H}')
            # coordinates 0 .. H-1 are hashed with the seeds 0 .. H-1, so the first new seed is H
            seed = H
            while key in taken:
                last = mmh3.hash128(tokens[i - start], seed) % (B - 1) + 1
                key = prefix + last.to_bytes(2, 'little')
                seed += 1
            table[i, -1] = last
        taken.add(key)
        crowd[prefix] = crowd.get(prefix, 0) + 1


def _lsh(words, num_lsh, B):
    """LSH coordinates of `words`: (len(words), num_lsh) int64 in 1..B-1; argmax of signed random projections."""
    import torch  # only the ablation needs it: the projections are defined by torch's generator

    project = torch.randn((TRIGRAM_ROWS, num_lsh, LSH_BITS), generator=torch.Generator().manual_seed(3407))
    rotate = torch.randn((LSH_BITS * num_lsh, num_lsh, B - 1), generator=torch.Generator().manual_seed(3408))
    rotate /= rotate.norm(dim=-1, keepdim=True)
    trigrams = [_trigrams(word) for word in words]
    number_of = {}  # each distinct trigram, numbered as it first appears
    for of_word in trigrams:
        for trigram in of_word:
            number_of.setdefault(trigram, len(number_of))
    flat = torch.tensor([number_of[trigram] for of_word in trigrams for trigram in of_word])
    offsets = torch.tensor([0] + [len(of_word) for of_word in trigrams]).cumsum(0)[:-1]
    bits = torch.empty(len(words), num_lsh, LSH_BITS)
    for j in range(num_lsh):
        row = torch.tensor([mmh3.hash128(trigram, j) % TRIGRAM_ROWS for trigram in number_of])
        counted = torch.nn.functional.embedding_bag(row[flat], project[:, j], offsets, mode='sum')
        bits[:, j] = torch.where(counted >= 0, 1.0, -1.0) / LSH_BITS**0.5
    coordinates = []
    for j in range(num_lsh):
        # (words, B - 1) for 4,096 words at a time
        buckets = [(some @ rotate[:, j]).argmax(1) for some in bits.flatten(1).split(4096)]
        coordinates.append(torch.cat(buckets).numpy() + 1)
    return np.stack(coordinates, axis=1)


def _trigrams(word):
    """'hash' -> ['has', 'ash']; a word of fewer than three characters (or bytes) is its only trigram."""
    if len(word) < 3:
        return [word]
    return [word[k : k + 3] for k in range(len(word) - 2)]


# -----------------------------------------------------------------------------
# what a table is for


def token_ids(tokens, table):
    """
    The way back. Signatures (n, H) are looked up in the table (V, H); ids (n,), as other bins hold them, stay as they
    are. Returns ids (n,). Raises InputError for a signature that the table does not have.
    """
    if tokens.ndim == 1:
        return tokens
    id_of = {row.tobytes(): i for i, row in enumerate(table.astype(np.uint16))}
    try:
        return np.array([id_of[row.tobytes()] for row in tokens])
    except KeyError:
        raise InputError('the bins hold a signature of no token; prepare them again') from None


def fingerprint(table):
    """SHA-256 of the table's bytes (uint16, little endian, C order), as hex."""
    return hashlib.sha256(np.ascontiguousarray(table, '<u2').tobytes()).hexdigest()
