"""
T-FREE (arXiv 2406.19223), the paper's baseline without a tokenizer: a word is the set of its trigrams' buckets.

    $ python -m study.tfree words --dataset=edu.jsonl.xz --tokenizer=words.json   # words between white space, counted
    $ python prepare.py --dataset=edu.jsonl.xz --tokenizer=words.json --data_format=ids --data_dir=data/words
    $ python -m study.tfree train config/mhf_tiny.py --tokenizer=words.json --data_dir=data/words --num_buckets=8192
    $ python -m study.tfree eval --out_dir=out/mhf_tiny --data_dir=benchmarks --text=data/words

Each byte trigram of ' word ' has m = 10 of v buckets (--num_buckets; theirs 8,192): 8 are hashes of the trigram itself,
2 are hashes of the trigram of the word in lower case. The decoder reads the sum of the rows of a word's buckets, from a
v x d matrix. A second matrix gives a logit for each bucket. The loss is binary cross-entropy, the mean over all v
buckets, in which a word's own have weight 300. The score of a word is the mean of log sigmoid(logit) over its buckets,
where the authors have a normalised dot product; the score of an answer is the sum of its words'. Scores rank the words
of a dictionary, the 100,000 most frequent ones. They are no probabilities, so there are no nats (nan in the log), and
only tasks that rank answers are compared. A word outside the dictionary is read, learned and scored like any other, but
it is not ranked: bins have an id for each word of the text, and eval makes ids for new ones. White space is lost, and
punctuation stays at its word. bos is <s>.

words, train and eval take the settings of prepare.py, train.py and eval.py that T-FREE has a use for. A training that
was stopped goes on from its newest checkpoint with --init_from=resume.
"""

import contextlib
import functools
import json
import math
import sys
import time
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

from configurator import InputError, check_numbers, configure, settings_of
from mhf.bins import block_indices, open_bins, prefetch
from mhf.checkpoint import Checkpoints, check_data, check_settings, load_checkpoint
from mhf.device import pick_device, pick_dtype, use_device
from mhf.distributed import World
from mhf.meta import checked_table, data_folder, identity, load_meta
from mhf.released import init_model
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint
from model import MHF, MHFConfig, rope_angles, upcast

HASHES = 10  # m, of a trigram
LOWER = 2  # how many of them are of the lower case
POSITIVE = 300  # weight of a word's own buckets in the loss
DICTIONARY = 100_000  # words that are ranked
SPECIAL = ['<s>', '<unk>']

# -----------------------------------------------------------------------------
# words


@functools.cache
def active_buckets(word, v):
    """The buckets of a word, (k,) int64, ascending."""
    active = set()
    of_its_own = range(HASHES - LOWER)
    of_lower_case = range(HASHES - LOWER, HASHES)
    for text, seeds in ((word, of_its_own), (word.lower(), of_lower_case)):
        padded = f' {text} '.encode(errors='replace')
        for k in range(len(padded) - 2):
            active |= {mmh3.hash128(padded[k : k + 3], seed) % v for seed in seeds}
    return torch.tensor(sorted(active))


class Words:
    """The tokenizer of a file that write_words has made. A new word gets an id when it is first encoded."""

    def __init__(self, name):
        tok = get_tokenizer(name)
        if tok.tokens[:2] != SPECIAL:
            raise InputError(f"tokenizer '{name}' is no list of words; make one: python -m study.tfree words")
        self.name = tok.name
        self.tokens = list(tok.tokens)
        self.bos = tok.bos
        self.pad = tok.pad
        self.split = tok.json.pre_tokenizer.pre_tokenize_str
        # without the new words
        self.size = len(tok.tokens)
        self.ids = {word: i for i, word in enumerate(self.tokens)}

    def encode(self, texts):
        return [[self.id_of(word) for word, _ in self.split(text)] for text in texts]

    def id_of(self, word):
        if word not in self.ids:
            self.ids[word] = len(self.tokens)
            self.tokens.append(word)
        return self.ids[word]


