"""
Checkpoints of a run: train.py writes them and resumes from them.

    model, ckpt = load_checkpoint('out/mhf_tiny/ckpt.pt')

A checkpoint is a dict with the keys KEYS. It is written to a temporary file and renamed, so every ckpt*.pt is complete.
"""

import atexit
import contextlib
import os
import re
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from configurator import InputError
from mhf.chunked import ChunkedMHF, build_on_meta, load_weights
from mhf.data import replace_durably
from model import MHFConfig

KEEP_CHECKPOINTS = 2  # numbered ones; if ckpt.pt does not load, a run resumes from the previous one
KEYS = ('model', 'model_config', 'optimizer', 'config', 'step', 'best_val_loss', 'data', 'add_bos')


def load_checkpoint(path, Model=ChunkedMHF):
    """Loads a checkpoint of train.py on the CPU. Returns (model, the checkpoint's dict). Raises InputError."""
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = [key for key in KEYS if key not in ckpt]
        if missing:
            raise ValueError(f'no {", ".join(missing)} in it')
        model = build_on_meta(MHFConfig(**ckpt['model_config']), Model)
        # copied out of the mapped file, because a training run may replace it
        load_weights(model, {name: tensor.clone() for name, tensor in ckpt['model'].items()})
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; check the path, or train a model with train.py') from None
    except Exception as e:  # zipfile, pickle and torch raise many types
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        raise InputError(f'{path} is damaged, or not a checkpoint of this version of train.py {reason}') from None
    return model, ckpt


class Checkpoints:
    """
    The checkpoints in out_dir: ckpt.pt is the newest, ckpt_best.pt has the lowest validation loss, and the newest
    KEEP_CHECKPOINTS also exist as ckpt_000123.pt, named by their step. All ranks call save(); a thread of the rank with
    writes=True writes the files. On it, last_path and last_step describe the last one loaded or written.
    """

    def __init__(self, out_dir, writes=True):
        self.folder = Path(out_dir)
        self.writes = writes
        self.newest = self.folder / 'ckpt.pt'
        self.best = self.folder / 'ckpt_best.pt'
        self.temporary = self.folder / 'ckpt.pt.tmp'
        self.temporary_link = self.folder / 'ckpt_link.tmp'
        self.last_path = None
        self.last_step = None
        self.pending = None  # the future of the last write
        self.thread = ThreadPoolExecutor(1)
        torch.serialization.set_crc32_options(False)  # torch.load does not verify them

    def lock(self):
        """
        Creates out_dir and locks it until this process ends, on the rank that writes. Raises InputError if another run
        holds the lock.
        """
        if not self.writes:
            return
        path = self.folder / '.lock'
        file_lock = FileLock(path, timeout=0)
        creates_folder = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file_lock.acquire()
            atexit.register(self.unlock, path, file_lock, creates_folder)
            path.write_text(f'{os.getpid()}\n{socket.gethostname()}\n')
            # a killed run may have left these files
            self.temporary.unlink(missing_ok=True)
            self.temporary_link.unlink(missing_ok=True)
        except Timeout:
            holder = ' on '.join(path.read_text().split())
            raise InputError(f'out_dir={self.folder} is in use by process {holder}; choose another out_dir') from None
        except OSError as e:
            raise InputError(f'out_dir={self.folder} cannot be written ({e}); choose another') from None

    def unlock(self, path, file_lock, creates_folder):
        """Releases out_dir, and deletes it if this process created it and it is empty."""
        path.unlink(missing_ok=True)
        if creates_folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        file_lock.release()

    def numbered(self):
        """Returns {step: path} of the checkpoints with a step in their name, newest first."""
        # _write deletes old checkpoints, so only the names that it creates count
        paths = [path for path in self.folder.glob('ckpt_*.pt') if re.fullmatch(r'ckpt_\d{6,}\.pt', path.name)]
        return dict(sorted(((int(path.stem[5:]), path) for path in paths), reverse=True))

    def list(self):
        """Returns the checkpoints that a run can resume from, newest first, or only ckpt_best.pt if no other exists."""
        paths = [path for path in (self.newest, *self.numbered().values()) if path.exists()]
        return paths or [path for path in [self.best] if path.exists()]

    def load_latest(self, Model=ChunkedMHF):
        """
        Loads the newest intact checkpoint of list(), with a warning for each damaged one. Returns (model, the
        checkpoint's dict). Raises InputError if there is none.
        """
        paths = self.list() or [self.newest]
        for path in paths:
            try:
                model, ckpt = load_checkpoint(path, Model)
            except InputError as e:
                if path == paths[-1]:
                    raise
                if self.writes:
                    print(f'WARNING: {e}; using the previous checkpoint', file=sys.stderr)
            else:
                for name in (self.newest.name, f'ckpt_{ckpt["step"]:06}.pt'):
                    # missing if a user deleted it, or if a kill came before its rename
                    if self.writes and not (self.folder / name).exists():
                        self._link(path, name)
                self.last_path = path
                self.last_step = ckpt['step']
                return model, ckpt

    def save(self, state, is_best):
        """Waits for the previous write, copies the state to the host, and starts to write it in the thread."""
        self.wait()
        if not self.writes:
            return
        state = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to('cpu', copy=True), state)
        self.pending = self.thread.submit(self._write, state, is_best)

    def wait(self):
        """Waits for the write in progress. Raises its error."""
        if self.pending:
            self.pending.result()

    def raise_if_failed(self):
        """Raises the error of a write that has ended, so that a full disk stops a run at its next step."""
        if self.pending and self.pending.done():
            self.wait()

    def _write(self, state, is_best):
        """
        Runs in the thread: writes a temporary file, links it as ckpt_best.pt if it is the best, renames it to ckpt.pt
        (only now is it the current checkpoint), links it as ckpt_STEP.pt, and deletes old checkpoints.
        """
        start = time.perf_counter()
        step = state['step']
        try:
            with open(self.temporary, 'wb') as f:
                torch.save(state, f)
            # ckpt_best.pt first: a run that is killed here resumes from the old ckpt.pt and writes both files again
            if is_best:
                self._link(self.temporary, self.best.name)
            replace_durably(self.temporary, self.newest)
            self.last_path = self.newest
            self.last_step = step
            self._link(self.newest, f'ckpt_{step:06}.pt')
            # checkpoints of later steps are left over from before the run was resumed or restarted
            numbered = self.numbered()
            kept = [saved_step for saved_step in numbered if saved_step <= step][:KEEP_CHECKPOINTS]
            for saved_step in numbered.keys() - kept:
                numbered[saved_step].unlink()
        except (OSError, RuntimeError) as e:
            self.temporary.unlink(missing_ok=True)
            reason = f'the checkpoint of step {step} could not be written ({e})'
            raise InputError(f'{self.folder}: {reason}; {self.resume_hint()}') from None
        tqdm.write(f'checkpoint of step {step}, written in {time.perf_counter() - start:.2f} s')

    def _link(self, path, name):
        """Creates a hard link to a checkpoint, or a copy on a file system without hard links."""
        try:
            os.link(path, self.temporary_link)
        except OSError:
            shutil.copyfile(path, self.temporary_link)
        replace_durably(self.temporary_link, self.folder / name)

    def resume_hint(self, change=''):
        """Returns a message that names the last checkpoint and says how to resume a run that stops."""
        if self.last_step is None:
            return 'no checkpoint was written yet; start again' + (change and f' with {change}')
        resume = 'resume with --init_from=resume' + (change and f' and {change}')
        return f'{self.last_path} contains step {self.last_step}; {resume}'
