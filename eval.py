"""
Evaluates a checkpoint or a released model, on P(w) normalised over real tokens, beside the paper's published numbers.

    $ python eval.py --out_dir=out/mhf_1b                                     # the paper's ten tasks, from the hub
    $ python eval.py --out_dir=out/mhf_1b --data_dir=benchmarks               # the same from local files, no internet
    $ python eval.py --tasks=gsm8k,mmlu --num_fewshot=5                       # lm-eval's text tasks, groups and tags
    $ python eval.py --released=klein9692/hf_qwen3_1b-model_16384_4_0_64_twe --revision=checkpoint-200000
    $ python eval.py --tasks=bits_per_byte --text=book.txt
    $ python eval.py --tasks=card660 --data_dir=card660
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out/mhf_1b   # batches shared by 8 GPUs

Results are written to results/<model>/results_<date>.json. lm-eval itself drives a model from Python: scorer.py.
"""

import atexit
import csv
import functools
import importlib.metadata
import json
import logging
import math
import os
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_eval.utils import handle_non_serializable, make_table, sanitize_model_name
from tqdm import tqdm

from bins import Bins, read_meta
from checkpoint import digest_of_state, open_model, pick_device, pick_dtype
from configurator import InputError, configure, did_you_mean
from hashing import tokenizer_fingerprint
from scorer import BAR, MHFLM, Scorer
from sources import ReadState, Source, batches

# what to evaluate
out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id
revision = ''  # of the hub id
tokenizer = ''  # '' is the one the checkpoint was trained with
# on what: paper | bits_per_byte | card660 | any of lm-eval's tasks or of eval_tasks/, several separated by commas
tasks = 'paper'
data_dir = ''  # local files instead of the hub; card660's folder
# of bits_per_byte, several separated by commas: .txt, .jsonl, .parquet, packed or not; the held-out split of bins
text = ''
# settings of lm-eval, by its names
num_fewshot = None  # examples before the question; None is what the task says
limit = None  # documents per task, or below 1 the share of them
gen_kwargs = ''  # of tasks that generate: 'do_sample=True,temperature=0.8'
include_path = ''  # a folder with more tasks
write_out = False  # print the first prompt of each task
confirm_run_unsafe_code = False  # let tasks run code that the model wrote
output_path = 'results'
# how
bos = None  # bos before every context; None is True for a model trained here, False for a released one, as the paper
batch_size = 256  # contexts that go through the model at a time, at most: memory may hold fewer
seed = 1234  # of the few-shot examples, and of sampled answers
device = None
dtype = None

config = configure(globals())

HERE = Path(__file__).resolve().parent
# the paper's tasks; `column` is of its table, `file` is what local files are called, `documents` the whole split has
PAPER = {
    'lambada_openai': dict(shots=0, metric='acc', column='LAMBADA', file='lambada_openai', documents=5153),
    'lambada_standard': dict(shots=0, metric='acc', column='LAMBADA', file='lambada_standard', documents=5153),
    'arc_easy': dict(shots=5, metric='acc_norm', column='ARC-E', file='arc_easy', documents=2376),
    'copa': dict(shots=0, metric='acc', column='COPA', file='copa', documents=100),
    'openbookqa': dict(shots=5, metric='acc_norm', column='OBQA', file='openbookqa', documents=500),
    'piqa': dict(shots=0, metric='acc', column='PIQA', file='piqa', documents=1838),
    'hellaswag': dict(shots=0, metric='acc_norm', column='HellaSwag', file='hellaswag', documents=10042),
    'race_v2': dict(shots=0, metric='acc', column='RACE', file='race_high', documents=1045),
    'sciq': dict(shots=0, metric='acc_norm', column='SciQ', file='sciq', documents=1000),
    'social_iqa': dict(shots=5, metric='acc_norm', column='SIQA', file='social_i_qa', documents=1954),
    'record': dict(shots=0, metric='f1', column='ReCoRD', file='record', documents=10000),
}
# {model: row} of the paper's tables: size and kind of the model, its tasks' columns, and at 1B those of Card-660
with open(HERE / 'eval_tasks' / 'published.csv', newline='') as f:
    PUBLISHED = {row.pop('model'): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(f)}
