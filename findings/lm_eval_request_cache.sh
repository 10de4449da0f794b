#!/usr/bin/env bash
# lm-eval 0.4.13: with cache_requests=True, an edited prompt or another few-shot seed is not noticed.
# Guess: the key contains neither (85 %).
# Expected: a cache of prompts is rebuilt if the template or the seed changes. Seen: the second and the third evaluation
# ask the prompts of the first. The key is the task's name, the number of examples, rank, number of processes, system
# prompt, chat template (whether it is used) and tokenizer; template, data, seed and version of the task are missing.
# "Five seeds" of few-shot examples are then one. rewrite_requests_cache=True rebuilds it.
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

folder = tempfile.TemporaryDirectory()
os.environ['HF_HUB_OFFLINE'] = os.environ['TQDM_DISABLE'] = '1'
os.environ['LM_HARNESS_CACHE_PATH'] = f'{folder.name}/cache'
from lm_eval.api.task import ConfigurableTask

logging.disable(logging.CRITICAL)
path = f'{folder.name}/rows.jsonl'
with open(path, 'w') as f:
    for k in range(20):
        f.write(json.dumps(dict(question=f'{k} + 1?', options=[str(k + 1), '0'], answer=0)) + '\n')


def first_prompt(template, seed, **options):
    task = ConfigurableTask(config=dict(
        task='toy', dataset_path='json', test_split='test', fewshot_split='train', num_fewshot=1,
        dataset_kwargs=dict(data_files=dict(train=path, test=path), cache_dir=folder.name),
        output_type='multiple_choice', doc_to_text=template, doc_to_choice='options', doc_to_target='answer'))
    task.set_fewshot_seed(seed)
    task.build_all_requests(cache_requests=True, **options)  # as lm_eval.simple_evaluate(cache_requests=True) does
    return task.instances[0].args[0]


def show(name, prompt):
    print(f'{name:<17} {prompt!r}')
    return prompt


first = show('first', first_prompt('Q: {{question}} A:', 1))
seed = show('another seed', first_prompt('Q: {{question}} A:', 2))
template = show('another template', first_prompt('Frage: {{question}} Antwort:', 1))
rebuilt = show('rebuilt, seed 1', first_prompt('Frage: {{question}} Antwort:', 1, rewrite_requests_cache=True))
rebuilt_2 = show('rebuilt, seed 2', first_prompt('Frage: {{question}} Antwort:', 2, rewrite_requests_cache=True))
assert first == seed == template and len({first, rebuilt, rebuilt_2}) == 3, 'changed'
PYTHON
