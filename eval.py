"""
Evaluates a checkpoint or a released model, on P(w) normalised over real tokens, beside the paper's published numbers.

    $ python eval.py --out_dir=out/mhf_1b                                     # the paper's ten tasks, from the hub
    $ python eval.py --out_dir=out/mhf_1b --data_dir=benchmarks --limit=100   # a part of each, from local files
    $ python eval.py --released=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe@checkpoint-200000
    $ python eval.py --tasks=bits_per_byte --text=book.txt
    $ python eval.py --tasks=card660 --data_dir=card660
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out/mhf_1b   # documents shared by 8 GPUs

Results are written to results/<model>/results_<date>.json. All other tasks of lm-eval run on its own command line, with
this model in it: python -m mhf.lm run --help.
"""

import importlib.metadata
import json
import math
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.utils import handle_non_serializable, make_table, sanitize_model_name
from tqdm import tqdm

from configurator import InputError, configure, did_you_mean
from mhf.bins import held_out_split
from mhf.lm import BAR, open_lm
from mhf.sources import Source, documents
from mhf.tasks import PAPER, PUBLISHED, load_tasks, run_tasks

# what to evaluate
out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id[@revision]
tokenizer = ''  # '' is the one the checkpoint was trained with
# on what: paper | bits_per_byte | card660 | some of the paper's tasks by their names, several separated by commas
tasks = 'paper'
data_dir = ''  # local files instead of the hub; card660's folder
# of bits_per_byte, several separated by commas: .txt, .jsonl, .parquet, packed or not; the held-out split of bins
text = ''
limit = None  # documents of each task, for a quick look
output_path = 'results'
# how
bos = None  # bos before every context; None is True for a model trained here, False for a released one, as the paper
device = None
dtype = None

config = configure(globals())

OURS = ('paper', 'bits_per_byte', 'card660')


# -----------------------------------------------------------------------------
# text and rare words


