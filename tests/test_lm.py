"""mhf/lm.py: scores against log_probs, texts against generate, lm-eval's own path and its command line."""

import json
import logging
import types

import lm_eval
import numpy as np
import pytest
import torch
from conftest import (
    SHARED,
    model_of_lm_eval,
    newest,
    of_ranks,
    ok,
    random_model,
    real_documents,
    small_tasks,
    write_rows,
)
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import eval as evaluation
from configurator import InputError
from mhf import tasks
from mhf.generate import Writer
from mhf.lm import MHFLM, text_after
from mhf.released import from_pretrained
from mhf.tokenizers import JsonTokenizer

# with test_eval.py, whose small runs they share
pytestmark = pytest.mark.xdist_group('eval')


# -----------------------------------------------------------------------------
# scores and texts


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
        expected = []
        greedy = []
        for context, continuation in requests:
            ids = torch.tensor((([bos] if bos else []) + context + continuation)[-(m.config.block_size + 1) :])
            logp = m.log_probs(ids[None, :-1])[0, -len(continuation) :]
            targets = ids[-len(continuation) :]
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
    m = random_model()
    draw = np.random.default_rng(0)
    requests = [(draw.integers(3, 300, n).tolist(), [5, 7]) for n in (1, 4, 9, 3, 8)]
    expected = scored(model_of_lm_eval(m), requests)
    sizes = []
    hidden_states = m.hidden_states
    room = 2

    def in_small_memory(x, **others):
        sizes.append(len(x))
        if len(x) > room:
            raise torch.OutOfMemoryError
        return hidden_states(x, **others)

    monkeypatch.setattr(m, 'hidden_states', in_small_memory)
    assert np.allclose([logp for logp, _ in scored(model_of_lm_eval(m), requests)], [logp for logp, _ in expected])
    assert sizes[0] == 5 and min(sizes) <= 2
    room = 0
    with pytest.raises(InputError, match='a single sequence does not fit cpu'):
        scored(model_of_lm_eval(m), requests)


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
    # eos ends a text as bos does; pad may serve as eos
    ending = types.SimpleNamespace(name='ending', bos=1, pad=greedy[2], encode=mistral.encode, decode=mistral.decode)
    ended = MHFLM(m, ending, 1).generate_until([request('a few words', dict(until=[], max_gen_toks=6))])
    assert ended == [text_after(mistral, ids, greedy[: greedy.index(greedy[2])])]
    stop = said[len(said) // 2]
    assert lm.generate_until([request('a few words', dict(until=stop, max_gen_toks=6))]) == [said.split(stop)[0]]
    # a batch of prompts of different lengths, in any order, says what each says alone
    texts = ('a', 'a few words', '', 'few')
    prompts = [request(text, dict(until=stop, max_gen_toks=n)) for n in (6, 3) for text in texts]
    assert lm.generate_until(prompts) == [lm.generate_until([p])[0] for p in prompts]
    sampling = dict(until=[], max_gen_toks=6, do_sample=True, temperature=2.0)
    drawn = []
    for _ in range(2):
        # as lm-eval does
        torch.manual_seed(0)
        drawn.append(lm.generate_until([request('a', sampling)] * 3))
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3
    assert len(set(lm.generate_until([request('a', dict(sampling, top_k=1))] * 3))) == 1
    with pytest.raises(InputError, match='num_beams'):
        lm.generate_until([request('a', dict(until=[], num_beams=4))])
    # all of it in the precision that was asked for
    low = MHFLM(m, mistral, 1, 'bfloat16')
    passes = []
    hidden_states = m.hidden_states
    m.hidden_states = lambda *a, **k: passes.append(torch.is_autocast_enabled('cpu')) or hidden_states(*a, **k)
    low.generate_until([request('a', dict(until=[], max_gen_toks=2))])
    low.loglikelihood_rolling([request('a b c')])
    assert len(passes) == 3 and all(passes)


def test_a_prompt_that_does_not_fit(mistral, caplog):
    """A long context is cut and nobody hears of it, or a text is written from the last token of its prompt alone."""
    # load_tasks, in a test before this one, lets lm-eval say errors only
    caplog.set_level(logging.WARNING, logger='lm_eval')
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

    def stream(self, ids, max_new_tokens, **others):
        return (torch.tensor([token] * len(ids)) for token in made)

    monkeypatch.setattr(Writer, 'stream', stream)
    lm = MHFLM(m, mistral, 1)
    assert lm.generate_until([request('import', dict(until=['return'], max_gen_toks=9))]) == [' os\n        ']


def test_what_is_known_is_kept(mistral):
    """lm-eval's --use_cache has nothing of an evaluation that was interrupted."""
    lm = MHFLM(random_model(vocab_size=32768, num_buckets=300), mistral, 1, tokens=1)
    kept = []
    score = lm.score
    lm.set_cache_hook(types.SimpleNamespace(add_partial=lambda task_type, request, result: kept.append(request)))
    lm.score = lambda batch: score(batch) if not kept else 1 / 0
    with pytest.raises(ZeroDivisionError):
        lm.loglikelihood([request('a longer context', ' here'), request('one', ' two')])
    assert kept == [('a longer context', ' here')]


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
    # texts of less than a window, of a window, of a window and a token, and of several
    ids = mistral.encode([real_documents()[0]])[0]
    texts = ['a few words', *(mistral.decode(ids[:n]) for n in (512, 513, 1024, 1300))]
    scores = []
    rolled = []
    for lm in (
        MHFLM(ours, mistral, mistral.bos),
        HuggingFace(pretrained=theirs, backend='causal', tokenizer=words, batch_size=16, max_length=512),
    ):
        loaded, _ = tasks.load_tasks(['piqa', 'arc_easy'], data)
        results = lm_eval.evaluate(lm, dict(tasks=loaded), limit=10, log_samples=False)['results']
        scores.append({t: (r['acc,none'], r['acc_norm,none']) for t, r in results.items()})
        rolled.append(lm.loglikelihood_rolling([types.SimpleNamespace(args=(text,)) for text in texts]))
    assert scores[0] == scores[1] and len(scores[0]) == 2
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)
    # windows that overlap by half give something else
    nats, _, _ = evaluation.sliding(MHFLM(ours, mistral), [1, *mistral.encode(texts[-1:])[0]])
    assert -nats.sum().item() != pytest.approx(rolled[0][-1], rel=1e-3)


