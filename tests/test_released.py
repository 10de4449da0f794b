"""mhf/released.py: the authors' format in both directions, and what a folder declares about its model."""

import json

import pytest
import torch
from conftest import ok, random_model, relative, write_released
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configurator import InputError
from hashing import signature_table
from mhf.released import from_pretrained, open_model, save_pretrained


def open_small(folder, **changes):
    """Opens a small Standard model in the released format, whose config.json has these fields."""
    m = random_model(num_hashes=0, vocab_size=32768, num_layers=1, dtype=torch.float32)
    return open_model(released=str(write_released(folder, m, **changes)), tokenizer='mistral')


def test_bos_is_stored(quick):
    """A run, its export and the model that expand.py grows from it add bos; a folder of the authors does not."""
    ok('mhf.released', 'out', 'export', cwd=quick)
    ok('expand.py', '--source_model=export', '--corpora=docs.jsonl@9', '--tokenizer=x.model', '--output_dir=grown',
       cwd=quick)  # fmt: skip
    assert open_model(out_dir=quick / 'out').add_bos
    for name in ('export', 'grown'):
        assert open_model(released=str(quick / name)).add_bos
        config = json.loads((quick / name / 'config.json').read_text())
        del config['add_bos']
        (quick / name / 'config.json').write_text(json.dumps(config))
        assert not open_model(released=str(quick / name)).add_bos
    # grown from a model without bos, and continued by train.py
    ok('expand.py', '--source_model=export', '--tokenizer=x.model', '--output_dir=grown_again', cwd=quick)
    assert not open_model(released=str(quick / 'grown_again')).add_bos
    ok('train.py', 'cfg.py', '--init_from=export', '--out_dir=more', '--max_steps=1', '--warmup_steps=0', cwd=quick)
    assert open_model(out_dir=quick / 'more').add_bos


def test_stop_ids(tmp_path):
    """A document ends at bos, eos, pad, and at every eos of config.json and generation_config.json."""
    assert open_small(tmp_path / 'a').stop_ids == {1, 2}
    assert open_small(tmp_path / 'b', eos_token_id=[7, 9], pad_token_id=2).stop_ids == {1, 2, 7, 9}
    (tmp_path / 'b/generation_config.json').write_text('{"eos_token_id": [11], "top_k": 5}')
    opened = open_model(released=str(tmp_path / 'b'), tokenizer='mistral')
    assert opened.stop_ids == {1, 2, 7, 9, 11}
    save_pretrained(opened.model, tmp_path / 'c', 'mistral', opened.add_bos, [7, 9, 11])
    assert open_model(released=str(tmp_path / 'c')).stop_ids == {1, 2, 7, 9, 11}
    for wrong in ('</s>', [2, '</s>'], 2.0, {}):
        with pytest.raises(InputError, match='eos_token_id='):
            open_small(tmp_path / str(wrong), eos_token_id=wrong, pad_token_id=2)


def test_from_the_hub(tmp_path, monkeypatch):
    """A hub id is fetched at its revision, without code or pickles; an unreachable hub is an error of one line."""
    import huggingface_hub

    folder = write_released(tmp_path / 'm', random_model())
    asked = {}

    def download(repo, revision=None, allow_patterns=None):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    from_pretrained('klein9692/some-model', revision='checkpoint-20000')
    assert asked['repo'] == 'klein9692/some-model' and asked['revision'] == 'checkpoint-20000'
    assert not [p for p in asked['patterns'] if p.endswith(('.bin', '.pt', '.py', '*'))]

    def offline(*_, **__):
        raise OSError('no\nnetwork')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
    with pytest.raises(InputError, match=r'could not be downloaded from the hub \(OSError: no network\)'):
        from_pretrained('klein9692/some-model')


def test_released_models_that_are_refused(tmp_path):
    """Checkpoints of another architecture are refused."""
    m = random_model()
    for key, value in dict(lsh_only_embed=True, attention_bias=True, num_hidden_layers=3, hidden_size=16).items():
        with pytest.raises(InputError, match=f'{key}|disagree'):
            from_pretrained(write_released(tmp_path / key, m, **{key: value}))
    file = write_released(tmp_path / 'untied', m) / 'model.safetensors'
    weights = load_file(file)
    save_file(weights | {'lm_head.weight': weights['model.embed_tokens.weight'] + 1}, file)
    with pytest.raises(InputError, match='lm_head'):
        from_pretrained(file.parent)
    save_file(weights | {'lm_head.weight': weights['model.embed_tokens.weight'].clone()}, file)
    from_pretrained(file.parent)
    file.write_bytes(b'not safetensors')
    with pytest.raises(InputError, match='cannot be read'):
        from_pretrained(file.parent)
    file.rename(file.with_name('pytorch_model.bin'))
    with pytest.raises(InputError, match='model.safetensors'):
        from_pretrained(file.parent)


def test_standard_is_exported_as_qwen3(tmp_path):
    """transformers loads an exported Standard model with embedding_scale 1 and computes the same logits."""
    m = random_model(num_hashes=0, dtype=torch.float32)
    save_pretrained(m, tmp_path / 'released', 'mistral')
    qwen3 = AutoModelForCausalLM.from_pretrained(tmp_path / 'released')
    ids = torch.randint(0, 300, (2, 7))
    assert relative(m.bucket_logits(ids)[:, :, 0], qwen3(ids).logits) < 1e-5


@pytest.mark.parametrize('H, single_id', [(1, True), (1, False), (3, True), (3, False)])
def test_single_id_survives_an_export(tmp_path, H, single_id):
    """single_id is exported, and inferred from the table of a model in the authors' format, which lacks it."""
    m = random_model(num_hashes=H, num_buckets=400, single_id=single_id, dtype=torch.float32)
    tokens = [f'w{i}' for i in range(300)]
    m.replace_vocabulary(signature_table(tokens, H, 400, pad_id=2, unique=not single_id), pad_id=2)
    save_pretrained(m, tmp_path / 'export', 'mistral')
    for folder in (tmp_path / 'export', write_released(tmp_path / 'authors', m)):
        assert from_pretrained(folder).config.single_id == single_id
