"""eval.py: scores against log_probs, lm-eval's tasks on small local files, the command itself."""

import gzip
import json
import lzma
import math
import shutil
import sys
import types
from pathlib import Path

import lm_eval
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from conftest import REPO, SHARED, events, ok, random_model, ranks, real_documents, write_jsonl
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_latest_filename, get_results_filenames, make_table

import eval as evaluation
from bins import read_meta
from checkpoint import from_pretrained, load_checkpoint, save_pretrained
from configurator import InputError
from hashing import tokenizer_fingerprint
from scorer import MHFLM, Scorer

# one process builds lm-eval's index of its tasks, which takes it 6 seconds
pytestmark = pytest.mark.xdist_group('eval')


# -----------------------------------------------------------------------------
# scoring


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_scorer_equals_log_probs(num_hashes):
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
        for batch_size, tokens in ((256, 10**6), (1, 10**6), (16, 10**6), (256, 100), (256, 1)):
            done, scorer = {}, Scorer(m, bos, batch_size, tokens)
            got = scorer(requests, done.__setitem__)
            assert done == dict(enumerate(got))
            assert [g for _, g in got] == greedy
            assert np.allclose([logp for logp, _ in got], expected, atol=1e-9)
        # where all rows have one continuation there is no mask
        assert np.allclose([logp for logp, _ in scorer(requests[3:20:4])], expected[3:20:4], atol=1e-9)
    scorer, sizes = Scorer(m, None, 256, 10**6), []
    score = scorer.score

    def in_small_memory(batch):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return score(batch)

    scorer.score = in_small_memory
    assert np.allclose([logp for logp, _ in scorer(requests)], expected, atol=1e-9)
    # continuations of a context are one row
    assert 2 < sizes[0] < len(requests)
    likeliest = m.log_probs(torch.tensor([[1, *contexts[1]]]))[0, -1].argmax().item()
    assert Scorer(m, 1, 256)([(contexts[1], [likeliest])])[0][1] is True
    for continuation, message in (([], 'empty continuation'), ([7] * 25, '25 tokens')):
        with pytest.raises(InputError, match=message):
            Scorer(m, 1, 256)([([5], continuation)])


def test_sliding_windows():
    """A token is scored twice or not at all, or with less context than half of what the model has."""
    m = random_model()  # a context of 24
    for n in (1, 23, 24, 25, 36, 37, 100):
        ids = np.random.default_rng(n).integers(3, 300, n).tolist()
        nats, right, confidence = evaluation.sliding(Scorer(m, 1, 256), 1, ids)
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
    ids, size = evaluation.prepared_split(trained / 'bins', mistral)
    documents = np.split(ids, np.flatnonzero(np.array(ids) == mistral.bos))[1:]
    texts = [mistral.decode(document[1:].tolist()) for document in documents]
    assert texts and set(texts) <= set(real_documents()) and size == sum(len(t.encode()) for t in texts)
    other = types.SimpleNamespace(name='other', tokens=mistral.tokens[:-1])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(mistral)
    with pytest.raises(InputError, match="tokenizer 'mistral', the model's is 'other'"):
        evaluation.prepared_split(trained / 'bins', other)
    with pytest.raises(InputError, match='not a folder of prepare.py'):
        evaluation.prepared_split(tmp_path, mistral)


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
    ok('prepare.py', '--dataset=both.jsonl', '--val_fraction=0.5', '--data_dir=d', '--num_workers=1', cwd=folder)
    return [*(f't.jsonl{suffix}' for suffix in packed), 't.parquet']


def test_text_by_documents(tmp_path, mistral):
    """A file's markup is measured, its documents are run together, or it has other numbers than in training."""
    scorer = Scorer(random_model(vocab_size=32768, num_buckets=300), None, 256)
    files = text_files(tmp_path)
    folder = evaluation.bits_per_byte(scorer, mistral, str(tmp_path / 'd'))
    texts = [text.strip() for text in TEXTS if text.strip()]
    ids = [i for document in mistral.encode(texts) for i in (mistral.bos, *document)]
    assert folder['tokens'] == len(ids) - 1 and folder['bytes'] == sum(len(text.encode()) for text in texts)
    nats, _, _ = evaluation.sliding(scorer, ids[0], ids[1:])
    assert folder['bits_per_byte'] == pytest.approx(nats.sum().item() / math.log(2) / folder['bytes'])
    for name in files:
        assert evaluation.bits_per_byte(scorer, mistral, str(tmp_path / name)) == folder, name
    # a .txt is one document
    (tmp_path / 't.txt').write_text('\n' + '\n\n'.join(texts) + '\n', encoding='utf-8', newline='')
    assert evaluation.text_file(tmp_path / 't.txt', mistral)[0].count(mistral.bos) == 1


