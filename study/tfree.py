"""
T-FREE (arXiv 2406.19223), the paper's baseline without a tokenizer: a word is the set of its trigrams' buckets.

    $ python study/tfree.py words --dataset=edu.jsonl.xz --tokenizer=words.json   # words between white space, counted
    $ python prepare.py --dataset=edu.jsonl.xz --tokenizer=words.json --bins=ids --data_dir=data/words
    $ python study/tfree.py train config/mhf_tiny.py --tokenizer=words.json --data_dir=data/words --num_buckets=8192
    $ python study/tfree.py eval --data_dir=benchmarks --text=data/words

Each byte trigram of ' word ' has m = 10 of v buckets (--num_buckets; theirs 8,192): 8 are hashes of its own, 2 of the
trigram of the word in lower case. Into the decoder goes the sum of the rows of a word's buckets, from a v x d matrix;
out of it comes, by a second one, a logit a bucket. Loss: binary cross-entropy, the mean over all v, a word's own with
weight 300. Score of a word: the mean of log sigmoid(logit) over its buckets, where the authors have a normalised dot
product; of an answer: the sum of its words'. Scores rank a dictionary, the 100,000 most frequent words; they are no
probabilities, so there are no nats (nan in train.py's log), and only tasks that rank answers are compared. A word
outside the dictionary is read, learned and scored as any, only not ranked: bins have an id for each word of the text,
eval makes ids for new ones. White space is lost; punctuation stays at its word. bos is <s>.
"""

import functools
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import mmh3
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hashing  # noqa: E402
import model  # noqa: E402
from configurator import InputError, configure, settings_of  # noqa: E402

HASHES, LOWER = 10, 2  # m, and how many of them are of the lower case
POSITIVE = 300  # weight of a word's own buckets in the loss
DICTIONARY = 100_000  # words that are ranked
SPECIAL = ['<s>', '<unk>']


@functools.cache
def active_buckets(word, v):
    """The buckets of a word, (k,) int64, ascending."""
    active = set()
    for text, seeds in ((word, range(HASHES - LOWER)), (word.lower(), range(HASHES - LOWER, HASHES))):
        padded = f' {text} '.encode(errors='replace')
        active |= {mmh3.hash128(padded[k : k + 3], seed) % v for k in range(len(padded) - 2) for seed in seeds}
    return torch.tensor(sorted(active))


class Words:
    """hashing.get_tokenizer of a file of write_words; new words get ids as they come. It gives itself to TFree."""

    def __init__(self, name, get_tokenizer=hashing.get_tokenizer):
        tok = get_tokenizer(name)
        if tok.tokens[:2] != SPECIAL:
            raise InputError(f"tokenizer '{name}' is no list of words; make one: python study/tfree.py words")
        self.name, self.tokens, self.bos, self.pad = tok.name, list(tok.tokens), tok.bos, tok.pad
        self.split, self.size = tok.json.pre_tokenizer.pre_tokenize_str, len(tok.tokens)
        self.ids = {word: i for i, word in enumerate(self.tokens)}
        TFree.words = self

    def encode(self, texts):
        found = [[word for word, _ in self.split(text)] for text in texts]
        for word in dict.fromkeys(word for words in found for word in words if word not in self.ids):
            self.ids[word] = len(self.tokens)
            self.tokens.append(word)
        return [[self.ids[word] for word in words] for words in found]


class TFree(model.MHF):
    """A model of the Words that were opened last: inputs and targets are their ids (N, T, 1)."""

    def __init__(self, config, table=None, gaps=()):
        super().__init__(config, table, gaps)
        self.encoder, self.head = None, torch.nn.Linear(config.hidden_size, config.num_buckets, bias=False)
        torch.nn.init.normal_(self.head.weight, std=0.02)

    def sign(self, ids):
        return ids[..., None]

    def active(self, ids):
        """Word ids (n,) -> all their buckets, word by word; whose each is; where each word's begin."""
        found = [active_buckets(self.words.tokens[i], self.config.num_buckets) for i in ids.tolist()]
        counts = torch.tensor([len(buckets) for buckets in found])
        parts = torch.cat(found), torch.arange(len(found)).repeat_interleave(counts), counts.cumsum(0) - counts
        return [part.to(ids.device) for part in parts]

    def hidden_states(self, x, positions=None, mask=None):
        """x (N, T, 1) -> h (N, T, d), after the final norm; positions and mask as MHF's."""
        if self.activation_checkpointing:
            raise InputError('activation_checkpointing=True: T-FREE keeps all activations; leave it out')
        buckets, _, begins = self.active(x.flatten())
        e = F.embedding_bag(buckets, self.embed.weight, begins, mode='sum').view(*x.shape[:2], -1)
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        rope = model.rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for layer in self.layers:
            e = layer(e, rope, mask)
        return self.norm(e)

    def both_losses(self, x, y):
        """Of each word (N, T): the loss, a sum over all v that is put right at the word's own; nan for nats."""
        logits = model.at_least_float32(self.head(self.hidden_states(x).flatten(0, 1)))  # (N * T, v)
        buckets, rows, _ = self.active(y.flatten())
        own = logits[rows, buckets]
        corrected = F.softplus(logits).sum(1).index_add(0, rows, POSITIVE * F.softplus(-own) - F.softplus(own))
        bce = corrected.view(x.shape[:2]) / logits.shape[1]
        return bce, torch.nan * bce

    def forward(self, x, y):
        return self.both_losses(x, y)[0].mean()

    def compile(self, by_layer=False, **options):
        """The layers alone: a word's buckets are looked up in Python."""
        for layer in self.layers:
            layer.compile(**options)

    @torch.no_grad()
    def predict(self, h, ids):
        """h (n, d), words (n,) -> the score of each (n,), and nan twice for what only probabilities have."""
        buckets, rows, _ = self.active(ids)
        logp = F.logsigmoid(model.at_least_float32(self.head(h)))[rows, buckets]
        score = logp.new_zeros(len(ids)).index_add(0, rows, logp) / rows.bincount()
        return score, *(torch.nan * score).expand(2, -1)

    @torch.no_grad()
    def ranks(self, h, ids):
        """h (n, d), words (n,) -> how many words of the dictionary score above each, by more than rounding."""
        buckets, _, begins = self.active(torch.arange(self.words.size, device=h.device)[2 : DICTIONARY + 2])
        logp = F.logsigmoid(model.at_least_float32(self.head(h))).T.contiguous()  # (v, n)
        scores = F.embedding_bag(buckets, logp, begins, mode='mean')  # (words, n)
        return (scores > self.predict(h, ids)[0] + 1e-5).sum(0)


