"""
Tokenizers split text into tokens; a signature is computed from a token's string.

    tok = get_tokenizer('mistral')

Each tokenizer has

    name
    tokens         V strings in id order: str or bytes, None for an id without a token
    spellings      tokens as text or its bytes, for informed signatures: b' the' for 'Ġthe' of a byte-level tokenizer
    bos, eos, pad  ids
    unk            the id of unknown characters, or None
    definition     what determines ids, besides these roles: bytes
    encode(texts)  -> a list of ids for each text; the library's own threads use all cores
    decode(ids)    -> str
"""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

from configurator import did_you_mean
from mhf.errors import InputError


class SentencePieceTokenizer:
    """A SentencePiece model: a token's string is its piece ('▁the', '<0x0A>', '<s>')."""

    def __init__(self, name, **model):  # model_file=path or model_proto=bytes
        import sentencepiece

        self.name = name
        self.sp = sentencepiece.SentencePieceProcessor(**model)
        self.tokens = self.spellings = [self.sp.id_to_piece(i) for i in range(self.sp.vocab_size())]
        self.bos = self.sp.bos_id()
        self.eos = self.sp.eos_id()
        self.unk = self.sp.unk_id()
        if min(self.bos, self.eos) < 0:
            raise ValueError(f'it has no {"bos" if self.bos < 0 else "eos"}; train it with one')
        self.pad = self.sp.pad_id() if self.sp.pad_id() >= 0 else self.eos
        self.definition = self.sp.serialized_model_proto()

    def encode(self, texts):
        return self.sp.encode(list(texts))

    def decode(self, ids):
        return self.sp.decode([int(i) for i in ids])

    def encode_pieces(self, pieces):
        """Encodes pieces of a larger tokenizer, each at the start of a line. Returns a list of ids for each piece."""
        before = len(self.sp.encode('\n'))
        lines = ['\n' + piece.replace('▁', ' ') for piece in pieces]
        return [ids[before:] for ids in self.encode(lines)]


class TiktokenTokenizer:
    """
    A tiktoken encoding: a token's string is its raw bytes; that of a special token is its name. `roles` are the ids of
    bos, eos and pad; by default all three are the end-of-text token. Special tokens in a text are encoded as plain
    text.
    """

    def __init__(self, name, encoding, roles=None):
        self.name = name
        self.encoding = encoding
        self.unk = None
        self.tokens = self.spellings = [None] * encoding.n_vocab
        special = {name.encode(): i for name, i in encoding._special_tokens.items()}
        for token, i in (*encoding._mergeable_ranks.items(), *special.items()):
            self.tokens[i] = token
        self.special_ids = set(special.values())
        self.bos, self.eos, self.pad = roles or [encoding.eot_token] * 3
        lengths = [-1 if token is None else len(token) for token in self.tokens]
        shape = json.dumps([encoding._pat_str, sorted(self.special_ids), lengths])
        self.definition = shape.encode() + b''.join(filter(None, self.tokens))

    def encode(self, texts):
        return self.encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count())

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in ids if int(i) not in self.special_ids])


# the files of a Hugging Face tokenizer; the last two name its bos, eos and pad tokens
JSON_FILES = ('tokenizer.json', 'special_tokens_map.json', 'tokenizer_config.json')


class JsonTokenizer:
    """
    A Hugging Face tokenizer.json: a token's string is its key in the vocabulary ('▁the', 'Ġthe', '<0x0A>'). The files
    next to it name bos, eos and pad; bos and pad default to eos. Special tokens in a text are encoded as plain text by
    BPE. A WordLevel, WordPiece or Unigram model whose vocabulary contains them may encode them as special tokens.
    """

    def __init__(self, name, file):
        import tokenizers

        self.name = name
        self.json = tokenizers.Tokenizer.from_file(str(file))
        self.json.encode_special_tokens = True
        # the file may enable truncation, padding and BPE dropout, which is random
        self.json.no_truncation()
        self.json.no_padding()
        if getattr(self.json.model, 'dropout', None):
            self.json.model.dropout = None
        ids = self.json.get_vocab()
        self.tokens = [self.json.id_to_token(i) for i in range(max(ids.values(), default=-1) + 1)]
        names = {}
        for path in map(Path(file).with_name, JSON_FILES[1:]):
            if path.exists():
                config = json.loads(path.read_text(encoding='utf-8-sig'))
                names |= {key: value for key, value in config.items() if value is not None}
        for role in ('eos', 'bos', 'pad'):
            token = names.get(f'{role}_token', names.get('eos_token'))
            token = token['content'] if isinstance(token, dict) else token
            if token not in ids:
                problem = f'it has no {role}' if token is None else f"it has no token '{token}'"
                raise ValueError(f'{problem}; name its {role}_token in tokenizer_config.json next to it')
            setattr(self, role, ids[token])
        spec = json.loads(self.json.to_str())
        self.spellings = self.tokens
        if '"ByteLevel"' in json.dumps(spec['decoder']):  # an added token may contain other letters, and stays a str
            self.spellings = [bytes(map(BYTES.get, t)) if t and BYTES.keys() >= set(t) else t for t in self.tokens]
        self.unk = spec['model'].get('unk_id', ids.get(spec['model'].get('unk_token')))  # Unigram has an id
        # encode() adds no special tokens, so the post-processor does not matter
        parts = [spec[part] for part in ('normalizer', 'pre_tokenizer', 'model', 'added_tokens')]
        self.definition = json.dumps(parts).encode()

    def encode(self, texts):
        return [encoded.ids for encoded in self.json.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids):
        # the file need not mark these as special
        special = {self.bos, self.eos, self.pad}
        return self.json.decode([int(i) for i in ids if int(i) not in special])


