"""
The model class for lm-evaluation-harness (lm-eval), and the paper's ten tasks, for eval.py. From Python:

    import lm_eval, mhf.lm
    lm_eval.simple_evaluate(mhf.lm.open_lm('out/mhf_1b'), tasks=['gsm8k'], gen_kwargs='max_gen_toks=128')
"""

import csv
import functools
import logging
import random
import re
from collections import defaultdict
from pathlib import Path

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import chunks, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm

from mhf.checkpoint import load
from mhf.errors import InputError
from mhf.generate import Engine
from mhf.runtime import keep_freed_memory, pick_device, pick_dtype

EVAL_TASKS = Path(__file__).resolve().parent.parent / 'eval_tasks'
GENERATION_OPTIONS = ('do_sample', 'max_gen_toks', 'temperature', 'top_k', 'top_p', 'until')


# -----------------------------------------------------------------------------
# batches of contexts and continuations


def row_length(row):
    """The number of tokens of a row (context, continuations) in pack()."""
    context, continuations = row
    return len(context) - 1 + sum(map(len, continuations))


def pack(rows):
    """
    Rows (context, continuations) -> token ids, positions and segments, (3, N, S) int64.

    Segment 0 is the context without its last token. Segment k is the context's last token, then continuation k without
    its last token: position j of segment k predicts token j of continuation k. Padding is segment -1.
    """
    packed = np.zeros((3, len(rows), max(map(row_length, rows))), np.int64)
    packed[2] = -1
    for n, (context, continuations) in enumerate(rows):
        ids = list(context[:-1])
        C = len(ids)
        positions = list(range(C))
        segments = [0] * C
        for k, continuation in enumerate(continuations, start=1):
            ids += [context[-1], *continuation[:-1]]
            positions += range(C, C + len(continuation))
            segments += [k] * len(continuation)
        packed[:, n, : len(ids)] = ids, positions, segments
    return torch.from_numpy(packed)


# -----------------------------------------------------------------------------
# lm-eval's model