def settings(script, used):
    """The command line's, by the names, defaults and checks of a script, of whose settings only these are `used`."""
    defaults = settings_of(script)
    given = configure(dict(defaults, __file__=script, __name__='__main__', __doc__=__doc__))
    if other := [key for key, default in defaults.items() if given[key] != default and key not in used]:
        raise InputError(f'{", ".join(other)}: of {script}, T-FREE has only {", ".join(sorted(used))}')
    return given


def write_words():
    """Writes --tokenizer, a tokenizer.json of all words of --dataset, the most frequent first."""
    from mhf.sources import Source, documents

    s, split, counts = settings('prepare.py', {'dataset', 'tokenizer'}), pre_tokenizers.WhitespaceSplit(), Counter()
    if not s['tokenizer'].endswith('.json'):
        raise InputError(f'tokenizer={s["tokenizer"]}: name a file *.json to write')
    for text, _ in documents(Source(s['dataset'])):
        counts.update(word for word, _ in split.pre_tokenize_str(text))
    words = SPECIAL + [word for word, _ in counts.most_common() if word not in SPECIAL]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[1]))
    made.pre_tokenizer = split
    made.add_special_tokens(SPECIAL)
    made.save(s['tokenizer'])
    share = sum(count for _, count in counts.most_common(DICTIONARY)) / max(1, counts.total())
    print(f'{len(counts):,} words; the first {DICTIONARY:,} are {share:.2%} of {counts.total():,} in the text')


def train():
    """train.py with TFree in MHF's place."""
    sys.argv = ['train.py', *sys.argv[1:], '--num_hashes=1', '--single_id', '--loss=product', '--bins=ids']
    runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')


def evaluate():
    """The paper's tasks but LAMBADA, of which it has no T-FREE; with --text, bins, also ranks of held-out words."""
    from lm_eval.utils import make_table

    from mhf import tasks
    from mhf.bins import held_out_split
    from mhf.lm import open_lm

    s = settings('eval.py', {'out_dir', 'device', 'dtype', 'data_dir', 'limit', 'text'})
    lm = open_lm(s['out_dir'], device=s['device'], dtype=s['dtype'])
    if s['text']:
        m, T = lm.model, lm.max_length
        ids = torch.tensor(held_out_split(Path(s['text']), lm.tok)[0], device=lm.device)
        with lm.autocast(), torch.no_grad():
            blocks = ids.unfold(0, T + 1, T)[: 8192 // T]
            ranks = torch.cat([m.ranks(m.hidden_states(m.sign(b[None, :-1]))[0], b[1:]) for b in blocks])
        found = f'first {(ranks < 1).double().mean():.2%}, among ten {(ranks < 10).double().mean():.2%}'
        print(f'{len(ranks):,} held-out words, ranked: {found}, median rank {ranks.median() + 1:,}')
    names = [task for task in tasks.PAPER if 'lambada' not in task]
    results = tasks.run_tasks(lm, *tasks.load_tasks(names, s['data_dir'], s['limit']), s['limit'])
    Path(s['out_dir'], 'tasks.json').write_text(json.dumps({k: results[k] for k in ('results', 'n-samples')}))
    notes = [f'{task}: {"; ".join(note)}' for task, note in results['notes'].items()]
    print(make_table(results), 'T-FREE: acc and acc_norm of scores that only rank', *notes, sep='\n')


COMMANDS = dict(words=write_words, train=train, eval=evaluate)
if __name__ == '__main__':
    if sys.argv[1:] in (['--help'], ['-h']):
        print(__doc__.strip())
        sys.exit()
    sys.argv = sys.argv[1:] or ['']
    if sys.argv[0] not in COMMANDS:
        raise InputError(f"command '{sys.argv[0]}': must be one of {', '.join(COMMANDS)}")
    # before another module takes these names
    hashing.get_tokenizer, model.MHF = Words, TFree
    COMMANDS[sys.argv[0]]()
