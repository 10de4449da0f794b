"""Converts tokenizers to the files that transformers reads: tokenizer.json and tokenizer_config.json."""

import re

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mhf.data import write_json
from mhf.errors import InputError
from mhf.tokenizers import BYTES, JsonTokenizer, SentencePieceTokenizer

BYTE_LETTERS = {byte: letter for letter, byte in BYTES.items()}

# texts on which tokenizers are compared: white space, scripts, characters that normalizations change, control pieces
PROBES = (
    '', ' ', ' a  b   c ', 'x' + 20 * ' ' + 'y', 'one\ntwo\r\n\r\n\tthree\xa0\u3000four ', '\n', '  \n x',
    "Don't STOP 1234567 x_y=(z+1)*2;", 'ｆｕｌｌ　ＷＩＤＴＨ １２ ﬁ ① İß', 'e\u0301 é Å', 'a▁b ▁c',
    'x\0\x1f\u200b\ufeffy', 'हिन्दी 中文 العربية Ελληνικά русский ภาษาไทย', '👩\u200d👧 🇺🇳 🫠',
    'Hello</s><s> <unk><pad> <0x0A>',
)  # fmt: skip


def string_of(token):
    """Returns the string in a tokenizer.json of a token, str, bytes or None."""
    return token.decode('latin-1').translate(BYTE_LETTERS) if isinstance(token, bytes) else token


def write_tokenizer(tok, folder, add_bos):
    """
    Writes tokenizer.json and tokenizer_config.json, and copies a .model file. AutoTokenizer encodes a text as tok does,
    with bos before the ids if add_bos is set. Returns the name of the tokenizer for config.json. Raises InputError if
    the tokenizer.json encodes one of PROBES differently. Other texts may still differ, such as rare sequences of
    combining characters, or of Unigram pieces with equal scores.
    """
    texts = PROBES
    name = tok.name
    if isinstance(tok, JsonTokenizer):
        name = 'tokenizer.json'
        converted = tok.json
    elif isinstance(tok, SentencePieceTokenizer):
        converted = convert_sentencepiece(tok)
        texts = [*PROBES, *(piece.replace('▁', ' ') for piece in tok.tokens)]
        if name != 'mistral':
            name = 'tokenizer.model'
            (folder / name).write_bytes(tok.definition)
    else:
        converted = convert_tiktoken(tok)
    bos, eos, pad = (string_of(tok.tokens[i]) for i in (tok.bos, tok.eos, tok.pad))
    settings = dict(tokenizer_class='PreTrainedTokenizerFast', bos_token=bos, eos_token=eos, pad_token=pad)
    # text that looks like a special token is encoded as plain text
    settings |= dict(split_special_tokens=True, add_bos_token=add_bos)
    settings |= dict(model_input_names=['input_ids', 'attention_mask'])  # Qwen3 has no token_type_ids
    converted.post_processor = None
    if add_bos:
        # the string of bos may contain characters of the template's syntax
        special = dict(id='bos', ids=[tok.bos], tokens=[bos])
        converted.post_processor = processors.TemplateProcessing('bos $A', special_tokens=[special])
    (folder / 'tokenizer.json').write_text(converted.to_str(pretty=True), encoding='utf-8')
    write_json(folder / 'tokenizer_config.json', settings)
    exported = JsonTokenizer(tok.name, folder / 'tokenizer.json')
    for text, ids, exported_ids in zip(texts, tok.encode(texts), exported.encode(texts), strict=True):
        if ids != exported_ids:
            raise InputError(f"tokenizer '{tok.name}': a tokenizer.json would encode {text!r:.80} differently")
    return name


def find_merges(rank, ids):
    """Returns the pairs of tokens that BPE merges, in order of priority. rank: {token: priority}, lowest first."""
    merges = []
    for token in rank:
        halves = [(token[:k], token[k:]) for k in range(1, len(token))]
        merges += [(rank[token], ids[a], (a, b)) for a, b in halves if a in rank and b in rank]
    return [pair for *_, pair in sorted(merges)]


def convert_sentencepiece(tok):
    """Returns a tokenizers.Tokenizer with the ids of a SentencePieceTokenizer."""
    proto = ModelProto.FromString(tok.sp.serialized_model_proto())
    trained = proto.trainer_spec
    # such as mistral's [REFERENCE_DOC_0]
    user_defined = sorted((p.piece for p in proto.pieces if p.type == p.USER_DEFINED), key=len, reverse=True)
    if trained.model_type == trained.BPE:
        ids = {p.piece: i for i, p in enumerate(proto.pieces)}
        # Mistral's runs of spaces have equal scores, and a run grows from the left
        rank = {p.piece: (-p.score, -len(p.piece)) for p in proto.pieces if p.type == p.NORMAL}
        options = dict(unk_token=trained.unk_piece, fuse_unk=True, byte_fallback=trained.byte_fallback)
        # no merges build them
        options['ignore_merges'] = bool(user_defined)
        converted = Tokenizer(models.BPE(ids, find_merges(rank, ids), **options))
    else:
        # text that looks like a control or byte piece is encoded as plain text
        scores = [(p.piece, -1e6 if p.type in (p.CONTROL, p.UNKNOWN, p.BYTE) else p.score) for p in proto.pieces]
        converted = Tokenizer(models.Unigram(scores, trained.unk_id, trained.byte_fallback))
    before = []
    after = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.precompiled_charsmap:
        before.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.remove_extra_whitespaces:
        before += [normalizers.Replace(Regex(r'\A +| +\z'), ''), normalizers.Replace(Regex(' +'), ' ')]
    if proto.normalizer_spec.add_dummy_prefix:
        before.append(normalizers.Prepend('▁'))
        after.append(decoders.Strip(' ', 1, 0))
    converted.normalizer = normalizers.Sequence([*before, normalizers.Replace(' ', '▁')])
    converted.decoder = decoders.Sequence(after)
    if user_defined:
        converted.pre_tokenizer = pre_tokenizers.Split(Regex('|'.join(map(re.escape, user_defined))), 'isolated')
    special = [p.piece for p in proto.pieces if p.type in (p.CONTROL, p.UNKNOWN)]
    converted.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return converted


def convert_tiktoken(tok):
    """Returns a tokenizers.Tokenizer with the ids of a TiktokenTokenizer."""
    encoding = tok.encoding
    ids = {string_of(token): i for token, i in encoding._mergeable_ranks.items()}
    special = encoding._special_tokens
    converted = Tokenizer(models.BPE(ids | special, find_merges(ids, ids), ignore_merges=True))
    # in the regular expressions of tokenizers, $ also matches at the end of a line, and + repeats {1,3}
    pattern = encoding._pat_str.replace('$', r'\z').replace('{1,3}+', '{1,3}')
    split = pre_tokenizers.Split(Regex(pattern), 'isolated')
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return converted
