"""mhf/checkpoint.py: writing, damage, errors of the environment, and loading."""

import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, assert_same, ok, refused, steps, weights

from mhf.checkpoint import find_checkpoints, load, open_start, read_checkpoint, save
from mhf.errors import InputError
from model import MHF

# -----------------------------------------------------------------------------
# writing


class Kill(BaseException):
    """Ends save() like a kill, without its error handling."""


@pytest.mark.parametrize('is_best', [False, True])
@pytest.mark.parametrize('error', [Kill(), OSError(errno.EIO, 'Input/output error')], ids=['kill', 'error'])
def test_a_write_that_is_stopped_loses_nothing(tmp_path, monkeypatch, is_best, error):
    """If a write is killed or fails at any fsync or rename, the newest checkpoint and the best one are complete."""
    calls = []
    stop_at = 0

    def stopping(real):
        def function(*args):
            calls.append(real)
            if len(calls) == stop_at:
                raise error
            return real(*args)

        return function

    monkeypatch.setattr(os, 'fsync', stopping(os.fsync))
    monkeypatch.setattr(os, 'replace', stopping(os.replace))
    for stop in range(1, 20):
        folder = tmp_path / str(stop)
        folder.mkdir()
        stop_at = 0
        for step in (1, 2):
            save(folder, dict(step=step), is_best=step == 1)
        before = {path.name: torch.load(path)['step'] for path in folder.iterdir()}
        calls.clear()
        stop_at = stop
        try:
            save(folder, dict(step=3), is_best)
        except (Kill, InputError):
            after = {path.name: torch.load(path)['step'] for path in find_checkpoints(folder)}
            assert next(iter(after.values())) in (2, 3) and after['ckpt_best.pt'] in (1, 3)
            # the first call is the fsync of the new file; an fsync of a folder may fail
            assert after == before or stop > 1
            assert isinstance(error, Kill) or not list(folder.glob('*.tmp'))
        if len(calls) < stop:
            break
    written = {path.name: torch.load(path)['step'] for path in folder.iterdir()}
    assert written == {'ckpt.pt': 3, 'ckpt_previous.pt': 2, 'ckpt_best.pt': 3 if is_best else 1}
    assert stop == len(calls) + 1 > 5