# -----------------------------------------------------------------------------
# lm-eval


def test_harness_text_and_generation(mistral):
    """lm-eval's perplexity and generation tasks get something else than the model's likelihood and its greedy text."""
    m = random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32)
    scorer = Scorer(m, 1, 256, tok=mistral)
    lm = MHFLM(scorer)

    def request(*args):
        return types.SimpleNamespace(args=args)

    ids = mistral.encode(['a few words'])[0]
    by_hand = m.log_probs(torch.tensor([[1, *ids[:-1]]]))[0].gather(1, torch.tensor(ids)[:, None]).sum().item()
    assert lm.loglikelihood_rolling([request('a few words')]) == pytest.approx([by_hand], rel=1e-4)
    greedy = m.generate(torch.tensor([[1, *ids]]), 6, temperature=0)[0, 1 + len(ids) :].tolist()
    said = mistral.decode(greedy[: greedy.index(1)] if 1 in greedy else greedy)
    assert lm.generate_until([request('a few words', dict(until=[], max_gen_toks=6))]) == [said]
    # eos, whose role pad has, ends a text as bos does
    ending = types.SimpleNamespace(
        tokens=mistral.tokens, bos=1, pad=greedy[2], encode=mistral.encode, decode=mistral.decode
    )
    ended = MHFLM(Scorer(m, 1, 256, tok=ending)).generate_until(
        [request('a few words', dict(until=[], max_gen_toks=6))]
    )
    assert ended == [mistral.decode(greedy[: greedy.index(greedy[2])])]
    stop = said[len(said) // 2]
    assert lm.generate_until([request('a few words', dict(until=stop, max_gen_toks=6))]) == [said.split(stop)[0]]
    # a batch of prompts of different lengths, in any order, says what each says alone
    texts = ('a', 'a few words', '', 'few')
    prompts = [request(text, dict(until=stop, max_gen_toks=n)) for n in (6, 3) for text in texts]
    assert lm.generate_until(prompts) == [lm.generate_until([p])[0] for p in prompts]
    sampling = dict(until=[], max_gen_toks=6, do_sample=True, temperature=2.0)
    drawn = [lm.generate_until([request('a', sampling)] * 3) for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    assert len(set(lm.generate_until([request('a', dict(sampling, top_k=1))] * 3))) == 1
    with pytest.raises(InputError, match='num_beams'):
        lm.generate_until([request('a', dict(until=[], num_beams=4))])
    # all of it in the precision that was asked for
    low, passes, hidden_states = MHFLM(Scorer(m, 1, 256, dtype='bfloat16', tok=mistral)), [], m.hidden_states
    m.hidden_states = lambda *a, **k: passes.append(torch.is_autocast_enabled('cpu')) or hidden_states(*a, **k)
    low.generate_until([request('a', dict(until=[], max_gen_toks=2))])
    low.loglikelihood_rolling([request('a b c')])
    assert len(passes) == 3 and all(passes)
    # interrupted at the second batch: the first one's result is kept
    kept, score = [], scorer.score
    lm.set_cache_hook(types.SimpleNamespace(add_partial=lambda kind, request, result: kept.append(request)))
    scorer.batch_size = 1
    scorer.score = lambda batch: score(batch) if not kept else 1 / 0
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


def test_known_answers(tmp_path, mistral):
    """A task's text, answer, metric, shots or file is wrong: a model that knows all answers would not score 1."""
    right = small_tasks(tmp_path)

    class Known:
        """Scores continuations by their text."""

        model, tok = random_model(), mistral

        def __call__(self, requests, done):
            scores = [self.judge(mistral.decode(continuation)) for _, continuation in requests]
            return [(s, s == 0) for s in scores]

    scores, known = {}, Known()
    for name, judge in (('oracle', lambda s: 0.0 if s.strip() in right else -99.0), ('constant', lambda s: -1.0)):
        known.judge, lm = judge, MHFLM(known)
        got, notes = evaluation.run_tasks(['paper'], lm, data_dir=tmp_path)
        scores[name] = [r[evaluation.main_score(task, r)] for task, r in got['results'].items()]
    assert scores['oracle'] == [1.0] * 11
    # the constant model takes the first choice, or where scores are divided by length, the longest
    assert scores['constant'] == [0, 0, 1, 0.5, 1, 0.5, 1, 0.5, 0.5, 1, 0.25]
    assert got['n-shot'] == {task: paper['shots'] for task, paper in evaluation.PAPER.items()}
    assert got['versions']['race_v2'] == 2
    notes = evaluation.unlike(got, notes)
    assert notes['sciq'] == ['validation split for test', '4 of 1,000 documents']
    assert notes['social_iqa'] == ['shots from validation, not train', '12 of 1,954 documents']
    # lm-eval's own tasks are as they were
    again, notes = evaluation.run_tasks(['arc_easy'], lm, data_dir=tmp_path)
    assert again['n-shot'] == dict(arc_easy=0)
    assert evaluation.unlike(again, notes) == dict(arc_easy=['12 of 2,376 documents', '0 shots, 5 in the paper'])


def test_mubench_files(tmp_path, mistral):
    """A task file of MuBench does not read its schema, or names another language's data."""
    rows = [dict(prompt='The sky is', choices=[' blue', ' a wall', ' to'], label=k) for k in (0, 1, 2, 1)]
    tasks = ['mubench_hellaswag_ar', 'mubench_mmlu_hi']
    for task in tasks:
        write_rows(tmp_path / f'{task}_test.jsonl', rows)
    lm = MHFLM(Scorer(random_model(vocab_size=32768, num_buckets=300), 1, 256, tok=mistral))
    got, notes = evaluation.run_tasks(tasks, lm, data_dir=tmp_path)
    metrics = [[k for k in got['results'][t] if k.endswith(',none') and '_stderr' not in k] for t in tasks]
    assert metrics == [['acc,none', 'acc_norm,none'], ['acc,none']]
    assert evaluation.unlike(got, notes) == {t: ['a local file of 4 documents'] for t in tasks}
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
    lm, asked, versions = MHFLM(types.SimpleNamespace(tok=mistral, model=random_model())), {}, {}
    tasks = Path(lm_eval.__file__).parent / 'tasks'
    for ours, theirs in dict(record='super_glue/record/default', social_iqa='siqa/siqa', race_v2='race/race').items():
        for who, file in dict(ours=REPO / f'eval_tasks/{ours}.yaml', theirs=tasks / f'{theirs}.yaml').items():
            task = load_yaml(file)
            versions[ours, who] = task['metadata']['version']
            task |= evaluation.local_data(ours, task, tmp_path)[0] | dict(num_fewshot=0)

            def ask(requests, key=(ours, who)):
                asked[key] = [r.args for r in requests]
                raise InterruptedError

            lm.loglikelihood = ask
            with pytest.raises(InterruptedError):
                lm_eval.simple_evaluate(lm, tasks=[task], task_manager=evaluation.task_manager())
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
        MHFLM(Scorer(ours, mistral.bos, 256, tok=mistral)),
        HuggingFace(pretrained=theirs, backend='causal', tokenizer=words, batch_size=16, max_length=512),
    ):
        raw, _ = evaluation.run_tasks(['piqa', 'arc_easy'], lm, data_dir=data, limit=10)
        scores.append({t: (r['acc,none'], r['acc_norm,none']) for t, r in raw['results'].items()})
        rolled.append(lm.loglikelihood_rolling([types.SimpleNamespace(args=(text,)) for text in texts]))
    assert scores[0] == scores[1] and len(scores[0]) == 2
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)
    # windows that overlap by half give something else
    nats, _, _ = evaluation.sliding(Scorer(ours, 1, 256), 1, mistral.encode(texts[-1:])[0])
    assert -nats.sum().item() != pytest.approx(rolled[0][-1], rel=1e-3)


