"""
Adds tokens for new languages to a tokenizer and to a trained model. A MultiHashFormer gets no new parameters.

    $ python expand.py config/expand_tiny.py     # learns the tokens; writes the tokenizer and the expanded model
    $ python prepare.py config/expand_tiny.py    # tokenizes text of all languages with the larger tokenizer
    $ python train.py config/expand_tiny.py      # trains the expanded model
    $ python eval.py config/expand_tiny.py       # bits per byte of held-out text
    $ python eval.py config/expand_tiny.py --out_dir=out/mhf_tiny --tokenizer=      # bits per byte before the expansion

    $ python expand.py --corpora=ar.jsonl,zh.jsonl@8000,en.jsonl@0 --tokenizer=a.model     # only a tokenizer
    $ python expand.py --corpora=hi.jsonl --base_tokenizer=a.model --tokenizer=b.model     # one more language
    $ python expand.py --source_model=out/standard --output_dir=new --tokenizer=a.model    # with an existing tokenizer

SentencePiece learns pieces from each corpus. Those that the base tokenizer lacks are ranked by the tokens they save in
the corpus, and the best are appended. Their merges have the lowest priority, so text without them is tokenized as
before. An expanded Standard model has one new row per token, the mean of the rows of the token's old pieces. In a model
with informed signatures, new tokens share the buckets of known forms and shapes; their other buckets depend on their
frequencies in the corpora, which have equal weights. Name all corpora of the training; one with @0 adds no tokens.

Every 20th document, up to 400 kB per corpus, is held out and written next to the tokenizer as .jsonl for eval.py; of
fewer than 60 documents, the ends of up to five. prepare.py holds out the same text if each corpus is one of at most 10
sources of a mixture (ar.jsonl@2e9,zh.jsonl@2e9) with val_fraction=0.05 and the default val_bytes, as in
config/expand_*.py.
"""

import io
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from configurator import configure
from hashing import extend_informed_table
from mhf.checkpoint import load
from mhf.data import build_table
from mhf.errors import InputError
from mhf.released import save_pretrained
from mhf.sources import input_files, is_held_out, read_files, start_counts
from mhf.tokenizers import SentencePieceTokenizer, get_tokenizer

# tokenizer
base_tokenizer = 'mistral'  # the tokenizer to expand: mistral, or a .model file
corpora = ''  # one data set (as in prepare.py) per language, separated by commas; @5000: add 5,000 token ids for it
num_new_tokens = 5118  # for a corpus without @; three corpora give the paper's 15,354
max_bytes_per_language = 30000000  # of text to learn from
tokenizer = 'expanded.model'  # the .model file to write; with a source_model, one that exists is used
# model
source_model = ''  # the model to expand: an out_dir, a folder in the released format, or a hub id[@revision]; '': none
output_dir = ''  # the folder for the expanded model, in the released format

config = configure(globals())

# the share of a corpus that is held out, up to a limit; prepare.py holds out at least this by config/expand_*.py
HELD_OUT = 0.05
HELD_OUT_BYTES = 400_000

# -----------------------------------------------------------------------------
# corpora


def parse_corpora():
    """
    Returns {language: corpus} and {language: number of new tokens}. A language is named by the last part of its path,
    without suffix: 'text/ar.jsonl.xz', 'fineweb-2:ar' and 'ar/*.jsonl' are ar. Raises InputError.
    """
    files = {}
    num_new = {}
    for item in filter(None, corpora.split(',')):
        corpus, count = re.fullmatch(r'(.+?)(?:@(\d+))?', item).groups(num_new_tokens)
        parts = re.findall(r'[^/:*?.]+', re.sub(r'(\.\w+)+$', '', corpus))
        name = parts[-1] if parts else 'text'
        if name in files:
            raise InputError(f"corpora '{corpora}': two corpora are named '{name}'; rename a file or a folder")
        files[name] = corpus
        num_new[name] = int(count)
    return files, num_new


def read_corpus(corpus):
    """Returns the documents to learn from and the held-out ones, two lists of str. Raises InputError."""
    documents = []
    held_out = []
    size = 0
    paths = input_files(corpus)
    counts = start_counts(paths, HELD_OUT)
    for text in read_files(paths, counts['separate_ends'], counts['n']):
        counts['documents'] += 1
        if is_held_out(counts, HELD_OUT_BYTES):
            held_out.append(text)
            counts['held_out_bytes'] += len(text.encode())
        elif size < max_bytes_per_language:
            documents.append(text)
            size += len(text.encode())
        if held_out and size >= max_bytes_per_language:
            break
    if not any(documents) or not held_out:
        found = f'{len(documents):,} documents to learn from, {len(held_out)} held out'
        raise InputError(f'{corpus}: too little text: {found}; use more text')
    return documents, held_out


# -----------------------------------------------------------------------------
# tokenizer


