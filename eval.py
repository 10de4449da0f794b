"""
Evaluates a checkpoint or a released model, on P(w) normalised over real tokens, beside the paper's published numbers.

    $ python eval.py --out_dir=out/mhf_1b                                     # the paper's ten tasks, from the hub
    $ python eval.py --out_dir=out/mhf_1b --data_dir=benchmarks               # the same from local files, without internet
    $ python eval.py --released=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe --revision=checkpoint-200000
    $ python eval.py --tasks=bits_per_byte --text=book.txt
    $ python eval.py --out_dir=out/expanded --before=out/base --tasks=bits_per_byte,piqa --text=ar.txt,en.txt
    $ python eval.py --tasks=card660 --data_dir=card660
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out/mhf_1b   # batches shared by 8 GPUs

Writes results.json beside the checkpoint (or to --save); an interrupted evaluation goes on where it stopped.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from configurator import InputError, configure, did_you_mean
from hashing import tokenizer_fingerprint
from model import at_least_float32, open_model, pick_device, vocabulary_chunk
from prepare import Bins, read_meta

# what to evaluate
out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id
revision = ''  # of the hub id
tokenizer = ''  # '' is the one the checkpoint was trained with
# on what: paper | bits_per_byte | card660 | any of lm-eval's tasks or of eval_tasks/, several separated by commas
tasks = 'paper'
data_dir = ''  # local files instead of the hub; card660's folder
text = ''  # of bits_per_byte: text files, or folders of prepare.py, of which the held-out split is read, separated by commas
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
# the paper's tasks: shots, metric, column of its table, name of local files
PAPER = {
    'lambada_openai': (0, 'acc', 'LAMBADA', 'lambada_openai'),
    'lambada_standard': (0, 'acc', 'LAMBADA', 'lambada_standard'),
    'arc_easy': (5, 'acc_norm', 'ARC-E', 'arc_easy'),
    'copa': (0, 'acc', 'COPA', 'copa'),
    'openbookqa': (5, 'acc_norm', 'OBQA', 'openbookqa'),
    'piqa': (0, 'acc', 'PIQA', 'piqa'),
    'hellaswag': (0, 'acc_norm', 'HellaSwag', 'hellaswag'),
    'race': (0, 'acc', 'RACE', 'race_high'),
    'sciq': (0, 'acc_norm', 'SciQ', 'sciq'),
    'social_iqa': (5, 'acc_norm', 'SIQA', 'social_i_qa'),
    'record': (0, 'f1', 'ReCoRD', 'record'),
}
COLUMNS = ('LAMBADA', 'ARC-E', 'COPA', 'OBQA', 'PIQA', 'HellaSwag', 'RACE', 'SciQ', 'SIQA', 'ReCoRD')
# the paper's table, by (parameters of the decoder in millions, H)
PUBLISHED = {
    '100M Standard': (87, 0, (15.33, 41.33, 64.00, 27.00, 58.87, 28.59, 26.41, 59.00, 35.98, 49.47)),
    '100M Standard+4L': (116, 0, (19.64, 45.08, 64.00, 27.00, 60.17, 29.99, 26.79, 62.60, 36.80, 53.08)),
    '100M H3B10K': (87, 3, (16.40, 44.91, 61.00, 26.40, 60.23, 27.81, 27.18, 55.50, 37.00, 48.21)),
    '100M H4B16K': (87, 4, (18.79, 45.24, 62.00, 27.60, 59.03, 27.99, 28.42, 58.00, 36.03, 50.11)),
    '1B Standard': (1007, 0, (30.41, 59.85, 64.00, 31.60, 65.78, 38.99, 29.38, 69.90, 39.10, 63.20)),
    '1B Standard+2L': (1107, 0, (30.66, 60.23, 65.00, 31.20, 65.02, 39.85, 29.28, 72.10, 38.89, 63.78)),
    '1B H3B10K': (1007, 3, (35.78, 61.95, 65.00, 34.00, 68.17, 40.45, 29.00, 68.30, 40.48, 64.51)),
    '1B H4B16K': (1007, 4, (35.34, 64.35, 71.00, 29.80, 66.49, 41.32, 31.39, 70.20, 41.66, 64.90)),
    '3B Standard': (2775, 0, (28.64, 60.23, 65.00, 31.80, 65.83, 39.65, 29.76, 64.80, 38.28, 62.26)),
    '3B H4B16K': (2775, 4, (37.26, 66.88, 68.00, 34.60, 68.39, 42.89, 30.91, 70.60, 40.74, 64.13)),
}
OURS = ('paper', 'bits_per_byte', 'card660')
PERCENT = (
    'acc_norm',
    'acc',
    'f1',
    'exact_match',
)  # metrics that are shares; the first of these that a task has is shown


# -----------------------------------------------------------------------------
# scoring


class Scorer:
    """
    log P of continuations. Requests with the same context are one row: the context, then every continuation, each of which
    sees the context and itself only and goes on from the context's last position. The head sees only the positions that
    predict a token of a continuation.
    """

    def __init__(self, model, bos, batch_size, tokens, autocast, rank=0, world_size=1):
        self.model, self.bos, self.autocast = model, bos, autocast
        self.batch_size, self.tokens = (
            batch_size,
            tokens,
        )  # of a batch, at most: contexts, and tokens with their padding
        self.rank, self.world_size = rank, world_size
        self.device = model.embed.weight.device

    def rows(self, requests):
        """[(context ids, continuation ids)] -> [(context, {continuation: its requests})], the longest first."""
        T, rows = self.model.config.block_size, defaultdict(dict)
        for k, (context, continuation) in enumerate(requests):
            if self.bos is not None and context[:1] != [self.bos]:
                context = [self.bos, *context]
            if not continuation or not context:
                raise InputError(f'request {k}: an empty {"continuation" if context else "context"} has no probability')
            if len(continuation) > T:
                raise InputError(
                    f'request {k}: a continuation of {len(continuation)} tokens is over the context of {T}'
                )
            context = tuple(context[-(T + 1 - len(continuation)) :])  # the end of what is too long
            rows[context].setdefault(tuple(continuation), []).append(k)
        return sorted(rows.items(), key=lambda r: -self.length(r))

    @staticmethod
    def length(row):
        return len(row[0]) + sum(len(c) - 1 for c in row[1])

    def batches(self, rows):
        batch = []
        for row in rows:
            if batch and (len(batch) == self.batch_size or (len(batch) + 1) * self.length(batch[0]) > self.tokens):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.no_grad()
    def score(self, batch):
        """Rows -> for each of their continuations, in order: (log P in nats, is every token of it the likeliest one)."""
        S = max(map(self.length, batch))
        ids = torch.zeros(len(batch), S, dtype=torch.long)
        positions, part = torch.zeros_like(ids), torch.full_like(ids, -1)  # part 0 is the context, -1 is padding
        where, targets, sizes = [], [], []
        for n, (context, continuations) in enumerate(batch):
            end = len(context)
            ids[n, :end], positions[n, :end], part[n, :end] = torch.tensor(context), torch.arange(end), 0
            begin = end
            for k, c in enumerate(continuations, start=1):
                rest = slice(begin, begin + len(c) - 1)
                ids[n, rest] = torch.tensor(c[:-1], dtype=torch.long)
                positions[n, rest], part[n, rest] = torch.arange(end, end + len(c) - 1), k
                where += [n * S + i for i in (end - 1, *range(rest.start, rest.stop))]
                targets += c
                sizes.append(len(c))
                begin = rest.stop
        seen = (part[:, :, None] == part[:, None]) | (part[:, None] == 0)  # (N, S, S): own part, and the context
        mask = (seen & torch.ones(S, S, dtype=torch.bool).tril())[:, None].to(self.device)
        m = self.model
        with self.autocast():
            h = m.hidden(m.signatures[ids.to(self.device)], positions=positions.to(self.device), mask=mask)
            logp, best, _ = self.predict(h.flatten(0, 1)[torch.tensor(where).to(self.device)], torch.tensor(targets))
        return [(a.sum().item(), bool(b.all())) for a, b in zip(logp.split(sizes), best.split(sizes))]

    def score_in_memory(self, batch):
        """As score, in halves where the whole does not fit."""
        try:
            return self.score(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise InputError(f'a sequence of {self.length(batch[0]):,} tokens does not fit {self.device}') from None
        half = len(batch) // 2
        return self.score_in_memory(batch[:half]) + self.score_in_memory(batch[half:])

    def predict(self, h, targets):
        """
        Hidden states h (n, d), ids of the next tokens (n,) -> log P(next), is it the likeliest, probability of the likeliest:
        (3, n), float64, on the CPU.
        """
        m, parts, block = self.model, [], vocabulary_chunk(self.device.type)
        E, targets = m.low_precision(m.embed.weight), targets.to(self.device)
        for h_, targets_ in zip(h.split(256), targets.split(256)):
            o = m.cascade(h_, E)
            for k, t in zip(range(0, len(h_), block), targets_.split(block)):
                scores = m.token_scores(at_least_float32(torch.cat([o_i[:, k : k + block] for o_i in o])))  # (V, block)
                target, (top, best) = scores.gather(0, t[None])[0], scores.max(0)
                total = scores.sub_(top).exp_().sum(0)
                parts.append(torch.stack([target - top - total.log(), best == t, 1 / total]))
        return torch.cat(parts, dim=1).double().cpu()

    def __call__(self, requests, done=None):
        """[(context ids, continuation ids)] -> [(log P, greedy?)] in their order; done(k, result) as soon as each is known."""
        batches, results = list(self.batches(self.rows(requests))), [None] * len(requests)
        bar = tqdm(
            total=len(requests),
            desc='scoring',
            disable=self.rank > 0,
            leave=False,
            mininterval=0.5 if sys.stderr.isatty() else 20,
        )
        for first in range(0, len(batches), self.world_size):
            share = batches[first : first + self.world_size]
            mine = self.score_in_memory(share[self.rank]) if self.rank < len(share) else None
            everyone = [mine]
            if self.world_size > 1:
                everyone = [None] * self.world_size
                dist.all_gather_object(everyone, mine)
            for batch, scores in zip(share, everyone):
                scores = iter(scores)
                for _, continuations in batch:
                    for ks in continuations.values():
                        result = next(scores)
                        for k in ks:
                            results[k] = result
                            if done:
                                done(k, result)
                        bar.update(len(ks))
        bar.close()
        return results


def tokens_that_fit(model):
    """Tokens of a batch: as many as half of the free memory holds, but not more than make it faster (on a CPU, padding costs)."""
    c, device = model.config, model.embed.weight.device
    free, useful = 8e9, 2048
    if device.type == 'cuda':
        free, useful = torch.cuda.mem_get_info(device)[0], 65536
    elif hasattr(os, 'sysconf') and 'SC_AVPHYS_PAGES' in os.sysconf_names:
        free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    # float32 numbers of a token within a block, and its row of the mask
    numbers = 4 * c.hidden_size + 4 * c.intermediate_size + 4 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return min(useful, int(free / 2 / (4 * numbers + 5 * c.block_size)))


def harness(scorer, tok):
    """The model as lm-eval wants it."""
    from lm_eval.api.model import TemplateLM

    class Harness(TemplateLM):
        eot_token_id = tok.bos
        max_length = scorer.model.config.block_size

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return list(tok.encode([string])[0])

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            remember = lambda k, result: self.cache_hook.add_partial('loglikelihood', requests[k][0], result)
            return send(scorer, [(context, continuation) for _, context, continuation in requests], remember)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            results = []
            for request in requests:
                nats, _, _ = sliding(scorer, tok.bos, self.tok_encode(request.args[0]))
                results.append(-nats.sum().item())
                self.cache_hook.add_partial('loglikelihood_rolling', request.args, results[-1])
            return results

        def generate_until(self, requests, disable_tqdm=False):
            results = []
            for request in tqdm(requests, desc='generating', disable=disable_tqdm, leave=False):
                prompt, options = request.args
                until = options.get('until', [])
                until = [until] if isinstance(until, str) else until
                if options.get('do_sample') or options.get('temperature'):
                    raise InputError('generation by sampling is not supported, only greedy')
                room = options.get('max_gen_toks', 256)
                ids = (([tok.bos] if scorer.bos is not None else []) + self.tok_encode(prompt))[
                    -max(1, self.max_length - room) :
                ]
                made, said = [], ''
                for token in scorer.model.stream(torch.tensor([ids], device=scorer.device), room, temperature=0):
                    if token.item() == tok.bos:
                        break
                    made.append(token.item())
                    said = tok.decode(made)
                    if any(u and u in said for u in until):
                        break
                for u in until:
                    said = said.split(u)[0] if u else said
                results.append(said)
                self.cache_hook.add_partial('generate_until', request.args, said)
            return results

    return Harness()


def send(scorer, requests, done):
    """On rank 0: the other ranks, which wait in serve(), take their part of the batches."""
    if scorer.world_size > 1:
        dist.broadcast_object_list([requests])
    return scorer(requests, done)


def serve(scorer):
    while True:
        work = [None]
        dist.broadcast_object_list(work)
        if work[0] is None:
            return
        scorer(work[0])


# -----------------------------------------------------------------------------
# tasks of lm-eval


def local_files(prefix):
    """{split: file} of data_dir/<prefix>_<split>*.jsonl, packed or not."""
    found = {}
    for split in ('train', 'validation', 'test'):
        files = sorted(p for p in Path(data_dir).glob(f'{prefix}_{split}*') if '.jsonl' in p.suffixes)
        if len(files) > 1:
            raise InputError(f'{data_dir} has several files for {prefix}, {split}: {", ".join(p.name for p in files)}')
        if files:
            found[split] = str(files[0].resolve())
    return found


def task_file(name, known, folder):
    """A YAML file of lm-eval for task `name`, with the paper's shots and local data; and what must be said of its data."""
    base = known[name].yaml_path
    lines, note = [f'include: {json.dumps(str(base.resolve()))}', f'task: {name}'], ''
    shots, _, _, prefix = PAPER.get(name, (None, None, None, name))
    if shots is not None:
        lines.append(f'num_fewshot: {shots}')
    if data_dir:
        from lm_eval.tasks._yaml_loader import load_yaml

        declared = load_yaml(base, resolve_func=False, recursive=True)
        files = local_files(prefix)
        wanted = 'test' if declared.get('test_split') else 'validation'
        scored = next((s for s in (wanted, 'validation', 'test', 'train') if s in files), None)
        if scored is None:
            raise InputError(f'{data_dir} has no {prefix}_{wanted}*.jsonl, which task {name} needs')
        if scored != wanted:
            note = f'local: {scored} split for {wanted}'
        if shots and 'train' not in files:
            note += ('; ' if note else 'local: ') + f'shots from {scored}, not train'
        lines += ['dataset_path: json', 'dataset_name: null', 'dataset_kwargs:', f'  data_files: {json.dumps(files)}']
        lines += [f'{key}_split: null' for key in ('training', 'validation', 'test') if key != 'test']
        lines += [f'test_split: {scored}', f'fewshot_split: {"train" if "train" in files else scored}']
    path = Path(folder) / f'{name}.yaml'
    path.write_text('\n'.join(lines) + '\n')
    return str(path), note