# -----------------------------------------------------------------------------
# several processes

# what each of the processes runs; rank 0 prints what comes of it
WORK = """
import json, os, types
import torch.distributed as dist
import eval as evaluation
import scorer as scoring
from checkpoint import open_model

rank, world_size = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE'))
if world_size > 1:
    dist.init_process_group('gloo')
# of memory as little as the last rank has
scoring.tokens_in_memory = lambda model: 400 if rank == world_size - 1 else 9999
opened, found = open_model('out'), {}
texts = ['def main(): return 1', '', 'import os, sys', 'class A: pass # ' * 40, 'x = [y for y in range(10)]']
requests = [types.SimpleNamespace(args=(text,)) for text in texts]
pairs = [types.SimpleNamespace(args=(a, b)) for a in texts[2:] for b in (' None', ' import re', ' = 4 +')]
prompts = [types.SimpleNamespace(args=(text, dict(until=['x'], max_gen_toks=8))) for text in texts]
for dtype in ('float32', 'bfloat16'):
    scorer = scoring.Scorer(opened.model.eval(), opened.tok.bos, 3, dtype=dtype, tok=opened.tok)
    while rank > 0 and scorer.take_part():
        pass
    if rank == 0:
        lm = scoring.MHFLM(scorer)
        lines = [lm.loglikelihood(pairs), lm.loglikelihood_rolling(requests), lm.generate_until(prompts)]
        lines += [[p.tolist() for p in evaluation.sliding(scorer, 1, lm.tok_encode(texts[k]))] for k in (0, 3)]
        found[dtype] = [scorer.tokens, *lines]
        scorer.take_part([None] * world_size)
if rank == 0:
    print(json.dumps(found))
"""
# a patch of model.py: the second process has no room for two sequences at a time, or none at all
SMALL = """
import os, torch
from model import MHF
whole = MHF.hidden_states
def in_small_memory(self, x, *args, **more):
    if os.environ['RANK'] == '1' and len(x) > {room}:
        print('no room for', len(x), flush=True)
        raise {error}
    return whole(self, x, *args, **more)
MHF.hidden_states = in_small_memory
"""