def windows(ids, T):
    """Token ids -> requests for all but the first; from the second request on, each sees half a context T or more."""
    n = len(ids) - 1
    for begin in range(0, max(min(n, 1), n - T // 2), T - T // 2):
        # the half that the window before has scored
        scored = begin + 1 + (T // 2 if begin else 0)
        yield ids[begin:scored], ids[scored : begin + T + 1]


def sliding(lm, ids):
    """
    Token ids (n + 1,) -> of each but the first: nats, is it the likeliest, probability of the likeliest; three (n,).
    Processes share the windows; None on those above 0.
    """
    requests = list(windows(ids, lm.max_length))
    mine = requests[lm.rank :: lm.world_size]
    scored = dict(lm.by_token(mine, None, 'text'))
    of_ranks = lm.gather_object([scored[k] for k in range(len(mine))])
    if of_ranks is None:
        return None
    parts = [None] * len(requests)
    for rank, of_rank in enumerate(of_ranks):
        parts[rank :: lm.world_size] = of_rank
    logp, right, confidence = torch.from_numpy(np.concatenate(parts, axis=1))
    return -logp, right, confidence


def calibration_error(right, confidence, bins=15):
    """Expected calibration error: |accuracy - confidence| in equal intervals of confidence, weighted by tokens."""
    which = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return gaps.abs().sum().item() / len(right)


def text_file(path, tok):
    """(token ids, bytes of text) of all documents of a file, as prepare.py makes bins of them. Raises InputError."""
    ids, size = [], 0
    for text, _ in tqdm(documents(Source(str(path))), desc='encode', unit=' documents', delay=1, **BAR):
        size += len(text.encode())
        ids += [tok.bos, *tok.encode([text])[0]]
    if not ids:
        raise InputError(f'--text={path}: no text in it')
    return ids, size


def bits_per_byte(lm, ids, size):
    """
    Of documents back to back, bos before each, as in training: their ids and their size in bytes -> a dict, in windows
    that overlap by half; None on processes above 0.
    """
    scored = sliding(lm, ids)
    if scored is None:
        return None
    nats, right, confidence = scored
    mean, T = nats.mean().item(), lm.max_length
    results = dict(bos=True, tokens=len(nats), bytes=size, window=T, stride=T - T // 2, nats_per_token=mean)
    results['bits_per_byte'] = nats.sum().item() / math.log(2) / size
    results['perplexity'] = math.exp(min(mean, 700))
    results['top1_accuracy'] = right.mean().item()
    results['expected_calibration_error'] = calibration_error(right, confidence)
    return results


def word_pairs(folder):
    """[(word, word, human similarity)] of Card-660. Raises InputError."""
    path = Path(folder) / 'dataset.tsv'
    try:
        lines = [line.split('\t') for line in path.read_text(encoding='utf-8').splitlines() if line]
        return [(a, b, float(score)) for a, b, score in lines]
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {e}; --data_dir must be the folder of Card-660's dataset.tsv") from None


@torch.no_grad()
def card660(lm, pairs, with_bos):
    """Correlation of human similarity with the cosine of two words' hidden states at their last token."""
    from scipy.stats import pearsonr, spearmanr

    model, tok = lm.model, lm.tok
    last, second_to_last = {}, {}
    for word in tqdm(sorted({word for a, b, _ in pairs for word in (a, b)}), 'card660', **BAR):
        ids = ([tok.bos] if with_bos else []) + list(tok.encode([word.replace('_', ' ')])[0])
        states = []
        with lm.autocast():
            h = model.hidden_states(model.sign(torch.tensor([ids], device=lm.device)), states=states)
        last[word] = h[0, -1].float()
        second_to_last[word] = states[-1][0, -1].float()
    gold = [score for _, _, score in pairs]
    results = dict(bos=with_bos, pairs=len(pairs))
    for layer, of_word in dict(last=last, second_to_last=second_to_last).items():
        cosines = [F.cosine_similarity(of_word[a], of_word[b], dim=0).item() for a, b, _ in pairs]
        results[f'{layer}_pearson'] = float(pearsonr(cosines, gold)[0])
        results[f'{layer}_spearman'] = float(spearmanr(cosines, gold)[0])
    return results


# -----------------------------------------------------------------------------
# tables, and the whole


def nearest_published(c, decoder, column='ARC-E'):
    """The row with that column, in the paper's tables, whose kind and size are nearest; decoder: its parameters."""
    distances = {}
    for name, row in PUBLISHED.items():
        if column in row:
            H, size = row['num_hashes'], row['decoder_millions'] * 1e6
            distances[name] = (H == 0) != (c.num_hashes == 0), abs(math.log(size / decoder)), abs(H - c.num_hashes)
    nearest = min(distances, key=distances.get)
    return dict(model=nearest, **PUBLISHED[nearest])


def show_tasks(results):
    """lm-eval's table of all scores, then the paper's metrics beside its own numbers."""
    published = results['published']
    print(f'\n{make_table(results)}')
    print(f'{"task":<18}{"metric":>10}{"score":>8}  published: {published["model"]}')
    for task, scores in results['results'].items():
        metric, column = PAPER[task]['metric'], PAPER[task]['column']
        print(f'{task:<18}{metric:>10}{100 * scores[f"{metric},none"]:>8.2f}{published[column]:>13.2f}')
    print(f'lm-eval {results["packages"]["lm-eval"]}, bos={results["bos"]}; published: lm-eval 0.4.8, bos=False')
    for task, notes in results['notes'].items():
        print(f'{task}: {"; ".join(notes)}')


def show_values(title, values, published=None):
    """A line a value, beside those of a row of the paper's tables."""
    print(f'\n{title:<44}', f'published: {published["model"]}' if published else '')
    for key, value in values.items():
        beside = f'{published[key]:>13.2f}' if published and key in published else ''
        value = f'{value:,.4f}' if isinstance(value, float) else str(value)
        print(f'  {key:<28}{value:>14}{beside}')


def results_file(source):
    """The file of a model's results, named as lm-eval names it, in a folder that is there. Raises InputError."""
    path, date = Path(output_path), datetime.now().isoformat().replace(':', '-')
    file = path / sanitize_model_name(source) / f'results_{date}.json'
    if path.suffix == '.json':
        file = path.with_name(f'{path.stem}_{date}.json')
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f'output_path={output_path} cannot be written ({e}); name another') from None
    return file


def write(results, file):
    """Raises InputError."""
    # strict JSON has no NaN, which a correlation with a constant is
    results = json.loads(json.dumps(results, default=handle_non_serializable), parse_constant=lambda name: None)
    try:
        file.write_text(json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + '\n', encoding='utf-8')
    except OSError as e:
        raise InputError(f'{file} could not be written ({e}); name another folder with --output_path') from None
    print(f'\n{file}')


def check_settings():
    """The names in `tasks`. Raises InputError."""
    names = [name.strip() for name in tasks.split(',')]
    for name in names:
        if name not in PAPER and name not in OURS:
            near = did_you_mean(name, [*OURS, *PAPER])
            others = 'for other tasks of lm-eval: python -m mhf.lm run --model_args path=... --tasks'
            raise InputError(f"unknown task '{name}'{near}; {others} {name}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InputError(f'limit={limit!r}: must be a number of documents, 1 or more')
    if bool(text) != ('bits_per_byte' in names):
        raise InputError(f"tasks={tasks}, text='{text}': a text is what bits_per_byte needs; give both or neither")
    if text and bos is False:
        raise InputError('bos=False: bits_per_byte has bos before every document, as in training; leave --bos out')
    for path in filter(None, text.split(',')):
        if not Path(path).exists():
            raise InputError(f'--text={path}: no such file or folder')
    return names


def main():
    names = check_settings()
    lm = open_lm(released or out_dir, tokenizer=tokenizer, bos=bos, device=device, dtype=dtype)
    model, about = lm.model, lm.about
    if limit is not None and limit < lm.world_size:
        raise InputError(f'limit={limit}: {lm.world_size} processes need a document each; start fewer')
    # all is read before anything is scored
    texts = {}
    for path in filter(None, text.split(',')):
        texts[path] = (held_out_split if Path(path).is_dir() else text_file)(Path(path), lm.tok)
    pairs = word_pairs(data_dir) if 'card660' in names else []
    of_paper = [task for task in PAPER if task in names or 'paper' in names]
    if of_paper and lm.rank == 0:
        # the hub may take its time
        print(f'reading {data_dir or "from the hub"}: {", ".join(of_paper)}', flush=True)
    loaded, notes = load_tasks(of_paper, data_dir, limit) if of_paper else ({}, {})
    file = results_file(about['source'])

    packages = {name: importlib.metadata.version(name) for name in ('torch', 'lm-eval', 'datasets')}
    results = dict(name=about['name'], model_name=about['source'], tokenizer=about['tokenizer'], dtype=about['dtype'])
    results |= dict(device=str(lm.device), settings=config, packages=packages)
    decoder = model.num_params()[1]
    if of_paper:
        results |= run_tasks(lm, loaded, notes, limit) or {}
        results |= dict(bos=about['bos'], published=nearest_published(model.config, decoder))
    if texts:
        results['bits_per_byte'] = {path: bits_per_byte(lm, *read) for path, read in texts.items()}
    if pairs:
        results['card660'] = card660(lm, pairs, bos is not False)
        results['card660_published'] = nearest_published(model.config, decoder, 'last_pearson')
    if lm.rank > 0:
        return
    print(results['name'])
    if about['why_dtype']:
        print(f'dtype={about["dtype"]}: {about["why_dtype"]}')
    if of_paper:
        show_tasks(results)
    for path, values in results.get('bits_per_byte', {}).items():
        show_values(f'bits_per_byte, {path}', values)
    if pairs:
        show_values('card660', results['card660'], results['card660_published'])
    write(results, file)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; nothing was written', file=sys.stderr)
        sys.exit(130)