@functools.cache
def task_manager():
    """The index of lm-eval's thousands of tasks and of ours, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(HERE / 'eval_tasks'))


def run_tasks(names, lm, cache):
    """lm: an lm-eval model -> lm-eval's results, and {task: note on its local data}."""
    import datasets
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    logging.getLogger('lm_eval').setLevel(logging.ERROR)  # it says for each of our tasks that it overrides its own
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # it announces each of its retries
    if data_dir:  # read in no time
        datasets.disable_progress_bars()
    manager = task_manager()
    for name in names:
        if name not in manager.all_tasks:
            raise InputError(f"unknown task '{name}'{did_you_mean(name, [*OURS, *manager.all_tasks])}")
    with tempfile.TemporaryDirectory() as folder:
        specs, notes = [], {}
        for name in names:
            if name in manager.all_subtasks:
                spec, notes[name] = task_file(name, manager.task_index, folder)
                specs.append(spec)
            elif data_dir:
                raise InputError(f"'{name}' is a group of tasks; with --data_dir name its tasks one by one")
            else:
                specs.append(name)
        file = Path(f'{cache}_rank0.db')  # lm-eval's name
        resumed = file.exists()
        try:
            results = simple_evaluate(
                lm,
                tasks=specs,
                task_manager=manager,
                limit=limit or None,
                use_cache=cache,
                log_samples=True,
                bootstrap_iters=1000,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        # the hub out of reach; a file that is cut off, empty or not what it should be; a field that is missing
        except (
            OSError,
            ValueError,
            EOFError,
            KeyError,
            StopIteration,
            datasets.exceptions.DatasetsError,
            TemplateError,
        ) as e:
            if not resumed:
                file.unlink(missing_ok=True)
            reason = ' '.join(str(e).split())[:300] or 'nothing in it'
            raise InputError(
                f'{", ".join(names)}: the data cannot be read ({type(e).__name__}: {reason}); see --data_dir'
            ) from None
    return results, notes


# -----------------------------------------------------------------------------
# text and rare words


@torch.no_grad()
def sliding(scorer, bos, ids):
    """
    Token ids (n,) -> of each of them: nats (n,), is it the likeliest (n,), probability of the likeliest (n,). Windows of the
    whole context that overlap by half: from the second on, every token sees half a context or more.
    """
    m, T, ids = scorer.model, scorer.model.config.block_size, torch.tensor([bos, *ids])
    step, parts = T - T // 2, []
    starts = [0, *range(step, max(1, len(ids) - 1 - T + step), step)]
    for b in tqdm(starts, desc='text', leave=False, mininterval=0.5 if sys.stderr.isatty() else 20):
        x, y = ids[b : b + T].to(scorer.device), ids[b + 1 : b + T + 1].to(scorer.device)
        skip = T // 2 if b else 0
        with scorer.autocast():
            parts.append(scorer.predict(m.hidden(m.signatures[x[: len(y)]][None])[0, skip:], y[skip:]))
    logp, right, confidence = torch.cat(parts, dim=1)
    return -logp, right, confidence


def calibration_error(right, confidence, bins=15):
    """Expected calibration error: |accuracy - confidence| in `bins` equal intervals of confidence, weighted by their tokens."""
    which = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return gaps.abs().sum().item() / len(right)


def prepared_split(folder, model, tok):
    """(token ids, bytes of text) of the held-out split of a folder of prepare.py; the model's table reads signatures back."""
    try:
        meta = read_meta(folder)
        rows, size = Bins(folder, meta['splits']['val'], meta['num_hashes'] or 1), meta['splits']['val']['bytes']
    except FileNotFoundError:
        raise InputError(f'--text={folder}: not a folder of prepare.py') from None
    if meta.get('tokenizer_sha256') != tokenizer_fingerprint(tok):
        raise InputError(
            f"--text={folder} was made with tokenizer '{meta.get('tokenizer')}', the model's is '{tok.name}'"
        )
    if not meta['num_hashes']:
        return rows[: len(rows)][:, 0].tolist(), size
    if rows.columns != model.config.coordinates:
        raise InputError(f'--text={folder} has {rows.columns} ids per token, the model {model.config.coordinates}')
    table, is_token = model.signatures.tolist(), model.is_token.tolist()
    ids_of = {tuple(signature): i for i, signature in enumerate(table) if is_token[i]}
    try:
        return [ids_of[tuple(row)] for row in rows[: len(rows)].tolist()], size
    except KeyError:
        raise InputError(f'--text={folder} has signatures that are not in the table of the model') from None


def bits_per_byte(scorer, tok, path, known):
    """Of the text or prepared folder `path`. Where token ids from `known` on occur, the top-1 accuracy at those, too."""
    if Path(path).is_dir():
        (first, *ids), size = prepared_split(Path(path), scorer.model, tok)
    else:
        try:
            content = Path(path).read_bytes().decode('utf-8')
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f'--text={path}: {e}') from None
        if not content.strip():
            raise InputError(f'--text={path}: no text in it')
        first, ids, size = tok.bos, tok.encode([content])[0], len(content.encode())
    nats, right, confidence = sliding(scorer, first, ids)
    mean, new = nats.mean().item(), torch.tensor(ids) >= known
    return (dict(new_tokens=int(new.sum()), new_token_accuracy=right[new].mean().item()) if new.any() else {}) | dict(
        tokens=len(nats),
        bytes=size,
        nats_per_token=mean,
        bits_per_byte=nats.sum().item() / math.log(2) / size,
        perplexity=math.exp(min(mean, 700)),
        top1_accuracy=right.mean().item(),
        expected_calibration_error=calibration_error(right, confidence),
    )