class MHFLM(TemplateLM):
    """
    Log-likelihoods and generation for lm-eval.

    Requests with the same context share one row: the context, then all continuations. A continuation attends to the
    context and itself only, and its positions follow the context's.

    Args:
        bos: the id in front of every context, or None.
        max_tokens: tokens per batch, padding included; default: 65,536 on a GPU, else 2,048, because on a CPU padding
            costs more than a larger batch saves.
    """

    eot_token_id = None  # abstract in TemplateLM

    def __init__(self, model, tok, bos=None, dtype='float32', max_tokens=None):
        super().__init__()
        self.model = model
        self.tok = tok
        self.bos = bos
        self.stop_ids = {tok.bos}  # ids that end a generated text
        self.max_length = model.config.block_size
        self.eot_token_id = tok.bos  # bos starts the next document, so it ends a text
        self._device = model.embed.weight.device
        self.max_tokens = max_tokens or (65536 if self.device.type == 'cuda' else 2048)
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, dtype == 'bfloat16')
        self.info = dict(bos=bos is not None, dtype=dtype, tokenizer=tok.name)  # for the results

    # ---- log-likelihoods

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return list(self.tok.encode([string])[0])

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        T = self.max_length
        pairs = []
        for (_, text), context, continuation in requests:
            context = self.fit_context(context, T + 1 - len(continuation))
            if not context or not 1 <= len(continuation) <= T:
                problem = f"choice '{text:.60}': {len(continuation)} tokens after a context of {len(context)}"
                raise InputError(f'{problem}; each must have at least 1 token, and a choice at most {T}')
            pairs.append((context, continuation))
        results = [None] * len(requests)
        for k, (logp, is_best) in self.score_requests(pairs, 'scoring'):
            results[k] = logp.sum().item(), bool(is_best.all())
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """
        log P of complete texts, as lm-eval's models define it: each token is scored in one window. The context is bos
        in the first window, the preceding token in later ones, and as many preceding tokens as fit in the last one.
        """
        windows = []  # (index of the request, (context, continuation))
        for k, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(k, make_disjoint_window(window)) for window in rolling]
        results = [0.0] * len(requests)
        for i, (logp, _) in self.score_requests([window for _, window in windows], 'text'):
            results[windows[i][0]] += logp.sum().item()
        return results

    def score_requests(self, requests, desc):
        """
        Scores requests (context ids, continuation ids), at most max_length + 1 ids together, neither empty.

        Yields (index of the request, scores (2, n) float64), in the order of computation. The scores of a token of the
        continuation are log P in nats, and 1 if it is the likeliest token, else 0.
        """
        rows = defaultdict(lambda: defaultdict(list))
        for k, (context, continuation) in enumerate(requests):
            rows[tuple(context)][tuple(continuation)].append(k)
        parts = []
        for context, continuations in rows.items():
            # the attention of a row is quadratic in its length: at most 512 tokens, or 4 x the context's, per row
            count = max(512, 4 * len(context)) // max(map(len, continuations))
            parts += [(context, dict(part)) for part in chunks(continuations.items(), max(1, count))]
        batches = [[]]
        for row in sorted(parts, key=row_length, reverse=True):
            size = len(batches[-1])
            if size and (size + 1) * row_length(batches[-1][0]) > self.max_tokens:
                batches.append([])
            batches[-1].append(row)
        with tqdm(desc=desc, total=len(requests), leave=False, disable=None) as bar:
            for batch in batches:
                request_indices = [indices for _, continuations in batch for indices in continuations.values()]
                for indices, scores in zip(request_indices, self.score_batch(batch), strict=True):
                    for k in indices:
                        yield k, scores
                    bar.update(len(indices))

    def fit_context(self, ids, room):
        """Prepends bos to the ids of a context and truncates it on the left to `room` tokens, with one warning."""
        if self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if len(ids) > room:
            message = 'contexts that do not fit in %d tokens with their continuation are truncated on the left'
            warning_once(logging.getLogger(__name__), message, self.max_length)
        return ids[-room:]

    @torch.no_grad()
    def score_batch(self, rows):
        """Rows -> the scores (2, n) of each continuation, in order, as in score_requests."""
        continuations = [continuation for _, row in rows for continuation in row]
        targets = torch.tensor(np.concatenate(continuations), device=self.device)
        ids, positions, segments = pack(rows).to(self.device)
        # with one continuation per row the mask is the causal triangle
        mask = None
        if len(continuations) > len(rows):
            visible = (segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0)  # (N, S, S)
            mask = visible.tril()[:, None]
        with self.autocast():
            h = self.model.hidden_states(ids, positions=positions, mask=mask)
            scores = torch.stack(self.model.predict(h[segments > 0], targets))
        return np.split(scores.cpu().double().numpy(), np.cumsum([len(c) for c in continuations])[:-1], axis=1)

    # ---- generation

    def generate_until(self, requests, disable_tqdm=False):
        """Returns the text generated for each request, cut at its stop strings."""
        bar = tqdm(requests, desc='generating', leave=False, disable=None)
        return [self.generate_text(*request.args) for request in bar]

    @torch.no_grad()
    def generate_text(self, prompt, gen_kwargs):
        """Returns the text generated after a prompt, which is truncated on the left to leave room for it."""
        options = self.parse_gen_kwargs(gen_kwargs)
        prompt_ids = self.fit_context(self.tok_encode(prompt), self.max_length - options['max_gen_toks'])
        prompt_ids = prompt_ids or [self.tok.bos]
        stops = [str(stop) for stop in options['until'] if stop]
        engine = Engine(self.model, options['temperature'], options.get('top_k'), options.get('top_p'))
        new_ids = []
        with self.autocast():
            for token in engine.stream(torch.tensor([prompt_ids], device=self.device), options['max_gen_toks']):
                if token.item() in self.stop_ids:
                    break
                new_ids.append(token.item())
                new_text = self.tok.decode(new_ids)
                if any(stop in new_text for stop in stops):
                    break
        # SentencePiece drops the first space of a text, so decode both
        text = self.tok.decode(prompt_ids + new_ids)[len(self.tok.decode(prompt_ids)) :]
        return postprocess_generated_text(text, stops, None)

    def parse_gen_kwargs(self, gen_kwargs):
        """Returns a request's generation options with defaults. Raises InputError."""
        options = normalize_gen_kwargs(gen_kwargs)
        # options set to 1 (such as num_beams) have no effect
        problems = [f'unknown {key}' for key in options if key not in GENERATION_OPTIONS and options[key] != 1]
        if not 1 <= options['max_gen_toks'] < self.max_length:
            problems.append(f'max_gen_toks={options["max_gen_toks"]} must be from 1 to {self.max_length - 1}')
        if problems:
            fix = "change generation_kwargs in a copy of the task's file in eval_tasks/"
            raise InputError(f'generation options {gen_kwargs}: {", ".join(problems)}; {fix}')
        options['temperature'] = options.get('temperature', 1.0) if options['do_sample'] else 0.0
        return options


# -----------------------------------------------------------------------------
# a model from disk


def open_lm(out_dir='', tokenizer='', bos=None, device=None, dtype=None):
    """Opens a model as eval.py does, with its settings -> MHFLM."""
    device = pick_device(device)
    keep_freed_memory()
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)  # kernels run on the current GPU
    # cuDNN's attention compiles a plan for every prompt length, which takes tens of milliseconds
    torch.backends.cuda.enable_cudnn_sdp(False)
    opened = load(out_dir, tokenizer)
    add_bos = {None: opened.add_bos, True: True, False: False}[bos]
    bos = opened.tok.bos if add_bos else None
    lm = MHFLM(opened.model.to(device), opened.tok, bos, pick_dtype(dtype, device))
    lm.stop_ids = opened.stop_ids
    lm.info |= dict(name=opened.name, model_name=opened.source)
    return lm


