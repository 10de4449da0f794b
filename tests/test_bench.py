"""bench.py and study/costs.py, which reads its table."""

import pytest
import torch
from conftest import ok

from configurator import read_config
from model import MHF, MHFConfig
from study.costs import measure


def test_bench(trained, monkeypatch):
    """Every benchmark prints a row per model, and study/costs.py reads the parameters and FLOPs of the model."""
    small = dict(block_size=16, num_buckets=256)
    flags = ['--repeats=1', *(f'--{key}={value}' for key, value in small.items())]
    printed = ok('bench.py', 'cfg.py', *flags, cwd=trained).stdout
    assert [line.split()[0] for line in printed.splitlines() if '%' in line] == ['exact', 'product', 'Standard']
    assert [line.split()[0] for line in printed.splitlines() if 'tokens/s ' in line][-2:] == ['MHF', 'Standard']
    settings = {k: v for k, v in read_config(trained / 'cfg.py').items() if k in MHFConfig.__annotations__} | small
    model = MHF(MHFConfig(**settings, vocab_size=32768, pad_id=2), torch.randint(1, 256, (32768, 3)).numpy())
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    measured = measure(settings | dict(tokenizer='mistral', micro_batch_size=4))
    assert measured['parameters'] == sum(model.num_params()) and measured['device'] == 'cpu'
    assert measured['flops_per_token'] == pytest.approx(model.estimate_flops(), abs=5e3)
    assert measured['tokens_per_s'] > 0 and 0 < measured['gemm_share'] < 2