@torch.no_grad()
def card660(scorer, tok):
    """Card-660: correlation of human similarity with the cosine of two words' hidden states at their last token."""
    from scipy.stats import pearsonr, spearmanr

    path = Path(data_dir) / 'dataset.tsv'
    try:
        pairs = [line.split('\t') for line in path.read_text(encoding='utf-8').splitlines() if line]
        gold = [float(score) for _, _, score in pairs]
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {e}; --data_dir must be the folder of Card-660's dataset.tsv") from None
    words = sorted({w for a, b, _ in pairs for w in (a, b)})
    vectors = {}
    for word, ids in zip(words, tok.encode([w.replace('_', ' ') for w in words])):
        states = []
        with scorer.autocast():
            h = scorer.model.hidden(
                scorer.model.signatures[torch.tensor([[tok.bos, *ids]], device=scorer.device)], states=states
            )
        vectors[word] = [h[0, -1].float().cpu(), states[-1][0, -1].float().cpu()]
    results = dict(pairs=len(pairs))
    for k, layer in enumerate(('last', 'second_to_last')):
        cosine = [F.cosine_similarity(vectors[a][k], vectors[b][k], dim=0).item() for a, b, _ in pairs]
        results |= {
            f'{layer}_pearson': float(pearsonr(cosine, gold)[0]),
            f'{layer}_spearman': float(spearmanr(cosine, gold)[0]),
        }
    return results


