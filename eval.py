"""
Evaluates a trained model and prints the paper's published numbers next to its own.

    $ python eval.py --out_dir=out/mhf_1b                                     # the paper's ten tasks, from the hub
    $ python eval.py --out_dir=out/mhf_1b --benchmark_dir=folder --limit=100  # part of each, from local files
    $ python eval.py --out_dir=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
    $ python eval.py --tasks=mmlu,gsm8k                                       # any tasks of lm-eval: lm-eval ls tasks
    $ python eval.py --tasks=bits_per_byte --text=book.txt

A new benchmark is an lm-eval file NAME.yaml in eval_tasks/, like race_v2.yaml, for --tasks=NAME.

Writes results/<model>/results_<date>.json, whose `samples` are the prompts and answers of lm-eval's tasks. Bits per
byte include the bos of each later document, unless contexts have no bos (see `bos`).
"""

import contextlib
import importlib.metadata
import json
import math
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from lm_eval.utils import handle_non_serializable, make_table, sanitize_model_name

from configurator import configure
from mhf.data import Bins
from mhf.errors import InputError
from mhf.lm import PAPER, PUBLISHED, load_tasks, open_lm, run_tasks
from mhf.sources import input_files, read_files

# model
# a run (its newest checkpoint), a *.pt, a folder in the released format, or a hub id[@revision]; '': the newest run up
# to two folders below
out_dir = ''
tokenizer = ''  # '': the one that the checkpoint was trained with
# tasks: paper | bits_per_byte | names of lm-eval's tasks and groups; several are separated by commas
tasks = 'paper'
benchmark_dir = ''  # folder of local files for the paper's tasks, instead of the hub
text = ''  # for bits_per_byte: files (.txt, .jsonl, .parquet), globs or folders of shards, separated by commas
num_fewshot = None  # examples in the prompts of lm-eval's tasks; None: as each task defines
limit = None  # documents per task of lm-eval, below 1 a fraction of them; None: all
output_path = 'results'
# evaluation
bos = None  # bos in front of every context; None: as in training, True for train.py's models, False for the authors'
device = None  # cuda | cpu | mps; None: the best available
dtype = None  # bfloat16 | float32; None: bfloat16 on a device with instructions for it

config = configure(globals())


# -----------------------------------------------------------------------------
# bits per byte


