"""bench.py's tables."""

import re

import pytest
import torch
from conftest import ok

from configurator import read_config
from model import MHF, MHFConfig


def test_bench(trained):
    """Every benchmark prints a row per model; a training step's has the parameters and FLOPs of the model."""
    small = dict(block_size=16, num_buckets=256)
    flags = ['--repeats=1', *(f'--{key}={value}' for key, value in small.items())]
    printed = ok('bench.py', 'cfg.py', *flags, cwd=trained).stdout
    assert [line.split()[0] for line in printed.splitlines() if ' GB' in line] == ['exact', 'product', 'Standard']
    assert [line.split()[0] for line in printed.splitlines() if 'tokens/s ' in line][-2:] == ['MHF', 'Standard']
    settings = {k: v for k, v in read_config(trained / 'cfg.py').items() if k in MHFConfig.__annotations__} | small
    model = MHF(MHFConfig(**settings, vocab_size=32768, pad_id=2), torch.randint(1, 256, (32768, 3)).numpy())
    _, parameters, _, speed, megaflops, *_ = re.search(r'^exact .*', printed, re.M)[0].replace(',', '').split()
    assert int(parameters) == sum(model.num_params()) and float(speed) > 0
    assert 1e6 * float(megaflops) == pytest.approx(model.estimate_flops(), abs=5e3)
