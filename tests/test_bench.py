"""bench.py: every benchmark runs, FLOPs and memory are those of the model, and --plan adds up."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ok

import bench
from configurator import read_config
from mhf.chunked import build_on_meta
from model import MHF, MHFConfig


def model_config(path, **changes):
    settings = read_config(path) | dict(vocab_size=32768, pad_id=2) | changes
    return MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__})


# bytes beyond parameters and optimizer of an eager step of the 100M models, 8 x 2,048 tokens: from a trace of the
# allocations, within 0.04 % of an H100's peak
H100_PEAKS = [
    (dict(loss='exact'), 13_382_084_742),
    (dict(loss='product'), 12_307_163_270),
    (dict(loss='exact', num_hashes=0), 10_603_593_736),
]


@pytest.mark.parametrize('changes, peak', H100_PEAKS)
def test_step_memory(changes, peak):
    """The estimated memory of a training step is within 15 % of an H100's."""
    memory = bench.step_memory(model_config('config/mhf_100m.py', **changes), 0, sequences=8, all_gradients=False)
    assert sum(memory.values()) == pytest.approx(peak, rel=0.15)


def test_bench(trained):
    """Every benchmark runs, and its JSON contains the fields that study/costs.py reads."""
    names = ['train', 'infer', 'profile']
    args = ['cfg.py', '--repeats=1', '--num_buckets=256', '--json_output', '--benchmarks=' + ','.join(names)]
    done = ok('bench.py', *args, cwd=trained)
    r = json.loads(done.stdout)
    assert set(r) == {'config', 'device', 'dtype', 'torch', 'threads', 'gemm_flops', *names}
    assert set(r['train']) == {'exact', 'product', 'Standard'}
    for variant, row in r['train'].items():
        c = model_config(trained / 'cfg.py', **dict(num_hashes=0) if variant == 'Standard' else {})
        model = MHF(c, torch.randint(1, 256, (32768, 3)).numpy() if c.num_hashes else None)
        assert row['flops_per_token'] == model.estimate_flops() and row['parameters'] == sum(model.num_params())
        assert row['tokens_per_s'] == pytest.approx(4 * 64 / row['seconds']) and row['peak_memory'] is None
        assert row['gemm_share'] == pytest.approx(row['flops_per_token'] * row['tokens_per_s'] / r['gemm_flops'])
    assert done.stderr.count('Self CPU time total') == 3
    assert set(r['infer']) == {'MHF', 'Standard'}
    assert all(row['tokens_per_s'] > 0 and row['seconds'] > 0 for row in r['infer'].values())


def plan(monkeypatch, **changes):
    """Returns the plan of config/mhf_3b.py with some settings changed."""
    for name, value in (read_config('config/mhf_3b.py') | changes).items():
        monkeypatch.setattr(bench, name, value, raising=False)
    return bench.plan_training(model_config('config/mhf_3b.py', **changes))


def test_plan(tmp_path, monkeypatch):
    """--plan adds up memory, days and disk; the gradients of several GPUs always exist."""
    big = plan(monkeypatch)
    printed = ok('bench.py', 'config/mhf_3b.py', '--plan', '--json_output', cwd=tmp_path)
    assert json.loads(printed.stdout)['plan'] == big
    parameters = 2914422081
    assert big['parameters'] == parameters and big['memory']['AdamW'] == 8 * parameters
    assert big['total'] == sum(big['memory'].values())
    tokens = 256 * 2048 * 200_000
    assert big['disk_bytes'] == dict(ids=2 * tokens, signatures=8 * tokens)
    assert big['days'] == pytest.approx(tokens * big['flops_per_token'] / (0.32 * 8 * 989e12) / 86400)
    # DDP's buckets, also without accumulation
    one_pass = plan(monkeypatch, micro_batch_size=32)
    assert big['memory']['gradients'] == one_pass['memory']['gradients'] == 4 * parameters
    assert plan(monkeypatch, gpus=1, batch_size=8)['memory']['gradients'] == 0


def test_plan_with_recomputation(monkeypatch):
    """Activation checkpointing takes a third more FLOPs for the layers, and less memory."""
    plain, recomputed = (plan(monkeypatch, activation_checkpointing=value) for value in (False, True))
    assert recomputed['memory']['activations'] < plain['memory']['activations'] / 4
    c = model_config('config/mhf_3b.py')
    two_layers, one_layer = (build_on_meta(replace(c, num_layers=n, num_hashes=0)).estimate_flops() for n in (2, 1))
    layers = c.num_layers * (two_layers - one_layer)
    assert recomputed['flops_per_token'] - plain['flops_per_token'] == pytest.approx(layers / 3, rel=1e-3)
    assert recomputed['days'] * plain['flops_per_token'] == pytest.approx(plain['days'] * recomputed['flops_per_token'])
