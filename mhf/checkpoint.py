"""
Checkpoints of a run: train.py writes them and resumes from them.

    model, ckpt = load_checkpoint('out/mhf_tiny/ckpt.pt')

A checkpoint is a dict with the entries KEYS. Its file gets its name by a rename, so a name always leads to a complete
file.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import InputError
from mhf.data import replace_durably
from mhf.fused import FusedMHF
from model import MHFConfig

KEYS = ('model', 'model_config', 'optimizer', 'config', 'step', 'best_val_loss', 'data', 'add_bos')


def map_tensors(change, state):
    """Returns nested dicts and lists with change(tensor) in place of each tensor."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: map_tensors(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_tensors(change, value) for value in state]
    return state


def build_on_meta(config, Model=FusedMHF):
    """Builds a model on the meta device, without memory and without random draws, for load_weights."""
    with torch.device('meta'):
        return Model(config)


def load_weights(model, state):
    """Assigns the tensors of a state_dict to a model from build_on_meta. Raises RuntimeError if they do not fit."""
    model.load_state_dict(state, assign=True)
    model.set_vocabulary(state['signatures'].numpy(), state['token_mask'].numpy())


def load_checkpoint(path, Model=FusedMHF):
    """Loads a checkpoint of train.py on the CPU. Returns (model, the checkpoint's dict). Raises InputError."""
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = [key for key in KEYS if key not in ckpt]
        if missing:
            raise ValueError(f'no {", ".join(missing)} in it')
        model = build_on_meta(MHFConfig(**ckpt['model_config']), Model)
        # copies, because a training run may replace the mapped file
        load_weights(model, {name: tensor.clone() for name, tensor in ckpt['model'].items()})
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; train.py writes one there') from None
    except Exception as e:  # torch.load raises many: of zip, of pickle, KeyError
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        raise InputError(f'{path} is damaged, or not a checkpoint of this version of train.py {reason}') from None
    return model, ckpt


def check_resume(ckpt, path, config, data):
    """
    Raises InputError where a resumed run would differ from its checkpoint: in `config`, the settings that must not
    change, or in `data`, the dict of mhf.data.data_identity.
    """
    changed = [f'{k}={ckpt["config"].get(k)} (now {v})' for k, v in config.items() if ckpt['config'].get(k) != v]
    if changed:
        raise InputError(f'{path} was trained with {", ".join(changed)}; a resumed run keeps it')
    changed = [name for name, value in data.items() if ckpt['data'].get(name) != value]
    if changed:
        new_run = f'--init_from={path.parent} and another --out_dir start a new run with its weights'
        raise InputError(f'{path} was trained on other data: {", ".join(changed)} differs; {new_run}')


class Checkpoints:
    """
    The checkpoints in out_dir: ckpt.pt is the newest, ckpt_best.pt has the lowest validation loss, and the last
    `keep_checkpoints` also have a name with their step, ckpt_000123.pt. All ranks call save(); the one that `writes`
    copies the state and lets a thread write it. last_path and last_step describe the last checkpoint that was loaded or
    written.
    """

    def __init__(self, out_dir, keep_checkpoints, writes=True):
        self.folder = Path(out_dir)
        self.keep_checkpoints = keep_checkpoints
        self.writes = writes
        self.newest = self.folder / 'ckpt.pt'
        self.temporary = self.folder / 'ckpt.pt.tmp'
        self.last_path = None
        self.last_step = None
        self.pending = None
        self.thread = ThreadPoolExecutor(1)
        # torch.load does not check them
        torch.serialization.set_crc32_options(False)

    @staticmethod
    def step_of(path):
        """The step in the name of a checkpoint, or None."""
        match = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
        return int(match[1]) if match else None

    def numbered(self):
        """The checkpoints with a step in their name, newest first."""
        paths = [path for path in self.folder.glob('ckpt_*.pt') if self.step_of(path) is not None]
        return sorted(paths, key=self.step_of, reverse=True)

    def list(self):
        """The checkpoints that a run can resume from, newest first."""
        return [path for path in (self.newest, *self.numbered()) if path.exists()]

    def make_folder(self):
        """Creates out_dir, on the rank that writes. Raises InputError if it is not writable."""
        if not self.writes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.temporary.unlink(missing_ok=True)  # a killed run left it
            self.temporary.touch()
            self.temporary.unlink()
        except OSError as e:
            raise InputError(f'out_dir={self.folder} cannot be written ({e}); choose another') from None

    def load_latest(self, Model=FusedMHF):
        """
        Loads the newest checkpoint that is intact, with a warning for each that is not. Returns (model, the
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
                self.last_path = path
                self.last_step = ckpt['step']
                return model, ckpt

    def save(self, state, is_best):
        """Copies the state to the host and starts to write it, after the previous write has ended."""
        self.wait()
        if not self.writes:
            self.last_path = self.newest
            self.last_step = state['step']
            return
        start = time.perf_counter()
        state = map_tensors(lambda tensor: tensor.detach().to('cpu', copy=True), state)
        self.pending = self.thread.submit(self._write, state, is_best, time.perf_counter() - start)

    def wait(self):
        """Waits for the write in progress. Raises its error."""
        if self.pending:
            pending = self.pending
            self.pending = None
            pending.result()

    def raise_if_failed(self):
        """Raises the error of a write that has ended, so that a full disk stops a run at its next step."""
        if self.pending and self.pending.done():
            self.wait()

    def _write(self, state, is_best, stall_seconds):
        """Writes a checkpoint under all its names, and deletes old ones. stall_seconds: how long training waited."""
        start = time.perf_counter()
        step = state['step']
        try:
            self.temporary.unlink(missing_ok=True)  # it may be a link to ckpt.pt
            with open(self.temporary, 'wb') as f:
                torch.save(state, f)
            replace_durably(self.temporary, self.newest)
            self.last_path = self.newest
            self.last_step = step
            if is_best:
                self._link_newest('ckpt_best.pt')
            if self.keep_checkpoints:
                self._link_newest(f'ckpt_{step:06}.pt')
            # later ones are damaged, or of a run that was abandoned
            later = [path for path in self.numbered() if self.step_of(path) > step]
            for path in later + self.numbered()[len(later) + self.keep_checkpoints :]:
                path.unlink()
        except (OSError, RuntimeError) as e:
            self.temporary.unlink(missing_ok=True)
            raise InputError(f'{self.newest} could not be written ({e}); the previous checkpoint is intact') from None
        seconds = time.perf_counter() - start
        tqdm.write(f'checkpoint of step {step}: training waited {stall_seconds:.2f} s, written in {seconds:.2f} s')

    def _link_newest(self, name):
        """Gives ckpt.pt a second name, or copies it on a file system without hard links."""
        try:
            os.link(self.newest, self.temporary)
        except OSError:
            shutil.copyfile(self.newest, self.temporary)
        replace_durably(self.temporary, self.folder / name)

    def resume_hint(self):
        """Returns a sentence about the last checkpoint of a run that stops."""
        # if the last write fails, the previous checkpoint stays
        with contextlib.suppress(InputError):
            self.wait()
        if self.last_step is None:
            return 'no checkpoint was written yet'
        return f'{self.last_path} contains step {self.last_step}; continue with --init_from=resume'