# -----------------------------------------------------------------------------


def nearest_published(c, decoder):
    """The row of the paper's table whose kind and size are nearest."""

    def distance(name):
        millions, H, _ = PUBLISHED[name]
        return (H == 0) != (c.num_hashes == 0), abs(math.log(millions * 1e6 / decoder)), abs(H - c.num_hashes)

    return min(PUBLISHED, key=distance)


def show(results):
    """The tables."""
    name, scores = results['published']['model'], results.get('tasks', {})
    print(results['model'])
    if scores:
        print(
            f'\n{"task":<24}{"metric":<10}{"shots":>6}{"documents":>11}{"score":>9}{"stderr":>9}{"published: " + name:>28}'
        )
    for task, r in scores.items():
        paper = PAPER.get(task)
        shown = f'{results["published"][paper[2]]:.2f}' if paper else ''
        scale = 100 if r['metric'] in PERCENT else 1
        stderr = f'{scale * r["stderr"]:.2f}' if isinstance(r['stderr'], float) else '-'
        print(
            f'{task:<24}{r["metric"]:<10}{r["shots"]:>6}{r["documents"]:>11}{scale * r["score"]:>9.2f}{stderr:>9}{shown:>28}'
            f'{"  (" + r["note"] + ")" if r["note"] else ""}'
        )
    parts = {f'bits_per_byte, {name}': values for name, values in results.get('bits_per_byte', {}).items()}
    for part, values in (parts | {part: results[part] for part in OURS[2:] if part in results}).items():
        print(f'\n{part}')
        for key, value in values.items():
            print(f'  {key:<28}{value:>14,.4f}' if isinstance(value, float) else f'  {key:<28}{value:>14,}')


