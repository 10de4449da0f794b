"""Tokenizers: a Hugging Face tokenizer.json, alone and next to a released model; roles."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from test_released import learned_model
from tokenizers import decoders, models, pre_tokenizers

import expand
from hashing import signature_table
from mhf.checkpoint import load
from mhf.errors import InputError
from mhf.released import save_pretrained
from mhf.tokenizer_json import write_tokenizer
from mhf.tokenizers import get_tokenizer
from test_mhf import SAYINGS, random_model, write_released


def test_byte_level_json(tmp_path):
    """Token strings of a byte-level file are its keys, and ids that it skips have no token."""
    vocab = ['<|endoftext|>', *sorted(pre_tokenizers.ByteLevel.alphabet()), 'Ġt', 'he']
    vocab = {token: i for i, token in enumerate(vocab)} | {'Ġthe': 310}
    written = tokenizers.Tokenizer(models.BPE(vocab, [('Ġ', 't'), ('h', 'e'), ('Ġt', 'he')]))
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = decoders.ByteLevel()
    written.add_special_tokens(['<|endoftext|>'])
    written.save(f'{tmp_path}/x.json')
    roles = dict(bos_token='<|endoftext|>', eos_token='<|endoftext|>')
    (tmp_path / 'special_tokens_map.json').write_text(json.dumps(roles))
    tok = get_tokenizer(str(tmp_path / 'x.json'))
    assert tok.tokens[259:] == [None] * 51 + ['Ġthe'] and tok.bos == tok.pad == 0 == tok.tokens.index('<|endoftext|>')
    # informed signatures know the bytes
    assert sorted(tok.spellings[1:257]) == [bytes([byte]) for byte in range(256)] and tok.spellings[310] == b' the'
    assert all(tok.json.decode([i]) == tok.spellings[i].decode(errors='replace') for i in (*range(1, 259), 310))
    texts = [' the', *SAYINGS, 'x<|endoftext|>'] * 50
    ids = tok.encode(texts)
    assert ids[0] == [310] and 0 not in ids[-1] and [tok.decode(i) for i in ids] == texts


def test_roles_of_a_json(tmp_path):
    """The files next to a tokenizer.json name bos, eos and pad; a missing eos is an error."""
    learned = get_tokenizer(learned_model(tmp_path))
    write_tokenizer(learned, tmp_path, add_bos=True)
    path = f'{tmp_path}/tokenizer.json'
    beside = tmp_path / 'tokenizer_config.json', tmp_path / 'special_tokens_map.json'
    bos_and_eos = dict(bos_token='<s>', eos_token='</s>')
    for config, special, roles in (
        (bos_and_eos | dict(bos_token='▁the'), {}, (learned.tokens.index('▁the'), 2, 2)),  # not a special token
        (dict(bos_token=dict(content='</s>'), eos_token='<unk>'), dict(bos_token='<s>'), (2, 0, 0)),
        (dict(bos_token=None), bos_and_eos | dict(pad_token=dict(content='<unk>')), (1, 2, 0)),
        # as in Qwen3's
        (dict(bos_token=None, eos_token='</s>'), {}, (2, 2, 2)),
    ):
        for file, content in zip(beside, (config, special), strict=True):
            file.write_text(json.dumps(content))
        tok = get_tokenizer(path)
        assert (tok.bos, tok.eos, tok.pad) == roles and tok.decode(roles) == '', (config, special)
    beside[0].write_text('{}')
    with pytest.raises(InputError, match='it has no eos'):
        get_tokenizer(path)


# -----------------------------------------------------------------------------
# next to a released model


@pytest.mark.parametrize('H', [3, 0])
def test_released_with_a_json(tmp_path, H):
    """An expanded released model is opened with the tokenizer.json next to it; ids without a token get P(w) = 0."""
    old = get_tokenizer(learned_model(tmp_path))
    larger = expand.expand_tokenizer(old, dict(some=SAYINGS * 20), dict(some=200))
    folder = tmp_path / 'm'
    folder.mkdir()
    write_tokenizer(larger, folder, add_bos=True)
    # a file that skips three ids
    written = json.loads((folder / 'tokenizer.json').read_text(encoding='utf-8'))
    ids = written['model']['vocab']
    last = max(ids, key=ids.get)
    ids[last] += 3
    tokens = [*larger.tokens[:-1], None, None, None, last]
    V = len(tokens)
    (folder / 'tokenizer.json').write_text(json.dumps(written))
    rows = -(-V // 128) * 128
    m = random_model(num_hashes=H, num_buckets=256, vocab_size=rows, dtype=torch.float32)
    if H:
        table = np.zeros((rows, H))
        table[:V] = signature_table(tokens, H, 256, pad_id=2)
        m.set_vocabulary(table)
    write_released(folder, m)
    # of the model that it was expanded from
    (folder / 'tokenizer.model').write_bytes(old.sp.serialized_model_proto())
    opened = load(str(folder))
    assert opened.tok.tokens == tokens and opened.tok.name == str(folder / 'tokenizer.json')
    p = opened.model.log_probs(torch.tensor([[1, V - 1]])).exp()[0, -1]
    assert p.nonzero()[:, 0].tolist() == [*range(V - 4), V - 1] and len(p) > V


@pytest.mark.parametrize('change', ['normalizer', 'bos'])
def test_another_tokenizer_with_the_same_tokens(tmp_path, change):
    """A model refuses a tokenizer with the same tokens that encodes text differently or has another bos."""
    learned = get_tokenizer(learned_model(tmp_path))
    for name in ('own', 'other'):
        (tmp_path / name).mkdir()
        write_tokenizer(learned, tmp_path / name, add_bos=False)
    own, path = (tmp_path / f'{name}/tokenizer.json' for name in ('own', 'other'))
    spec = json.loads(path.read_text())
    if change == 'normalizer':
        spec['normalizer'] = dict(type='Sequence', normalizers=[dict(type='Lowercase'), spec['normalizer']])
    else:
        roles = path.with_name('tokenizer_config.json')
        roles.write_text(roles.read_text().replace('"<s>"', '"<unk>"'))
    path.write_text(json.dumps(spec))
    m = random_model(num_hashes=0, vocab_size=600, dtype=torch.float32)
    save_pretrained(m, tmp_path / 'exported', str(own))
    with pytest.raises(InputError, match="is not the model's"):
        load(str(tmp_path / 'exported'), str(path))
