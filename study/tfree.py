"""
T-FREE (arXiv 2406.19223), the paper's baseline without a tokenizer: a word is the set of its trigrams' buckets.

    $ python -m study.tfree words --dataset=edu.jsonl.xz --tokenizer=data/words.json   # words between white space
    $ python prepare.py --dataset=edu.jsonl.xz --tokenizer=data/words.json --data_format=ids --data_dir=data/words
    $ python -m study.tfree train config/mhf_tiny.py --tokenizer=data/words.json --data_dir=data/words
    $ python -m study.tfree eval --out_dir=out/mhf_tiny --data_dir=benchmarks

Each byte trigram of ' word ' has m = 10 of v buckets (--num_buckets; the authors use 8,192): 8 are hashes of the
trigram, 2 are hashes of the trigram of the word in lower case. The decoder reads the sum of the rows of a word's
buckets, from a v x d matrix; a second matrix computes a logit per bucket. The loss is binary cross-entropy, averaged
over all v buckets, with weight 300 on the word's own buckets. The score of a word is the mean of log sigmoid(logit)
over its buckets (the authors use a normalized dot product); the score of an answer is the sum over its words. Scores
are not probabilities, so there are no nats, and only tasks that rank answers are evaluated. White space is not modeled,
and punctuation is part of its word.

words, train and eval take settings of prepare.py, train.py and eval.py. train is one process, without gradient
accumulation and without resuming; it follows train.py in initialization, order of blocks, optimizer and learning rate.
"""

import functools
import json
import math
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import mmh3
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm

from configurator import InputError, configure, install_excepthook, settings_of
from mhf.checkpoint import Checkpoints, load_checkpoint
from mhf.data import block_indices, data_identity, open_bins, prefetch
from mhf.runtime import init_distributed, pick_dtype
from mhf.sources import read_documents
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint
from model import MHF, MHFConfig, rope_angles, upcast

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


def write_words():
    """Writes --tokenizer, a tokenizer.json of all words of --dataset, the most frequent first."""
    s = parse_settings('prepare.py', ('dataset', 'tokenizer'))
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


