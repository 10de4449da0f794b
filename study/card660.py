"""
Card-660: how well hidden states tell the similarity of rare words.

    $ python -m study.card660 out/mhf_1b dataset.tsv

Prints the correlations of human similarity with the cosine of two words' hidden states, and the paper's at 1B.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from tqdm import tqdm

from mhf.errors import install_excepthook
from mhf.lm import PUBLISHED, open_lm


def read_word_pairs(path):
    """Returns [(word, word, human similarity)] of Card-660's dataset.tsv."""
    lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    rows = [line.split('\t') for line in lines if line]
    return [(a, b, float(score)) for a, b, score in rows]


@torch.no_grad()
def word_states(lm, word):
    """A word's states {'last': after the final norm, 'second_to_last': before the last block}, each (d,) float32."""
    ids = list(lm.tok.encode([word.replace('_', ' ')])[0])
    if lm.bos is not None or not ids:
        ids = [lm.tok.bos, *ids]
    inputs = []  # of the last block
    hook = lm.model.layers[-1].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    with lm.autocast():
        h = lm.model.hidden_states(torch.tensor([ids], device=lm.device))
    hook.remove()
    return dict(last=h[0, -1].float(), second_to_last=inputs[0][0, -1].float())


def card660(lm, pairs):
    """Returns the correlations of human similarity with the cosine of two words' hidden states."""
    words = {word for a, b, _ in pairs for word in (a, b)}
    states = {word: word_states(lm, word) for word in tqdm(words, desc='card660', leave=False, disable=None)}
    human = [score for _, _, score in pairs]
    results = {}
    for layer in ('last', 'second_to_last'):
        cosines = [F.cosine_similarity(states[a][layer], states[b][layer], dim=0).item() for a, b, _ in pairs]
        results[f'{layer}_pearson'] = pearsonr(cosines, human).statistic
        results[f'{layer}_spearman'] = spearmanr(cosines, human).statistic
    return results


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', help='a model, as in eval.py')
    parser.add_argument('file', help="Card-660's dataset.tsv")
    args = parser.parse_args()
    pairs = read_word_pairs(args.file)
    published = [row for row in PUBLISHED if 'last_pearson' in row]
    print(f'{"":<24}', args.out_dir, *(row['model'] for row in published), sep='\t')
    for key, value in card660(open_lm(args.out_dir), pairs).items():
        print(f'{key:<24}', f'{value:.4f}', *(row[key] for row in published), sep='\t')


if __name__ == '__main__':
    main()
