"""bench.py: each part runs, its FLOPs are those of the model, and --plan promises memory that training keeps to."""

import json
from collections import Counter

import pytest
import torch
from conftest import ok

import bench
import cost
from configurator import read_config
from model import MHF, MHFConfig


def small_config(folder, **changes):
    settings = read_config(folder / 'cfg.py') | changes
    return MHFConfig(**{k: v for k, v in settings.items() if k in MHFConfig.__annotations__})


@pytest.mark.parametrize('device_type', ['cpu', 'cuda'])
@pytest.mark.parametrize('num_hashes', [3, 0])
def test_count(trained, num_hashes, device_type):
    """FLOPs, kernels or memory of many layers are not those of the model: they come from one and two layers."""
    c = small_config(trained, num_hashes=num_hashes, num_layers=5)
    of_two_layers, directly, checkpointed = (
        f(c, 2, device_type, True, checkpointing, 1e9)
        for f, checkpointing in ((cost.count, False), (cost.trace, False), (cost.count, True))
    )
    for a, b in zip(of_two_layers[:2], directly[:2], strict=True):
        # the update's bytes stand there in two parts
        kernels = [{op: n for op, n in ops.items() if n and op.part != 'optimizer'} for ops in (a, b)]
        assert kernels[0] == kernels[1]
        assert sum(n * k.size for k, n in a.items()) == sum(n * k.size for k, n in b.items())
    assert of_two_layers[2] == directly[2]
    flops = Counter()
    for op, n in directly[0].items():
        flops[op.part] += n * op.flops
    model = 2 * c.block_size * cost.flops_per_token(c)
    # sums as products with ones, and on a CPU the exact loss's columns as products with the identity
    assert model <= sum(flops.values()) < 1.4 * model
    head = 6 * c.buckets * c.hidden_size * (2 * c.coordinates - 1)
    mixers = 3 * (c.coordinates - 1) * 2 * 3 * c.hidden_size * c.bottleneck
    assert model == flops['body'] + 2 * c.block_size * (head + mixers)
    # what is computed twice is work, but no FLOPs of the model's
    assert checkpointed[2]['activations'] < directly[2]['activations'] / 2
    assert sum(n * op.flops for op, n in checkpointed[0].items()) > sum(flops.values())


def test_trace():
    """Memory that was freed counts, a view is a kernel, a compiled chain is several, or a slow softmax seems fast."""
    x = torch.zeros(16384, 512)
    with cost.Trace('cuda') as t:
        y = (x.T + 1).T
        del y
        y = (x + 1).exp()
        y @ y.T[:, :8]
        t.end_region()
        del y
    big = x.nbytes
    assert (t.live, t.peak) == (0, 2 * big) and sum(t.ops.values()) == 4
    # two chains: one that nobody reads; one that reads x and writes what the product reads
    assert [op.size for op in t.fused if not op.flops] == [2 * big]
    sizes = []
    for dim in (0, 1):
        with cost.Trace('cuda') as t:
            x.softmax(dim)
        sizes.append(sum(op.size for op in t.ops))
    assert sizes == [4 * 132 * big, 2 * big]


def test_bench(trained):
    """A part of bench.py does not run, or compares other models than it says."""
    few = ['cfg.py', '--repeats=1', '--head_tokens=64', '--new_tokens=2', '--num_buckets=256']
    parts = ['train', 'head', 'generate', 'infer', 'profile']
    r = json.loads(ok('bench.py', *few, '--json', f'--parts={",".join(parts)}', cwd=trained).stdout)
    assert set(r) == {'config', 'device', 'dtype', 'torch', 'gemm_flops', 'peak_of_process', *parts}
    assert 5e7 < r['peak_of_process'] < 2e10
    assert {row['loss'] for row in r['head']} == {'exact', 'product', 'Standard'}
    assert all(row[head]['seconds'] > 0 for row in r['head'] for head in ('lean', 'plain'))
    for row in r['profile'].values():
        # the update among them, and no more time than the step took, but for the profiler's own
        assert any('adam' in kernel for *_, kernel in row['kernels'])
        assert 0 < sum(busy for busy, *_ in row['kernels']) < 20 * row['seconds']
    assert r['infer']['published_time_1B'] == 97.38 / 96.42
    assert 0 < r['generate']['exact']['bandwidth_share'] < 10
    for name, c in (('exact', small_config(trained)), ('Standard', small_config(trained, num_hashes=0))):
        assert r['train'][name]['predicted_seconds'] > 0
        assert r['train'][name]['flops_per_token'] == cost.flops_per_token(c)
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
    """bench.py --plan promises memory or lookups that training does not keep to, or 3B no longer fits eight GPUs."""

    def plan(*args):
        return json.loads(ok('bench.py', *args, '--plan', '--json', cwd=trained).stdout)['plan']

    promised = plan('cfg.py', '--num_layers=5', '--gpus=2', '--micro_batch_size=4', '--batch_size=16')
    # the CPU's norms save more than CUDA's
    c = small_config(trained, num_layers=5)
    sizes, m, kept = cost.count(c, 4, 'cpu')[2], MHF(c), {}

    def note(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast('cpu', torch.bfloat16):
        m.hidden_states(torch.zeros(4, 64, 3, dtype=torch.long))
    own = {p.untyped_storage()._cdata for p in m.parameters()}
    measured = sum(s.nbytes() for k, s in kept.items() if k not in own)
    assert sizes['activations'] == pytest.approx(measured, rel=0.02)
    assert measured / 2 < promised['memory']['activations'] < measured
    P = sum(p.numel() for p in m.parameters())
    assert promised['parameters'] == sizes['parameters'] == P and promised['memory']['gradients'] == 4 * P
    # in the end the gradients are in use, which were not there before, h, its gradient and the loss
    left = 2 * 4 * 4 * 64 * c.hidden_size + 4
    assert sizes['peak_end'] == 4 * P + left and cost.count(c, 4, 'cpu', True)[2]['peak_end'] == left
    seconds = {name: part['seconds'] for name, part in promised['parts'].items()}
    step = 2 * (seconds['body'] + seconds['head']) + seconds['optimizer'] + seconds['all-reduce']
    assert promised['steps']['eager']['seconds'] == pytest.approx(step)
    # the kernels of lookups.py move the bucket logits four times and the token logits twice, at a H100's 3,350 GB/s
    n, bucket_logits, token_logits = 4 * 64, 2 * c.num_hashes * c.num_buckets, 4 * c.vocab_size
    moving = n * (4 * bucket_logits + 2 * token_logits) / 3350e9
    assert moving < seconds['head, fused'] < seconds['head']
    # and take room for both
    assert promised['memory']['head or backward'] > n * (bucket_logits + token_logits)
    big = plan('config/mhf_3b.py', '--block_size=256')
    assert big['fits'] and big['parameters'] == 2914422081 and big['memory']['optimizer'] == 8 * 2914422081
    # token ids of 2 bytes, whatever H
    assert big['disk_bytes'] == 2 * 256 * 256 * 200_000


@pytest.mark.parametrize(
    'args, helps',
    [
        ('config/mhf_3b.py --block_size=64', 'no setting helps'),
        ('config/mhf_100m.py --num_layers=60 --block_size=1024', '--micro_batch_size=4 would'),
        ('config/mhf_100m.py --num_layers=130 --batch_size=8 --micro_batch_size=1', '--activation_checkpointing helps'),
    ],
)
def test_hint(tmp_path, args, helps):
    """A plan that does not fit names a setting that does not help, or none."""
    assert helps in ok('bench.py', *args.split(), '--plan', '--gpu=RTX4090', '--loss=product', cwd=tmp_path).stdout