def compare(results):
    """Bits per byte of each text and the tasks' scores, before and after."""
    was = results['before']
    print(f'\n{was["model"]} -> {results["model"]}')
    for name, now in results.get('bits_per_byte', {}).items():
        then, new = was['bits_per_byte'][name], ''
        if 'new_tokens' in now:
            new = f', {now["new_tokens"]:,} new tokens, of which {now["new_token_accuracy"]:.1%} are the likeliest'
        print(
            f'{name}: {then["bits_per_byte"]:.4f} -> {now["bits_per_byte"]:.4f} bits per byte, '
            f'{then["tokens"]:,} -> {now["tokens"]:,} tokens{new}'
        )
    for task, r in results.get('tasks', {}).items():
        print(f'{task}: {r["metric"]} {was["tasks"][task]["score"]:.4f} -> {r["score"]:.4f}')


def draw_texts(results, path):
    """Bits per byte of each text, before an expansion and after."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    names = list(results['bits_per_byte'])
    fig, ax = plt.subplots(figsize=(max(5, 1.8 * len(names)), 4))
    for offset, of in ((-0.2, results['before']), (0.2, results)):
        bits = [of['bits_per_byte'][n]['bits_per_byte'] for n in names]
        ax.bar_label(ax.bar(np.arange(len(names)) + offset, bits, 0.4, label=of['model']), fmt='%.3f', fontsize=8)
    ax.set_xticks(np.arange(len(names)), [Path(n).stem for n in names])
    ax.set(ylabel='bits per byte')
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')
    plt.close(fig)


def draw(results, path):
    """Scores as bars, beside the published row's."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    labels = list(results['tasks'])
    fig, ax = plt.subplots(figsize=(max(6, len(labels)), 5))
    x = np.arange(len(labels))
    scores = [results['tasks'][t] for t in labels]
    errors = [100 * r['stderr'] if isinstance(r['stderr'], float) else 0 for r in scores]
    ax.bar(x - 0.2, [100 * r['score'] for r in scores], 0.4, yerr=errors, label='this model')
    paper = [results['published'][PAPER[t][2]] if t in PAPER else np.nan for t in labels]
    ax.bar(x + 0.2, paper, 0.4, label=f'published: {results["published"]["model"]}', color='lightgray')
    ax.set_xticks(x, labels, rotation=45, ha='right')
    ax.set(ylabel='score, %', title=results['model'])
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches='tight')
    plt.close(fig)


