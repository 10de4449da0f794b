#!/usr/bin/env bash
# lm-eval 0.4.13: simple_evaluate(num_fewshot=5) replaces the number of examples that a task names, unless it names 0.
# Guess: the argument is ignored for a task whose file says 0 (90 %).
# Expected: an explicit argument wins for every task. Seen: five examples for a task that names none or 2, none for a
# task that names 0. The message about it is a log record, so a table of "5-shot" results can mix 5 and 0 examples. The
# column n-shot of the results is right; compare it before you compare models.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 datasets==5.2.0 torch==2.13.0 numpy==2.3.5 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import logging
import os
import tempfile

os.environ['HF_HUB_OFFLINE'] = '1'
import lm_eval
from lm_eval.api.model import LM

logging.disable(logging.CRITICAL)


class Recorder(LM):
    """Records the contexts that it is asked about."""

    contexts = []

    def loglikelihood(self, requests):
        self.contexts = [request.args[0] for request in requests]
        return [(0.0, True)] * len(requests)

    def loglikelihood_rolling(self, requests):
        return [0.0] * len(requests)

    def generate_until(self, requests):
        return [''] * len(requests)


with tempfile.TemporaryDirectory() as folder:
    rows = [dict(question=f'{k} + 1?', options=[str(k + 1), '0'], answer=0) for k in range(20)]
    path = f'{folder}/rows.jsonl'
    with open(path, 'w') as f:
        f.writelines(json.dumps(row) + '\n' for row in rows)
    shots = {}
    for in_file in (None, 0, 2):
        task = dict(task=f'toy_{in_file}', dataset_path='json', test_split='test', fewshot_split='train',
                    dataset_kwargs=dict(data_files=dict(train=path, test=path), cache_dir=folder),
                    output_type='multiple_choice', doc_to_text='Q: {{question}} A:', doc_to_choice='options',
                    doc_to_target='answer')
        task |= {} if in_file is None else dict(num_fewshot=in_file)
        lm = Recorder()
        lm_eval.simple_evaluate(lm, tasks=[task], num_fewshot=5, limit=2, log_samples=False, bootstrap_iters=0)
        shots[in_file] = lm.contexts[0].count('Q:') - 1
    print('examples in the prompt, by num_fewshot of the task, for simple_evaluate(num_fewshot=5):', shots)
assert shots == {None: 5, 0: 0, 2: 5}, 'changed'
PYTHON
