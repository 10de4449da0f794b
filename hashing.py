"""
Signatures: the buckets of a token string, one for each hash (section 3 of the paper).

    from hashing import signature_table
    from mhf.tokenizers import get_tokenizer
    tok = get_tokenizer('mistral')
    table = signature_table(tok.tokens, num_hashes=4, num_buckets=16384, pad_id=tok.pad)   # (V, H) uint16
    signatures = table[ids]                                                               # (n, H) uint16

The paper's hashes are not independent: MurmurHash3 x64_128 applies seed and length by XOR before it adds its halves,
so the buckets of seeds 2j and 2j + 1 agree modulo gcd(2^65 + 1, B - 1) more often than by chance. For the paper's
signatures, choose B as a multiple of 8, for GPUs, such that B - 1 is not divisible by 3, 11, 131 or 2,731: 2,048,
7,968, 8,192, 20,480 or 32,768. The paper's sizes, such as 16,384, do not follow this rule.
"""

import hashlib
import itertools
from collections import Counter

import mmh3
import numpy as np

from mhf.errors import InputError

MAX_BUCKETS = 65536  # a bucket must fit in uint16
TRIGRAM_ROWS = 16000  # rows of the LSH projection
LSH_BITS = 512  # signs per LSH function
RANGE_EXPONENT = 0.75  # buckets of a frequency range: proportional to the sum of (count + 0.5) to this power


def signature_table(tokens, num_hashes, num_buckets, num_lsh=0, pad_id=None, unique=True):
    """
    Computes the signature of every token: h_j(w) = hash128(w, seed=j) % (B - 1) + 1.

    Args:
        tokens: V strings in id order (str or bytes; None for an id without a token, whose row stays zero)
        num_hashes: H, hashes per signature
        num_buckets: B, buckets per hash; no token is hashed to bucket 0
        num_lsh: the first num_lsh hashes are locality-sensitive hashes of character trigrams
        pad_id: the padding token, whose signature is all zero
        unique: repeat the last hash, with other seeds, until the signature is free (not if num_lsh == num_hashes).
            False is the Single-ID ablation: all hashes but those of LSH are equal (seed 0), and none is repeated.

    Returns (V, H) uint16. Appending tokens to the list does not change the earlier rows. Raises InputError for H, B or
    num_lsh out of range, and if all signatures with a token's first H - 1 buckets are taken.
    """
    V = len(tokens)
    H = num_hashes
    B = num_buckets
    check_sizes(H, B, num_lsh)
    registered = [i for i, w in enumerate(tokens) if w is not None and i != pad_id]
    strings = [tokens[i] for i in registered]
    table = np.zeros((V, H), np.uint16)
    if num_lsh:
        table[registered, :num_lsh] = lsh_buckets(strings, num_lsh, B)
    for j in range(num_lsh, H):
        seed = j if unique else 0
        table[registered, j] = hash_buckets(strings, seed, B)
    if unique and num_lsh < H:
        rehash_collisions(table, tokens, registered, B)
    return table


def check_sizes(H, B, num_lsh=0):
    """Raises InputError if a size is out of range: a bucket is a uint16, and bucket 0 is padding."""
    if not (2 <= B <= MAX_BUCKETS and 0 <= num_lsh <= H and H > 0):
        limits = f'must be 2 to {MAX_BUCKETS}, at least 1, and 0 to num_hashes'
        raise InputError(f'num_buckets={B}, num_hashes={H}, num_lsh={num_lsh}: {limits}')


def hash128(token, seed):
    """The MurmurHash3 x64_128 of a token (str or bytes). A str is encoded here, so that Python reports errors."""
    return mmh3.hash128(token.encode() if isinstance(token, str) else token, seed)


