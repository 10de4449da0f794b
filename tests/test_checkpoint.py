"""mhf/checkpoint.py and mhf/released.py: what is on disk, whole, damaged or hostile; the released format both ways."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from conftest import (
    FUZZ,
    REPO,
    assert_same,
    damaged,
    edited,
    ok,
    random_model,
    ranks,
    relative,
    run,
    save_edited,
    snapshot,
    steps,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from configurator import InputError
from mhf.checkpoint import Checkpoints, checked_digest, load_checkpoint
from mhf.released import from_pretrained, save_pretrained


def test_a_damaged_checkpoint_gives_way_to_the_one_before(quick):
    """A flipped bit in the weights or the optimizer goes unnoticed, or costs the whole run."""
    assert {p.name for p in (quick / 'out').glob('*.pt')} == {
        'ckpt.pt', 'ckpt_best.pt', 'ckpt_000016.pt', 'ckpt_000024.pt'
    }  # fmt: skip
    for spoiled in ('model', 'optimizer'):
        state = weights(quick)
        tensor = state['model']['norm.weight'] if spoiled == 'model' else state['optimizer']['state'][0]['exp_avg']
        tensor.flatten()[3] += 1e-3
        shutil.copytree(quick / 'out', quick / spoiled)
        # the same file
        for name in ('ckpt_000024.pt', 'ckpt.pt'):
            (quick / spoiled / name).unlink()
        # beside it stands the digest of what was written
        torch.save(state, quick / spoiled / 'ckpt.pt')
        done = ok('train.py', 'cfg.py', f'--out_dir={spoiled}', '--init_from=resume', cwd=quick)
        assert f'WARNING: {spoiled}/ckpt.pt' in done.stderr and 'its SHA-256 is' in done.stderr
        assert 'resumed at step 16' in done.stdout
        assert_same(weights(quick, spoiled)['model'], weights(quick)['model'])
    # processes that read no checkpoint go back as well
    shutil.copy(quick / 'model/ckpt_000016.pt', quick / 'out/ckpt_000016.pt')
    state['model']['norm.weight'][3] += 1
    for name in ('ckpt_000024.pt', 'ckpt.pt'):
        (quick / 'out' / name).unlink()
    torch.save(state, quick / 'out/ckpt.pt')
    args = ('cfg.py', '--init_from=resume', '--max_steps=18', '--lr_decay_steps=24')
    processes = ranks(2, 'train.py', *args, cwd=quick)
    (said, errors), others = (p.communicate(timeout=60) for p in processes)
    assert [p.returncode for p in processes] == [0, 0] and others == ('', ''), (errors, others)
    assert errors.count('WARNING') == 1 and 'resumed at step 16' in said


def test_a_checkpoint_survives_a_crash_of_the_machine(tmp_path, monkeypatch):
    """A name leads to a file, or a folder to a name, that is not on disk yet."""
    did = []

    def fsync(fd, real=os.fsync):
        did.append('folder' if os.path.samestat(os.fstat(fd), tmp_path.stat()) else 'file')
        real(fd)

    def replace(source, target, real=os.replace):
        did.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(dict(step=1), best=True)
    checkpoints.wait()
    names = ('ckpt.pt', 'ckpt_best.pt', 'ckpt_000001.pt')
    assert did == ['file', *(x for name in names for x in (name, 'folder', f'{name}.sha256', 'folder'))]
    for name in names:
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert (tmp_path / f'{name}.sha256').read_text() == f'{digest}  {name}\n'


def test_read_only_while_training(quick):
    """A file system that becomes read-only costs the checkpoint before, or leaves a traceback."""
    before = (quick / 'out/ckpt.pt').read_bytes()
    patch = "import os\ndef replace(a, b): raise OSError(30, 'Read-only file system', str(b))\nos.replace = replace"
    args = ('cfg.py', '--init_from=resume', '--max_steps=60', '--eval_interval=2', '--lr_decay_steps=24')
    done = run('train.py', *args, cwd=quick, patch=patch)
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr[-2000:]
    assert 'Read-only file system' in done.stderr and 'the one before is untouched' in done.stderr
    assert (quick / 'out/ckpt.pt').read_bytes() == before and not list((quick / 'out').glob('*.tmp'))


def test_disk_full_while_training(quick):
    """A checkpoint that does not fit costs the one before, or training goes on for hours without one."""
    before = (quick / 'out/ckpt.pt').read_bytes()
    room = len(before) // 2
    args = ('cfg.py', '--init_from=resume', '--max_steps=400', '--eval_interval=32', '--lr_decay_steps=24')
    patch = f'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))'
    done = run('train.py', *args, cwd=quick, patch=patch)
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr[-2000:]
    assert 'out/ckpt.pt could not be written' in done.stderr and 'the one before is untouched' in done.stderr
    assert (quick / 'out/ckpt.pt').read_bytes() == before and not list((quick / 'out').glob('*.tmp'))
    # it stopped after step 32, not at the next checkpoint
    assert 32 <= steps(quick)[-1]['step'] < 64


# -----------------------------------------------------------------------------
# damaged and hostile


@settings(max_examples=FUZZ, deadline=None)
@given(st.data())
def test_fuzz_checkpoint(few, tmp_path_factory, data):
    """
    A damaged checkpoint ends in a traceback, or loads with other weights; one with other contents and no digest hangs.
    """
    path = tmp_path_factory.mktemp('k') / 'ckpt.pt'
    raw = (few / 'out/ckpt.pt').read_bytes()
    whole = state = weights(few)
    if data.draw(st.booleans()):
        path.write_bytes(damaged(data.draw, raw))
        shutil.copy(few / 'out/ckpt.pt.sha256', path.parent)
    else:
        state = edited(data.draw, state)
        save_edited(state, path) if isinstance(state, dict) else torch.save(state, path)
    before = snapshot(path.parent)
    try:
        checked_digest(path)
        _, ckpt = load_checkpoint(path)
        if state is whole:
            assert_same(ckpt, whole)
    except InputError as e:
        assert '\n' not in str(e)
    assert snapshot(path.parent) == before


def test_a_checkpoint_without_a_digest(quick):
    """A checkpoint that was copied alone, or that an older train.py wrote with digests in it, cannot be resumed."""
    for path in (quick / 'out').glob('*.sha256'):
        path.unlink()
    torch.save(weights(quick) | dict(sha256=dict(model='0' * 64)), quick / 'out/ckpt.pt')
    done = ok('train.py', 'cfg.py', '--init_from=resume', '--max_steps=25', '--lr_decay_steps=24', cwd=quick)
    assert 'resumed at step 24' in done.stdout and 'WARNING' not in done.stderr
    refused = weights(quick)
    del refused['config']
    save_edited(refused, quick / 'out/ckpt.pt')
    done = run('sample.py', 'cfg.py', cwd=quick)
    assert done.returncode == 1 and 'Traceback' not in done.stderr and 'it has no config' in done.stderr


def test_a_malicious_checkpoint_is_not_run(quick):
    """Opening a checkpoint from a stranger runs the stranger's code."""

    class Evil:
        def __reduce__(self):
            return os.system, (f'touch {quick}/owned',)

    (quick / 'out/ckpt.pt').write_bytes(pickle.dumps(Evil()))
    for path in (quick / 'out').glob('ckpt_0*'):
        path.unlink()
    commands = ('sample.py', 'cfg.py'), ('train.py', 'cfg.py', '--init_from=resume')
    for command in (*commands, ('train.py', 'cfg.py', '--init_from=out', '--out_dir=x')):
        done = run(*command, cwd=quick)
        assert done.returncode == 1 and 'no checkpoint of train.py' in done.stderr and not (quick / 'owned').exists()


