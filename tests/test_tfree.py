"""study/tfree.py: the buckets of a word, the loss, training by train.py, and the tasks of eval.py."""

import re
import shutil

import mmh3
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CONFIG, events, ok, refused, small_tasks, steps, weights, write_jsonl

from configurator import InputError
from mhf.data import block_indices, open_bins
from model import MHFConfig
from study.tfree import TFree, Words, active_buckets

V = 512  # buckets
WORDS = ('study.tfree', 'words', '--dataset=docs.jsonl', '--tokenizer=words.json')
TRAIN = ('study.tfree', 'train', 'cfg.py', '--tokenizer=words.json', f'--num_buckets={V}')


def make_words(folder, *texts):
    """Writes documents and the list of their words. Returns the Words."""
    write_jsonl(folder / 'docs.jsonl', texts)
    ok(*WORDS, cwd=folder)
    return Words(str(folder / 'words.json'))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Documents, their words, a config, bins and a trained T-FREE."""
    folder = tmp_path_factory.mktemp('tfree')
    # sentences that a small model learns by heart
    make_words(folder, *['The quick brown fox jumps over the lazy dog, then Sleeps.\n' * 20] * 20)
    (folder / 'cfg.py').write_text(CONFIG + "block_size = 16\ntokenizer = 'words.json'\n")
    ok('prepare.py', 'cfg.py', '--data_format=ids', cwd=folder)
    ok(*TRAIN, cwd=folder)
    return folder


def test_active_buckets():
    """A word has the buckets of its trigrams, including the spaces around it, and of their lower case."""
    hashes = {mmh3.hash128(t, seed) % 8192 for t in (b' \xc3\xa9', b'\xc3\xa9 ') for seed in range(10)}
    assert active_buckets('é', 8192).tolist() == sorted(hashes)
    upper = {mmh3.hash128(t, seed) % 8192 for t in (b' Th', b'The', b'he ') for seed in range(8)}
    lower = {mmh3.hash128(t, seed) % 8192 for t in (b' th', b'the', b'he ') for seed in (8, 9)}
    assert active_buckets('The', 8192).tolist() == sorted(upper | lower) and len(upper | lower) == 30


def test_words(tmp_path):
    """Words are ordered by frequency; a new word gets an id when it is first encoded."""
    tok = make_words(tmp_path, 'b a b <s> <unk>', 'a b\u3000c\n d, d')
    assert tok.tokens == ['<s>', '<unk>', 'b', 'a', 'c', 'd,', 'd']
    assert (tok.bos, tok.pad) == (0, 0)
    # also for a word that is new, and the same one later
    assert tok.encode(['b new d,', ' newer\nnew ']) == [[2, 7, 5], [8, 7]]
    assert tok.encode(['new <s>']) == [[7, 0]] and tok.tokens[7:] == ['new', 'newer']
    ok(*WORDS, cwd=tmp_path)
    (tmp_path / 'tokenizer_config.json').write_text('{}')
    refused(*WORDS, says='tokenizer_config.json belongs to another tokenizer', cwd=tmp_path)
    with pytest.raises(InputError, match="'mistral' is not a list of words"):
        Words('mistral')


def test_inputs_and_loss(tmp_path):
    """A word enters as the sum of its rows; the loss is torch's binary cross-entropy with pos_weight 300."""
    tok = make_words(tmp_path, 'a Banana banana is no cherry')
    torch.manual_seed(0)
    sizes = dict(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, intermediate_size=32)
    m = TFree(MHFConfig(len(tok.tokens), 24, **sizes, num_hashes=0, num_buckets=V)).double()
    m.init_weights()
    m.words = tok
    ids = torch.tensor([[0, *range(2, 8)], [*range(2, 8), 0]])
    hot = torch.zeros(*ids.shape, V).double()
    for place in np.ndindex(*ids.shape):
        hot[place][active_buckets(tok.tokens[ids[place]], V)] = 1
    entered = []
    handle = m.layers[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    h = m.hidden_states(m.signatures[ids])
    handle.remove()
    assert torch.allclose(entered[0], hot @ m.embed.weight)
    weight = torch.tensor(300.0).double()
    expected = F.binary_cross_entropy_with_logits(m.head(h[:, :-1]), hot[:, 1:], pos_weight=weight)
    x = m.signatures[ids][:, :-1]
    y = m.signatures[ids][:, 1:]
    assert torch.allclose(m(x, y), expected)
    parameters = [*m.parameters()]
    gradients = torch.autograd.grad(m(x, y), parameters)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(gradient, reference)
    # a new word is scored, too
    tok.encode(['durian'])
    scores = F.logsigmoid(m.head(h[0]))
    for i, word in enumerate(tok.tokens):
        score, *_ = m.predict(h[0], torch.full((7,), i))
        assert torch.allclose(score, scores[:, active_buckets(word, V)].mean(1))


def test_first_loss(folder, monkeypatch):
    """Training starts from the initialization of the seed and the first batch of train.py."""
    monkeypatch.chdir(folder)
    ckpt = weights(folder)
    config = ckpt['config']
    tokens, _, _ = open_bins(config)
    torch.manual_seed(config['seed'])
    m = TFree(MHFConfig(**ckpt['model_config']))
    m.init_weights()
    m.words = Words(config['tokenizer'])
    blocks = block_indices(0, config['batch_size'], (len(tokens) - 1) // 16, config['seed'])
    ids = torch.tensor(np.stack([tokens[16 * block : 16 * block + 17] for block in blocks]).astype(int))
    loss = m(ids[:, :-1, None], ids[:, 1:, None]).item()
    assert steps(folder)[0]['loss'] == pytest.approx(loss, rel=1e-5)


def test_it_learns_and_is_evaluated(folder):
    """Training finds the word that follows, and resumes; eval scores the paper's tasks except LAMBADA."""
    log = [e['loss'] for e in steps(folder)]
    assert log[-1] < log[0] / 5
    assert events(folder)[-1]['val_loss'] < log[0] / 5
    small_tasks(folder)
    output = ok('study.tfree', 'eval', '--out_dir=out', '--benchmark_dir=.', '--device=cpu', cwd=folder).stdout
    for task in ('arc_easy', 'piqa', 'race_v2', 'record', 'sciq'):
        assert re.search(rf'\|{task} .*\|acc|\|{task} .*\|em', output)
    assert 'lambada' not in output
    ok(*TRAIN, '--auto_resume', '--max_steps=25', cwd=folder)
    assert [e['step'] for e in steps(folder)] == [*range(1, 26)]


def test_other_words(folder):
    """A list of words that differs from the data's is refused."""
    shutil.copytree(folder, folder / 'changed', ignore=shutil.ignore_patterns('out*', 'changed'))
    make_words(folder / 'changed', 'other words')
    refused(*TRAIN, says='words.json has other words than the training data', cwd=folder / 'changed')
