"""
A model as lm-evaluation-harness (lm-eval) wants it, and lm-eval's own command line with that model in it.

    $ python -m mhf.lm run --model_args path=out/mhf_1b --tasks gsm8k,mmlu --num_fewshot 5
    $ python -m mhf.lm run --model_args path=klein9692/raw-3b,revision=checkpoint-200000 --tasks paper
    $ python -m mhf.lm run --help         # lm-eval's settings: --limit, --log_samples, --output_path, --use_cache ...
    $ python -m mhf.lm ls tasks           # lm-eval's tasks and those of eval_tasks/
    $ torchrun --standalone --nproc_per_node=8 -m mhf.lm run --model_args path=out/mhf_1b --tasks mmlu

model_args are path (the out_dir of a run, a folder in the released layout, or a hub id; without it the newest run
here), revision (of a hub id), tokenizer, bos and dtype. A batch is as large as memory allows, whatever --batch_size is.
Each process gets every n-th document; lm-eval lets each draw its own examples for few-shot prompts. From Python:

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

# of progress bars; process 0 of several shows them
BAR = dict(leave=False, mininterval=0.5 if sys.stderr.isatty() else 20, disable=os.environ.get('RANK', '0') != '0')
MAX_ROWS = 256  # of a batch
GENERATION = ('do_sample', 'max_gen_toks', 'temperature', 'top_k', 'top_p', 'until')


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


def row_length(row):
    """How many tokens the model reads of (context, continuations): the last of a continuation predicts nothing."""
    context, continuations = row
    return len(context) + sum(len(continuation) - 1 for continuation in continuations)


def pack(batch):
    """
    Rows -> ids, positions and segments (3, N, S), where segment 0 is the context, k its k-th continuation and -1
    padding; the places n * S + s that predict a token of a continuation; these tokens; their number by continuation.
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
    log P of continuations and texts, and greedy or sampled text, as lm-eval asks for them. Requests with the same
    context are one row: the context, then every continuation, each of which sees the context and itself only and goes
    on from the context's last position. A batch of rows has at most `tokens` tokens, padding included.
    """

    # an abstract property of TemplateLM
    eot_token_id = None

    def __init__(self, model, tok, bos=None, dtype='float32', tokens=None, world=None):
        super().__init__()
        self.model = model
        self.tok = tok
        # before every context; None is no bos
        self.bos = bos
        self.tokens = tokens or tokens_in_memory(model)
        self._device = model.embed.weight.device
        self.autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, dtype == 'bfloat16')
        self.eot_token_id = tok.bos
        self.max_length = model.config.block_size
        # what lm-eval writes of the model beside its results
        self.about = dict(bos=bos is not None, dtype=dtype, tokenizer=tok.name)
        # numbers of the last requests whose context did not fit; {(task, number of the document)} of all of them
        self.too_long, self.cut = [], set()
        self.world = world
        if world:
            self._rank = world.rank
            self._world_size = world.size

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """What lm-eval calls with model_args, which are open_lm's, and with its batch_size and device."""
        known = inspect.signature(open_lm).parameters
        for key in arg_dict:
            if key not in known:
                raise InputError(f"model_args: unknown '{key}'{did_you_mean(key, known)} (known: {', '.join(known)})")
        return open_lm(**dict(device=(additional_config or {}).get('device')) | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string, additional_config=None):
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self):
        return self.about

    # ---- what lm-eval's evaluator asks for where world_size is above 1

    def all_gather(self, tensor):
        parts = [None] * self.world_size
        dist.all_gather_object(parts, tensor.cpu(), group=self.world.host)
        return torch.stack(parts).flatten()

    def gather_object(self, obj, dst=0):
        if self.world_size == 1:
            return [obj]
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst, group=self.world.host)
        return parts

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
        """As all models of lm-eval: in windows that do not overlap, bos before the first, a token before others."""
        how = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        windows, text_of = [], []
        for k, request in enumerate(requests):
            for window in get_rolling_token_windows(self.tok_encode(request.args[0]), **how):
                windows.append(make_disjoint_window(window))
                text_of.append(k)
        results = [0.0] * len(requests)
        for number, (logp, _, _) in self.by_token(windows, None, 'text'):
            results[text_of[number]] += logp.sum().item()
        return results

    def note_cut(self, requests):
        """Warns of the contexts of these requests that did not fit."""
        cut = {(requests[k].task_name, requests[k].doc_id) for k in self.too_long}
        for task, number in Counter(task for task, _ in cut).items():
            message = '%s: %d documents with a context over %d tokens, of which the model sees the end'
            logging.getLogger('lm_eval.mhf').warning(message, task, number, self.max_length)
        self.cut |= cut

    def by_token(self, requests, bos, desc):
        """
        [(context ids, continuation ids)] -> as soon as each is known, its number and (3, n), float64, of its
        continuation: log P in nats, is the token the likeliest (1 or 0), probability of the likeliest.
        """
        batches = [[]]
        for row in self.rows(requests, bos):
            rows = len(batches[-1])
            if rows and (rows == MAX_ROWS or (rows + 1) * row_length(batches[-1][0]) > self.tokens):
                batches.append([])
            batches[-1].append(row)
        with tqdm(desc=desc, total=len(requests), **BAR) as bar:
            for batch in batches:
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
            if not continuation or not context:
                raise InputError(f'request {k}: an empty {"continuation" if context else "context"} has no probability')
            if len(continuation) > T:
                raise InputError(f'request {k}: {len(continuation)} tokens to score are over the context of {T}')
            room = T + 1 - len(continuation)
            if len(context) > room:
                self.too_long.append(k)
            rows[tuple(context[-room:])][tuple(continuation)].append(k)
        return sorted(rows.items(), key=row_length, reverse=True)

    def in_memory(self, work, batch):
        """work(batch), in halves where the whole does not fit."""
        try:
            return work(batch) if batch else []
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise InputError(f'a single sequence does not fit {self.device}') from None
        half = len(batch) // 2
        return self.in_memory(work, batch[:half]) + self.in_memory(work, batch[half:])

    @torch.no_grad()
    def score(self, batch):
        """Rows -> [(3, n)] of each continuation, in order, as in by_token."""
        inputs, predicting, targets, counts = pack(batch)
        ids, positions, segments = inputs.to(self.device)
        mask = None
        if len(counts) == len(batch):
            # no row has two continuations: the causal triangle is all
            positions = None
        else:
            seen = (segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0)  # (N, S, S)
            mask = seen.tril()[:, None]
        with self.autocast():
            h = self.model.hidden_states(self.model.sign(ids), positions=positions, mask=mask).flatten(0, 1)
            # the head sees only the positions that predict a token of a continuation
            h = h[torch.tensor(predicting, device=self.device)]
            of_tokens = torch.stack(self.model.predict(h, torch.tensor(targets, device=self.device)))
        return np.split(of_tokens.cpu().double().numpy(), np.cumsum(counts)[:-1], axis=1)

    # ---- texts

    def generate_until(self, requests, disable_tqdm=False):
        results = [''] * len(requests)
        self.too_long = []
        # a batch has the same options
        alike = defaultdict(list)
        for k, request in enumerate(requests):
            prompt, options = request.args[0], self.checked(request.args[1])
            room = self.max_length - options['max_gen_toks']
            ids = ([] if self.bos is None else [self.bos]) + self.tok_encode(prompt)
            if len(ids) > room:
                self.too_long.append(k)
            alike[json.dumps(options, sort_keys=True)].append((ids[-room:] or [self.tok.bos], k))
        self.note_cut(requests)
        # a CPU reads all weights for a token: 16 rows cost little more than one
        tokens = self.tokens if self.device.type == 'cuda' else 8 * self.tokens
        with tqdm(desc='writing', total=len(requests), **BAR) as bar:
            for key, rows in alike.items():
                options = json.loads(key)
                rows.sort(key=lambda row: len(row[0]), reverse=True)
                longest = len(rows[0][0]) + options['max_gen_toks']
                size = min(MAX_ROWS, max(1, tokens // longest))
                for begin in range(0, len(rows), size):
                    batch = rows[begin : begin + size]
                    write = functools.partial(self.write, options=options)
                    said = self.in_memory(write, [ids for ids, _ in batch])
                    for (_, k), text in zip(batch, said, strict=True):
                        results[k] = text
                        self.cache_hook.add_partial('generate_until', requests[k].args, text)
                    bar.update(len(batch))
        return results

    def checked(self, options):
        """lm-eval's options of a request, with its defaults. Raises InputError."""
        from lm_eval.models.utils import normalize_gen_kwargs

        options = normalize_gen_kwargs(options)
        # one beam is no beam search
        if unknown := [key for key in options if key not in GENERATION and options[key] != 1]:
            known = ', '.join(GENERATION)
            raise InputError(f'{", ".join(unknown)}: not an option of generation here; there are {known}')
        number, T = options['max_gen_toks'], self.max_length
        if number >= T:
            too_many = f'max_gen_toks={number} leaves nothing of the prompt in a context of {T} tokens'
            raise InputError(f'{too_many}; give a smaller one, with --gen_kwargs max_gen_toks={T // 2}')
        return options

    @torch.no_grad()
    def write(self, prompts, options):
        """Ids of prompts, the longest first -> the text after each, up to the first of options['until'] in it."""
        longest = len(prompts[0])
        # padded at the left
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        lengths = None
        if len(prompts[-1]) < longest:
            lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        temperature = options['temperature'] if options['do_sample'] else 0
        writer = Writer(self.model, temperature, options.get('top_k') or None, options.get('top_p') or None)
        until = [stop for stop in options['until'] if stop]
        made = [[] for _ in prompts]
        said = [''] * len(prompts)
        writing = set(range(len(prompts)))
        with self.autocast():
            for tokens in writer.stream(ids, options['max_gen_toks'], lengths=lengths):
                tokens = tokens.tolist()
                for n in list(writing):
                    # a document is over: the next begins with bos, or eos comes, which may serve as pad
                    if tokens[n] in (self.tok.bos, self.tok.pad):
                        writing.remove(n)
                        continue
                    made[n].append(tokens[n])
                    said[n] = text_after(self.tok, prompts[n], made[n])
                    if any(stop in said[n] for stop in until):
                        writing.remove(n)
                if not writing:
                    break
        return [min([text, *(text.split(stop)[0] for stop in until)], key=len) for text in said]


# -----------------------------------------------------------------------------
# a model from disk, and the command line


def trained_here(source):
    """Has train.py trained the model of this folder or hub id, or was it released by the authors?"""
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
    its revision. bos before every context: None is True for a model that was trained here, as its documents begin with
    one, and False for another, as in the paper. Of several processes each opens the model. Raises InputError.
    """
    if bos not in (None, True, False):
        raise InputError(f'bos={bos!r}: must be True or False, or left out')
    device = pick_device(device)
    dtype, why_dtype = pick_dtype(dtype, device)
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)
    # lm-eval reads numbers where it can
    path, revision = str(path), str(revision)
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
    """lm-eval's own, which knows the tasks of eval_tasks/; its model is mhf unless --model names another."""
    from lm_eval.__main__ import HarnessCLI, setup_logging

    setup_logging(logging.WARNING if BAR['disable'] else logging.INFO)
    # that tasks of eval_tasks/ take the place of its own
    logging.getLogger('lm_eval.tasks').setLevel(logging.ERROR)
    cli = HarnessCLI()
    args = cli.parse_args()
    more = getattr(args, 'include_path', None)
    args.include_path = [str(Path(__file__).resolve().parent.parent / 'eval_tasks'), *([more] if more else [])]
    if args.command == 'run' and not args.config:
        args.model = args.model or 'mhf'
        # lm-eval's default is cuda:0
        args.device = args.device or pick_device()
    try:
        cli.execute(args)
    # an unknown task, the hub out of reach; the author of a task sees the traceback with this level
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