OURS = ('paper', 'bits_per_byte', 'card660')
# metrics that are shares; where the paper has no task, the first of these that it has is compared
PERCENT = ('acc_norm', 'acc', 'f1', 'exact_match')


# -----------------------------------------------------------------------------
# tasks of lm-eval


@functools.cache
def task_manager(include_path=''):
    """The index of lm-eval's thousands of tasks and of ours, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(HERE / 'eval_tasks'), *filter(None, [include_path])])


def tasks_of(index, member):
    """The names of the tasks of a task, tag or group of lm-eval's index, or of a member of a group."""
    if isinstance(member, list):
        return [name for m in member for name in tasks_of(index, m)]
    if isinstance(member, dict):
        # a task or a group with changes, or a group of its own
        return tasks_of(index, member['group'] if member.get('group') in index else member['task'])
    entry = index.get(member)
    if entry and entry.tags and entry.kind.name == 'TAG':
        return sorted(entry.tags)
    return tasks_of(index, entry.cfg['task']) if entry and entry.kind.name == 'GROUP' else [member]


def local_files(folder, prefix):
    """{split: file} of folder/<prefix>_<split>*.jsonl, packed or not."""
    found = {}
    for split in ('train', 'validation', 'dev', 'test'):
        for file in sorted(p for p in Path(folder).glob(f'{prefix}_{split}*') if '.jsonl' in p.suffixes):
            if split in found:
                raise InputError(f'{folder} has several files for {prefix}, {split}: {found[split]}, {file.name}')
            found[split] = str(file.resolve())
    return found


def local_data(name, task, data_dir):
    """The changes to the config `task` of lm-eval's task `name` that let it read local files; what these stand for."""
    prefix = PAPER[name]['file'] if name in PAPER else name
    files = local_files(data_dir, prefix)
    hub_split = task.get('test_split') or task.get('validation_split') or 'test'
    scored = next((s for s in (hub_split, 'validation', 'test', 'train') if s in files), None)
    if scored is None or 'class' in task:
        if 'class' in task:
            raise InputError(f'{name} reads its data by code of its own, not data_dir={data_dir}; leave --data_dir out')
        raise InputError(f'{data_dir} has no {prefix}_{hub_split}*.jsonl, which task {name} needs')
    hub_shots = task.get('fewshot_split') or task.get('training_split') or 'train'
    shots_from, notes = next((s for s in (hub_shots, 'train') if s in files), scored), []
    if scored != hub_split:
        notes.append(f'{scored} split for {hub_split}')
    if task.get('num_fewshot') and shots_from != hub_shots:
        notes.append(f'shots from {shots_from}, not {hub_shots}')
    changes = dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=files), custom_dataset=None)
    changes |= dict(training_split=None, validation_split=None, test_split=scored, fewshot_split=shots_from)
    return changes, notes


