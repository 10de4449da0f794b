"""mhf/lm.py: scores against log_probs, generation against MHF.generate, and lm-eval's own models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import real_documents
from lm_eval.api.instance import Instance

from mhf.errors import InputError
from mhf.lm import MHFLM
from mhf.released import save_pretrained
from mhf.tokenizers import get_tokenizer
from test_mhf import random_model


@pytest.fixture
def lm(mistral):
    """A random model with Mistral's vocabulary, a context of 24 tokens and bos."""
    return MHFLM(random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32), mistral, 1)


def score(model, requests, bos=1, **options):
    """[(context ids, continuation ids)] -> [(log P, is it greedy)]."""
    # the tokenizer does not matter
    lm = MHFLM(model, SimpleNamespace(name='none', bos=1), bos, **options)
    return lm._loglikelihood_tokens([(('', 'text'), *request) for request in requests])


def instance(*args):
    """A request of lm-eval."""
    return Instance('', {}, args, 0)


# -----------------------------------------------------------------------------
# scores


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_scores_equal_log_probs(num_hashes):
    """A score is the sum of log_probs, with and without bos, for any other requests in its batch."""
    m = random_model(num_hashes=num_hashes)
    draw = np.random.default_rng(0)
    contexts = [draw.integers(3, 300, n).tolist() for n in (1, 5, 5, 20, 60)]
    requests = [(c, draw.integers(3, 300, n).tolist()) for c in contexts for n in (1, 1, 4, 24)]
    # a duplicate, and a continuation of another context
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
        for max_tokens in (10**6, 100, 1):
            scores = score(m, requests, bos, max_tokens=max_tokens)
            assert [is_greedy for _, is_greedy in scores] == greedy
            assert np.allclose([logp for logp, _ in scores], expected, atol=1e-9)
        # with one continuation per row there is no mask
        scores = score(m, requests[3:20:4], bos)
        assert np.allclose([logp for logp, _ in scores], expected[3:20:4], atol=1e-9)
    likeliest = m.log_probs(torch.tensor([[1, *contexts[1]]]))[0, -1].argmax().item()
    assert score(m, [(contexts[1], [likeliest])])[0][1] is True
    for context, continuation in (([5], []), ([5], [7] * 25), ([], [7])):
        with pytest.raises(InputError, match=f"'text': {len(continuation)} tokens after a context of {len(context)}"):
            score(m, [([5], [7]), (context, continuation)], bos=None)


def test_batches_are_bounded():
    """The memory of a batch does not depend on how many continuations share a context."""
    m = random_model()
    shapes = []
    m.layers[0].register_forward_pre_hook(lambda block, inputs: shapes.append(inputs[0].shape[:2]))
    draw = np.random.default_rng(0)
    requests = [([1], draw.integers(3, 300, 6).tolist()) for _ in range(300)]
    shared = score(m, requests, max_tokens=1000)
    assert shapes and all(N * T <= 1000 for N, T in shapes)
    assert np.allclose(shared, [score(m, [request])[0] for request in requests], atol=1e-9)


def test_same_scores_as_lm_eval_s_model(tmp_path, mistral):
    """A Standard model has the scores of its export in lm-eval's Hugging Face model."""
    from lm_eval.models.huggingface import HFLM

    model = random_model(num_hashes=0, vocab_size=32768, block_size=128, dtype=torch.float32)
    save_pretrained(model, tmp_path / 'export', 'mistral', add_bos=True)
    reference = HFLM(pretrained=str(tmp_path / 'export'), add_bos_token=True, batch_size=16, device='cpu')
    both = MHFLM(model, mistral, mistral.bos), reference
    # less than a window, a window and a token, and several windows
    ids = mistral.encode([real_documents()[0]])[0]
    texts = ['a few words', *(mistral.decode(ids[:n]) for n in (129, 300))]
    # contexts that are empty, end with spaces, or are too long; a choice that changes the context's tokens
    pairs = [('', 'A cat sleeps.'), ('two ', 'words'), ('some', 'thing else'), (texts[-1], ' a')]
    single = [[logp for logp, _ in lm.loglikelihood([instance(*pair) for pair in pairs])] for lm in both]
    assert single[0] == pytest.approx(single[1], rel=1e-5)
    # the first window of a text has a bos of its own
    reference.add_bos_token = False
    rolling = [lm.loglikelihood_rolling([instance(text) for text in texts]) for lm in both]
    assert rolling[0] == pytest.approx(rolling[1], rel=1e-5)


