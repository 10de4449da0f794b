"""eval.py and mhf/lm.py: scores against log_probs, the paper's tasks on small local files, lm-eval's command line."""

import gzip
import json
import lzma
import math
import shutil
import sys
import types
from collections import Counter
from pathlib import Path

import lm_eval
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from conftest import REPO, SHARED, events, ok, random_model, ranks, real_documents, run, write_jsonl
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_latest_filename, get_results_filenames

import eval as evaluation
from configurator import InputError
from mhf import tasks
from mhf.bins import held_out_split, read_meta
from mhf.checkpoint import load_checkpoint
from mhf.generate import Writer
from mhf.lm import MHFLM, text_after
from mhf.released import from_pretrained, save_pretrained
from mhf.tokenizers import JsonTokenizer, tokenizer_fingerprint

pytestmark = pytest.mark.xdist_group('eval')


# -----------------------------------------------------------------------------
# scoring


def model_of_lm_eval(model, bos=1, **how):
    """An MHFLM of a model whose tokenizer does not matter."""
    return MHFLM(model, types.SimpleNamespace(name='none', bos=1), bos, **how)


def scored(lm, requests):
    """[(context ids, continuation ids)] -> [(log P, greedy?)]."""
    return lm._loglikelihood_tokens([(None, *request) for request in requests])


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_scores_equal_log_probs(num_hashes):
    """Continuations of a shared context see each other, a position is off by one, or the batch changes the score."""
    m = random_model(num_hashes=num_hashes)
    draw = np.random.default_rng(0)
    contexts = [draw.integers(3, 300, n).tolist() for n in (1, 5, 5, 20, 60)]
    requests = [(c, draw.integers(3, 300, n).tolist()) for c in contexts for n in (1, 1, 4, 24)]
    # the same twice, and another context's continuation
    requests += [requests[3], (contexts[1], requests[2][1])]
    for bos in (1, None):
        expected, greedy = [], []
        for context, continuation in requests:
            ids = torch.tensor((([bos] if bos else []) + context + continuation)[-(m.config.block_size + 1) :])
            logp, targets = m.log_probs(ids[None, :-1])[0, -len(continuation) :], ids[-len(continuation) :]
            expected.append(logp.gather(1, targets[:, None]).sum().item())
            greedy.append(bool((logp.argmax(1) == targets).all()))
        for tokens in (10**6, 100, 1):
            got = scored(model_of_lm_eval(m, bos, tokens=tokens), requests)
            assert [g for _, g in got] == greedy
            assert np.allclose([logp for logp, _ in got], expected, atol=1e-9)
        # where all rows have one continuation there is no mask
        got = scored(model_of_lm_eval(m, bos), requests[3:20:4])
        assert np.allclose([logp for logp, _ in got], expected[3:20:4], atol=1e-9)
    likeliest = m.log_probs(torch.tensor([[1, *contexts[1]]]))[0, -1].argmax().item()
    assert scored(model_of_lm_eval(m), [(contexts[1], [likeliest])])[0][1] is True
    for continuation, message in (([], 'empty continuation'), ([7] * 25, '25 tokens')):
        with pytest.raises(InputError, match=message):
            scored(model_of_lm_eval(m), [([5], continuation)])


def test_a_batch_that_does_not_fit(monkeypatch):
    """A GPU that is full ends the evaluation, or the halves of a batch have other scores."""
    m, draw = random_model(), np.random.default_rng(0)
    requests = [(draw.integers(3, 300, n).tolist(), [5, 7]) for n in (1, 4, 9, 3, 8)]
    expected, sizes, hidden_states, room = scored(model_of_lm_eval(m), requests), [], m.hidden_states, 2

    def in_small_memory(x, **how):
        sizes.append(len(x))
        if len(x) > room:
            raise torch.OutOfMemoryError
        return hidden_states(x, **how)

    monkeypatch.setattr(m, 'hidden_states', in_small_memory)
    assert np.allclose([logp for logp, _ in scored(model_of_lm_eval(m), requests)], [logp for logp, _ in expected])
    assert sizes[0] == 5 and min(sizes) <= 2
    room = 0
    with pytest.raises(InputError, match='a single sequence does not fit cpu'):
        scored(model_of_lm_eval(m), requests)


