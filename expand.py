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
save in the text, and the best go after the base's pieces. They have the lowest priorities, so that a text without them
is split as before. A grown MultiHashFormer has a longer table and the same parameters. A grown Standard model has one
more row for each new token: the mean of the rows of its old pieces.

Every 20th document is held out, up to 400 kB of each text, and written beside the tokenizer as .jsonl. For eval.py to
measure text that was not trained on, prepare.py must hold out these too. It does so where it reads the same texts with
val_fraction=0.05 and without --part, as with config/expand_*.py.
"""

import io
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

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

# the share of a language's documents that is held out, and the most bytes of them. The bytes are fewer than prepare.py
# holds out of each of 4 sources
HELD_OUT = 0.05
HELD_OUT_BYTES = 400_000


# -----------------------------------------------------------------------------
# the tokenizer


class Language(NamedTuple):
    source: str  # what prepare.py reads
    new_tokens: int  # how many are asked for


def languages():
    """texts -> {name: Language}. Raises InputError."""
    named = {}
    for item in filter(None, map(str.strip, texts.split(','))):
        source = item
        number = num_new_tokens
        if '@' in item:
            source, _, number = item.rpartition('@')
        if not str(number).isdecimal() or int(number) > 10**6:
            raise InputError(f"texts '{item}': after @ comes a number of tokens, like @5000, at most 1,000,000")
        if any(source == other.source for other in named.values()):
            raise InputError(f"texts names '{source}' twice")
        named[name_of(source, named)] = Language(source, int(number))
    return named


def name_of(source, taken):
    """A name for a source that no other has: that of its file, of its folder, of both, or a number."""
    names = [re.sub(r'[^\w-]', '', name.split(':')[-1].split('.')[0]) for name in source.split('/')]
    folder, file = ['', *names][-2:]
    # ar/*.jsonl is called ar
    for name in (file, folder, f'{folder}_{file}'):
        if name and name not in taken:
            return name
    return f'text{len(taken)}'


def read(source):
    """The documents to learn from, and those held out, two lists of str. Raises InputError."""
    documents = []
    held = []
    size = 0
    for texts_of_document, _ in divided(Source(source), START, HELD_OUT, HELD_OUT_BYTES):
        for text, is_held_out in texts_of_document:
            if is_held_out:
                held.append(text)
            else:
                documents.append(text)
                size += len(text.encode())
        if size >= text_bytes:
            break
    if not documents or not held:
        counts = f'{len(documents):,} documents to learn from, {len(held)} held out'
        raise InputError(f'{source}: too little text: {counts}; take more of it, or raise text_bytes={text_bytes:,}')
    return documents, held


def learned_pieces(documents, spec, vocab_size):
    """
    What byte-pair encoding learns from the documents -> SentencePiece's model of vocab_size pieces, as bytes, and
    {piece: its rank in the order of learning}. spec: the base's trainer_spec, which says how text is split.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    options = 'max_sentencepiece_length split_by_unicode_script split_by_number split_by_whitespace split_digits'
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines_of(documents)),
        model_writer=out,
        model_type='bpe',
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name='identity',
        remove_extra_whitespaces=False,
        max_sentence_length=1 << 24,
        minloglevel=2,
        **{key: getattr(spec, key) for key in options.split()},
    )
    learned = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    return out.getvalue(), {p.piece: k for k, p in enumerate(learned.pieces) if p.type == p.NORMAL}


def lines_of(documents):
    return [line for text in documents for line in text.splitlines() if line.strip()]


def last_merge(piece, rank):
    """The two pieces that byte-pair encoding with these ranks merges last to make `piece`."""
    pieces = list(piece)
    while len(pieces) > 2:
        first = min(range(len(pieces) - 1), key=lambda k: rank.get(pieces[k] + pieces[k + 1], len(rank)))
        pieces[first : first + 2] = [pieces[first] + pieces[first + 1]]
    return pieces


def merges_made(documents, model_proto, rank):
    """How often encoding the documents makes each piece, on the way to longer ones too -> Counter."""
    import sentencepiece

    encode = sentencepiece.SentencePieceProcessor(model_proto=model_proto).encode
    made = Counter(piece for pieces in encode(lines_of(documents), out_type=str) for piece in pieces)
    # a piece comes before the pieces that it is made of
    for piece in sorted(rank, key=rank.get, reverse=True):
        if len(piece) > 1:
            for half in last_merge(piece, rank):
                made[half] += made[piece]
    return made