def hash_word(token, i):
    """
    Returns a 32-bit hash of a token (str or bytes), a word of a 128-bit hash. The four words of a hash are independent;
    hashes with consecutive seeds, as in signature_table, are not.
    """
    return hash128(token, i // 4) >> 32 * (i % 4) & 0xFFFFFFFF


def hash_buckets(strings, seed, B):
    """Returns the bucket of each string, from 1 to B - 1, by the MMH3 hash with this seed."""
    return [hash128(w, seed) % (B - 1) + 1 for w in strings]


def rehash_collisions(table, tokens, registered, B):
    """Makes the rows of the `registered` ids unique, in place and in id order, by changing the last hash's seed."""
    H = table.shape[1]
    taken = set()  # signatures, as bytes
    for i in registered:
        seed = H  # the seeds 0 .. H-1 are those of the H hashes
        while table[i].tobytes() in taken:
            if seed == H + 30 * B:  # a free one of the B - 1 would have been found, except with probability e^-30
                full = f'token {tokens[i]!r} (id {i}): its hash prefix {table[i, :-1].tolist()} is full'
                raise InputError(f'{full}; raise num_buckets={B} or num_hashes={H}')
            table[i, -1] = hash128(tokens[i], seed) % (B - 1) + 1
            seed += 1
        taken.add(table[i].tobytes())


# -----------------------------------------------------------------------------
# informed signatures: an alternative to the paper's table


def form(token):
    """The form of a token (str or bytes): its text without surrounding white space, in lower case."""
    text = token_text(token)
    return token if text is None else text.strip().casefold() or text


def shape(token):
    """
    The shape of a token (str or bytes): whether white space precedes it; lower, Title or UPPER case; its last three
    letters.
    """
    text = token_text(token)
    if text is None:
        return token
    stripped = text.strip()
    case = 'U' if stripped.isupper() and len(stripped) > 1 else 'T' if stripped[:1].isupper() else 'l'
    return f'{text[:1].isspace():d}{case}{stripped.casefold()[-3:]}'


def token_text(token):
    """The text of a token (str or bytes), None if its bytes are not UTF-8. Tokenizers write a space as ▁ or Ġ."""
    try:
        return token.decode() if isinstance(token, bytes) else token.replace('▁', ' ').replace('Ġ', ' ')
    except UnicodeDecodeError:
        return None


PROPERTIES = (form, shape)  # what the first two hashes of an informed signature depend on


def informed_table(tokens, counts, num_hashes, num_buckets, pad_id=None):
    """
    Computes signatures that know how a token is spelled and how often it occurs. Hash 0 depends on a token's form only,
    hash 1 on its shape, the others on its string (with fewer than 3 hashes, all on its string). Tokens of one form
    share a bucket of hash 0, tokens of one shape one of hash 1. Keys (forms, shapes, strings) are grouped into classes
    int(2 ln(count + 1)), where count is the sum over the key's tokens. For each hash, a class owns a range of buckets,
    which are assigned to its keys round-robin, in the order of a hash. So only keys of similar counts share a bucket.
    Forms and shapes depend on Python's version of Unicode, so a model stores its table.

    Args: tokens, num_hashes, num_buckets, pad_id as in signature_table; counts (V,), how often each token id occurs in
        a sample of the training data.

    Returns the table (V, H) uint16, and for each hash its ranges, a list of [lower, offset, size], rarest class first:
    the smallest relative frequency of the class (0 for the rarest), its first bucket and its number of buckets. Raises
    InputError for H or B out of range, and if there are too few buckets.
    """
    check_sizes(num_hashes, num_buckets)
    properties = PROPERTIES if num_hashes > len(PROPERTIES) else ()
    used = [i for i, w in enumerate(tokens) if w is not None and i != pad_id]
    table = np.zeros((len(tokens), num_hashes), np.uint16)
    ranges = []
    for i in range(num_hashes):
        keys = [properties[i](tokens[k]) if i < len(properties) else tokens[k] for k in used]
        table[used, i], ranges_of_hash = hash_keys(keys, counts[used], num_buckets, num_hashes, i)
        ranges.append(ranges_of_hash)
    frequencies = counts / counts[used].sum()
    taken = set()
    for k in used:
        if table[k].tobytes() in taken:
            shared = table[k, : len(properties)]
            table[k] = free_signature(tokens[k], frequencies[k], ranges[-1], shared, num_hashes, taken)
        taken.add(table[k].tobytes())
    return table, ranges


def hash_keys(keys, counts, num_buckets, num_hashes, i):
    """The keys of n tokens (str or bytes) and their counts (n,) -> their buckets (n,) and the ranges of hash i."""
    ids_of_keys = {}
    key_ids = [ids_of_keys.setdefault(key, len(ids_of_keys)) for key in keys]
    totals = np.bincount(key_ids, counts)
    hashes = np.array([hash_word(key, i) for key in ids_of_keys])
    classes = (2 * np.log1p(totals)).astype(int)
    members = [np.flatnonzero(classes == k) for k in np.unique(classes)]
    sizes = range_sizes([totals[ids] for ids in members], num_hashes, num_buckets)
    buckets = np.zeros(len(totals), np.int64)
    ranges = []
    offset = 1  # bucket 0 is padding
    for ids, size in zip(members, sizes, strict=True):
        in_order = ids[hashes[ids].argsort(kind='stable')]
        buckets[in_order] = offset + np.arange(len(ids)) % size
        lower = totals[ids].min() / totals.sum() if ranges else 0.0  # a key that is added later may be rarer than all
        ranges.append([float(lower), offset, int(size)])
        offset += int(size)
    return buckets[key_ids], ranges


def extend_informed_table(table, tokens, frequencies, ranges):
    """
    Appends the signatures of new tokens to a table of informed_table, whose rows do not change. A new token shares the
    buckets of the tokens of its form and of its shape; a new form or shape is hashed into the range of its frequency.

    Args: table (V, H); tokens, the V + n strings in id order (str or bytes); frequencies (n,), the relative frequencies
        of the new tokens; ranges, from informed_table, or one list for all hashes, which then depend on strings only.

    Returns (V + n, H) uint16. Raises InputError if a token's range and all rarer ones are full.
    """
    V, H = table.shape
    new_tokens = tokens[V:]
    is_per_hash = isinstance(ranges[0][0], list)
    properties = PROPERTIES if H > len(PROPERTIES) and is_per_hash else ()
    shared = np.zeros((len(new_tokens), len(properties)), np.uint16)
    for i, key_of in enumerate(properties):
        buckets = {key_of(tokens[k]): table[k, i] for k in table.any(axis=1).nonzero()[0]}
        keys = [key_of(token) for token in new_tokens]
        totals = Counter()
        for key, frequency in zip(keys, frequencies, strict=True):
            totals[key] += frequency
        for key in totals.keys() - buckets.keys():
            _, offset, size = [r for r in ranges[i] if totals[key] >= r[0]][-1]
            buckets[key] = offset + hash_word(key, i) % size
        shared[:, i] = [buckets[key] for key in keys]
    rows = list(table.astype(np.uint16))
    taken = {row.tobytes() for row in rows}
    for token, frequency, row in zip(new_tokens, frequencies, shared, strict=True):
        rows.append(free_signature(token, frequency, ranges[-1] if is_per_hash else ranges, row, H, taken))
        taken.add(rows[-1].tobytes())
    return np.stack(rows)


def range_sizes(counts, num_hashes, num_buckets):
    """
    Token counts of each class, a list of (n,) -> buckets of each class, proportional to the sum of
    (count + 0.5)^RANGE_EXPONENT, at most n, and large enough for n signatures. Raises InputError if there are too few.
    """
    n = np.array([len(c) for c in counts])
    weights = np.array([((c + 0.5) ** RANGE_EXPONENT).sum() for c in counts])
    smallest = np.minimum(n, np.maximum(8, np.ceil(2 * n ** (1 / num_hashes)))).astype(int)
    if smallest.sum() > num_buckets - 1:
        fix = f'must be above {smallest.sum()} for {len(n)} frequency ranges, or raise num_hashes={num_hashes}'
        raise InputError(f'num_buckets={num_buckets}: {fix}')
    low = 0.0
    high = 2 * (n / weights).max()  # every class has n buckets
    for _ in range(100):  # bisection of the buckets per weight
        factor = (low + high) / 2
        sizes = np.clip(factor * weights, smallest, n).astype(int)
        if sizes.sum() < num_buckets:
            low = factor
        else:
            high = factor
    return np.clip(low * weights, smallest, n).astype(int)


def free_signature(token, frequency, ranges, shared, num_hashes, taken):
    """
    Hashes a token into the range of its relative frequency, or of the next rarer class that has a free signature.

    Args: token (str or bytes); ranges of the hashes of its string; shared, its buckets of the hashes before, which do
        not change; taken, the set of the signatures in use, as bytes.

    Returns (H,) uint16. Raises InputError if no signature is free.
    """
    row = np.zeros(num_hashes, np.uint16)
    row[: len(shared)] = shared
    count = num_hashes - len(shared)
    first = hash128(token, 0)
    for _, offset, size in reversed([r for r in ranges if frequency >= r[0]]):
        # tries the signatures of the range in turn, from the one that the hash selects. At most len(taken) of them are
        # taken, so the last try finds a free one if there is one
        for number in range(first, first + min(size**count, len(taken) + 1)):
            row[len(shared) :] = [offset + number // size**k % size for k in range(count)]  # the digits in base `size`
            if row.tobytes() not in taken:
                return row
    fix = f'add fewer tokens, or use a model with more than num_hashes={num_hashes}'
    raise InputError(f'token {token!r}: all signatures of its frequency range and of rarer ones are taken; {fix}')


def fingerprint(table):
    """SHA-256 of the bytes of a table (uint16, little endian, C order), as hex."""
    return hashlib.sha256(np.ascontiguousarray(table, '<u2').tobytes()).hexdigest()


# -----------------------------------------------------------------------------
# LSH, an ablation


def lsh_buckets(strings, num_lsh, B):
    """
    Returns the buckets of the LSH hashes, (len(strings), num_lsh) int64 in 1..B-1. A hash is a random projection of the
    trigrams, its signs, a second random projection of these, and the argmax.
    """
    import torch  # only this ablation needs it: torch's generator defines the projections

    project = torch.randn((TRIGRAM_ROWS, num_lsh, LSH_BITS), generator=torch.Generator().manual_seed(3407))
    rotate = torch.randn((LSH_BITS * num_lsh, num_lsh, B - 1), generator=torch.Generator().manual_seed(3408))
    rotate /= rotate.norm(dim=-1, keepdim=True)
    # 'hash' -> ['has', 'ash']; a string of fewer than three characters (or bytes) is its only trigram
    trigrams = [[s[k : k + 3] for k in range(len(s) - 2)] or [s] for s in strings]
    offsets = torch.tensor([0, *map(len, trigrams)]).cumsum(0)[:-1]
    bits = torch.empty(len(strings), num_lsh, LSH_BITS)
    for j in range(num_lsh):
        rows = torch.tensor([hash128(trigram, j) % TRIGRAM_ROWS for trigram in itertools.chain(*trigrams)])
        projected = torch.nn.functional.embedding_bag(rows, project[:, j], offsets, mode='sum')
        bits[:, j] = torch.where(projected >= 0, 1.0, -1.0) / LSH_BITS**0.5
    parts = bits.flatten(1).split(4096)  # the products are (4096, B - 1)
    buckets = [torch.cat([(part @ rotate[:, j]).argmax(1) for part in parts]) for j in range(num_lsh)]
    return torch.stack(buckets, dim=1).numpy() + 1