def test_sliding_windows():
    """A token is scored twice or not at all, or with less context than half of what the model has."""
    m = random_model()  # a context of 24
    for n in (1, 23, 24, 25, 36, 37, 100):
        ids = np.random.default_rng(n).integers(3, 300, n).tolist()
        nats, right, confidence = evaluation.sliding(model_of_lm_eval(m), [1, *ids])
        assert len(nats) == n
        whole = [1, *ids]
        for i in range(n):
            # windows of 24 inputs begin at 0, 12, 24, ...
            begin = 0 if i < 24 else (i - 12) // 12 * 12
            logp = m.log_probs(torch.tensor([whole[begin : i + 1]]))[0, -1]
            assert i + 1 - begin <= 24 and (begin == 0 or i - begin >= 12)
            assert torch.allclose(-logp[whole[i + 1]], nats[i], atol=1e-9)
            assert torch.allclose(logp.max().exp(), confidence[i]) and right[i] == (logp.argmax() == whole[i + 1])


def test_calibration_error():
    """The expected calibration error is not the weighted gap between accuracy and confidence."""
    right, confidence = torch.tensor([1.0, 0, 1, 1]).double(), torch.tensor([0.9, 0.9, 1.0, 0.31]).double()
    assert evaluation.calibration_error(right, confidence) == pytest.approx((abs(1 - 1.8) + 0 + 0.69) / 4)


def test_prepared_split(trained, mistral, tmp_path):
    """A bin's ids are read back as others than those of its text, or a bin of another tokenizer is accepted."""
    ids, size = held_out_split(trained / 'bins', mistral)
    documents = np.split(ids, np.flatnonzero(np.array(ids) == mistral.bos))[1:]
    texts = [mistral.decode(document[1:].tolist()) for document in documents]
    assert texts and set(texts) <= set(real_documents()) and size == sum(len(t.encode()) for t in texts)
    other = types.SimpleNamespace(name='other', tokens=mistral.tokens[:-1])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(mistral)
    with pytest.raises(InputError, match="tokenizer 'mistral', the model's is 'other'"):
        held_out_split(trained / 'bins', other)
    with pytest.raises(InputError, match='not a folder of prepare.py'):
        held_out_split(tmp_path, mistral)


TEXTS = ['first document, with ünïcode', ' ', 'second\n\nof two paragraphs \n', 'the third\r\none', '日本語 text' * 30]


def text_files(folder):
    """The same documents in all kinds of files, and the folder of prepare.py whose held-out split they are."""
    rows = ''.join(json.dumps(dict(id=k, text=text)) + '\n' for k, text in enumerate(TEXTS)).encode()
    packed = {'': bytes, '.gz': gzip.compress, '.xz': lzma.compress, '.zst': zstandard.compress}
    for suffix, pack in packed.items():
        (folder / f't.jsonl{suffix}').write_bytes(pack(rows))
    pq.write_table(pa.table(dict(text=TEXTS, score=[3.5] * 5)), folder / 't.parquet')
    # every second is held out
    write_jsonl(folder / 'both.jsonl', [text for held_out in filter(str.strip, TEXTS) for text in ('x', held_out)])
    ok('prepare.py', '--dataset=both.jsonl', '--val_fraction=0.5', '--data_dir=d', cwd=folder)
    return [*(f't.jsonl{suffix}' for suffix in packed), 't.parquet']


def test_text_by_documents(tmp_path, mistral):
    """A file's markup is measured, its documents are run together, or it has other numbers than in training."""
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral)
    files = text_files(tmp_path)
    folder, size = held_out_split(tmp_path / 'd', mistral)
    measured = evaluation.bits_per_byte(lm, folder, size)
    texts = [text.strip() for text in TEXTS if text.strip()]
    ids = [i for document in mistral.encode(texts) for i in (mistral.bos, *document)]
    assert folder == ids and size == sum(len(text.encode()) for text in texts)
    assert (measured['tokens'], measured['bytes'], measured['bos']) == (len(ids) - 1, size, True)
    nats, _, _ = evaluation.sliding(lm, ids)
    assert measured['bits_per_byte'] == pytest.approx(nats.sum().item() / math.log(2) / size)
    for name in files:
        assert evaluation.text_file(tmp_path / name, mistral) == (ids, size), name
    # a .txt is one document
    (tmp_path / 't.txt').write_text('\n' + '\n\n'.join(texts) + '\n', encoding='utf-8', newline='')
    assert evaluation.text_file(tmp_path / 't.txt', mistral)[0].count(mistral.bos) == 1


