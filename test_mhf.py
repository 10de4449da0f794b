"""
Tests of the whole path, on the CPU, seconds each:  pytest -rs test_mhf.py

Tests that need the project's shared/ folder beside the clone skip without it; with MHF_STRICT=1 a skip is a failure.
"""

import contextlib
import gzip
import hashlib
import json
import lzma
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import mmh3
import numpy as np
import pytest
import tiktoken
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import configurator
import eval as evaluation
import expand
import model as model_module
import prepare
from configurator import InputError
from hashing import (
    extend_table,
    fingerprint,
    get_tokenizer,
    permute,
    signature_table,
    tokenizer_fingerprint,
)
from model import MHF, MHFConfig, sample_token

REPO = Path(__file__).resolve().parent
SHARED = REPO.parent / 'shared'
FUZZ = int(os.environ.get('MHF_FUZZ', 60))  # examples of damage


def shared(path):
    if not (SHARED / path).exists():
        reason = f'needs ../shared/{path}'
        pytest.fail(reason) if os.environ.get('MHF_STRICT') == '1' else pytest.skip(reason)
    return SHARED / path


@pytest.fixture(scope='session')
def mistral():
    return get_tokenizer('mistral')


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# -----------------------------------------------------------------------------
# hashing.py


@pytest.mark.parametrize(
    'H, B, sha256',
    [
        (3, 10624, '5a6a5bebe0be98967f3cd69bd16fd08320354f958eeeed537e43f186267a7e51'),
        (4, 16384, 'f9c2a68a955f6d6b8aae17ba8a403fb9f1acc58e19d444a0deaccf5a94cbb3c7'),
        (2, 1024, 'd769f5f8831b5c8aacbb8159649a6c5f25025febe7f16b2c6fe15be3fbc82560'),  # 1,782 rehash steps
        (3, 256, 'f6038df1bb1e58ba82be2b4f39db9e4b48516ffb55170b28aa49547f8959ba81'),  # 27 rehash steps
    ],
)
def test_golden_tables(mistral, H, B, sha256):
    """A wrong hash, seed, modulus, rehash rule or tokenizer file: no released checkpoint would read its input."""
    table = signature_table(mistral.tokens, H, B, pad_id=mistral.pad)
    assert fingerprint(table) == sha256
    if (H, B) == (2, 1024):
        assert table[799].tolist() == [453, 521] and mistral.tokens[799] == '<0x1C>'  # the first rehashed row


@pytest.mark.parametrize('H, B', [(3, 10624), (4, 16384)])
def test_golden_table_files(mistral, H, B):
    """The same, row by row, so that a failure shows where."""
    golden = np.load(shared(f'golden/signature_table_H{H}B{B}.npy'))
    np.testing.assert_array_equal(signature_table(mistral.tokens, H, B, pad_id=mistral.pad), golden)


def test_golden_lsh(mistral):
    """The LSH ablation: trigrams, projections, signs or their order are off."""
    golden = np.load(shared('golden/signature_table_H4B1024_lsh2_first2000.npy'))
    np.testing.assert_array_equal(signature_table(mistral.tokens[:2000], 4, 1024, num_lsh=2, pad_id=2), golden)


def test_lsh_everywhere_keeps_collisions():
    """num_lsh == H has nothing to rehash: it must neither loop nor refuse, and similar strings may share a signature."""
    table = signature_table(['aaaa', 'aaaaa', b'aaaa', 'xyz', 'ab', ''], 2, 64, num_lsh=2)
    assert table.shape == (6, 2) and table.min() >= 1 and (table[0] == table[2]).all()


words = st.lists(st.one_of(st.text(max_size=4), st.binary(max_size=4), st.none()), max_size=60)


@settings(max_examples=60, deadline=None)
@given(words, words, st.integers(1, 4), st.sampled_from([300, 65536]))
def test_table_invariants(old, new, H, B):
    """Two tokens share a signature, bucket 0 is hashed to, or registering more tokens moves an old one."""
    pad = 0 if old else None
    table = signature_table(old, H, B, pad_id=pad)
    longer = extend_table(table, new, B, pad_id=pad)
    np.testing.assert_array_equal(longer[: len(old)], table)
    np.testing.assert_array_equal(longer, signature_table(old + new, H, B, pad_id=pad))
    real = [i for i, w in enumerate(old + new) if w is not None and i != pad]
    assert len(set(map(tuple, longer[real].tolist()))) == len(real)
    assert (longer[real] > 0).all() and longer.sum() == longer[real].sum()


def test_single_id_has_one_value():
    """Single-ID is one hash (seed 0) on all coordinates, and its collisions stay."""
    tokens = [str(i) for i in range(100)]
    table = signature_table(tokens, 4, 32, unique=False, pad_id=3)
    assert (table == table[:, :1]).all() and len(np.unique(table[:, 0])) < 33 and not table[3].any()
    assert table[5, 0] == signature_table(tokens, 4, 32)[5, 0]


def test_a_prefix_fills_to_the_last_place():
    """A full prefix must hold all B - 1 entries and then say so, not loop forever or lose room."""
    tokens = [str(i) for i in range(40)]
    assert sorted(signature_table(tokens[:39], 1, 40)[:, 0]) == list(range(1, 40))
    with pytest.raises(InputError, match='prefix .* is full'):
        signature_table(tokens, 1, 40)


@pytest.mark.parametrize('H, B, num_lsh', [(0, 16, 0), (2, 1, 0), (2, 65537, 0), (2, 16, 3), (2, 16, -1)])
def test_table_refuses(H, B, num_lsh):
    """Arguments that cannot be meant must not give a table."""
    with pytest.raises(InputError, match='num_'):
        signature_table(['a'], H, B, num_lsh)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31), st.integers(0, 9))
