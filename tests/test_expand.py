"""expand.py: tokens of new languages, and models grown by them, which train.py and eval.py accept."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import CONFIG, REPO, ok, real_documents, write_jsonl
from test_released import learned_model

import expand
import prepare
from configurator import read_config
from hashing import PROPERTIES, informed_table, signature_table
from mhf.checkpoint import load, read_checkpoint
from mhf.data import Bins
from mhf.released import from_pretrained, save_pretrained
from mhf.sources import parse_mixture
from mhf.tokenizers import get_tokenizer
from model import MHF, MHFConfig
from test_mhf import SAYINGS, bucket_logits, random_model


def invented_language(first, letters, spaces, seed):
    """Returns documents of words with Zipf's frequencies, in `letters` code points from `first` on."""
    draw = np.random.default_rng(seed)
    vocabulary = [''.join(chr(first + k) for k in draw.integers(0, letters, draw.integers(2, 6))) for _ in range(1500)]
    p = 1 / np.arange(1, 1501)
    return [(' ' if spaces else '').join(draw.choice(vocabulary, 150, p=p / p.sum())) + '.' for _ in range(60)]


# the arguments of invented_language
LANGUAGES = dict(ar=(0x621, 26, True, 1), zh=(0x6E00, 400, False, 2), hi=(0x905, 50, True, 3))
TEXTS = '--corpora=ar.jsonl,zh.jsonl,hi.jsonl,docs.jsonl@0'


@pytest.fixture(scope='module')
def expansion(tmp_path_factory):
    """
    A folder with a tokenizer, a model, three languages, a tokenizer with 400 tokens of each, and a model grown by them.
    """
    folder = tmp_path_factory.mktemp('expansion')
    path = learned_model(folder, normalization_rule_name='identity', remove_extra_whitespaces=False)
    (folder / 'cfg.py').write_text(f"{CONFIG}tokenizer = base_tokenizer = '{path}'\nnum_layers = 4\n")
    write_jsonl(folder / 'docs.jsonl', real_documents()[:3])
    for name, letters in LANGUAGES.items():
        write_jsonl(folder / f'{name}.jsonl', invented_language(*letters))
    ok('prepare.py', 'cfg.py', cwd=folder)
    ok('train.py', 'cfg.py', '--max_steps=1', '--warmup_steps=0', '--out_dir=base', cwd=folder)
    ok('expand.py', 'cfg.py', TEXTS, '--num_new_tokens=400', '--tokenizer=three.model',
       '--source_model=base', '--output_dir=grown', cwd=folder)  # fmt: skip
    ok('prepare.py', 'cfg.py', '--dataset=ar.jsonl,zh.jsonl,hi.jsonl,docs.jsonl', '--tokenizer=three.model',
       '--data_format=ids', '--data_dir=more', cwd=folder)  # fmt: skip
    return folder


@pytest.fixture(scope='module')
def old(expansion):
    """The tokenizer that is expanded."""
    return get_tokenizer(str(expansion / 'learned.model'))


def test_expanded_tokenizer(expansion, old):
    """New pieces leave old ids and English unchanged, round-trip, all occur, and save tokens."""
    tok = get_tokenizer(str(expansion / 'three.model'))
    V = len(old.tokens)
    assert tok.tokens[:V] == old.tokens and len(tok.tokens) == len(set(tok.tokens)) == V + 1200
    assert (tok.bos, tok.pad) == (old.bos, old.pad)
    english = real_documents()
    assert tok.encode(english) == old.encode(english)
    foreign = [t for letters in LANGUAGES.values() for t in invented_language(*letters)]
    for texts in (SAYINGS, english, foreign):
        assert [tok.decode(i) for i in tok.encode(texts)] == texts
    assert tok.encode_pieces(tok.tokens[V:]) == [[k] for k in range(V, V + 1200)]
    for name, letters in LANGUAGES.items():
        held = held_out(expansion / f'three_{name}.jsonl')
        # expand.py ignores val_fraction
        assert held == invented_language(*letters)[19::20]
        assert sum(map(len, tok.encode(held))) < 0.75 * sum(map(len, old.encode(held)))


def held_out(path):
    return [json.loads(line)['text'] for line in path.read_text(encoding='utf-8').splitlines()]


