"""
A model as lm-evaluation-harness (lm-eval) wants it, and lm-eval's own command line with that model in it.

    $ python -m mhf.lm run --model_args path=out/mhf_1b --tasks gsm8k,mmlu --num_fewshot 5
    $ python -m mhf.lm run --model_args path=klein9692/raw-3b,revision=checkpoint-200000 --tasks paper
    $ python -m mhf.lm run --help         # lm-eval's settings: --limit, --log_samples, --output_path, --use_cache ...
    $ python -m mhf.lm ls tasks           # lm-eval's tasks and those of eval_tasks/
    $ torchrun --standalone --nproc_per_node=8 -m mhf.lm run --model_args path=out/mhf_1b --tasks mmlu

model_args are path (the out_dir of a run, a folder in the released layout, or a hub id; without it the newest run
here), revision (of a hub id), tokenizer, bos and dtype. A batch is as large as memory allows, whatever --batch_size is.
Of n processes each gets every n-th document, and draws its own examples for few-shot prompts. From Python:

    import lm_eval, mhf.lm
    lm_eval.simple_evaluate('mhf', model_args='path=out/mhf_1b', tasks=['piqa'])
"""

import atexit
import functools
import inspect
import json
import logging
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from configurator import InputError, did_you_mean
from mhf.checkpoint import digest_of_state
from mhf.device import pick_device, pick_dtype
from mhf.generate import Writer
from mhf.released import fetched, open_model
from mhf.tasks import EVAL_TASKS

# how progress bars look; of several processes the first one shows them
BAR = dict(leave=False, mininterval=0.5 if sys.stderr.isatty() else 20, disable=os.environ.get('RANK', '0') != '0')
MAX_ROWS = 256  # of a batch
GENERATION = ('do_sample', 'max_gen_toks', 'temperature', 'top_k', 'top_p', 'until')


def tokens_in_memory(model):
    """How many tokens may go through the model at a time, padding included."""
    device = model.embed.weight.device
    # on a CPU, padding costs more than a larger batch saves
    if device.type != 'cuda':
        return 2048
    # memory that an earlier model left to the allocator counts as free
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # a forward pass takes 11 to 12 times as many bytes a token as this (fake tensors, 100M to 3B)
    widest = max(model.config.num_coordinates * model.config.hidden_size, model.config.intermediate_size)
    # the other half is for the head and the mask
    return int(min(65536, free / 2 / (16 * widest)))


def row_length(row):
    """How many tokens the model reads of (context, continuations): all but the last one of each continuation."""
    context, continuations = row
    return len(context) + sum(len(continuation) - 1 for continuation in continuations)


def pack(batch):
    """
    Rows -> four things:

    ids, positions and segments (3, N, S): segment 0 is the context, k its k-th continuation, -1 padding
    the places n * S + s that predict a token of a continuation
    the tokens that they predict
    the number of tokens of each continuation
    """
    S = max(map(row_length, batch))
    inputs = np.zeros((3, len(batch), S), np.int64)
    inputs[2] = -1
    predicting = []
    targets = []
    counts = []
    for n, (context, continuations) in enumerate(batch):
        C = len(context)
        inputs[0, n, :C] = context
        inputs[1, n, :C] = range(C)
        inputs[2, n, :C] = 0
        end = C
        for k, continuation in enumerate(continuations, start=1):
            begin = end
            # the last token is not read, because it predicts nothing
            end = begin + len(continuation) - 1
            inputs[0, n, begin:end] = continuation[:-1]
            inputs[1, n, begin:end] = range(C, C + end - begin)
            inputs[2, n, begin:end] = k
            # the context's last token predicts the first of each continuation
            predicting += [n * S + C - 1, *range(n * S + begin, n * S + end)]
            targets += continuation
            counts.append(len(continuation))
    return torch.from_numpy(inputs), predicting, targets, counts


def text_after(tok, prompt, made):
    """The text of the ids `made`, which follow the prompt's: SentencePiece drops the first space of what it decodes."""
    before = prompt[-8:]
    return tok.decode(before + made)[len(tok.decode(before)) :]