class TFree(MHF):
    """
    Reads and predicts word ids (N, T, 1). Its config is the Standard model's, whose signatures are ids, with v =
    num_buckets. `words`, a Words, must be set after construction.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        v = config.num_buckets
        self.words = None
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
        rope = rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for layer in self.layers:
            e = layer(e, rope, mask)
        return self.norm(e)

    def loss_per_word(self, x, y):
        """x, y (N, T, 1) -> (N, T). Sums over all v buckets as if none were active, and corrects the active ones."""
        logits = upcast(self.head(self.hidden_states(x).flatten(0, 1)))  # (N * T, v)
        buckets, rows, _ = self.active(y.flatten())
        active = logits[rows, buckets]
        correction = POSITIVE * F.softplus(-active) - F.softplus(active)
        summed = F.softplus(logits).sum(1).index_add(0, rows, correction)
        return summed.view(x.shape[:2]) / logits.shape[1]

    def forward(self, x, y):
        return self.loss_per_word(x, y).mean()

    @torch.no_grad()
    def predict(self, h, ids):
        """h (n, d), words (n,) -> the score of each (n,), and nan twice for what only probabilities have."""
        buckets, rows, _ = self.active(ids)
        logp = F.logsigmoid(upcast(self.head(h)))[rows, buckets]
        score = logp.new_zeros(len(ids)).index_add(0, rows, logp) / rows.bincount()
        return score, *(torch.nan * score).expand(2, -1)


# -----------------------------------------------------------------------------
# training

# the settings of train.py that T-FREE supports
SUPPORTED = (
    'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'hidden_size', 'intermediate_size', 'num_buckets',
    'batch_size', 'block_size', 'seed', 'dataset', 'tokenizer', 'data_dir', 'out_dir',
    'learning_rate', 'embedding_lr_mult', 'weight_decay', 'beta1', 'beta2', 'grad_clip', 'max_steps', 'warmup_steps',
    'lr_decay_steps', 'eval_interval', 'device', 'dtype', 'deterministic',
)  # fmt: skip


def parse_settings(script, supported):
    """The settings of a script from the command line. Raises InputError for flags that T-FREE does not support."""
    for arg in sys.argv[1:]:
        name, _, _ = arg.removeprefix('--').partition('=')
        if arg.startswith('--') and name in settings_of(script) and name not in supported:
            raise InputError(f'--{name}: T-FREE does not support this setting of {script}; remove it')
    scope = dict(settings_of(script), __file__=script, __name__='__main__', __doc__=__doc__)
    return SimpleNamespace(**configure(scope))


def get_lr(s, step):
    """The learning rate at a step: linear warm-up, then cosine to 0."""
    if step < s.warmup_steps:
        return s.learning_rate * step / s.warmup_steps
    done = min(1.0, (step - s.warmup_steps) / ((s.lr_decay_steps or s.max_steps) - s.warmup_steps))
    return s.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def get_batch(model, bins, starts):
    """Blocks of block_size + 1 words at offsets `starts` -> inputs and targets, each (n, T, 1), on the device."""
    ids = np.stack([bins[start : start + model.config.block_size + 1] for start in starts]).astype(np.int64)
    x = torch.from_numpy(ids).to(model.embed.weight.device)[..., None]
    return x[:, :-1], x[:, 1:]


def configure_optimizer(model, s):
    """AdamW with weight decay on matrices only, and a learning-rate multiplier for the embedding."""
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p is not model.embed.weight]
    groups = [
        dict(params=[model.embed.weight], weight_decay=s.weight_decay, lr_mult=s.embedding_lr_mult),
        dict(params=matrices, weight_decay=s.weight_decay, lr_mult=1.0),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0, lr_mult=1.0),
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), eps=1e-8)


@torch.no_grad()
def evaluate(model, val_bins, batch_size):
    """The mean loss over the complete blocks of the held-out words."""
    T = model.config.block_size
    starts = range(0, len(val_bins) - T, T)
    batches = [get_batch(model, val_bins, starts[k : k + batch_size]) for k in range(0, len(starts), batch_size)]
    return torch.cat([model.loss_per_word(x, y).double().flatten() for x, y in batches]).mean().item()


def new_model(s, meta):
    """A TFree for training, with the words of the data. Raises InputError."""
    fields = {k: v for k, v in vars(s).items() if k in MHFConfig.__annotations__}
    config = MHFConfig(**fields, vocab_size=meta['vocab_size'], pad_id=meta['pad_id'])
    torch.manual_seed(s.seed)
    with torch.device(s.device):  # a GPU draws other numbers than a CPU
        model = TFree(config)
        model.init_weights()
    model.words = Words(s.tokenizer)
    if tokenizer_fingerprint(model.words) != meta['tokenizer_sha256']:
        raise InputError(f'{s.tokenizer} has other words than the data; rerun prepare.py with it')
    return model.to(s.device)


def train():
    """Trains a TFree. Every eval_interval steps it validates and saves a checkpoint."""
    sys.argv += ['--num_hashes=0', '--data_format=ids']
    s = parse_settings('train.py', (*SUPPORTED, 'num_hashes', 'data_format'))
    _, world_size, s.device = init_distributed(s.device, s.deterministic)
    if world_size > 1:
        raise InputError('T-FREE trains in one process; start it without torchrun')
    s.dtype = pick_dtype(s.dtype, s.device)
    train_bins, val_bins, meta = open_bins(vars(s))
    words = min(len(train_bins), len(val_bins))
    if words <= s.block_size:
        raise InputError(f'block_size={s.block_size}: a split of the data has {words:,} words; prepare more')
    checkpoints = Checkpoints(s.out_dir, 0)
    if checkpoints.list():
        raise InputError(f'{s.out_dir} has a checkpoint; choose another --out_dir')
    model = new_model(s, meta)
    optimizer = configure_optimizer(model, s)
    data = data_identity(meta, None, train_bins)
    autocast = torch.autocast(torch.device(s.device).type, torch.bfloat16, enabled=s.dtype == 'bfloat16')
    checkpoints.make_folder()
    log = open(Path(s.out_dir, 'log.jsonl'), 'w', buffering=1)
    num_blocks = (len(train_bins) - 1) // s.block_size
    orders = (block_indices(step, s.batch_size, num_blocks, s.seed) for step in range(s.max_steps))
    batches = prefetch(get_batch(model, train_bins, blocks * s.block_size) for blocks in orders)
    for step in tqdm(range(s.max_steps), desc='train', unit='step', delay=1, mininterval=1):
        lr = get_lr(s, step)
        for group in optimizer.param_groups:
            group['lr'] = lr * group['lr_mult']
        x, y = next(batches)
        with autocast:
            loss = model(x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        event = dict(step=done, tokens=done * x.numel(), loss=loss.item(), lr=lr, grad_norm=norm.item())
        if done % s.eval_interval == 0 or done == s.max_steps:
            with autocast:
                event['val_loss'] = evaluate(model, val_bins, s.batch_size)
            tqdm.write(f'step {done}: loss {event["loss"]:.4f}, validation loss {event["val_loss"]:.4f}')
            state = dict(model=model.state_dict(), model_config=asdict(model.config), optimizer=optimizer.state_dict())
            state |= dict(config=vars(s), step=done, best_val_loss=event['val_loss'], data=data, add_bos=True)
            checkpoints.save(state, False)
        log.write(json.dumps(event) + '\n')
    checkpoints.wait()


# -----------------------------------------------------------------------------
# evaluation


def open_lm(s):
    """The MHFLM of the run in out_dir, with its words. Raises InputError."""
    from mhf.lm import MHFLM

    if not s.out_dir:
        raise InputError('out_dir is not given; name the folder of a run, like --out_dir=out/mhf_tiny')
    _, _, device = init_distributed(s.device)
    model, ckpt = load_checkpoint(Path(s.out_dir) / 'ckpt.pt', TFree)
    model.words = Words(ckpt['data']['tokenizer'])
    if tokenizer_fingerprint(model.words) != ckpt['data']['tokenizer_sha256']:
        raise InputError(f"tokenizer '{model.words.name}' has other words than {s.out_dir}; restore the file")
    # an id is its own signature, also that of a new word
    model.signatures = torch.arange(MAX_WORDS)[:, None]
    return MHFLM(model.to(device).eval(), model.words, model.words.bos, pick_dtype(s.dtype, device))


def evaluate_tasks():
    """The paper's tasks except LAMBADA, for which the paper has no T-FREE score."""
    from lm_eval.utils import make_table

    from mhf.lm import PAPER, load_tasks, run_tasks

    s = parse_settings('eval.py', ('out_dir', 'device', 'dtype', 'data_dir', 'limit'))
    lm = open_lm(s)
    loaded, notes = load_tasks([task for task in PAPER if 'lambada' not in task], s.data_dir)
    results = run_tasks(lm, loaded, notes, s.limit)
    recorded = {key: results[key] for key in ('results', 'n-samples')}
    Path(s.out_dir, 'tasks.json').write_text(json.dumps(recorded))
    print(make_table(results))
    print('T-FREE: acc and acc_norm of scores that only rank')
    for task, note in results['notes'].items():
        print(f'{task}: {"; ".join(note)}')


COMMANDS = dict(words=write_words, train=train, eval=evaluate_tasks)


def main():
    install_excepthook()
    if sys.argv[1:] in (['--help'], ['-h']):
        print(__doc__.strip())
        return
    # the rest of the command line are settings
    command = sys.argv.pop(1) if sys.argv[1:] else ''
    if command not in COMMANDS:
        raise InputError(f"command '{command}': must be one of {', '.join(COMMANDS)}")
    COMMANDS[command]()


if __name__ == '__main__':
    main()
