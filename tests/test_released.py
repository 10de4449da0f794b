"""mhf/released.py: the authors' format in both directions."""

import json
from dataclasses import asdict
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from conftest import assert_same, ok, real_documents, snapshot, weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hashing import signature_table
from mhf.checkpoint import load
from mhf.errors import InputError
from mhf.lm import open_lm
from mhf.released import from_pretrained, save_pretrained
from mhf.tokenizer_json import write_tokenizer
from mhf.tokenizers import JSON_FILES, get_tokenizer
from test_mhf import SAYINGS, bucket_logits, random_model, write_released


def test_export_of_a_run(quick):
    """A run, its export and the model that expand.py grows from it add bos; a folder of the authors does not."""
    ok('mhf.released', 'out', 'export', cwd=quick)
    assert_same(dict(from_pretrained(quick / 'export').state_dict()), dict(weights(quick)['model']))
    assert load(str(quick / 'export')).tok.name == 'mistral'
    ok('expand.py', '--source_model=export', '--corpora=docs.jsonl@9', '--tokenizer=x.model', '--output_dir=grown',
       cwd=quick)  # fmt: skip
    assert load(quick / 'out').add_bos
    for name in ('export', 'grown'):
        assert load(str(quick / name)).add_bos
        config = json.loads((quick / name / 'config.json').read_text())
        del config['add_bos']
        (quick / name / 'config.json').write_text(json.dumps(config))
        assert not load(str(quick / name)).add_bos


def test_stop_ids(tmp_path):
    """
    A document ends at bos, eos, pad, and at every eos of config.json and generation_config.json. A model without pad
    uses the first eos.
    """
    name = learned_model(tmp_path)
    m = random_model(num_hashes=0, vocab_size=600, num_layers=1, dtype=torch.float32)
    write_released(tmp_path / 'b', m, eos_token_id=[7, 9], pad_token_id=-1)
    (tmp_path / 'b/generation_config.json').write_text('{"eos_token_id": [11], "top_k": 5}')
    opened = load(str(tmp_path / 'b'), name)
    assert open_lm(str(tmp_path / 'b'), name, device='cpu').stop_ids == opened.stop_ids
    assert opened.stop_ids == {1, 2, 7, 9, 11} and opened.model.config.pad_id == 7
    save_pretrained(opened.model, tmp_path / 'c', name, opened.add_bos, [7, 9, 11])
    assert load(str(tmp_path / 'c')).stop_ids == {1, 2, 7, 9, 11}


def test_from_the_hub(tmp_path, monkeypatch):
    """A hub id is fetched at its revision, without code or pickles."""
    folder = write_released(tmp_path / 'm', random_model())
    tok = get_tokenizer(learned_model(tmp_path))
    write_tokenizer(tok, folder, add_bos=True)
    download = Mock(return_value=str(folder))
    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    from_pretrained('klein9692/some-model@checkpoint-20000')
    [(args, options)] = download.call_args_list
    assert args == ('klein9692/some-model',) and options['revision'] == 'checkpoint-20000'
    assert not [p for p in options['allow_patterns'] if p.endswith(('.bin', '.pt', '.py', '*'))]
    # of a tokenizer, only the JSON files are downloaded
    assert get_tokenizer('user/name@v1').tokens == tok.tokens
    download.assert_called_with('user/name', revision='v1', allow_patterns=list(JSON_FILES))


def test_the_head_is_the_embedding(tmp_path):
    """lm_head.weight may equal the embedding, or be absent."""
    folder = write_released(tmp_path, random_model(num_hashes=0, dtype=torch.float32))
    file = folder / 'model.safetensors'
    weights = load_file(file)
    E = weights['model.embed_tokens.weight']
    save_file(weights | {'lm_head.weight': E.clone()}, file)
    assert torch.equal(from_pretrained(folder).embed.weight, E)
    save_file(weights | {'lm_head.weight': E + 1}, file)
    with pytest.raises(RuntimeError, match='lm_head.weight'):
        from_pretrained(folder)


# -----------------------------------------------------------------------------
# an export


TEXTS = [*SAYINGS, 'a     b  \n\n c ', '</s><s> <0x0A>', ' leading', '', 'हिन्दी 中文 العربية 👩\u200d👧', '\tx\r\n' * 3]
TEXTS += [' ' * n + 'x' for n in range(2, 40)]


def learned_model(folder, **options):
    """Returns a SentencePiece model that is trained on a few modules of the standard library."""
    lines = [line for text in real_documents()[:4] for line in text.splitlines()]
    path = str(folder / 'learned.model')
    options = dict(model_type='bpe', vocab_size=600, byte_fallback=True, minloglevel=2) | options
    with open(path, 'wb') as f:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=f, **options)
    return path


