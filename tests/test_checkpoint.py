"""mhf/checkpoint.py: writing, reading, errors of the environment; what scripts import."""

import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO, refused, steps, weights
from filelock import FileLock

from mhf.checkpoint import Checkpoint, find_checkpoint, lock, open_start, read_file, save
from mhf.errors import InputError
from mhf.runtime import Log

# -----------------------------------------------------------------------------
# writing


def checkpoint(step, **settings):
    """Returns a checkpoint without weights."""
    return Checkpoint({}, {}, {}, {}, settings, 'mistral', step, best_val_loss=1.0)


def written(folder):
    """Returns {name: step} of the checkpoints in a folder."""
    return {path.name: read_file(path).step for path in folder.glob('ckpt*.pt')}


@pytest.mark.parametrize('is_best', [False, True])
def test_a_write_that_is_stopped_loses_nothing(tmp_path, monkeypatch, is_best):
    """If a write is stopped at any fsync or rename, the newest checkpoint and the best are complete."""
    calls = []
    stop_at = 0

    def stopping(real):
        def function(*args):
            calls.append(real)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return real(*args)

        return function

    for name in ('fsync', 'replace'):
        monkeypatch.setattr(os, name, stopping(getattr(os, name)))
    for stop in range(1, 20):
        folder = tmp_path / str(stop)
        folder.mkdir()
        stop_at = 0
        for step in (1, 2):
            save(folder, checkpoint(step), is_best=step == 1)
        calls.clear()
        stop_at = stop
        try:
            save(folder, checkpoint(3), is_best)
        except KeyboardInterrupt:
            after = written(folder)
            assert after['ckpt.pt'] in (2, 3) and after['ckpt_best.pt'] in (1, 3)
            assert after == {'ckpt.pt': 2, 'ckpt_best.pt': 1} or stop > 1
            assert not list(folder.glob('*.tmp'))
        if len(calls) < stop:
            break
    assert written(folder) == {'ckpt.pt': 3, 'ckpt_best.pt': 3 if is_best else 1}
    assert stop == len(calls) + 1 > 3


def test_a_file_that_cannot_be_read_back(tmp_path):
    """A checkpoint with a value that torch.load refuses replaces none; the error names the type."""
    save(tmp_path, checkpoint(1), is_best=True)
    assert not os.path.samefile(tmp_path / 'ckpt.pt', tmp_path / 'ckpt_best.pt')  # a write to one changes one
    with pytest.raises(InputError, match=r'ckpt.pt: the checkpoint of step 2 .*Unsupported global: GLOBAL numpy'):
        save(tmp_path, checkpoint(2, learning_rate=np.float64(0.1)), is_best=True)
    assert written(tmp_path) == {'ckpt.pt': 1, 'ckpt_best.pt': 1} and len(list(tmp_path.iterdir())) == 2


def test_lock(tmp_path):
    """A process that removes out_dir and runs train.py again, as a notebook may, locks the new folder."""
    file_lock = lock(tmp_path / 'out')
    shutil.rmtree(tmp_path / 'out')
    assert lock(tmp_path / 'out') is file_lock
    other = FileLock(tmp_path / 'out/.train.lock', timeout=0)
    with pytest.raises(OSError, match='.train.lock'):
        other.acquire()
    file_lock.release()
    other.acquire()


def test_disk_full_while_training(quick):
    """A full disk ends the run at its checkpoint, with path and step; the one before is intact."""
    before = (quick / 'out/ckpt.pt').read_bytes()
    room = len(before) // 2
    args = ('cfg.py', '--max_steps=60', '--eval_interval=32', '--lr_decay_steps=24')
    patch = f'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))'
    says = 'out/ckpt.pt: the checkpoint of step 32 could not be written (OSError: [Errno 27] File too large)'
    refused('train.py', *args, says=says, cwd=quick, patch=patch)
    assert (quick / 'out/ckpt.pt').read_bytes() == before and not list((quick / 'out').glob('*.tmp'))
    assert steps(quick)[-1]['step'] == 32


def test_a_full_disk_loses_no_line_of_the_log(tmp_path, capsys):
    """A line that cannot be written ends no run, and is written with the next one."""
    log = Log(tmp_path / 'log.jsonl', 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    log.write(step=1, loss=1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write(step=2)
    assert 'log.jsonl: [Errno 27] File too large' in capsys.readouterr().out
    assert (tmp_path / 'log.jsonl').read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2}\n'


# -----------------------------------------------------------------------------
# reading


def test_the_order_of_checkpoints(quick):
    """A run resumes from ckpt.pt, else from ckpt_best.pt; other files do not count."""
    (quick / 'out/ckpt.pt.tmp').touch()
    torch.save(weights(quick) | dict(step=7), quick / 'out/ckpt_best.pt')
    for step, name in ((24, 'ckpt.pt'), (7, 'ckpt_best.pt')):
        assert open_start(quick / 'out', 'scratch', 'mistral')[1].step == step
        (quick / 'out' / name).unlink()
    assert find_checkpoint(quick / 'out') is None


def test_an_error_of_the_environment_is_not_damage(tmp_path):
    """An error of the file system is raised as it is."""
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / 'ckpt.pt')


# -----------------------------------------------------------------------------
# what scripts import

LEAVES = 'eval.py expand.py bench.py mhf/lm.py mhf/released.py mhf/tokenizer_json.py eval_tasks study'


def test_leaves_can_be_deleted(quick, tmp_path):
    """Without evaluation, expansion, released formats and studies, scripts print help, prepare, train and sample."""
    fork = tmp_path / 'fork'
    for path in [*REPO.glob('*.py'), *REPO.glob('mhf/*.py'), *REPO.glob('config/*.py')]:
        if not {str(path.relative_to(REPO)), path.parts[-2]} & set(LEAVES.split()):
            target = fork / path.relative_to(REPO)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    train = ('train.py', 'cfg.py', '--out_dir=b', '--max_steps=3', '--warmup_steps=1')
    helps = [(script, '--help') for script in ('prepare.py', 'train.py', 'sample.py')]
    for command in (*helps, ('prepare.py', 'cfg.py'), train, ('sample.py', 'cfg.py', '--out_dir=b')):
        done = subprocess.run([sys.executable, fork / command[0], *command[1:]], cwd=quick, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert weights(quick, 'b')['step'] == 3


FOUR_FILES = """
import hashing, model, torch
c = model.MHFConfig(vocab_size=9, block_size=4, num_layers=1, hidden_size=8, num_buckets=8)
m = model.MHF(c, hashing.signature_table([*'abcdefghi'], 4, 8, pad_id=2))
m.init_weights()
x = torch.zeros(1, 3, dtype=int)
m(x, x).backward()
m.generate(x, 2)
"""


def test_four_files_suffice(tmp_path):
    """Another project can train and sample with four files of this one."""
    (tmp_path / 'mhf').mkdir()
    for name in ('model.py', 'hashing.py', 'mhf/head.py', 'mhf/errors.py'):
        shutil.copy(REPO / name, tmp_path / name)
    subprocess.run([sys.executable, '-c', FOUR_FILES], cwd=tmp_path, check=True)