# -----------------------------------------------------------------------------
# the model


class TFree(MHF):
    """
    A model that reads and predicts ids (N, T, 1) of `words`, a Words, in place of signatures. Whoever makes a TFree, or
    opens one from a checkpoint, sets its `words`.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        self.words = None
        self.encoder = None
        self.head = torch.nn.Linear(config.hidden_size, config.num_buckets, bias=False)
        torch.nn.init.normal_(self.head.weight, std=0.02)

    def sign(self, ids):
        return ids[..., None]

    def active(self, ids):
        """
        Word ids (n,) -> the buckets of all words, one word after the other (k,); to which of the n words each bucket
        belongs (k,); and where the buckets of each word begin (n,).
        """
        of_words = [active_buckets(self.words.tokens[i], self.config.num_buckets) for i in ids.tolist()]
        counts = torch.tensor([len(buckets) for buckets in of_words])
        rows = torch.arange(len(of_words)).repeat_interleave(counts)
        begins = counts.cumsum(0) - counts
        return torch.cat(of_words).to(ids.device), rows.to(ids.device), begins.to(ids.device)

    def hidden_states(self, x, positions=None, mask=None):
        """x (N, T, 1) -> h (N, T, d), after the final norm; positions and mask are as in MHF.hidden_states."""
        buckets, _, begins = self.active(x.flatten())
        e = F.embedding_bag(buckets, self.embed.weight, begins, mode='sum').view(*x.shape[:2], -1)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rope_angles(positions, self.config, torch.promote_types(e.dtype, torch.float32))
        for layer in self.layers:
            e = layer(e, rope, mask)
        return self.norm(e)

    def token_losses(self, x, y):
        """
        x, y (N, T, 1) -> two (N, T): the loss of each word, and nan for its nats. The sum over all v buckets is taken
        as if no bucket were the word's, and is then corrected at those that are.
        """
        logits = upcast(self.head(self.hidden_states(x).flatten(0, 1)))  # (N * T, v)
        buckets, rows, _ = self.active(y.flatten())
        own = logits[rows, buckets]
        correction = POSITIVE * F.softplus(-own) - F.softplus(own)
        summed = F.softplus(logits).sum(1).index_add(0, rows, correction)
        bce = summed.view(x.shape[:2]) / logits.shape[1]
        return bce, torch.nan * bce

    def forward(self, x, y):
        return self.token_losses(x, y)[0].mean()

    @torch.no_grad()
    def predict(self, h, ids):
        """h (n, d), words (n,) -> the score of each (n,), and nan twice for what only probabilities have."""
        buckets, rows, _ = self.active(ids)
        logp = F.logsigmoid(upcast(self.head(h)))[rows, buckets]
        score = logp.new_zeros(len(ids)).index_add(0, rows, logp) / rows.bincount()
        return score, *(torch.nan * score).expand(2, -1)

    @torch.no_grad()
    def ranks(self, h, ids):
        """h (n, d), words (n,) -> how many words of the dictionary score above each, by more than rounding."""
        dictionary = torch.arange(self.words.size, device=h.device)[len(SPECIAL) : len(SPECIAL) + DICTIONARY]
        buckets, _, begins = self.active(dictionary)
        logp = F.logsigmoid(upcast(self.head(h))).T.contiguous()  # (v, n)
        scores = F.embedding_bag(buckets, logp, begins, mode='mean')  # (words, n)
        own_scores, _, _ = self.predict(h, ids)
        return (scores > own_scores + 1e-5).sum(0)


# -----------------------------------------------------------------------------
# training

# What train.py has to be told for T-FREE's model and bins, whatever the config says.
ALWAYS = ('--num_hashes=1', '--single_id', '--loss=product', '--data_format=ids')
# The settings of train.py that T-FREE has. A resumed run keeps these,
KEPT = (
    'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'hidden_size', 'intermediate_size',
    'num_hashes', 'num_buckets', 'single_id', 'embedding_std', 'loss', 'tokenizer',
    'batch_size', 'block_size', 'seed', 'embedding_lr_mult', 'weight_decay', 'beta1', 'beta2',
)  # fmt: skip
# and may change these.
FREE = (
    'out_dir', 'eval_interval', 'init_from', 'auto_resume', 'keep_checkpoints', 'dataset', 'data_dir', 'data_format',
    'micro_batch_size', 'learning_rate', 'max_steps', 'warmup_steps', 'lr_decay_steps', 'grad_clip',
    'device', 'dtype', 'deterministic',
)  # fmt: skip


class Training:
    """
    A run of one process by the settings of train.py. Its initial weights, batches, optimizer, schedule, validation,
    log.jsonl and checkpoints are those of train.py.
    """

    def __init__(self, config):
        """Opens the bins and makes the model, or reads the newest checkpoint, before anything is written."""
        self.config = config
        self.s = s = SimpleNamespace(**config)
        world = World()
        if world.distributed:
            raise InputError('T-FREE trains in one process; start it without torchrun')
        self.accumulation = world.accumulation(s.batch_size, s.micro_batch_size)
        self.device = use_device(s.device, s.deterministic)
        self.checkpoints = Checkpoints(s.out_dir, s.keep_checkpoints)
        self.meta = load_meta(config)
        self.train_tokens = open_bins(config, self.meta, 'train')
        self.val_tokens = open_bins(config, self.meta, 'val')
        self.train_tokens.verify()
        self.val_tokens.verify()
        self.num_blocks = (len(self.train_tokens) - 1) // s.block_size
        if self.num_blocks < 1:
            too_few = f'{data_folder(config)} has {len(self.train_tokens):,} training tokens'
            raise InputError(f'block_size={s.block_size}: {too_few}')
        table = checked_table(config, self.meta)
        self.data = identity(self.meta, table)
        resumes = s.init_from == 'resume' or s.auto_resume and self.checkpoints.there()
        model, ckpt = init_model('resume' if resumes else 'scratch', self.checkpoints, TFree)
        if ckpt:
            self.check_resume(ckpt)
        self.start_step = ckpt['step'] if ckpt else 0
        self.best_val = ckpt['best_val'] if ckpt else math.inf
        self.dtype, _ = pick_dtype(s.dtype or (ckpt and ckpt['config']['dtype']), self.device)
        device_type = torch.device(self.device).type
        self.autocast = contextlib.nullcontext()
        if self.dtype == 'bfloat16':
            self.autocast = torch.autocast(device_type, torch.bfloat16)
        self.model = (model or self.new_model(table)).to(self.device)
        self.model.words = Words(s.tokenizer)
        groups = parameter_groups(self.model, s)
        fused = device_type in ('cuda', 'cpu')
        betas = (s.beta1, s.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=betas, eps=1e-8, fused=fused)
        if ckpt:
            self.optimizer.load_state_dict(ckpt['optimizer'])

    def check_resume(self, ckpt):
        """Raises InputError where the checkpoint is of other settings or data, or has made all steps already."""
        source = self.checkpoints.last_path
        max_steps = self.s.max_steps
        check_settings(ckpt, source, {name: self.config[name] for name in KEPT}, free=())
        check_data(ckpt, source, self.data, self.s.out_dir)
        if ckpt['step'] >= max_steps and not self.s.auto_resume:
            raise InputError(f'{source} is at step {ckpt["step"]} already; max_steps={max_steps} leaves nothing to do')

    def new_model(self, table):
        """A TFree of random weights, which the seed names."""
        torch.manual_seed(self.s.seed)
        fields = {name: value for name, value in self.config.items() if name in MHFConfig.__annotations__}
        model_config = MHFConfig(vocab_size=self.meta['vocab_size'], pad_id=self.meta['pad_id'], **fields)
        with torch.device(self.device):  # a GPU draws other numbers than a CPU
            return TFree(model_config, table, self.meta['unused_ids'])

    def get_lr(self, step):
        """The rate of the update that leads from `step` to step + 1: linear warm-up, then a cosine to 0."""
        s = self.s
        if step < s.warmup_steps:
            return s.learning_rate * step / s.warmup_steps
        schedule_steps = s.lr_decay_steps or s.max_steps
        done = min(1.0, (step - s.warmup_steps) / (schedule_steps - s.warmup_steps))
        return s.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def read_batch(self, split, starts):
        """The sequences of block_size + 1 words that begin at each of `starts` in the Bins `split`: ids (n, T + 1)."""
        ids = np.stack([split[start : start + self.s.block_size + 1] for start in starts])
        return torch.from_numpy(ids.astype(np.int64))

    def inputs_and_targets(self, ids):
        """What read_batch gives -> inputs and targets, each (n, T, 1), on the device."""
        x = self.model.sign(ids.to(self.device))
        return x[:, :-1], x[:, 1:]

    def micro_batches(self):
        """The micro-batches from start_step on, in their order."""
        s = self.s
        for step in range(self.start_step, s.max_steps):
            blocks = block_indices(step, s.batch_size, self.num_blocks, s.seed)
            for micro in blocks.reshape(self.accumulation, s.micro_batch_size):
                yield self.read_batch(self.train_tokens, micro * s.block_size)

    def update(self, batches, lr):
        """One update at the rate lr, from the next micro-batches -> its loss, and the norm of its gradient."""
        for group in self.optimizer.param_groups:
            group['lr'] = lr * group.get('rate', 1)
        mean_loss = torch.zeros((), device=self.device)
        for _ in range(self.accumulation):
            x, y = self.inputs_and_targets(next(batches))
            with self.autocast:  # micro-batches are equally long, so the mean of their means is the mean of all words
                micro_loss = self.model(x, y) / self.accumulation
            micro_loss.backward()
            mean_loss += micro_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip or math.inf).item()
        loss = mean_loss.item()
        if not math.isfinite(loss + norm):
            wrong = f'loss {loss}, gradient norm {norm}'
            raise InputError(f'{wrong}; stopped before the update, {self.checkpoints.kept()}')
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    @torch.no_grad()
    def evaluate(self):
        """Validates on all held-out words, in order: what train.py logs, where nats and bits are nan."""
        s = self.s
        n = len(self.val_tokens) - 1
        starts = list(range(0, n, s.block_size))
        whole = n // s.block_size
        batches = [starts[k : min(k + s.micro_batch_size, whole)] for k in range(0, whole, s.micro_batch_size)]
        if whole < len(starts):
            batches.append(starts[whole:])  # the last, shorter block
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            x, y = self.inputs_and_targets(self.read_batch(self.val_tokens, batch))
            with self.autocast:
                losses, _ = self.model.token_losses(x, y)
            total += losses.double().sum().cpu()
        return dict(val_loss=(total / n).item(), val_nats=math.nan, val_bpb=math.nan)

    def log(self, **event):
        with open(Path(self.s.out_dir, 'log.jsonl'), 'a') as f:
            f.write(json.dumps(event) + '\n')

    def save(self, step, best):
        """Writes a checkpoint, a dict of the entries mhf.checkpoint.PARTS."""
        state = dict(
            model=self.model.state_dict(),
            model_config=asdict(self.model.config),
            optimizer=self.optimizer.state_dict(),
            config=self.config | dict(dtype=self.dtype),
            step=step,
            best_val=self.best_val,
            data=self.data,
        )
        self.checkpoints.save(state, best)

    def run(self):
        """Trains to the last step. Every eval_interval steps it validates and writes a checkpoint."""
        s = self.s
        self.checkpoints.make_folder()
        interface, decoder = self.model.num_params()
        print(f'T-FREE: {interface:,} parameters of the embedding interface + {decoder:,} of the decoder')
        print(f'steps {self.start_step:,} to {s.max_steps:,} on {self.device}, {self.dtype}')
        batches = prefetch(self.micro_batches())
        bar = tqdm(range(self.start_step, s.max_steps), desc='train', unit='step', delay=1, mininterval=1)
        for step in bar:
            self.checkpoints.raise_if_failed()
            began = time.perf_counter()
            lr = self.get_lr(step)
            loss, norm = self.update(batches, lr)
            speed = s.batch_size * s.block_size / (time.perf_counter() - began)
            done = step + 1
            words = done * s.batch_size * s.block_size
            self.log(step=done, tokens=words, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(speed, 1))
            bar.set_postfix_str(f'loss {loss:.3f}, {speed:,.0f} words/s', refresh=False)
            if done % s.eval_interval == 0 or done == s.max_steps:
                result = self.evaluate()
                self.log(step=done, tokens=words, **result)
                best = result['val_loss'] < self.best_val
                self.best_val = min(self.best_val, result['val_loss'])
                best_so_far = ' (best)' if best else ''
                tqdm.write(f'step {done}: validation loss {result["val_loss"]:.4f}{best_so_far}')
                self.save(done, best)
        self.checkpoints.wait()


def check(config):
    """Raises InputError where a setting is outside its range."""
    check_numbers(
        config,
        above_zero='batch_size micro_batch_size block_size max_steps eval_interval learning_rate embedding_lr_mult',
        not_negative='warmup_steps lr_decay_steps weight_decay grad_clip keep_checkpoints',
        below=dict(seed=2**64, beta1=1, beta2=1),
    )
    warmup_steps = config['warmup_steps']
    schedule_steps = config['lr_decay_steps'] or config['max_steps']
    if warmup_steps >= schedule_steps:
        raise InputError(f'warmup_steps={warmup_steps} leaves nothing of the {schedule_steps} steps of the schedule')
    if config['init_from'] not in ('scratch', 'resume'):
        raise InputError(f'init_from={config["init_from"]}: T-FREE begins from scratch, or goes on with resume')


def parameter_groups(model, s):
    """AdamW's groups: matrices, which decay; others, which do not; and E, where it learns at a rate of its own."""
    E = model.embed.weight
    matrices = [p for p in model.parameters() if p.dim() >= 2 and (p is not E or s.embedding_lr_mult == 1)]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=s.weight_decay), dict(params=others, weight_decay=0.0)]
    if s.embedding_lr_mult != 1:
        groups.insert(0, dict(params=[E], weight_decay=s.weight_decay, rate=s.embedding_lr_mult))
    return groups


