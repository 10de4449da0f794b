"""bench.py: every benchmark runs, and its figures are those of the model."""

import json

import pytest
import torch
from conftest import ok

from configurator import read_config
from model import MHF, MHFConfig


def model_config(path, **changes):
    settings = read_config(path) | dict(vocab_size=32768, pad_id=2) | changes
    return MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__})


def test_bench(trained):
    """Every benchmark runs, and its JSON contains the fields that study/costs.py reads."""
    names = ['train', 'infer', 'profile', 'head']
    args = ['--repeats=1', '--block_size=16', '--num_buckets=256', '--json_output', '--benchmarks=' + ','.join(names)]
    done = ok('bench.py', 'cfg.py', *args, cwd=trained)
    r = json.loads(done.stdout)
    assert set(r) == {'config', 'device', 'dtype', 'torch', 'threads', 'gemm_flops', *names}
    assert set(r['train']) == {'exact', 'product', 'Standard'}
    for variant, row in r['train'].items():
        c = model_config(trained / 'cfg.py', block_size=16, **dict(num_hashes=0) if variant == 'Standard' else {})
        model = MHF(c, torch.randint(1, 256, (32768, 3)).numpy() if c.num_hashes else None)
        assert row['flops_per_token'] == model.estimate_flops() and row['parameters'] == sum(model.num_params())
        assert row['tokens_per_s'] == pytest.approx(4 * 16 / row['seconds']) and row['peak_memory'] is None
        assert row['gemm_share'] == pytest.approx(row['flops_per_token'] * row['tokens_per_s'] / r['gemm_flops'])
    assert done.stderr.count('Self CPU time total') == 3
    assert set(r['head']) == {'columns, -log P', 'columns, -log P and gradient'}
    assert set(r['infer']) == {'MHF', 'Standard'}
    assert all(row['tokens_per_s'] > 0 and row['seconds'] > 0 for row in r['infer'].values())