# -----------------------------------------------------------------------------
# lm-eval


def request(*args, number=0):
    """One of lm-eval's requests, of document `number`."""
    return Instance('', {}, args, 0, ('task', number, 1))


def test_harness_text_and_generation(mistral):
    """lm-eval's perplexity and generation tasks get something else than the model's likelihood and its greedy text."""
    m = random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32)
    lm = MHFLM(m, mistral, 1)
    ids = mistral.encode(['a few words'])[0]
    by_hand = m.log_probs(torch.tensor([[1, *ids[:-1]]]))[0].gather(1, torch.tensor(ids)[:, None]).sum().item()
    assert lm.loglikelihood_rolling([request('a few words')]) == pytest.approx([by_hand], rel=1e-4)
    greedy = m.generate(torch.tensor([[1, *ids]]), 6, temperature=0)[0, 1 + len(ids) :].tolist()
    said = text_after(mistral, ids, greedy[: greedy.index(1)] if 1 in greedy else greedy)
    assert lm.generate_until([request('a few words', dict(until=[], max_gen_toks=6))]) == [said]
    # eos, whose role pad has, ends a text as bos does
    ending = types.SimpleNamespace(name='ending', bos=1, pad=greedy[2], encode=mistral.encode, decode=mistral.decode)
    ended = MHFLM(m, ending, 1).generate_until([request('a few words', dict(until=[], max_gen_toks=6))])
    assert ended == [text_after(mistral, ids, greedy[: greedy.index(greedy[2])])]
    stop = said[len(said) // 2]
    assert lm.generate_until([request('a few words', dict(until=stop, max_gen_toks=6))]) == [said.split(stop)[0]]
    # a batch of prompts of different lengths, in any order, says what each says alone
    texts = ('a', 'a few words', '', 'few')
    prompts = [request(text, dict(until=stop, max_gen_toks=n)) for n in (6, 3) for text in texts]
    assert lm.generate_until(prompts) == [lm.generate_until([p])[0] for p in prompts]
    sampling, drawn = dict(until=[], max_gen_toks=6, do_sample=True, temperature=2.0), []
    for _ in range(2):
        # lm-eval does it
        torch.manual_seed(0)
        drawn.append(lm.generate_until([request('a', sampling)] * 3))
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    assert len(set(lm.generate_until([request('a', dict(sampling, top_k=1))] * 3))) == 1
    with pytest.raises(InputError, match='num_beams'):
        lm.generate_until([request('a', dict(until=[], num_beams=4))])
    # all of it in the precision that was asked for
    low, passes, hidden_states = MHFLM(m, mistral, 1, 'bfloat16'), [], m.hidden_states
    m.hidden_states = lambda *a, **k: passes.append(torch.is_autocast_enabled('cpu')) or hidden_states(*a, **k)
    low.generate_until([request('a', dict(until=[], max_gen_toks=2))])
    low.loglikelihood_rolling([request('a b c')])
    assert len(passes) == 3 and all(passes)


def test_a_prompt_that_does_not_fit(mistral, caplog):
    """A long context is cut and nobody hears of it, or a text is written from the last token of its prompt alone."""
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32), mistral, 1)
    for number in (lm.max_length, lm.max_length + 1):
        with pytest.raises(InputError, match=f'max_gen_toks={number} .* context of {lm.max_length} tokens'):
            lm.generate_until([request('a', dict(until=[], max_gen_toks=number))])
    assert not lm.cut
    long = 'one two three four ' * 9
    # the choices of a document count once
    lm.loglikelihood([request('short', ' a'), *(request(long, choice, number=1) for choice in (' a', ' b'))])
    lm.generate_until([request(text, dict(until=[], max_gen_toks=4), number=2) for text in ('short', long)])
    assert lm.cut == {('task', 1), ('task', 2)}
    assert [r.getMessage().startswith('task: 1 documents with a context over 24') for r in caplog.records] == [True] * 2