def test_a_checkpoint_names_no_files(quick):
    """What a checkpoint says of its configuration, or a name in it, makes a script write outside of out_dir."""
    state = weights(quick)
    path = quick / 'out/ckpt.pt'
    hostile = dict.fromkeys(('out_dir', 'data_dir', 'dataset'), str(quick / 'outside/x'))
    state['config'] |= hostile | dict(tokenizer='../../outside/x')
    state['data']['tokenizer'] = '../../outside/x'
    state['model_config']['../../outside/x'] = 1
    for older in (quick / 'out').glob('ckpt_0*'):
        older.unlink()
    for mend in (
        lambda: state['model_config'].pop('../../outside/x'),
        lambda: state['data'].update(tokenizer='mistral'),
    ):
        save_edited(state, path)
        before = snapshot(quick)
        for script, *args in (('sample.py', '--num_samples=1'), ('train.py', '--init_from=resume', '--max_steps=30')):
            done = run(script, 'cfg.py', *args, cwd=quick)
            assert done.returncode == 1 and 'Traceback' not in done.stderr and 'outside' in done.stderr, done.stderr
        assert snapshot(quick) == before
        mend()
    # now only its settings are hostile, which are compared and not used
    save_edited(state, path)
    ok('train.py', 'cfg.py', '--init_from=resume', '--max_steps=25', '--lr_decay_steps=24', cwd=quick)
    assert not (quick / 'outside').exists() and not (quick.parent / 'outside').exists()