# -----------------------------------------------------------------------------
# lm-eval's command line, and its own function

# lm-eval does not read its own 14,000 task files, which takes 6 seconds
NO_INDEX = """
from lm_eval.tasks._index import TaskIndex
build = TaskIndex.build
TaskIndex.build = staticmethod(lambda paths, **others: build(paths[1:], **others))
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
    ends = two['results']['ends']
    alone = one['results']['ends']
    assert ends['acc,none'] == alone['acc,none']
    assert ends['perplexity,none'] == pytest.approx(alone['perplexity,none'], rel=1e-5)


def test_driven_by_lm_eval(few, monkeypatch, tmp_path):
    """lm-eval's own function does not find the model by its name, or swallows a model_args that is not known."""
    tasks_of_mine(tmp_path)
    monkeypatch.chdir(few)
    manager = TaskManager(include_path=str(tmp_path / 'mine'), include_defaults=False)
    options = dict(tasks=['ends'], task_manager=manager, device='cpu', batch_size=3, bootstrap_iters=9)
    by_text, by_dict = (
        lm_eval.simple_evaluate('mhf', model_args=model_args, **options)['results']['ends']
        for model_args in ('path=out,dtype=float32', dict(path='out', dtype='float32'))
    )
    assert by_text == by_dict and by_text['perplexity,none'] < -1
    for wrong, says in (('path=nowhere', 'nowhere'), ('pth=out', "unknown 'pth'; did you mean 'path'")):
        with pytest.raises(InputError, match=says):
            lm_eval.simple_evaluate('mhf', model_args=wrong, **options)