# byte-level files name most printable bytes by their own letter, and the others, in order, by letters from U+0100 on
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(0x100 + k): byte for k, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))}
BYTES |= {chr(byte): byte for byte in PRINTABLE}


def download_from_hub(name, files):
    """Returns a local folder with those of `files` that the hub's user/name[@revision] contains. Raises InputError."""
    import huggingface_hub

    repo, _, revision = name.partition('@')
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=list(files)))
    except Exception as e:  # offline, unknown id, unknown revision, no permission
        reason = f'{type(e).__name__}: {e!s:.200}'
        raise InputError(f"'{name}' does not exist here, and could not be downloaded from the hub ({reason})") from None


def get_tokenizer(name):
    """
    Returns the tokenizer `name`: 'mistral' (Mistral-7B-v0.3, 32,768 token ids, the paper's), 'tekken' (131,072), any
    tiktoken encoding ('gpt2', 'o200k_base'), a SentencePiece file *.model or *.model.v3, or a tokenizer.json, also by
    their folder or the hub id user/name[@revision] of the latter. Encodings of tiktoken and the hub are downloaded at
    first use. Raises InputError.
    """
    import mistral_common
    import tiktoken

    folder = Path(mistral_common.__file__).parent / 'data'
    known = ['mistral', 'tekken', *tiktoken.list_encoding_names()]
    file = Path(name)
    if name not in known and file.is_dir():
        files = [file / JSON_FILES[0], *file.glob('tokenizer.model*')]
        file = next((path for path in files if path.exists()), files[0])
    elif name not in known and not re.search(r'\.(json|model(\.v\d+)?)$', name):
        if '/' not in name or file.exists():
            choices = f'{", ".join(known)}, *.model, tokenizer.json or its folder, a hub id user/name'
            raise InputError(f"unknown tokenizer '{name}'{did_you_mean(name, known)} (known: {choices})")
        file = download_from_hub(name, JSON_FILES) / JSON_FILES[0]
    try:
        if name == 'mistral':
            return SentencePieceTokenizer(name, model_file=str(folder / 'mistral_instruct_tokenizer_240323.model.v3'))
        if name == 'tekken':
            return load_tekken(folder / 'tekken_240911.json')
        if name in known:
            return TiktokenTokenizer(name, tiktoken.get_encoding(name))
        if file.suffix == '.json':
            return JsonTokenizer(name, file)
        return SentencePieceTokenizer(name, model_file=str(file))
    except Exception as e:  # no network, a broken cache, a truncated file, a file of another kind
        reason = f'{type(e).__name__}: {e!s:.300}'
        fix = 'check the file or the network, or use --tokenizer=mistral'
        raise InputError(f"tokenizer '{name}' could not be loaded ({reason}); {fix}") from None


def load_tekken(path):
    """Returns a TiktokenTokenizer of the file of mistral_common, which tiktoken cannot read."""
    import tiktoken
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    spec = json.loads(Path(path).read_text(encoding='utf-8'))
    config = spec['config']
    num_special = config['default_num_special_tokens']
    # this version of the file lacks the names of special tokens
    names = [str(entry['token_str']) for entry in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    names += [Tekkenizer.SPECIAL_TOKEN_TEMPLATE.format(id=i) for i in range(len(names), num_special)]
    special = {name: i for i, name in enumerate(names)}
    pieces = spec['vocab'][: config['default_vocab_size'] - num_special]
    ranks = {base64.b64decode(piece['token_bytes']): piece['rank'] + num_special for piece in pieces}
    encoding = tiktoken.Encoding('tekken', pat_str=config['pattern'], mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer('tekken', encoding, [special[role] for role in ('<s>', '</s>', '<pad>')])


def tokenizer_fingerprint(tok):
    """Returns a SHA-256 of all that determines ids: the tokenizer's definition and its bos, eos and pad."""
    roles = json.dumps([tok.bos, tok.eos, tok.pad]).encode()
    return hashlib.sha256(roles + tok.definition).hexdigest()


def find_change(tok, texts):
    """Describes the first difference between texts and what a tokenizer decodes from their ids, '' if none differs."""
    for text, ids in zip(texts, tok.encode(texts), strict=True):
        decoded = tok.decode([i for i in ids if i != tok.unk])
        if decoded != text:
            k = len(os.path.commonprefix([text, decoded]))
            return f'{text[k : k + 20]!r} becomes {decoded[k : k + 20]!r}'
    return ''