# -----------------------------------------------------------------------------
# the released format


def assert_read_back(m, folder):
    """The released model in a folder is m, in every bit."""
    back = from_pretrained(folder)
    assert_same(dict(m.state_dict()), dict(back.state_dict()))
    # how its weights began, it does not say
    left_out = {'encoder_init', 'embedding_scale'}
    # the Standard model has none
    if not m.config.num_hashes:
        left_out |= {'num_buckets', 'num_lsh', 'bottleneck'}
    ours, theirs = ({k: v for k, v in asdict(x.config).items() if k not in left_out} for x in (m, back))
    assert ours == theirs
    with pytest.raises(InputError, match='there already'):
        save_pretrained(m, folder, 'mistral')


def test_export(quick):
    """A trained model that is exported is another one."""
    done = ok('mhf.released', 'out', 'released', cwd=quick)
    assert done.stdout == 'out/ckpt.pt, step 24 -> released\n' and not done.stderr and not list(quick.glob('*.tmp'))
    fields = json.loads((quick / 'released/config.json').read_text())
    assert fields['tokenizer'] == 'mistral' and fields['num_hashes'] == 3
    # others may read all of it
    modes = {path.stat().st_mode for path in (quick / 'released').iterdir()}
    assert len(modes) == 1, modes
    assert_read_back(load_checkpoint(quick / 'out/ckpt.pt')[0], quick / 'released')


def test_an_exported_standard_model_is_a_qwen3(tmp_path):
    """Other tools cannot read a Standard model, or read another one, of which rows of E do not enter louder."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20)[None]
    for scale in (4.0, 1.0):
        m = random_model(num_hashes=0, embedding_scale=scale, dtype=torch.float32)
        folder = tmp_path / f'times{scale}'
        save_pretrained(m, folder, 'mistral')
        theirs = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.log_softmax(-1)
        assert relative(theirs, m.log_probs(ids)) < 1e-4
    assert_read_back(m, folder)
    m.head = torch.nn.Parameter(m.embed.weight + 1)
    with pytest.raises(InputError, match='head has no name'):  # it would be lost without a word
        save_pretrained(m, tmp_path / 'untied', 'mistral')
    assert not (tmp_path / 'untied').exists()


def test_no_compiler_for_a_checkpoint(few):
    """Opening a model imports torch's compiler, which takes longer than all the rest of sample.py's beginning."""
    code = (
        "import sys; from mhf.released import open_model; open_model('out'); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, '-c', code], cwd=few, env=os.environ | dict(PYTHONPATH=REPO)).returncode == 0
