"""
Evaluates a checkpoint or a released model, on P(w) normalised over real tokens, beside the paper's published numbers.

    $ python eval.py --out_dir=out/mhf_1b                                     # the paper's ten tasks, from the hub
    $ python eval.py --out_dir=out/mhf_1b --data_dir=benchmarks               # the same from local files, no internet
    $ python eval.py --released=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe --revision=checkpoint-200000
    $ python eval.py --tasks=bits_per_byte --text=book.txt
    $ python eval.py --out_dir=out/expanded --before=out/base --tasks=bits_per_byte,piqa --text=ar.txt,en.txt
    $ python eval.py --tasks=card660 --data_dir=card660
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out/mhf_1b   # batches shared by 8 GPUs

Writes results.json beside the checkpoint (or to --save); an interrupted evaluation goes on where it stopped.
"""

import atexit
import csv
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import sys
import traceback
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from bins import Bins, read_meta
from checkpoint import open_model, pick_device
from configurator import InputError, configure, did_you_mean
from hashing import tokenizer_fingerprint
from plot import bars
from sources import ReadState, Source, batches

# what to evaluate
out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id
revision = ''  # of the hub id
tokenizer = ''  # '' is the one the checkpoint was trained with
# on what: paper | bits_per_byte | card660 | any of lm-eval's tasks or of eval_tasks/, several separated by commas
tasks = 'paper'
data_dir = ''  # local files instead of the hub; card660's folder
text = ''  # of bits_per_byte: text files, or folders of prepare.py, whose held-out split is read, separated by commas
before = ''  # an out_dir, released folder or hub id: the model before an expansion, for the same with it
limit = 0  # documents per task; 0 is all
bos = True  # bos before every context
# how
batch_size = 256  # contexts that go through the model at a time, at most: memory may hold fewer
seed = 1234  # of the few-shot examples
save = ''  # the results' file; '' is results.json beside the checkpoint
plot = False  # also draw the comparison, as .png beside the results' file
device = None
dtype = None

config = configure(globals())

HERE = Path(__file__).resolve().parent
# the paper's tasks; `column` is of its table, `file` is what local files are called
PAPER = {
    'lambada_openai': dict(shots=0, metric='acc', column='LAMBADA', file='lambada_openai'),
    'lambada_standard': dict(shots=0, metric='acc', column='LAMBADA', file='lambada_standard'),
    'arc_easy': dict(shots=5, metric='acc_norm', column='ARC-E', file='arc_easy'),
    'copa': dict(shots=0, metric='acc', column='COPA', file='copa'),
    'openbookqa': dict(shots=5, metric='acc_norm', column='OBQA', file='openbookqa'),
    'piqa': dict(shots=0, metric='acc', column='PIQA', file='piqa'),
    'hellaswag': dict(shots=0, metric='acc_norm', column='HellaSwag', file='hellaswag'),
    'race': dict(shots=0, metric='acc', column='RACE', file='race_high'),
    'sciq': dict(shots=0, metric='acc_norm', column='SciQ', file='sciq'),
    'social_iqa': dict(shots=5, metric='acc_norm', column='SIQA', file='social_i_qa'),
    'record': dict(shots=0, metric='f1', column='ReCoRD', file='record'),
}
# {model: row} of the paper's table: its columns, and the size and kind of the model
with open(HERE / 'eval_tasks' / 'published.csv', newline='') as f:
    PUBLISHED = {row.pop('model'): {k: float(v) for k, v in row.items()} for row in csv.DictReader(f)}
OURS = ('paper', 'bits_per_byte', 'card660')
# metrics that are shares; the first of these that a task has is shown
PERCENT = ('acc_norm', 'acc', 'f1', 'exact_match')
BAR = dict(leave=False, mininterval=0.5 if sys.stderr.isatty() else 20)


# -----------------------------------------------------------------------------
# scoring


def tokens_in_memory(model):
    """How many tokens may go through the model at a time, padding included."""
    c, device = model.config, model.embed.weight.device
    # on a CPU, padding costs more than a larger batch saves
    if device.type != 'cuda':
        return 2048
    # what an earlier model left to the allocator
    torch.cuda.empty_cache()
    # a forward pass holds 11 to 12 times this a token (fake tensors, 100M to 3B); the other half is for head and mask
    widest = max(c.coordinates * c.hidden_size, c.intermediate_size)
    return int(min(65536, torch.cuda.mem_get_info(device)[0] / 2 / (16 * widest)))


