"""
Tasks: at chance at this size

    $ python eval.py --out_dir=out/english/KEY --tasks=paper --data_dir=DIR --output_path=out/h4.json   # each model
    $ python study/tfree.py eval --out_dir=out/tfree --data_dir=DIR                 # writes out/tfree/tasks.json
    $ python study/tasks.py H4=out/h4_DATE.json T-FREE=out/tfree/tasks.json           # writes study/tasks.csv

Models of 11 M parameters after a million tokens or three: nothing here tells one from another, LAMBADA included; it is
shown once. T-FREE's scores rank words and are no likelihoods, so this is the only place where it stands beside others.
The paper's shots and metrics; ± is lm-eval's standard error.
"""

import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation

# of those whose answers are equally many
CHANCE = dict(arc_easy=4, copa=2, openbookqa=4, piqa=2, hellaswag=4, race_v2=4, sciq=4, social_iqa=3)


def main(models):
    """models: {name: the results' file}."""
    read = {name: json.loads(Path(path).read_text()) for name, path in models.items()}
    with open(Path(__file__).with_suffix('.csv'), 'w', newline='') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerow(['task', 'metric', 'documents', 'chance', *read])
        for task, of_paper in evaluation.PAPER.items():
            metric, cells, documents = of_paper['metric'], [], {}
            for found in read.values():
                got = found['results'].get(task, {})
                value, error = (got.get(f'{metric}{what},none') for what in ('', '_stderr'))
                cells.append('–' if value is None else f'{value:.1%} ± {error:.1%}')
                documents |= found['n-samples'].get(task, {})
            chance = f'{1 / CHANCE[task]:.1%}' if task in CHANCE else '–'
            writer.writerow([task, metric, documents.get('effective', ''), chance, *cells])


if __name__ == '__main__':
    main(dict(argument.split('=', 1) for argument in sys.argv[1:]))