def test_held_out_text_is_not_trained_on(expansion, old):
    """The data of config/expand_*.py does not contain held-out documents of expand.py, and lasts for one epoch."""
    files = list((REPO / 'config').glob('expand_*.py'))
    for settings in map(read_config, files):
        sources = parse_mixture(settings['dataset'])
        each = settings.get('val_bytes', prepare.val_bytes) // len(sources)
        assert settings['val_fraction'] == expand.HELD_OUT and each >= expand.HELD_OUT_BYTES
        # English or Python is the last one, and gets no tokens
        assert settings['corpora'].removesuffix('@0').split(',') == [name for name, _ in sources] and len(sources) == 4
        if 'tiny' not in settings['out_dir']:
            # one epoch
            num_sequences = (sum(tokens for _, tokens in sources) - 1) // settings['block_size']
            assert settings['max_steps'] * settings['batch_size'] <= num_sequences
    assert len(files) == 7
    ok('prepare.py', 'cfg.py', '--val_fraction=0.05', '--dataset=ar.jsonl@1e5,zh.jsonl@1e5,docs.jsonl@1e5',
       '--data_format=ids', '--data_dir=held', cwd=expansion)  # fmt: skip

    ids = [Bins(expansion / 'held', split)[:].tolist() for split in ('train', 'val')]
    trained_on, kept = (set(map(str.strip, old.decode(split_ids).split('.'))) for split_ids in ids)
    for name in ('ar', 'zh'):
        sentences = {text.strip(' .') for text in held_out(expansion / f'three_{name}.jsonl')}
        assert sentences and sentences <= kept and not sentences & trained_on


def test_readme_commands_on_a_clone(tmp_path, mistral):
    """README's command for new languages, and the scripts that follow it, run in a clone, from the demo's model on."""
    for name in ('assets', 'config'):
        (tmp_path / name).symlink_to(REPO / name)
    settings = read_config(REPO / 'config/mhf_tiny.py')
    c = MHFConfig(**{name: value for name, value in settings.items() if name in MHFConfig.__annotations__})
    demo = MHF(c, signature_table(mistral.tokens, c.num_hashes, c.num_buckets, pad_id=mistral.pad))
    demo.init_weights()
    save_pretrained(demo, tmp_path / 'out/mhf_tiny', 'mistral')
    (file,) = re.findall(r'^python expand.py (\S+)$', (REPO / 'README.md').read_text(), re.M)
    printed = {}
    for script in ('expand.py', 'prepare.py', 'train.py', 'eval.py'):
        options = ['--max_steps=2', '--warmup_steps=1', '--batch_size=4'] if script == 'train.py' else []
        printed[script] = ok(script, file, *options, cwd=tmp_path)
        for path in tmp_path.glob('out/tokenizer/*.jsonl'):
            # a few held-out documents are enough
            write_jsonl(path, held_out(path)[:2])
    assert '32,768 -> 48,122 tokens: 0 new parameters' in printed['expand.py'].stdout
    saved = re.findall(r'([\d.]+)%$', printed['expand.py'].stdout, re.M)
    assert len(saved) == 4 and all(float(share) >= 25 for share in saved[:3])  # and no tokens for Python
    assert printed['eval.py'].stdout.count('bits_per_byte, out/tokenizer') == 3


def test_expand_again(expansion):
    """Expansion is reproducible, and an expanded model can be expanded again."""
    ok('expand.py', 'cfg.py', TEXTS, '--num_new_tokens=400', '--tokenizer=again.model', cwd=expansion)
    assert (expansion / 'again.model').read_bytes() == (expansion / 'three.model').read_bytes()
    write_jsonl(expansion / 'el.jsonl', invented_language(0x391, 50, True, 4))
    ok('expand.py', 'cfg.py', '--base_tokenizer=three.model', '--corpora=el.jsonl@100000',
       '--tokenizer=four.model', '--source_model=grown', '--output_dir=grown_again', cwd=expansion)  # fmt: skip
    three, four = (get_tokenizer(str(expansion / f'{n}.model')) for n in ('three', 'four'))
    assert four.tokens[: len(three.tokens)] == three.tokens
    assert 300 < len(four.tokens) - len(three.tokens) < 100000  # what the corpus yields
    table = signature_table(four.tokens, 3, 256, pad_id=four.pad)
    assert (table == from_pretrained(expansion / 'grown_again').signatures.numpy()).all()
    assert (table[: len(three.tokens)] == from_pretrained(expansion / 'grown').signatures.numpy()).all()


