"""
Evaluates a checkpoint or a released model beside the paper's published numbers. P(w) is normalised over real tokens.

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
tokenizer = ''  # '' is the one that the checkpoint was trained with
# on what: paper | bits_per_byte | card660 | some of the paper's tasks by their names, several separated by commas
tasks = 'paper'
data_dir = ''  # local files instead of the hub; card660's folder
text = ''  # for bits_per_byte: files (.txt, .jsonl, .parquet) or folders of bins, several separated by commas
limit = None  # documents of each task, for a quick look
output_path = 'results'
# how
bos = None  # bos before every context; None is True for a model trained here, False for a released one, as the paper
device = None
dtype = None

config = configure(globals())

# what `tasks` may name besides the paper's tasks
OURS = ('paper', 'bits_per_byte', 'card660')


# -----------------------------------------------------------------------------
# tasks


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
    for path in paths_of_texts():
        if not Path(path).exists():
            raise InputError(f'--text={path}: no such file or folder')
    return names


def read_tasks(names, lm):
    """Reads those of the paper's tasks that `names` chooses -> what load_tasks returns, or two empty dicts."""
    chosen = [task for task in PAPER if task in names or 'paper' in names]
    if not chosen:
        return {}, {}
    if lm.rank == 0:
        # the hub may take its time
        print(f'reading {data_dir or "from the hub"}: {", ".join(chosen)}', flush=True)
    return load_tasks(chosen, data_dir)


# -----------------------------------------------------------------------------
# text


def paths_of_texts():
    return [path for path in text.split(',') if path]


def read_text(path, tok):
    """(token ids, bytes of text) of a text file, or of the held-out split of a folder of bins. Raises InputError."""
    path = Path(path)
    return held_out_split(path, tok) if path.is_dir() else text_file(path, tok)


def text_file(path, tok):
    """(token ids, bytes of text) of all documents of a file, as prepare.py makes bins of them. Raises InputError."""
    ids = []
    size = 0
    for document, _ in tqdm(documents(Source(str(path))), desc='encode', unit=' documents', delay=1, **BAR):
        size += len(document.encode())
        ids += [tok.bos, *tok.encode([document])[0]]
    if not ids:
        raise InputError(f'--text={path}: no text in it')
    return ids, size


def windows(ids, T):
    """
    Token ids -> requests (context ids, ids to score), which score each id but the first once. A window has T inputs and
    begins half a context after the one before it, so from the second on a token sees T // 2 tokens or more.
    """
    begin = 0
    scored = 1  # the ids before this one are scored, or have nothing before them
    while scored < len(ids):
        end = begin + T + 1
        yield ids[begin:scored], ids[scored:end]
        scored = end
        begin += T - T // 2


def sliding(lm, ids):
    """
    Scores token ids (n + 1,) in windows -> three (n,), float64, of each id but the first: nats, whether it is the
    likeliest (1 or 0), and the probability of the likeliest. Processes share the windows; it is None on those above 0.
    """
    requests = list(windows(ids, lm.max_length))
    mine = requests[lm.rank :: lm.world_size]
    scored = dict(lm.by_token(mine, None, 'text'))
    of_ranks = lm.gather_object([scored[k] for k in range(len(mine))])
    if of_ranks is None:
        return None
    of_windows = [None] * len(requests)
    for rank, of_rank in enumerate(of_ranks):
        of_windows[rank :: lm.world_size] = of_rank
    logp, right, confidence = torch.from_numpy(np.concatenate(of_windows, axis=1))
    return -logp, right, confidence


def calibration_error(right, confidence, bins=15):
    """Expected calibration error: |accuracy - confidence| in equal intervals of confidence, weighted by tokens."""
    interval = (confidence * bins).long().clamp(max=bins - 1)
    unused_ids = torch.zeros(bins, dtype=torch.float64).index_add_(0, interval, right - confidence)
    return unused_ids.abs().sum().item() / len(right)


def bits_per_byte(lm, ids, size):
    """
    How well a model predicts documents that stand back to back, bos before each, as in training. Their ids and their
    size in bytes -> a dict. Windows overlap by half; it is None on processes above 0.
    """
    scored = sliding(lm, ids)
    if scored is None:
        return None
    nats, right, confidence = scored
    mean = nats.mean().item()
    T = lm.max_length
    return dict(
        bos=True,
        tokens=len(nats),
        bytes=size,
        window=T,
        stride=T - T // 2,
        nats_per_token=mean,
        bits_per_byte=nats.sum().item() / math.log(2) / size,
        perplexity=math.exp(min(mean, 700)),
        top1_accuracy=right.mean().item(),
        expected_calibration_error=calibration_error(right, confidence),
    )


# -----------------------------------------------------------------------------
# rare words


def word_pairs(folder):
    """[(word, word, human similarity)] of Card-660. Raises InputError."""
    path = Path(folder) / 'dataset.tsv'
    try:
        lines = [line.split('\t') for line in path.read_text(encoding='utf-8').splitlines() if line]
        return [(a, b, float(score)) for a, b, score in lines]
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {e}; --data_dir must be the folder of Card-660's dataset.tsv") from None


@torch.no_grad()
def states_of_word(lm, word, with_bos):
    """The hidden states of a word's last token after two layers -> {'last', 'second_to_last'}, each (d,) float32."""
    ids = list(lm.tok.encode([word.replace('_', ' ')])[0])
    if with_bos:
        ids = [lm.tok.bos, *ids]
    states = []
    with lm.autocast():
        h = lm.model.hidden_states(lm.model.signatures[torch.tensor([ids], device=lm.device)], states=states)
    return dict(last=h[0, -1].float(), second_to_last=states[-1][0, -1].float())