def candidates(documents, old, spec, number):
    """
    The pieces that byte-pair encoding learns from the documents and that are not among the `old` ones -> {piece: its
    rank in the order of learning}, the best first. A merge saves one token wherever it happens; a character saves its
    bytes beyond the first.
    """
    enough = len(old) + 2 * number + len({c for text in documents for c in text})
    model_proto, rank = learned_pieces(documents, spec, enough)
    made = merges_made(documents, model_proto, rank)
    letters = Counter(c.isascii() for text in documents for c in text if c.isalpha())
    # a language in other letters gets no pieces with Latin letters, and none that are all ASCII
    not_latin = letters[False] > letters[True]
    saved = {}
    for piece in rank:
        has_latin = piece.replace('▁', '').isascii() or any(c.isascii() and c.isalpha() for c in piece)
        if piece not in old and not (not_latin and has_latin):
            tokens_saved_each_time = len(piece.encode()) - 1 if len(piece) == 1 else 1
            saved[piece] = made[piece] * tokens_saved_each_time
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
    """
    {language: documents}, {language: number of new tokens} -> (the larger tokenizer, {language: its new pieces}).
    Raises InputError.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tok.sp.serialized_model_proto())
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise InputError(f"base='{base}' is no byte-pair encoding, only those can be expanded")
    old = {p.piece for p in model.pieces}
    ranked = {}
    growing = [name for name in numbers if numbers[name]]
    for name in tqdm(growing, desc='learn', unit='language', delay=1, leave=False):
        ranked[name] = candidates(documents[name], old, model.trainer_spec, numbers[name])
    V = len(tok.tokens)
    useless = set()
    while True:
        chosen = choose(ranked, numbers, taken=old | useless)
        pieces = [piece for pieces in chosen.values() for piece in pieces]
        larger = SentencePieceTokenizer('', model_proto=with_pieces(model, pieces))
        # a piece into which its own text is not split never occurs: merges of higher priority cross its own
        splits = larger.split(larger.tokens[V:])
        lost = {larger.tokens[k] for k, ids in enumerate(splits, V) if ids != [k]}
        if not lost:
            return larger, chosen
        useless |= lost


def choose(ranked, numbers, taken):
    """
    The best pieces of each language's candidates that are not taken, as many as `numbers` says -> {language: pieces},
    in the order of learning. No piece is chosen twice.
    """
    chosen = {}
    for name, rank in ranked.items():
        best = [piece for piece in rank if piece not in taken][: numbers[name]]
        chosen[name] = sorted(best, key=rank.get)
        taken = taken | set(best)
    return chosen


def learn(tok, named):
    """languages() -> (larger tokenizer, {language: held-out documents}); prints what each language gains."""
    documents = {}
    held = {}
    for name, language in named.items():
        documents[name], held[name] = read(language.source)
    larger, chosen = expanded(tok, documents, {name: language.new_tokens for name, language in named.items()})
    print(f'{"":<14}{"new tokens":>11}{"tokens per character":>24}{"bytes per token":>24}{"fewer tokens":>14}')
    for name, language in named.items():
        number = len(chosen.get(name, ()))
        print_gain(name, number, held[name], tok, larger)
        if number < language.new_tokens:
            print(f'{name}: the text gives {number:,} of the {language.new_tokens:,} tokens asked for')
    return larger, held


def print_gain(name, number, held, tok, larger):
    """
    Prints what a language gains by its `number` new tokens, measured on its held-out documents. Raises InputError where
    the larger tokenizer does not give one back.
    """
    before = tok.encode(held)
    after = larger.encode(held)
    triples = zip(held, before, after, strict=True)
    # texts that the base gives back
    lost = [text for text, old, new in triples if tok.decode(old) == text and larger.decode(new) != text]
    if lost:
        raise InputError(f'{name}: the larger tokenizer does not give back {len(lost)} texts, first {lost[0][:60]!r}')
    characters = sum(map(len, held))
    size = sum(len(text.encode()) for text in held)
    was = sum(map(len, before))
    now = sum(map(len, after))
    per_character = f'{was / characters:>11.3f} -> {now / characters:<9.3f}'
    per_token = f'{size / was:>11.2f} -> {size / now:<9.2f}'
    print(f'{name:<14}{number:>11,}{per_character}{per_token}{1 - now / was:>14.1%}')


# -----------------------------------------------------------------------------
# the model


def table_like(model, tokens, pad):
    """The table (V, H) that signs these tokens as the model's own are signed."""
    c = model.config
    own = model.signatures.numpy()
    # the Single-ID ablation: one hash on all coordinates, whose collisions stay
    same_on_all = (own == own[:, :1]).all()
    has_collisions = len(np.unique(own)) < len(own)
    single_id = same_on_all and (c.num_hashes > 1 or has_collisions)
    return signature_table(tokens, c.num_hashes, c.num_buckets, c.num_lsh, pad, unique=not single_id)


