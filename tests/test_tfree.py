"""study/tfree.py: a word's buckets, the loss, training beside train.py's, and the tasks of eval.py."""

import re

import mmh3
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CONFIG, assert_same, ok, run, small_tasks, steps, weights, write_jsonl

from configurator import InputError
from mhf.bins import block_indices, open_bins
from mhf.meta import checked_table, load_meta
from model import MHFConfig
from study.tfree import ALWAYS, TFree, Words, active_buckets

V = 512  # buckets
TRAIN = ('study.tfree', 'train', 'cfg.py', '--tokenizer=words.json', f'--num_buckets={V}')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Documents, their words, a config, bins and a trained T-FREE."""
    folder = tmp_path_factory.mktemp('tfree')
    # sentences that a small model learns by heart
    write_jsonl(folder / 'docs.jsonl', ['The quick brown fox jumps over the lazy dog, then Sleeps.\n' * 20] * 20)
    (folder / 'cfg.py').write_text(CONFIG + "block_size = 16\nmicro_batch_size = 8\ntokenizer = 'words.json'\n")
    ok('study.tfree', 'words', '--dataset=docs.jsonl', '--tokenizer=words.json', cwd=folder)
    ok('prepare.py', 'cfg.py', '--data_format=ids', cwd=folder)
    ok(*TRAIN, cwd=folder)
    return folder


def small_model(words, v=V):
    """One of random weights in float64, of a list of words in the order of their ids."""
    torch.manual_seed(0)
    sizes = dict(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, intermediate_size=32)
    config = MHFConfig(len(words.tokens), 24, **sizes, num_hashes=1, num_buckets=v, loss='product')
    m = TFree(config, np.ones((len(words.tokens), 1), int)).double()
    m.words = words
    return m


def words_of(folder, *texts):
    write_jsonl(folder / 'docs.jsonl', texts)
    ok('study.tfree', 'words', '--dataset=docs.jsonl', '--tokenizer=words.json', cwd=folder)
    return Words(str(folder / 'words.json'))


def test_active_buckets():
    """A word lacks a trigram with the spaces around it, a hash of its lower case, or has another's bucket."""
    hashes = {mmh3.hash128(t, seed) % 8192 for t in (b' \xc3\xa9', b'\xc3\xa9 ') for seed in range(10)}
    assert active_buckets('é', 8192).tolist() == sorted(hashes)
    upper = {mmh3.hash128(t, seed) % 8192 for t in (b' Th', b'The', b'he ') for seed in range(8)}
    lower = {mmh3.hash128(t, seed) % 8192 for t in (b' th', b'the', b'he ') for seed in (8, 9)}
    assert active_buckets('The', 8192).tolist() == sorted(upper | lower) and len(upper | lower) == 30
    # what forms of a word share, and what others do not
    of = {word: set(active_buckets(word, 8192).tolist()) for word in ('The', 'the', 'THE', 'cat')}
    assert lower <= of['the'] & of['THE'] & of['The'] and len(of['The'] & of['cat']) < 3


def test_words(tmp_path):
    """The order is not by frequency, or a word of the text or a new one has no id or two."""
    tok = words_of(tmp_path, 'b a b <s> <unk>', 'a b\u3000c\n d, d')
    assert tok.tokens == ['<s>', '<unk>', 'b', 'a', 'c', 'd,', 'd']
    assert (tok.bos, tok.pad) == (0, 0)
    # also for a word that is new, and the same one later
    assert tok.encode(['b new d,', ' newer\nnew ']) == [[2, 7, 5], [8, 7]]
    assert tok.encode(['new <s>']) == [[7, 0]] and tok.tokens[7:] == ['new', 'newer']
    with pytest.raises(InputError, match="'mistral' is no list of words"):
        Words('mistral')