def card660(lm, pairs, with_bos):
    """Correlation of human similarity with the cosine of two words' hidden states at their last token -> a dict."""
    from scipy.stats import pearsonr, spearmanr

    words = sorted({word for a, b, _ in pairs for word in (a, b)})
    states = {word: states_of_word(lm, word, with_bos) for word in tqdm(words, 'card660', **BAR)}
    human = [score for _, _, score in pairs]
    results = dict(bos=with_bos, pairs=len(pairs))
    for layer in ('last', 'second_to_last'):
        cosines = [F.cosine_similarity(states[a][layer], states[b][layer], dim=0).item() for a, b, _ in pairs]
        results[f'{layer}_pearson'] = float(pearsonr(cosines, human)[0])
        results[f'{layer}_spearman'] = float(spearmanr(cosines, human)[0])
    return results


# -----------------------------------------------------------------------------
# tables


def nearest_published(lm, column):
    """The row of the paper's tables that has this column and whose model is nearest to lm's in kind and size."""
    num_hashes = lm.model.config.num_hashes
    decoder = lm.model.num_params()[1]
    distances = {}
    for name, row in PUBLISHED.items():
        if column in row:
            other_kind = (row['num_hashes'] == 0) != (num_hashes == 0)
            sizes = row['decoder_millions'] * 1e6 / decoder
            distances[name] = (other_kind, abs(math.log(sizes)), abs(row['num_hashes'] - num_hashes))
    nearest = min(distances, key=distances.get)
    return dict(model=nearest, **PUBLISHED[nearest])


def show(results, why_dtype):
    """Prints all results."""
    print(results['name'])
    if why_dtype:
        print(f'dtype={results["dtype"]}: {why_dtype}')
    if 'published' in results:
        show_tasks(results)
    for path, values in results.get('bits_per_byte', {}).items():
        show_values(f'bits_per_byte, {path}', values)
    if 'card660' in results:
        show_values('card660', results['card660'], results['card660_published'])


def show_tasks(results):
    """Prints lm-eval's table of all scores, then the paper's metrics beside its own numbers."""
    published = results['published']
    print(f'\n{make_table(results)}')
    print(f'{"task":<18}{"metric":>10}{"score":>8}  published: {published["model"]}')
    for task, scores in results['results'].items():
        metric = PAPER[task]['metric']
        score = 100 * scores[f'{metric},none']
        print(f'{task:<18}{metric:>10}{score:>8.2f}{published[PAPER[task]["column"]]:>13.2f}')
    print(f'lm-eval {results["packages"]["lm-eval"]}, bos={results["bos"]}; published: lm-eval 0.4.8, bos=False')
    for task, notes in results['notes'].items():
        print(f'{task}: {"; ".join(notes)}')


def show_values(title, values, published=None):
    """Prints a line for each value, beside the same of a row of the paper's tables, if one is given."""
    source = ''
    if published:
        source = f'published: {published["model"]}'
    print(f'\n{title:<44}', source)
    for key, value in values.items():
        beside = ''
        if published and key in published:
            beside = f'{published[key]:>13.2f}'
        value = f'{value:,.4f}' if isinstance(value, float) else str(value)
        print(f'  {key:<28}{value:>14}{beside}')


def results_file(source):
    """The file for a model's results, named as lm-eval names it. Its folder is made. Raises InputError."""
    path = Path(output_path)
    date = datetime.now().isoformat().replace(':', '-')
    file = path / sanitize_model_name(source) / f'results_{date}.json'
    if path.suffix == '.json':
        file = path.with_name(f'{path.stem}_{date}.json')
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f'output_path={output_path} cannot be written ({e}); name another') from None
    return file


def write(results, file):
    """Writes the results as JSON. Raises InputError."""
    # strict JSON has no NaN, which a correlation with a constant is
    results = json.loads(json.dumps(results, default=handle_non_serializable), parse_constant=lambda name: None)
    try:
        file.write_text(json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + '\n', encoding='utf-8')
    except OSError as e:
        raise InputError(f'{file} could not be written ({e}); name another folder with --output_path') from None
    print(f'\n{file}')


# -----------------------------------------------------------------------------
# the whole


def main():
    names = check_settings()
    lm = open_lm(released or out_dir, tokenizer=tokenizer, bos=bos, device=device, dtype=dtype)
    about = lm.about
    if limit is not None and limit < lm.world_size:
        raise InputError(f'limit={limit}: {lm.world_size} processes need a document each; start fewer')
    # all is read before anything is scored
    texts = {path: read_text(path, lm.tok) for path in paths_of_texts()}
    pairs = word_pairs(data_dir) if 'card660' in names else []
    loaded, notes = read_tasks(names, lm)
    file = results_file(about['source'])

    results = dict(name=about['name'], model_name=about['source'], tokenizer=about['tokenizer'], dtype=about['dtype'])
    packages = {name: importlib.metadata.version(name) for name in ('torch', 'lm-eval', 'datasets')}
    results |= dict(device=str(lm.device), settings=config, packages=packages)
    if loaded:
        results |= run_tasks(lm, loaded, notes, limit) or {}
        results |= dict(bos=about['bos'], published=nearest_published(lm, 'ARC-E'))
    if texts:
        results['bits_per_byte'] = {path: bits_per_byte(lm, ids, size) for path, (ids, size) in texts.items()}
    if pairs:
        results['card660'] = card660(lm, pairs, bos is not False)
        results['card660_published'] = nearest_published(lm, 'last_pearson')
    if lm.rank == 0:
        show(results, about['why_dtype'])
        write(results, file)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; nothing was written', file=sys.stderr)
        sys.exit(130)