def byte_level_json(folder):
    """
    Returns a tokenizer.json like Qwen's. It adds bos by itself, its bos contains a space and a colon, its BPE drops
    merges at random, it truncates and pads, and its config names a class of transformers.
    """
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ['<bos token:1>', '<|end|>', '<|pad|>']
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tok.train_from_iterator(real_documents()[:3], trainer)
    tok.model.dropout = 0.5
    tok.enable_truncation(5)
    tok.enable_padding(length=50)
    bos = dict(id='bos', ids=[0], tokens=special[:1])
    tok.post_processor = tokenizers.processors.TemplateProcessing('bos $A', special_tokens=[bos])
    tok.save(str(folder / 'tokenizer.json'))
    roles = dict(bos_token=special[0], eos_token='<|end|>', pad_token=dict(content='<|pad|>'))
    config = dict(tokenizer_class='Qwen2Tokenizer', add_bos_token=True, **roles)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return str(folder / 'tokenizer.json')


TOKENIZERS = dict(mistral=lambda folder: 'mistral', json=byte_level_json, learned=learned_model)


@pytest.mark.parametrize('kind, add_bos', [('mistral', True), ('json', True), ('learned', False)])
def test_transformers_reads_an_export(tmp_path, kind, add_bos):
    """transformers opens the folder of a Standard model: the same log P, the same ids, and the same special tokens."""
    name = TOKENIZERS[kind](tmp_path)
    tok = get_tokenizer(name)
    changes = dict(rope_theta=5e4) if kind == 'mistral' else {}
    changes |= dict(vocab_size=len(tok.tokens), pad_id=tok.pad, num_layers=1, dtype=torch.float32)
    m = random_model(num_hashes=0, **changes)
    folder = tmp_path / 'export'
    save_pretrained(m, folder, name, add_bos)
    hf_tok = AutoTokenizer.from_pretrained(folder)
    ids = tok.encode(TEXTS)
    assert hf_tok(TEXTS, add_special_tokens=False)['input_ids'] == ids
    assert hf_tok(TEXTS)['input_ids'] == [[tok.bos] * add_bos + i for i in ids]
    assert [hf_tok.decode(i) for i in ids] == [tok.decode(i) for i in ids]
    assert (hf_tok.bos_token_id, hf_tok.eos_token_id, hf_tok.pad_token_id) == (tok.bos, tok.eos, tok.pad)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generate(**hf_tok(['a text'], return_tensors='pt'), max_new_tokens=1)
    assert set(hf_tok('a text')) == {'input_ids', 'attention_mask'}
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (tok.bos, tok.eos, tok.pad)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == (sorted([tok.bos, tok.eos]) if add_bos else [tok.eos])
    x = torch.tensor([[tok.bos, *ids[0]]])
    assert (model(x).logits.log_softmax(-1) - m.log_probs(x)).abs().max() < 1e-5
    opened = load(str(folder))
    assert opened.tok.encode(TEXTS) == ids and torch.equal(opened.model.log_probs(x), m.log_probs(x))
    # an export of the export has the same files
    save_pretrained(opened.model, tmp_path / 'again', opened.tok.name, opened.add_bos, opened.eos_ids)
    assert snapshot(tmp_path / 'again') == snapshot(folder)


SENTENCEPIECE = [
    dict(normalization_rule_name='nfkc_cf'), dict(add_dummy_prefix=False, byte_fallback=False),
    dict(normalization_rule_name='identity', remove_extra_whitespaces=False),
    dict(user_defined_symbols=['<sep>', 'def', 'default']), dict(model_type='unigram', character_coverage=1.0),
]  # fmt: skip
NOT_EXPRESSIBLE = dict(treat_whitespace_as_suffix=True)


@pytest.mark.parametrize('options', [*SENTENCEPIECE, NOT_EXPRESSIBLE], ids=str)
def test_a_tokenizer_is_exported_with_the_same_ids_or_refused(tmp_path, options):
    """A SentencePiece model is converted to a tokenizer.json with the same ids, or refused."""
    tok = get_tokenizer(learned_model(tmp_path, **options))
    if options is NOT_EXPRESSIBLE:
        with pytest.raises(InputError, match='would encode .* differently'):
            write_tokenizer(tok, tmp_path, add_bos=False)
        return
    write_tokenizer(tok, tmp_path, add_bos=False)
    texts = [*TEXTS, *real_documents(), 'def default: <sep>def', '<sep>  x', 'ＡＢＣ ﬁ\n']
    assert AutoTokenizer.from_pretrained(tmp_path)(texts)['input_ids'] == tok.encode(texts)


TABLES = [(1, 0, False, 700), (2, 1, False, 300), (2, 2, False, 64), (2, 0, True, 300)]


