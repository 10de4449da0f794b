"""
Adds the tokens of new languages to a tokenizer, and to a trained model: a MultiHashFormer gets no parameter for them.

    $ python expand.py config/expand_tiny.py     # learns the tokens; writes the tokenizer and the grown model
    $ python prepare.py config/expand_tiny.py    # text of all languages, split by the larger tokenizer
    $ python train.py config/expand_tiny.py      # goes on from the grown model, which init_from names
    $ python eval.py config/expand_tiny.py       # bits per byte of held-out text
    $ python eval.py config/expand_tiny.py --out_dir=out/mhf_tiny --tokenizer=      # the same before the expansion

    $ python expand.py --texts=ar.jsonl,zh.jsonl@8000,en.jsonl@0 --tokenizer=a.model    # only a tokenizer
    $ python expand.py --texts=hi.jsonl --base=a.model --tokenizer=b.model              # one language more
    $ python expand.py --before=out/standard --init_from=out/grown --tokenizer=a.model  # by a tokenizer that is there
    $ python expand.py --before=out/mhf_tiny --init_from=out/whole --tokenizer=tekken --whole

SentencePiece learns merges of its own from each text. Those that the base does not have are ranked by the tokens they
save in the text, and the best go after the base's pieces: with the lowest priorities, so that a text without them is
split as before. A grown MultiHashFormer has a longer table and the same parameters; a Standard model has a row more for
each new token, the mean of the rows of its old pieces.

Every 20th document is held out, up to 400 kB of each text, and written beside the tokenizer as .jsonl. For eval.py to
measure text that was not trained on, prepare.py must hold out these too: it does where it reads the same texts, without
--part, with val_fraction=0.05, as config/expand_*.py have it.
"""

import io
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from configurator import InputError, configure
from hashing import signature_table
from mhf.released import limit_to_tokenizer, load_model, save_pretrained
from mhf.sources import START, Source, divided
from mhf.tokenizers import SentencePieceTokenizer, get_tokenizer, tokenizer_fingerprint

# the tokenizer
base = 'mistral'  # to expand: mistral, or a .model file
texts = ''  # one language each: what prepare.py reads, separated by commas, with @ and a number of tokens
num_new_tokens = 5118  # of a language without @; three make the paper's 15,354
text_bytes = 30000000  # of a language to learn from, at most
tokenizer = 'expanded.model'  # the file to write, or to use where it is there
# the model
before = ''  # to grow: an out_dir, a folder in the released layout, or a hub id[@revision]; '' is none
init_from = ''  # the folder to write the grown model into, in the released layout; train.py goes on from it
whole = False  # the model takes any other vocabulary, that of `tokenizer`, in place of its own; nothing is learned
config = configure(globals())

# of a language's documents, and of their bytes: less than prepare.py's share of val_bytes for each of 4 sources
HELD_OUT, HELD_OUT_BYTES = 0.05, 400_000


def languages():
    """texts -> {language: (what prepare.py reads, number of new tokens)}."""
    found = {}
    for item in filter(None, map(str.strip, texts.split(','))):
        source, _, number = item.rpartition('@') if '@' in item else (item, '', num_new_tokens)
        if not str(number).isdecimal() or int(number) > 10**6:
            raise InputError(f"texts '{item}': after @ comes a number of tokens, like @5000, at most 1,000,000")
        if any(source == other for other, _ in found.values()):
            raise InputError(f"texts names '{source}' twice")
        parts = [re.sub(r'[^\w-]', '', part.split(':')[-1].split('.')[0]) for part in source.split('/')]
        folder, name = ['', *parts][-2:]
        # ar/*.jsonl is called ar
        possible = name, folder, f'{folder}_{name}', f'text{len(found)}'
        found[next(n for n in possible if n and n not in found)] = source, int(number)
    return found


def read(source):
    """The documents to learn from, and those held out, two lists of str."""
    documents, held, size = [], [], 0
    for parts, _ in divided(Source(source), START, HELD_OUT, HELD_OUT_BYTES):
        documents += [text for text, is_held_out in parts if not is_held_out]
        held += [text for text, is_held_out in parts if is_held_out]
        size += sum(len(text.encode()) for text, is_held_out in parts if not is_held_out)
        if size >= text_bytes:
            break
    if not documents or not held:
        read = f'{len(documents):,} documents to learn from, {len(held)} held out'
        raise InputError(f'{source}: too little text: {read}; take more of it, or raise text_bytes={text_bytes:,}')
    return documents, held


