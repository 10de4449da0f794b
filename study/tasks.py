"""
Tasks: how far are models of this size from chance?

    $ python eval.py --out_dir=out/english/KEY --tasks=paper --data_dir=DIR --limit=300 --output_path=out/h4.json
    $ python study/tfree.py eval --out_dir=out/tfree --data_dir=DIR --limit=300     # writes out/tfree/tasks.json
    $ python study/tasks.py H4=out/h4_DATE.json T-FREE=out/tfree/tasks.json         # writes study/tasks.csv

The models have 11 M parameters (T-FREE 7 M) and have read a million tokens (T-FREE words). Of each task the first 300
documents, with the paper's shots and metrics; ± is lm-eval's standard error. The last line counts the tasks in which a
model is above chance by more than two of them. T-FREE's scores rank words and are no likelihoods.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import MISSING

from configurator import InputError
from mhf.tasks import PAPER

# of those whose answers are equally many
CHANCE = dict(arc_easy=4, copa=2, openbookqa=4, piqa=2, hellaswag=4, race_v2=4, sciq=4, social_iqa=3)


def main(models, target):
    """models: {name: the results' file}; the CSV to write. Raises InputError."""
    read = {}
    for name, path in models.items():
        try:
            read[name] = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise InputError(f'{name}={path} cannot be read ({e}); name what eval.py or tfree.py wrote') from None
    lines, above = [], {name: [] for name in read}
    for task, of_paper in PAPER.items():
        metric, cells, documents = of_paper['metric'], [], {}
        for name, found in read.items():
            got = found['results'].get(task, {})
            value, error = (got.get(f'{metric}{what},none') for what in ('', '_stderr'))
            cells.append(MISSING if value is None else f'{value:.1%} ± {error:.1%}')
            documents |= {found['n-samples'][task]['effective']: name} if got else {}
            if task in CHANCE and value is not None:
                above[name].append(value > 1 / CHANCE[task] + 2 * error)
        if len(documents) > 1:
            numbers = ', '.join(f'{name} {number}' for number, name in documents.items())
            raise InputError(f'{task}: documents are {numbers}; evaluate all with the same --limit and --data_dir')
        chance = f'{1 / CHANCE[task]:.1%}' if task in CHANCE else MISSING
        lines.append([task, metric, next(iter(documents), MISSING), chance, *cells])
    counted = [f'{sum(tasks)} of {len(tasks)}' for tasks in above.values()]
    lines.append(['above chance', MISSING, MISSING, MISSING, *counted])
    with open(target, 'w', newline='') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerows([['task', 'metric', 'documents', 'chance', *read], *lines])


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', metavar='NAME=RESULTS.json', help='what eval.py or tfree.py wrote')
    models = parser.parse_args().models
    if any('=' not in model for model in models):
        raise InputError(f'{" ".join(models)}: say NAME=RESULTS.json of each model')
    main(dict(model.split('=', 1) for model in models), Path(__file__).with_suffix('.csv'))
