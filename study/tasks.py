"""
Tasks: how far from chance?

    $ python eval.py --out_dir=out/english/KEY --tasks=paper --data_dir=DIR --output_path=out/h4.json   # each model
    $ python study/tfree.py eval --out_dir=out/tfree --data_dir=DIR                 # writes out/tfree/tasks.json
    $ python study/tasks.py H4=out/h4_DATE.json T-FREE=out/tfree/tasks.json           # writes study/tasks.csv

Of models of 11 M parameters after a million tokens or three, LAMBADA is shown once; a difference counts that is more
than two of lm-eval's standard errors, the ±. T-FREE's scores rank words and are no likelihoods, so this is the only
place where it stands beside others. The paper's shots and metrics.
"""

import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation
from configurator import InputError

# of those whose answers are equally many
CHANCE = dict(arc_easy=4, copa=2, openbookqa=4, piqa=2, hellaswag=4, race_v2=4, sciq=4, social_iqa=3)


def main(models, target):
    """models: {name: the results' file}; the CSV to write. Raises InputError."""
    read = {}
    for name, path in models.items():
        try:
            read[name] = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise InputError(
                f'{name}={path} cannot be read ({e}); name the JSON that eval.py or tfree.py wrote'
            ) from None
    lines = []
    for task, of_paper in evaluation.PAPER.items():
        metric, cells, documents = of_paper['metric'], [], {}
        for name, found in read.items():
            got = found['results'].get(task, {})
            value, error = (got.get(f'{metric}{what},none') for what in ('', '_stderr'))
            cells.append('–' if value is None else f'{value:.1%} ± {error:.1%}')
            documents |= {found['n-samples'][task]['effective']: name} if got else {}
        if len(documents) > 1:
            numbers = ', '.join(f'{name} {number}' for number, name in documents.items())
            raise InputError(f'{task}: documents are {numbers}; evaluate all with the same --limit and --data_dir')
        chance = f'{1 / CHANCE[task]:.1%}' if task in CHANCE else '–'
        lines.append([task, metric, *(documents or '–'), chance, *cells])
    with open(target, 'w', newline='') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerows([['task', 'metric', 'documents', 'chance', *read], *lines])


if __name__ == '__main__':
    if wrong := [argument for argument in sys.argv[1:] if '=' not in argument] or ['nothing'] * (len(sys.argv) < 2):
        raise InputError(f'{wrong[0]}: say NAME=RESULTS.json of each model')
    main(dict(argument.split('=', 1) for argument in sys.argv[1:]), Path(__file__).with_suffix('.csv'))
