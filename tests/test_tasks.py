"""The paper's tasks in mhf/lm.py, on small local files, and MuBench's."""

import json
import sys
import types
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import lm_eval
import pytest
from conftest import REPO, small_tasks, write_rows
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from mhf import lm as tasks
from mhf.errors import InputError
from mhf.lm import MHFLM, PAPER
from test_mhf import random_model


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    """lm-eval does not read its own 14,000 task files, which takes 6 seconds."""
    build = TaskIndex.build
    monkeypatch.setattr(TaskIndex, 'build', staticmethod(lambda paths, **options: build(paths[1:], **options)))


def test_known_answers(tmp_path, mistral):
    """A model that knows all answers scores 1 on each task, one that knows none scores by each task's metric."""
    right = small_tasks(tmp_path)

    class Known(MHFLM):
        """Scores continuations by their text."""

        def _loglikelihood_tokens(self, requests, **options):
            scores = [self.judge(mistral.decode(continuation)) for _, _, continuation in requests]
            return [(s, s == 0) for s in scores]

    scores = {}
    known = Known(random_model(), mistral)
    for name, judge in (('oracle', lambda s: 0.0 if s.strip() in right else -99.0), ('constant', lambda s: -1.0)):
        known.judge = judge
        got = tasks.run_tasks(known, tasks.load_tasks(PAPER, str(tmp_path)))
        assert list(got['results']) == list(PAPER)
        scores[name] = [r[f'{PAPER[task]["metric"]},none'] for task, r in got['results'].items()]
    assert scores['oracle'] == [1.0] * 11
    # the constant model takes the first choice, or where scores are divided by length, the longest
    assert scores['constant'] == [0, 0, 1, 0.5, 1, 0.5, 1, 0.5, 0.5, 1, 0.25]
    assert Counter(got['n-shot'].values()) == {0: 8, 5: 3} and got['n-shot']['social_iqa'] == 5
    assert got['versions']['race_v2'] == 2
    # the folder has no other split of these
    assert got['configs']['sciq']['test_split'] == 'validation' and got['n-samples']['sciq']['effective'] == 4
    assert got['configs']['social_iqa']['fewshot_split'] == 'validation'


# choices in another order at each call, as in lm-eval's gpqa_*_n_shot
SHUFFLE = """
import random
rng = random.Random(0)
def shuffle(docs):
    return docs.map(lambda doc: doc | dict(choices=rng.sample(doc['choices'], 2)))
"""


@pytest.mark.parametrize('name', ['mubench_hellaswag_ar', 'own'])
def test_examples_from_the_scored_split(tmp_path, monkeypatch, name):
    """Examples never contain the scored document, also in a task without another split for them."""
    write_rows(tmp_path / 'rows.jsonl', [dict(prompt=f'{k} is', choices=[' a', ' b'], label=0) for k in range(8)])
    monkeypatch.setattr(tasks, 'EVAL_TASKS', tmp_path)
    config = load_yaml(REPO / 'eval_tasks/mubench_hellaswag_ar.yaml') | dict(task=name, dataset_path='json')
    files = dict.fromkeys(('test', 'validation'), str(tmp_path / 'rows.jsonl'))
    config |= dict(dataset_name=None, dataset_kwargs=dict(data_files=files))
    if name == 'own':
        config |= dict(test_split=None, validation_split='validation', fewshot_split='validation', process_docs='@')
    (tmp_path / 'own.py').write_text(SHUFFLE)
    (tmp_path / f'{name}.yaml').write_text(json.dumps(config).replace('"@"', '!function own.shuffle'))
    (task,) = tasks.load_tasks([name], num_fewshot=4)['tasks'].values()
    task.build_all_requests()
    assert [request.doc for request in task.instances[::2]] == list(task.eval_docs)
    for request in task.instances:
        assert request.args[0].count(f'{request.doc["prompt"]}') == 1 and request.args[0].count(' is') == 5