def test_first_space_of_an_answer(mistral, tmp_path, monkeypatch):
    """The indentation of what a model writes loses a space, as in humaneval, or the text of the prompt is in it."""
    import tokenizers

    pieces = {'<s>': 0, '\u2581': 1, 'a': 2, '\u2581a': 3}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [('\u2581', 'a')]))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme='always')
    words.decoder = tokenizers.decoders.Metaspace(prepend_scheme='always')
    words.add_special_tokens(['<s>'])
    words.save(str(tmp_path / 'tokenizer.json'))
    letters = JsonTokenizer('letters', tmp_path / 'tokenizer.json')
    for tok, texts in ((mistral, ('import', 'class A(object):\n', 'ünïcode 日本', 'x  ')), (letters, ('a', 'a a'))):
        for text in texts:
            ids = tok.encode([text])[0]
            for answer in (' a', '   a a', 'a'):
                whole = tok.encode([text + answer])[0]
                # where the prompt is split as it is alone
                if whole[: len(ids)] == ids:
                    assert text_after(tok, [tok.bos, *ids], whole[len(ids) :]) == answer
        # nothing before it
        assert text_after(tok, [tok.bos], tok.encode(['a'])[0]) == 'a'
    m = random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32)
    made = mistral.encode(['import os\n        return'])[0][len(mistral.encode(['import'])[0]) :]
    given = lambda self, ids, n, **how: (torch.tensor([token] * len(ids)) for token in made)  # noqa: E731
    monkeypatch.setattr(Writer, 'stream', given)
    lm = MHFLM(m, mistral, 1)
    assert lm.generate_until([request('import', dict(until=['return'], max_gen_toks=9))]) == [' os\n        ']


def test_what_is_known_is_kept(mistral):
    """lm-eval's --use_cache has nothing of an evaluation that was interrupted."""
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral, 1, tokens=1)
    kept, score = [], lm.score
    lm.set_cache_hook(types.SimpleNamespace(add_partial=lambda kind, request, result: kept.append(request)))
    lm.score = lambda batch: score(batch) if not kept else 1 / 0
    with pytest.raises(ZeroDivisionError):
        lm.loglikelihood([request('a longer context', ' here'), request('one', ' two')])
    assert kept == [('a longer context', ' here')]


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows), encoding='utf-8')


# three choices and the right one, which is the longest; right[i] is first in two of four
QUESTIONS = [('alpha 1', 'b', 'cc', 0), ('a', 'beta 2', 'c', 1), ('aa', 'b', 'gamma 3', 2), ('delta', 'bb', 'cc', 0)]
TWO_CHOICES = [q for q in QUESTIONS if q[3] < 2] + [('x', 'yyy', '', 1)]
LAMBADA = [dict(text=f'he went to the old {w}') for w in ('house', 'river', 'garden', 'school')]
SCIQ = ('long right', 'd', 'other right', 'e')


