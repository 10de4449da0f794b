"""
T-FREE (arXiv 2406.19223), the paper's baseline without a tokenizer: a word is the set of its trigrams' buckets.

    $ python -m study.tfree words --dataset=edu.jsonl.xz --tokenizer=data/words.json   # words between white space
    $ python prepare.py --dataset=edu.jsonl.xz --tokenizer=data/words.json --data_format=ids --data_dir=data/words
    $ python -m study.tfree train config/mhf_tiny.py --tokenizer=data/words.json --data_dir=data/words
    $ python -m study.tfree eval --out_dir=out/mhf_tiny --benchmark_dir=benchmarks

Each byte trigram of ' word ' has m = 10 of v buckets (--num_buckets; the authors use 8,192): 8 are hashes of the
trigram, 2 are hashes of the trigram of the word in lower case. The decoder reads the sum of the rows of a word's
buckets, from a v x d matrix; a second matrix computes a logit per bucket. The loss is binary cross-entropy, averaged
over all v buckets, with weight 300 on the word's own buckets. The score of a word is the mean of log sigmoid(logit)
over its buckets (the authors use a normalized dot product), that of an answer the sum over its words. Scores are not
probabilities: train.py prints the loss as nats, and only tasks that rank answers are evaluated.

words, train and eval take settings of prepare.py, train.py and eval.py.
"""

import functools
import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import mmh3
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

import model
from configurator import InputError, configure, get_defaults, install_excepthook
from mhf.checkpoint import load_checkpoint
from mhf.data import open_bins
from mhf.runtime import init_distributed, pick_dtype
from mhf.sources import read_documents
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint

REPO = Path(__file__).resolve().parent.parent
HASHES = 10  # m, per trigram
LOWER = 2  # how many of them are of the lower case
POSITIVE = 300  # weight of a word's own buckets in the loss
MAX_WORDS = 1 << 22  # ids, including the new words of an evaluation
SPECIAL = ['<s>', '<unk>']

# -----------------------------------------------------------------------------
# words


@functools.cache
def active_buckets(word, v):
    """The buckets of a word, (k,) int64, ascending."""
    active = set()
    for text, seeds in ((word, range(HASHES - LOWER)), (word.lower(), range(HASHES - LOWER, HASHES))):
        padded = f' {text} '.encode(errors='replace')
        for k in range(len(padded) - 2):
            active |= {mmh3.hash128(padded[k : k + 3], seed) % v for seed in seeds}
    return torch.tensor(sorted(active))


class Words:
    """The tokenizer of a file from write_words. A new word gets an id when it is first encoded."""

    def __init__(self, name):
        tok = get_tokenizer(name)
        if tok.tokens[:2] != SPECIAL:
            raise InputError(f"tokenizer '{name}' is not a list of words; make one: python -m study.tfree words")
        self.name = tok.name
        self.tokens = list(tok.tokens)
        self.bos = tok.bos
        self.pad = tok.pad
        self.split = tok.json.pre_tokenizer.pre_tokenize_str
        self.ids = {word: i for i, word in enumerate(self.tokens)}

    def encode(self, texts):
        return [[self.get_id(word) for word, _ in self.split(text)] for text in texts]

    def get_id(self, word):
        if word not in self.ids:
            self.ids[word] = len(self.tokens)
            self.tokens.append(word)
        return self.ids[word]


def open_words(name, sha256):
    """The Words of a tokenizer file with this fingerprint. Raises InputError."""
    words = Words(name)
    if tokenizer_fingerprint(words) != sha256:
        raise InputError(f'{name} has other words than the training data; restore the file, or rerun prepare.py')
    return words


def write_words():
    """Writes --tokenizer, a tokenizer.json of all words of --dataset, the most frequent first."""
    s = read_settings('prepare.py')
    path = Path(s.tokenizer)
    if path.suffix != '.json':
        raise InputError(f'tokenizer={s.tokenizer}: name a file *.json to write')
    roles = path.with_name('tokenizer_config.json')
    contents = json.dumps(dict(bos_token=SPECIAL[0], eos_token=SPECIAL[0], pad_token=SPECIAL[0]))
    if roles.exists() and roles.read_text() != contents:
        raise InputError(f'{roles} belongs to another tokenizer; write to another folder')
    split = pre_tokenizers.WhitespaceSplit()
    counts = Counter()
    for text in read_documents(s.dataset):
        counts.update(word for word, _ in split.pre_tokenize_str(text))
    words = SPECIAL + [word for word, _ in counts.most_common() if word not in SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path))
    roles.write_text(contents)
    print(f'{len(counts):,} words, {counts.total():,} in the text')


# -----------------------------------------------------------------------------
# model