def run_tasks(
    names, lm, data_dir='', num_fewshot=None, limit=None, gen_kwargs='', include_path='', write_out=False,
    confirm_run_unsafe_code=False, seed=1234,
):  # fmt: skip
    """
    Names of tasks, lm-eval's model -> lm-eval's results, and {task: what is not as on the hub or in the paper}. The
    rest is as in the settings. Raises InputError.
    """
    import datasets
    import lm_eval
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError
    from lm_eval.tasks._yaml_loader import load_yaml

    # the one says of each of our tasks that it overrides its own, the other announces its retries
    for library in ('lm_eval', 'huggingface_hub'):
        logging.getLogger(library).setLevel(logging.ERROR)
    if write_out:
        logging.basicConfig(format='%(message)s')
        logging.getLogger('lm_eval.evaluator_utils').setLevel(logging.INFO)
    if data_dir:
        datasets.disable_progress_bars()
    manager = task_manager(include_path)
    index, original, notes = manager.task_index, dict(manager.task_index), {}
    for name in names:
        if name not in index and name != 'paper':
            raise InputError(f"unknown task '{name}'{did_you_mean(name, [*OURS, *index])}")
    of_paper = PAPER if 'paper' in names else {}
    names = list(dict.fromkeys(n for name in names for n in (PAPER if name == 'paper' else [name])))
    how = dict(num_fewshot=num_fewshot, limit=limit, gen_kwargs=gen_kwargs or None, write_out=write_out)
    how |= {f'{what}_seed': seed for what in ('random', 'numpy_random', 'torch_random', 'fewshot_random')}
    how |= dict(confirm_run_unsafe_code=confirm_run_unsafe_code, bootstrap_iters=1000)
    try:
        for name in dict.fromkeys(tasks_of(index, names)):
            if name not in of_paper and not data_dir:
                continue
            task = dict(load_yaml(index[name].yaml_path))
            if name in of_paper:
                task['num_fewshot'] = PAPER[name]['shots']
            if data_dir:
                changes, notes[name] = local_data(name, task, data_dir)
                task |= changes
            index[name] = replace(index[name], yaml_path=None, cfg=task)
        return lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, log_samples=False, **how), notes
    except InputError:
        raise
    # the hub out of reach; a file that is cut off, empty or not what it should be; a field that is missing
    except (OSError, ValueError, EOFError, KeyError, StopIteration, TemplateError, DatasetsError, ImportError) as e:
        reason = f'{type(e).__name__}: {" ".join(str(e).split())[:300] or "nothing in it"}'
        raise InputError(f'{", ".join(names)}: cannot be run ({reason}); of the data, see --data_dir') from None
    finally:
        index.update(original)


def unlike(results, notes):
    """{task: what is not as on the hub or in the paper's evaluation}."""
    for task, count in results['n-samples'].items():
        number, paper, shots = count['effective'], PAPER.get(task), results['n-shot'].get(task, 0)
        if task in notes and not paper:
            notes[task].append(f'a local file of {count["original"]:,} documents')
        if number != (whole := paper['documents'] if paper else count['original']):
            notes.setdefault(task, []).append(f'{number:,} of {whole:,} documents')
        if paper and shots != paper['shots']:
            notes.setdefault(task, []).append(f'{shots} shots, {paper["shots"]} in the paper')
    return {task: note for task, note in notes.items() if note}


# -----------------------------------------------------------------------------
# text and rare words