# -----------------------------------------------------------------------------
# the paper's tasks


def read_table(name):
    """The rows of a table in eval_tasks/, without empty cells."""
    with open(EVAL_TASKS / name, newline='') as f:
        return [{column: cell for column, cell in row.items() if cell} for row in csv.DictReader(f)]


# {task: its metric and column in the paper's tables, the documents in its full split, the examples in its prompts, the
# prefix of its local files, and the path of its file in lm-eval, which a file in eval_tasks/ replaces}
PAPER = {row.pop('task'): row for row in read_table('paper.csv')}
# the models of the paper's tables: name, size and kind, scores on the tasks, and at 1B those on Card-660
PUBLISHED = [{k: v if k == 'model' else float(v) for k, v in row.items()} for row in read_table('published.csv')]


def find_files(folder, prefix):
    """Returns the files in a folder with the rows of a split: prefix.jsonl, plain or compressed, or all its shards."""
    name = re.compile(re.escape(prefix) + r'(-\d+-of-\d+)?\.jsonl(\.(gz|bz2|xz|zst))?')
    return [str(path.resolve()) for path in sorted(Path(folder).glob(f'{prefix}*')) if name.fullmatch(path.name)]


def local_config(name, config, folder):
    """
    A task's lm-eval config -> the changes that make it read local files, those of another split if a folder lacks the
    scored one. print_results in eval.py names the splits. Raises InputError.
    """
    prefix = PAPER[name]['local']
    files = {split: find_files(folder, f'{prefix}_{split}') for split in ('train', 'validation', 'test')}
    hub_split = config.get('test_split') or config['validation_split']
    scored = next((split for split in (hub_split, 'validation', 'test', 'train') if files[split]), None)
    if scored is None:
        raise InputError(f'{folder} has no {prefix}_{hub_split}.jsonl, which task {name} needs')
    shots_from = 'train' if files['train'] else scored
    data_files = {split: files[split] for split in (scored, shots_from)}
    changes = dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=data_files))
    return changes | dict(training_split=None, validation_split=None, test_split=scored, fewshot_split=shots_from)


def paper_config(name, folder, num_fewshot):
    """Returns the lm-eval config of a task of the paper."""
    from lm_eval.tasks._yaml_loader import load_yaml

    file = EVAL_TASKS / f'{name}.yaml'
    if not file.exists():
        file = Path(lm_eval.__file__).parent / 'tasks' / PAPER[name]['yaml']
    config = dict(num_fewshot=int(PAPER[name]['shots'])) | load_yaml(file)
    config |= {} if num_fewshot is None else dict(num_fewshot=num_fewshot)
    return config | (local_config(name, config, folder) if folder else {})


def load_tasks(names, folder='', num_fewshot=None):
    """
    Loads tasks with their data: the paper's from the hub or from the files in a folder, others as lm-eval defines them.
    num_fewshot replaces a task's own number of examples in the prompt. No network is an OSError, an unknown task a
    KeyError. Returns lm-eval's dict of tasks and groups.
    """
    from lm_eval.tasks import TaskManager  # imports datasets, which takes two seconds

    # finds every YAML file in eval_tasks/; lm-eval's index of all tasks takes seconds
    manager = TaskManager(include_path=EVAL_TASKS, include_defaults=not set(names) <= PAPER.keys())
    # lm_eval.simple_evaluate does the same as the rest, but also describes the environment, which takes seconds
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    loaded = dict(tasks={}, groups={}, group_map={})
    for name in sorted(names, key=PAPER.__contains__):  # the paper's number of examples replaces that of a group
        matches = [name] if name in PAPER else manager.match_tasks([name])
        specs = [paper_config(match, folder, num_fewshot) if match in PAPER else match for match in matches]
        for kind, items in manager.load(specs or [name]).items():  # of a name without a match, an error
            loaded[kind] |= items
    for task in loaded['tasks'].values():
        config = task.config
        own = config.num_fewshot or 0
        task.set_config(key='num_fewshot', value=own if num_fewshot is None else num_fewshot)
        scored = config.test_split or config.validation_split
        split = task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split
        if config.num_fewshot and split == scored and task.fewshot_cfg.samples is None:
            # if the splits are equal, lm-eval leaves the scored document out of its examples, which must be the same
            config.test_split = task.fewshot_cfg.split = scored
            task.sampler.replace_df(list(task.task_docs))
        # process_docs of some tasks shuffles the choices, and lm-eval would call it again for the scores
        task.test_docs = task.validation_docs = lambda docs=task.task_docs: docs
        task.set_fewshot_seed(1234)
    return loaded


def run_tasks(lm, loaded, limit=None):
    """Scores loaded tasks. Returns lm-eval's results with samples."""
    # before the first request is scored
    for task in loaded['tasks'].values():
        if task.OUTPUT_TYPE == 'generate_until':
            lm.parse_gen_kwargs(task.config.generation_kwargs)
    return lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000)