def small_tasks(folder):
    """Writes a few documents for each of the paper's tasks in the hub's schema; returns all right continuations."""
    letters = 'ABCD'

    def lettered(q):
        return dict(choices=dict(text=list(q[:3]), label=list(letters[:3])), answerKey=letters[q[3]], id=q[0])

    def write(name, rows, *splits):
        for split in splits:
            write_rows(folder / f'{name}_{split}.jsonl', rows)

    def each(row, questions=QUESTIONS):
        return [row(q) for q in questions]

    write('lambada_openai', LAMBADA, 'test')
    write('lambada_standard', LAMBADA, 'test')
    write('arc_easy', each(lambda q: dict(question='Which?', **lettered(q))) * 3, 'train', 'test')
    write('openbookqa', each(lambda q: dict(question_stem='It is', **lettered(q))) * 3, 'train', 'test')
    copa = dict(premise='It rained.', question='cause', idx=0)
    write('copa', each(lambda q: dict(copa, choice1=q[0], choice2=q[1], label=q[3]), TWO_CHOICES), 'validation')
    write('piqa', each(lambda q: dict(goal='Do.', sol1=q[0], sol2=q[1], label=q[3]), TWO_CHOICES), 'validation')
    hella = dict(ind=0, activity_label='Act', ctx_a='He', ctx_b='runs', ctx='He runs', split='', split_type='')
    hella |= dict(source_id='')
    write('hellaswag', each(lambda q: dict(hella, endings=[*q[:3], 'z'], label=str(q[3]))), 'validation')
    race = [[dict(question='Which?', answer=letters[q[3]], options=[*q[:3], 'z'])] for q in QUESTIONS]
    write('race_high', [dict(article='Text.', problems=str(problems)) for problems in race], 'test')
    sciq = dict(question='Which?', distractor1='aa', distractor2='b', distractor3='cc', support='S.')
    write('sciq', [dict(sciq, correct_answer=w) for w in SCIQ], 'validation')
    siqa = dict(context='C.', question='Q?')
    rows = each(lambda q: dict(siqa, answerA=q[0], answerB=q[1], answerC=q[2], label=str(q[3] + 1)))
    write('social_i_qa', rows * 3, 'validation')
    record = dict(passage='Text.\n@highlight\nOne', query='It was @placeholder .', idx=dict(passage=0, query=0))
    record |= dict(entity_spans=dict(text=[], start=[], end=[]))
    write('record', each(lambda q: dict(record, entities=list(q[:3]), answers=[q[q[3]]])), 'validation')
    right = {q[q[3]] for q in (*QUESTIONS, *TWO_CHOICES)} | {r['text'].split()[-1] for r in LAMBADA} | set(SCIQ)
    return right | {f'- It was {q[q[3]]} .' for q in QUESTIONS}


def paper(lm, folder, names=tuple(tasks.PAPER), limit=None):
    """lm-eval's results of the paper's tasks."""
    return tasks.run_tasks(lm, *tasks.load_tasks(names, str(folder), limit), limit)


def test_known_answers(tmp_path, mistral):
    """A task's text, answer, metric, shots or file is wrong: a model that knows all answers would not score 1."""
    right = small_tasks(tmp_path)

    class Known(MHFLM):
        """Scores continuations by their text."""

        def _loglikelihood_tokens(self, requests, **how):
            scores = [self.judge(mistral.decode(continuation)) for _, _, continuation in requests]
            return [(s, s == 0) for s in scores]

    scores, known = {}, Known(random_model(), mistral)
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
    asked, versions = {}, {}
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
    # the paper's lm-eval kept of such a question the blank alone
    (old, _), (new, _) = asked['race_v2', 'ours'][0], asked['race_v2', 'theirs'][0]
    assert new == 'Article: Text.\n\nHe was b\nQuestion: Who?\nAnswer: b\nWhy?'
    assert old == new.replace('He was b', ' _  .b') and versions['race_v2', 'ours'] == versions['race_v2', 'theirs'] - 1


def test_same_scores_as_lm_eval_s_own_path(tmp_path, mistral):
    """With the same Standard weights eval.py and lm-eval's Hugging Face path score otherwise."""
    import tokenizers
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    class HuggingFace(HFLM):
        """Given the same token ids: bos, then the context."""

        def tok_encode(self, string, *args, **kwargs):
            return list(mistral.encode([string])[0])

        def _loglikelihood_tokens(self, requests, *args, **kwargs):
            # windows of a text have no key, and their own prefix
            with_bos = [(key, [mistral.bos, *context] if key else context, ids) for key, context, ids in requests]
            return super()._loglikelihood_tokens(with_bos, *args, **kwargs)

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=32768, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.2,
    )).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).eval()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({'<s>': mistral.bos}, unk_token='<s>'))
    words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token='<s>', pad_token='<s>')
    small_tasks(tmp_path)
    # real text, if it is there
    data = SHARED / 'data/eval' if (SHARED / 'data/eval').is_dir() else tmp_path
    # of less than a window, of a window and a token, and of several
    texts, ids = ['a few words'], mistral.encode([real_documents()[0]])[0]
    texts += [mistral.decode(ids[:n]) for n in (512, 513, 1024, 1300)]
    scores, rolled = [], []
    for lm in (
        MHFLM(ours, mistral, mistral.bos),
        HuggingFace(pretrained=theirs, backend='causal', tokenizer=words, batch_size=16, max_length=512),
    ):
        loaded, _ = tasks.load_tasks(['piqa', 'arc_easy'], data, 10)
        results = lm_eval.evaluate(lm, dict(tasks=loaded), limit=10, log_samples=False)['results']
        scores.append({t: (r['acc,none'], r['acc_norm,none']) for t, r in results.items()})
        rolled.append(lm.loglikelihood_rolling([types.SimpleNamespace(args=(text,)) for text in texts]))
    assert scores[0] == scores[1] and len(scores[0]) == 2
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)
    # windows that overlap by half give something else
    nats, _, _ = evaluation.sliding(MHFLM(ours, mistral), [1, *mistral.encode(texts[-1:])[0]])
    assert -nats.sum().item() != pytest.approx(rolled[0][-1], rel=1e-3)