def open_before(tok):
    """
    The model to grow. Raises InputError where it was not trained with tok. With `whole`, it may have been trained with
    any tokenizer, but must be a MultiHashFormer.
    """
    model, its_tokenizer, sha256 = load_model(before)
    own = model.signatures.numpy()
    V = len(tok.tokens)
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
    """
    Gives the model the tokens that `larger` has after tok's; with `whole`, all tokens of `larger` in place of its own.
    Raises InputError.
    """
    V = len(tok.tokens)
    c = model.config
    if not whole and larger.tokens[:V] != tok.tokens:
        raise InputError(f"tokenizer='{tokenizer}' is there already and does not extend base='{base}'")
    if not c.num_hashes:
        E = model.embed.weight.data
        new = [E[ids].mean(0, keepdim=True) for ids in tok.split(larger.tokens[V:])]
        model.embed = torch.nn.Embedding.from_pretrained(torch.cat([E[:V], *new]), freeze=False)
    pad = larger.pad if whole else c.pad_id
    table = table_like(model, larger.tokens, pad) if c.num_hashes else larger.tokens
    model.replace_vocabulary(table, pad, [i for i, token in enumerate(larger.tokens) if token is None])


# -----------------------------------------------------------------------------
# the whole


def check_settings(named, learns):
    """named: languages(); learns: whether a tokenizer is learned. Raises InputError."""
    if whole and (named or not before):
        raise InputError('whole gives --before the vocabulary of --tokenizer as it is; name both, and no texts')
    if learns and not named:
        raise InputError('texts is empty; name a text for each language: --texts=ar.jsonl,zh.jsonl')
    if not whole and Path(tokenizer).suffix != '.model':
        raise InputError(f"tokenizer='{tokenizer}': the file to write must end with .model")
    if before and init_from in ('', 'scratch', 'resume'):
        raise InputError(f"init_from='{init_from}': name the folder to write the grown model into, --init_from=FOLDER")


def held_out_file(name):
    """The file for the held-out documents of a language, beside the tokenizer."""
    file = Path(tokenizer)
    return file.with_name(f'{file.stem}_{name}.jsonl')


def write(larger, held, model):
    """
    Writes a learned tokenizer and its held-out documents, {language: documents}, and the grown model; held or model is
    None where there is none to write. Raises OSError.
    """
    if held is not None:
        Path(tokenizer).parent.mkdir(parents=True, exist_ok=True)
        for name, documents in held.items():
            rows = [json.dumps(dict(text=text), ensure_ascii=False) + '\n' for text in documents]
            held_out_file(name).write_text(''.join(rows), encoding='utf-8', newline='\n')
        Path(tokenizer).write_bytes(larger.sp.serialized_model_proto())
    if model is not None:
        Path(init_from).parent.mkdir(parents=True, exist_ok=True)
        save_pretrained(model, init_from, tokenizer)


def remove(paths):
    """Removes the files and folders that are there."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()


def main():
    named = languages()
    learns = not whole and not (before and Path(tokenizer).exists())
    check_settings(named, learns)
    outputs = []
    if learns:
        outputs = [Path(tokenizer), *map(held_out_file, named)]
    if before:
        outputs.append(Path(init_from))
    for path in outputs:
        if path.exists():
            raise InputError(f'{path} is there already; delete it, or choose another --tokenizer or --init_from')
    tok = get_tokenizer(base)
    if not isinstance(tok, SentencePieceTokenizer):
        raise InputError(f"base='{base}' is no SentencePiece tokenizer, only those can be expanded; mistral is one")
    model = open_before(tok) if before else None

    held = None
    if learns:
        larger, held = learn(tok, named)
    else:
        larger = get_tokenizer(tokenizer)
        print(f'{tokenizer} is used as it is')
    V = len(tok.tokens)
    cost = ''
    if before:
        V = model.config.vocab_size
        parameters = sum(model.num_params())
        grow(model, tok, larger)
        cost = f': {sum(model.num_params()) - parameters:,} new parameters'
    try:
        write(larger, held, model)
    except BaseException as e:
        # whatever ends it early leaves nothing
        remove(outputs)
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
