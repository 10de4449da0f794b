"""
Tasks: how far are models of this size from chance?

    $ python eval.py --out_dir=out/english/RUN --tasks=paper --data_dir=DIR --limit=300 --output_path=out/h4.json
    $ python -m study.tfree eval --out_dir=out/tfree --data_dir=DIR --limit=300     # writes out/tfree/tasks.json
    $ python -m study.tasks H4=out/h4_DATE.json T-FREE=out/tfree/tasks.json         # writes study/tasks.csv

The models have 11 M parameters (T-FREE 7 M) and have read a million tokens (T-FREE words). The scores are of the first
300 documents of each task, with the paper's shots and metrics; ± is lm-eval's standard error. The last line counts the
tasks in which a model is above chance by more than two standard errors. T-FREE's scores rank words and are no
likelihoods.
"""

import argparse
import csv
import json
from pathlib import Path

from configurator import InputError, install_excepthook
from mhf.lm import PAPER
from study.report import MISSING

# the number of answers to a question, of tasks in which it is always the same
ANSWERS = dict(arc_easy=4, copa=2, openbookqa=4, piqa=2, hellaswag=4, race_v2=4, sciq=4, social_iqa=3)


def read_results(files):
    """{model: file of results} -> {model: results}. Raises InputError."""
    results = {}
    for model, path in files.items():
        try:
            results[model] = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise InputError(f'{model}={path} cannot be read ({e}); name what eval.py or tfree.py wrote') from None
    return results


def task_scores(results, task):
    """{model: results} -> {model: (score, standard error)} on a task, in the paper's metric, of models that have it."""
    metric = PAPER[task]['metric']
    scores = {}
    for model, model_results in results.items():
        task_results = model_results['results'].get(task, {})
        if f'{metric},none' in task_results:
            scores[model] = (task_results[f'{metric},none'], task_results[f'{metric}_stderr,none'])
    return scores


def count_documents(results, task):
    """How many documents of a task the models were evaluated on, or MISSING. Raises InputError where they differ."""
    models = {}
    for model, model_results in results.items():
        if task in model_results['results']:
            models[model_results['n-samples'][task]['effective']] = model
    if len(models) > 1:
        numbers = ', '.join(f'{model} {number}' for number, model in models.items())
        raise InputError(f'{task}: documents are {numbers}; evaluate all with the same --limit and --data_dir')
    return next(iter(models), MISSING)


def main(files, target):
    """files: {model: file of results}; target: the CSV to write. Raises InputError."""
    results = read_results(files)
    table = [['task', 'metric', 'documents', 'chance', *results]]
    above = {model: [] for model in results}  # whether it is above chance, of each task where chance is known
    for task, paper_row in PAPER.items():
        chance = 1 / ANSWERS[task] if task in ANSWERS else None
        scores = task_scores(results, task)
        row = [
            task,
            paper_row['metric'],
            count_documents(results, task),
            MISSING if chance is None else f'{chance:.1%}',
        ]
        for model in results:
            if model not in scores:
                row.append(MISSING)
                continue
            score, error = scores[model]
            row.append(f'{score:.1%} ± {error:.1%}')
            if chance is not None:
                above[model].append(score > chance + 2 * error)
        table.append(row)
    counts = [f'{sum(tasks)} of {len(tasks)}' for tasks in above.values()]
    table.append(['above chance', MISSING, MISSING, MISSING, *counts])
    with open(target, 'w', newline='') as f:
        csv.writer(f, lineterminator='\n').writerows(table)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    install_excepthook()
    parser.add_argument('models', nargs='+', metavar='NAME=RESULTS.json', help='what eval.py or tfree.py wrote')
    models = parser.parse_args().models
    if any('=' not in model for model in models):
        raise InputError(f'{" ".join(models)}: say NAME=RESULTS.json of each model')
    main(dict(model.split('=', 1) for model in models), Path(__file__).with_suffix('.csv'))