# -----------------------------------------------------------------------------
# the commands


def newest(folder):
    """What is in the newest results' file under it."""
    found = [str(p) for p in Path(folder).glob('**/results_*.json')]
    return json.loads(Path(get_latest_filename(get_results_filenames(found))).read_text())


def command(monkeypatch, **settings):
    """What eval.py writes, given these settings, in this process."""
    with monkeypatch.context() as patch:
        for key, value in settings.items():
            patch.setattr(evaluation, key, value)
            patch.setitem(evaluation.config, key, value)
        evaluation.main()
    return newest(settings['output_path'])


def of_ranks(number, script, *args, **how):
    """[(exit code, stdout, stderr)] of so many processes."""
    processes = ranks(number, script, *args, **how)
    said = [p.communicate(timeout=200) for p in processes]
    return [(p.returncode, *s) for p, s in zip(processes, said, strict=True)]


def test_eval(trained, tmp_path, monkeypatch, capsys):
    """The command's numbers depend on the number of processes, or are not those of train.py."""
    out = tmp_path / 'out, of this run'
    shutil.copytree(trained / 'out', out)
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    text, bins = tmp_path / 'text.txt', trained / 'bins'
    text.write_text(real_documents()[0][:2000])
    settings = dict(device='cpu', dtype='float32', out_dir=str(out), data_dir=str(tmp_path), text=f'{text},{bins}')
    settings |= dict(tasks='lambada_openai,hellaswag,record,bits_per_byte,card660', output_path=str(tmp_path / 'one'))
    one, said = command(monkeypatch, **settings), capsys.readouterr().out
    for words in ('|lambada_openai|', 'bits_per_byte', 'published: 100M H3B10K', '4 of 10,042 documents', '1B H3B10K'):
        assert words in said
    args = [f'--{key}={value}' for key, value in (settings | dict(output_path='many')).items()]
    done = of_ranks(2, 'eval.py', *args, cwd=tmp_path)
    assert [code for code, _, _ in done] == [0, 0] and done[1][1] == '', done
    many = newest(tmp_path / 'many')
    assert set(one['results']) == {'lambada_openai', 'hellaswag', 'record'} and one['bos'] is True
    assert one['n-samples'] == many['n-samples'] and many['card660'] == pytest.approx(one['card660'], rel=1e-4)
    for task, scores in one['results'].items():
        other = many['results'][task]
        # a batch rounds as its shapes are; the error of a perplexity is drawn in the order of the documents
        for metric in scores.keys() - {'alias', 'name', 'perplexity_stderr,none'}:
            tolerance = 1e-4 if metric == 'perplexity,none' else 1e-9
            assert other[metric] == pytest.approx(scores[metric], rel=tolerance), (task, metric)
    for path in map(str, (text, bins)):
        assert many['bits_per_byte'][path] == pytest.approx(one['bits_per_byte'][path], rel=1e-5)
    held_out, values = read_meta(bins)['splits']['val'], one['bits_per_byte'][str(bins)]
    assert values['bytes'] == held_out['bytes'] and values['tokens'] == held_out['tokens'] - 1
    # windows that overlap see more context than those of train.py's validation, which do not
    validated = [e['val_nats'] for e in events(trained) if 'val_nats' in e][-1]
    assert validated - 0.5 < values['nats_per_token'] < validated + 0.02