def learn_pieces(lines, spec, vocab_size):
    """
    Trains a SentencePiece BPE model of vocab_size pieces on lines of text, which it splits as `spec`, the trainer_spec
    of the base, does. Returns the model as bytes, and {piece: its rank in the order of learning}.
    """
    options = 'max_sentencepiece_length split_by_unicode_script split_by_number split_by_whitespace split_digits'
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
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
    learned = ModelProto.FromString(out.getvalue())
    return out.getvalue(), {p.piece: k for k, p in enumerate(learned.pieces) if p.type == p.NORMAL}


def last_merge(piece, rank):
    """Returns the two pieces that BPE with these ranks merges last to build `piece`."""
    pieces = list(piece)
    while len(pieces) > 2:
        k = min(range(len(pieces) - 1), key=lambda k: rank.get(pieces[k] + pieces[k + 1], len(rank)))
        pieces[k : k + 2] = [pieces[k] + pieces[k + 1]]
    return pieces


def count_merges(lines, model_proto, rank):
    """Counts how often encoding the lines builds each piece, also on the way to longer ones. Returns a Counter."""
    encode = sentencepiece.SentencePieceProcessor(model_proto=model_proto).encode
    merge_counts = Counter(piece for pieces in encode(lines, out_type=str) for piece in pieces)
    # in reverse order of learning, a piece comes before the two pieces that it merges
    for piece in sorted(rank, key=rank.get, reverse=True):
        if len(piece) > 1:
            for half in last_merge(piece, rank):
                merge_counts[half] += merge_counts[piece]
    return merge_counts


def rank_candidates(documents, old_pieces, spec, count):
    """
    Learns pieces that are not in old_pieces, enough to choose `count` from. Returns {piece: its rank in the order of
    learning}, best first: a merge saves one token wherever it occurs, a character saves its bytes beyond the first.
    """
    vocab_size = len(old_pieces) + 2 * count + len({c for text in documents for c in text})
    lines = [line for text in documents for line in text.splitlines() if line.strip()]
    model_proto, rank = learn_pieces(lines, spec, vocab_size)
    merges = count_merges(lines, model_proto, rank)
    letters = Counter(c.isascii() for text in documents for c in text if c.isalpha())
    # a corpus of mostly non-ASCII letters adds no pieces with ASCII letters, and none that are all ASCII
    mostly_non_ascii = letters[False] > letters[True]
    saved = {}
    for piece in rank:
        has_ascii = piece.replace('▁', '').isascii() or any(c.isascii() and c.isalpha() for c in piece)
        if piece not in old_pieces and not (mostly_non_ascii and has_ascii):
            saved_each_time = len(piece.encode()) - 1 if len(piece) == 1 else 1
            saved[piece] = merges[piece] * saved_each_time
    best = sorted((p for p in saved if saved[p] > 1), key=lambda p: (-saved[p], rank[p]))
    return {piece: rank[piece] for piece in best}


def append_pieces(model, pieces):
    """Appends pieces to a SentencePiece model (ModelProto) with lower priorities than its merges. Returns bytes."""
    larger = type(model).FromString(model.SerializeToString())
    # excludes Mistral's runs of spaces, whose score is -1e9
    lowest = min(p.score for p in model.pieces if p.type == p.NORMAL and p.score > -1e8)
    for k, piece in enumerate(pieces, 1):
        larger.pieces.add(piece=piece, score=lowest - k)
    larger.trainer_spec.vocab_size = len(larger.pieces)
    return larger.SerializeToString()


def expand_tokenizer(tok, documents, num_new):
    """Returns a larger tokenizer. documents, {language: list of str}; num_new, {language: number of new tokens}."""
    model = ModelProto.FromString(tok.definition)
    old_pieces = {p.piece for p in model.pieces}
    ranked = {}
    for name, count in num_new.items():
        if count:
            ranked[name] = rank_candidates(documents[name], old_pieces, model.trainer_spec, count)
    V = len(tok.tokens)
    excluded = set()
    while True:
        taken = old_pieces | excluded
        pieces = []  # of each language the best that are not taken, in the order of learning
        for name, rank in ranked.items():
            best = [piece for piece in rank if piece not in taken][: num_new[name]]
            pieces += sorted(best, key=rank.get)
            taken.update(best)
        larger = SentencePieceTokenizer('', model_proto=append_pieces(model, pieces))
        # a piece is unreachable if merges of higher priority split its text differently
        splits = larger.encode_pieces(larger.tokens[V:])
        unreachable = {larger.tokens[k] for k, ids in enumerate(splits, V) if ids != [k]}
        # a tokenizer.json splits a character that is no piece into bytes before it merges
        characters = old_pieces.union(pieces)
        unreachable.update(piece for piece in pieces if not characters.issuperset(piece))
        if not unreachable:
            return larger
        excluded |= unreachable


# -----------------------------------------------------------------------------
# model


