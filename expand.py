"""
Adds the tokens of new languages to a tokenizer; a MultiHashFormer reads and writes them without one parameter more.

    $ python expand.py config/expand_tiny.py     # learns the tokens: a .model file, and what they save
    $ python prepare.py config/expand_tiny.py    # text of all languages, signed with the old and the new signatures
    $ python train.py config/expand_tiny.py      # goes on from a trained model: --init_from=expand:out/...
    $ python eval.py config/expand_tiny.py       # before and after

    $ python expand.py --texts=ar.jsonl,zh.jsonl@8000,en.jsonl@0 --tokenizer=out/ar_zh.model    # 5,118, 8,000 and no tokens
    $ python expand.py --base=out/ar_zh.model --texts=hi.jsonl --tokenizer=out/ar_zh_hi.model   # one language more

Of each text SentencePiece learns merges of its own. Those that the base does not have are ranked by the tokens they save in the
text, and the best go behind the base's pieces: with the lowest priorities, so that a text without them is split as before.
Held out are the documents that prepare.py holds out of the same file as a source of a mixture, by the same val_fraction and without
min_score, deduplicate and parts; at most 400 kB of each. They are written beside the .model, for eval.py.
"""

import io
import os
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import InputError, configure
from hashing import SentencePieceTokenizer, extend_table, get_tokenizer, signature_table
from prepare import Source, at_start, batches

base = 'mistral'  # the tokenizer to expand: mistral, or a .model file
texts = ''  # one language each: what prepare.py reads, separated by commas, with @ and a number of tokens
num_new_tokens = 5118  # of a language without @; three make the paper's 15,354
text_bytes = 30000000  # of a language to learn from, at most
tokenizer = 'expanded.model'  # the file to write
num_hashes = 4  # of the signatures; 0 is for the Standard model
num_buckets = 16384
num_lsh = 0
single_id = False
val_fraction = 0.005

config = configure(globals())

# -----------------------------------------------------------------------------

HELD_OUT_BYTES = 400_000  # of a language


def languages():
    """texts -> [(name, what to read, number of new tokens)]."""
    found = []
    for item in filter(None, map(str.strip, texts.split(','))):
        what, _, number = item.rpartition('@') if '@' in item else (item, '', num_new_tokens)
        if not str(number).isdecimal() or int(number) > 10**6:
            raise InputError(f"texts '{item}': after @ comes a number of tokens, like @5000, at most 1,000,000")
        if what in (other for _, other, _ in found):
            raise InputError(f"texts names '{what}' twice")
        *_, folder, name = ['', *(re.sub(r'[^\w-]', '', part.split(':')[-1].split('.')[0]) for part in what.split('/'))]
        taken = {other for other, _, _ in found}  # ar/*.jsonl is called ar
        possible = (name, folder, f'{folder}_{name}', f'text{len(found)}')
        found.append((next(n for n in possible if n and n not in taken), what, int(number)))
    if not found:
        raise InputError('texts is empty; name a text for each language: --texts=ar.jsonl,zh.jsonl')
    return found


def read(what):
    """The documents to learn from, and those held out, two lists of str."""
    learn, held, size = [], [], 0
    for batch, _ in batches(Source(what), at_start(0), val_fraction, HELD_OUT_BYTES):
        for text, out in batch:
            (held if out else learn).append(text)
            size += 0 if out else len(text.encode())
        if size >= text_bytes:
            break
    if not any(learn):
        raise InputError(f'{what}: no text in it')
    if not any(held):
        raise InputError(
            f'{what}: none of the {len(learn):,} documents that were read is held out; raise val_fraction={val_fraction} or text_bytes'
        )
    return [t for t in learn if t], [t for t in held if t]