def test_permute_is_a_bijection(n, seed, epoch):
    """An epoch would read some blocks twice and others never."""
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_permute_is_fixed_and_shuffles():
    """The order of the data changes between versions (no run could be resumed), or is hardly a shuffle."""
    assert permute(np.arange(5), 10**11, 42, 1).tolist() == [
        43193186363,
        53595994680,
        26334769426,
        57026049564,
        57824253611,
    ]
    order = permute(np.arange(10000), 10000, 42)
    assert abs(np.corrcoef(order, np.arange(10000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


SAYINGS = [
    'Hello,  world!\n\n\tx = {1: "a"}\r\n',
    '语言模型',
    'لغة عربية',
    'हिन्दी भाषा',
    '🙂 e\u0301 \x00 <s>[INST]',
    ' leading',
]


@pytest.mark.parametrize('name, V, bos, pad', [('mistral', 32768, 1, 2), ('tekken', 131072, 1, 11)])
def test_tokenizers_round_trip(name, V, bos, pad):
    """decode(encode(x)) != x, special tokens read out of plain text, or entries in another order than the paper's."""
    tok = get_tokenizer(name)
    assert (len(tok.tokens), tok.bos, tok.pad) == (V, bos, pad)
    ids = tok.encode(SAYINGS)
    assert [tok.decode(i) for i in ids] == SAYINGS
    assert not {tok.bos, tok.pad} & {i for row in ids for i in row}
    assert tok.decode([bos, *ids[0]]) == SAYINGS[0]


@pytest.mark.parametrize('name', ['mistral', 'tekken'])
@pytest.mark.parametrize('file', ['ar', 'zh', 'hi', 'fineweb_300'])
def test_tokenizers_round_trip_on_real_text(name, file):
    """The same on real Arabic, Chinese, Hindi and web documents."""
    with lzma.open(shared(f'data/text/{file}.jsonl.xz'), 'rt', encoding='utf-8') as lines:
        texts = [json.loads(next(lines))['text'] for _ in range(200)]
    tok = get_tokenizer(name)
    assert [tok.decode(i) for i in tok.encode(texts)] == texts


def handmade_encoding():
    """A tiktoken encoding with a gap: ids 0..255 bytes, 256 'th', 257 'the', 260 end of text."""
    ranks = {bytes([i]): i for i in range(256)} | {b'th': 256, b'the': 257}
    return tiktoken.Encoding(
        'handmade', pat_str=r'\w+|\W', mergeable_ranks=ranks, special_tokens={'<|endoftext|>': 260}
    )


def test_tiktoken_path(monkeypatch):
    """A tiktoken encoding: raw bytes as token strings, end of text as bos and pad, gaps as zero rows of probability 0."""
    monkeypatch.setattr(tiktoken, 'list_encoding_names', lambda: ['handmade'])
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: handmade_encoding())
    tok = get_tokenizer('handmade')
    assert tok.tokens[257] == b'the' and tok.tokens[258:260] == [None, None] and tok.tokens[260] == b'<|endoftext|>'
    assert tok.bos == tok.pad == 260 and tok.encode(['the <|endoftext|>'])[0][:2] == [257, 32]
    assert [tok.decode(i) for i in tok.encode(SAYINGS)] == SAYINGS
    table = signature_table(tok.tokens, 2, 64, pad_id=tok.pad)
    assert not table[258:].any()
    for H in (2, 0):  # the Standard model has no table to read the gaps from
        m = MHF(replace(TINY, vocab_size=261, num_hashes=H, num_buckets=64, pad_id=260), table, gaps=[258, 259])
        p = m.log_probs(torch.tensor([[1, 2]])).exp()
        assert (p[..., 258:260] == 0).all() and (p[..., 260] > 0).all() and torch.allclose(p.sum(-1), torch.ones(1, 2))


def test_tokenizer_that_cannot_be_downloaded(monkeypatch):
    """Without a network the user sees requests' traceback instead of one line."""

    def offline(name):
        raise OSError('HTTPSConnectionPool: Max retries\nexceeded')

    monkeypatch.setattr(tiktoken, 'get_encoding', offline)
    with pytest.raises(InputError, match=r"^tokenizer 'gpt2' could not be downloaded .*mistral$"):
        get_tokenizer('gpt2')


# -----------------------------------------------------------------------------
# model.py

TINY = MHFConfig(
    vocab_size=300, block_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=32,
    intermediate_size=48, num_hashes=3, num_buckets=40, bottleneck=8,
)  # fmt: skip


def random_model(seed=0, dtype=torch.float64, **changes):
    """A model whose weights are all large enough to matter."""
    torch.manual_seed(seed)
    c = replace(TINY, **changes)
    tokens = [f'w{i}' for i in range(c.vocab_size)]
    table = signature_table(tokens, c.num_hashes, c.num_buckets, c.num_lsh, pad_id=c.pad_id) if c.num_hashes else None
    m = MHF(c, table).to(dtype)
    for p in m.parameters():
        torch.nn.init.normal_(p, mean=1.0 if p.dim() == 1 else 0.0, std=0.3)
    return m


def write_released(folder, m, shards=1, **extra):
    """A model in the authors' format, from a table of names of its own."""
    c, weights = m.config, {}
    for name, tensor in m.state_dict().items():
        name = re.sub(r'^embed\.', 'model.embed_tokens.', name)
        name = re.sub(r'^encoder\.gate\.', 'model.combiner.scorer.', name)
        name = re.sub(r'^encoder\.out\.', 'model.combiner.output_proj.0.', name)
        name = re.sub(r'^mixers\.', 'hash_head.cascade_mixer.', name)
        name = re.sub(r'^(layers|norm)\.', r'model.\1.', name)
        if name == 'signatures' and c.num_hashes:
            weights['model.hash_map'] = tensor
        elif name not in ('signatures', 'is_token'):
            weights[name] = tensor.contiguous()
    config = dict(
        model_type='qwen3', vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=True,
        eos_token_id=c.pad_id, max_position_embeddings=c.block_size, hidden_act='silu', attention_bias=False,
    )  # fmt: skip
    if c.num_hashes:
        config |= dict(
            num_hashes=c.num_hashes, num_buckets=c.num_buckets, num_lsh=c.num_lsh, bottle_neck_dim=c.bottleneck
        )
    config |= extra
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / 'model.safetensors')
        return folder
    where = {name: f'model-{k % shards + 1:05}-of-{shards:05}.safetensors' for k, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({n: t for n, t in weights.items() if where[n] == file}, folder / file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return folder


def test_golden_forward():
    """Any error in encoder, backbone, cascade or renormalisation: released checkpoints would compute something else."""
    expect = load_file(shared('golden/tiny_a') / 'expect.safetensors')
    m, ids = MHF.from_pretrained(shared('golden/tiny_a')).double(), expect['input_ids']
    assert relative(m.bucket_logits(ids), expect['bucket_logits']) < 1e-9
    assert relative(m.hidden(m.signatures[ids]), expect['last_hidden']) < 1e-9
    assert relative(m.log_probs(ids), expect['logp_inf']) < 1e-9


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_golden_training(dtype, tolerance):
    """An error in a gradient, the loss, the weight decay groups or the clipping."""
    expect = load_file(shared('golden/tiny_a') / 'expect.safetensors')
    m = MHF.from_pretrained(shared('golden/tiny_a')).to(dtype)
    groups = [
        dict(params=[p for p in m.parameters() if (p.dim() >= 2) == big], weight_decay=w)
        for big, w in ((True, 0.1), (False, 0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for ids, loss, norm in zip(expect['train_batches'], expect['train_losses'], expect['train_grad_norms']):
        s = m.signatures[ids]
        ours = m.train_loss(s[:, :-1], s[:, 1:])
        ours.backward()
        our_norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(ours.item() / loss.item() - 1) < tolerance and abs(our_norm.item() / norm.item() - 1) < tolerance


def naive_bucket_logits(w, c, ids):
    """The method once more in numpy, position by position, from tensors in the released layout (SPEC sections 3 to 5)."""

    def silu(x):
        return x / (1 + np.exp(-x))

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * weight

    def turn(x, position):
        half = c.head_dim // 2
        angle = position * c.rope_theta ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    E = w['model.embed_tokens.weight'].reshape(c.num_hashes, c.num_buckets, c.hidden_size)
    xs = []
    for token in ids:
        k = [E[i, b] for i, b in enumerate(w['model.hash_map'][token])]
        score = [
            w['model.combiner.scorer.2.weight']
            @ silu(w['model.combiner.scorer.0.weight'] @ v + w['model.combiner.scorer.0.bias'])
            + w['model.combiner.scorer.2.bias']
            for v in k
        ]
        alpha = softmax(np.concatenate(score))
        mixed = sum(a * v for a, v in zip(alpha, k))
        xs.append(w['model.combiner.output_proj.0.weight'] @ mixed + w['model.combiner.output_proj.0.bias'])
    for n in range(c.num_layers):
        p = {k.removeprefix(f'model.layers.{n}.'): v for k, v in w.items() if k.startswith(f'model.layers.{n}.')}
        keys, values, out = [], [], []
        for t, x in enumerate(xs):
            y = norm(x, p['input_layernorm.weight'])
            q = (p['self_attn.q_proj.weight'] @ y).reshape(c.num_heads, c.head_dim)
            key = (p['self_attn.k_proj.weight'] @ y).reshape(c.num_kv_heads, c.head_dim)
            keys.append([turn(norm(h, p['self_attn.k_norm.weight']), t) for h in key])
            values.append((p['self_attn.v_proj.weight'] @ y).reshape(c.num_kv_heads, c.head_dim))
            heads = []
            for h in range(c.num_heads):
                g = h * c.num_kv_heads // c.num_heads
                query = turn(norm(q[h], p['self_attn.q_norm.weight']), t)
                weight = softmax(np.array([query @ k[g] for k in keys]) / math.sqrt(c.head_dim))
                heads.append(sum(a * v[g] for a, v in zip(weight, values)))
            x = x + p['self_attn.o_proj.weight'] @ np.concatenate(heads)
            y = norm(x, p['post_attention_layernorm.weight'])
            hidden = silu(p['mlp.gate_proj.weight'] @ y) * (p['mlp.up_proj.weight'] @ y)
            out.append(x + p['mlp.down_proj.weight'] @ hidden)
        xs = out
    logits = np.zeros((len(ids), c.num_hashes, c.num_buckets))
    for t, x in enumerate(xs):
        v = norm(x, w['model.norm.weight'])
        for i in range(c.num_hashes):
            logits[t, i] = E[i] @ v
            if i < c.num_hashes - 1:
                m = {
                    k.removeprefix(f'hash_head.cascade_mixer.{i}.'): u
                    for k, u in w.items()
                    if k.startswith(f'hash_head.cascade_mixer.{i}.')
                }
                soft = E[i].T @ softmax(logits[t, i])
                v = v + m['2.weight'] @ silu(m['0.weight'] @ np.concatenate([v, soft]) + m['0.bias']) + m['2.bias']
    return logits


@pytest.mark.parametrize(
    'changes, shards',
    [
        (dict(num_hashes=1, num_buckets=400), 1),
        (dict(num_hashes=2, num_heads=6, num_kv_heads=1, num_lsh=1), 3),
        (dict(num_hashes=4, num_heads=3, num_kv_heads=3, head_dim=10, rope_theta=1e4), 2),
    ],
)
def test_other_released_models(tmp_path, changes, shards):
    """Only the golden model loads: other H, B, GQA ratios, num_lsh, RoPE bases or shards give other numbers than the method."""
    m = random_model(**changes)
    nested = dict(rope_theta=None, rope_parameters=dict(rope_theta=m.config.rope_theta)) if shards > 1 else {}
    folder = write_released(tmp_path / 'm', m, shards, **nested)
    loaded = MHF.from_pretrained(folder).double()
    assert asdict(loaded.config) == asdict(m.config) | dict(loss='product')  # what the authors train with
    weights = {k: v.numpy() for f in folder.glob('*.safetensors') for k, v in load_file(f).items()}
    ids = torch.randint(0, 300, (2, 7))
    naive = np.stack([naive_bucket_logits(weights, m.config, row) for row in ids.numpy()])
    m32 = m.float().double()  # from_pretrained gives float32
    assert relative(loaded.bucket_logits(ids), torch.tensor(naive)) < 1e-4
    assert relative(loaded.bucket_logits(ids), m32.bucket_logits(ids)) < 1e-12
    assert relative(random_model(**changes).bucket_logits(ids), torch.tensor(naive)) < 1e-10


def test_from_the_hub(tmp_path, monkeypatch):
    """A hub id must be fetched at the given revision, without code or pickles, and an unreachable hub is one line."""
    import huggingface_hub

    folder, asked = write_released(tmp_path / 'm', random_model()), {}

    def download(repo, revision=None, allow_patterns=None):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    MHF.from_pretrained('klein9692/some-model', revision='checkpoint-20000')
    assert asked['repo'] == 'klein9692/some-model' and asked['revision'] == 'checkpoint-20000'
    assert not [p for p in asked['patterns'] if p.endswith(('.bin', '.pt', '.py', '*'))]

    def offline(*_, **__):
        raise OSError('no\nnetwork')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
    with pytest.raises(InputError, match=r'could not be fetched from the hub \(OSError: no network\)'):
        MHF.from_pretrained('klein9692/some-model')


def test_released_models_that_are_refused(tmp_path):
    """A checkpoint of another architecture is loaded as if it were ours, and samples nonsense."""
    m = random_model()
    for key, value in (
        ('lsh_only_embed', True),
        ('attention_bias', True),
        ('num_hidden_layers', 3),
        ('hidden_size', 16),
    ):
        with pytest.raises(InputError, match='|'.join([key, 'disagree'])):
            MHF.from_pretrained(write_released(tmp_path / key, m, **{key: value}))
    folder = write_released(tmp_path / 'untied', m)
    weights = load_file(folder / 'model.safetensors')
    save_file(weights | {'lm_head.weight': weights['model.embed_tokens.weight'] + 1}, folder / 'model.safetensors')
    with pytest.raises(InputError, match='lm_head'):
        MHF.from_pretrained(folder)
    save_file(weights | {'lm_head.weight': weights['model.embed_tokens.weight'].clone()}, folder / 'model.safetensors')
    MHF.from_pretrained(folder)
    (folder / 'model.safetensors').write_bytes(b'not safetensors')
    with pytest.raises(InputError, match='cannot be read'):
        MHF.from_pretrained(folder)
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    with pytest.raises(InputError, match='model.safetensors'):
        MHF.from_pretrained(folder)


@pytest.mark.parametrize('heads, kv_heads', [(4, 2), (6, 1), (3, 3)])
def test_standard_agrees_with_qwen3(tmp_path, heads, kv_heads):
    """Our backbone or Standard baseline is not Qwen3: every comparison with it would be void."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=8, tie_word_embeddings=True, rope_theta=1e6, initializer_range=0.2,
        max_position_embeddings=64, pad_token_id=2, eos_token_id=2,
    )).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours, ids = MHF.from_pretrained(tmp_path), torch.randint(0, 200, (2, 40))
    assert ours.config.num_hashes == 0 and ours.config.rope_theta == 1e6
    logits = theirs(ids).logits
    assert relative(ours.bucket_logits(ids)[:, :, 0], logits) < 1e-5
    assert (ours.log_probs(ids) - logits.log_softmax(-1)).abs().max() < 1e-5
    s = ours.signatures[ids]
    reference = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(ours.train_loss(s[:, :-1], s[:, 1:]) - reference) < 1e-5


@pytest.mark.parametrize('path', sorted(REPO.glob('config/*.py')), ids=lambda p: p.stem)
def test_parameter_counts(path):
    """A config or the model has parameters that the paper's formula does not, or E is counted twice."""
    s = configurator.read_config(path)
    c = MHFConfig(**{k: v for k, v in s.items() if k in MHFConfig.__annotations__})
    d, z, H = c.hidden_size, c.bottleneck, c.num_hashes
    gate, out, mixer = z * d + z + z + 1, d * d + d, z * 2 * d + z + d * z + d
    interface = H * c.num_buckets * d + gate + out + (H - 1) * mixer if H else c.vocab_size * d
    attention = 2 * d * c.num_heads * c.head_dim + 2 * d * c.num_kv_heads * c.head_dim + 2 * c.head_dim
    decoder = c.num_layers * (attention + 3 * d * c.intermediate_size + 2 * d) + d
    with torch.device('meta'):
        m = MHF(c)
    assert m.num_params() == (interface, decoder)
    assert sum(p.numel() for p in m.parameters()) == interface + decoder
    if path.stem == 'mhf_100m':
        assert interface + decoder == 138_731_073


def test_vocabulary_costs_no_parameter():
    """The paper's promise: four times the tokens, not one parameter more, and every old token keeps its signature."""
    small, large = random_model(vocab_size=300), random_model(vocab_size=1200)
    assert [p.shape for p in small.parameters()] == [p.shape for p in large.parameters()]
    assert torch.equal(large.signatures[:300], small.signatures)


def plain_loss(m, x, y, kind):
    """The twin of the lean head: all logits at once, gradients by autograd."""
    logits = [model_module.at_least_float32(o.T) for o in m.cascade(m.hidden(x).flatten(0, 1))]  # H of (n, B)
    y = y.flatten(0, 1)
    if kind == 'product':
        return sum(torch.nn.functional.cross_entropy(o, y[:, i]) for i, o in enumerate(logits))
    scores = sum(o[:, m.signatures[:, i]] for i, o in enumerate(logits)).masked_fill(~m.is_token, -math.inf)
    target = sum(o.gather(1, y[:, i : i + 1])[:, 0] for i, o in enumerate(logits))
    return (scores.logsumexp(-1) - target).mean()


def loss_and_gradients(m, loss):
    m.zero_grad()
    loss.backward()
    return {'loss': loss.detach().clone()} | {k: p.grad.clone() for k, p in m.named_parameters()}


@pytest.mark.parametrize('kind', ['exact', 'product'])
@pytest.mark.parametrize(
    'changes', [{}, dict(num_hashes=1, num_buckets=400), dict(num_hashes=0), dict(vocab_size=70, pad_id=69)]
)
def test_lean_head_equals_plain(kind, changes):
    """A chunk is lost or counted twice, or a formula of the hand-made gradients is wrong."""
    m = random_model(loss=kind, **changes)
    m.head_chunk = 7
    s = m.signatures[torch.randint(0, m.config.vocab_size, (3, 41))]
    x, y = s[:, :-1], s[:, 1:]
    plain = loss_and_gradients(m, plain_loss(m, x, y, kind if changes != dict(num_hashes=0) else 'product'))
    lean = loss_and_gradients(m, m.train_loss(x, y))
    largest = max(g.abs().max() for g in plain.values())  # some gradients are 0 but for rounding: the gate's last bias

    def agree(ours):
        return all((ours[k] - plain[k]).abs().max() < 1e-10 * max(plain[k].abs().max(), 1e-3 * largest) for k in plain)

    print(max((lean[k] - plain[k]).abs().max() / max(plain[k].abs().max(), 1e-3 * largest) for k in plain).item())
    assert agree(lean)
    with torch.no_grad():
        assert torch.allclose(m.train_loss(x, y), plain['loss'], rtol=1e-12)
    half = loss_and_gradients(m, m.train_loss(x, y) / 2 + m.train_loss(x, y) / 2)  # accumulation
    assert agree(half)


def test_lean_head_gradcheck():
    """The gradients do not belong to the loss."""
    m = random_model(vocab_size=30, num_buckets=12)
    m.head_chunk = 4
    y = m.signatures[torch.randint(0, 30, (6,))]
    h = torch.randn(6, m.config.hidden_size, dtype=torch.float64, requires_grad=True)

    class Fresh(
        torch.autograd.Function
    ):  # gradcheck goes backward several times, the head only once: a new one each time
        @staticmethod
        def forward(ctx, h):
            ctx.h = h
            return m.head_loss(h, y)

        @staticmethod
        def backward(ctx, scale):
            with torch.enable_grad():
                h = ctx.h.detach().requires_grad_()
                return torch.autograd.grad(m.head_loss(h, y), h, scale)

    for m.config.loss in ('exact', 'product'):
        assert torch.autograd.gradcheck(Fresh.apply, h)
    loss = m.head_loss(h, y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='one backward pass'):
        loss.backward()


@pytest.mark.parametrize('kind', ['exact', 'product'])
def test_lean_head_in_bfloat16(kind):
    """Under autocast the lean head rounds where the plain one does not (the one-hot term, the sums over chunks)."""
    m = random_model(dtype=torch.float32, loss=kind)
    s = m.signatures[torch.randint(0, 300, (8, 33))]
    x, y = s[:, :-1], s[:, 1:]
    m.double()
    reference = loss_and_gradients(m, plain_loss(m, x, y, kind))
    m.float()
    m.head_chunk = 50
    with torch.autocast('cpu', torch.bfloat16):
        lean, plain = loss_and_gradients(m, m.train_loss(x, y)), loss_and_gradients(m, plain_loss(m, x, y, kind))
    for name in ('embed.weight', 'mixers.0.0.weight', 'norm.weight'):
        error = [(g[name].double() - reference[name]).norm() / reference[name].norm() for g in (lean, plain)]
        print(f'{kind}, {name}: relative error lean {error[0]:.2e}, plain {error[1]:.2e}')
        assert error[0] < 1.1 * error[1] + 1e-3, (name, error)


def test_lean_head_composes():
    """torch.compile of the rest, activation checkpointing or a chunk larger than the batch change the gradients."""
    m = random_model()
    s = m.signatures[torch.randint(0, 300, (2, 9))]
    x, y = s[:, :-1], s[:, 1:]
    plain = loss_and_gradients(m, plain_loss(m, x, y, 'exact'))
    for m.head_chunk, m.activation_checkpointing, compiled in (
        (5, True, False),
        (10**6, False, False),
        (5, False, True),
    ):
        if compiled:
            m.compile(backend='aot_eager')
        lean = loss_and_gradients(m, m(x, y))
        assert all((lean[k] - plain[k]).abs().max() < 1e-10 for k in plain)


def test_activation_checkpointing():
    """Activations are kept although they need not be, or computed again to another gradient."""
    m, calls = random_model(), []
    m.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
    x = m.signatures[torch.arange(20)[None]]
    straight = loss_and_gradients(m, m(x[:, :-1], x[:, 1:]))
    assert len(calls) == 1
    m.activation_checkpointing = True
    again = loss_and_gradients(m, m(x[:, :-1], x[:, 1:]))
    assert len(calls) == 3
    assert_same(straight, again)


def test_no_target_is_refused():
    """A batch without targets gives a loss of NaN, which would reach the weights."""
    m = random_model()
    x = m.signatures[torch.zeros(2, 0, dtype=torch.long)]
    with pytest.raises(InputError, match=r'targets \(2, 0, 3\)'):
        m.train_loss(x, x)
    with pytest.raises(InputError, match='inputs'):
        m.train_loss(m.signatures[None, :4], m.signatures[None, :3])


def test_vocabulary_grows_under_an_optimizer():
    """New tokens cost a parameter, or the optimizer made before them no longer trains the model."""
    tokens = [f'piece{i}' for i in range(300)]
    m = random_model()
    old = m.signatures.numpy()
    new = extend_table(old, tokens[:100], m.config.num_buckets)
    optimizer, before = torch.optim.AdamW(m.parameters(), lr=3e-2), {k: p.data_ptr() for k, p in m.named_parameters()}
    m.extend_vocabulary(new)
    assert before == {k: p.data_ptr() for k, p in m.named_parameters()} and m.config.vocab_size == 400
    ids = torch.randint(300, 400, (2, 9))
    s = m.signatures[ids]
    for _ in range(60):
        loss = m.train_loss(s[:, :-1], s[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 and (m.log_probs(ids)[:, :-1].argmax(-1) == ids[:, 1:]).float().mean() > 0.9
    gapped = MHF(m.config, new, gaps=[7])
    gapped.extend_vocabulary(extend_table(new, ['one more'], m.config.num_buckets))
    assert not gapped.is_token[7] and gapped.is_token[400]
    for table, model in ((old[:200], m), (new[::-1], m), (np.arange(500)[:, None], random_model(num_hashes=0))):
        with pytest.raises(InputError, match='rows'):
            model.extend_vocabulary(table)


def test_the_table_may_grow_in_place():
    """The head keeps an index of the old table after the table has changed."""
    m = random_model()
    ids = torch.randint(0, 300, (1, 4))
    m.log_probs(ids)
    m.signatures[5:] = m.signatures[5:].flip(0)
    p = m.log_probs(ids).exp()
    o = m.bucket_logits(ids)
    scores = sum(o[..., i, :][..., m.signatures[:, i]] for i in range(3))
    assert torch.allclose(p, scores.softmax(-1))


@pytest.mark.parametrize('H', [0, 1, 3])
def test_log_probs_are_the_renormalised_product(H):
    """P(w) is not the product of the coordinates' probabilities, renormalised over the real tokens."""
    m = random_model(num_hashes=H, num_buckets=400 if H == 1 else 40)
    ids = torch.randint(0, 300, (2, 5))
    p = torch.stack([o.softmax(-1) for o in m.bucket_logits(ids).unbind(2)], 2)
    product = torch.stack([math.prod(p[..., i, s] for i, s in enumerate(row)) for row in m.signatures.tolist()], -1)
    assert torch.allclose(m.log_probs(ids), (product / product.sum(-1, keepdim=True)).log(), atol=1e-10)
    x, y = m.signatures[ids[:, :-1]], m.signatures[ids[:, 1:]]
    m.head_chunk = 3
    paper, exact = m.nll(x, y)
    assert torch.allclose(exact, -m.log_probs(ids)[:, :-1].gather(2, ids[:, 1:, None])[..., 0], atol=1e-10)
    assert torch.allclose(paper.mean(), plain_loss(m, x, y, 'product'), atol=1e-10)


def test_norms_and_angles_keep_float32():
    """Norms or RoPE angles are computed in less than float32: under bfloat16, positions beyond 256 would blur."""
    m = random_model(dtype=torch.float32, block_size=600)
    x = m.signatures[torch.randint(0, 300, (1, 600))]
    h = m.hidden(x)
    with torch.autocast('cpu', torch.bfloat16):
        assert m.hidden(x).dtype == torch.float32
    assert relative(h.double(), m.double().hidden(x)) < 1e-4
    # on bfloat16 input only the result is rounded
    norm, v = model_module.RMSNorm(64, 1e-6), torch.randn(500, 64).bfloat16()
    exact = v.float() / (v.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (norm(v) != exact.bfloat16()).float().mean() < 0.01
    cos, sin = model_module.rope_angles(torch.arange(500), m.config, torch.float32)
    q = torch.randn(1, 1, 500, m.config.head_dim).bfloat16()
    turned = torch.view_as_complex(torch.stack(q.float().chunk(2, -1), -1)) * torch.complex(cos, sin)
    assert (
        model_module.rotate(q, (cos, sin)) != torch.cat([turned.real, turned.imag], -1).bfloat16()
    ).float().mean() < 0.01


@pytest.mark.parametrize('H, groups', [(3, 2), (0, 1), (1, 4)])
def test_cached_generation_equals_uncached(H, groups):
    """The KV cache: a wrong position, an off-by-one, or what happens when the context is full."""
    m = random_model(num_hashes=H, num_buckets=400 if H == 1 else 40, num_kv_heads=4 // groups)
    for length in (1, 5, 23, 24, 40):  # the context has 24
        ids = torch.randint(0, 300, (3, length))
        fast = m.generate(ids, 40, temperature=0)
        assert torch.equal(fast, m.generate(ids, 40, temperature=0, use_cache=False))
        assert torch.equal(fast[:, :length], ids) and fast.shape == (3, length + 40)
    ids = fast = torch.randint(0, 300, (2, 4))
    for _ in range(20):  # within the context it is plain arg max
        ids = torch.cat([ids, m.log_probs(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(m.generate(fast, 20, temperature=0), ids)


def test_sampling_follows_p():
    """Sampling is from something else than P(w); top_k, top_p or temperature cut wrongly."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None]
    g = torch.Generator().manual_seed(0)

    def shares(**options):
        drawn = sample_token(logits.expand(20000, -1), generator=g, **options)
        return torch.bincount(drawn, minlength=4) / 20000

    assert torch.allclose(shares(), logits[0].exp(), atol=0.02)
    assert torch.allclose(shares(top_k=2), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.02)
    assert torch.allclose(shares(top_p=0.6), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.02)
    assert torch.allclose(shares(top_p=0.4), torch.tensor([1.0, 0, 0, 0]))
    assert torch.allclose(shares(temperature=0.5), (2 * logits[0]).softmax(0), atol=0.02)
    assert shares(temperature=0)[0] == 1 and shares(top_k=1)[0] == 1


# -----------------------------------------------------------------------------
# the scripts, as a user runs them


def run(script, *args, cwd, torchrun=None, **environment):
    command = [
        sys.executable,
        *(['-m', 'torch.distributed.run', *torchrun] if torchrun else []),
        str(REPO / script),
        *args,
    ]
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
    env |= dict(HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', **environment)
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, env=env, stdin=subprocess.DEVNULL
    )


def ok(*args, **kwargs):
    done = run(*args, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


CONFIG = """
# the small run of these tests
_d = 32  # a name of the file's own
out_dir = 'out'
dataset = 'docs.jsonl'
data_dir = 'bins'
val_fraction = 0.1
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = _d // 2
hidden_size = _d
intermediate_size = 64
num_hashes = 3
num_buckets = 256
block_size = 64
batch_size = 8
micro_batch_size = 4
learning_rate = 1e-2
max_steps = 24
warmup_steps = 4
eval_interval = 12
device = 'cpu'
dtype = 'float32'
max_new_tokens = 20
num_samples = 2
"""


def real_documents():
    """30 modules of the standard library: real text that every machine has."""
    paths = sorted(Path(sysconfig.get_paths()['stdlib']).glob('*.py'))
    return [
        t for t in (p.read_text(encoding='utf-8', errors='replace').strip() for p in paths) if 1000 < len(t) < 12000
    ][:30]


def write_jsonl(path, texts):
    path.write_text(''.join(json.dumps({'text': t, 'id': i}) + '\n' for i, t in enumerate(texts)), encoding='utf-8')


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """A folder with documents, a config, bins and a trained checkpoint."""
    folder = tmp_path_factory.mktemp('trained')
    write_jsonl(folder / 'docs.jsonl', real_documents())
    (folder / 'cfg.py').write_text(CONFIG)
    ok('prepare.py', 'cfg.py', '--num_workers=1', cwd=folder)
    ok('train.py', 'cfg.py', cwd=folder)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'copy')
    return tmp_path / 'copy'


def events(folder, out='out'):
    return [json.loads(line) for line in (folder / out / 'log.jsonl').read_text().splitlines()]


def steps(folder, out='out'):
    return [
        {k: e[k] for k in ('step', 'tokens', 'loss', 'lr', 'grad_norm')} for e in events(folder, out) if 'loss' in e
    ]


def weights(folder, out='out'):
    return torch.load(folder / out / 'ckpt.pt', weights_only=True)


def save_edited(state, path):
    """A checkpoint that was changed, with digests that fit."""
    state['sha256'] = {k: model_module.digest_of_state(v) for k, v in state.items() if k != 'sha256'}
    torch.save(state, path)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (dict, list, tuple)):
        assert len(a) == len(b)
        for k in a if isinstance(a, dict) else range(len(a)):
            assert_same(a[k], b[k])
    else:
        assert a == b


def ids_of(rows, table):
    """Signature rows -> token ids."""
    index = {row.tobytes(): i for i, row in enumerate(table)}
    return [index[row.tobytes()] for row in np.ascontiguousarray(rows)]


def test_bins_hold_the_text(trained, mistral):
    """Documents are lost, reordered, cut, or begin without bos; or meta.json counts something else."""
    meta, docs = json.loads((trained / 'bins/meta.json').read_text()), real_documents()
    table = np.load(trained / 'bins/signatures.npy')
    expected = dict(
        train=[t for i, t in enumerate(docs, 1) if i % 10], val=[t for i, t in enumerate(docs, 1) if i % 10 == 0]
    )
    for part, texts in expected.items():
        rows = np.load(trained / f'bins/{part}_000000.bin')
        ids = ids_of(rows, table)
        assert documents_of(ids, mistral) == texts
        summary = meta['splits'][part]
        assert (summary['tokens'], summary['documents']) == (len(rows), len(texts))
        assert summary['bytes'] == sum(len(t.encode()) for t in texts)
        assert summary['shards'] == [
            dict(file=f'{part}_000000.bin', tokens=len(rows), digest=mmh3.hash_bytes(rows.tobytes(), 0, True).hex())
        ]


def test_every_format_gives_the_same_bins(trained, tmp_path):
    """A reader of one format changes or drops text, or the order depends on the number of workers."""
    docs = real_documents()
    raw = (trained / 'docs.jsonl').read_bytes()
    (tmp_path / 'a.jsonl').write_bytes(raw)
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(raw))
    (tmp_path / 'a.jsonl.xz').write_bytes(lzma.compress(raw))
    half = raw.index(b'\n', len(raw) // 2) + 1  # two frames, as pigz-like tools write them
    (tmp_path / 'a.jsonl.zst').write_bytes(b''.join(zstandard.compress(p) for p in (raw[:half], raw[half:])))
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict(
        text=docs,
        id=[f'<urn:uuid:{i}>' for i in range(len(docs))],
        dump=['CC'] * len(docs),
        score=[3.5] * len(docs),
        int_score=[4] * len(docs),
    )
    half = len(docs) // 2
    pq.write_table(pa.table({k: v[:half] for k, v in columns.items()}), tmp_path / 'p0.parquet', row_group_size=4)
    pq.write_table(pa.table({k: v[half:] for k, v in columns.items()}), tmp_path / 'p1.parquet', row_group_size=7)
    (tmp_path / 'txt').mkdir()
    for i, text in enumerate(docs):
        (tmp_path / f'txt/{i:02}.txt').write_text('\n ' + text + ' \n', encoding='utf-8', newline='')
    digests = {}
    sources = ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.xz', 'a.jsonl.zst', 'p0.parquet,p1.parquet', 'txt/*.txt']
    for k, name in enumerate(sources):
        ok(
            'prepare.py',
            f'--dataset={name}',
            f'--data_dir=d{k}',
            '--num_hashes=0',
            '--val_fraction=0.1',
            f'--num_workers={1 + k % 2}',
            cwd=tmp_path,
        )
        digests[name] = [
            hashlib.sha256((tmp_path / f'd{k}/{p}_000000.bin').read_bytes()).hexdigest() for p in ('train', 'val')
        ]
    assert len({str(d) for d in digests.values()}) == 1, digests


def test_a_single_text_file(tmp_path, mistral):
    """nanoGPT's first data set is one file: it must give both splits, without loss, and invalid UTF-8 must be counted."""
    text = 'The quick brown fox.\n' * 400
    (tmp_path / 'input.txt').write_bytes(text.encode() + b'\xff\xfe broken \xe2\x82')
    done = ok('prepare.py', '--dataset=input.txt', '--data_dir=d', '--num_hashes=0', cwd=tmp_path)
    assert 'input.txt: invalid utf8 bytes 4' in done.stdout
    decoded = [mistral.decode(np.load(tmp_path / f'd/{p}_000000.bin')[:, 0]) for p in ('train', 'val')]
    assert '\n'.join(decoded) == text + '\ufffd\ufffd broken \ufffd' and 20 < len(decoded[1]) < 200


def test_a_large_text_file_is_read_in_pieces(tmp_path, monkeypatch):
    """A text file of many GB must not have to fit in memory, and its pieces must be the whole text."""
    monkeypatch.setattr(prepare, 'PIECE_CHARS', 100)
    text = ''.join(f'line {i} ü\n' for i in range(500)) + 'x' * 950
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
    source = prepare.Source(str(tmp_path / 'a.txt'))
    pieces = [text for text, wrong in source.read(0)]
    assert pieces[3:] == [text for text, wrong in source.read(0, skip=3)]
    assert ''.join(pieces) == text and max(map(len, pieces)) <= 200 and pieces[0].endswith('\n')


def test_prepare_again(copy):
    """Running prepare.py twice makes the data twice, or leaves half-written files behind."""
    before = snapshot(copy)
    assert 'prepared already' in ok('prepare.py', 'cfg.py', cwd=copy).stdout
    assert snapshot(copy) == before and not list((copy / 'bins').glob('*.tmp'))


def documents_of(ids, tok):
    """Token ids -> the texts between their bos."""
    starts = [i for i, t in enumerate(ids) if t == tok.bos] + [len(ids)]
    return [tok.decode(ids[a + 1 : b]) for a, b in zip(starts, starts[1:])]


def bins_of(folder):
    """{file: its bytes} of the shards in a folder."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob('*.bin*'))}


def library_texts(size):
    """About `size` characters of the standard library's source, as [text]."""
    texts, got = [], 0
    for path in sorted(Path(sysconfig.get_paths()['stdlib']).glob('*.py')):
        texts.append(path.read_text(encoding='utf-8', errors='replace'))
        got += len(texts[-1])
        if got > size:
            break
    return texts


def test_kill_prepare(tmp_path):
    """A killed prepare.py begins again from nothing, loses or repeats text, or leaves other bytes; MHF_KILLS=20 kills twenty times."""
    kills, seed = int(os.environ.get('MHF_KILLS', 3)), int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    texts = library_texts(5e6)
    texts.insert(3, ''.join(texts[:40]))  # longer than a piece
    write_jsonl(tmp_path / 'docs.jsonl', texts * 2)
    args = [
        '--dataset=docs.jsonl',
        '--num_buckets=2048',
        '--num_hashes=3',
        '--shard_tokens=30000',
        '--val_fraction=0.01',
    ]
    begin = time.monotonic()
    ok('prepare.py', *args, '--data_dir=straight', '--num_workers=1', cwd=tmp_path)
    length, wanted = time.monotonic() - begin, bins_of(tmp_path / 'straight')
    draw, survived = np.random.default_rng(seed), 0
    while survived < kills:
        moment = draw.uniform(0.6 * length, length)  # before, it still imports
        command = [sys.executable, REPO / 'prepare.py', *args, '--data_dir=killed']
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=moment)
        over = process.poll() is not None
        assert not over or process.returncode == 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if over:  # it finished: from the beginning again
            assert bins_of(tmp_path / 'killed') == wanted
            shutil.rmtree(tmp_path / 'killed')
            continue
        survived += 1
        there = bins_of(tmp_path / 'killed')
        digest = hashlib.sha256(b''.join(there.values())).hexdigest()[:12]
        print(f'seed {seed}, killed after {moment:.2f} s of {length:.2f}: {len(there)} files, sha256 {digest}')
    ok('prepare.py', *args, '--data_dir=killed', '--num_workers=2', cwd=tmp_path)
    assert bins_of(tmp_path / 'killed') == wanted and len(wanted) > 20
    metas = [json.loads((tmp_path / d / 'meta.json').read_text()) for d in ('straight', 'killed')]
    assert metas[0] == metas[1]
    assert not [p for p in (tmp_path / 'killed').iterdir() if p.suffix == '.tmp' or p.name.startswith('.')]


def run_prepare(**changes):
    prepare.main(configurator.declared('prepare.py') | dict(num_hashes=0, val_fraction=0.1, num_workers=1) | changes)


def test_what_is_dropped_and_why(tmp_path, mistral, capsys, monkeypatch):
    """A filter drops the wrong documents, an unreadable end of a file ends the run though it may be skipped, or nothing is counted."""
    monkeypatch.setattr(prepare, 'PIECE_CHARS', 2000)
    docs = [dict(text=f'document number {i}', score=i / 10) for i in range(40)]
    docs += [docs[7], dict(text=' \n', score=9), dict(text='x' * 5000 + ' y' * 300, score=9), dict(text='a', score=9)]
    lines = ''.join(json.dumps(d) + '\n' for d in docs)
    (tmp_path / 'a.jsonl').write_text(lines.replace('{"text": "document number 3"', '{"text": oops', 1))
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(lines.encode())[:-200])
    files, out = f'{tmp_path}/a.jsonl,{tmp_path}/b.jsonl.gz', str(tmp_path / 'd')
    with pytest.raises(InputError, match='line 4: not JSON'):
        run_prepare(dataset=files, data_dir=out)
    assert not Path(out).exists()
    run_prepare(dataset=files, data_dir=out, on_error='skip')
    said = capsys.readouterr().out
    wrong = prepare.read_meta(Path(out))['sources'][0]['wrong']
    assert wrong['unreadable'] == 2 and wrong['empty'] == 1
    assert all(f'{k.replace("_", " ")} {n}' in said for k, n in wrong.items())
    ids = np.concatenate([np.load(f'{out}/{p}_000000.bin')[:, 0] for p in prepare.SPLITS])
    texts = mistral.decode(ids.tolist())
    assert [texts.count(f'number {i}') for i in (4, 7)] == [1, 2] and 'x' * 900 in texts


def test_parts_and_mixtures(tmp_path, mistral):
    """Machines that share the work read the same files or lose some; a mixture has other shares than were asked for."""
    texts = [t[k : k + 2000] for t in library_texts(2e5) for k in range(0, len(t), 2000)]
    for i in range(4):
        write_jsonl(tmp_path / f'{i}.jsonl', texts[i::4])
    both = dict(dataset=f'{tmp_path}/*.jsonl', data_dir=str(tmp_path / 'd'), shard_tokens=5000)
    with pytest.raises(InputError, match=r'5'):
        run_prepare(**both, part='0/5')
    run_prepare(**both, part='1/2')
    with pytest.raises(InputError, match='lacks part 0/2'):
        prepare.read_meta(tmp_path / 'd')
    with pytest.raises(InputError, match='does not go with'):
        run_prepare(**both)
    run_prepare(**both, part='0/2')
    meta = prepare.read_meta(tmp_path / 'd')
    rows = [prepare.Bins(tmp_path / 'd', meta['splits'][p], 1) for p in prepare.SPLITS]
    for r in rows:
        r.verify()
        whole = np.concatenate(r.shards)
        assert len(r) == len(whole) and (r[0 : len(r)] == whole).all()
        assert all((r[a:b] == whole[a:b]).all() for a, b in ((0, 5001), (4999, 10002), (len(r) - 9, len(r) + 9)))
    said = [t for r in rows for t in documents_of(r[0 : len(r)][:, 0].tolist(), mistral)]
    stripped = [t.strip() for t in texts if t.strip()]
    assert sorted(said) == sorted(stripped)

    run_prepare(dataset=f'{tmp_path}/0.jsonl', data_dir=str(tmp_path / 'large'), tokenizer='tekken')
    ids = np.load(tmp_path / 'large/train_000000.bin')
    assert ids.dtype == np.uint32 and ids.max() > 65535

    mixed = f'{tmp_path}/0.jsonl@4e3,{tmp_path}/1.jsonl@2e3'
    run_prepare(dataset=mixed, data_dir=str(tmp_path / 'm'))
    meta = prepare.read_meta(tmp_path / 'm')
    longest = max(len(i) for i in mistral.encode(stripped)) + 1
    for entry, wanted in zip(meta['sources'], (4000, 2000)):
        assert wanted <= entry['tokens'] < wanted + longest
    assert meta['splits']['train']['tokens'] == sum(e['tokens'] for e in meta['sources'])
    for bad in ('a.jsonl@1e3,b.jsonl', 'a.jsonl@many,b.jsonl@5', '@5'):
        with pytest.raises(InputError, match='number of tokens'):
            run_prepare(dataset=bad, data_dir=str(tmp_path / 'n'))


def test_token_ids_are_signed_later(copy):
    """Token ids that train.py signs as it reads give other batches than bins that prepare.py signed."""
    ok('prepare.py', 'cfg.py', '--num_hashes=0', '--data_dir=ids', '--shard_tokens=3000', cwd=copy)
    ok('prepare.py', 'cfg.py', '--shard_tokens=3000', '--data_dir=straight', cwd=copy)
    short = ('cfg.py', '--max_steps=4', '--lr_decay_steps=24', '--eval_interval=2')
    for name in ('bins', 'ids', 'straight'):
        ok('train.py', *short, f'--data_dir={name}', f'--out_dir=by_{name}', cwd=copy)
    for other in ('by_ids', 'by_straight'):
        assert_same(*[{k: weights(copy, o)[k] for k in ('model', 'optimizer')} for o in ('by_bins', other)])
    done = run('train.py', *short, '--data_dir=ids', '--out_dir=x', '--tokenizer=tekken', cwd=copy)
    assert done.returncode == 1 and 'tokenizer=mistral' in done.stderr


def fineweb_folder(folder, texts, files=3):
    """A folder shaped like FineWeb-Edu's repository: a README that names its configurations, parquet files in row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / 'sample/10BT').mkdir(parents=True)
    (folder / 'README.md').write_text(
        '---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n'
    )
    for i in range(files):
        some = texts[i::files]
        columns = dict(
            text=some, id=['x'] * len(some), dump=['CC-MAIN'] * len(some), url=['http://'] * len(some),
            language_score=[0.9] * len(some), token_count=[9] * len(some), score=[2.5] * len(some), int_score=[3] * len(some),
        )  # fmt: skip
        pq.write_table(pa.table(columns), folder / f'sample/10BT/{i:03}_00000.parquet', row_group_size=5)


def test_hub_parquet_and_its_failures(tmp_path, mistral, monkeypatch):
    """Rows are lost or read twice where the network fails and is tried again, or a failure that lasts loses what was read."""
    texts = [f'{i} {t[:400]}' for i, t in enumerate(library_texts(1e6))]
    fineweb_folder(tmp_path / 'hub', texts)
    monkeypatch.setitem(prepare.HUB, 'fineweb-edu', (str(tmp_path / 'hub'), ('sample-10BT',), 'sample-10BT'))
    monkeypatch.setattr(prepare, 'PAUSES', (0, 0))
    monkeypatch.setattr(prepare, 'BATCH_CHARS', 2000)
    run_prepare(dataset='fineweb-edu', data_dir=str(tmp_path / 'good'))
    wanted = bins_of(tmp_path / 'good')
    ids = np.load(tmp_path / 'good/train_000000.bin')[:, 0].tolist()
    in_order = [t.strip() for i in range(3) for t in texts[i::3]]
    assert documents_of(ids, mistral) == [t for i, t in enumerate(in_order, 1) if i % 10]

    calls, real = [], prepare.Source._parquet
    down = lambda n: n % 7 == 3

    def parquet(self, path, skip):
        for row in real(self, path, skip):
            calls.append(1)
            if down(len(calls)):
                raise ConnectionError('the network is down')
            yield row

    monkeypatch.setattr(prepare.Source, '_parquet', parquet)
    run_prepare(dataset='fineweb-edu', data_dir=str(tmp_path / 'shaky'))
    assert bins_of(tmp_path / 'shaky') == wanted and any(map(down, range(len(calls))))
    calls.clear()
    down = lambda n: n > 25
    with pytest.raises(InputError, match='the network does not give it.*tried 3 times'):
        run_prepare(dataset='fineweb-edu', data_dir=str(tmp_path / 'broken'))
    kept = json.loads((tmp_path / 'broken/meta.json').read_text())
    assert kept['splits']['train']['tokens'] > 100 and not kept['complete']
    monkeypatch.undo()
    monkeypatch.setitem(prepare.HUB, 'fineweb-edu', (str(tmp_path / 'hub'), ('sample-10BT',), 'sample-10BT'))
    monkeypatch.setattr(prepare, 'BATCH_CHARS', 2000)
    run_prepare(dataset='fineweb-edu', data_dir=str(tmp_path / 'broken'))
    assert bins_of(tmp_path / 'broken') == wanted
    with pytest.raises(InputError, match='which language'):
        prepare.Source('fineweb-2')


def test_two_prepares_at_once(tmp_path):
    """Two processes write into the same folder."""
    write_jsonl(tmp_path / 'docs.jsonl', library_texts(2e5))
    with prepare.locked(tmp_path / 'd', 'meta'):
        with pytest.raises(InputError, match='another prepare.py is at work'):
            run_prepare(dataset=str(tmp_path / 'docs.jsonl'), data_dir=str(tmp_path / 'd'))
    run_prepare(dataset=str(tmp_path / 'docs.jsonl'), data_dir=str(tmp_path / 'd'))


def test_disk_full_while_preparing(tmp_path, monkeypatch):
    """A full disk loses the shards that were whole, or the same command cannot go on."""
    write_jsonl(tmp_path / 'docs.jsonl', library_texts(1e6))
    settings = dict(dataset=str(tmp_path / 'docs.jsonl'), shard_tokens=20000)
    monkeypatch.setattr(prepare, 'BATCH_CHARS', 20000)
    run_prepare(**settings, data_dir=str(tmp_path / 'good'))
    real = prepare.Shards.write

    def write(self, rows):
        if len(self.state['shards']) >= 3:
            raise OSError(28, 'No space left on device')
        real(self, rows)

    monkeypatch.setattr(prepare.Shards, 'write', write)
    with pytest.raises(InputError, match='No space left.*the same command goes on'):
        run_prepare(**settings, data_dir=str(tmp_path / 'full'))
    assert len(json.loads((tmp_path / 'full/meta.json').read_text())['splits']['train']['shards']) >= 2
    monkeypatch.setattr(prepare.Shards, 'write', real)
    with pytest.raises(InputError, match='val_fraction'):
        run_prepare(**settings | dict(val_fraction=0.2), data_dir=str(tmp_path / 'full'))
    raw = (tmp_path / 'docs.jsonl').read_bytes()
    (tmp_path / 'docs.jsonl').write_bytes(raw + b'{"text": "one more"}')
    with pytest.raises(InputError, match='made_from differs'):
        run_prepare(**settings, data_dir=str(tmp_path / 'full'))
    (tmp_path / 'docs.jsonl').write_bytes(raw)
    run_prepare(**settings, data_dir=str(tmp_path / 'full'))
    assert bins_of(tmp_path / 'full') == bins_of(tmp_path / 'good')


def test_training_learns_and_reports(trained):
    """The loop does not learn, or its log, checkpoint or picture is missing something."""
    log = events(trained)
    train, val = [e for e in log if 'loss' in e], [e for e in log if 'val_loss' in e]
    assert [e['step'] for e in train] == list(range(1, 25)) and [e['step'] for e in val] == [12, 24]
    assert (
        set(train[0]) == {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_s'}
        and train[-1]['tokens'] == 24 * 8 * 64
    )
    assert train[-1]['loss'] < train[0]['loss'] - 1 and val[1]['val_loss'] < val[0]['val_loss']
    assert abs(train[0]['loss'] - math.log(32768)) < 0.5  # at first every token is about equally likely
    assert all(e['val_loss'] == e['val_nats'] for e in val)
    ckpt = weights(trained)
    assert (
        ckpt['step'] == 24 and ckpt['config']['num_buckets'] == 256 and not [k for k in ckpt['model'] if 'module' in k]
    )
    model, _ = MHF.from_checkpoint(trained / 'out/ckpt.pt')
    matrices = sum(p.dim() >= 2 for p in model.parameters())
    groups = [(g['weight_decay'], len(g['params'])) for g in ckpt['optimizer']['param_groups']]
    assert groups == [(0.1, matrices), (0.0, len(list(model.parameters())) - matrices)]
    assert (trained / 'out/loss.png').read_bytes()[:4] == b'\x89PNG' and (trained / 'out/ckpt_best.pt').exists()


def test_learning_rate_schedule(trained):
    """The schedule is not the paper's: linear from 0 to the maximum, cosine to 0."""
    lr = [e['lr'] for e in steps(trained)]
    expected = [1e-2 * t / 4 if t < 4 else 1e-2 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 20)) for t in range(24)]
    assert lr == pytest.approx(expected, abs=1e-15) and lr[0] == 0


def test_validation_is_the_normalised_likelihood(trained):
    """val_nats or val_bpb is not what the model assigns to the held-out text."""
    model, _ = MHF.from_checkpoint(trained / 'out/ckpt.pt')
    ids = torch.tensor(ids_of(np.load(trained / 'bins/val_000000.bin'), np.load(trained / 'bins/signatures.npy')))
    total = 0.0
    for b in range(0, len(ids) - 1, 64):
        row = ids[b : b + 65]
        total -= model.log_probs(row[None, :-1])[0].gather(1, row[1:, None]).sum().item()
    last = events(trained)[-1]
    size = json.loads((trained / 'bins/meta.json').read_text())['splits']['val']['bytes']
    assert last['val_nats'] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert last['val_bpb'] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_the_paper_s_loss(copy):
    """--loss=product does not train or report the sum over coordinates."""
    ok('train.py', 'cfg.py', '--out_dir=b', '--loss=product', '--max_steps=12', cwd=copy)
    assert abs(steps(copy, 'b')[0]['loss'] - 3 * math.log(256)) < 0.5  # at first every bucket is equally likely
    last = events(copy, 'b')[-1]
    assert last['val_loss'] > last['val_nats'] + 3


def patched(patch, *args, cwd, **environment):
    """train.py after the statements `patch`, which may change MHF or the library."""
    code = f'import runpy, sys; sys.path.insert(0, {str(REPO)!r}); sys.argv[0] = {str(REPO / "train.py")!r}\n{patch}\n'
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    env = os.environ | dict(OMP_NUM_THREADS='1', **environment)
    return subprocess.run(
        [sys.executable, '-c', code, *args], cwd=cwd, capture_output=True, text=True, timeout=300, env=env
    )


# does something in the n-th forward pass
IN_FORWARD = """
import os, signal, torch
from model import MHF
passes, head_loss = [], MHF.head_loss
@torch.compiler.disable
def counted(self, h, y):
    passes.append(len(passes))
    if len(passes) == {n}:
        {do}
    return head_loss(self, h, y)
MHF.head_loss = counted
"""


@pytest.mark.parametrize('compiled', [False, True], ids=['plain', 'compiled'])
def test_resume_is_exact(copy, compiled):
    """A run that was stopped, in the middle of gradient accumulation and of an epoch, and resumed, twice in a row and with
    evaluation and samples in between, ends with other weights, optimizer state or log than a straight one."""
    if compiled and not shutil.which('g++'):
        pytest.skip('torch.compile needs a C++ compiler')
    write_jsonl(copy / 'few.jsonl', [t[:5000] for t in real_documents()[:3]])
    data = ('cfg.py', '--dataset=few.jsonl', '--data_dir=few')
    ok('prepare.py', *data, '--num_workers=1', cwd=copy)
    args = (*data, '--micro_batch_size=2', '--eval_interval=8', '--init_from=auto', f'--compile={compiled}')
    ok('train.py', *args, '--out_dir=a', cwd=copy)
    blocks = (json.loads((copy / 'few/meta.json').read_text())['splits']['train']['tokens'] - 1) // 64
    assert 3 < 24 * 8 / blocks and blocks % 8  # three epochs and more, whose borders lie within a batch
    borders = (blocks // 8, 2 * blocks // 8)  # the steps that cross into the second and the third
    for stop_at in borders[: 1 if compiled else 2]:
        first = max(e['step'] for e in events(copy, 'b')) if (copy / 'b').exists() else 0
        third = IN_FORWARD.format(n=4 * (stop_at - first) + 3, do='os.kill(os.getpid(), signal.SIGTERM)')
        done = patched(third, *args, '--out_dir=b', cwd=copy)
        assert done.returncode == 143 and weights(copy, 'b')['step'] == stop_at + 1, done.stderr[-3000:]
    if not compiled:
        ok('eval.py', '--out_dir=b', '--tasks=bits_per_byte', '--text=few.jsonl', '--device=cpu', cwd=copy)
        ok('sample.py', 'cfg.py', '--out_dir=b', cwd=copy)
    with open(copy / 'b/log.jsonl', 'a') as f:
        f.write('{"step": 13, "lo')  # as a crash leaves it
    ok('train.py', *args, '--out_dir=b', cwd=copy)
    assert steps(copy, 'b') == steps(copy, 'a')
    a, b = weights(copy, 'a'), weights(copy, 'b')
    for key in ('model', 'optimizer', 'step', 'best_val', 'recent'):
        assert_same(a[key], b[key])
    assert b['recent'] == [s['loss'] for s in steps(copy, 'b')]  # what a spike is measured by


def test_validation_changes_nothing(copy):
    """How often a run validates must not change what it learns."""
    ok('train.py', 'cfg.py', '--out_dir=b', '--eval_interval=3', '--max_steps=9', '--lr_decay_steps=24', cwd=copy)
    assert steps(copy, 'b') == steps(copy)[:9]


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def test_any_world_size_sees_the_same_batches(copy):
    """2 or 4 processes, two machines or another micro-batch train on other data or take another mean than one process."""
    short = ('cfg.py', '--max_steps=6', '--lr_decay_steps=24', '--eval_interval=6')
    ok('train.py', *short, '--out_dir=micro', '--micro_batch_size=2', cwd=copy)
    ok('train.py', *short, '--out_dir=two', cwd=copy, torchrun=['--standalone', '--nproc_per_node=2'])
    four = ['--standalone', '--nproc_per_node=4']
    ok('train.py', *short, '--out_dir=four', '--micro_batch_size=2', cwd=copy, torchrun=four)
    nodes = ['--nnodes=2', '--nproc_per_node=1', '--master_addr=127.0.0.1', f'--master_port={free_port()}']
    with ThreadPoolExecutor(2) as pool:
        agents = [
            pool.submit(run, 'train.py', *short, '--out_dir=nodes', cwd=copy, torchrun=[*nodes, f'--node_rank={k}'])
            for k in (0, 1)
        ]
    for agent in agents:
        assert agent.result().returncode == 0, agent.result().stderr[-3000:]
    val = [e for e in events(copy, 'micro') if 'val_loss' in e][-1]
    for out in ('micro', 'two', 'four', 'nodes'):
        for ours, reference in zip(steps(copy, out), steps(copy)):
            assert ours == pytest.approx(reference, rel=1e-4), out
        assert [e for e in events(copy, out) if 'val_loss' in e][-1] == pytest.approx(val, rel=1e-4)


def test_batches_are_a_permutation_without_replacement(copy):
    """Within an epoch a block comes twice, or epochs repeat the same order."""
    text = (REPO / 'train.py').read_text()
    body = text[text.index('def blocks_of') : text.index('def to_device')]
    scope = dict(np=np, permute=permute, batch_size=8, num_blocks=37, seed=1, first_step=5)
    exec(body, scope)
    stream = np.concatenate([scope['blocks_of'](s) for s in range(5, 45)])
    epochs = [stream[e * 37 : (e + 1) * 37] for e in range(8)]
    assert all(sorted(e) == list(range(37)) for e in epochs)
    assert len({e.tobytes() for e in epochs}) == 8


def test_non_finite_loss_stops_before_the_update(copy):
    """A run that diverges goes on, or overwrites its last good checkpoint with NaNs."""
    good = (copy / 'out/ckpt.pt').read_bytes()
    state = torch.load(copy / 'out/ckpt.pt', weights_only=True)
    state['model']['norm.weight'][0] = math.inf
    (copy / 'bad').mkdir()
    save_edited(state, copy / 'bad/ckpt.pt')
    before = (copy / 'bad/ckpt.pt').read_bytes()
    done = run('train.py', 'cfg.py', '--max_steps=30', '--init_from=resume', '--out_dir=bad', cwd=copy)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert re.search(r'error: step 24: loss nan.* bad/ckpt.pt is good, of step 24', done.stderr), done.stderr
    assert (copy / 'bad/ckpt.pt').read_bytes() == before and (copy / 'out/ckpt.pt').read_bytes() == good


def test_train_from_a_released_model(copy):
    """init_from=released:... starts from other weights, another architecture or another table."""
    model, _ = MHF.from_checkpoint(copy / 'out/ckpt.pt')
    write_released(copy / 'released', model, shards=2)
    # only the data has to be named: the architecture is the model's
    args = [
        '--init_from=released:released',
        '--data_dir=bins',
        '--block_size=64',
        '--batch_size=8',
        '--micro_batch_size=8',
        '--device=cpu',
        '--dtype=float32',
    ]
    ok('train.py', *args, '--max_steps=1', '--warmup_steps=0', '--learning_rate=1e-9', '--out_dir=b', cwd=copy)
    assert events(copy, 'b')[-1]['val_loss'] == pytest.approx(events(copy)[-1]['val_loss'], rel=1e-4)


def test_sample_from_the_checkpoint_alone(trained, tmp_path):
    """sample.py needs the bins or the config, does not repeat itself with the same seed, or mangles the prompt."""
    (tmp_path / 'x/y').mkdir(parents=True)
    shutil.copy(trained / 'out/ckpt.pt', tmp_path / 'x/y/ckpt.pt')
    args = ['--max_new_tokens=30', '--num_samples=2', '--seed=3', '--device=cpu']
    first = ok('sample.py', *args, '--start=def main(x=1):', cwd=tmp_path)
    assert 'x/y/ckpt.pt, step 24' in first.stderr and re.search(r'[\d.]+ tokens/s', first.stderr)
    assert first.stdout.count('def main(x=1):') == 2
    assert ok('sample.py', *args, '--start=def main(x=1):', cwd=tmp_path).stdout == first.stdout
    (tmp_path / 'prompt.txt').write_text('def main(x=1):')
    assert ok('sample.py', *args, '--start=FILE:prompt.txt', '--out_dir=x/y', cwd=tmp_path).stdout == first.stdout
    other = ok('sample.py', *args, '--temperature=0', '--start=word ' * 100, cwd=tmp_path)
    assert re.search(r'prompt has \d+ tokens, the context 64: its end is used', other.stderr)


def test_sample_from_a_released_model(trained, tmp_path):
    """--released samples from something else than the same weights in a checkpoint."""
    model, _ = MHF.from_checkpoint(trained / 'out/ckpt.pt')
    write_released(tmp_path / 'r', model)
    args = ['--max_new_tokens=12', '--num_samples=1', '--temperature=0', '--start=import', '--device=cpu']
    a = ok('sample.py', *args, f'--released={tmp_path}/r', cwd=tmp_path)
    b = ok('sample.py', *args, f'--out_dir={trained}/out', cwd=tmp_path)
    assert a.stdout.replace(str(tmp_path), '') == b.stdout


def test_standard_and_bfloat16(copy):
    """The Standard model does not go the same way through all scripts, or bfloat16 does not train."""
    flags = ['--num_hashes=0', '--data_dir=ids']
    ok('prepare.py', 'cfg.py', *flags, cwd=copy)
    assert np.load(copy / 'ids/train_000000.bin').shape[1] == 1
    ok(
        'train.py',
        'cfg.py',
        *flags,
        '--out_dir=std',
        '--dtype=bfloat16',
        '--max_steps=12',
        '--eval_interval=6',
        cwd=copy,
    )
    last = events(copy, 'std')[-1]
    assert last['val_loss'] == pytest.approx(last['val_nats'], rel=1e-5) and last['val_nats'] < math.log(32768) - 1
    assert 'std/ckpt.pt' in ok('sample.py', 'cfg.py', '--out_dir=std', cwd=copy).stderr


def started(*args, cwd, wait_for, torchrun=()):
    """A training process, once the file it writes is there."""
    command = [sys.executable, *(['-m', 'torch.distributed.run', '--standalone', *torchrun] if torchrun else [])]
    process = subprocess.Popen(
        [*command, str(REPO / 'train.py'), *args],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1'),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (cwd / wait_for).exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    return process


@pytest.mark.parametrize('signum, code', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint(copy, signum, code):
    """A preempted run loses its steps, prints a traceback, or cannot go on with the same command."""
    args = ('cfg.py', '--out_dir=b', '--max_steps=100000', '--eval_interval=50000', '--init_from=auto')
    process = started(*args, cwd=copy, wait_for='b/log.jsonl')
    time.sleep(1)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and 'Traceback' not in stderr and '--init_from=resume' in stderr, stderr
    at = weights(copy, 'b')['step']
    assert [e['step'] for e in events(copy, 'b')] == list(range(1, at + 1)) and at % 50000
    last = f'--max_steps={at + 3}'
    done = ok('train.py', *args[:-3], '--init_from=auto', last, '--lr_decay_steps=100000', cwd=copy)
    assert f'resumed at step {at}' in done.stdout
    assert ': done' in ok('train.py', *args[:-3], '--init_from=auto', last, '--lr_decay_steps=100000', cwd=copy).stdout
    straight = ('--out_dir=c', last, '--lr_decay_steps=100000', '--eval_interval=50000')
    ok('train.py', 'cfg.py', *straight, cwd=copy)
    for key in ('model', 'optimizer', 'recent'):
        assert_same(weights(copy, 'b')[key], weights(copy, 'c')[key])


def test_kill_train(copy):
    """A killed run leaves no checkpoint that loads, or ends with other weights than an undisturbed one; MHF_KILLS=30 kills thirty times."""
    kills, seed = int(os.environ.get('MHF_KILLS', 3)), int(os.environ.get('MHF_SEED', 0)) or time.time_ns() % 10**6
    args = ('cfg.py', '--max_steps=60', '--eval_interval=4', '--init_from=auto')
    ok('train.py', *args, '--out_dir=straight', cwd=copy)
    draw, wanted = (
        np.random.default_rng(seed),
        {k: weights(copy, 'straight')[k] for k in ('model', 'optimizer', 'step')},
    )
    survived = 0
    while survived < kills:
        process = started(
            *args, '--out_dir=killed', cwd=copy, wait_for='killed/ckpt.pt.tmp' if survived % 2 else 'killed/ckpt.pt'
        )
        moment = draw.uniform(0, 1.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=moment)
        if process.poll() is not None:  # it finished: from the beginning again
            assert process.returncode == 0
            assert_same({k: weights(copy, 'killed')[k] for k in wanted}, wanted)
            shutil.rmtree(copy / 'killed')
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        survived += 1
        model, ckpt = MHF.from_checkpoint(copy / 'killed/ckpt.pt', whole=True)
        digest = model_module.digest_of_state(ckpt['model'])[:12]
        print(
            f'seed {seed}, killed {moment:.2f} s after a file appeared, checkpoint of step {ckpt["step"]}, digest {digest}'
        )
    ok('train.py', *args, '--out_dir=killed', cwd=copy)
    assert_same({k: weights(copy, 'killed')[k] for k in wanted}, wanted)
    assert steps(copy, 'killed') == steps(copy, 'straight') and not list((copy / 'killed').glob('*.tmp'))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(copy):
    """A flipped bit in the weights or the optimizer goes unnoticed, or costs the whole run."""
    ok(
        'train.py',
        'cfg.py',
        '--out_dir=b',
        '--eval_interval=4',
        '--max_steps=12',
        '--lr_decay_steps=24',
        '--keep=2',
        cwd=copy,
    )
    names = {p.name for p in (copy / 'b').glob('*.pt')}
    assert names == {'ckpt.pt', 'ckpt_best.pt', 'ckpt_000008.pt', 'ckpt_000012.pt'}
    for part in ('model', 'optimizer'):
        state = weights(copy, 'b')
        tensor = state['model']['norm.weight'] if part == 'model' else state['optimizer']['state'][0]['exp_avg']
        tensor.flatten()[3] += 1e-3
        shutil.rmtree(copy / part, ignore_errors=True)
        shutil.copytree(copy / 'b', copy / part)
        for name in ('ckpt_000012.pt', 'ckpt.pt'):  # the same file
            (copy / part / name).unlink()
        torch.save(state, copy / part / 'ckpt.pt')
        args = ('cfg.py', f'--out_dir={part}', '--eval_interval=4', '--init_from=resume')
        done = ok('train.py', *args, cwd=copy)
        assert (
            f'WARNING: {part}/ckpt.pt' in done.stderr
            and f"'{part}'" in done.stderr
            and 'resumed at step 8' in done.stdout
        )
        assert_same(weights(copy, part)['model'], weights(copy)['model'])


def test_another_number_of_processes_goes_on(copy):
    """A run that is resumed on other hardware sees other batches."""
    ok('train.py', 'cfg.py', '--out_dir=b', '--max_steps=6', '--lr_decay_steps=24', '--eval_interval=6', cwd=copy)
    args = (
        'cfg.py',
        '--out_dir=b',
        '--init_from=resume',
        '--micro_batch_size=2',
        '--max_steps=12',
        '--lr_decay_steps=24',
    )
    ok('train.py', *args, cwd=copy, torchrun=['--nproc_per_node=4'])
    ours, straight = steps(copy, 'b'), steps(copy)[:12]
    assert [a['step'] for a in ours] == [b['step'] for b in straight]
    assert np.allclose([a['loss'] for a in ours], [b['loss'] for b in straight], atol=1e-3)


def test_a_dead_rank_does_not_hang_the_rest(copy):
    """A machine that dies leaves the other ranks waiting, or torchrun --max-restarts begins from nothing."""
    import psutil

    args = ('cfg.py', '--out_dir=b', '--micro_batch_size=2', '--max_steps=60', '--eval_interval=5', '--init_from=auto')
    for restarts, wait_for in ((0, 'b/ckpt_000005.pt'), (1, 'b/ckpt_000020.pt')):
        torchrun = ['--nproc_per_node=2', f'--max-restarts={restarts}']
        process = started(*args, cwd=copy, wait_for=wait_for, torchrun=torchrun)
        ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if 'train.py' in ' '.join(p.cmdline())]
        ranks[-1].kill()
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode == 0) == (restarts == 1), stderr[:6000]
        assert MHF.from_checkpoint(copy / 'b/ckpt.pt', whole=True)[1]['step'] >= 5
    assert 'resumed at step' in stdout
    assert [s['step'] for s in steps(copy, 'b')] == list(range(1, 61))


def test_a_process_without_its_master(copy):
    """A process whose master is not there waits for ever, or ends with a traceback; torch's own log of sockets may precede."""
    env = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), RANK='1', WORLD_SIZE='2')
    done = run('train.py', 'cfg.py', '--out_dir=new', '--timeout=2', cwd=copy, **env)
    assert done.returncode == 1 and 'Traceback' not in done.stderr and not (copy / 'new').exists()
    assert done.stderr.splitlines()[-1].startswith('error: process 1 of 2 did not meet the others within 2 s')


def test_loss_spikes(copy):
    """A spike goes unseen, or an ordinary loss stops the run."""
    spike = '--spike_deviations=0.001'  # any loss above the median
    ok(
        'train.py',
        'cfg.py',
        '--out_dir=b',
        spike,
        '--max_steps=30',
        '--lr_decay_steps=40',
        '--learning_rate=1e-9',
        cwd=copy,
    )
    assert any('spike' in e for e in events(copy, 'b')) and not any('spike' in e for e in events(copy))
    args = ('--out_dir=c', spike, '--stop_on_spike', '--max_steps=30', '--lr_decay_steps=40', '--learning_rate=1e-9')
    done = run('train.py', 'cfg.py', *args, cwd=copy)
    assert done.returncode == 1 and 'is a spike above' in done.stderr and 'Traceback' not in done.stderr


def test_read_only_while_training(copy):
    """A file system that becomes read-only costs the checkpoint before, or leaves a traceback."""
    before = (copy / 'out/ckpt.pt').read_bytes()
    args = ('cfg.py', '--init_from=resume', '--max_steps=60', '--eval_interval=6', '--lr_decay_steps=24')
    read_only = "import os\ndef replace(a, b):\n    if 'ckpt' in str(b): raise OSError(30, 'Read-only file system', str(b))\n    return rename(a, b)"
    done = patched(f'{read_only}\nrename, os.replace = os.rename, replace', *args, cwd=copy)
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr[-2000:]
    assert 'Read-only file system' in done.stderr and 'the one before is untouched' in done.stderr
    assert (copy / 'out/ckpt.pt').read_bytes() == before and not list((copy / 'out').glob('*.tmp'))


def test_out_of_memory_while_training(copy):
    """A GPU that is too small prints a page of traceback, and not what to change."""
    oom = IN_FORWARD.format(n=3, do="raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')")
    done = patched(oom, 'cfg.py', '--init_from=resume', '--max_steps=30', cwd=copy)
    lines = [line for line in done.stderr.splitlines() if 'error' in line]
    assert done.returncode == 1 and 'Traceback' not in done.stderr and len(lines) == 1, done.stderr
    assert all(w in lines[0] for w in ('2.00 GiB', '--micro_batch_size (now 4)', 'ckpt.pt is good, of step 24'))


def test_other_data_on_request(copy):
    """Continual training cannot go on with other text, or does so unasked, or begins in the middle of it."""
    write_jsonl(copy / 'more.jsonl', real_documents()[10:14])
    data = ('cfg.py', '--dataset=more.jsonl', '--data_dir=more')
    ok('prepare.py', *data, '--num_workers=1', cwd=copy)
    args = (*data, '--init_from=resume', '--max_steps=26', '--lr_decay_steps=40')
    refused = run('train.py', *args, cwd=copy)
    assert refused.returncode == 1 and 'train_sha256=' in refused.stderr and '--new_data' in refused.stderr
    done = ok('train.py', *args, '--new_data', cwd=copy)
    assert 'resumed at step 24, with other data' in done.stdout
    assert weights(copy)['first_step'] == 24 and [e['step'] for e in steps(copy)] == list(range(1, 27))
    assert weights(copy)['recent'] == [s['loss'] for s in steps(copy)[24:]]  # other text is no spike
    ok('train.py', *args[:-2], '--max_steps=28', '--lr_decay_steps=40', cwd=copy)  # now these are its data
    assert weights(copy)['first_step'] == 24
    other = run('train.py', *args, '--new_data', '--tokenizer=tekken', cwd=copy)
    assert other.returncode == 1 and 'tokenizer=mistral' in other.stderr


def damaged(draw, raw):
    """raw, cut off, with bytes changed, put in or taken out, or something else."""
    kind, at = draw(st.sampled_from(['cut', 'change', 'insert', 'remove', 'other'])), draw(st.integers(0, len(raw) - 1))
    piece = draw(st.binary(min_size=1, max_size=40))
    return dict(
        cut=raw[:at],
        change=raw[:at] + piece + raw[at + len(piece) :],
        insert=raw[:at] + piece + raw[at:],
        remove=raw[:at] + raw[at + len(piece) :],
        other=piece,
    )[kind]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def edited(draw, value):
    """A nest of dicts and lists with one place changed, or taken out."""
    inner = (
        [k for k in (value if isinstance(value, dict) else range(len(value)))]
        if isinstance(value, (dict, list))
        else []
    )
    if not inner or draw(st.integers(0, 3)) == 0:
        return draw(json_values)
    key = draw(st.sampled_from(inner))
    new = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 5)) == 0:
        del new[key]
    else:
        new[key] = edited(draw, value[key])
    return new


@settings(max_examples=FUZZ, deadline=None)
@given(st.data())
def test_fuzz_bins(trained, tmp_path_factory, data):
    """Damaged bins or a damaged meta.json end in a traceback, write something, or are read as if they were whole."""
    folder = tmp_path_factory.mktemp('b')
    shutil.copytree(trained / 'bins', folder / 'bins')
    name = data.draw(st.sampled_from(['meta.json', 'train_000000.bin', 'val_000000.bin', 'signatures.npy']))
    raw = (folder / 'bins' / name).read_bytes()
    if name == 'meta.json' and data.draw(st.booleans()):
        new = json.dumps(edited(data.draw, json.loads(raw))).encode()
    else:
        new = damaged(data.draw, raw)
    (folder / 'bins' / name).write_bytes(new)
    before = snapshot(folder)
    config = configurator.declared('train.py') | configurator.declared('prepare.py')
    config |= configurator.read_config(trained / 'cfg.py') | dict(data_dir=str(folder / 'bins'))
    try:
        meta = prepare.load_meta(config)
        table = prepare.load_table(config, meta)
        for split in prepare.SPLITS:
            rows = prepare.open_bin(config, meta, split)
            rows.verify()
            original = np.load(trained / f'bins/{split}_000000.bin')
            np.testing.assert_array_equal(rows[:], original)
        np.testing.assert_array_equal(table, np.load(trained / 'bins/signatures.npy'))
    except InputError as e:
        assert '\n' not in str(e)
    assert snapshot(folder) == before


@settings(max_examples=FUZZ, deadline=None)
@given(st.data())
def test_fuzz_checkpoint(trained, tmp_path_factory, data):
    """A damaged checkpoint ends in a traceback, or loads with other weights; one with other contents and fitting digests hangs."""
    folder = tmp_path_factory.mktemp('k')
    raw = (trained / 'out/ckpt.pt').read_bytes()
    if data.draw(st.booleans()):
        (folder / 'ckpt.pt').write_bytes(damaged(data.draw, raw))
        state = None
    else:
        state = edited(data.draw, torch.load(trained / 'out/ckpt.pt', weights_only=True))
        save_edited(state, folder / 'ckpt.pt') if isinstance(state, dict) else torch.save(state, folder / 'ckpt.pt')
    before = snapshot(folder)
    try:
        model, ckpt = MHF.from_checkpoint(folder / 'ckpt.pt', whole=True)
        if state is None:
            assert_same(
                ckpt,
                {k: v for k, v in torch.load(trained / 'out/ckpt.pt', weights_only=True).items() if k != 'sha256'},
            )
    except InputError as e:
        assert '\n' not in str(e)
    assert snapshot(folder) == before


def test_a_checkpoint_names_no_files(copy):
    """What a checkpoint says of its configuration, or a name in it, makes a script write outside of out_dir."""
    state = weights(copy)
    hostile = dict.fromkeys(('out_dir', 'data_dir', 'dataset', 'export', 'wandb_run_name'), str(copy / 'outside/x'))
    state['config'] |= hostile | dict(tokenizer='../../outside/x')
    state['data']['tokenizer'] = '../../outside/x'
    state['model_config']['../../outside/x'] = 1
    for k, edit in enumerate(
        (lambda s: s['model_config'].pop('../../outside/x'), lambda s: s['data'].update(tokenizer='mistral'))
    ):
        save_edited(state, copy / 'out/ckpt.pt')
        for path in (copy / 'out').glob('ckpt_0*'):
            path.unlink()
        before = snapshot(copy)
        for script, *args in (('sample.py', '--num_samples=1'), ('train.py', '--init_from=resume', '--max_steps=30')):
            done = run(script, 'cfg.py', *args, cwd=copy)
            assert done.returncode == 1 and 'Traceback' not in done.stderr and 'outside' in done.stderr, (
                k,
                done.stderr,
            )
        assert snapshot(copy) == before
        edit(state)
    save_edited(state, copy / 'out/ckpt.pt')  # now only its settings are hostile, which are compared and not used
    ok('train.py', 'cfg.py', '--init_from=resume', '--max_steps=25', '--lr_decay_steps=24', cwd=copy)
    assert not (copy / 'outside').exists() and not (copy.parent / 'outside').exists()


def test_disk_full_while_training(copy):
    """A checkpoint that does not fit costs the one before, or training goes on for hours without one."""
    before = (copy / 'out/ckpt.pt').read_bytes()
    command = f'ulimit -f {len(before) // 2048}; exec {sys.executable} {REPO}/train.py cfg.py --init_from=resume'
    command += ' --max_steps=400 --eval_interval=60 --lr_decay_steps=24'
    done = subprocess.run(['bash', '-c', command], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr[-2000:]
    assert 'out/ckpt.pt could not be written' in done.stderr and 'the one before is untouched' in done.stderr
    assert (copy / 'out/ckpt.pt').read_bytes() == before and not list((copy / 'out').glob('*.tmp'))
    assert steps(copy)[-1]['step'] < 120  # it stopped after step 60, not at the next checkpoint


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_export_and_import(trained, tmp_path, num_hashes):
    """A model trained here and exported is another one in the released format."""
    if num_hashes:
        done = ok('train.py', 'cfg.py', '--init_from=resume', f'--export={tmp_path}/out', cwd=trained)
        assert 'step 24' in done.stdout
        m, _ = MHF.from_checkpoint(trained / 'out/ckpt.pt')
        fields = json.loads((tmp_path / 'out/config.json').read_text())
        assert fields['tokenizer'] == 'mistral' and fields['num_hashes'] == 3
    else:
        m = random_model(num_hashes=0, dtype=torch.float32)
        m.export(tmp_path / 'out', 'mistral')
    back = MHF.from_pretrained(tmp_path / 'out')
    assert_same(dict(m.state_dict()), dict(back.state_dict()))
    of_hashes = set() if num_hashes else {'num_buckets', 'num_lsh', 'bottleneck'}  # the Standard model has none
    configs = [{k: v for k, v in asdict(x.config).items() if k not in of_hashes} for x in (m, back)]
    assert configs[0] == configs[1]
    with pytest.raises(InputError, match='there already'):
        m.export(tmp_path / 'out', 'mistral')
    if not num_hashes:  # other tools read it, too
        from transformers import AutoModelForCausalLM

        qwen3, ids = AutoModelForCausalLM.from_pretrained(tmp_path / 'out'), torch.arange(20)[None]
        theirs = qwen3(ids).logits.log_softmax(-1)
        assert relative(theirs, m.log_probs(ids)) < 1e-4


def test_a_malicious_checkpoint_is_not_run(copy):
    """Opening a checkpoint from a stranger runs the stranger's code."""

    class Evil:
        def __reduce__(self):
            return os.system, (f'touch {copy}/owned',)

    (copy / 'out/ckpt.pt').write_bytes(pickle.dumps(Evil()))
    for script in ('sample.py', 'train.py'):
        done = run(script, 'cfg.py', *(['--init_from=resume'] if script == 'train.py' else []), cwd=copy)
        assert done.returncode == 1 and 'no checkpoint of train.py' in done.stderr and not (copy / 'owned').exists()


# -----------------------------------------------------------------------------
# expand.py


def invented_language(first, letters, spaces, seed):
    """Documents of words that occur as often as words do, in letters from the code point `first` on."""
    draw = np.random.default_rng(seed)
    vocabulary = [''.join(chr(first + k) for k in draw.integers(0, letters, draw.integers(2, 6))) for _ in range(1500)]
    p = 1 / np.arange(1, 1501)
    return [(' ' if spaces else '').join(draw.choice(vocabulary, 150, p=p / p.sum())) + '.' for _ in range(60)]


LANGUAGES = dict(ar=(0x621, 26, True, 1), zh=(0x6E00, 400, False, 2), hi=(0x905, 50, True, 3))


@pytest.fixture(scope='session')
def expansion(trained, tmp_path_factory):
    """A folder with the trained run, three languages, and a tokenizer expanded by 400 tokens of each."""
    folder = tmp_path_factory.mktemp('expansion') / 'work'
    shutil.copytree(trained, folder)
    for name, how in LANGUAGES.items():
        write_jsonl(folder / f'{name}.jsonl', invented_language(*how))
    texts = '--texts=ar.jsonl,zh.jsonl,hi.jsonl,docs.jsonl@0'
    done = ok('expand.py', 'cfg.py', texts, '--num_new_tokens=400', '--tokenizer=three.model', cwd=folder)
    (folder / 'printed').write_text(done.stdout)
    ok('prepare.py', 'cfg.py', '--dataset=ar.jsonl,zh.jsonl,hi.jsonl,docs.jsonl', '--tokenizer=three.model',
       '--data_dir=more', '--num_workers=1', cwd=folder)  # fmt: skip
    return folder


@pytest.mark.xdist_group('expand')
def test_expanded_tokenizer(expansion, mistral):
    """New pieces change the old ones or how English is split, lose text, can never occur, are too few, or save nothing."""
    tok = get_tokenizer(str(expansion / 'three.model'))
    V = len(mistral.tokens)
    assert tok.tokens[:V] == mistral.tokens and len(tok.tokens) == len(set(tok.tokens)) == V + 1200
    assert (tok.bos, tok.pad) == (mistral.bos, mistral.pad)
    english = real_documents()
    assert tok.encode(english) == mistral.encode(english)
    foreign = [t for how in LANGUAGES.values() for t in invented_language(*how)]
    for texts in (SAYINGS, english, foreign):
        assert [tok.decode(i) for i in tok.encode(texts)] == texts
    assert tok.split(tok.tokens[V:]) == [[k] for k in range(V, V + 1200)]
    assert {i for row in tok.encode(foreign) for i in row if i >= V} <= set(range(V, V + 1200))
    for name, how in LANGUAGES.items():
        held = (expansion / f'three_{name}.txt').read_text().strip().split('\n\n')
        assert held == invented_language(*how)[9::10]  # those that prepare.py holds out
        assert sum(map(len, tok.encode(held))) < 0.75 * sum(map(len, mistral.encode(held)))
        saved = re.search(rf'^{name} +400 .* ([\d.]+)%$', (expansion / 'printed').read_text(), re.M)
        assert float(saved[1]) >= 25
    assert (expansion / 'three.png').read_bytes()[:4] == b'\x89PNG'


def test_a_piece_that_no_text_gives_is_replaced(monkeypatch, mistral):
    """The larger tokenizer has pieces, and the model signatures for them, that can never occur."""
    ranked = [(9, 0, 'नमस'), (8, 1, 'नम')]  # no merge makes the first without the second
    monkeypatch.setattr(expand, 'candidates', lambda *_: ranked)
    for number, pieces in ((1, ['नम']), (2, ['नमस', 'नम'])):
        larger, chosen = expand.expanded(mistral, dict(hi=[]), dict(hi=number))
        assert chosen == dict(hi=pieces) and larger.tokens[32768:] == pieces


@pytest.mark.xdist_group('expand')
def test_expand_again_and_on_real_text(expansion, tmp_path):
    """An expanded tokenizer cannot be expanded, the same command gives another one, or real text gives too few tokens."""
    run_again = ('expand.py', 'cfg.py', '--texts=ar.jsonl,zh.jsonl,hi.jsonl,docs.jsonl@0', '--num_new_tokens=400')
    ok(*run_again, '--tokenizer=again.model', cwd=expansion)
    assert (expansion / 'again.model').read_bytes() == (expansion / 'three.model').read_bytes()
    write_jsonl(expansion / 'el.jsonl', invented_language(0x391, 50, True, 4))
    more = ('expand.py', 'cfg.py', '--base=three.model', '--texts=el.jsonl@100000', '--tokenizer=four.model')
    done = ok(*more, cwd=expansion)
    number = int(re.search(r'the text gives ([\d,]+) of the 100,000', done.stdout)[1].replace(',', ''))
    three, four = (get_tokenizer(str(expansion / f'{n}.model')) for n in ('three', 'four'))
    assert four.tokens[: len(three.tokens)] == three.tokens and len(four.tokens) == len(three.tokens) + number
    tables = [signature_table(t.tokens, 3, 256, pad_id=t.pad) for t in (three, four)]
    assert (tables[1][: len(tables[0])] == tables[0]).all()
    files = ','.join(str(shared(f'data/text/{n}.jsonl.xz')) for n in LANGUAGES)
    done = ok('expand.py', f'--texts={files}', '--val_fraction=0.05', '--tokenizer=real.model', cwd=tmp_path)
    assert '32,768 -> 48,122 tokens' in done.stdout
    assert all(float(x) >= 25 for x in re.findall(r'([\d.]+)%$', done.stdout, re.M)) and done.stdout.count('%\n') == 3


@pytest.mark.xdist_group('expand')
def test_expand_a_model(expansion, mistral):
    """The expanded model has another parameter, other old signatures or other logits, or trains what is frozen."""
    torch.manual_seed(0)
    old_table = signature_table(mistral.tokens, 3, 256, pad_id=mistral.pad)
    fields = {k: v for k, v in configurator.read_config(expansion / 'cfg.py').items() if k in MHFConfig.__annotations__}
    MHF(MHFConfig(**fields | dict(num_layers=4)), old_table).export(expansion / 'base', 'mistral')
    base = MHF.from_pretrained(expansion / 'base')
    args = ('cfg.py', '--init_from=expand:base', '--tokenizer=three.model', '--data_dir=more', '--train_layers=1')
    done = ok(
        'train.py', *args, '--max_steps=1', '--warmup_steps=1', '--lr_decay_steps=9', '--out_dir=at_once', cwd=expansion
    )
    assert '32,768 -> 33,968 tokens: 0 new parameters' in done.stdout and 'are frozen' in done.stdout
    at_once, _ = MHF.from_checkpoint(expansion / 'at_once/ckpt.pt')  # the first update has learning rate 0
    for (name, a), (_, b) in zip(base.named_parameters(), at_once.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(at_once.signatures[:32768], base.signatures) and len(at_once.signatures) == 33968
    ids = torch.tensor([mistral.encode([real_documents()[0]])[0][:64]])
    assert torch.equal(at_once.bucket_logits(ids), base.bucket_logits(ids))
    args = (
        'cfg.py',
        '--init_from=auto:expand:base',
        *args[2:],
        '--warmup_steps=1',
        '--out_dir=expanded',
    )
    ok('train.py', *args, '--max_steps=3', cwd=expansion)
    trained_on, ckpt = MHF.from_checkpoint(expansion / 'expanded/ckpt.pt', whole=True)
    assert trained_on.num_params() == base.num_params()
    frozen = [n for (n, a), b in zip(base.named_parameters(), trained_on.parameters()) if torch.equal(a, b)]
    assert frozen == [n for n, _ in base.named_parameters() if n.startswith(('layers.1.', 'layers.2.'))]
    assert len(ckpt['optimizer']['state']) == len(list(base.parameters())) - len(frozen)
    assert 'resumed at step 3' in ok('train.py', *args, '--max_steps=4', cwd=expansion).stdout
    refused = run('train.py', *args, '--train_layers=0', '--max_steps=9', cwd=expansion)
    assert refused.returncode == 1 and 'train_layers=1, now it is 0' in refused.stderr
    text = ','.join(f'three_{n}.txt' for n in (*LANGUAGES, 'docs'))
    args = ('--out_dir=expanded', '--before=base', '--tasks=bits_per_byte', f'--text={text}', '--plot', '--device=cpu')
    done = ok('eval.py', *args, cwd=expansion)
    results = json.loads((expansion / 'expanded/results.json').read_text())
    for name, now in results['bits_per_byte'].items():
        then = results['before']['bits_per_byte'][name]
        assert now['bytes'] == then['bytes'] and 'new_tokens' not in then
        assert ('new_tokens' in now) == ('docs' not in name)
        assert f'{name}: {then["bits_per_byte"]:.4f} -> {now["bits_per_byte"]:.4f} bits per byte' in done.stdout
    assert (expansion / 'expanded/results_text.png').stat().st_size > 5000


@pytest.mark.xdist_group('expand')
def test_expand_a_standard_model(expansion, mistral):
    """A new row of the Standard model is not the mean of the rows of its token's old pieces."""
    m = random_model(num_hashes=0, vocab_size=32768, dtype=torch.float32)
    m.export(expansion / 'standard', 'mistral')
    args = ('cfg.py', '--init_from=expand:standard', '--num_hashes=0', '--tokenizer=three.model', '--data_dir=ids')
    ok(
        'prepare.py',
        'cfg.py',
        '--dataset=ar.jsonl',
        '--num_hashes=0',
        '--tokenizer=three.model',
        '--data_dir=ids',
        cwd=expansion,
    )
    short = ('--block_size=24', '--max_steps=1', '--warmup_steps=1', '--lr_decay_steps=9', '--out_dir=std')
    done = ok('train.py', *args, *short, cwd=expansion)
    assert f'33,968 tokens: {1200 * 32:,} new parameters' in done.stdout
    E, tok = weights(expansion, 'std')['model']['embed.weight'], get_tokenizer(str(expansion / 'three.model'))
    assert torch.equal(E[:32768], m.embed.weight)
    for k in (32768, 33000, 33967):
        text = tok.tokens[k].replace('▁', ' ')
        old = mistral.encode(['\n' + text])[0][2:]  # behind the beginning of the text and its line end
        assert mistral.decode(old).strip() == text.strip()
        assert torch.allclose(E[k], m.embed.weight[old].mean(0), atol=1e-6)


@pytest.mark.xdist_group('expand')
def test_replace_the_whole_vocabulary(expansion):
    """mistral -> tekken costs a parameter, or is done where an extension was asked for."""
    ok('prepare.py', 'cfg.py', '--dataset=docs.jsonl', '--tokenizer=tekken', '--data_dir=tekken', cwd=expansion)
    args = (
        'cfg.py',
        '--tokenizer=tekken',
        '--data_dir=tekken',
        '--max_steps=1',
        '--warmup_steps=1',
        '--lr_decay_steps=9',
    )
    refused = run('train.py', *args, '--init_from=expand:out', '--out_dir=tek', cwd=expansion)
    assert refused.returncode == 1 and 'first 32768 must be those of the model' in refused.stderr
    done = ok('train.py', *args, '--init_from=replace:out', '--out_dir=tek', cwd=expansion)
    assert '32,768 -> 131,072 tokens: 0 new parameters' in done.stdout
    a, b = weights(expansion)['model'], weights(expansion, 'tek')['model']
    assert [k for k in a if not torch.equal(a[k], b[k])] == ['signatures', 'is_token']


# -----------------------------------------------------------------------------
# configurator.py


def configured(tmp_path, *argv, file=''):
    (tmp_path / 'c.py').write_text(file)
    scope = {'__file__': str(REPO / 'train.py')}
    return configurator.configure(scope, [str(tmp_path / 'c.py'), *argv])


def test_configurator_accepts(tmp_path):
    """An int for a float, None, a value with '=', a bare --flag or a file's own names are turned away or mangled."""
    file = 'import math\n_n = 3\nmax_steps = int(math.pi) * _n\nlearning_rate = 1\nwandb = False\nmax_new_tokens = 7\n'
    got = configured(
        tmp_path,
        '--weight_decay=0',
        '--out_dir=a=b',
        '--wandb',
        '--compile=None',
        '--device=cpu',
        '--dataset=1',
        file=file,
    )
    assert got['max_steps'] == 9 and got['learning_rate'] == 1.0 and isinstance(got['learning_rate'], float)
    assert got['weight_decay'] == 0.0 and got['out_dir'] == 'a=b' and got['wandb'] is True and got['compile'] is None
    assert got['device'] == 'cpu' and got['dataset'] == '1' and 'max_new_tokens' not in got and '_n' not in got
    assert (
        configured(tmp_path, '--compile')['compile'] is True
        and configured(tmp_path, '--max_steps=1e3')['max_steps'] == 1000
    )
    assert configured(tmp_path, '--max_steps=5', file='max_steps = 4')['max_steps'] == 5


@pytest.mark.parametrize(
    'argv, file, culprit',
    [
        (['--learningrate=1'], '', "did you mean 'learning_rate'"),
        ([], 'num_bucket = 4', "'num_bucket'; did you mean 'num_buckets'"),
        ([], 'max_steps = "4"', 'max_steps'),
        (['--max_steps=1.5'], '', 'max_steps=1.5 is float, expected int'),
        (['--max_steps=True'], '', 'max_steps=True is bool'),
        (['--max_steps=None'], '', 'max_steps=None is NoneType'),
        (['--max_steps'], '', '--max_steps needs a value'),
        (['--learning_rate=fast'], '', "learning_rate='fast' is str"),
        (['--wandb=1'], '', 'wandb=1 is int, expected bool'),
        (['--temperature=1'], '', 'sample.py has it'),
        (['--max_stepps=1', '--sede=1'], '', "max_steps'.*, and .*'seed'"),
        ([], '1/0', 'line 1: ZeroDivisionError'),
        ([], 'x = [', 'line 1: SyntaxError'),
        ([], 'from math import pi', "unknown setting 'pi'"),
        (['nowhere.py'], '', "no config file 'nowhere.py'"),
    ],
)
def test_configurator_refuses(tmp_path, argv, file, culprit):
    """A typo runs for a week with the default instead."""
    with pytest.raises(InputError, match=culprit) as e:
        configured(tmp_path, *argv, file=file)
    assert '\n' not in str(e.value)


known = sorted(configurator.known_settings())
values = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=12), st.lists(st.integers(), max_size=2)
)
spelled = st.builds(repr, values) | st.sampled_from(
    ['1e3', '0x10', '1_000', '9' * 5000, '((((', '[' * 200, '"', "'a", '\x00', 'nan']
)
names = st.sampled_from(known) | st.text(max_size=8).filter(lambda t: 'h' not in t)


@settings(max_examples=FUZZ, deadline=None)
@given(st.lists(st.tuples(names, spelled), max_size=4), st.lists(st.tuples(names, spelled), max_size=3))
def test_fuzz_configurator(tmp_path_factory, on_the_command_line, in_the_file):
    """Some setting or config file ends in a traceback, is taken with another type, or writes something."""
    folder = tmp_path_factory.mktemp('c')
    file = ''.join(f'{k} = {v}\n' for k, v in in_the_file)
    (folder / 'c.py').write_text(file, encoding='utf-8', errors='replace')
    defaults = configurator.declared('train.py')
    try:
        got = configurator.configure(
            {'__file__': str(REPO / 'train.py')},
            [str(folder / 'c.py'), *(f'--{k}={v}' for k, v in on_the_command_line)],
        )
        assert got.keys() == defaults.keys()
        assert all(defaults[k] is None or type(v) is type(defaults[k]) for k, v in got.items())
    except InputError as e:
        assert e.code == f'error: {e}' and '\n' not in str(e)
    assert [p.name for p in folder.iterdir()] == ['c.py']


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_help(script, tmp_path):
    """--help shows another script's text, or leaves settings out."""
    done = ok(script, '--help', cwd=tmp_path)
    assert f'python {script}' in done.stdout and all(f'--{k}=' in done.stdout for k in configurator.declared(script))


def test_scripts_agree_on_defaults():
    """A setting that two scripts share has two defaults: `prepare.py` and `train.py` alone would not fit together."""
    all_settings = [configurator.declared(s) for s in configurator.SCRIPTS]
    for key in {k for s in all_settings for k in s} - {'out_dir', 'tokenizer', 'seed', 'device', 'dtype'}:
        values = [s[key] for s in all_settings if key in s]
        assert all(v == values[0] for v in values), key
    train, fields = configurator.declared('train.py'), asdict(MHFConfig())
    assert {k: v for k, v in train.items() if k in fields} == {k: fields[k] for k in fields if k in train}


# -----------------------------------------------------------------------------
# bad input: one clear line, exit code 1, no traceback, nothing written


def damage(path, edit):
    def setup(folder):
        target = folder / path
        target.write_bytes(edit(target.read_bytes() if target.exists() else b''))

    return setup


def only_checkpoint(edit):
    def setup(folder):
        damage('out/ckpt.pt', edit)(folder)
        for path in (folder / 'out').glob('ckpt_0*.pt'):
            path.unlink()

    return setup


def edit_meta(**changes):
    return damage('bins/meta.json', lambda raw: json.dumps(json.loads(raw) | changes).encode())


def edit_rows(folder):
    path, meta = folder / 'bins/train_000000.bin', json.loads((folder / 'bins/meta.json').read_text())
    raw = path.read_bytes()
    path.write_bytes(raw[:128] + b'\xff' * len(raw[128:]))
    with open(path, 'rb') as f:
        meta['splits']['train']['shards'][0]['digest'] = prepare.digest_of(f).digest().hex()
    (folder / 'bins/meta.json').write_text(json.dumps(meta))
    ckpt = torch.load(folder / 'out/ckpt.pt', weights_only=True)
    ckpt['data']['train_sha256'] = prepare.read_meta(folder / 'bins')['splits']['train']['sha256']
    save_edited(ckpt, folder / 'out/ckpt.pt')


def bad_parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(content=['x'], url=['y'])), folder / 'x.parquet')


def tokenizer_with(*pieces):
    """mistral with these behind its own, whatever they are."""

    def setup(folder):
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto.FromString(get_tokenizer('mistral').sp.serialized_model_proto())
        (folder / 'x.model').write_bytes(expand.with_pieces(model, pieces))

    return setup


def small_release(folder):
    write_released(folder / 'small', random_model(num_buckets=256, dtype=torch.float32))


def environment(**variables):
    """Of a process that something else than torchrun started."""
    return lambda folder: dict(MASTER_ADDR='127.0.0.1', RANK='0', WORLD_SIZE='2') | variables


def port_in_use(folder):
    held.append(socket.create_server(('127.0.0.1', 0)))
    return environment(MASTER_PORT=str(held[-1].getsockname()[1]))(folder)


held = []  # sockets, as long as the tests run
P, T, S = ('prepare.py', '--data_dir=new'), ('train.py', 'cfg.py', '--out_dir=new'), ('sample.py', 'cfg.py')
E = ('eval.py', '--out_dir=out')
X = ('expand.py', '--tokenizer=new.model')
BAD = [
    ('unknown task', *E, '--tasks=arc_esy', "did you mean 'arc_easy'", None),
    ('no local file', *E, '--tasks=piqa', '--data_dir=bins', 'no piqa_validation', None),
    ('no folder of data', *E, '--data_dir=nowhere', 'no such folder', None),
    ('no text to evaluate', *E, '--tasks=bits_per_byte', 'needs --text', None),
    ('text that is not there', *E, '--tasks=bits_per_byte', '--text=no.txt', 'no.txt', None),
    ('not card660', *E, '--tasks=card660', '--data_dir=bins', 'dataset.tsv', None),
    ('eval without a checkpoint', 'eval.py', '--out_dir=nothing', 'nothing/ckpt.pt', None),
    ('eval with another tokenizer', *E, '--tokenizer=tekken', "another vocabulary than the 'mistral'", None),
    ('an empty text', *E, '--tasks=bits_per_byte', '--text=e.txt', 'no text in it', damage('e.txt', lambda _: b' \n')),
    ('benchmarks that the hub does not give', *E, '--tasks=piqa', 'see --data_dir', None),
    (
        'a benchmark that is cut off',
        *E,
        '--tasks=piqa',
        '--data_dir=.',
        'EOFError',
        damage('piqa_validation.jsonl.gz', lambda _: gzip.compress(os.urandom(999))[:500]),
    ),
    (
        'a benchmark without its fields',
        *E,
        '--tasks=sciq',
        '--data_dir=.',
        'sciq',
        damage('sciq_test.jsonl', lambda _: b'{"question": "Q"}\n'),
    ),
    ('results in no folder', *E, '--tasks=piqa', '--save=nowhere/r.json', 'nowhere/r.json', None),
    ('batches of nothing', *E, '--batch_size=0', 'batch_size=0', None),
    ('unknown part of bench', 'bench.py', '--parts=hed', "did you mean 'head'", None),
    ('unknown gpu', 'bench.py', '--plan', '--gpu=H10', "did you mean 'H100'", None),
    ('head_tokens that are none', 'bench.py', '--head_tokens=1k', 'head_tokens=1k', None),
    ('a batch that GPUs do not share', 'bench.py', '--plan', '--gpus=3', 'not a multiple of gpus=3', None),
    ('expand by nothing', *X, 'texts is empty', None),
    ('expand by a file that is not there', *X, '--texts=xx.jsonl', 'xx.jsonl', None),
    ('expand by an empty file', *X, '--texts=e.txt', 'e.txt: no text', damage('e.txt', lambda _: b'')),
    ('expand by one text twice', *X, '--texts=docs.jsonl,docs.jsonl', "'docs.jsonl' twice", None),
    ('expand by too many tokens', *X, '--texts=docs.jsonl@2000000000', 'at most 1,000,000', None),
    (
        'expand without held-out text',
        *X,
        '--texts=long.jsonl',
        '--val_fraction=0.03',
        '--text_bytes=1000',
        'is held out; raise val_fraction=0.03',
        damage('long.jsonl', lambda _: b''.join(b'{"text": "%s"}\n' % (b'word ' * 12000) for _ in range(40))),
    ),
    (
        'expand over a held-out text',
        *X,
        '--texts=docs.jsonl',
        'new_docs.txt is there already',
        damage('new_docs.txt', lambda _: b'precious'),
    ),
    ('expand by some tokens', *X, '--texts=docs.jsonl@some', "'docs.jsonl@some'", None),
    ('expand what is no SentencePiece', *X, '--texts=docs.jsonl', '--base=tekken', "base='tekken'", None),
    ('expand into another kind of file', *X, '--texts=docs.jsonl', '--tokenizer=new.json', 'new.json', None),
    (
        'expand over a file',
        *X,
        '--texts=docs.jsonl',
        'new.model is there already',
        damage('new.model', lambda _: b'precious'),
    ),
    (
        'expand until a prefix is full',
        *X,
        '--texts=docs.jsonl@300',
        '--num_hashes=1',
        '--num_buckets=32800',
        'prefix () is full',
        None,
    ),
    ('a tokenizer with a piece twice', *P, '--tokenizer=x.model', 'x.model', tokenizer_with('ไทย', 'ไทย')),
    ('a tokenizer with an old piece again', *P, '--tokenizer=x.model', 'x.model', tokenizer_with('▁the')),
    ('a tokenizer that is not there', *P, '--tokenizer=no.model', "'no.model' is no readable", None),
    (
        'a tokenizer that is damaged',
        *P,
        '--tokenizer=e.model',
        "'e.model' is no",
        damage('e.model', lambda _: b'model'),
    ),
    (
        'expand a model by another table',
        *T,
        '--init_from=expand:small',
        'small cannot be expanded by bins',
        small_release,
    ),
    ('expand a model that is not there', *T, '--init_from=expand:nowhere', 'nowhere', None),
    ('expand a model that is not in a folder', *T, '--init_from=expand:out/x', 'no such folder in out', None),
    ('expand nothing', *T, '--init_from=expand:', "init_from='expand:'", None),
    ('negative layers', *T, '--train_layers=-1', 'train_layers=-1', None),
    ('before what is not there', *E, '--tasks=piqa', '--before=nowhere', 'nowhere', None),
    ('unknown tokenizer', *P, '--tokenizer=mistrel', "did you mean 'mistral'", None),
    ('unknown data set', *P, '--dataset=stdlibb', "did you mean 'stdlib'", None),
    ('missing file', *P, '--dataset=texts/*.jsonl', 'texts/*.jsonl', None),
    ('unknown subset', *P, '--dataset=fineweb-edu:sample-11BT', "did you mean 'sample-10BT'", None),
    ('hub out of reach', *P, '--dataset=fineweb-edu:sample-10BT', 'HuggingFaceFW/fineweb-edu', None),
    ('unknown config', *P, 'config/mhf_tini.py', "did you mean 'config/mhf_tiny.py'", None),
    ('config with a typo', *P, 'bad.py', "did you mean 'num_buckets'", damage('bad.py', lambda _: b'num_bucket = 9')),
    ('config that is not python', *P, 'bad.py', 'SyntaxError', damage('bad.py', lambda _: b'num_buckets = ')),
    ('empty file', *P, '--dataset=e.txt', 'too little text', damage('e.txt', lambda _: b'')),
    (
        'only white space',
        *P,
        '--dataset=e.jsonl',
        'too little text',
        damage('e.jsonl', lambda _: b'{"text": "  "}\n\n'),
    ),
    (
        'no text field',
        *P,
        '--dataset=e.jsonl',
        'there are: body, id',
        damage('e.jsonl', lambda _: b'{"body": "x", "id": 1}'),
    ),
    ('text is no string', *P, '--dataset=e.jsonl', "'text' is int", damage('e.jsonl', lambda _: b'{"text": 5}')),
    (
        'line that is not JSON',
        *P,
        '--dataset=e.jsonl',
        'line 2: not JSON',
        damage('e.jsonl', lambda _: b'{"text": "x"}\n{"te'),
    ),
    (
        'truncated xz',
        *P,
        '--dataset=e.jsonl.xz',
        'e.jsonl.xz',
        damage('e.jsonl.xz', lambda _: lzma.compress(b'{"text": "x"}\n' * 999)[:-20]),
    ),
    (
        'truncated gz',
        *P,
        '--dataset=e.txt.gz',
        'e.txt.gz',
        damage('e.txt.gz', lambda _: gzip.compress(os.urandom(9999))[:-20]),
    ),
    ('not zst', *P, '--dataset=e.txt.zst', 'e.txt.zst', damage('e.txt.zst', lambda _: b'plain text')),
    ('unknown kind of file', *P, '--dataset=e.pdf', 'e.pdf', damage('e.pdf', lambda _: b'%PDF')),
    ('parquet without text', *P, '--dataset=x.parquet', 'content, url', bad_parquet),
    ('damaged parquet', *P, '--dataset=x.parquet', 'x.parquet', damage('x.parquet', lambda _: b'PAR1 no PAR1')),
    ('B too small', *P, '--dataset=docs.jsonl', '--num_buckets=1', 'num_buckets=1', None),
    ('B too large', *P, '--dataset=docs.jsonl', '--num_buckets=65537', 'num_buckets=65537', None),
    ('full hash prefix', *P, '--dataset=docs.jsonl', '--num_hashes=1', '--num_buckets=1000', 'prefix () is full', None),
    ('more LSH than hashes', *P, '--dataset=docs.jsonl', '--num_lsh=9', 'num_lsh=9', None),
    ('val_fraction', *P, '--dataset=docs.jsonl', '--val_fraction=2', 'val_fraction=2', None),
    ('wrong type', *P, '--num_hashes=four', "num_hashes='four'", None),
    ('folder below a file', 'prepare.py', 'cfg.py', '--data_dir=docs.jsonl/x', 'docs.jsonl/x cannot be written', None),
    ('folder holds other data', 'prepare.py', 'cfg.py', '--num_buckets=512', 'num_buckets=256, not 512', None),
    ('data not prepared', *T, '--data_dir=nothing', 'python prepare.py cfg.py --data_dir=nothing', None),
    ('bins of another tokenizer', *T, '--tokenizer=tekken', 'tokenizer=mistral', None),
    ('bins of another B', *T, '--num_buckets=512', 'num_buckets=256', None),
    ('bins of another H', *T, '--num_hashes=4', 'num_hashes=3', None),
    ('bins with a table, Standard wanted', *T, '--num_hashes=0', 'num_hashes=3', None),
    (
        'truncated bin',
        *T,
        'bins/train_000000.bin is no whole bin',
        damage('bins/train_000000.bin', lambda raw: raw[:-100]),
    ),
    (
        'bin cut in its header',
        *T,
        'bins/train_000000.bin is no whole bin',
        damage('bins/train_000000.bin', lambda raw: raw[:20]),
    ),
    (
        'foreign bin',
        *T,
        'bins/train_000000.bin is no whole bin',
        damage('bins/train_000000.bin', lambda _: b'nanoGPT was here' * 99),
    ),
    (
        'bin of other data',
        *T,
        'bins/val_000000.bin holds',
        lambda f: shutil.copy(f / 'bins/train_000000.bin', f / 'bins/val_000000.bin'),
    ),
    (
        'bucket over B',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        'has bucket 65535',
        edit_rows,
    ),
    (
        'damaged shard',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        'train_000000.bin is damaged: its digest is',
        damage('bins/train_000000.bin', lambda raw: raw[:5000] + b'\0' + raw[5001:]),
    ),
    ('missing bin', *T, 'bins/train_000000.bin is missing', lambda f: (f / 'bins/train_000000.bin').unlink()),
    ('damaged meta.json', *T, 'meta.json is damaged', damage('bins/meta.json', lambda raw: raw[:50])),
    ('changed table', *T, 'fingerprint', damage('bins/signatures.npy', lambda raw: raw[:-2] + b'\x07\x00')),
    ('vocabulary that does not fit', *T, 'vocab_size=32000', edit_meta(vocab_size=32000)),
    ('block_size over the data', *T, '--block_size=1000000', 'block_size=1000000', None),
    ('batch that does not divide', *T, '--batch_size=9', '--micro_batch_size=3', None),
    ('no such GPU', *T, '--device=cuda:7', 'cuda:7', None),
    ('no such device', *T, '--device=abacus', 'abacus', None),
    (
        'no peers',
        *T,
        '--timeout=2',
        'process 0 of 2 did not meet',
        lambda f: environment(MASTER_PORT=str(free_port()))(f),
    ),
    ('a port in use', *T, '--timeout=2', 'EADDRINUSE', port_in_use),
    ('no address of the master', *T, 'MASTER_PORT', environment()),
    ('a rank that is none', *T, 'RANK=two', environment(RANK='two')),
    ('a rank over the number of processes', *T, 'RANK=2, WORLD_SIZE=2', environment(RANK='2')),
    ('their number without a rank', *T, 'RANK=None, WORLD_SIZE=8', lambda f: dict(WORLD_SIZE='8')),
    ('a rank without their number', *T, 'WORLD_SIZE=', lambda f: dict(RANK='1')),
    ('no time to wait', *T, '--timeout=0', 'timeout=0', None),
    ('too little memory', *T, '--intermediate_size=100000000000', 'not enough memory on cpu', None),
    ('no such backend', *T, '--backend=mpi', 'backend=mpi', None),
    ('no such dtype', *T, '--dtype=float8', 'dtype=float8', None),
    ('out_dir below a file', 'train.py', 'cfg.py', '--out_dir=docs.jsonl/x', 'docs.jsonl/x cannot be written', None),
    ('checkpoint is there already', 'train.py', 'cfg.py', '--init_from=resume', None),
    ('resume from nothing', *T, '--init_from=resume', 'no checkpoint at new/ckpt.pt', None),
    (
        'resume from a foreign file',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        'ckpt.pt is no checkpoint',
        only_checkpoint(lambda _: b'PK\x03\x04 zip'),
    ),
    (
        'resume from half a checkpoint',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        'ckpt.pt is no checkpoint',
        only_checkpoint(lambda raw: raw[: len(raw) // 2]),
    ),
    (
        'resume another architecture',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--num_layers=3',
        'num_layers=2 (now 3)',
        None,
    ),
    (
        'resume on other data',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        'tokenizer_sha256',
        edit_meta(tokenizer_sha256='0'),
    ),
    (
        'resume on another tokenizer by new_data',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        '--new_data',
        'tokenizer_sha256',
        edit_meta(tokenizer_sha256='0'),
    ),
    ('resume with another batch', 'train.py', 'cfg.py', '--init_from=resume', '--batch_size=4', 'batch_size=8', None),
    (
        'resume with another weight decay',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--weight_decay=0',
        'decay=0.1',
        None,
    ),
    ('resume with another beta', 'train.py', 'cfg.py', '--init_from=resume', '--beta2=0.9', 'beta2=0.999', None),
    (
        'a log that is a folder',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        'log.jsonl cannot be written',
        lambda f: ((f / 'out/log.jsonl').unlink(), (f / 'out/log.jsonl').mkdir()),
    ),
    (
        'a folder in the way of a checkpoint',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        'ckpt.pt.tmp',
        lambda f: (f / 'out/ckpt.pt.tmp').mkdir(),
    ),
    ('resume with another seed', 'train.py', 'cfg.py', '--init_from=resume', '--seed=7', 'seed=', None),
    ('export of nothing', *T, '--export=x', 'needs --init_from=resume', None),
    ('export over a folder', 'train.py', 'cfg.py', '--init_from=resume', '--export=bins', 'there already', None),
    ('keep', *T, '--keep=-1', 'keep=-1', None),
    ('resume what is done', 'train.py', 'cfg.py', '--init_from=resume', 'max_steps=24', None),
    ('unknown init_from', *T, '--init_from=gpt2', "init_from='gpt2'", None),
    ('no released model', *T, '--init_from=released:nowhere', 'nowhere', None),
    ('released model too small for the bins', *T, '--init_from=released:small', 'vocab_size=300', small_release),
    ('no such loss', *T, '--loss=exat', "did you mean 'exact'", None),
    (
        'resume with another loss',
        'train.py',
        'cfg.py',
        '--init_from=resume',
        '--max_steps=30',
        '--loss=product',
        'loss=exact (now product)',
        None,
    ),
    ('no steps', *T, '--max_steps=0', 'max_steps=0', None),
    ('warm-up over the schedule', *T, '--warmup_steps=24', 'warmup_steps=24', None),
    ('heads that do not divide', *T, '--num_kv_heads=3', 'num_kv_heads=3', None),
    ('wandb not installed', *T, '--wandb', 'wandb', None),
    ('flag without value', *T, '--learning_rate', '--learning_rate needs a value', None),
    ('setting of another script', *T, '--temperature=1', 'sample.py has it', None),
    ('nothing to sample from', 'sample.py', 'no ckpt.pt', lambda f: shutil.rmtree(f / 'out')),
    ('missing checkpoint', *S, '--out_dir=nowhere', 'nowhere/ckpt.pt', None),
    ('foreign checkpoint', *S, 'no checkpoint of train.py', damage('out/ckpt.pt', lambda _: b'hello')),
    ('another tokenizer than the checkpoint', *S, '--tokenizer=tekken', "'tekken'", None),
    ('top_k of 0', *S, '--top_k=0', 'top_k=0', None),
    ('top_k over V', *S, '--top_k=40000', 'top_k=40000', None),
    ('top_k no number', *S, '--top_k=many', "top_k='many'", None),
    ('top_p of 0', *S, '--top_p=0', 'top_p=0', None),
    ('temperature below 0', *S, '--temperature=-1', 'temperature=-1', None),
    ('missing prompt', *S, '--start=FILE:no.txt', 'no.txt', None),
    ('no samples', *S, '--num_samples=0', 'num_samples=0', None),
    ('sample on no such device', *S, '--device=cuda:9', 'cuda:9', None),
    ('released of another tokenizer', *S, '--released=small', 'tokens, the model 300', small_release),
]


def snapshot(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob('*'))
        if p.is_file()
    } | {str(p.relative_to(folder)): None for p in folder.rglob('*') if p.is_dir()}


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_bench(trained, num_hashes):
    """A part of bench.py does not run, or its FLOPs are not those of the model's matrix products."""
    few = ['--repeats=1', '--head_tokens=64', '--new_tokens=2', f'--num_hashes={num_hashes}', '--num_buckets=256']
    parts = 'train,head,generate,infer,prepare' if num_hashes else 'train'
    r = json.loads(ok('bench.py', 'cfg.py', '--json', f'--parts={parts}', *few, cwd=trained).stdout)
    assert set(r) == {'config', 'device', 'dtype', 'torch', 'gemm_flops', *parts.split(',')}
    if num_hashes:
        assert 'lean/plain' in ok('bench.py', 'cfg.py', '--parts=head', *few, cwd=trained).stdout
        assert {row['loss'] for row in r['head']} == {'exact', 'product', 'Standard'}
        assert all(
            rate > 0 for part in r['prepare'].values() for rate in (part.values() if isinstance(part, dict) else [part])
        )
        assert 0 < r['generate']['exact']['bandwidth_share'] < 10

    c = MHFConfig(**{k: v for k, v in r['config'].items() if k in MHFConfig.__annotations__})
    for name, h in (('exact', num_hashes or 4), ('Standard', 0)):
        c = replace(c, num_hashes=h, num_buckets=256 if num_hashes else 16384)
        m = MHF(c, None if h == 0 else np.ones((c.vocab_size, h)))
        ids = torch.zeros(1, c.block_size, dtype=torch.long)
        with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            m(m.signatures[ids], m.signatures[ids])
        # the counter counts all of the attention, we the causal half
        upper_half = 2 * c.num_layers * c.num_heads * c.head_dim * (c.block_size - 1)
        assert counted.get_total_flops() / c.block_size - upper_half == r['train'][name]['flops_per_token'] / 3


def test_plan(trained):
    """bench.py --plan promises memory that training does not keep to, or 3B no longer fits eight GPUs of 80 GB."""

    def plan(*args):
        return json.loads(ok('bench.py', *args, '--plan', '--json', cwd=trained).stdout)['plan']

    promised = plan('cfg.py', '--num_layers=5')['memory']
    settings = configurator.read_config(trained / 'cfg.py') | dict(num_layers=5)
    m = MHF(MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__}))
    kept = {}

    def note(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast('cpu', torch.bfloat16):
        m.hidden(torch.zeros(4, 64, 3, dtype=torch.long))
    own = {p.untyped_storage()._cdata for p in m.parameters()}
    measured = sum(s.nbytes() for k, s in kept.items() if k not in own)
    assert promised['activations'] + promised['bfloat16 copies of weights'] == pytest.approx(measured, rel=0.02)
    assert plan('cfg.py', '--num_layers=5', '--activation_checkpointing')['memory']['activations'] < measured / 2
    big = plan('config/mhf_3b.py')
    assert big['fits'] and big['parameters'] == 2914422081 and big['memory']['optimizer'] == 8 * 2914422081


# -----------------------------------------------------------------------------
# eval.py


def exact_scorer(m, bos=1, batch_size=256, tokens=200):
    return evaluation.Scorer(m, bos, batch_size, tokens, contextlib.nullcontext)


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_scorer_equals_log_probs(num_hashes):
    """Continuations of a shared context see each other, a position is off by one, or the batch changes the score."""
    m = random_model(num_hashes=num_hashes)
    draw = np.random.default_rng(0)
    some = lambda n: draw.integers(3, 300, n).tolist()
    contexts = [some(n) for n in (1, 5, 5, 20, 60)]
    requests = [(c, some(n)) for c in contexts for n in (1, 1, 4, 24)]
    requests += [requests[3], (contexts[1], requests[2][1])]  # the same twice, and another context's continuation
    for bos in (1, None):
        by_hand = []
        for context, continuation in requests:
            ids = ([bos] if bos else []) + context + continuation
            ids = torch.tensor(ids[-(m.config.block_size + 1) :])
            logp = m.log_probs(ids[None, :-1])[0, -len(continuation) :]
            picked = logp.gather(1, ids[-len(continuation) :, None])
            by_hand.append((picked.sum().item(), bool((logp.argmax(1) == ids[-len(continuation) :]).all())))
        for batch_size, tokens in ((256, 10**6), (1, 10**6), (16, 10**6), (256, 100), (256, 1)):
            known, scorer = {}, exact_scorer(m, bos, batch_size, tokens)
            got = scorer(requests, known.__setitem__)
            assert known == dict(enumerate(got))
            assert [g for _, g in got] == [g for _, g in by_hand]
            assert np.allclose([a for a, _ in got], [a for a, _ in by_hand], atol=1e-9)
        assert len(scorer.rows(requests)) < len(requests)
    scorer.batch_size, scorer.tokens, score, sizes = 256, 10**6, scorer.score, []

    def small_memory(batch):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return score(batch)

    scorer.score = small_memory
    assert np.allclose([a for a, _ in scorer(requests)], [a for a, _ in by_hand], atol=1e-9) and sizes[0] > 2
    likeliest = m.log_probs(torch.tensor([[1, *contexts[1]]]))[0, -1].argmax().item()
    assert exact_scorer(m)([(contexts[1], [likeliest])])[0][1] is True
    for context, continuation, message in (([5], [], 'empty continuation'), ([5], [7] * 25, '25 tokens')):
        with pytest.raises(InputError, match=message):
            exact_scorer(m)([(context, continuation)])


def test_sliding_windows():
    """A token is scored twice or not at all, or with less context than half of what the model has."""
    m = random_model()  # a context of 24
    for n in (1, 23, 24, 25, 36, 37, 100):
        ids = np.random.default_rng(n).integers(3, 300, n).tolist()
        nats, right, confidence = evaluation.sliding(exact_scorer(m), 1, ids)
        assert len(nats) == n
        whole = [1, *ids]
        for i in range(n):  # windows of 24 inputs begin at 0, 12, 24, ...
            begin = 0 if i < 24 else (i - 12) // 12 * 12
            logp = m.log_probs(torch.tensor([whole[begin : i + 1]]))[0, -1]
            assert i + 1 - begin <= 24 and (begin == 0 or i - begin >= 12)
            assert torch.allclose(-logp[whole[i + 1]], nats[i], atol=1e-9)
            assert torch.allclose(logp.max().exp(), confidence[i]) and right[i] == (logp.argmax() == whole[i + 1])


def test_prepared_split(tmp_path):
    """A bin's signatures are read back as other ids than they were made from, or a bin of another tokenizer is accepted."""

    class Tok:
        name, tokens = 'small', [f'w{i}' for i in range(300)]

    m = random_model()
    m.signatures[250], m.is_token[250] = 0, False  # a gap, which has the padding token's signature
    ids = [m.config.pad_id, 5, 299, 7, m.config.pad_id, 5]
    np.save(tmp_path / 'x.npy', m.signatures[ids].numpy().astype(np.uint16))
    (tmp_path / 'x.npy').rename(tmp_path / 'val_000000.bin')
    shard = dict(file='val_000000.bin', tokens=len(ids), digest='')
    val = dict(tokens=len(ids), documents=1, bytes=30, shards=[shard])
    meta = dict(tokenizer='small', tokenizer_sha256=tokenizer_fingerprint(Tok), num_hashes=3, complete=True)
    meta |= dict(vocab_size=300, pad_id=m.config.pad_id, gaps=[250], table_sha256='', splits=dict(train=val, val=val))
    (tmp_path / 'meta.json').write_text(json.dumps(meta))
    assert evaluation.prepared_split(tmp_path, m, Tok) == (ids, 30)
    Tok.tokens = Tok.tokens[:-1]
    with pytest.raises(InputError, match="tokenizer 'small'"):
        evaluation.prepared_split(tmp_path, m, Tok)
    with pytest.raises(InputError, match='not a folder of prepare.py'):
        evaluation.prepared_split(tmp_path / 'x', m, Tok)


def test_harness_text_and_generation(mistral):
    """lm-eval's perplexity and generation tasks get something else than the model's likelihood and its greedy text."""
    m = random_model(vocab_size=32768, num_buckets=300, dtype=torch.float32)
    lm_scorer = exact_scorer(m)
    lm = evaluation.harness(lm_scorer, mistral)
    request = lambda *args: types.SimpleNamespace(args=args)
    ids = mistral.encode(['a few words'])[0]
    by_hand = m.log_probs(torch.tensor([[1, *ids[:-1]]]))[0].gather(1, torch.tensor(ids)[:, None]).sum().item()
    assert lm.loglikelihood_rolling([request('a few words')]) == pytest.approx([by_hand], rel=1e-4)
    greedy = m.generate(torch.tensor([[1, *ids]]), 6, temperature=0)[0, 1 + len(ids) :].tolist()
    said = mistral.decode(greedy[: greedy.index(1)] if 1 in greedy else greedy)
    assert lm.generate_until([request('a few words', dict(until=[], max_gen_toks=6))]) == [said]
    stop = said[len(said) // 2]
    assert lm.generate_until([request('a few words', dict(until=stop, max_gen_toks=6))]) == [said.split(stop)[0]]
    kept, score = [], lm_scorer.score
    lm.set_cache_hook(types.SimpleNamespace(add_partial=lambda kind, request, result: kept.append(request)))
    lm_scorer.batch_size = 1
    lm_scorer.score = lambda batch: score(batch) if not kept else 1 / 0  # interrupted at the second batch
    with pytest.raises(ZeroDivisionError):
        lm.loglikelihood([request('a longer context', ' here'), request('one', ' two')])
    assert kept == [('a longer context', ' here')]
    with pytest.raises(InputError, match='greedy'):
        lm.generate_until([request('a', dict(until=[], temperature=0.7))])


def test_calibration_error():
    """The expected calibration error is not the weighted gap between accuracy and confidence."""
    right, confidence = torch.tensor([1.0, 0, 1, 1]).double(), torch.tensor([0.9, 0.9, 1.0, 0.31]).double()
    assert evaluation.calibration_error(right, confidence) == pytest.approx((abs(1 - 1.8) + 0 + 0.69) / 4)


# four documents of each task in the hub's schema: (file, documents, right continuations, is the right one first, ... longest)
QUESTIONS = [
    ('alpha one', 'b', 'cc', 0),
    ('a', 'beta two', 'c', 1),
    ('aa', 'b', 'gamma three', 2),
    ('delta', 'bb', 'cc', 0),
]


def small_tasks(folder):
    """Writes four documents for each of the paper's tasks; returns the right continuations of each task."""
    right = {}

    def write(name, rows, answers, *splits):
        for split in splits:
            write_jsonl_rows(folder / f'{name}_{split}.jsonl', rows)
        right[name] = set(answers)

    letters = 'ABCD'
    choices = lambda q: {'text': list(q[:3]), 'label': list(letters[:3])}
    lambada = [{'text': f'he went to the old {w}'} for w in ('house', 'river', 'garden', 'school')]
    for name in ('lambada_openai', 'lambada_standard'):
        write(name, lambada, (' ' + r['text'].split()[-1] for r in lambada), 'test')
    arc = [
        dict(id=str(i), question='Which?', choices=choices(q), answerKey=letters[q[3]]) for i, q in enumerate(QUESTIONS)
    ]
    write('arc_easy', arc * 3, (' ' + q[q[3]] for q in QUESTIONS), 'train', 'test')
    obqa = [
        dict(id=str(i), question_stem='It is', choices=choices(q), answerKey=letters[q[3]])
        for i, q in enumerate(QUESTIONS)
    ]
    write('openbookqa', obqa * 3, (' ' + q[q[3]] for q in QUESTIONS), 'train', 'test')
    two = [q for q in QUESTIONS if q[3] < 2] + [('x', 'yyy', '', 1)]
    copa = [
        dict(premise='It rained.', choice1=q[0], choice2=q[1], question='cause', idx=i, label=q[3])
        for i, q in enumerate(two)
    ]
    write('copa', copa, ('  ' + q[q[3]] for q in two), 'validation')
    write(
        'piqa',
        [dict(goal='Do.', sol1=q[0], sol2=q[1], label=q[3]) for q in two],
        (' ' + q[q[3]] for q in two),
        'validation',
    )
    hella = [
        dict(
            ind=i,
            activity_label='Act',
            ctx_a='He',
            ctx_b='runs',
            ctx='He runs',
            endings=[*q[:3], 'z'],
            label=str(q[3]),
            source_id='',
            split='',
            split_type='',
        )
        for i, q in enumerate(QUESTIONS)
    ]
    write('hellaswag', hella, (' ' + q[q[3]] for q in QUESTIONS), 'validation')
    problem = lambda q: str([dict(question='Which?', answer=letters[q[3]], options=[*q[:3], 'z'])])
    write(
        'race_high',
        [dict(article='Text.', problems=problem(q)) for q in QUESTIONS],
        (' ' + q[q[3]] for q in QUESTIONS),
        'test',
    )
    sciq = [
        dict(question='Which?', distractor1='aa', distractor2='b', distractor3='cc', correct_answer=w, support='S.')
        for w in ('long right', 'd', 'other right', 'e')
    ]
    write('sciq', sciq, (' ' + r['correct_answer'] for r in sciq), 'validation')
    siqa = [
        dict(context='C.', question='Q?', answerA=q[0], answerB=q[1], answerC=q[2], label=str(q[3] + 1))
        for q in QUESTIONS
    ]
    write('social_i_qa', siqa * 3, (' ' + q[q[3]] for q in QUESTIONS), 'validation')
    record = [
        dict(
            passage='Text.\n@highlight\nOne',
            query='It was @placeholder .',
            entities=list(q[:3]),
            entity_spans=dict(text=[], start=[], end=[]),
            answers=[q[q[3]]],
            idx=dict(passage=i, query=i),
        )
        for i, q in enumerate(QUESTIONS)
    ]
    write('record', record, (f'   - It was {q[q[3]]} .' for q in QUESTIONS), 'validation')
    return right


def write_jsonl_rows(path, rows):
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows), encoding='utf-8')


def test_mubench_files(tmp_path, monkeypatch, mistral):
    """A task file of MuBench does not read its schema, or names another language's data."""
    rows = [dict(prompt='The sky is', choices=[' blue', ' a wall', ' to'], label=k) for k in (0, 1, 2, 1)]
    write_jsonl_rows(tmp_path / 'mubench_hellaswag_ar_test.jsonl', rows)
    write_jsonl_rows(tmp_path / 'mubench_mmlu_hi_test.jsonl', rows)
    monkeypatch.setattr(evaluation, 'data_dir', str(tmp_path))
    got, _ = evaluation.run_tasks(
        ['mubench_hellaswag_ar', 'mubench_mmlu_hi'],
        evaluation.harness(exact_scorer(random_model(vocab_size=32768, num_buckets=300)), mistral),
        None,
    )
    assert all(got['n-samples'][t]['effective'] == 4 and 'acc_norm,none' in r for t, r in got['results'].items())
    for file in (REPO / 'eval_tasks').glob('mubench_*.yaml'):
        _, task, language = file.stem.split('_')
        written = file.read_text()
        assert f'task: {file.stem}\n' in written and f'Dataset_lighteval_{language}\n' in written
        assert task in written.lower()
    assert len(list((REPO / 'eval_tasks').glob('mubench_*.yaml'))) == 16


def test_known_answers(tmp_path, monkeypatch, mistral):
    """A task's text, answer, metric, shots or file is not what it must be: a model that knows all answers would not score 1."""
    right = small_tasks(tmp_path)
    monkeypatch.setattr(evaluation, 'data_dir', str(tmp_path))

    class Known:
        """Scores continuations by what `judge` says of their text."""

        model, world_size, device = random_model(), 1, 'cpu'

        def __init__(self, judge):
            self.judge = judge

        def __call__(self, requests, done):
            scores = [self.judge(mistral.decode(continuation)) for _, continuation in requests]
            return [(s, s == 0) for s in scores]

    answers, scores = {a.strip() for texts in right.values() for a in texts}, {}
    for name, judge in (('oracle', lambda s: 0.0 if s.strip() in answers else -99.0), ('constant', lambda s: -1.0)):
        got, notes = evaluation.run_tasks(list(evaluation.PAPER), evaluation.harness(Known(judge), mistral), None)
        scores[name] = [got['results'][t][f'{evaluation.PAPER[t][1]},none'] for t in evaluation.PAPER]
    assert scores['oracle'] == [1.0] * 11
    # the constant model takes the first choice, or where scores are divided by length, the longest
    assert scores['constant'] == [0, 0, 1, 0.5, 1, 0.5, 1, 0.5, 0.5, 1, 0.25]
    assert {t: got['n-shot'][t] for t in evaluation.PAPER} == {t: p[0] for t, p in evaluation.PAPER.items()}
    assert {t for t, note in notes.items() if note} == {'sciq', 'social_iqa'} and 'validation split for test' in notes[
        'sciq'
    ]


def test_eval(trained, tmp_path):
    """The command's numbers depend on the batch, the cache or the number of processes; or are not those of train.py."""
    small_tasks(tmp_path)
    (tmp_path / 'dataset.tsv').write_text('red\tblue\t3.5\nnew_york\tcity\t2.0\nsun\tmoon\t1.0\n')
    (tmp_path / 'text.txt').write_text(real_documents()[0][:2000])
    base = [
        '--device=cpu',
        '--dtype=float32',
        f'--out_dir={trained}/out',
        f'--data_dir={tmp_path}',
        '--tokenizer=mistral',
    ]
    every = [*base, '--tasks=arc_easy,record,bits_per_byte,card660', f'--text={tmp_path}/text.txt']

    def results(name, *args, **kwargs):
        done = ok('eval.py', *args, f'--save={tmp_path}/{name}.json', cwd=tmp_path, **kwargs)
        return json.loads((tmp_path / f'{name}.json').read_text()), done

    one, done = results('one', *every, '--batch_size=1', '--plot')
    assert 'arc_easy' in done.stdout and 'bits_per_byte' in done.stdout and (tmp_path / 'one.png').stat().st_size > 5000
    many, _ = results('many', *every, '--batch_size=16', torchrun=['--nproc_per_node=2'])
    again, done = results('one', *every)
    assert 'scoring: ' not in done.stderr  # everything was in the cache
    for other in (many, again):
        assert other['card660'] == pytest.approx(one['card660'], rel=1e-4)
        (a,), (b,) = other['bits_per_byte'].values(), one['bits_per_byte'].values()
        assert a == pytest.approx(b, rel=1e-5)
        assert [(t, r['score']) for t, r in other['tasks'].items()] == [
            (t, r['score']) for t, r in one['tasks'].items()
        ]
    split, _ = results('split', *base, '--tasks=bits_per_byte', f'--text={trained}/bins')
    meta = json.loads((trained / 'bins' / 'meta.json').read_text())['splits']['val']
    values = split['bits_per_byte'][f'{trained}/bins']
    assert values['bytes'] == meta['bytes'] and values['tokens'] == meta['tokens'] - 1
    # windows that overlap see more context than those of train.py's validation, which do not
    validated = [e['val_nats'] for e in events(trained) if 'val_nats' in e][-1]
    assert validated - 0.5 < values['nats_per_token'] < validated + 0.02
    assert set(one['tasks']) == {'arc_easy', 'record'} and one['tasks']['arc_easy']['documents'] == 12


@pytest.fixture(scope='session')
def bad_runs(trained, request, tmp_path_factory):
    """Every collected row of BAD, started on all cores at once: {name: future}."""
    names = {item.callspec.params['name'] for item in request.session.items if 'bad_runs' in item.fixturenames}

    def one(name, *rest):
        *command, culprit, setup = rest
        folder = tmp_path_factory.mktemp('bad') / 'work'
        shutil.copytree(trained, folder)
        environment = setup(folder) if setup else None
        before = snapshot(folder)
        done = run(*command, cwd=folder, **environment if isinstance(environment, dict) else {})
        return culprit, done, before, snapshot(folder)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {row[0]: pool.submit(one, *row) for row in BAD if row[0] in names}


@pytest.mark.xdist_group('bad')  # one process starts them all
@pytest.mark.parametrize('name', [row[0] for row in BAD])
def test_bad_input(bad_runs, name):
    """The user sees a traceback, a riddle, or finds files changed by a command that failed."""
    culprit, done, before, after = bad_runs[name].result()
    assert done.returncode == 1, (done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and culprit in lines[0], done.stderr
    assert before == after