# the second process opens other weights
OTHER_WEIGHTS = """
import os, checkpoint
whole = checkpoint.open_model
def open_other(*args):
    opened = whole(*args)
    opened.model.norm.weight.data += os.environ['RANK'] == '1'
    return opened
checkpoint.open_model = open_other
"""


def of_ranks(number, script, *args, **how):
    """[(exit code, stdout, stderr)] of so many processes."""
    processes = ranks(number, script, *args, **how)
    said = [p.communicate(timeout=200) for p in processes]
    return [(p.returncode, *s) for p, s in zip(processes, said, strict=True)]


def test_processes_share_the_work(few, tmp_path):
    """Scores, bits per byte or greedy texts depend on the number of processes, or on which has how much memory."""
    script, small = tmp_path / 'work.py', SMALL.format(room=1, error='torch.OutOfMemoryError')
    script.write_text(f'import sys\nsys.path.insert(0, {str(REPO)!r})\n{WORK}')
    found = []
    for number, patch in ((1, ''), (2, ''), (2, small), (3, '')):
        done = of_ranks(number, str(script), cwd=few, patch=patch)
        assert [code for code, _, _ in done] == [0] * number, done
        assert ('no room for 3' in done[-1][1]) == bool(patch)
        found.append(json.loads(done[0][1]))
    one, two, halved, three = found
    assert one == two == three
    for dtype in one:
        tokens, pairs, texts, written, (short, _, _), (nats, _, _) = one[dtype]
        assert tokens == halved[dtype][0] == 400 and len(pairs) == 9
        close = dict(rel=1e-6 if dtype == 'float32' else 0.02)
        # in one window; in many that overlap or do not
        assert texts[1] == 0 and texts[0] == pytest.approx(-sum(short), **close) and texts[3] != -sum(nats)
        assert len(set(texts)) == 5 and any(written)
        assert [p for p, _ in halved[dtype][1]] == pytest.approx([p for p, _ in pairs], **close)
        assert halved[dtype][2] == pytest.approx(texts, **close) and halved[dtype][5][0] == pytest.approx(nats, **close)
        assert halved[dtype][3] == written