def windows(ids, T):
    """Token ids -> requests for all but the first; from the second request on, each sees half a context T or more."""
    n = len(ids) - 1
    for begin in range(0, max(min(n, 1), n - T // 2), T - T // 2):
        # the half that the window before has scored
        scored = begin + 1 + (T // 2 if begin else 0)
        yield ids[begin:scored], ids[scored : begin + T + 1]


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


def bits_per_byte(scorer, tok, path):
    """
    Of a file or of the held-out split of a prepared folder: documents back to back, bos before each, as in training, in
    windows that overlap by half.
    """
    (first, *ids), size = (prepared_split if Path(path).is_dir() else text_file)(Path(path), tok)
    nats, right, confidence = sliding(scorer, first, ids)
    mean, T = nats.mean().item(), scorer.model.config.block_size
    results = dict(tokens=len(nats), bytes=size, window=T, stride=T - T // 2, nats_per_token=mean)
    results |= dict(bits_per_byte=nats.sum().item() / math.log(2) / size, perplexity=math.exp(min(mean, 700)))
    results |= dict(top1_accuracy=right.mean().item(), expected_calibration_error=calibration_error(right, confidence))
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


def nearest_published(c, decoder, column='ARC-E'):
    """The row with that column, in the paper's tables, whose kind and size are nearest; decoder: its parameters."""
    distances = {}
    for name, row in PUBLISHED.items():
        if column in row:
            H, size = row['num_hashes'], row['decoder_millions'] * 1e6
            distances[name] = (H == 0) != (c.num_hashes == 0), abs(math.log(size / decoder)), abs(H - c.num_hashes)
    return min(distances, key=distances.get)


def main_score(task, metrics):
    """The key of the paper's metric, or of the first that is a share, among lm-eval's 'metric,filter' of a task."""
    wanted = [PAPER[task]['metric']] if task in PAPER else PERCENT
    return next((key for metric in wanted for key in metrics if key.split(',')[0] == metric), None)


def show(results):
    """lm-eval's table of all scores, the paper's tasks beside its own, and the rest."""
    print(results['name'])
    if results['results']:
        print(f'\n{make_table(results)}')
        if 'groups' in results:
            print(make_table(results, 'groups'))
        how = {key: value for key in ('limit', 'num_fewshot', 'gen_kwargs') if (value := results['settings'][key])}
        how = ', '.join([f'bos={results["bos"]}', *(f'{key}={value}' for key, value in how.items())])
        print(f'lm-eval {results["lm_eval_version"]}, {how}')
    beside = {task: r for task, r in results['results'].items() if task in PAPER}
    if beside:
        which = f'published: {results["published"]["model"]}'
        heads = f'{"task":<18}{"version":>8}{"metric":>10}{"shots":>7}{"documents":>11}{"score":>8}{"stderr":>8}'
        print(f'{heads}  {which}')
    for task, r in beside.items():
        key, shots, documents = main_score(task, r), results['n-shot'][task], results['n-samples'][task]['effective']
        version, stderr = results['versions'][task], r[key.replace(',', '_stderr,')]
        error = f'{100 * stderr:.2f}' if isinstance(stderr, float) else '-'
        counts = f'{version:>8}{key.split(",")[0]:>10}{shots:>7}{documents:>11,}{100 * r[key]:>8.2f}{error:>8}'
        print(f'{task:<18}{counts}{results["published"][PAPER[task]["column"]]:>13.2f}')
    if beside:
        print('published: lm-eval 0.4.8, bos=False')
    for task, note in results['notes'].items():
        print(f'{task}: {"; ".join(note)}')
    for path, values in results.get('bits_per_byte', {}).items():
        print(f'\nbits_per_byte, {path}')
        for key, value in values.items():
            print(f'  {key:<28}{value:>14,.4f}' if isinstance(value, float) else f'  {key:<28}{value:>14,}')
    if 'card660' in results:
        print(f'\n{"card660":<30}{"":>14}  published: {results["card660_published"]["model"]}')
        for key, value in results['card660'].items():
            paper = results['card660_published'].get(key)
            print(f'  {key:<28}{value:>14.4f}{paper:>13.2f}' if paper else f'  {key:<28}{value:>14,}')


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


def measure(opened, names, with_bos, device, dtype):
    """
    All that is known of one model (checkpoint.Opened); None on ranks above 0.
    """
    sha256 = digest_of_state(opened.model.state_dict())
    model, tok = opened.model.to(device).eval(), opened.tok
    scorer = Scorer(model, tok.bos if with_bos else None, batch_size, dtype=dtype, tok=tok)
    of_each = [sha256] * scorer.world_size
    if scorer.world_size > 1:
        dist.all_gather_object(of_each, sha256)
    if len(set(of_each)) > 1:
        # one of them says it
        if scorer.rank:
            sys.exit(1)
        found = ', '.join(f'{s[:8]} on rank {r}' for r, s in enumerate(of_each))
        raise InputError(f'{opened.name}: the processes opened different weights: {found}')
    while scorer.rank > 0:
        if scorer.take_part() is None:
            return None
    row = nearest_published(model.config, model.num_params()[1])
    about = dict(pretrained=opened.source, sha256=sha256, tokenizer=tok.name, bos=with_bos, dtype=dtype)
    results = {'results': {}, 'configs': {}, 'versions': {}, 'notes': {}}
    try:
        if lm_tasks := [t for t in names if t not in OURS[1:]]:
            keys = 'data_dir num_fewshot limit gen_kwargs include_path write_out confirm_run_unsafe_code seed'.split()
            results, notes = run_tasks(lm_tasks, MHFLM(scorer), **{key: globals()[key] for key in keys})
            results['config'] |= dict(model='mhf', model_args=about, device=device, batch_size=batch_size)
            results['notes'] = unlike(results, notes)
        if 'bits_per_byte' in names:
            results['bits_per_byte'] = {path: bits_per_byte(scorer, tok, path) for path in text.split(',')}
        if 'card660' in names:
            results['card660'] = card660(scorer, tok, data_dir)
            of_card = nearest_published(model.config, model.num_params()[1], 'last_pearson')
            results['card660_published'] = dict(model=of_card, **PUBLISHED[of_card])
    finally:
        # Ctrl-C ends the others too, wherever they are
        if sys.exc_info()[0] is not KeyboardInterrupt:
            scorer.take_part([None] * scorer.world_size)
    packages = {p: importlib.metadata.version(p) for p in ('torch', 'lm-eval', 'datasets')}
    results |= dict(name=opened.name, bos=with_bos, published=dict(model=row, **PUBLISHED[row]), packages=packages)
    results |= dict(settings=config, lm_eval_version=packages['lm-eval'], model_name=opened.source)
    results |= dict(device=device, dtype=dtype)
    return results


def main():
    names = [t.strip() for t in tasks.split(',') if t.strip()]
    if not names:
        raise InputError("tasks is empty; leave it out for the paper's tasks")
    if 'paper' in names and num_fewshot is not None:
        raise InputError(f"num_fewshot={num_fewshot}: the paper's tasks have their own; name the tasks one by one")
    if limit is not None and (type(limit) not in (int, float) or limit <= 0):
        raise InputError(f'limit={limit!r}: must be a number of documents, or below 1 their share')
    if num_fewshot is not None and (type(num_fewshot) is not int or num_fewshot < 0):
        raise InputError(f'num_fewshot={num_fewshot!r}: must be 0 or a larger whole number')
    if bos not in (None, True, False):
        raise InputError(f'bos={bos!r}: must be True or False, or left out')
    if batch_size < 1:
        raise InputError(f'batch_size={batch_size}: must be 1 or more')
    for key in ('data_dir', 'include_path'):
        if config[key] and not Path(config[key]).is_dir():
            raise InputError(f'{key}={config[key]}: no such folder')
    if 'card660' in names and not data_dir:
        raise InputError('card660 needs --data_dir, the folder of its dataset.tsv')
    if 'bits_per_byte' in names and not text:
        raise InputError('bits_per_byte needs --text, a text file')
    for path in filter(None, text.split(',')):
        if not Path(path).exists():
            raise InputError(f'--text={path}: no such file or folder')

    on_device = pick_device(device)
    in_dtype, _ = pick_dtype(dtype, on_device)
    opened = open_model(out_dir, released, revision, tokenizer)
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        if torch.device(on_device).type == 'cuda':
            torch.cuda.set_device(on_device)
        # objects alone are sent, and the others wait for as long as rank 0 reads and downloads
        dist.init_process_group('gloo', timeout=timedelta(days=30))
        atexit.register(dist.destroy_process_group)
    with_bos = not released if bos is None else bos
    measured = measure(opened, names, with_bos, on_device, in_dtype)
    if measured:
        show(measured)
        write(measured, results_file(opened.source))


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted; nothing was written', file=sys.stderr)
        sys.exit(130)