# -----------------------------------------------------------------------------
# the commands


def settings(script, used):
    """
    The settings that the command line gives, with the names, defaults and checks of a script. Raises InputError for a
    setting of the script that is not among `used`.
    """
    defaults = settings_of(script)
    given = configure(dict(defaults, __file__=script, __name__='__main__', __doc__=__doc__))
    unused = [name for name, default in defaults.items() if given[name] != default and name not in used]
    if unused:
        raise InputError(f'{", ".join(unused)}: of {script}, T-FREE has only {", ".join(sorted(used))}')
    return given


def write_words():
    """Writes --tokenizer, a tokenizer.json of all words of --dataset, the most frequent first."""
    from mhf.sources import Source, documents

    s = settings('prepare.py', {'dataset', 'tokenizer'})
    if not s['tokenizer'].endswith('.json'):
        raise InputError(f'tokenizer={s["tokenizer"]}: name a file *.json to write')
    split = pre_tokenizers.WhitespaceSplit()
    counts = Counter()
    for text, _ in documents(Source(s['dataset'])):
        counts.update(word for word, _ in split.pre_tokenize_str(text))
    words = SPECIAL + [word for word, _ in counts.most_common() if word not in SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(s['tokenizer'])
    share = sum(count for _, count in counts.most_common(DICTIONARY)) / max(1, counts.total())
    print(f'{len(counts):,} words; the first {DICTIONARY:,} are {share:.2%} of {counts.total():,} in the text')


def train():
    """Trains a TFree by the settings of train.py."""
    sys.stdout.reconfigure(line_buffering=True)  # a file or a pipe, too, gets every line when it is printed
    # to the command line, because the last setting counts and load_meta says with it how to prepare the bins
    sys.argv.extend(ALWAYS)
    config = settings('train.py', KEPT + FREE)
    check(config)
    Training(config).run()


def open_run(s):
    """The MHFLM of the run in out_dir, with its own words. Raises InputError."""
    from mhf.lm import MHFLM

    if not s['out_dir']:
        raise InputError('out_dir is not given; name the folder of a run, like --out_dir=out/mhf_tiny')
    device = pick_device(s['device'])
    dtype, _ = pick_dtype(s['dtype'], device)
    # on a GPU it would plan anew, for tens of milliseconds, for every length of requests to score
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, ckpt = load_checkpoint(Path(s['out_dir']) / 'ckpt.pt', TFree)
    words = Words(ckpt['data']['tokenizer'])
    if tokenizer_fingerprint(words) != ckpt['data']['tokenizer_sha256']:
        raise InputError(f"tokenizer '{words.name}' has other words than those that {s['out_dir']} was trained on")
    model.words = words
    return MHFLM(model.to(device).eval(), words, words.bos, dtype)


@torch.no_grad()
def print_ranks(lm, folder):
    """Says how the words of a folder's held-out split are ranked, of the first 8,192 of them."""
    from mhf.bins import held_out_split

    model = lm.model
    T = lm.max_length
    ids, _ = held_out_split(folder, lm.tok)
    blocks = torch.tensor(ids, device=lm.device).unfold(0, T + 1, T)[: 8192 // T]
    of_blocks = []
    with lm.autocast():
        for block in blocks:
            h = model.hidden_states(model.sign(block[None, :-1]))[0]
            of_blocks.append(model.ranks(h, block[1:]))
    ranks = torch.cat(of_blocks)
    first = (ranks < 1).double().mean()
    among_ten = (ranks < 10).double().mean()
    median = ranks.median() + 1
    print(
        f'{len(ranks):,} held-out words, ranked: first {first:.2%}, among ten {among_ten:.2%}, median rank {median:,}'
    )


def evaluate():
    """The paper's tasks but LAMBADA, for which the paper has no T-FREE; with --text also ranks of held-out words."""
    from lm_eval.utils import make_table

    from mhf import tasks

    s = settings('eval.py', {'out_dir', 'device', 'dtype', 'data_dir', 'limit', 'text'})
    lm = open_run(s)
    if s['text']:
        print_ranks(lm, Path(s['text']))
    names = [task for task in tasks.PAPER if 'lambada' not in task]
    loaded, notes = tasks.load_tasks(names, s['data_dir'], s['limit'])
    results = tasks.run_tasks(lm, loaded, notes, s['limit'])
    to_keep = {key: results[key] for key in ('results', 'n-samples')}
    Path(s['out_dir'], 'tasks.json').write_text(json.dumps(to_keep))
    print(make_table(results))
    print('T-FREE: acc and acc_norm of scores that only rank')
    for task, note in results['notes'].items():
        print(f'{task}: {"; ".join(note)}')


COMMANDS = dict(words=write_words, train=train, eval=evaluate)


def main():
    if sys.argv[1:] in (['--help'], ['-h']):
        print(__doc__.strip())
        return
    # what is left of the command line are settings
    command = sys.argv.pop(1) if sys.argv[1:] else ''
    if command not in COMMANDS:
        raise InputError(f"command '{command}': must be one of {', '.join(COMMANDS)}")
    try:
        COMMANDS[command]()
    except KeyboardInterrupt:
        print('interrupted; train goes on with --init_from=resume from its newest checkpoint', file=sys.stderr)
        sys.exit(130)


if __name__ == '__main__':
    main()
