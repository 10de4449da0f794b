"""mhf/tasks.py: the paper's tasks on small local files, and beside lm-eval's own."""

import sys
import types
from collections import Counter
from pathlib import Path

import lm_eval
import pytest
from conftest import REPO, newest, ok, random_model, small_tasks, write_rows
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from mhf import tasks
from mhf.lm import MHFLM

# with test_eval.py, whose small runs they share
pytestmark = pytest.mark.xdist_group('eval')


def paper(lm, folder, names=tuple(tasks.PAPER), limit=None):
    """lm-eval's results of the paper's tasks."""
    return tasks.run_tasks(lm, *tasks.load_tasks(names, str(folder)), limit)


def test_known_answers(tmp_path, mistral):
    """A task's text, answer, metric, shots or file is wrong: a model that knows all answers would not score 1."""
    right = small_tasks(tmp_path)

    class Known(MHFLM):
        """Scores continuations by their text."""

        def _loglikelihood_tokens(self, requests, **others):
            scores = [self.judge(mistral.decode(continuation)) for _, _, continuation in requests]
            return [(s, s == 0) for s in scores]

    scores = {}
    known = Known(random_model(), mistral)
    for name, judge in (('oracle', lambda s: 0.0 if s.strip() in right else -99.0), ('constant', lambda s: -1.0)):
        known.judge = judge
        got = paper(known, tmp_path)
        assert list(got['results']) == list(tasks.PAPER)
        scores[name] = [r[f'{tasks.PAPER[task]["metric"]},none'] for task, r in got['results'].items()]
    assert scores['oracle'] == [1.0] * 11
    # the constant model takes the first choice, or where scores are divided by length, the longest
    assert scores['constant'] == [0, 0, 1, 0.5, 1, 0.5, 1, 0.5, 0.5, 1, 0.25]
    assert Counter(got['n-shot'].values()) == {0: 8, 5: 3} and got['n-shot']['social_iqa'] == 5
    assert got['versions']['race_v2'] == 2
    assert got['notes']['sciq'] == ['validation split for test', '4 of 1,000 documents']
    assert got['notes']['social_iqa'] == ['shots from validation, not train', '12 of 1,954 documents']


def local_task(file, data):
    """A task file, given other data."""
    task = load_yaml(file) | dict(dataset_path='json', dataset_name=None, dataset_kwargs=dict(data_files=data))
    return TaskManager(include_defaults=False).load([task])


def test_mubench_files(tmp_path, mistral):
    """A task file of MuBench does not read its schema, or names another language's data."""
    rows = [dict(prompt='The sky is', choices=[' blue', ' a wall', ' to'], label=k) for k in (0, 1, 2, 1)]
    write_rows(tmp_path / 'test.jsonl', rows)
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral, 1)
    for name, metrics in dict(hellaswag_ar=['acc', 'acc_norm'], mmlu_hi=['acc']).items():
        task = local_task(REPO / f'eval_tasks/mubench_{name}.yaml', dict(test=str(tmp_path / 'test.jsonl')))
        (scores,) = lm_eval.evaluate(lm, task, log_samples=False)['results'].values()
        assert [k.split(',')[0] for k in scores if k.endswith(',none') and '_stderr' not in k] == metrics
    files = list((REPO / 'eval_tasks').glob('mubench_*.yaml'))
    assert len(files) == 16
    for file in files:
        _, task, language = file.stem.split('_')
        written = file.read_text()
        assert f'task: {file.stem}\n' in written and f'Dataset_lighteval_{language}\n' in written
        assert task in written.lower()


