"""mhf/checkpoint.py: damaged and malicious checkpoints."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, assert_same, ok, refused, run_ranks, steps, weights

from configurator import InputError
from mhf.checkpoint import Checkpoints


def test_the_previous_checkpoint_replaces_a_damaged_one(quick):
    """If ckpt.pt does not load, all ranks resume from the newest intact checkpoint. Rank 0 warns."""
    names = {p.name for p in (quick / 'out').glob('*.pt')}
    assert names == {'ckpt.pt', 'ckpt_best.pt', 'ckpt_000016.pt', 'ckpt_000024.pt'}
    shutil.copytree(quick / 'out', quick / 'damaged')
    for name in ('ckpt.pt', 'ckpt_000024.pt'):
        os.truncate(quick / 'damaged' / name, 9999)
    shutil.copytree(quick / 'damaged', quick / 'two')
    done = ok('train.py', 'cfg.py', '--out_dir=damaged', '--init_from=resume', cwd=quick)
    assert done.stderr.count('WARNING: ') == 2 and 'WARNING: damaged/ckpt.pt is damaged' in done.stderr
    assert 'resumed at step 16' in done.stdout
    assert_same(weights(quick, 'damaged')['model'], weights(quick)['model'])
    args = ('cfg.py', '--out_dir=two', '--init_from=resume', '--max_steps=18', '--lr_decay_steps=24')
    (code, stdout, stderr), other = run_ranks(2, 'train.py', *args, cwd=quick)
    assert code == 0 and other == (0, '', ''), (stderr, other)
    assert stderr.count('WARNING: ') == 2 and 'resumed at step 16' in stdout


def test_the_best_checkpoint_is_the_last_resort(quick):
    """A folder with only ckpt_best.pt is not overwritten by a new run, and can be resumed."""
    for path in (quick / 'out').glob('ckpt*.pt'):
        if path.name != 'ckpt_best.pt':
            path.unlink()
    refused('train.py', 'cfg.py', says='out already has a checkpoint; resume it', cwd=quick)
    assert 'resumed at step' in ok('train.py', 'cfg.py', '--auto_resume', '--max_steps=25', cwd=quick).stdout


def test_order_of_a_write(tmp_path, monkeypatch):
    """A file, then its new name, is on disk before the next. An error after ckpt.pt is renamed names the new step."""
    calls = []

    def fsync(fd, real=os.fsync):
        calls.append('folder' if os.path.samestat(os.fstat(fd), tmp_path.stat()) else 'file')
        real(fd)

    def replace(source, target, real=os.replace):
        if target.name == 'ckpt_000002.pt':
            raise OSError(28, 'No space left on device')
        calls.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(dict(step=1), is_best=True)
    checkpoints.wait()
    names = ('ckpt_best.pt', 'ckpt.pt', 'ckpt_000001.pt')
    assert calls == [call for name in names for call in ('file', name, 'folder')]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    checkpoints.save(dict(step=2), is_best=False)
    with pytest.raises(InputError, match=r'No space left on device\); .*ckpt.pt contains step 2'):
        checkpoints.wait()
    assert torch.load(tmp_path / 'ckpt.pt')['step'] == 2


def test_only_own_checkpoints_are_deleted(tmp_path):
    """Only checkpoints whose names train.py creates are deleted; a user's ckpt_1.pt stays."""
    (tmp_path / 'ckpt_1.pt').write_text('of the user')
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 5):
        checkpoints.save(dict(step=step), is_best=False)
    checkpoints.wait()
    assert {path.name for path in tmp_path.glob('ckpt_*')} == {'ckpt_1.pt', 'ckpt_000003.pt', 'ckpt_000004.pt'}


def test_disk_full_while_training(quick):
    """A full disk stops the run at its next step, and the previous checkpoint is intact."""
    before = (quick / 'out/ckpt.pt').read_bytes()
    room = len(before) // 2
    args = ('cfg.py', '--init_from=resume', '--max_steps=400', '--eval_interval=32', '--lr_decay_steps=24')
    patch = f'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))'
    says = 'out: the checkpoint of step 32 could not be written'
    line = refused('train.py', *args, says=says, cwd=quick, patch=patch)
    assert 'out/ckpt.pt contains step 24' in line
    assert (quick / 'out/ckpt.pt').read_bytes() == before and not list((quick / 'out').glob('*.tmp'))
    # the run stopped after step 32, before the next checkpoint
    assert 32 <= steps(quick)[-1]['step'] < 64
    patch = 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))'
    says = 'b/log.jsonl cannot be written ([Errno 27] File too large); no checkpoint was written yet; start again'
    args = ('cfg.py', '--out_dir=b', '--eval_interval=400', '--max_steps=400')
    refused('train.py', *args, says=says, cwd=quick, patch=patch)


def test_the_picture_cannot_be_written(quick):
    """A finished run whose picture cannot be written ends with one line, and its checkpoint is complete."""
    (quick / 'b/loss.png').mkdir(parents=True)
    says = 'b/loss.png cannot be written'
    refused('train.py', 'cfg.py', '--out_dir=b', '--max_steps=1', '--warmup_steps=0', says=says, cwd=quick)
    assert weights(quick, 'b')['step'] == 1


def test_a_malicious_checkpoint_is_not_run(quick):
    """Loading a malicious checkpoint does not execute its code."""

    class Evil:
        def __reduce__(self):
            return os.system, (f'touch {quick}/owned',)

    torch.save(Evil(), quick / 'out/ckpt.pt')
    for path in (quick / 'out').glob('ckpt_0*'):
        path.unlink()
    for command in (('sample.py', 'cfg.py'), ('train.py', 'cfg.py', '--init_from=resume')):
        refused(*command, says='not a checkpoint', cwd=quick)
        assert not (quick / 'owned').exists()


OPEN = "from mhf.checkpoint import load; load('out').tok"


@pytest.mark.parametrize('program, module', [('import prepare', 'torch'), (OPEN, 'torch._dynamo')])
def test_slow_imports(few, program, module):
    """prepare.py does not import torch, and opening a model does not import its compiler; either takes seconds."""
    code = f'import sys; {program}; sys.exit({module!r} in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=few, env=os.environ | dict(PYTHONPATH=REPO)).returncode == 0
