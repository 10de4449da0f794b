"""bench.py: each part runs, its FLOPs are those of the model, and --plan promises what training keeps to."""

import json

import numpy as np
import pytest
import torch
from conftest import ok
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
from configurator import read_config
from model import MHF, MHFConfig


def small_config(folder, **changes):
    settings = read_config(folder / 'cfg.py') | changes
    return MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__})


@pytest.mark.parametrize('num_hashes', [3, 0])
def test_flops(trained, num_hashes):
    """The FLOPs are not those of the model's matrix products."""
    c = small_config(trained, num_hashes=num_hashes)
    m = MHF(c, np.ones((c.vocab_size, 3)) if num_hashes else None)
    s = m.sign(torch.zeros(1, c.block_size, dtype=torch.long))
    with FlopCounterMode(display=False) as counted, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        m(s, s)
    # the counter counts all of the attention, we the causal half
    upper_half = 2 * c.num_layers * c.num_heads * c.head_dim * (c.block_size - 1)
    ours = sum(bench.flops_per_token(c, c.block_size).values())
    assert counted.get_total_flops() / c.block_size - upper_half == ours


def test_bench(trained):
    """A part of bench.py does not run, or compares other models than it says."""
    few = ['cfg.py', '--repeats=1', '--head_tokens=64', '--new_tokens=2', '--num_buckets=256']
    parts = ['train', 'head', 'generate', 'infer', 'prepare']
    r = json.loads(ok('bench.py', *few, '--json', f'--parts={",".join(parts)}', cwd=trained).stdout)
    assert set(r) == {'config', 'device', 'dtype', 'torch', 'gemm_flops', *parts}
    assert {row['loss'] for row in r['head']} == {'exact', 'product', 'Standard'}
    assert all(row[head]['seconds'] > 0 for row in r['head'] for head in ('lean', 'plain'))
    assert all(rate > 0 for rate in (*r['prepare']['bytes_per_s'].values(), r['prepare']['reading_tokens_per_s']))
    assert r['infer']['published_time_1B'] == 97.38 / 96.42
    assert 0 < r['generate']['exact']['bandwidth_share'] < 10
    for name, c in (('exact', small_config(trained)), ('Standard', small_config(trained, num_hashes=0))):
        assert r['train'][name]['flops_per_token'] == 3 * sum(bench.flops_per_token(c, 64).values())
    # a Standard config is compared with H4B16K
    shown = ok('bench.py', *few, '--num_hashes=0', '--parts=head', cwd=trained).stdout
    assert 'lean/plain' in shown and 'Standard' in shown


def test_the_loss_of_a_variant_stays(trained, mistral):
    """Training with the product loss, in turn, made a product model of the exact one, and both rows were the same."""
    exact = small_config(trained)
    m = bench.build(exact, mistral)
    m.config.loss = 'product'
    assert exact.loss == 'exact'


def test_plan(trained):
    """bench.py --plan promises memory that training does not keep to, or 3B no longer fits eight GPUs of 80 GB."""

    def plan(*args):
        return json.loads(ok('bench.py', *args, '--plan', '--json', cwd=trained).stdout)['plan']

    promised = plan('cfg.py', '--num_layers=5')['memory']
    m, kept = MHF(small_config(trained, num_layers=5)), {}

    def note(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast('cpu', torch.bfloat16):
        m.hidden_states(torch.zeros(4, 64, 3, dtype=torch.long))
    own = {p.untyped_storage()._cdata for p in m.parameters()}
    measured = sum(s.nbytes() for k, s in kept.items() if k not in own)
    assert promised['activations'] + promised['bfloat16 copies of weights'] == pytest.approx(measured, rel=0.02)
    assert plan('cfg.py', '--num_layers=5', '--activation_checkpointing')['memory']['activations'] < measured / 2
    big = plan('config/mhf_3b.py')
    assert big['fits'] and big['parameters'] == 2914422081 and big['memory']['optimizer'] == 8 * 2914422081
    # token ids of 2 bytes, whatever H
    assert big['disk_bytes'] == 2 * 256 * 2048 * 200_000