def test_a_process_that_fails(few, tmp_path):
    """What fails on one process leaves the others waiting for days, is not said, or is taken for the data's fault."""
    (tmp_path / 'text.txt').write_text(real_documents()[0][:2000])
    broken, crowded = (SMALL.format(room=0, error=e) for e in ("KeyError('broken card')", 'torch.OutOfMemoryError'))
    write_rows(tmp_path / 'lambada_openai_test.jsonl', [dict(text=f'{word} and so on') for word in ('one', 'two')])
    settings = ['--device=cpu', '--dtype=float32', '--out_dir=out', f'--output_path={tmp_path}', '--batch_size=1']
    text = ['--tasks=bits_per_byte', f'--text={tmp_path / "text.txt"}']
    for args, patch, says in (
        (text, broken, "KeyError: 'broken card'"),
        (['--tasks=lambada_openai', f'--data_dir={tmp_path}'], crowded, 'error: a single sequence does not fit cpu'),
        # rank 0 alone reads the text
        (['--tasks=bits_per_byte', '--text=out'], '', 'error: --text=out: not a folder of prepare.py'),
        (text, OTHER_WEIGHTS, 'different weights'),
    ):
        (code, _, first), (other, _, second) = of_ranks(2, 'eval.py', *settings, *args, cwd=few, patch=patch)
        assert (code, other, second) == (1, int(patch == OTHER_WEIGHTS), '') and says in first
        if patch == OTHER_WEIGHTS:
            assert first.startswith('error: out/ckpt.pt, step')
        elif says.startswith('error'):
            assert first.strip().splitlines()[-1] == says
        else:
            assert 'rank 1' in first and 'in_small_memory' in first


# -----------------------------------------------------------------------------
# the command


def newest(folder):
    """What is in the newest results' file under it."""
    found = [str(p) for p in Path(folder).glob('**/results_*.json')]
    return json.loads(Path(get_latest_filename(get_results_filenames(found))).read_text())


def command(monkeypatch, **settings):
    """What eval.py writes, given these settings, in this process, which has lm-eval's index already."""
    with monkeypatch.context() as patch:
        for key, value in settings.items():
            patch.setattr(evaluation, key, value)
            patch.setitem(evaluation.config, key, value)
        evaluation.main()
    return newest(settings['output_path'])


def test_eval(trained, tmp_path, monkeypatch, capsys):
    """The command's numbers depend on the batch or the number of processes; or are not those of train.py."""
    out = tmp_path / 'out, of this run'
    shutil.copytree(trained / 'out', out)
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    text, bins = tmp_path / 'text.txt', trained / 'bins'
    text.write_text(real_documents()[0][:2000])
    settings = dict(device='cpu', dtype='float32', out_dir=str(out), data_dir=str(tmp_path), text=f'{text},{bins}')
    settings |= dict(tasks='arc_easy,record,bits_per_byte,card660', output_path=str(tmp_path / 'results'))

    one, shown = command(monkeypatch, **settings, batch_size=1), capsys.readouterr()
    for said in ('|arc_easy|', 'bits_per_byte', 'published: 100M H3B10K', '12 of 2,376 documents', '1B H3B10K'):
        assert said in shown.out
    assert 'scoring: ' in shown.err
    again = command(monkeypatch, **settings, batch_size=256)
    args = [f'--{key}={value}' for key, value in (settings | dict(output_path='many')).items()]
    ok('eval.py', *args, '--batch_size=16', cwd=tmp_path, torchrun=['--nproc_per_node=2'])
    many = newest(tmp_path / 'many')
    assert set(one['results']) == {'arc_easy', 'record'} and one['n-samples']['arc_easy']['effective'] == 12
    assert one['n-shot'] == dict(arc_easy=0, record=0) and one['bos']
    for other in (many, again):
        assert other['card660'] == pytest.approx(one['card660'], rel=1e-4)
        for path in map(str, (text, bins)):
            assert other['bits_per_byte'][path] == pytest.approx(one['bits_per_byte'][path], rel=1e-5)
        assert {t: r for t, r in other['results'].items()} == {t: r for t, r in one['results'].items()}
    held_out, values = read_meta(bins)['splits']['val'], one['bits_per_byte'][str(bins)]
    assert values['bytes'] == held_out['bytes'] and values['tokens'] == held_out['tokens'] - 1
    # windows that overlap see more context than those of train.py's validation, which do not
    validated = [e['val_nats'] for e in events(trained) if 'val_nats' in e][-1]
    assert validated - 0.5 < values['nats_per_token'] < validated + 0.02


GROUP = 'group: of_mine\ntask:\n  - gsm8k\n  - group: inner\n    task: [nq_open]\n'
GROUP += 'aggregate_metric_list:\n  - metric: exact_match\n    filter_list: [strict-match, remove_whitespace]\n'