def last_merge(piece, rank):
    """The two pieces that byte-pair encoding with these ranks merges last to make `piece`."""
    parts = list(piece)
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda k: rank.get(parts[k] + parts[k + 1], len(rank)))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def candidates(documents, old, spec, number):
    """
    {piece: its rank in the order of learning} of what byte-pair encoding learns from the documents and the base does
    not have, the best first: a merge saves one token wherever it happens, a character its bytes beyond the first.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    options = 'max_sentencepiece_length split_by_unicode_script split_by_number split_by_whitespace split_digits'
    enough = len(old) + 2 * number + len({c for text in documents for c in text})
    out, lines = io.BytesIO(), [line for text in documents for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type='bpe', vocab_size=enough, hard_vocab_limit=False,
        character_coverage=1.0, normalization_rule_name='identity', remove_extra_whitespaces=False,
        max_sentence_length=1 << 24, minloglevel=2, **{key: getattr(spec, key) for key in options.split()},
    )  # fmt: skip
    learned = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    rank = {p.piece: k for k, p in enumerate(learned.pieces) if p.type == p.NORMAL}
    encode = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).encode
    made = Counter(piece for pieces in encode(lines, out_type=str) for piece in pieces)
    # what a piece is made of comes before it
    for piece in sorted(rank, key=rank.get, reverse=True):
        if len(piece) > 1:
            for part in last_merge(piece, rank):
                made[part] += made[piece]
    letters = Counter(c.isascii() for text in documents for c in text if c.isalpha())
    # then Latin letters, and what is all ASCII, are not this language's
    foreign, saved = letters[False] > letters[True], {}
    for piece in rank:
        latin = piece.replace('▁', '').isascii() or any(c.isascii() and c.isalpha() for c in piece)
        if piece not in old and not (foreign and latin):
            saved[piece] = made[piece] * (len(piece.encode()) - 1 if len(piece) == 1 else 1)
    best = sorted((p for p in saved if saved[p] > 1), key=lambda p: (-saved[p], rank[p]))
    return {piece: rank[piece] for piece in best}


def with_pieces(model, pieces):
    """A SentencePiece model (ModelProto) with `pieces` after its own, of lower priority than its merges, as bytes."""
    larger = type(model).FromString(model.SerializeToString())
    # Mistral's runs of spaces have -1e9
    lowest = min(p.score for p in model.pieces if p.type == p.NORMAL and p.score > -1e8)
    for k, piece in enumerate(pieces, 1):
        larger.pieces.add(piece=piece, score=lowest - k)
    larger.trainer_spec.vocab_size = len(larger.pieces)
    return larger.SerializeToString()


def expanded(tok, documents, numbers):
    """{language: documents}, {language: number of new tokens} -> (the larger tokenizer, {language: its new pieces})."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tok.sp.serialized_model_proto())
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise InputError(f"base='{base}' is no byte-pair encoding, only those can be expanded")
    old = {p.piece for p in model.pieces}
    wanted = tqdm([name for name in numbers if numbers[name]], desc='learn', unit='language', delay=1, leave=False)
    ranked = {name: candidates(documents[name], old, model.trainer_spec, numbers[name]) for name in wanted}
    useless, V = set(), len(tok.tokens)
    while True:
        chosen, taken = {}, old | useless
        for name, found in ranked.items():
            best = [piece for piece in found if piece not in taken][: numbers[name]]
            chosen[name] = sorted(best, key=found.get)
            taken |= set(chosen[name])
        pieces = [piece for pieces in chosen.values() for piece in pieces]
        larger = SentencePieceTokenizer('', model_proto=with_pieces(model, pieces))
        # no text gives a piece that does not come of its own text on a line: pieces of higher priority cross its merges
        splits = larger.split(larger.tokens[V:])
        lost = {larger.tokens[k] for k, ids in enumerate(splits, V) if ids != [k]}
        if not lost:
            return larger, chosen
        useless |= lost


def learn(tok, wanted):
    """languages() -> (larger tokenizer, {language: held-out documents}); prints what each language gains."""
    documents, held = {}, {}
    for name, (source, _) in wanted.items():
        documents[name], held[name] = read(source)
    larger, chosen = expanded(tok, documents, {name: number for name, (_, number) in wanted.items()})
    print(f'{"":<14}{"new tokens":>11}{"tokens per character":>24}{"bytes per token":>24}{"fewer tokens":>14}')
    for name, (_, number) in wanted.items():
        olds, news = tok.encode(held[name]), larger.encode(held[name])
        triples = zip(held[name], olds, news, strict=True)
        if bad := [text for text, old, new in triples if tok.decode(old) == text != larger.decode(new)]:
            raise InputError(f'{name}: the larger tokenizer does not give back {len(bad)} texts, first {bad[0][:60]!r}')
        characters, size = sum(map(len, held[name])), sum(len(text.encode()) for text in held[name])
        was, now, got = sum(map(len, olds)), sum(map(len, news)), len(chosen.get(name, ()))
        tokens = f'{was / characters:>11.3f} -> {now / characters:<9.3f}{size / was:>11.2f} -> {size / now:<9.2f}'
        print(f'{name:<14}{got:>11,}{tokens}{1 - now / was:>14.1%}')
        if got < number:
            print(f'{name}: the text gives {got:,} of the {number:,} tokens asked for')
    return larger, held