class TFree(model.MHF):
    """
    Reads and predicts word ids (N, T, 1), which are the signatures of the Standard model. The buckets of a word replace
    its row of E: v = num_buckets. `words`, a Words, must be set before the first use.
    """

    words = None

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        v = config.num_buckets
        self.embed = torch.nn.Embedding(v, config.hidden_size, _weight=torch.empty(v, config.hidden_size))
        self.head = torch.nn.Linear(config.hidden_size, v, bias=False)

    def active(self, ids):
        """Word ids (n,) -> their buckets (k,), the word of each bucket (k,), the first bucket of each word (n,)."""
        buckets = [active_buckets(self.words.tokens[i], self.config.num_buckets) for i in ids.tolist()]
        counts = torch.tensor([len(b) for b in buckets])
        rows = torch.arange(len(buckets)).repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        return torch.cat(buckets).to(ids.device), rows.to(ids.device), starts.to(ids.device)

    def hidden_states(self, x, positions=None, mask=None):
        """x (N, T, 1) -> h (N, T, d), after the final norm; positions and mask as in MHF.hidden_states."""
        buckets, _, starts = self.active(x.flatten())
        e = F.embedding_bag(buckets, self.embed.weight, starts, mode='sum').view(*x.shape[:2], -1)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = model.rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for layer in self.layers:
            e = layer(e, rope, mask)
        return self.norm(e)

    def loss_per_word(self, x, y):
        """x, y (N, T, 1) -> (N, T). Sums over all v buckets as if none were active, and corrects the active ones."""
        logits = model.upcast(self.head(self.hidden_states(x).flatten(0, 1)))  # (N * T, v)
        buckets, rows, _ = self.active(y.flatten())
        active = logits[rows, buckets]
        correction = POSITIVE * F.softplus(-active) - F.softplus(active)
        summed = F.softplus(logits).sum(1).index_add(0, rows, correction)
        return summed.view(x.shape[:2]) / logits.shape[1]

    def forward(self, x, y):
        return self.loss_per_word(x, y).mean()

    @torch.no_grad()
    def token_losses(self, x, y, losses):
        return [self.loss_per_word(x, y) for _ in losses]

    @torch.no_grad()
    def predict(self, h, ids):
        """h (n, d), words (n,) -> the score of each (n,), and nan twice for what only probabilities have."""
        buckets, rows, _ = self.active(ids)
        logp = F.logsigmoid(model.upcast(self.head(h)))[rows, buckets]
        score = logp.new_zeros(len(ids)).index_add(0, rows, logp) / rows.bincount()
        return score, *(torch.nan * score).expand(2, -1)


def read_settings(script):
    """The settings of a script from the command line."""
    scope = dict(get_defaults(script), __file__=script, __name__='__main__', __doc__=__doc__)
    return SimpleNamespace(**configure(scope))


def train():
    """Runs train.py with TFree as the model that --plain trains."""
    sys.argv += ['--plain', '--num_hashes=0', '--data_format=ids', '--compile=False']
    s = read_settings('train.py')
    TFree.words = open_words(s.tokenizer, open_bins(vars(s))[2]['tokenizer_sha256'])
    model.MHF = TFree
    runpy.run_path(str(REPO / 'train.py'), run_name='__main__')


def evaluate():
    """Prints the scores of the paper's tasks except LAMBADA, for which the paper has no T-FREE score."""
    from lm_eval.utils import make_table

    from mhf.lm import MHFLM, PAPER, load_tasks, run_tasks

    s = read_settings('eval.py')
    if not s.out_dir:
        raise InputError('out_dir is not given; name the folder of a run, like --out_dir=out/mhf_tiny')
    _, _, device = init_distributed(s.device)
    tfree, ckpt = load_checkpoint(Path(s.out_dir) / 'ckpt.pt', TFree)
    tfree.words = open_words(ckpt['data']['tokenizer'], ckpt['data']['tokenizer_sha256'])
    # an id is its own signature, also that of a new word
    tfree.signatures = torch.arange(MAX_WORDS)[:, None]
    lm = MHFLM(tfree.to(device).eval(), tfree.words, tfree.words.bos, pick_dtype(s.dtype, device))
    loaded, notes = load_tasks([task for task in PAPER if 'lambada' not in task], s.benchmark_dir)
    results = run_tasks(lm, loaded, notes, s.limit)
    print(make_table(results))
    print('T-FREE: acc and acc_norm of scores that only rank')
    for task, note in results['notes'].items():
        print(f'{task}: {"; ".join(note)}')


COMMANDS = dict(words=write_words, train=train, eval=evaluate)


def main():
    install_excepthook()
    # the rest of the command line are settings
    command = sys.argv.pop(1) if sys.argv[1:] else '--help'
    if command == '--help':
        print(__doc__.strip())
    elif command in COMMANDS:
        COMMANDS[command]()
    else:
        raise InputError(f"command '{command}': must be one of {', '.join(COMMANDS)}")


if __name__ == '__main__':
    main()