def measure(model, tok, which, wanted, target, where, kind, known):
    """All that is wanted of one model, as in results.json; nothing on processes that only help."""
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    model.to(where).eval()
    autocast = contextlib.nullcontext
    if kind == 'bfloat16':
        autocast = functools.partial(torch.autocast, torch.device(where).type, torch.bfloat16)
    scorer = Scorer(model, tok.bos if bos else None, batch_size, tokens_that_fit(model), autocast, rank, world_size)
    if rank > 0:
        return serve(scorer)
    published = nearest_published(model.config, model.num_params()[1])
    results = dict(model=which, published=dict(model=published, **dict(zip(COLUMNS, PUBLISHED[published][2]))))
    names = [n for t in wanted if t not in OURS[1:] for n in (PAPER if t == 'paper' else [t])]
    try:
        if names:
            weights = sum(p.detach().double().sum().item() for p in model.parameters())
            identity = json.dumps([which, model.config.num_hashes, weights, bos, kind])
            cache = f'{target.with_suffix(".cache")}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}'
            raw, notes = run_tasks(names, harness(scorer, tok), cache)
            results['tasks'], results['task_hashes'] = {}, raw.get('task_hashes', {})
            for task, r in raw['results'].items():
                found = [k.removesuffix(',none') for k in r if k.endswith(',none') and '_stderr' not in k]
                preferred = [PAPER[task][1]] if task in PAPER else [m for m in PERCENT if m in found] + found
                if not preferred:  # the row of a group without a score of its own
                    continue
                metric = preferred[0]
                results['tasks'][task] = dict(
                    metric=metric,
                    score=r[f'{metric},none'],
                    stderr=r.get(f'{metric}_stderr,none'),
                    shots=raw['n-shot'].get(task, 0),
                    documents=raw['n-samples'].get(task, {}).get('effective', 0),
                    note=notes.get(task, ''),
                    all={k: v for k, v in r.items() if isinstance(v, (int, float))},
                )
        if 'bits_per_byte' in wanted:
            results['bits_per_byte'] = {path: bits_per_byte(scorer, tok, path, known) for path in text.split(',')}
        if 'card660' in wanted:
            results['card660'] = card660(scorer, tok)
    finally:
        if world_size > 1:
            dist.broadcast_object_list([None])
    return results


