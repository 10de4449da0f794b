#!/usr/bin/env bash
# lm-eval 0.4.13: the few-shot examples in a document's prompt depend on the number of processes.
# Guess: so, because each process draws from its own generator with the same seed (70 %).
# Expected: data-parallel evaluation only distributes the documents. Seen: with two processes, 1 of 8 documents has the
# prompt that it has with one process. The generator advances once per document, so document 1 of process 1 gets the
# draw of document 0, and so on; all processes start with the same examples. Scores of a 5-shot task on one and on eight
# GPUs therefore differ by more than rounding (lm-evaluation-harness issue 1719 reports such scores). Compare models
# with the same number of processes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-eval==0.4.13 datasets==5.2.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import json
import logging
import os
import tempfile

os.environ['HF_HUB_OFFLINE'] = os.environ['TQDM_DISABLE'] = '1'
from lm_eval.api.task import ConfigurableTask

logging.disable(logging.CRITICAL)


def prompts(config, world_size):
    found = {}
    for rank in range(world_size):
        task = ConfigurableTask(config=dict(config))
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=rank, world_size=world_size, limit=8)  # as lm_eval.evaluate does
        found |= {request.doc['question']: request.args[0] for request in task.instances}
    return found


with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/rows.jsonl'
    with open(path, 'w') as f:
        for k in range(40):
            f.write(json.dumps(dict(question=f'{k} + 1?', options=[str(k + 1), '0'], answer=0)) + '\n')
    config = dict(task='toy', dataset_path='json', test_split='test', fewshot_split='train', num_fewshot=2,
                  dataset_kwargs=dict(data_files=dict(train=path, test=path), cache_dir=folder),
                  output_type='multiple_choice', doc_to_text='Q: {{question}} A:', doc_to_choice='options',
                  doc_to_target='answer')
    one = prompts(config, 1)
    two = prompts(config, 2)
for question in list(one)[:3]:
    print(f'{question}  1 process: {one[question]!r}  2 processes: {two[question]!r}')
equal = sum(one[question] == two[question] for question in one)
print(f'{equal} of {len(one)} prompts are equal')
assert one.keys() == two.keys() and equal < len(one) / 2, 'changed'
PYTHON