def test_num_fewshot(tmp_path, monkeypatch):
    """
    num_fewshot replaces the number of examples in the prompts of every task. A file in eval_tasks/ replaces lm-eval's
    task of that name, also one of the paper's, and may have its own number. A group that contains a task of the paper
    does not change its number.
    """
    small_tasks(tmp_path)
    monkeypatch.setattr(tasks, 'EVAL_TASKS', tmp_path)
    config = load_yaml(Path(lm_eval.__file__).parent / 'tasks/piqa/piqa.yaml')
    config |= dict(doc_to_text='Question: mine {{goal}}\nAnswer:', num_fewshot=3)
    (tmp_path / 'piqa.yaml').write_text(json.dumps(config))
    for number in (0, 2):
        loaded = tasks.load_tasks(['arc_easy', 'piqa'], str(tmp_path), number)
        for name, task in loaded['tasks'].items():
            task.build_all_requests()
            prompts = [instance.args[0] for instance in task.instances]
            assert {prompt.count('Question:') for prompt in prompts} == {number + 1}, name
            assert name != 'piqa' or all(prompt.count('mine Do.') == number + 1 for prompt in prompts)
    arc = tasks.paper_config('arc_easy', str(tmp_path), None) | dict(num_fewshot=None)
    (tmp_path / 'arc_easy.yaml').write_text(json.dumps({key: value for key, value in arc.items() if value is not None}))
    (tmp_path / 'arc.yaml').write_text(json.dumps(dict(group='arc', task=['arc_easy'])))
    loaded = tasks.load_tasks(['arc_easy', 'piqa', 'arc'], str(tmp_path))['tasks']
    assert {name: task.config.num_fewshot for name, task in loaded.items()} == dict(arc_easy=5, piqa=3)
    with pytest.raises(KeyError, match='mubench_mmlu_e'):  # lm-eval's error; an unknown task is not left out
        tasks.load_tasks(['mubench_mmlu_e'])


def test_requests_are_checked_before_scoring(tmp_path, mistral, monkeypatch):
    """A task with generation options that are unknown or do not fit the context is an error before any is scored."""
    write_rows(tmp_path / 'rows.jsonl', [dict(question='1 + 1 is', answer='two')])
    config = dict(dataset_path='json', dataset_kwargs=dict(data_files=dict(test=str(tmp_path / 'rows.jsonl'))))
    config |= dict(test_split='test', doc_to_text='{{question}}', doc_to_target=' {{answer}}')
    ends = dict(config, task='ends', output_type='loglikelihood', metric_list=[dict(metric='acc')])
    # max_gen_toks is 256 by default
    options = dict(until=['x'], num_beams=4)
    answers = dict(config, task='answers', output_type='generate_until', generation_kwargs=options)
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral, 1)
    scored = Mock(wraps=lm.model.hidden_states)
    monkeypatch.setattr(lm.model, 'hidden_states', scored)
    manager = TaskManager(include_defaults=False)
    with pytest.raises(InputError, match='unknown num_beams, max_gen_toks=256 must be from 1 to 23'):
        tasks.run_tasks(lm, manager.load([ends, answers]))
    assert not scored.called
    answers['generation_kwargs'] = dict(until=['x'], max_gen_toks=4)
    (sample,) = tasks.run_tasks(lm, manager.load([ends, answers]))['samples']['answers']
    assert isinstance(sample['resps'][0][0], str)


def test_task_files_equal_lm_eval_s(tmp_path, monkeypatch):
    """eval_tasks/ asks what lm-eval's own tasks ask; RACE asks as version 2 of the task."""
    small_tasks(tmp_path)
    blank = dict(question='He was  _  .', answer='A', options=['b', 'cc', 'd', 'e'])
    race = [blank, dict(blank, question='Who?'), dict(blank, question='Why?', answer='B')]
    write_rows(tmp_path / 'race_high_test.jsonl', [dict(article='Text.', problems=str(race))])
    # what lm-eval's ReCoRD imports for its scores is gone from transformers
    for module in ('transformers.data.metrics', 'transformers.data.metrics.squad_metrics'):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))

    def load(name, file):
        """Returns the version of a task and what it asks."""
        config = load_yaml(file) | dict(num_fewshot=0)
        version = config['metadata']['version']
        config |= tasks.local_config(name, config, tmp_path)
        (task,) = TaskManager(include_defaults=False).load([config])['tasks'].values()
        task.build_all_requests()
        return version, [instance.args for instance in task.instances]

    references = dict(record='super_glue/record/default', social_iqa='siqa/siqa', race_v2='race/race')
    folder = Path(lm_eval.__file__).parent / 'tasks'
    ours = {name: load(name, REPO / f'eval_tasks/{name}.yaml') for name in references}
    theirs = {name: load(name, folder / f'{reference}.yaml') for name, reference in references.items()}
    for name in ('record', 'social_iqa'):
        assert ours[name] == theirs[name] and len(ours[name][1]) > 9
    # the lm-eval of the paper kept only the blank of such a question
    old_version, [(old, _), *_] = ours['race_v2']
    new_version, [(new, _), *_] = theirs['race_v2']
    assert new == 'Article: Text.\n\nHe was b\nQuestion: Who?\nAnswer: b\nWhy?'
    assert old == new.replace('He was b', ' _  .b') and old_version == new_version - 1
