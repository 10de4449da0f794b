"""
The paper's ten tasks for lm-evaluation-harness (lm-eval): prompts, shots and metrics as in the paper, data from the hub
or from local files.

    loaded, notes = load_tasks(['piqa', 'sciq'], folder='benchmarks')
    results = run_tasks(lm, loaded, notes, limit=100)
"""

import csv
import logging
from pathlib import Path

import lm_eval

from configurator import InputError

EVAL_TASKS = Path(__file__).resolve().parent.parent / 'eval_tasks'


def read_table(name):
    """The rows of a table of eval_tasks/, without empty cells."""
    with open(EVAL_TASKS / name, newline='') as f:
        return [{column: cell for column, cell in row.items() if cell} for row in csv.DictReader(f)]


# of each of the paper's tasks: its metric and column there, how many documents the whole split has, what local files
# are called, and the file of the task in lm-eval, where eval_tasks/ has none
PAPER = {row.pop('task'): row for row in read_table('paper.csv')}
# of each model in the paper's tables: its size and kind, its scores on the tasks, and at 1B those on Card-660
PUBLISHED = {row.pop('model'): {k: float(v) for k, v in row.items()} for row in read_table('published.csv')}


def local_files(folder, prefix):
    """{split: file} of folder/<prefix>_<split>*.jsonl, packed or not. Raises InputError."""
    files = {}
    for split in ('train', 'validation', 'dev', 'test'):
        for file in sorted(p for p in Path(folder).glob(f'{prefix}_{split}*') if '.jsonl' in p.suffixes):
            if split in files:
                raise InputError(f'{folder} has several files for {prefix}, {split}: {files[split]}, {file.name}')
            files[split] = str(file.resolve())
    return files


def local_data(name, config, folder):
    """
    What to change in lm-eval's config of a task so that it reads local files, and [how these differ from the hub's].
    Raises InputError.
    """
    prefix = PAPER[name]['local']
    files = local_files(folder, prefix)
    hub_split = config.get('test_split') or config['validation_split']
    scored = next((split for split in (hub_split, 'validation', 'test', 'train') if split in files), None)
    if scored is None:
        raise InputError(f'{folder} has no {prefix}_{hub_split}*.jsonl, which task {name} needs')
    shots_from = 'train' if 'train' in files else scored
    notes = []
    if scored != hub_split:
        notes.append(f'{scored} split for {hub_split}')
    if config['num_fewshot'] and shots_from != 'train':
        notes.append(f'shots from {shots_from}, not train')
    used = {split: files[split] for split in (scored, shots_from)}
    changes = dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=used))
    changes |= dict(training_split=None, validation_split=None, test_split=scored, fewshot_split=shots_from)
    return changes, notes


def load_tasks(names, folder=''):
    """
    Names of the paper's tasks -> {name: lm-eval's task}, {name: [how its data differ from the paper's]}. With a folder
    the data are local files. Raises InputError.
    """
    import datasets
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    for library in ('lm_eval', 'huggingface_hub'):
        logging.getLogger(library).setLevel(logging.ERROR)
    if folder:
        datasets.disable_progress_bars()
    # its index of all tasks takes seconds
    manager = TaskManager(include_defaults=False)
    of_paper = {task['task']: task for task in load_yaml(EVAL_TASKS / 'paper.yaml')['task']}
    loaded = {}
    notes = {}
    for name in names:
        config = load_yaml(yaml_file(name)) | of_paper[name]
        notes[name] = []
        if folder:
            changes, notes[name] = local_data(name, config, folder)
            config |= changes
        loaded |= load_one(manager, name, config)
        loaded[name].set_fewshot_seed(1234)
    return loaded, notes


def yaml_file(name):
    """The file of one of the paper's tasks, of lm-eval or of eval_tasks/."""
    of_lm_eval = PAPER[name].get('yaml')
    if of_lm_eval:
        return Path(lm_eval.__file__).parent / 'tasks' / of_lm_eval
    return EVAL_TASKS / f'{name}.yaml'


def load_one(manager, name, config):
    """{name: lm-eval's task} of its config, with its data. Raises InputError."""
    try:
        return manager.load([config])['tasks']
    # no network; a file that is cut off, empty or not JSON; a field that is missing: the library's own words say which
    except Exception as e:
        data = config['dataset_path']
        if data == 'json':
            data = ', '.join(config['dataset_kwargs']['data_files'].values())
        reason = ' '.join(str(e).split())[:300] or 'nothing in it'
        hint = "local files, for --data_dir, have the fields of the hub's"
        raise InputError(f'{name}: {data} cannot be read ({type(e).__name__}: {reason}); {hint}') from None


def run_tasks(lm, loaded, notes, limit=None):
    """
    Scores loaded tasks -> lm-eval's results, with notes on what is not as in the paper; None on processes above 0.
    """
    results = lm_eval.evaluate(lm, dict(tasks=loaded), limit=limit, bootstrap_iters=1000, log_samples=False)
    cut_of_ranks = lm.gather_object(lm.cut)
    if results is None:
        return None
    for task, count in results['n-samples'].items():
        documents = int(PAPER[task]['documents'])
        if count['effective'] != documents:
            notes[task].append(f'{count["effective"]:,} of {documents:,} documents')
        number = sum(of_task == task for cut in cut_of_ranks for of_task, _ in cut)
        if number:
            notes[task].append(f'{number:,} documents with a context over {lm.max_length} tokens, whose end counts')
    return results | dict(notes={task: note for task, note in notes.items() if note})
