#!/usr/bin/env bash
# mistral_common 1.13.1, tekken (131,072 tokens): 606 tokens have the same piece, so whoever hashes pieces gives them
# one signature.
# Guess: hundreds of tokens share a piece (80 %).
# Expected of vocab() and id_to_piece: a string for each token, as in SentencePiece, whose byte tokens are <0x41>. Seen:
# 131,072 ids have 130,044 different pieces. Tokens that are not complete UTF-8 become replacement characters, 606 of
# them exactly one. A dictionary from pieces to ids is 1,028 entries short, and a check that signatures are unique fails
# or, if it works on pieces, passes. Use id_to_byte_piece.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mistral_common==1.13.1
"$folder/venv/bin/python" - <<'PYTHON'
import pathlib
from collections import Counter

import mistral_common
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

tekken = Tekkenizer.from_file(pathlib.Path(mistral_common.__file__).parent / 'data' / 'tekken_240911.json')
pieces = [tekken.id_to_piece(i) for i in range(tekken.n_words)]
byte_pieces = [tekken.id_to_byte_piece(i, SpecialTokenPolicy.KEEP) for i in range(tekken.n_words)]
print(f'{tekken.n_words:,} ids, {len(set(pieces)):,} different pieces, {len(set(byte_pieces)):,} different byte pieces')
print('most frequent pieces:', Counter(pieces).most_common(4))
print('vocab() is the same list:', tekken.vocab() == pieces)
assert len(set(pieces)) == 130044 and len(set(byte_pieces)) == tekken.n_words, 'changed'
PYTHON