def last_merge(piece, rank):
    """The two pieces that byte-pair encoding with these ranks merges last to make `piece`."""
    parts = list(piece)
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda k: rank.get(parts[k] + parts[k + 1], len(rank)))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def candidates(learn, old, spec, number):
    """
    Pieces that byte-pair encoding learns from the documents and the base does not have, as (tokens saved, rank, piece), the best
    first: a merge saves one token wherever it happens, a character those of its bytes beyond the first.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    options = 'max_sentencepiece_length split_by_unicode_script split_by_number split_by_whitespace split_digits'
    enough = len(old) + 2 * number + len({c for text in learn for c in text})
    out, lines = io.BytesIO(), [line for text in learn for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type='bpe', vocab_size=enough,
        hard_vocab_limit=False, character_coverage=1.0, normalization_rule_name='identity', remove_extra_whitespaces=False,
        max_sentence_length=1 << 24, minloglevel=2, **{key: getattr(spec, key) for key in options.split()},
    )  # fmt: skip
    learned = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    rank = {p.piece: k for k, p in enumerate(learned.pieces) if p.type == p.NORMAL}
    encode = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).encode
    made = Counter(piece for pieces in encode(lines, out_type=str) for piece in pieces)
    for piece in sorted(rank, key=rank.get, reverse=True):  # what a piece is made of comes before it
        if len(piece) > 1:
            for part in last_merge(piece, rank):
                made[part] += made[piece]
    letters, found = Counter(c.isascii() for text in learn for c in text if c.isalpha()), []
    foreign = letters[False] > letters[True]  # then Latin letters, and what is all ASCII, are not this language's
    for piece, k in rank.items():
        saved = made[piece] * (len(piece.encode()) - 1 if len(piece) == 1 else 1)
        ascii_only = piece.replace('▁', '').isascii()
        if foreign and (ascii_only or any(c.isascii() and c.isalpha() for c in piece)):
            continue
        if piece not in old and saved > 1:
            found.append((saved, k, piece))
    return sorted(found, key=lambda f: (-f[0], f[1]))


def with_pieces(model, pieces):
    """A SentencePiece model (ModelProto) with `pieces` behind its own, of lower priority than its merges, as bytes."""
    larger = type(model).FromString(model.SerializeToString())
    # Mistral's runs of spaces have -1e9
    lowest = min(p.score for p in model.pieces if p.type == p.NORMAL and p.score > -1e8)
    for k, piece in enumerate(pieces, 1):
        larger.pieces.add(piece=piece, score=lowest - k)
    larger.trainer_spec.vocab_size = len(larger.pieces)
    return larger.SerializeToString()


def never_made(tok, first):
    """
    The pieces from id `first` on that no text is split into: not even their own, on a line by itself, because pieces of higher
    priority cross its merges. What surrounds a piece can only be in the way of more of its merges.
    """
    pieces = tok.tokens[first:]
    return {p for k, (p, ids) in enumerate(zip(pieces, tok.split(pieces)), first) if ids != [k]}


def expanded(tok, learn, numbers):
    """A larger SentencePieceTokenizer: {language: documents} and {language: number of new tokens} -> (it, {language: its pieces})."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tok.sp.serialized_model_proto())
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise InputError(f"base='{base}' is no byte-pair encoding, only those can be expanded")
    old = {p.piece for p in model.pieces}
    wanted = [(n, number) for n, number in numbers.items() if number]
    wanted = tqdm(wanted, desc='learn', unit='language', delay=1, leave=False)
    ranked = {n: candidates(learn[n], old, model.trainer_spec, number) for n, number in wanted}
    useless = set()
    while True:
        chosen, taken = {}, old | useless
        for name, found in ranked.items():
            best = [c for c in found if c[2] not in taken][: numbers[name]]
            chosen[name] = [piece for _, _, piece in sorted(best, key=lambda c: c[1])]
            taken |= set(chosen[name])
        larger = SentencePieceTokenizer(
            '', model_proto=with_pieces(model, [p for pieces in chosen.values() for p in pieces])
        )
        lost = never_made(larger, len(tok.tokens))
        if not lost:
            return larger, chosen
        useless |= lost