# -----------------------------------------------------------------------------
# generation


def test_generation(mistral, lm):
    """Generated text is that of MHF.generate, up to an id that ends a document."""
    ids = mistral.encode(['a few words'])[0]
    greedy = lm.model.generate(torch.tensor([[1, *ids]]), 6, temperature=0)[0, 1 + len(ids) :].tolist()
    request = instance('a few words', dict(until=[], max_gen_toks=6))
    for stop in (mistral.bos, greedy[2]):
        lm.stop_ids = {stop}
        (text,) = lm.generate_until([request])
        kept = greedy[: greedy.index(stop)] if stop in greedy else greedy
        assert 'a few words' + text == mistral.decode(ids + kept)
    lm.stop_ids = {mistral.bos}
    # bos is the prompt of a model without bos if there is no other
    empty = instance('', dict(until=[], max_gen_toks=6))
    assert MHFLM(lm.model, mistral).generate_until([empty]) == lm.generate_until([empty])


def test_sampling(lm):
    """Sampled texts differ, and use temperature 1 unless one is given."""

    def sample(**options):
        torch.manual_seed(0)
        return lm.generate_until([instance('a', dict(until=[], max_gen_toks=6, do_sample=True) | options)] * 3)

    assert sample() == sample(temperature=1.0) and len(set(sample())) == 3
    assert len(set(sample(top_k=1, top_p=0.9))) == 1


@pytest.fixture(params=['mistral', 'tekken'], scope='module')
def tok(request):
    """A tokenizer that encodes rare characters in bytes."""
    return get_tokenizer(request.param)


@pytest.fixture
def write(tok, monkeypatch):
    """Returns a function that returns the text of given ids as if a model had generated them, and how many it read."""
    lm = MHFLM(random_model(block_size=1024), tok, tok.bos)

    def write(prompt, ids, until=(), room=512):
        tokens = (torch.tensor([i]) for i in ids)
        monkeypatch.setattr('mhf.lm.Engine', lambda *options: SimpleNamespace(stream=lambda *args, **more: tokens))
        request = instance(prompt, dict(until=list(until), max_gen_toks=lm.max_length - room))
        return lm.generate_until([request])[0], len(ids) - len(list(tokens))

    return write


def test_first_space_of_a_continuation(tok, write):
    """A generated text keeps its first spaces, such as an indentation, also after a prompt cut inside a character."""
    for text in ('import', 'class A(object):\n', 'ünïcode 日本', 'x  ', '', 'ᎣᏏᏲ'):
        ids = tok.encode([text])[0]
        for answer in (' a', '   a a', 'a'):
            together = tok.encode([text + answer])[0]
            # where the prompt is tokenized as it is alone
            if together[: len(ids)] == ids:
                for room in (512, 2):
                    assert write(text, together[len(ids) :], room=room)[0] == answer


def test_stop_strings(tok, write):
    """Generation ends with the token that completes a stop string."""
    text = 'a ᏣᎳᎩ 日本 bc ' * 30 + 'sto' + 'p here: ünïcode ᎣᏏᏲ,\n\n' + 'more text ' * 9
    ids = tok.encode([text])[0]
    for stop in ('stop he', ' ünï', 'ᎣᏏᏲ', '\n\n', 'bc a', 'not in it'):
        generated, number = write('', ids, until=['neither', stop])
        assert generated == text.split(stop)[0]
        assert stop not in text or stop in tok.decode(ids[:number]) and stop not in tok.decode(ids[: number - 1])