# the second process opens other weights
OTHER_WEIGHTS = """
import os
from mhf import released
whole = released.open_model
def open_other(*args, **how):
    opened = whole(*args, **how)
    opened.model.norm.weight.data += os.environ['RANK'] == '1'
    return opened
released.open_model = open_other
"""


def test_processes_open_the_same_weights(few, tmp_path):
    """While a run goes on, processes open different checkpoints of it, and a score is of neither."""
    args = ['--tasks=bits_per_byte', '--text=docs.jsonl', '--device=cpu', f'--output_path={tmp_path}']
    (code, said, first), (other, _, second) = of_ranks(2, 'eval.py', *args, cwd=few, patch=OTHER_WEIGHTS)
    assert (code, other, said, second) == (1, 1, '', '')
    assert first.startswith('error: process 1 has weights=') and first.count('\n') == 1


def test_bos(trained, tmp_path, monkeypatch):
    """bos is given to a released model, which lm-eval gave none, or not to one trained here; or its setting is deaf."""
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    save_pretrained(load_checkpoint(trained / 'out/ckpt.pt')[0], tmp_path / 'export', 'mistral')
    # the authors' config.json does not say how a model was trained
    shutil.copytree(tmp_path / 'export', tmp_path / 'authors')
    fields = json.loads((tmp_path / 'export/config.json').read_text())
    del fields['trained_loss']
    (tmp_path / 'authors/config.json').write_text(json.dumps(fields))
    monkeypatch.chdir(trained)
    settings = dict(data_dir=str(tmp_path), tasks='lambada_openai,card660', device='cpu', dtype='float32')
    models = dict(out=dict(out_dir='out'), run=dict(released='out'), export=dict(released=str(tmp_path / 'export')))
    models |= dict(authors=dict(released=str(tmp_path / 'authors')))
    found = {}
    for name, bos in [(name, None) for name in models] + [('authors', True), ('export', False)]:
        results = command(monkeypatch, **settings, **models[name], bos=bos, output_path=str(tmp_path / name))
        assert results['bos'] == (name != 'authors' if bos is None else bos)
        # of the hidden states of a word every model has bos, unless it is told otherwise
        assert results['card660']['bos'] == (bos is not False)
        found[name, bos] = results['results']['lambada_openai'], results['card660']['last_pearson']
    assert found['out', None] == found['run', None] == found['export', None] == found['authors', True]
    assert found['authors', None][0] == found['export', False][0] != found['export', None][0]
    assert found['authors', None][1] == found['export', None][1] != found['export', False][1]


# lm-eval's own 14,000 task files, which take 6 seconds, are not read
NO_INDEX = """
from lm_eval.tasks._index import TaskIndex
build = TaskIndex.build
TaskIndex.build = staticmethod(lambda paths, **how: build(paths[1:], **how))
"""
MINE = dict(
    sums='task: sums\noutput_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs:\n  until: ["\\n"]\nnum_fewshot: 2\n',
    ends='task: ends\noutput_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: " {{answer}}"\n'
    # log P itself
    'metric_list:\n  - metric: acc\n  - {metric: perplexity, aggregation: mean}\n',
    both='group: both\ntask:\n  - sums\n  - ends\n',
)


def tasks_of_mine(folder):
    """A folder with two tasks, a group of them and their data."""
    write_rows(folder / 'sums.jsonl', [dict(question=f'1 + {k} is', answer=str(1 + k)) for k in range(9)])
    (folder / 'mine').mkdir()
    for name, text in MINE.items():
        data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}\ntest_split: test\n'
        (folder / f'mine/{name}.yaml').write_text(text + ('' if name == 'both' else data))


