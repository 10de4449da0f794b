"""
Draw README's figure of signatures: the buckets of five tokens in the paper's H4B16K.

    $ python -m study.signatures       # writes assets/signatures.png
"""

from pathlib import Path

from matplotlib.figure import Figure

from hashing import signature_table
from mhf.tokenizers import get_tokenizer

WORDS = ('▁the', '▁The', '▁hash', 'ing', '<0x0A>')
H = 4
B = 16384


def draw(path):
    tok = get_tokenizer('mistral')
    table = signature_table(tok.tokens, H, B, pad_id=tok.pad)
    fig = Figure(figsize=(8, 3.4))
    ax = fig.add_subplot()
    for word in WORDS:
        signature = table[tok.tokens.index(word)].tolist()
        ax.plot(range(1, H + 1), signature, 'o-', lw=1, label=f'{word}  {signature}')
    # room for the legend
    ax.set_xlim(0.8, 7.4)
    ax.set_xticks(range(1, H + 1))
    ax.set(xlabel='hash function', ylabel=f'bucket, of {B:,}', title='a token is its signature')
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')


if __name__ == '__main__':
    draw(Path(__file__).resolve().parent.parent / 'assets' / 'signatures.png')