class Scorer:
    """
    log P of continuations and texts, and greedy text. Requests with the same context are one row: the context, then
    every continuation, each of which sees the context and itself only and goes on from the context's last position. A
    batch holds at most batch_size rows, and `tokens` tokens with their padding. Rank 0 makes the batches, gives one to
    each of torchrun's processes and takes the answers.
    """

    def __init__(self, model, bos, batch_size, tokens=None, dtype='float32', tok=None):
        self.model, self.bos, self.batch_size, self.tok = model, bos, batch_size, tok
        self.device = model.embed.weight.device
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, dtype == 'bfloat16')
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        of_each = [tokens or tokens_in_memory(model)] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(of_each, of_each[0])
        self.tokens = min(of_each)

    def share(self, work, batches):
        """Batches of items -> what the method called `work` gives for them, in order, as soon as it is known."""
        for first in range(0, len(batches), self.world_size):
            jobs = [(work, batch) for batch in batches[first : first + self.world_size]]
            # fewer batches than ranks are left at the end
            for answers in self.take_part(jobs + [(work, [])] * (self.world_size - len(jobs))):
                yield from answers

    def take_part(self, jobs=None):
        """On every rank: rank 0's jobs, a (method, batch) or None for each -> what each gives, on rank 0; or None."""
        if self.world_size == 1:
            return jobs[0] and [self.in_memory(*jobs[0])]
        job, answers = [None], [None] * self.world_size
        dist.scatter_object_list(job, jobs)
        if job[0] is None:
            return None
        try:
            answer = self.in_memory(*job[0])
        # rank 0 raises it, and nobody waits for one that is gone
        except Exception as e:
            e.add_note(f'rank {self.rank}: {traceback.format_exc()}')
            answer = e
        dist.gather_object(answer, None if self.rank else answers)
        for failed in (a for a in answers if isinstance(a, Exception)):
            raise failed
        return answers

    def in_memory(self, work, batch):
        """What the method gives for the batch, in halves where the whole does not fit."""
        try:
            return getattr(self, work)(batch) if batch else []
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise InputError(f'a single sequence does not fit {self.device}') from None
        half = len(batch) // 2
        return self.in_memory(work, batch[:half]) + self.in_memory(work, batch[half:])

    def __call__(self, requests, done=lambda k, result: None):
        """[(context ids, continuation ids)] -> [(log P, greedy?)]; done(k, result) as soon as each is known."""
        results = [None] * len(requests)
        for k, (logp, best, _) in self.by_token(requests, self.bos, 'scoring'):
            results[k] = logp.sum().item(), bool(best.all())
            done(k, results[k])
        return results

    def by_token(self, requests, bos, desc):
        """
        [(context ids, continuation ids)] -> as soon as each is known, its number and (3, n), float64, of its
        continuation: log P in nats, is the token the likeliest (1 or 0), probability of the likeliest.
        """
        T, rows, batches = self.model.config.block_size, defaultdict(dict), [[]]
        for k, (context, continuation) in enumerate(requests):
            if bos is not None and context[:1] != [bos]:
                context = [bos, *context]
            if not continuation or not context:
                raise InputError(f'request {k}: an empty {"continuation" if context else "context"} has no probability')
            if len(continuation) > T:
                raise InputError(f'request {k}: {len(continuation)} tokens to score are over the context of {T}')
            # the end of what is too long
            rows[tuple(context[-(T + 1 - len(continuation)) :])].setdefault(tuple(continuation), []).append(k)
        rows = sorted(rows.items(), key=lambda row: -self.length(row))
        for context, continuations in rows:
            row, batch = (context, list(continuations)), batches[-1]
            if batch and (len(batch) == self.batch_size or (len(batch) + 1) * self.length(batch[0]) > self.tokens):
                batches.append([])
            batches[-1].append(row)
        requests_of = [ks for _, continuations in rows for ks in continuations.values()]
        answers = tqdm(self.share('score', batches), desc, len(requests_of), **BAR)
        for ks, of_tokens in zip(requests_of, answers, strict=True):
            for k in ks:
                yield k, of_tokens

    @staticmethod
    def length(row):
        return len(row[0]) + sum(len(c) - 1 for c in row[1])

    @torch.no_grad()
    def score(self, batch):
        """Rows (context, continuations) -> of each continuation in order, (3, n), as in by_token."""
        m, S, predicting, targets, ends = self.model, max(map(self.length, batch)), [], [], []
        # from pinned memory copies keep nobody waiting
        pinned = self.device.type == 'cuda'
        # ids, positions, segments: 0 is the context, k its k-th continuation, -1 padding
        inputs = torch.zeros(3, len(batch), S, dtype=torch.int64, pin_memory=pinned)
        parts = inputs.numpy()
        parts[2] = -1
        for n, (context, continuations) in enumerate(batch):
            end = C = len(context)
            parts[:2, n, :C], parts[2, n, :C] = (context, range(C)), 0
            for k, continuation in enumerate(continuations, start=1):
                # its last token predicts nothing; its first is predicted by the context's last
                begin, end = end, end + len(continuation) - 1
                parts[:2, n, begin:end], parts[2, n, begin:end] = (continuation[:-1], range(C, C + end - begin)), k
                predicting += [n * S + C - 1, *range(n * S + begin, n * S + end)]
                targets += continuation
                ends.append(len(targets))
        ids, positions, segments = inputs.to(self.device, non_blocking=pinned)
        predicting, targets = torch.tensor([predicting, targets], pin_memory=pinned).to(
            self.device, non_blocking=pinned
        )
        # where no row has two continuations, the causal triangle is all
        mask = None
        if max(len(continuations) for _, continuations in batch) > 1:
            seen = (segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0)  # (N, S, S)
            mask = seen.tril()[:, None]
        with self.autocast():
            h = m.hidden_states(m.sign(ids), positions=None if mask is None else positions, mask=mask).flatten(0, 1)
            # the head sees only the positions that predict a token of a continuation
            of_tokens = torch.stack(m.predict(h[predicting], targets)).cpu().double().numpy()
        return np.split(of_tokens, ends[:-1], axis=1)

    def write(self, batch):
        """[(prompt, lm-eval's options)] -> [the greedy text after it, up to the first of options['until'] in it]."""
        tok, ((prompt, options),) = self.tok, batch
        if options.get('do_sample') or options.get('temperature'):
            raise InputError('generation by sampling is not supported, only greedy')
        until, room, made, said = options.get('until', []), options.get('max_gen_toks', 256), [], ''
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        ids = tok.encode([prompt])[0] if self.bos is None else [tok.bos, *tok.encode([prompt])[0]]
        ids = torch.tensor([ids[-max(1, self.model.config.block_size - room) :]], device=self.device)
        with self.autocast():
            for token in self.model.stream(ids, room, temperature=0):
                if token.item() == tok.bos:
                    break
                made.append(token.item())
                said = tok.decode(made)
                if any(stop in said for stop in until):
                    break
        return [min([said, *(said.split(stop)[0] for stop in until)], key=len)]