@register_model('mhf')
class MHFLM(TemplateLM):
    """
    log P of continuations and texts, and greedy or sampled text, as lm-eval asks for them.

    Requests with the same context are one row: the context, then every continuation. A continuation sees the context
    and itself only, and its positions go on from the context's last one. A batch of rows has at most `tokens` tokens,
    padding included.
    """

    # an abstract property of TemplateLM
    eot_token_id = None

    def __init__(self, model, tok, bos=None, dtype='float32', tokens=None, world=None):
        super().__init__()
        self.model = model
        self.tok = tok
        # the id before every context, or None
        self.bos = bos
        self.tokens = tokens or tokens_in_memory(model)
        self._device = model.embed.weight.device
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, dtype == 'bfloat16')
        self.eot_token_id = tok.bos
        self.max_length = model.config.block_size
        # what lm-eval writes of the model beside its results
        self.about = dict(bos=bos is not None, dtype=dtype, tokenizer=tok.name)
        # of the last requests, the numbers of those whose context did not fit
        self.too_long = []
        # {(task, number of the document)} of every context so far that did not fit
        self.cut = set()
        self.world = world
        if world:
            self._rank = world.rank
            self._world_size = world.size

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """lm-eval calls it with model_args, which are the arguments of open_lm, and with its batch_size and device."""
        known = inspect.signature(open_lm).parameters
        for key in arg_dict:
            if key not in known:
                raise InputError(f"model_args: unknown '{key}'{did_you_mean(key, known)} (known: {', '.join(known)})")
        of_lm_eval = additional_config or {}
        return open_lm(**dict(device=of_lm_eval.get('device')) | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string, additional_config=None):
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self):
        return self.about

    # ---- what lm-eval's evaluator asks for where world_size is above 1

    def all_gather(self, tensor):
        of_ranks = [None] * self.world_size
        dist.all_gather_object(of_ranks, tensor.cpu(), group=self.world.host)
        return torch.stack(of_ranks).flatten()

    def gather_object(self, obj, dst=0):
        """Each process's obj, a list, on the process dst; None on others."""
        if self.world_size == 1:
            return [obj]
        of_ranks = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, of_ranks, dst, group=self.world.host)
        return of_ranks

    def barrier(self):
        if self.world_size > 1:
            dist.barrier(group=self.world.host)

    # ---- scores

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return list(self.tok.encode([string])[0])

    def loglikelihood(self, requests, disable_tqdm=False):
        results = super().loglikelihood(requests, disable_tqdm or self.rank > 0)
        self.note_cut(requests)
        return results

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        results = [None] * len(requests)
        pairs = [(context, continuation) for _, context, continuation in requests]
        for k, (logp, best, _) in self.by_token(pairs, self.bos, 'scoring'):
            results[k] = logp.sum().item(), bool(best.all())
            self.cache_hook.add_partial('loglikelihood', requests[k][0], results[k])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """
        log P of each whole text, as all models of lm-eval give it: in windows that do not overlap. The context of the
        first window is bos, and that of a later one the token before it.
        """
        windows = []
        text_of = []  # the number of each window's text
        for k, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append(make_disjoint_window(window))
                text_of.append(k)
        results = [0.0] * len(requests)
        for number, (logp, _, _) in self.by_token(windows, None, 'text'):
            results[text_of[number]] += logp.sum().item()
        return results

    def note_cut(self, requests):
        """Warns of the requests whose context did not fit, and keeps their documents in `cut`."""
        cut = {(requests[k].task_name, requests[k].doc_id) for k in self.too_long}
        for task, number in Counter(task for task, _ in cut).items():
            message = '%s: %d documents with a context over %d tokens; the model sees its end'
            logging.getLogger('lm_eval.mhf').warning(message, task, number, self.max_length)
        self.cut |= cut

    def by_token(self, requests, bos, desc):
        """
        Scores requests [(context ids, continuation ids)]. Yields the number of each as soon as it is known, with
        (3, n), float64, of the n tokens of its continuation: log P in nats, whether the token is the likeliest (1 or
        0), and the probability of the likeliest. bos: the id before every context, or None.
        """
        batches = [[]]
        for row in self.rows(requests, bos):
            rows = len(batches[-1])
            if rows and (rows == MAX_ROWS or (rows + 1) * row_length(batches[-1][0]) > self.tokens):
                batches.append([])
            batches[-1].append(row)
        with tqdm(desc=desc, total=len(requests), **BAR) as bar:
            for batch in batches:
                # for each continuation the requests that ask for it
                numbers = [ks for _, continuations in batch for ks in continuations.values()]
                for ks, of_tokens in zip(numbers, self.in_memory(self.score, batch), strict=True):
                    for k in ks:
                        yield k, of_tokens
                    bar.update(len(ks))

    def rows(self, requests, bos):
        """Requests -> [(context, {continuation: the numbers of its requests})], the longest first."""
        T = self.max_length
        self.too_long = []
        rows = defaultdict(lambda: defaultdict(list))
        for k, (context, continuation) in enumerate(requests):
            if bos is not None and context[:1] != [bos]:
                context = [bos, *context]
            if not context:
                raise InputError(f'request {k}: an empty context has no probability')
            if not continuation:
                raise InputError(f'request {k}: an empty continuation has no probability')
            if len(continuation) > T:
                raise InputError(f'request {k}: {len(continuation)} tokens to score are over the context of {T}')
            room = T + 1 - len(continuation)
            if len(context) > room:
                self.too_long.append(k)
            rows[tuple(context[-room:])][tuple(continuation)].append(k)
        return sorted(rows.items(), key=row_length, reverse=True)

    def in_memory(self, work, batch):
        """work(batch), in halves where the whole does not fit into memory. Raises InputError."""
        try:
            return work(batch) if batch else []
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise InputError(f'a single sequence does not fit {self.device}') from None
        half = len(batch) // 2
        return self.in_memory(work, batch[:half]) + self.in_memory(work, batch[half:])

    @torch.no_grad()
    def score(self, batch):
        """Rows -> [(3, n) of each continuation], in order, as in by_token."""
        inputs, predicting, targets, counts = pack(batch)
        ids, positions, segments = inputs.to(self.device)
        mask = None
        if len(counts) == len(batch):
            # no row has two continuations, so the mask is the causal triangle
            positions = None
        else:
            seen = (segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0)  # (N, S, S)
            mask = seen.tril()[:, None]
        with self.autocast():
            h = self.model.hidden_states(self.model.signatures[ids], positions=positions, mask=mask).flatten(0, 1)
            # the head sees only the positions that predict a token of a continuation
            h = h[torch.tensor(predicting, device=self.device)]
            of_tokens = torch.stack(self.model.predict(h, torch.tensor(targets, device=self.device)))
        return np.split(of_tokens.cpu().double().numpy(), np.cumsum(counts)[:-1], axis=1)

    # ---- texts

    def generate_until(self, requests, disable_tqdm=False):
        results = [''] * len(requests)
        batches = self.batches_to_write(requests)
        self.note_cut(requests)
        with tqdm(desc='writing', total=len(requests), **BAR) as bar:
            for options, batch in batches:
                write = functools.partial(self.write, options=options)
                texts = self.in_memory(write, [ids for ids, _ in batch])
                for (_, k), text in zip(batch, texts, strict=True):
                    results[k] = text
                    self.cache_hook.add_partial('generate_until', requests[k].args, text)
                bar.update(len(batch))
        return results

    def batches_to_write(self, requests):
        """
        Requests -> [(options, [(prompt ids, number of the request)])]: prompts with the same options go together, the
        longest first. A prompt loses its beginning where it does not fit.
        """
        self.too_long = []
        by_options = defaultdict(list)
        for k, request in enumerate(requests):
            options = self.checked(request.args[1])
            room = self.max_length - options['max_gen_toks']
            ids = self.tok_encode(request.args[0])
            if self.bos is not None:
                ids = [self.bos, *ids]
            if len(ids) > room:
                self.too_long.append(k)
            by_options[json.dumps(options, sort_keys=True)].append((ids[-room:] or [self.tok.bos], k))
        # a CPU reads all weights for a token: 16 rows cost little more than one
        tokens = self.tokens if self.device.type == 'cuda' else 8 * self.tokens
        batches = []
        for written, prompts in by_options.items():
            options = json.loads(written)
            prompts.sort(key=lambda prompt: len(prompt[0]), reverse=True)
            longest = len(prompts[0][0]) + options['max_gen_toks']
            size = min(MAX_ROWS, max(1, tokens // longest))
            batches += [(options, prompts[begin : begin + size]) for begin in range(0, len(prompts), size)]
        return batches

    def checked(self, options):
        """lm-eval's options of a request, with its defaults. Raises InputError."""
        from lm_eval.models.utils import normalize_gen_kwargs

        options = normalize_gen_kwargs(options)
        # a number of 1 asks for nothing: one beam is no beam search
        unknown = [key for key in options if key not in GENERATION and options[key] != 1]
        if unknown:
            known = ', '.join(GENERATION)
            raise InputError(f'{", ".join(unknown)}: not an option of generation here; there are {known}')
        number = options['max_gen_toks']
        T = self.max_length
        if number >= T:
            too_many = f'max_gen_toks={number} leaves nothing of the prompt in a context of {T} tokens'
            raise InputError(f'{too_many}; give a smaller one, with --gen_kwargs max_gen_toks={T // 2}')
        return options

    @torch.no_grad()
    def write(self, prompts, options):
        """Ids of prompts, the longest first -> the text after each, which ends before any of options['until']."""
        longest = len(prompts[0])
        # padding is at the left
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        lengths = None
        if len(prompts[-1]) < longest:
            lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        temperature = options['temperature'] if options['do_sample'] else 0
        writer = Writer(self.model, temperature, options.get('top_k') or None, options.get('top_p') or None)
        until = [stop for stop in options['until'] if stop]
        made = [[] for _ in prompts]  # ids
        texts = [''] * len(prompts)
        writing = set(range(len(prompts)))  # the rows whose text goes on
        with self.autocast():
            for tokens in writer.stream(ids, options['max_gen_toks'], lengths=lengths):
                tokens = tokens.tolist()
                for n in list(writing):
                    # stop at bos (a new document) or eos (which may serve as pad)
                    if tokens[n] in (self.tok.bos, self.tok.pad):
                        writing.remove(n)
                        continue
                    made[n].append(tokens[n])
                    texts[n] = text_after(self.tok, prompts[n], made[n])
                    if any(stop in texts[n] for stop in until):
                        writing.remove(n)
                if not writing:
                    break
        return [min([text, *(text.split(stop)[0] for stop in until)], key=len) for text in texts]


# -----------------------------------------------------------------------------
# a model from disk, and the command line


def trained_here(source):
    """Whether train.py trained the model of this folder or hub id; if not, the authors released it."""
    folder = fetched(source)
    return (folder / 'ckpt.pt').exists() or 'trained_loss' in json.loads((folder / 'config.json').read_text())


def meet(device):
    """The World of the processes that torchrun has started, or None. Raises InputError."""
    if os.environ.get('WORLD_SIZE', '1') == '1':
        return None
    # it takes two seconds to import
    from mhf.distributed import World

    world = World()
    # reading and downloading may take long
    world.meet(device, timeout=24 * 3600)
    atexit.register(dist.destroy_process_group)
    return world


def open_lm(path='', revision='', tokenizer='', bos=None, device=None, dtype=None):
    """
    The MHFLM of a run (its out_dir, '' is the newest here), of a folder in the released layout, or of a hub id with
    its revision. Of several processes each opens the model. Raises InputError.

    bos: whether it stands before every context. None is True for a model that was trained here, whose documents begin
    with one, and False for another, as in the paper.
    """
    if bos not in (None, True, False):
        raise InputError(f'bos={bos!r}: must be True or False, or left out')
    device = pick_device(device)
    dtype, why_dtype = pick_dtype(dtype, device)
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)
    # lm-eval makes a number of every text that can be one
    path = str(path)
    revision = str(revision)
    if not path or (Path(path) / 'ckpt.pt').exists():
        opened = open_model(out_dir=path, tokenizer=tokenizer)
    else:
        opened = open_model(released=f'{path}@{revision}' if revision else path, tokenizer=tokenizer)
    if bos is None:
        bos = trained_here(opened.source)
    world = meet(device)
    if world:
        dtype, why_dtype = world.of_first((dtype, why_dtype))
        world.agree(dict(weights=digest_of_state(opened.model.state_dict())[:8]))
    lm = MHFLM(opened.model.to(device).eval(), opened.tok, opened.tok.bos if bos else None, dtype, world=world)
    lm.about |= dict(name=opened.name, source=opened.source, why_dtype=why_dtype)
    if why_dtype:
        logging.getLogger('lm_eval.mhf').info('dtype=%s: %s', dtype, why_dtype)
    return lm


def main():
    """lm-eval's own command line, which also knows the tasks of eval_tasks/. Its model is mhf, but for --model."""
    from lm_eval.__main__ import HarnessCLI, setup_logging

    setup_logging(logging.WARNING if BAR['disable'] else logging.INFO)
    # it would warn that tasks of eval_tasks/ take the place of lm-eval's own
    logging.getLogger('lm_eval.tasks').setLevel(logging.ERROR)
    cli = HarnessCLI()
    args = cli.parse_args()
    folders = [str(EVAL_TASKS)]
    if getattr(args, 'include_path', None):
        folders.append(args.include_path)
    args.include_path = folders
    if args.command == 'run' and not args.config:
        args.model = args.model or 'mhf'
        # lm-eval's default is cuda:0
        args.device = args.device or pick_device()
    try:
        cli.execute(args)
    # an unknown task, or the hub out of reach; this level shows the author of a task the traceback
    except (OSError, ValueError) as e:
        if os.environ.get('LMEVAL_LOG_LEVEL', '').upper() == 'DEBUG':
            raise
        raise InputError(e) from None


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; with --use_cache the same command goes on from the answers that are known', file=sys.stderr)
        sys.exit(130)
