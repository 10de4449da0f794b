"""
A model as lm-eval wants it: log P of continuations and texts, and what it writes, in batches shared by all processes.

    import scorer, lm_eval                        # eval.py does the same, and more
    lm_eval.simple_evaluate('mhf', model_args='out_dir=out/mhf_1b', tasks=['piqa'])
"""

import functools
import json
import sys
import traceback
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from checkpoint import open_model, pick_device, pick_dtype
from configurator import InputError

BAR = dict(leave=False, mininterval=0.5 if sys.stderr.isatty() else 20)


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
        predicting = torch.tensor([predicting, targets], pin_memory=pinned)
        predicting, targets = predicting.to(self.device, non_blocking=pinned)
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

    def texts(self, prompts):
        """[(prompt, lm-eval's options)] -> as soon as each is known, its number and the text that goes on from it."""
        from lm_eval.models.utils import normalize_gen_kwargs

        T, alike, batches = self.model.config.block_size, defaultdict(list), []
        # a CPU reads all weights for a token: 16 rows cost little more than one
        room = self.tokens if self.device.type == 'cuda' else 8 * self.tokens
        for k, (prompt, options) in enumerate(prompts):
            options = normalize_gen_kwargs(options)
            known = ['do_sample', 'max_gen_toks', 'temperature', 'top_k', 'top_p', 'until']
            # one beam is no beam search
            if unknown := [key for key in options if key not in known and options[key] != 1]:
                raise InputError(
                    f'{", ".join(unknown)}: not an option of generation here; there are {", ".join(known)}'
                )
            ids = ([] if self.bos is None else [self.bos]) + list(self.tok.encode([prompt])[0])
            # the end of what is too long
            ids = ids[-max(1, T - options['max_gen_toks']) :] or [self.tok.bos]
            alike[json.dumps(options, sort_keys=True)].append((ids, k))
        for options, rows in alike.items():
            rows, options = sorted(rows, key=lambda row: -len(row[0])), json.loads(options)
            while rows:
                n = max(1, min(self.batch_size, room // (len(rows[0][0]) + options['max_gen_toks'])))
                batches.append([(*row, options, torch.initial_seed()) for row in rows[:n]])
                rows = rows[n:]
        numbers = [k for batch in batches for _, k, _, _ in batch]
        yield from zip(numbers, tqdm(self.share('write', batches), 'writing', len(numbers), **BAR), strict=True)

    @torch.no_grad()
    def write(self, batch):
        """
        [(prompt's ids, its number, options, seed)], of the same options -> [the text that goes on from each, up to the
        first of options['until'] in it]. Greedy unless options['do_sample'].
        """
        tok, (first, number, options, seed) = self.tok, batch[0]
        lengths = torch.tensor([len(ids) for ids, *_ in batch], device=self.device)
        # padded at the left to the longest
        ids = [[0] * (len(first) - len(row)) + row for row, *_ in batch]
        until, said, made = [stop for stop in options['until'] if stop], [''] * len(batch), [[] for _ in batch]
        how = dict(temperature=options['temperature'] if options['do_sample'] else 0)
        how |= {key: options[key] for key in ('top_k', 'top_p') if options.get(key)}
        how['generator'] = torch.Generator(self.device).manual_seed((seed + number) % 2**63)
        how['lengths'] = lengths if lengths.min() < len(first) else None
        writing = set(range(len(batch)))
        with self.autocast():
            ids = torch.tensor(ids, device=self.device)
            for tokens in self.model.stream(ids, options['max_gen_toks'], **how):
                for n, token in enumerate(tokens.tolist()):
                    if n not in writing:
                        continue
                    # a document is over: the next begins, or eos, whose role pad may have
                    over = token in (tok.bos, tok.pad)
                    if not over:
                        made[n].append(token)
                        said[n] = tok.decode(made[n])
                    if over or any(stop in said[n] for stop in until):
                        writing.remove(n)
                if not writing:
                    break
        return [min([text, *(text.split(stop)[0] for stop in until)], key=len) for text in said]


@register_model('mhf')
class MHFLM(TemplateLM):
    """A model as lm-eval wants it: of a Scorer, or of what open_model is given. Raises InputError."""

    def __init__(self, scorer=None, bos=None, batch_size=256, max_batch_size=None, device=None, dtype=None, **model):
        super().__init__()
        if scorer is None:
            device = pick_device(device)
            dtype, _ = pick_dtype(dtype, device)
            opened = open_model(**model)
            with_bos = bos if bos is not None else not model.get('released')
            how = dict(batch_size=int(max_batch_size or batch_size), dtype=dtype, tok=opened.tok)
            scorer = Scorer(opened.model.to(device).eval(), opened.tok.bos if with_bos else None, **how)
        self.scorer = scorer
        self.eot_token_id, self.max_length = scorer.tok.bos, scorer.model.config.block_size

    # an abstract property of TemplateLM
    eot_token_id = None

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return list(self.scorer.tok.encode([string])[0])

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self.scorer(pairs, lambda k, r: self.cache_hook.add_partial('loglikelihood', requests[k][0], r))

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """As all models of lm-eval: in windows that do not overlap, bos before the first, a token before others."""
        how = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        texts = [self.tok_encode(request.args[0]) for request in requests]
        rolling = ((k, window) for k, ids in enumerate(texts) for window in get_rolling_token_windows(ids, **how))
        parts = [(k, make_disjoint_window(window)) for k, window in rolling]
        results, left = [0.0] * len(texts), Counter(k for k, _ in parts)
        for part, (logp, _, _) in self.scorer.by_token([window for _, window in parts], None, 'text'):
            k = parts[part][0]
            results[k] += logp.sum().item()
            left[k] -= 1
            if not left[k]:
                self.cache_hook.add_partial('loglikelihood_rolling', requests[k].args, results[k])
        return results

    def generate_until(self, requests, disable_tqdm=False):
        results = [''] * len(requests)
        for k, said in self.scorer.texts([request.args for request in requests]):
            results[k] = said
            self.cache_hook.add_partial('generate_until', requests[k].args, said)
        return results