def test_nothing_disappears(few, tmp_path, monkeypatch, capfd, caplog):
    """A filter's score, a group, a version, a sample is lost; lm-eval's own tools cannot read what was written."""
    write_rows(tmp_path / 'gsm8k_test.jsonl', [dict(question=f'1 + {k}?', answer=f'#### {1 + k}') for k in range(4)])
    write_rows(tmp_path / 'gsm8k_train.jsonl', [dict(question=f'2 + {k}?', answer=f'#### {2 + k}') for k in range(9)])
    write_rows(tmp_path / 'nq_open_validation.jsonl', [dict(question='who', answer=['me', 'I'])] * 3)
    write_rows(tmp_path / 'nq_open_train.jsonl', [dict(question='what', answer=['it'])] * 3)
    rows = [dict(prompt='The sky is', choices=[' blue', ' a wall'], label=k) for k in (0, 1, 1)]
    write_rows(tmp_path / 'mubench_mmlu_ar_test.jsonl', rows)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/group.yaml').write_text(GROUP)
    monkeypatch.chdir(few)
    settings = dict(out_dir='out', tasks='of_mine,mubench_mmlu_ar', data_dir=str(tmp_path), device='cpu', limit=0.5)
    settings |= dict(include_path=str(tmp_path / 'mine'), gen_kwargs='max_gen_toks=4', write_out=True)
    found, done = command(monkeypatch, **settings, output_path=str(tmp_path / 'r')), capfd.readouterr()
    for said in ('strict-match', 'flexible-extract', 'remove_whitespace', '|of_mine', 'a local file of 4 documents'):
        assert said in done.out, said
    # the prompt of --write_out
    assert 'Question: 2 + ' in caplog.text
    shown = make_table(found)
    assert shown in done.out and shown.count('exact_match') == 5
    filters = {'exact_match,strict-match', 'exact_match,flexible-extract'}
    assert filters < set(found['results']['gsm8k']) and set(found['groups']) == {'of_mine'}
    assert (found['versions']['gsm8k'], found['n-samples']['gsm8k']['effective']) == (3.0, 2)
    assert found['configs']['gsm8k']['generation_kwargs']['max_gen_toks'] == 4
    assert found['model_name'] == 'out'


def test_driven_by_lm_eval(few, tmp_path, monkeypatch):
    """lm-eval's own function, given the model's name, gets other scores than the command."""
    small_tasks(tmp_path)
    monkeypatch.chdir(few)
    settings = dict(out_dir='out', tasks='piqa', data_dir=str(tmp_path), device='cpu', dtype='float32')
    ours = command(monkeypatch, **settings, output_path=str(tmp_path / 'r'))
    data = dict(data_files=dict(validation=str(tmp_path / 'piqa_validation.jsonl')))
    task = load_yaml(evaluation.task_manager().task_index['piqa'].yaml_path)
    task |= dict(task='piqa', dataset_path='json', dataset_kwargs=data, training_split=None)
    how = dict(model_args=dict(out_dir='out', dtype='float32'), device='cpu', batch_size=3, bootstrap_iters=9)
    theirs = lm_eval.simple_evaluate('mhf', tasks=[task], task_manager=evaluation.task_manager(), **how)
    assert theirs['results']['piqa']['acc,none'] == ours['results']['piqa']['acc,none']
    with pytest.raises(InputError, match='nowhere'):
        lm_eval.simple_evaluate('mhf', model_args='out_dir=nowhere', tasks=[task], device='cpu')


def test_bos(trained, tmp_path, monkeypatch):
    """bos is given to a released model, which lm-eval gave none, or not to one trained here; or its setting is deaf."""
    small_tasks(tmp_path)
    save_pretrained(load_checkpoint(trained / 'out/ckpt.pt')[0], tmp_path / 'model', 'mistral')
    monkeypatch.chdir(trained)
    found, settings = {}, dict(data_dir=str(tmp_path), tasks='lambada_openai', device='cpu', dtype='float32')
    for name, model in dict(own=dict(out_dir='out'), released=dict(released=str(tmp_path / 'model'))).items():
        for bos in (None, True, False):
            results = command(monkeypatch, **settings, **model, bos=bos, output_path=str(tmp_path / name))
            found[name, bos] = results['results']['lambada_openai']['perplexity,none']
    assert found['own', None] == found['own', True] == found['released', True]
    assert found['released', None] == found['released', False] == found['own', False] != found['own', True]