def main():
    wanted = [t.strip() for t in tasks.split(',') if t.strip()]
    if not wanted:
        raise InputError("tasks is empty; leave it out for the paper's tasks")
    if limit < 0:
        raise InputError(f'limit={limit}: must not be negative')
    if batch_size < 1:
        raise InputError(f'batch_size={batch_size}: must be 1 or more')
    if data_dir and not Path(data_dir).is_dir():
        raise InputError(f'data_dir={data_dir}: no such folder')
    if 'card660' in wanted and not data_dir:
        raise InputError('card660 needs --data_dir, the folder of its dataset.tsv')
    if 'bits_per_byte' in wanted and not text:
        raise InputError('bits_per_byte needs --text, a text file')
    if missing := [p for p in text.split(',') if text and not Path(p).exists()]:
        raise InputError(f'--text={missing[0]}: no such file or folder')

    where, kind = pick_device(device, dtype)
    opened = [open_model(out_dir, released, revision, tokenizer)]
    if before:
        opened.insert(0, open_model(before) if (Path(before) / 'ckpt.pt').exists() else open_model(released=before))
    which = opened[-1][2]
    target = Path(save) if save else (Path(which.split(',')[0]).parent if not released else Path()) / 'results.json'
    if not os.access(target.parent, os.W_OK):
        raise InputError(f'{target} cannot be written: no such folder, or not yours; name another file with --save')
    distributed = int(os.environ.get('WORLD_SIZE', 1)) > 1
    if distributed:
        dist.init_process_group('nccl' if torch.device(where).type == 'cuda' else 'gloo')
    try:
        known = len(opened[0][1].tokens)
        measured = [measure(*o, wanted, target, where, kind, known) for o in opened]
    finally:
        if distributed:
            dist.destroy_process_group()
    if measured[-1] is None:
        return
    versions = {p: importlib.metadata.version(p) for p in ('torch', 'lm-eval', 'datasets')}
    results = dict(versions=versions, settings=config, device=where, dtype=kind) | measured[-1]
    for part in measured:
        show(part)
    if before:
        results['before'] = measured[0]
        compare(results)
    try:
        temporary = target.with_suffix('.tmp')
        temporary.write_text(json.dumps(results, indent=1, default=str) + '\n')
        os.replace(temporary, target)
        print(f'\n{target}')
        if plot and 'tasks' in results:
            draw(results, target.with_suffix('.png'))
            print(target.with_suffix('.png'))
        if plot and before and 'bits_per_byte' in results:
            draw_texts(results, target.with_name(f'{target.stem}_text.png'))
            print(target.with_name(f'{target.stem}_text.png'))
    except OSError as e:
        raise InputError(f'{target} cannot be written ({e}); name another file with --save') from None


if __name__ == '__main__':
    main()