def test_expand_a_model(expansion, old):
    """Expansion adds no parameters and keeps old signatures and logits; training leaves frozen layers unchanged."""
    base, _ = read_checkpoint(expansion / 'base/ckpt.pt')
    grown = from_pretrained(expansion / 'grown')
    for (name, a), (_, b) in zip(base.named_parameters(), grown.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(grown.signatures[:600], base.signatures) and len(grown.signatures) == 1800
    ids = torch.tensor([old.encode([real_documents()[0]])[0][:64]])
    assert torch.equal(bucket_logits(grown, ids), bucket_logits(base, ids))
    args = ('cfg.py', '--init_from=grown', '--tokenizer=three.model', '--data_dir=more', '--unfrozen_end_layers=1',
            '--warmup_steps=1', '--out_dir=expanded')  # fmt: skip
    ok('train.py', *args, '--max_steps=2', cwd=expansion)
    trained_on, ckpt = read_checkpoint(expansion / 'expanded/ckpt.pt')
    assert trained_on.num_params() == base.num_params()
    pairs = zip(base.named_parameters(), trained_on.parameters(), strict=True)
    frozen = [name for (name, a), b in pairs if torch.equal(a, b)]
    assert frozen == [n for n, _ in base.named_parameters() if n.startswith(('layers.1.', 'layers.2.'))]
    assert len(ckpt.optimizer) == len(list(base.parameters())) - len(frozen)


def test_expand_a_standard_model(expansion, old):
    """A new row of a Standard model is the mean of the rows of its old pieces; embedding_scale and old rows stay."""
    m = random_model(num_hashes=0, vocab_size=600, block_size=64, embedding_scale=3.0, dtype=torch.float32)
    save_pretrained(m, expansion / 'standard', old.name)
    args = ('cfg.py', '--source_model=standard', '--output_dir=standard_grown', '--tokenizer=three.model')
    # the tokenizer exists, so the corpora are not read
    done = ok('expand.py', *args, '--corpora=no_such_file.jsonl', cwd=expansion)
    assert f'600 -> 1,800 tokens: {1200 * 32:,} new parameters' in done.stdout
    grown = from_pretrained(expansion / 'standard_grown')
    assert grown.config.embedding_scale == 3
    tok = get_tokenizer(str(expansion / 'three.model'))
    E = grown.embed.weight
    assert torch.equal(E[:600], m.embed.weight)
    for (name, a), (_, b) in list(zip(m.named_parameters(), grown.named_parameters(), strict=True))[1:]:
        assert torch.equal(a, b), name
    for k in (600, 800, 1799):
        text = tok.tokens[k].replace('▁', ' ')
        # without the ids of the start of the text and of the line end
        pieces = old.encode(['\n' + text])[0][2:]
        assert old.decode(pieces).strip() == text.strip()
        assert torch.allclose(E[k], m.embed.weight[pieces].mean(0), atol=1e-6)


def test_expand_an_informed_model(expansion, old):
    """
    New tokens get signatures in the range of their frequency, and share the buckets of their form and shape; old rows
    and the parameter count do not change.
    """
    tok = get_tokenizer(str(expansion / 'three.model'))
    counts = np.bincount(Bins(expansion / 'more', 'train', tok)[:], minlength=600)[:600]
    table, ranges = informed_table(old.tokens, counts, 3, 1000, old.pad)
    m = random_model(vocab_size=600, num_buckets=1000, pad_id=old.pad, dtype=torch.float32)
    m.config.frequency_ranges = ranges
    m.set_vocabulary(table)
    save_pretrained(m, expansion / 'informed', old.name)
    args = ('cfg.py', '--source_model=informed', '--output_dir=informed_grown', '--tokenizer=three.model')
    # a language that never occurred, of one very frequent piece and rare ones
    first, second = (tok.tokens[600 + k].replace('▁', ' ') for k in (0, 1))
    write_jsonl(expansion / 'new.jsonl', [f'{first} ' * 99 + second] * 60)
    done = ok('expand.py', *args, '--corpora=new.jsonl', cwd=expansion)
    assert '600 -> 1,800 tokens: 0 new parameters' in done.stdout
    grown = load(str(expansion / 'informed_grown')).model
    assert torch.equal(grown.signatures[:600], m.signatures) and grown.config.frequency_ranges == ranges
    assert len(set(map(tuple, grown.signatures.tolist()))) == 1800

    for i, key_of in enumerate(PROPERTIES):
        buckets = {(key_of(w), int(b)) for w, b in zip(tok.tokens, grown.signatures[:, i], strict=True) if b}
        assert len(buckets) == len(dict(buckets))
    ranges = ranges[-1]
    # the range of a very frequent token, a rare one and one that never occurred
    frequent, rare, never = (
        next(k for k, (_, offset, size) in enumerate(ranges) if offset <= bucket < offset + size)
        for bucket in grown.signatures[600:603, -1]
    )
    assert frequent >= len(ranges) - 3  # the most frequent ranges have few buckets
    assert never == 0 < rare < frequent
