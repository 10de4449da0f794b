"""
Tasks: how far are models of this size from chance?

    $ python eval.py --out_dir=out/english/KEY --tasks=paper --data_dir=DIR --limit=300 --output_path=out/h4.json
    $ python -m study.tfree eval --out_dir=out/tfree --data_dir=DIR --limit=300     # writes out/tfree/tasks.json
    $ python -m study.tasks H4=out/h4_DATE.json T-FREE=out/tfree/tasks.json         # writes study/tasks.csv

The models have 11 M parameters (T-FREE 7 M) and have read a million tokens (T-FREE words). Of each task the first 300
documents, with the paper's shots and metrics; ± is lm-eval's standard error. The last line counts the tasks in which a
model is above chance by more than two of them. T-FREE's scores rank words and are no likelihoods.
"""

import argparse
import csv
import json
from pathlib import Path

from configurator import InputError
from mhf.tasks import PAPER
from study.report import MISSING

# how many answers each question has, of the tasks in which this is one number
ANSWERS = dict(arc_easy=4, copa=2, openbookqa=4, piqa=2, hellaswag=4, race_v2=4, sciq=4, social_iqa=3)


def read_results(models):
    """{name: the results' file} -> {name: what is in it}. Raises InputError."""
    results = {}
    for name, path in models.items():
        try:
            results[name] = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise InputError(f'{name}={path} cannot be read ({e}); name what eval.py or tfree.py wrote') from None
    return results


def number_of_documents(task, results):
    """How many documents of a task the models were measured on. Raises InputError where it is not the same number."""
    models = {}
    for name, of_model in results.items():
        if task in of_model['results']:
            models[of_model['n-samples'][task]['effective']] = name
    if len(models) > 1:
        numbers = ', '.join(f'{name} {number}' for number, name in models.items())
        raise InputError(f'{task}: documents are {numbers}; evaluate all with the same --limit and --data_dir')
    return next(iter(models), MISSING)


def main(models, target):
    """Writes the CSV `target` of {name: the results' file}. Raises InputError."""
    results = read_results(models)
    lines = []
    # {name: of each task with a chance, whether the model is above it}
    above = {name: [] for name in results}
    for task, of_paper in PAPER.items():
        metric = of_paper['metric']
        cells = []
        for name, of_model in results.items():
            measured = of_model['results'].get(task, {})
            value = measured.get(f'{metric},none')
            error = measured.get(f'{metric}_stderr,none')
            cells.append(MISSING if value is None else f'{value:.1%} ± {error:.1%}')
            if task in ANSWERS and value is not None:
                above[name].append(value > 1 / ANSWERS[task] + 2 * error)
        chance = f'{1 / ANSWERS[task]:.1%}' if task in ANSWERS else MISSING
        lines.append([task, metric, number_of_documents(task, results), chance, *cells])
    counted = [f'{sum(tasks)} of {len(tasks)}' for tasks in above.values()]
    lines.append(['above chance', MISSING, MISSING, MISSING, *counted])
    with open(target, 'w', newline='') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerows([['task', 'metric', 'documents', 'chance', *results], *lines])


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', metavar='NAME=RESULTS.json', help='what eval.py or tfree.py wrote')
    models = parser.parse_args().models
    if any('=' not in model for model in models):
        raise InputError(f'{" ".join(models)}: say NAME=RESULTS.json of each model')
    main(dict(model.split('=', 1) for model in models), Path(__file__).with_suffix('.csv'))