def read_ids(path, lm):
    """
    Returns the ids of a file, or of a folder's held-out documents; the bytes of their text; and at least how many of
    these bytes the tokenizer lost. Each document follows bos, if the model has it.
    """
    tok = lm.tok
    if Path(path).is_dir():
        val = Bins(Path(path), 'val', tok)
        ids = val[:].tolist()
        num_bytes = val.bytes
    else:
        ids = []
        num_bytes = 0
        for document in read_files(input_files(str(path))):
            num_bytes += len(document.encode())
            ids += [tok.bos, *tok.encode([document])[0]]
    starts = [k for k, i in enumerate(ids) if i == tok.bos]
    documents = [ids[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    decoded = [tok.decode([i for i in document[1:] if i != tok.unk]) for document in documents]
    lost_bytes = max(0, num_bytes - sum(len(text.encode()) for text in decoded))
    if lm.bos is None:
        ids = [i for i in ids if i != tok.bos]
        # the first token follows nothing, so it is not scored
        num_bytes -= len(tok.decode(ids[:1]).encode())
    if len(ids) < 2:
        raise InputError(f'--text={path}: too little text; name a file with more')
    return ids, num_bytes, lost_bytes


def score_windows(lm, ids):
    """
    Scores token ids (n + 1,), each but the first once, in windows of up to T inputs at a stride of T - T // 2. From the
    second window on, the context of an id is at least T // 2 tokens long.

    Returns two tensors (n,), float64, for each id but the first: nats, and whether it is the likeliest token (1 or 0).
    """
    T = lm.max_length
    windows = []  # (context ids, ids to score)
    start = 0
    first = 1  # the first id that is not scored yet
    while first < len(ids):
        end = start + T + 1
        windows.append((ids[start:first], ids[first:end]))
        first = end
        start += T - T // 2
    scores = dict(lm.score_requests(windows, 'text'))
    logp, is_best = torch.from_numpy(np.concatenate([scores[k] for k in sorted(scores)], axis=1))
    return -logp, is_best


def bits_per_byte(lm, ids, num_bytes, lost_bytes):
    """
    Returns the scores of packed documents. Every bos after the first is scored like a token. Lost bytes make the bits
    per byte smaller: they have no tokens.
    """
    nats, is_best = score_windows(lm, ids)
    nats_per_token = nats.mean().item()
    return dict(
        tokens=len(nats),
        bytes=num_bytes,
        lost_bytes=lost_bytes,
        nats_per_token=nats_per_token,
        bits_per_byte=nats.sum().item() / math.log(2) / num_bytes,
        perplexity=math.exp(min(nats_per_token, 700)),
        top1_accuracy=is_best.mean().item(),
    )


# -----------------------------------------------------------------------------
# tables


def nearest_published(lm):
    """Returns the row of the paper's tables whose model is nearest in kind and size."""
    num_hashes = lm.model.config.num_hashes
    layers = lm.model.num_params()[1]

    def distance(row):
        size_ratio = row['decoder_millions'] * 1e6 / layers
        return abs(math.log(size_ratio)), abs(row['num_hashes'] - num_hashes)

    same_kind = [row for row in PUBLISHED if (row['num_hashes'] == 0) == (num_hashes == 0)]
    return min(same_kind, key=distance)


def print_results(results):
    """Prints lm-eval's tables of tasks and groups, then the paper's metrics and other scores next to its numbers."""
    print(results['name'])
    if 'results' in results:
        print(f'\n{make_table(results)}')
    if results.get('groups'):
        print(make_table(results, 'groups'))
    shots = results.get('n-shot', {})
    paper = [task for task in shots if task in PAPER and shots[task] == int(PAPER[task]['shots'])]
    if paper:
        published = results['published']
        print(f'{"task":<18}{"metric":>10}{"score":>8}  published: {published["model"]} (lm-eval 0.4.8, bos=False)')
    for task in paper:
        metric = PAPER[task]['metric']
        score = 100 * results['results'][task][f'{metric},none']
        count = results['n-samples'][task]['effective']
        task_config = results['configs'][task]
        split = task_config['test_split'] or task_config['validation_split']
        documents = f'{count:,} of {int(PAPER[task]["documents"]):,}, {split}'
        print(f'{task:<18}{metric:>10}{score:>8.2f}{published[PAPER[task]["column"]]:>13.2f}  {documents}')
    for path, values in results.get('bits_per_byte', {}).items():
        print(f'\nbits_per_byte, {path}')
        for key, value in values.items():
            print(f'  {key:<28}{value:>14,.4f}' if isinstance(value, float) else f'  {key:<28}{value:>14}')
    print(f'\nlm-eval {results["packages"]["lm-eval"]}, bos={results["bos"]}')


# -----------------------------------------------------------------------------
# evaluation


def evaluate():
    """Evaluates the model. Returns the results, and the path of the file for them."""
    names = [name for item in tasks.split(',') for name in (PAPER if item == 'paper' else [item])]
    if bool(text) != ('bits_per_byte' in names):
        only = '--text is required by --tasks=bits_per_byte and only used there'
        raise InputError(f"tasks={tasks}, text='{text}': {only}")
    lm = open_lm(out_dir, tokenizer, bos, device, dtype)
    # read all data and try the file for the results before the first score: scores may take hours
    texts = {path: read_ids(path, lm) for path in text.split(',') if path}
    lm_eval_names = [name for name in names if name != 'bits_per_byte']
    loaded = load_tasks(lm_eval_names, benchmark_dir, num_fewshot) if lm_eval_names else None
    name = f'results_{datetime.now():%Y-%m-%dT%H-%M-%S.%f}.json'  # as lm-eval names it
    path = Path(output_path) / sanitize_model_name(lm.info['model_name']) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.unlink()

    print(lm.info['name'])
    results = lm.info | dict(device=str(lm.device), settings=config)
    results['packages'] = {name: importlib.metadata.version(name) for name in ('torch', 'lm-eval', 'datasets')}
    if loaded:
        results |= run_tasks(lm, loaded, limit)
    if not PAPER.keys().isdisjoint(results.get('results', {})):
        results['published'] = nearest_published(lm)
    if texts:
        results['bits_per_byte'] = {path: bits_per_byte(lm, *packed) for path, packed in texts.items()}
    return results, path


def main():
    # only the results go to stdout; lm-eval prints there too, and fails on a closed pipe
    with contextlib.redirect_stdout(sys.stderr):
        results, path = evaluate()
    try:
        path.write_text(json.dumps(results, indent=2, default=handle_non_serializable), encoding='utf-8')
    finally:  # also if the disk is full
        print_results(results)
    print(f'\n{path}')


if __name__ == '__main__':
    main()
