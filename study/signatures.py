"""
Draws README's picture of what a signature is: the buckets of five tokens in the paper's H4B16K.

    $ python -m study.signatures       # writes assets/signatures.png
"""

import argparse
from pathlib import Path

from hashing import signature_table
from mhf.plot import figure, save
from mhf.tokenizers import get_tokenizer

WORDS = ('▁the', '▁The', '▁hash', 'ing', '<0x0A>')
H = 4
B = 16384


def draw(path):
    tok = get_tokenizer('mistral')
    table = signature_table(tok.tokens, H, B, pad_id=tok.pad)
    fig, ax = figure(8, 3.4)
    for word in WORDS:
        signature = table[tok.tokens.index(word)].tolist()
        ax.plot(range(1, H + 1), signature, 'o-', lw=1, label=f'{word}  {signature}')
    # room for the legend
    ax.set_xlim(0.8, 7.4)
    ax.set_xticks(range(1, H + 1))
    save(fig, ax, path, xlabel='hash function', ylabel=f'bucket, of {B:,}', title='a token is its signature')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    draw(Path(__file__).resolve().parent.parent / 'assets' / 'signatures.png')