def fertility(tok, held):
    """(tokens per character, bytes per token) of documents."""
    tokens = sum(map(len, tok.encode(held)))
    return tokens / sum(map(len, held)), sum(len(t.encode()) for t in held) / tokens


def draw(rows, path):
    """Tokens per character of each language, before and after."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(max(5, 1.6 * len(rows)), 4))
    x = np.arange(len(rows))
    for offset, k, label in ((-0.2, 2, Path(base).stem), (0.2, 3, Path(tokenizer).stem)):
        bars = ax.bar(x + offset, [row[k] for row in rows], 0.4, label=label)
        ax.bar_label(bars, fmt='%.2f', fontsize=8)
    ax.set_xticks(x, [row[0] for row in rows])
    ax.set(ylabel='tokens per character, held-out text', title='what new tokens save')
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')


def main():
    target, wanted = Path(tokenizer), languages()
    if target.suffix != '.model':
        raise InputError(f"tokenizer='{tokenizer}': the file to write must end with .model")
    written = {name: target.with_name(f'{target.stem}_{name}.txt') for name, _, _ in wanted}
    for path in (target, target.with_suffix('.png'), *written.values()):
        if path.exists():
            raise InputError(f'{path} is there already; delete it, or choose another --tokenizer')
    if not 0 < val_fraction < 1:
        raise InputError(f'val_fraction={val_fraction}: must be between 0 and 1')
    tok = get_tokenizer(base)
    if not isinstance(tok, SentencePieceTokenizer):
        raise InputError(f"base='{base}' is no SentencePiece tokenizer, only those can be expanded; mistral is one")
    documents = {name: read(what) for name, what, _ in wanted}
    numbers = {name: number for name, _, number in wanted}
    larger, chosen = expanded(tok, {n: learn for n, (learn, _) in documents.items()}, numbers)

    rows = []
    print(f'{"":<14}{"new tokens":>11}{"tokens per character":>24}{"bytes per token":>24}{"fewer tokens":>14}')
    for name, (_, held) in documents.items():
        bad = [
            t for t, a, b in zip(held, tok.encode(held), larger.encode(held)) if tok.decode(a) == t != larger.decode(b)
        ]
        if bad:
            raise InputError(
                f'{name}: the larger tokenizer does not give back {len(bad)} documents, first {bad[0][:60]!r}'
            )
        (before, bytes_before), (after, bytes_after) = fertility(tok, held), fertility(larger, held)
        rows.append((name, len(chosen.get(name, ())), before, after))
        print(
            f'{name:<14}{rows[-1][1]:>11,}{before:>11.3f} -> {after:<9.3f}{bytes_before:>11.2f} -> {bytes_after:<9.2f}'
            f'{1 - after / before:>14.1%}'
        )
        if rows[-1][1] < numbers[name]:
            print(f'{name}: the text gives {rows[-1][1]:,} of the {numbers[name]:,} tokens asked for')
    V = len(tok.tokens)
    if num_hashes:
        settings = num_buckets, num_lsh, tok.pad, not single_id
        table = signature_table(tok.tokens, num_hashes, *settings)
        table = extend_table(table, larger.tokens[V:], *settings)
        what = f'{len(table) - V:,} signatures registered (H={num_hashes}, B={num_buckets:,}), no new parameter'
    else:
        what = 'as many new rows of the Standard model'
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix('.tmp')
        for name, (_, held) in documents.items():
            written[name].write_text('\n\n'.join(held) + '\n', encoding='utf-8')
        temporary.write_bytes(larger.sp.serialized_model_proto())
        os.replace(temporary, target)
        draw(rows, target.with_suffix('.png'))
    except OSError as e:
        raise InputError(f'{target} cannot be written ({e})') from None
    print(
        f'{V:,} -> {len(larger.tokens):,} tokens: {what}\n{target}, {target.with_suffix(".png")}, held-out text beside them'
    )


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; nothing was written', file=sys.stderr)
        sys.exit(130)