# -----------------------------------------------------------------------------
# the model


def table_like(model, tokens, pad):
    """The table (V, H) that signs these tokens as the model's own are signed."""
    c, own = model.config, model.signatures.numpy()
    # the Single-ID ablation: one hash on all coordinates, whose collisions stay
    single_id = (own == own[:, :1]).all() and (c.num_hashes > 1 or len(np.unique(own)) < len(own))
    return signature_table(tokens, c.num_hashes, c.num_buckets, c.num_lsh, pad, unique=not single_id)


def open_before(tok):
    """The model to grow. Raises InputError if it was not trained with tok; a whole other vocabulary is for any MHF."""
    model, its_tokenizer, sha256 = load_model(before)
    own, V = model.signatures.numpy(), len(tok.tokens)
    if whole and not model.config.num_hashes:
        raise InputError(f"whole: before='{before}' is a Standard model, in which each token has a row of its own")
    if its_tokenizer and not sha256:
        sha256 = tokenizer_fingerprint(get_tokenizer(its_tokenizer))
    # a released table may end with rows that are no tokens
    same = sha256 in (None, tokenizer_fingerprint(tok)) and limit_to_tokenizer(model, V, [])
    if same and model.config.num_hashes:
        same = np.array_equal(own[:V], table_like(model, tok.tokens, model.config.pad_id))
    if not (whole or same):
        its = its_tokenizer or 'another tokenizer'
        raise InputError(f"before='{before}' was trained with {its}, whose tokens are not those of base='{base}'")
    return model


def grow(model, tok, larger):
    """Gives the model the tokens that `larger` has after tok's, or all of them in place of its own."""
    V, c = len(tok.tokens), model.config
    if not whole and larger.tokens[:V] != tok.tokens:
        raise InputError(f"tokenizer='{tokenizer}' is there already and does not extend base='{base}'")
    if not c.num_hashes:
        E = model.embed.weight.data
        new = [E[ids].mean(0, keepdim=True) for ids in tok.split(larger.tokens[V:])]
        model.embed = torch.nn.Embedding.from_pretrained(torch.cat([E[:V], *new]), freeze=False)
    pad = larger.pad if whole else c.pad_id
    table = table_like(model, larger.tokens, pad) if c.num_hashes else larger.tokens
    model.replace_vocabulary(table, pad, [i for i, token in enumerate(larger.tokens) if token is None])


def main():
    file, wanted = Path(tokenizer), languages()
    learns = not whole and not (before and file.exists())
    if whole and (wanted or not before):
        raise InputError('whole gives --before the vocabulary of --tokenizer as it is; name both, and no texts')
    if learns and not wanted:
        raise InputError('texts is empty; name a text for each language: --texts=ar.jsonl,zh.jsonl')
    if not whole and file.suffix != '.model':
        raise InputError(f"tokenizer='{tokenizer}': the file to write must end with .model")
    if before and init_from in ('', 'scratch', 'resume'):
        raise InputError(f"init_from='{init_from}': name the folder to write the grown model into, --init_from=FOLDER")
    held_files = {name: file.with_name(f'{file.stem}_{name}.jsonl') for name in wanted}
    outputs = [file, *held_files.values()] if learns else []
    outputs += [Path(init_from)] if before else []
    if there := [path for path in outputs if path.exists()]:
        raise InputError(f'{there[0]} is there already; delete it, or choose another --tokenizer or --init_from')
    tok = get_tokenizer(base)
    if not isinstance(tok, SentencePieceTokenizer):
        raise InputError(f"base='{base}' is no SentencePiece tokenizer, only those can be expanded; mistral is one")
    model = open_before(tok) if before else None

    if learns:
        larger, held = learn(tok, wanted)
    else:
        larger = get_tokenizer(tokenizer)
        print(f'{tokenizer} is used as it is')
    V, cost = len(tok.tokens), ''
    if before:
        V, parameters = model.config.vocab_size, sum(model.num_params())
        grow(model, tok, larger)
        cost = f': {sum(model.num_params()) - parameters:,} new parameters'
    try:
        for path in outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
        if learns:
            for name, path in held_files.items():
                rows = [json.dumps(dict(text=text), ensure_ascii=False) + '\n' for text in held[name]]
                path.write_text(''.join(rows), encoding='utf-8', newline='\n')
            file.write_bytes(larger.sp.serialized_model_proto())
        if before:
            save_pretrained(model, init_from, tokenizer)
    except BaseException as e:
        # whatever ends it early leaves nothing
        for path in outputs:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        if isinstance(e, OSError):
            raise InputError(f'{outputs[-1]} cannot be written ({e})') from None
        raise
    print(f'{V:,} -> {len(larger.tokens):,} tokens{cost}', *outputs, sep='\n')


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; nothing was written', file=sys.stderr)
        sys.exit(130)