def test_tasks_of_ours_are_lm_eval_s(tmp_path, mistral, monkeypatch):
    """A task file of ours asks otherwise than lm-eval's own, or has its prompt under another version."""
    small_tasks(tmp_path)
    blank = dict(question='He was  _  .', answer='A', options=['b', 'cc', 'd', 'e'])
    race = [blank, dict(blank, question='Who?'), dict(blank, question='Why?', answer='B')]
    write_rows(tmp_path / 'race_high_test.jsonl', [dict(article='Text.', problems=str(race))])
    # what lm-eval's ReCoRD imports for its scores is gone from transformers
    for module in ('transformers.data.metrics', 'transformers.data.metrics.squad_metrics'):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    asked = {}
    versions = {}
    of_lm_eval = Path(lm_eval.__file__).parent / 'tasks'
    for ours, theirs in dict(record='super_glue/record/default', social_iqa='siqa/siqa', race_v2='race/race').items():
        for who, file in dict(ours=REPO / f'eval_tasks/{ours}.yaml', theirs=of_lm_eval / f'{theirs}.yaml').items():
            config = load_yaml(file) | dict(num_fewshot=0)
            versions[ours, who] = config['metadata']['version']
            config |= tasks.local_data(ours, config, tmp_path)[0]
            (task,) = TaskManager(include_defaults=False).load([config])['tasks'].values()
            task.build_all_requests()
            asked[ours, who] = [instance.args for instance in task.instances]
    for task in ('record', 'social_iqa'):
        assert asked[task, 'ours'] == asked[task, 'theirs'] and len(asked[task, 'ours']) > 9
        assert versions[task, 'ours'] == versions[task, 'theirs']
    # of such a question the paper's lm-eval kept the blank alone
    old, _ = asked['race_v2', 'ours'][0]
    new, _ = asked['race_v2', 'theirs'][0]
    assert new == 'Article: Text.\n\nHe was b\nQuestion: Who?\nAnswer: b\nWhy?'
    assert old == new.replace('He was b', ' _  .b') and versions['race_v2', 'ours'] == versions['race_v2', 'theirs'] - 1


# local files in place of the hub
HUB = """
import datasets
from pathlib import Path
whole = datasets.load_dataset
def from_files(path, name=None, **others):
    name = dict(super_glue=name, ai2_arc='arc_easy', siqa='social_i_qa', race='race_high', lambada='lambada_standard')\
        .get(Path(path).name, Path(path).name)
    return whole('json', data_files={{split: str(next(Path({folder!r}).glob(f'{{name}}_*.jsonl')))
                                     for split in ('train', 'validation', 'test')}})
datasets.load_dataset = from_files
# lm-eval would draw 100,000 times for a perplexity
import lm_eval.api.metrics
lm_eval.api.metrics.bootstrap_stderr = lambda *args, **others: 0.0
from lm_eval.tasks import _index
build = _index.TaskIndex.build
THEIRS = {theirs!r}
def build_few(paths, **others):
    few = dict.fromkeys(Path(paths[0]) / Path(file).parent for file in THEIRS if paths)
    return build([*few, *paths[1:]], **others)
_index.TaskIndex.build = staticmethod(build_few)
"""


def test_the_paper_s_tasks_on_both_command_lines(few, tmp_path):
    """eval.py and lm-eval's command line score the paper's tasks from the hub differently, or with other shots."""
    (tmp_path / 'hub').mkdir()
    small_tasks(tmp_path / 'hub')
    theirs = [row['yaml'] for row in tasks.PAPER.values() if 'yaml' in row]
    hub = HUB.format(folder=str(tmp_path / 'hub'), theirs=theirs)
    ok('eval.py', '--out_dir=out', '--dtype=float32', f'--output_path={tmp_path}/a', '--device=cpu', cwd=few, patch=hub)
    args = ['--model_args', 'dtype=float32', '--tasks', 'paper', '--output_path', f'{tmp_path}/b', '--device', 'cpu']
    ok('mhf.lm', 'run', *args, cwd=few, patch=hub)
    ours, theirs = (newest(tmp_path / folder) for folder in 'ab')
    assert len(ours['results']) == 11 and theirs['n-shot'] == ours['n-shot']
    for task, scores in ours['results'].items():
        there = theirs['results'][task]
        assert all(there[k] == scores[k] for k in scores if 'stderr' not in k), task
    assert 'notes' in ours and ours['notes']['copa'] == ['4 of 100 documents']