def test_command_line_of_lm_eval(few, tmp_path):
    """lm-eval's own settings do not reach its evaluator, or its several processes have other scores than one."""
    tasks_of_mine(tmp_path)
    args = ['run', '--model_args', 'path=out,dtype=float32', '--tasks', 'both', '--include_path', f'{tmp_path}/mine']
    args += ['--gen_kwargs', 'max_gen_toks=4', '--log_samples', '--output_path', f'{tmp_path}/r', '--device', 'cpu']
    more = ['--use_cache', str(tmp_path / 'c')]
    done = ok('mhf.lm', *args, *more, cwd=few, patch=NO_INDEX)
    # the tasks of the group
    assert 'scoring: ' in done.stderr and '- ends' in done.stdout and '- sums' in done.stdout
    one = newest(tmp_path / 'r')
    assert one['model_source'] == 'mhf' and one['model_name'] == 'out' and one['config']['bos'] is True
    samples = [json.loads(line) for line in next(tmp_path.glob('r/out/samples_sums_*.jsonl')).read_text().splitlines()]
    assert len(samples) == 9 and all(isinstance(sample['resps'][0][0], str) for sample in samples)
    # everything is in the cache
    again = ok('mhf.lm', *args, *more, cwd=few, patch=NO_INDEX)
    assert 'scoring: ' not in again.stderr and newest(tmp_path / 'r')['results'] == one['results']
    several = of_ranks(2, 'mhf.lm', *args, cwd=few, patch=NO_INDEX)
    assert [code for code, _, _ in several] == [0, 0] and several[1][1] == '', several
    two = newest(tmp_path / 'r')
    assert two['n-samples'] == one['n-samples']
    ends, alone = two['results']['ends'], one['results']['ends']
    assert ends['acc,none'] == alone['acc,none']
    assert ends['perplexity,none'] == pytest.approx(alone['perplexity,none'], rel=1e-5)


# what the hub would give, from local files
HUB = """
import datasets
from pathlib import Path
whole = datasets.load_dataset
def from_files(path, name=None, **how):
    name = dict(super_glue=name, ai2_arc='arc_easy', siqa='social_i_qa', race='race_high', lambada='lambada_standard')\
        .get(Path(path).name, Path(path).name)
    return whole('json', data_files={{split: str(next(Path({folder!r}).glob(f'{{name}}_*.jsonl')))
                                     for split in ('train', 'validation', 'test')}})
datasets.load_dataset = from_files
# 100,000 times for a perplexity
import lm_eval.api.metrics
lm_eval.api.metrics.bootstrap_stderr = lambda *args, **how: 0.0
from lm_eval.tasks import _index
build, THEIRS = _index.TaskIndex.build, {theirs!r}
def build_few(paths, **how):
    few = dict.fromkeys(Path(paths[0]) / Path(file).parent for file in THEIRS if paths)
    return build([*few, *paths[1:]], **how)
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


def test_driven_by_lm_eval(few, monkeypatch, tmp_path):
    """lm-eval's own function does not find the model by its name, or swallows a model_args that is not known."""
    tasks_of_mine(tmp_path)
    monkeypatch.chdir(few)
    how = dict(tasks=['ends'], task_manager=TaskManager(include_path=str(tmp_path / 'mine'), include_defaults=False))
    how |= dict(device='cpu', batch_size=3, bootstrap_iters=9)
    by_text, by_dict = (
        lm_eval.simple_evaluate('mhf', model_args=model_args, **how)['results']['ends']
        for model_args in ('path=out,dtype=float32', dict(path='out', dtype='float32'))
    )
    assert by_text == by_dict and by_text['perplexity,none'] < -1
    for wrong, says in (('path=nowhere', 'nowhere'), ('pth=out', "unknown 'pth'; did you mean 'path'")):
        with pytest.raises(InputError, match=says):
            lm_eval.simple_evaluate('mhf', model_args=wrong, **how)


def test_ctrl_c_is_one_line(few):
    """Ctrl-C in a command of hours ends with a traceback."""
    patch = 'def stop(*args, **how): raise KeyboardInterrupt\n'
    for script, args, where in (
        ('eval.py', ['--tasks=bits_per_byte', '--text=docs.jsonl'], 'from mhf import lm; lm.MHFLM.by_token = stop'),
        ('mhf.lm', ['ls', 'tasks'], 'import lm_eval.tasks; lm_eval.tasks.TaskManager = stop'),
    ):
        done = run(script, *args, cwd=few, patch=patch + where)
        assert done.returncode == 130 and done.stderr.startswith('interrupted; ') and done.stderr.count('\n') == 1
