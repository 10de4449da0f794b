#!/usr/bin/env bash
# lm-eval 0.4.13: acc_norm divides by characters, although the descriptions of its tasks say bytes.
# Guess: characters (70 %).
# Expected: the README files of blimp_nl, zhoblimp, multiblimp and others, in the package, call acc_norm normalized by
# bytes. Seen: with choices of 3 characters in 6 bytes and of 4 characters in 4 bytes, acc_norm prefers the one that the
# division by characters prefers; the metric acc_bytes, which 9 of the package's files of tasks name (acc_norm: 489),
# divides by bytes. English scores agree; a comparison of scripts, such as Latin and Cyrillic choices, or with results
# of a harness that divides by bytes, does not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 datasets==5.2.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import json
import logging
import os
import pathlib
import tempfile

os.environ['HF_HUB_OFFLINE'] = os.environ['TQDM_DISABLE'] = '1'
import lm_eval
from lm_eval.api.model import LM

logging.disable(logging.CRITICAL)
CHOICES = {'\u0434\u043e\u043c': -4.2, 'bomb': -5.0}  # 3 characters in 6 bytes; 4 in 4


class Fixed(LM):
    def loglikelihood(self, requests):
        return [(CHOICES[request.args[1].strip()], False) for request in requests]

    def loglikelihood_rolling(self, requests):
        return [0.0] * len(requests)

    def generate_until(self, requests):
        return [''] * len(requests)


readme = pathlib.Path(lm_eval.__file__).parent / 'tasks' / 'blimp_nl' / 'README.md'
claim = 'byte-length-normalized accuracy (`acc_norm`)'
print(f'README of blimp_nl contains {claim!r}:', claim in readme.read_text())
with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/rows.jsonl'
    with open(path, 'w') as f:
        f.write(json.dumps(dict(question='x', options=list(CHOICES), answer=0)) + '\n')
    task = dict(task='toy', dataset_path='json', test_split='test', output_type='multiple_choice', num_fewshot=0,
                dataset_kwargs=dict(data_files=dict(test=path), cache_dir=folder), doc_to_text='{{question}}',
                doc_to_choice='options', doc_to_target='answer',
                metric_list=[dict(metric=name) for name in ('acc', 'acc_norm', 'acc_bytes')])
    results = lm_eval.simple_evaluate(Fixed(), tasks=[task], bootstrap_iters=0)['results']['toy']
scores = {name: results[f'{name},none'] for name in ('acc', 'acc_norm', 'acc_bytes')}
for choice, value in CHOICES.items():
    print(f'{choice}: {value / len(choice):.2f} per character, {value / len(choice.encode()):.2f} per byte')
print('first choice preferred:', scores)
assert scores == dict(acc=1.0, acc_norm=0.0, acc_bytes=1.0), 'changed'
PYTHON