def windows(ids, T):
    """Token ids -> requests for all but the first; from the second request on, each sees half a context T or more."""
    n = len(ids) - 1
    for begin in range(0, max(min(n, 1), n - T // 2), T - T // 2):
        # the half that the window before has scored
        scored = begin + 1 + (T // 2 if begin else 0)
        yield ids[begin:scored], ids[scored : begin + T + 1]


# -----------------------------------------------------------------------------
# tasks of lm-eval


def harness(scorer):
    """The model as lm-eval wants it."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Harness(TemplateLM):
        eot_token_id = scorer.tok.bos
        max_length = scorer.model.config.block_size

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return list(scorer.tok.encode([string])[0])

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            pairs = [(context, continuation) for _, context, continuation in requests]
            return scorer(pairs, lambda k, r: self.cache_hook.add_partial('loglikelihood', requests[k][0], r))

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            """As all models of lm-eval: in windows that do not overlap, bos before the first, a token before others."""
            how = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            texts = [self.tok_encode(request.args[0]) for request in requests]
            rolling = ((k, window) for k, ids in enumerate(texts) for window in get_rolling_token_windows(ids, **how))
            parts = [(k, make_disjoint_window(window)) for k, window in rolling]
            results, left = [0.0] * len(texts), Counter(k for k, _ in parts)
            for part, (logp, _, _) in scorer.by_token([window for _, window in parts], None, 'text'):
                k = parts[part][0]
                results[k] += logp.sum().item()
                left[k] -= 1
                if not left[k]:
                    self.cache_hook.add_partial('loglikelihood_rolling', requests[k].args, results[k])
            return results

        def generate_until(self, requests, disable_tqdm=False):
            results = []
            for said in tqdm(scorer.share('write', [[r.args] for r in requests]), 'writing', len(requests), **BAR):
                self.cache_hook.add_partial('generate_until', requests[len(results)].args, said)
                results.append(said)
            return results

    return Harness()


def local_files(folder, prefix):
    """{split: file} of folder/<prefix>_<split>*.jsonl, packed or not."""
    found = {}
    for split in ('train', 'validation', 'test'):
        for file in sorted(p for p in Path(folder).glob(f'{prefix}_{split}*') if '.jsonl' in p.suffixes):
            if split in found:
                raise InputError(f'{folder} has several files for {prefix}, {split}: {found[split]}, {file.name}')
            found[split] = str(file.resolve())
    return found


def task_config(name, file, data_dir):
    """The config of lm-eval's task in a YAML file, with the paper's shots and local data; what its data stand for."""
    from lm_eval.tasks._yaml_loader import load_yaml

    task, paper = dict(load_yaml(file)), PAPER.get(name)
    if paper:
        task['num_fewshot'] = paper['shots']
    if not data_dir:
        return task, ''
    prefix = paper['file'] if paper else name
    files = local_files(data_dir, prefix)
    hub_split = 'test' if task.get('test_split') else 'validation'
    scored = next((s for s in (hub_split, 'validation', 'test', 'train') if s in files), None)
    if scored is None:
        raise InputError(f'{data_dir} has no {prefix}_{hub_split}*.jsonl, which task {name} needs')
    shots_from, notes = 'train' if 'train' in files else scored, []
    if scored != hub_split:
        notes.append(f'{scored} split for {hub_split}')
    if paper and paper['shots'] and shots_from != 'train':
        notes.append(f'shots from {shots_from}, not train')
    task |= dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=files))
    task |= dict(training_split=None, validation_split=None, test_split=scored, fewshot_split=shots_from)
    return task, f'local: {"; ".join(notes)}' if notes else ''


@functools.cache
def task_manager():
    """The index of lm-eval's thousands of tasks and of ours, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(HERE / 'eval_tasks'))


def run_tasks(names, lm, cache=None, data_dir='', limit=0, seed=1234):
    """
    lm: an lm-eval model -> lm-eval's results, and {task: note on its local data}. The results are kept in a file whose
    name begins with `cache`; data_dir, limit and seed as in the settings. Raises InputError.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    # the one says of each of our tasks that it overrides its own, the other announces its retries
    for library in ('lm_eval', 'huggingface_hub'):
        logging.getLogger(library).setLevel(logging.ERROR)
    if data_dir:
        datasets.disable_progress_bars()
    manager, configs, notes = task_manager(), list(names), {}
    for k, name in enumerate(names):
        if name not in manager.all_tasks:
            raise InputError(f"unknown task '{name}'{did_you_mean(name, [*OURS, *manager.all_tasks])}")
        if name in manager.all_subtasks:
            configs[k], notes[name] = task_config(name, manager.task_index[name].yaml_path, data_dir)
        elif data_dir:
            raise InputError(f"'{name}' is a group of tasks; with --data_dir name its tasks one by one")
    # lm-eval's name
    file = Path(f'{cache}_rank0.db')
    resumed = file.exists()
    common = dict(task_manager=manager, limit=limit or None, use_cache=cache, log_samples=True, bootstrap_iters=1000)
    seeds = {f'{what}_seed': seed for what in ('random', 'numpy_random', 'torch_random', 'fewshot_random')}
    try:
        return simple_evaluate(lm, tasks=configs, **common, **seeds), notes
    except InputError:
        raise
    # the hub out of reach; a file that is cut off, empty or not what it should be; a field that is missing
    except (OSError, ValueError, EOFError, KeyError, StopIteration, TemplateError, DatasetsError) as e:
        if not resumed:
            file.unlink(missing_ok=True)
        reason = f'{type(e).__name__}: {" ".join(str(e).split())[:300] or "nothing in it"}'
        raise InputError(f'{", ".join(names)}: the data cannot be read ({reason}); see --data_dir') from None


def task_scores(raw, notes):
    """What lm-eval gives -> {task: what results.json says of it}."""
    found = {}
    for task, r in raw['results'].items():
        metrics = [k.removesuffix(',none') for k in r if k.endswith(',none') and '_stderr' not in k]
        # the row of a group has no score of its own
        if not metrics:
            continue
        metric = PAPER[task]['metric'] if task in PAPER else next((m for m in PERCENT if m in metrics), metrics[0])
        shots, documents = raw['n-shot'].get(task, 0), raw['n-samples'].get(task, {}).get('effective', 0)
        score, stderr = r[f'{metric},none'], r.get(f'{metric}_stderr,none')
        found[task] = dict(metric=metric, score=score, stderr=stderr, shots=shots, documents=documents)
        found[task] |= dict(note=notes.get(task, ''), all={k: v for k, v in r.items() if isinstance(v, (int, float))})
    return found


# -----------------------------------------------------------------------------
# text and rare words


def sliding(scorer, bos, ids):
    """Token ids (n,) -> of each of them: nats, is it the likeliest, probability of the likeliest; three (n,)."""
    parts = dict(scorer.by_token(list(windows([bos, *ids], scorer.model.config.block_size)), None, 'text'))
    logp, right, confidence = torch.from_numpy(np.concatenate([parts[k] for k in range(len(parts))], axis=1))
    return -logp, right, confidence


def calibration_error(right, confidence, bins=15):
    """Expected calibration error: |accuracy - confidence| in equal intervals of confidence, weighted by tokens."""
    which = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return gaps.abs().sum().item() / len(right)


def prepared_split(folder, tok):
    """(token ids, bytes of text) of the held-out split of a folder of prepare.py. Raises InputError."""
    try:
        meta = read_meta(folder)
    except FileNotFoundError:
        raise InputError(f'--text={folder}: not a folder of prepare.py') from None
    if meta['tokenizer_sha256'] != tokenizer_fingerprint(tok):
        raise InputError(f"--text={folder} was made with tokenizer '{meta['tokenizer']}', the model's is '{tok.name}'")
    split = meta['splits']['val']
    return Bins(folder, split)[:].tolist(), split['bytes']


def text_file(path, tok):
    """(token ids, bytes of text) of all documents of a file, as prepare.py makes bins of them. Raises InputError."""
    source, ids, size = Source(str(path)), [], 0
    with tqdm(desc='encode', total=source.size, unit='B', unit_scale=True, delay=1, **BAR) as bar:
        source.moved = bar.update
        # of these none is held out
        for batch, _ in batches(source, ReadState(tails=False), val_fraction=1, val_bytes=0):
            texts = [text for text, _ in batch]
            size += sum(len(text.encode()) for text in texts)
            ids += [i for document in tok.encode(texts) for i in (tok.bos, *document)]
    if not ids:
        raise InputError(f'--text={path}: no text in it')
    return ids, size


def bits_per_byte(scorer, tok, path, first_new):
    """
    Of a file or of the held-out split of a prepared folder: documents back to back, bos before each, as in training, in
    windows that overlap by half. Where ids from first_new on occur, also the top-1 accuracy at those.
    """
    (first, *ids), size = (prepared_split if Path(path).is_dir() else text_file)(Path(path), tok)
    nats, right, confidence = sliding(scorer, first, ids)
    mean, new, T = nats.mean().item(), torch.tensor(ids) >= first_new, scorer.model.config.block_size
    results = dict(tokens=len(nats), bytes=size, window=T, stride=T - T // 2, nats_per_token=mean)
    results |= dict(bits_per_byte=nats.sum().item() / math.log(2) / size, perplexity=math.exp(min(mean, 700)))
    results |= dict(top1_accuracy=right.mean().item(), expected_calibration_error=calibration_error(right, confidence))
    if new.any():
        results |= dict(new_tokens=int(new.sum()), new_token_accuracy=right[new].mean().item())
    return results


@torch.no_grad()
def card660(scorer, tok, folder):
    """Card-660: correlation of human similarity with the cosine of two words' hidden states at their last token."""
    from scipy.stats import pearsonr, spearmanr

    path = Path(folder) / 'dataset.tsv'
    try:
        pairs = [line.split('\t') for line in path.read_text(encoding='utf-8').splitlines() if line]
        gold = [float(score) for _, _, score in pairs]
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {e}; --data_dir must be the folder of Card-660's dataset.tsv") from None
    m, results, vectors = scorer.model, dict(pairs=len(pairs)), dict(last={}, second_to_last={})
    for word in sorted({w for a, b, _ in pairs for w in (a, b)}):
        states, ids = [], torch.tensor([[tok.bos, *tok.encode([word.replace('_', ' ')])[0]]], device=scorer.device)
        with scorer.autocast():
            h = m.hidden_states(m.sign(ids), states=states)
        vectors['last'][word], vectors['second_to_last'][word] = h[0, -1].float(), states[-1][0, -1].float()
    for layer, of_word in vectors.items():
        cosine = [F.cosine_similarity(of_word[a], of_word[b], dim=0).item() for a, b, _ in pairs]
        results[f'{layer}_pearson'] = float(pearsonr(cosine, gold)[0])
        results[f'{layer}_spearman'] = float(spearmanr(cosine, gold)[0])
    return results


# -----------------------------------------------------------------------------
# tables, pictures, and the whole


def nearest_published(c, decoder):
    """The row of the paper's table whose kind and size are nearest; decoder is the number of its parameters."""
    distances = {}
    for name, row in PUBLISHED.items():
        H, size = row['num_hashes'], row['decoder_millions'] * 1e6
        distances[name] = (H == 0) != (c.num_hashes == 0), abs(math.log(size / decoder)), abs(H - c.num_hashes)
    return min(distances, key=distances.get)


def show(results):
    """The tables."""
    published, scores = results['published'], results.get('tasks', {})
    print(results['model'])
    if scores:
        heads = f'{"task":<24}{"metric":<10}{"shots":>6}{"documents":>11}{"score":>9}{"stderr":>9}'
        print(f'\n{heads}{"published: " + published["model"]:>28}')
    for task, r in scores.items():
        paper = f'{published[PAPER[task]["column"]]:.2f}' if task in PAPER else ''
        scale = 100 if r['metric'] in PERCENT else 1
        stderr = f'{scale * r["stderr"]:.2f}' if isinstance(r['stderr'], float) else '-'
        note = f'  ({r["note"]})' if r['note'] else ''
        counts = f'{r["metric"]:<10}{r["shots"]:>6}{r["documents"]:>11}'
        print(f'{task:<24}{counts}{scale * r["score"]:>9.2f}{stderr:>9}{paper:>28}{note}')
    parts = {f'bits_per_byte, {path}': values for path, values in results.get('bits_per_byte', {}).items()}
    if 'card660' in results:
        parts['card660'] = results['card660']
    for name, values in parts.items():
        print(f'\n{name}')
        for key, value in values.items():
            print(f'  {key:<28}{value:>14,.4f}' if isinstance(value, float) else f'  {key:<28}{value:>14,}')


def compare(before, after):
    """Bits per byte of each text and the tasks' scores, before and after."""
    print(f'\n{before["model"]} -> {after["model"]}')
    for path, now in after.get('bits_per_byte', {}).items():
        then, new = before['bits_per_byte'][path], ''
        if 'new_tokens' in now:
            new = f', {now["new_tokens"]:,} new tokens, of which {now["new_token_accuracy"]:.1%} are the likeliest'
        bits = f'{then["bits_per_byte"]:.4f} -> {now["bits_per_byte"]:.4f} bits per byte'
        print(f'{path}: {bits}, {then["tokens"]:,} -> {now["tokens"]:,} tokens{new}')
    for task, r in after.get('tasks', {}).items():
        print(f'{task}: {r["metric"]} {before["tasks"][task]["score"]:.4f} -> {r["score"]:.4f}')


def draw(results, target):
    """The scores beside the published row's, and each text's bits per byte before an expansion and after."""
    published, scores, before = results['published'], results.get('tasks'), results.get('before')
    if scores:
        path, ours = target.with_suffix('.png'), [100 * r['score'] for r in scores.values()]
        errors = [100 * r['stderr'] if isinstance(r['stderr'], float) else 0 for r in scores.values()]
        paper = [published[PAPER[task]['column']] if task in PAPER else None for task in scores]
        groups = {'this model': ours, f'published: {published["model"]}': paper}
        bars(list(scores), groups, path, 'score, %', results['model'], errors={'this model': errors})
        print(path)
    if before and 'bits_per_byte' in results:
        path, texts = target.with_name(f'{target.stem}_text.png'), list(results['bits_per_byte'])
        groups = {r['model']: [r['bits_per_byte'][t]['bits_per_byte'] for t in texts] for r in (before, results)}
        bars([Path(t).stem for t in texts], groups, path, 'bits per byte', fmt='%.3f')
        print(path)


def measure(opened, names, target, first_new, device, dtype):
    """What results.json says of one model (checkpoint.Opened); ids from first_new on are new. None on ranks above 0."""
    model, tok = opened.model.to(device).eval(), opened.tok
    scorer = Scorer(model, tok.bos if bos else None, batch_size, dtype=dtype, tok=tok)
    while scorer.rank > 0:
        if scorer.take_part() is None:
            return None
    published = nearest_published(model.config, model.num_params()[1])
    results = dict(model=opened.name, published=dict(model=published, **PUBLISHED[published]))
    try:
        if lm_tasks := [n for t in names if t not in OURS[1:] for n in (PAPER if t == 'paper' else [t])]:
            weights = sum(p.detach().double().sum().item() for p in model.parameters())
            identity = json.dumps([opened.name, model.config.num_hashes, weights, bos, dtype])
            cache = f'{target.with_suffix(".cache")}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}'
            raw, notes = run_tasks(lm_tasks, harness(scorer), cache, data_dir, limit, seed)
            results['tasks'], results['task_hashes'] = task_scores(raw, notes), raw.get('task_hashes', {})
        if 'bits_per_byte' in names:
            results['bits_per_byte'] = {path: bits_per_byte(scorer, tok, path, first_new) for path in text.split(',')}
        if 'card660' in names:
            results['card660'] = card660(scorer, tok, data_dir)
    finally:
        # Ctrl-C ends the others too, wherever they are
        if sys.exc_info()[0] is not KeyboardInterrupt:
            scorer.take_part([None] * scorer.world_size)
    return results


def main():
    names = [t.strip() for t in tasks.split(',') if t.strip()]
    if not names:
        raise InputError("tasks is empty; leave it out for the paper's tasks")
    if limit < 0 or batch_size < 1:
        raise InputError(f'limit={limit}, batch_size={batch_size}: must be 0 or more, and 1 or more')
    if data_dir and not Path(data_dir).is_dir():
        raise InputError(f'data_dir={data_dir}: no such folder')
    if 'card660' in names and not data_dir:
        raise InputError('card660 needs --data_dir, the folder of its dataset.tsv')
    if 'bits_per_byte' in names and not text:
        raise InputError('bits_per_byte needs --text, a text file')
    for path in filter(None, text.split(',')):
        if not Path(path).exists():
            raise InputError(f'--text={path}: no such file or folder')

    on_device, in_dtype = pick_device(device, dtype)
    opened = [open_model(out_dir, released, revision, tokenizer)]
    if before:
        opened.insert(0, open_model(before) if (Path(before) / 'ckpt.pt').exists() else open_model(released=before))
    target = Path(save) if save else opened[-1].folder / 'results.json'
    if not os.access(target.parent, os.W_OK):
        raise InputError(f'{target} cannot be written: no such folder, or not yours; name another file with --save')
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        if torch.device(on_device).type == 'cuda':
            torch.cuda.set_device(on_device)
        # objects alone are sent, and the others wait for as long as rank 0 reads and downloads
        dist.init_process_group('gloo', timeout=timedelta(days=30))
        atexit.register(dist.destroy_process_group)
    # of the model before the expansion; no token is new to a model alone
    first_new = len(opened[0].tok.tokens)
    measured = [measure(o, names, target, first_new, on_device, in_dtype) for o in opened]
    if measured[-1] is None:
        return
    versions = {p: importlib.metadata.version(p) for p in ('torch', 'lm-eval', 'datasets')}
    results = dict(versions=versions, settings=config, device=on_device, dtype=in_dtype) | measured[-1]
    for part in measured:
        show(part)
    if before:
        results['before'] = measured[0]
        compare(*measured)
    try:
        temporary = target.with_suffix('.tmp')
        temporary.write_text(json.dumps(results, indent=1, default=str) + '\n')
        os.replace(temporary, target)
        print(f'\n{target}')
        if plot:
            draw(results, target)
    except OSError as e:
        raise InputError(f'{target} cannot be written ({e}); name another file with --save') from None


if __name__ == '__main__':
    main()