def relative_frequencies(larger, documents):
    """{language: list of str} -> the relative frequency of each token id (V,); languages have equal weights."""
    frequencies = np.zeros(len(larger.tokens))
    for texts in documents.values():
        ids = list(itertools.chain(*larger.encode(texts)))
        counts = np.bincount(ids, minlength=len(larger.tokens))
        frequencies += counts / counts.sum() / len(documents)
    return frequencies


def expand_model(model, tok, larger, documents):
    """
    Adds the tokens that `larger` has beyond tok to the model. `documents`, {language: list of str}, is read if the
    signatures of the model depend on frequencies. Raises InputError if `larger` does not extend tok.
    """
    V = len(tok.tokens)
    c = model.config
    if larger.tokens[:V] != tok.tokens:
        fix = 'choose another --tokenizer, or name its base with --base_tokenizer'
        raise InputError(f"tokenizer='{tokenizer}' exists and does not extend base_tokenizer='{base_tokenizer}'; {fix}")
    if not c.num_hashes:
        E = model.embed.weight.data
        new_rows = [E[ids].mean(0, keepdim=True) for ids in tok.encode_pieces(larger.tokens[V:])]
        model.embed = torch.nn.Embedding.from_pretrained(torch.cat([E[:V], *new_rows]), freeze=False)
        table = None
    elif c.frequency_ranges:
        frequencies = relative_frequencies(larger, documents)[V:]
        table = extend_informed_table(model.signatures[:V].numpy(), larger.spellings, frequencies, c.frequency_ranges)
    else:
        table = build_table(vars(c), larger.tokens, c.pad_id)
        if (model.signatures[:V].numpy() != table[:V]).any():
            raise InputError(f"source_model='{source_model}': its signatures are not those of '{base_tokenizer}'")
    c.vocab_size = len(larger.tokens)
    model.set_vocabulary(table)


# -----------------------------------------------------------------------------
# the script


def open_base():
    """Returns the base tokenizer. Raises InputError for one that cannot be expanded."""
    tok = get_tokenizer(base_tokenizer)
    is_sentencepiece = isinstance(tok, SentencePieceTokenizer)
    is_bpe = is_sentencepiece and ModelProto.FromString(tok.definition).trainer_spec.model_type == TrainerSpec.BPE
    # encode_pieces() puts a line break before each piece; an unknown one would merge with unknown characters after it
    if not is_bpe or not tok.encode(['\n'])[0] or tok.unk in tok.encode(['\n'])[0]:
        kind = 'byte-pair encoding of SentencePiece with line breaks (identity normalization, byte fallback)'
        raise InputError(f"base_tokenizer='{base_tokenizer}' is not {kind}; use mistral")
    return tok


def main():
    languages, num_new = parse_corpora()
    use_existing = bool(source_model) and Path(tokenizer).exists()
    if not use_existing and not tokenizer.endswith('.model'):  # such as the built-in tokenizer of a config
        raise InputError(f'tokenizer={tokenizer}: expand.py writes a SentencePiece file, which must end with .model')
    file = Path(tokenizer)
    held_out_files = {name: file.with_name(f'{file.stem}_{name}.jsonl') for name in languages}
    outputs = [] if use_existing else [file, *held_out_files.values()]
    if source_model:
        outputs.append(Path(output_dir))
    for path in outputs:
        if path.exists():
            raise InputError(f'{path} already exists; choose another --tokenizer or --output_dir')
    tok = open_base()
    source = load(source_model, base_tokenizer) if source_model else None
    if use_existing and not source.model.config.frequency_ranges:
        languages = {}  # no tokens to learn, no frequencies to count
    elif not languages:
        raise InputError('corpora is empty; name the training corpora: --corpora=ar.jsonl,zh.jsonl')

    documents = {}
    held_out = {}
    for name, corpus in languages.items():
        documents[name], held_out[name] = read_corpus(corpus)
    if use_existing:
        larger = get_tokenizer(tokenizer)
    else:
        larger = expand_tokenizer(tok, documents, num_new)
        file.parent.mkdir(parents=True, exist_ok=True)
        for name, texts in held_out.items():
            before, after = (sum(map(len, encoder.encode(texts))) for encoder in (tok, larger))
            print(f'{name:<14}{before:>11,} -> {after:>11,} held-out tokens{1 - after / before:>9.1%}')
            rows = [json.dumps(dict(text=text), ensure_ascii=False) + '\n' for text in texts]
            held_out_files[name].write_text(''.join(rows), encoding='utf-8')
        file.write_bytes(larger.definition)  # last, because a rerun uses a tokenizer that exists
    new_parameters = ''
    if source_model:
        before = sum(source.model.num_params())
        expand_model(source.model, tok, larger, documents)
        save_pretrained(source.model, output_dir, tokenizer, source.add_bos, source.eos_ids)
        new_parameters = f': {sum(source.model.num_params()) - before:,} new parameters'
    print(f'{len(tok.tokens):,} -> {len(larger.tokens):,} tokens{new_parameters}', *outputs, sep='\n')


if __name__ == '__main__':
    main()