def test_no_room_for_a_copy_of_the_best(tmp_path, monkeypatch):
    """If the copy for ckpt_best.pt does not fit on the disk, the new checkpoint is kept."""

    def disk_full(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')

    save(tmp_path, dict(step=1), is_best=True)
    monkeypatch.setattr(shutil, 'copyfile', disk_full)
    with pytest.raises(InputError, match='No space left'):
        save(tmp_path, dict(step=2), is_best=True)
    written = {path.name: torch.load(path)['step'] for path in tmp_path.iterdir()}
    assert written == {'ckpt.pt': 2, 'ckpt_previous.pt': 1, 'ckpt_best.pt': 1}


def test_disk_full_while_training(quick):
    """A full disk stops the run at its checkpoint; the previous one is intact."""
    before = (quick / 'out/ckpt.pt').read_bytes()
    room = len(before) // 2
    args = ('cfg.py', '--max_steps=60', '--eval_interval=32', '--lr_decay_steps=24')
    patch = f'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))'
    says = 'out: the checkpoint of step 32 could not be written ([Errno 27] File too large)'
    refused('train.py', *args, says=says, cwd=quick, patch=patch)
    assert (quick / 'out/ckpt.pt').read_bytes() == before and not list((quick / 'out').glob('*.tmp'))
    assert steps(quick)[-1]['step'] == 32


def test_the_log_cannot_be_written(quick):
    """If log.jsonl cannot be written, a run saves a checkpoint and ends with one line."""
    patch = """
import builtins, os
def open_full(path, mode='r', *args, real=open, **options):
    file = real(path, mode, *args, **options)
    if str(path).endswith('log.jsonl') and mode == 'a':
        os.dup2(os.open('/dev/full', os.O_WRONLY), file.fileno())
    return file
builtins.open = open_full
"""
    says = 'b/log.jsonl cannot be written ([Errno 28] No space left on device); rerun the same command to resume'
    refused('train.py', 'cfg.py', '--out_dir=b', says=says, cwd=quick, patch=patch)
    assert weights(quick, 'b')['step'] == 1
    (quick / 'b/log.jsonl').write_bytes(b'{"st')  # what fitted on the disk
    ok('train.py', 'cfg.py', '--out_dir=b', cwd=quick)
    assert steps(quick, 'b')[0]['step'] == 2
    assert_same(weights(quick, 'b')['optimizer'], weights(quick)['optimizer'])


# -----------------------------------------------------------------------------
# reading


def test_the_order_of_checkpoints(quick):
    """
    A run resumes from ckpt.pt, else from ckpt_previous.pt, else from ckpt_best.pt, which it replaces only by a better
    one; other files do not count.
    """
    names = ['ckpt.pt', 'ckpt_previous.pt', 'ckpt_best.pt']
    (quick / 'out/ckpt.pt.tmp').touch()
    torch.save(weights(quick) | dict(step=7, best_val_loss=1.0), quick / 'out/ckpt_best.pt')
    for step in (24, 16, 7):
        assert [path.name for path in find_checkpoints(quick / 'out')] == names
        start = open_start(quick / 'out', 'scratch', 'mistral')
        assert start.step == step and start.best_val_loss == 1.0
        (quick / 'out' / names.pop(0)).unlink()


def test_a_checkpoint_of_an_earlier_version(quick):
    """Checkpoints of commit 76650e7, which have other fingerprints of tokenizers, are loaded, but not resumed."""
    ckpt = weights(quick)
    ckpt['config'] = ckpt.pop('settings')
    ckpt['data']['tokenizer_sha256'] = 'of another kind'
    torch.save(ckpt, quick / 'out/ckpt.pt')
    assert_same(dict(load(quick / 'out').model.state_dict()), ckpt['model'])
    with pytest.raises(InputError, match='mistral'):
        load(quick / 'out', 'tekken')
    refused('train.py', 'cfg.py', '--max_steps=25', says='use its weights: --init_from=out/ckpt.pt', cwd=quick)


def test_a_damaged_checkpoint(quick):
    """A damaged ckpt.pt ends a command in one line that names the others."""
    os.truncate(quick / 'out/ckpt.pt', 9999)
    for command in (('train.py', 'cfg.py'), ('sample.py', 'cfg.py')):
        line = refused(*command, says='out/ckpt.pt is damaged', cwd=quick)
        assert 'the folder also has ckpt_previous.pt, ckpt_best.pt: move ckpt.pt away' in line
    shutil.move(quick / 'out/ckpt.pt', quick / 'away.pt')
    assert 'resumed at step 16' in ok('train.py', 'cfg.py', cwd=quick).stdout


def test_an_error_of_the_environment_is_not_damage(few, monkeypatch):
    """Errors of the operating system are named; a file system without mmap is read without it."""

    def unreadable(path, **options):
        raise PermissionError(errno.EACCES, 'Permission denied', str(path))

    with monkeypatch.context() as patch:
        patch.setattr(torch, 'load', unreadable)
        with pytest.raises(InputError, match='ckpt.pt cannot be read .*Permission denied') as error:
            open_start(few / 'out', 'scratch', 'mistral')
        assert 'damaged' not in str(error.value)

    def no_mmap(path, *args):
        raise RuntimeError(f'unable to mmap 9 bytes from file <{path}>: No such device (19)')

    expected, _ = read_checkpoint(few / 'out/ckpt.pt')
    monkeypatch.setattr(torch.UntypedStorage, 'from_file', no_mmap)
    start = open_start(few / 'out', 'scratch', 'mistral')
    assert_same(dict(start.model.state_dict()), dict(expected.state_dict()))


def test_an_error_of_a_changed_model_is_not_damage(few, monkeypatch):
    """An error in the code of a changed model is raised as it is."""

    def undefined(*args):
        raise NameError

    monkeypatch.setattr(MHF, '__init__', undefined)
    with pytest.raises(NameError):
        load(few / 'out')


def test_a_malicious_checkpoint_is_not_run(quick):
    """Loading a malicious checkpoint does not execute its code."""

    class Evil:
        def __reduce__(self):
            return os.system, (f'touch {quick}/owned',)

    torch.save(Evil(), quick / 'out/ckpt.pt')
    refused('sample.py', 'cfg.py', says='not a checkpoint', cwd=quick)
    assert not (quick / 'owned').exists()


LOAD = "from mhf.checkpoint import load; load('out').tok; assert 'torch._dynamo' not in sys.modules"


@pytest.mark.parametrize('program', ["import prepare; assert 'torch' not in sys.modules", LOAD])
def test_imports(few, program):
    """prepare.py imports no torch, and opening a model imports no compiler: either takes seconds."""
    command = [sys.executable, '-c', f'import sys; {program}']
    assert subprocess.run(command, cwd=few, env=os.environ | dict(PYTHONPATH=REPO)).returncode == 0


PROGRAM = """
import torch
from hashing import signature_table
from model import MHF, MHFConfig

sizes = dict(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, intermediate_size=8)
table = signature_table([str(i) for i in range(50)], 4, 20, pad_id=2)
model = MHF(MHFConfig(vocab_size=50, num_buckets=20, loss='exact', **sizes), table)
model.init_weights()
x = model.signatures[torch.arange(11)[None]]
model(x[:, :-1], x[:, 1:]).backward()
model.generate(torch.zeros(1, 1, dtype=int), 3)
"""


def test_four_files_suffice(tmp_path):
    """The method works in another project with four files of this one."""
    (tmp_path / 'mhf').mkdir()
    for name in ('model.py', 'hashing.py', 'mhf/head.py', 'mhf/errors.py'):
        shutil.copy(REPO / name, tmp_path / name)
    subprocess.run([sys.executable, '-c', PROGRAM], cwd=tmp_path, check=True)
