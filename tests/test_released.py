"""mhf/released.py: the authors' format in both directions, and what a folder declares about its model."""

import json

import pytest
import torch
from conftest import ok, random_model, write_released

from configurator import InputError
from mhf.released import open_model, save_pretrained


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