@pytest.mark.parametrize('H, num_lsh, single_id, B', TABLES)
def test_a_released_table_is_that_of_the_tokenizer(tmp_path, H, num_lsh, single_id, B):
    """
    A released MultiHashFormer is refused with another tokenizer of the same size, whatever its hashes. single_id is
    exported, and inferred from the table of a model in the authors' format, which lacks it.
    """
    tok = get_tokenizer(learned_model(tmp_path))
    table = signature_table(tok.tokens, H, B, num_lsh, pad_id=2, unique=not single_id)
    m = random_model(num_hashes=H, num_buckets=B, num_lsh=num_lsh, vocab_size=600, dtype=torch.float32)
    m.set_vocabulary(table)
    loaded = load(str(write_released(tmp_path / 'right', m)), tok.name).model
    save_pretrained(loaded, tmp_path / 'export', tok.name)
    assert loaded.config.single_id == from_pretrained(tmp_path / 'export').config.single_id == single_id
    # that of the pieces in reverse order
    m.set_vocabulary(np.concatenate([table[:3], table[:2:-1]]))
    with pytest.raises(InputError, match='its table is not that of'):
        assert load(str(write_released(tmp_path / 'wrong', m)), tok.name).tok


def test_exports_that_transformers_refuses(tmp_path):
    """
    An id without a token keeps probability 0 after an export; transformers refuses what it would ignore, also a
    MultiHashFormer whose E has the size of a Qwen3's embedding.
    """
    unused = random_model(num_hashes=0, dtype=torch.float32, unused_ids=[5, 60, 299])
    scaled = random_model(num_hashes=0, embedding_scale=4.0, dtype=torch.float32)
    ids = torch.tensor([[1, 7, 9]])
    tokenizer = learned_model(tmp_path)
    same_size = random_model(num_buckets=100, dtype=torch.float32)
    for name, m in dict(same_size=same_size, scaled=scaled, unused=unused).items():
        save_pretrained(m, tmp_path / name, tokenizer)
        exported = from_pretrained(tmp_path / name)
        assert exported.config == m.config and torch.equal(exported.log_probs(ids), m.log_probs(ids))
        with pytest.raises(ValueError, match='model type `mhf`'):
            AutoConfig.from_pretrained(tmp_path / name)
    assert exported.log_probs(ids)[0, 0].isneginf().nonzero()[:, 0].tolist() == [5, 60, 299]


# -----------------------------------------------------------------------------
# config.json


REFUSED = [
    ('rope_type="yarn"', dict(rope_parameters=dict(rope_type='yarn', rope_theta=1e6, factor=4.0))),
    ('layer_types', dict(layer_types=['full_attention', 'sliding_attention'])),
]


@pytest.mark.parametrize('key, changes', REFUSED, ids=str)
def test_config_that_is_refused(tmp_path, key, changes):
    """A key of config.json that selects another computation is named in one line."""
    folder = write_released(tmp_path / 'm', random_model(dtype=torch.float32), **changes)
    with pytest.raises(InputError, match=key):
        from_pretrained(folder)


# keys that leave the computation unchanged, such as those that transformers 5 writes
ACCEPTED = dict(
    rope_theta=None, rope_parameters=dict(rope_type='default', rope_theta=1e4), rope_scaling=dict(rope_type='default'),
    sliding_window=4096, use_sliding_window=False, layer_types=['full_attention'] * 2, max_window_layers=28,
    attention_dropout=0.1, new_key=dict(a=1), initializer_range=0.02, pad_token_id=5, dtype='bfloat16',
    unused_ids=None, lsh_only_embed=False, use_conditional_prob=True, fused_decoding=True, quantization_config=None,
    # pad is the id whose signature is all zero
    eos_token_id=[7, 2],
)  # fmt: skip


@pytest.mark.parametrize('shards, changes', [(1, {}), (3, ACCEPTED)])
def test_config_that_is_accepted(tmp_path, shards, changes):
    """
    A released model of one file, or of the shards that its index names, with its RoPE base in either place, has the
    logits of its weights. Other files are ignored.
    """
    m = random_model(rope_theta=1e4, num_lsh=1)
    folder = write_released(tmp_path / 'm', m, shards, **changes)
    first = min(folder.glob('*.safetensors'))
    tensors = load_file(first)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / 'model-00004.safetensors')
    # a shard, too, may contain tensors that the index assigns to another one
    save_file({'model.norm.weight': torch.zeros(m.config.hidden_size)} | tensors, first)
    loaded = from_pretrained(folder)
    # the authors train with the product loss
    assert asdict(loaded.config) == asdict(m.config) | dict(loss='product')
    ids = torch.randint(0, 300, (2, 7))
    assert torch.equal(bucket_logits(loaded, ids), bucket_logits(m.float(), ids))
    assert torch.equal(loaded.log_probs(ids), m.log_probs(ids))