def test_inputs_and_loss(tmp_path):
    """An active row is missing from a sum or in it twice, or the loss is not torch's with the weight 300."""
    tok = words_of(tmp_path, 'a Banana banana is no cherry')
    m = small_model(tok)
    ids = torch.tensor([[0, *range(2, 8)], [*range(2, 8), 0]])
    hot = torch.zeros(*ids.shape, V).double()
    for place in np.ndindex(*ids.shape):
        hot[place][active_buckets(tok.tokens[ids[place]], V)] = 1
    entered = []
    handle = m.layers[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    h = m.hidden_states(m.sign(ids))
    handle.remove()
    assert torch.allclose(entered[0], hot @ m.embed.weight)
    expected = F.binary_cross_entropy_with_logits(
        m.head(h[:, :-1]), hot[:, 1:], pos_weight=torch.tensor(300.0).double()
    )
    x = m.sign(ids)[:, :-1]
    y = m.sign(ids)[:, 1:]
    assert torch.allclose(m(x, y), expected)
    parameters = [*m.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(m(x, y), parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.allclose(ours, theirs)
    bce, nats = m.token_losses(x, y)
    assert torch.allclose(bce.mean(), expected) and nats.isnan().all()
    # bos is no word of the dictionary, a word that is new to it is ranked all the same
    tok.encode(['durian'])
    scores = F.logsigmoid(m.head(h[0]))
    means = torch.stack([scores[:, active_buckets(word, V)].mean(1) for word in tok.tokens], dim=1)  # (n, words)
    for i in range(len(tok.tokens)):
        score, *_ = m.predict(h[0], torch.full((7,), i))
        assert torch.allclose(score, means[:, i])
        assert torch.equal(m.ranks(h[0], torch.full((7,), i)), (means[:, 2:8] > means[:, i : i + 1] + 1e-9).sum(1))


def test_a_resumed_run_is_a_straight_one(folder, tmp_path):
    """A resume loses something of T-FREE, or its rate, order or checkpoints are others."""
    again = [*TRAIN, f'--data_dir={folder / "bins"}', '--out_dir=out']
    for name in ('cfg.py', 'words.json', 'docs.jsonl'):
        (tmp_path / name).symlink_to(folder / name)
    ok(*again, '--max_steps=12', '--lr_decay_steps=24', cwd=tmp_path)
    ok(*again, '--init_from=resume', cwd=tmp_path)
    assert steps(tmp_path) == steps(folder)
    assert_same(weights(tmp_path)['model'], weights(folder)['model'])
    assert_same(weights(tmp_path)['optimizer'], weights(folder)['optimizer'])


def test_training_is_that_of_train_py(folder, monkeypatch):
    """The rate, the groups, the weights or the order of blocks are not those that train.py gives the same settings."""
    monkeypatch.chdir(folder)
    more = ['--embedding_lr_mult=4', '--beta2=0.95', '--max_steps=6', '--lr_decay_steps=8']
    ok(*TRAIN, *more, '--out_dir=ours', cwd=folder)
    ok('train.py', *TRAIN[2:], *more, *ALWAYS, '--out_dir=theirs', cwd=folder)
    for key in ('step', 'tokens', 'lr'):
        assert [e[key] for e in steps(folder, 'ours')] == [e[key] for e in steps(folder, 'theirs')]
    ours = weights(folder, 'ours')
    theirs = weights(folder, 'theirs')
    assert ours['data'] == theirs['data']
    assert ours['model_config'] == theirs['model_config']
    assert ours['config'] == theirs['config'] | dict(out_dir='ours')
    groups = [[group | dict(params=0) for group in ckpt['optimizer']['param_groups']] for ckpt in (ours, theirs)]
    assert len(groups[0]) == 3 and groups[0] == groups[1]
    # the loss of the first batch, by hand
    config = ours['config']
    meta = load_meta(config)
    tokens = open_bins(config, meta, 'train')
    torch.manual_seed(config['seed'])
    m = TFree(MHFConfig(**ours['model_config']), checked_table(config, meta))
    m.words = Words(config['tokenizer'])
    blocks = block_indices(0, config['batch_size'], (len(tokens) - 1) // 16, config['seed'])
    ids = torch.tensor(np.stack([tokens[16 * block : 16 * block + 17] for block in blocks]).astype(int))
    signed = m.sign(ids)
    assert steps(folder, 'ours')[0]['loss'] == pytest.approx(m(signed[:, :-1], signed[:, 1:]).item(), rel=1e-6)


def test_it_learns_and_is_evaluated(folder):
    """The word that follows does not come first after training, or eval.py's tasks have no scores of it."""
    small_tasks(folder)
    args = ('--out_dir=out', '--text=bins', '--data_dir=.', '--device=cpu')
    said = ok('study.tfree', 'eval', *args, cwd=folder).stdout
    # what follows 'Sleeps.' is the next sentence or document
    assert float(re.search('ranked: first ([0-9.]*)%', said)[1]) > 90
    for task in ('arc_easy', 'piqa', 'race_v2', 'record', 'sciq'):
        assert re.search(rf'\|{task} .*\|acc|\|{task} .*\|em', said)
    assert 'lambada' not in said


@pytest.mark.parametrize(
    'says, args',
    [
        ("command 'trian'", ['trian']),
        ('tokenizer=w.txt: name a file', ['words', '--tokenizer=w.txt']),
        ('no such file', ['words', '--tokenizer=w.json', '--dataset=nothing.jsonl']),
        ('activation_checkpointing', [*TRAIN[1:], '--activation_checkpointing', '--out_dir=other']),
        ('tasks, output_path: of eval.py', ['eval', '--output_path=x', '--tasks=lambada_openai']),
        ('compile, plain: of train.py', [*TRAIN[1:], '--compile=False', '--plain', '--out_dir=other']),
        ('init_from=out: T-FREE begins from scratch', [*TRAIN[1:], '--init_from=out', '--out_dir=other']),
        ('leaves nothing of the 24 steps', [*TRAIN[1:], '--warmup_steps=24', '--out_dir=other']),
        ('was trained with num_buckets=512 (now 256)', [*TRAIN[1:], '--num_buckets=256', '--init_from=resume']),
        ('is at step 24 already', [*TRAIN[1:], '--init_from=resume']),
        ('out has a checkpoint', TRAIN[1:]),
        ('--num_hashes=1 --single_id --data_format=ids', [*TRAIN[1:], '--data_dir=nothing', '--out_dir=other']),
        ('out_dir is not given', ['eval']),
    ],
)
def test_bad_input_is_one_line(folder, says, args):
    """A traceback in place of a line that says what to do."""
    done = run('study.tfree', *args, cwd=folder)
    assert done.returncode == 1 and done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
    assert says in done.stderr


def test_it_trains_in_one_process(folder):
    """Every process of torchrun writes the same files."""
    done = run('study.tfree', *TRAIN[1:], '--out_dir=other', cwd=folder, RANK='0', WORLD_SIZE='2')
    assert done.returncode == 1 and 'T-FREE trains in one process' in done.stderr, done.stderr
    assert not (folder / 'other').exists()
