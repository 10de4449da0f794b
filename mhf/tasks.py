"""
The paper's ten tasks for lm-evaluation-harness (lm-eval): prompts, shots and metrics as in the paper, data from the hub
or from local files.

    loaded, notes = load_tasks(['piqa', 'sciq'], folder='benchmarks')
    results = run_tasks(lm, loaded, notes, limit=100)
"""

import csv
import itertools
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
# the paper's tables: size and kind of each model, the columns of the tasks, and at 1B those of Card-660
PUBLISHED = {row.pop('model'): {k: float(v) for k, v in row.items()} for row in read_table('published.csv')}


def local_files(folder, prefix):
    """{split: file} of folder/<prefix>_<split>*.jsonl, packed or not."""
    found = {}
    for split in ('train', 'validation', 'dev', 'test'):
        for file in sorted(p for p in Path(folder).glob(f'{prefix}_{split}*') if '.jsonl' in p.suffixes):
            if split in found:
                raise InputError(f'{folder} has several files for {prefix}, {split}: {found[split]}, {file.name}')
            found[split] = str(file.resolve())
    return found


def local_data(name, config, folder):
    """Changes to lm-eval's config of a task that let it read local files; what these are not. Raises InputError."""
    prefix = PAPER[name]['local']
    files = local_files(folder, prefix)
    hub_split = config.get('test_split') or config['validation_split']
    scored = next((split for split in (hub_split, 'validation', 'test', 'train') if split in files), None)
    if scored is None:
        raise InputError(f'{folder} has no {prefix}_{hub_split}*.jsonl, which task {name} needs')
    shots_from = 'train' if 'train' in files else scored
    notes = [f'{scored} split for {hub_split}'] if scored != hub_split else []
    if config['num_fewshot'] and shots_from != 'train':
        notes.append(f'shots from {shots_from}, not train')
    used = {split: files[split] for split in (scored, shots_from)}
    changes = dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=used))
    changes |= dict(training_split=None, validation_split=None, test_split=scored, fewshot_split=shots_from)
    return changes, notes


def load_tasks(names, folder='', limit=None):
    """Names of the paper's tasks -> {name: lm-eval's task}, {name: [how its data differ from the paper's]}."""
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
    loaded, notes = {}, {}
    for name in names:
        theirs = PAPER[name].get('yaml')
        file = Path(lm_eval.__file__).parent / 'tasks' / theirs if theirs else EVAL_TASKS / f'{name}.yaml'
        config = load_yaml(file) | of_paper[name]
        changes, notes[name] = local_data(name, config, folder) if folder else ({}, [])
        config |= changes
        try:
            loaded |= manager.load([config])['tasks']
        # no network; a file that is cut off, empty or not JSON; a field that is missing: their own words say which
        except Exception as e:
            where = ', '.join(config['dataset_kwargs']['data_files'].values()) if folder else config['dataset_path']
            reason = f'{type(e).__name__}: {" ".join(str(e).split())[:300] or "nothing in it"}'
            hint = "local files, for --data_dir, have the fields of the hub's"
            raise InputError(f'{name}: {where} cannot be read ({reason}); {hint}') from None
        loaded[name].set_fewshot_seed(1234)
        if folder:
            check_rows(loaded[name], limit)
    return loaded, notes


def check_rows(task, limit):
    """Raises InputError at a row of a task's local files that lacks a field of the first, or that makes no sense."""
    files, shots = task.config.dataset_kwargs['data_files'], task.config.num_fewshot
    for split, file in files.items():
        rows = task.dataset[split]
        for field in rows.column_names:
            column = rows.data.column(field)
            if column.null_count and rows[0][field] is not None:
                number = column.is_null().index(True).as_py() + 1
                raise InputError(f"{file}, row {number}: no '{field}', which the first row has")
    scored, shots_from = files[task.config.test_split], files[task.config.fewshot_split]
    examples = task.fewshot_docs() if shots else []
    if len(examples) < shots + (shots > 0 and shots_from == scored):
        raise InputError(f'{shots_from}: {len(examples)} rows are too few for {shots} examples before a question')
    for number, row in enumerate(itertools.islice(task.eval_docs, limit), start=1):
        try:
            task.doc_to_text(row)
            task.doc_to_target(row)
            if task.config.doc_to_choice is not None:
                task.doc_to_choice(row)
        except Exception as e:
            raise InputError(f'{scored}, row {number}: {type(e).__name__}: {e}') from None


def run_tasks(lm, loaded, notes, limit=None):
    """lm-eval's results of loaded tasks, with notes on what is not as in the paper; None on processes above 0."""
    results = lm_eval.evaluate(lm, dict(tasks=loaded), limit=limit, bootstrap_iters=1000, log_samples=False)
    cut = lm.gather_object(lm.cut)
    if results is None:
        return None
    for task, count in results['n-samples'].items():
        documents = int(PAPER[task]['documents'])
        if count['effective'] != documents:
            notes[task].append(f'{count["effective"]:,} of {documents:,} documents')
        if number := sum(of_task == task for part in cut for of_task, _ in part):
            notes[task].append(f'{number:,} documents with a context over {lm.max_length} tokens, whose end counts')
    return results | dict(notes={task: note for task, note in notes.items() if note})
