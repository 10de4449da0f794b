"""
The checkpoints of a run: train.py writes and resumes them by Checkpoints.

    model, ckpt = load_checkpoint('out/mhf_tiny/ckpt.pt')

A checkpoint is a dict with the entries PARTS, and its SHA-256 lies beside it.
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from configurator import InputError, settings_of
from mhf.fast import FastMHF
from mhf.files import replace_durably
from model import MHFConfig

# what a checkpoint holds
PARTS = ('model', 'model_config', 'optimizer', 'config', 'step', 'best_val', 'data')


def beside(path):
    """Where the SHA-256 of a checkpoint stands, as `sha256sum -c` reads it."""
    return path.with_name(f'{path.name}.sha256')


def checked_digest(path):
    """The SHA-256 of a checkpoint's file. Raises InputError where another one stands beside it."""
    try:
        with open(path, 'rb') as f:
            found = hashlib.file_digest(f, 'sha256').hexdigest()
        written = beside(path).read_text(errors='replace').split(' ')[0] if beside(path).exists() else ''
    except OSError as e:
        raise InputError(f'{path} cannot be read ({e.strerror})') from None
    # without one the file is taken as it is
    if written and written != found:
        raise InputError(f'{path} is damaged: its SHA-256 is {found}, {beside(path).name} says {written}')
    return found


def digest_of_state(state):
    """SHA-256 of a nest of dicts and lists of tensors, numbers, strings; hashlib lets other threads run meanwhile."""
    digest = hashlib.sha256()

    def feed(x):
        if isinstance(x, torch.Tensor):
            digest.update(f'{x.dtype} {tuple(x.shape)}'.encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(x, (dict, list, tuple)):
            digest.update(f'{type(x).__name__} {len(x)}'.encode())
            for key, value in x.items() if isinstance(x, dict) else enumerate(x):
                digest.update(repr(key).encode())
                feed(value)
        else:
            digest.update(repr(x).encode())

    feed(state)
    return digest.hexdigest()


def map_tensors(change, state):
    """A nest of dicts and lists, with change(tensor) for each tensor."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {k: map_tensors(change, v) for k, v in state.items()}
    return [map_tensors(change, v) for v in state] if isinstance(state, list) else state


class Undrawn(TorchFunctionMode):
    """Leaves out torch.nn.init. Even on the meta device, drawing would import torch's compiler, 1.4 s."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', '') == 'torch.nn.init':
            return None
        return function(*args, **kwargs or {})


def without_weights(config, Model=FastMHF):
    """A model whose tensors have shapes and no numbers, for set_weights."""
    with torch.device('meta'), Undrawn():
        return Model(config)


def set_weights(model, state):
    """Gives a model of without_weights the tensors of a state_dict. Raises RuntimeError where they do not fit."""
    model.load_state_dict(state, assign=True)
    model.set_vocabulary(state['signatures'].numpy(), state['is_token'].numpy())


def load_checkpoint(path, Model=FastMHF):
    """A train.py checkpoint -> (model, the checkpoint's dict), on the CPU. Raises InputError."""
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = [key for key in PARTS if key not in ckpt]
        if missing:
            raise ValueError(f'it has no {", ".join(missing)}')
        config = MHFConfig(**ckpt['model_config'])
        layers = sum(k.endswith('.input_layernorm.weight') for k in ckpt['model'])
        there = (*ckpt['model']['signatures'].shape, layers)
        if there != (config.vocab_size, config.coordinates, config.num_layers):
            raise ValueError(f'its tensors are of V, H, layers = {there}, its config says otherwise')
        model = without_weights(config, Model)
        # copies, because the mapped file may be replaced while a training run goes on
        state = {name: tensor.clone() for name, tensor in ckpt['model'].items()}
        # older checkpoints called the Hash Decoder `mixers`
        state = {re.sub(r'^mixers\.', 'hash_decoder.', name): tensor for name, tensor in state.items()}
        set_weights(model, state)
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; train.py writes one there') from None
    except Exception as e:  # torch.load's errors are many: zip, pickle, missing keys
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        raise InputError(f'{path} is no checkpoint of train.py, or is damaged {reason}') from None
    return model, ckpt


def check_settings(ckpt, source, config, free):
    """Raises InputError where a run would go on with other settings than its checkpoint, but for those in `free`."""
    # a setting that an older train.py did not have was what is its default now
    before = settings_of('train.py') | ckpt['config'] | ckpt['data']
    fixed = [name for name in config if name not in free]
    changed = [f'{name}={before[name]} (now {config[name]})' for name in fixed if before[name] != config[name]]
    if changed:
        raise InputError(f'{source} was trained with {", ".join(changed)}; a resumed run keeps it')


def check_data(ckpt, source, data, out_dir):
    """Raises InputError where a run would go on with other data than its checkpoint. data: of bins.identity."""
    begin_anew = f'--init_from={Path(out_dir)} and another --out_dir begin with its weights'
    other = [name for name, value in data.items() if ckpt['data'].get(name) != value]
    if other:
        words = f'other bins or another tokenizer than these (their {", ".join(other)} differs)'
        raise InputError(f'{source} was trained on {words}; a resumed run keeps them; {begin_anew}')
    # an older train.py could change the text of a run, whose batches then began anew
    if ckpt.get('data_start_step'):
        went_on = f'went on with other text at step {ckpt["data_start_step"]} (--new_data, which is gone)'
        raise InputError(f'{source} {went_on}; {begin_anew}')


class Checkpoints:
    """
    out_dir's checkpoints: ckpt.pt is the newest, ckpt_best.pt the one of the lowest validation loss, ckpt_000123.pt
    the last `keep`. They are written one at a time by a thread; last_path and last_step name the newest. All processes
    call save(), one writes.
    """

    def __init__(self, out_dir, keep, writes=True):
        self.folder, self.keep, self.writes = Path(out_dir), keep, writes
        self.newest, self.temporary = self.folder / 'ckpt.pt', self.folder / 'ckpt.pt.tmp'
        self.last_path = self.last_step = self.last_digest = self.pending = None
        self.thread = ThreadPoolExecutor(1)
        torch.serialization.set_crc32_options(False)  # SHA-256 is there; a CRC-32 would keep training waiting

    @staticmethod
    def step_of(path):
        """The step in the name of a checkpoint, or None."""
        found = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
        return found and int(found[1])

    def milestones(self):
        """Those with a step in their name, the newest first."""
        found = (p for p in self.folder.glob('ckpt_*.pt') if self.step_of(p) is not None)
        return sorted(found, key=self.step_of, reverse=True)

    def there(self):
        """Those that a resume may go on from, the newest first."""
        return [p for p in (self.newest, *self.milestones()) if p.exists()]

    def make_folder(self):
        """Raises InputError where it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / '.writable').touch()
            (self.folder / '.writable').unlink(missing_ok=True)
            self.temporary.unlink(missing_ok=True)  # of a run that was killed
        except OSError as e:
            raise InputError(f'out_dir={self.folder} cannot be written ({e})') from None

    def newest_whole(self, Model=FastMHF):
        """(model, the checkpoint's dict): the newest whose digest fits; warns of damaged ones. Raises InputError."""
        paths = self.there() or [self.newest]
        for path in paths:
            try:
                model, ckpt = load_checkpoint(path, Model)
                self.last_digest = checked_digest(path)
            except InputError as e:
                if path == paths[-1]:
                    raise
                if self.writes:
                    print(f'WARNING: {e}; going back to the checkpoint before', file=sys.stderr)
                continue
            self.last_path = path
            self.last_step = ckpt['step']
            return model, ckpt

    def save(self, state, best):
        """Copies the state and leaves writing it to the thread; waits for the write before."""

        def on_host(tensor):  # a copy, which training does not change
            return tensor.detach().to('cpu', copy=True) if self.writes else None

        self.wait()
        began = time.perf_counter()
        state = map_tensors(on_host, state)
        if self.writes:
            self.pending = self.thread.submit(self._write, state, best, time.perf_counter() - began)
        else:
            self.last_path, self.last_step = self.newest, state['step']

    def wait(self):
        """Until the last write is over; raises what it raised."""
        if self.pending:
            pending, self.pending = self.pending, None
            pending.result()

    def raise_if_failed(self):
        """What the last write raised, if it is over: a full disk stops a run at its next step."""
        if self.pending and self.pending.done():
            self.wait()

    def _write(self, state, best, stood_still):
        began = time.perf_counter()
        try:
            self.temporary.unlink(missing_ok=True)  # it may be a link to ckpt.pt
            with open(self.temporary, 'w+b') as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
                f.seek(0)
                digest = hashlib.file_digest(f, 'sha256').hexdigest()
            # from here on ckpt.pt is the one that a resume reads
            self._put(self.newest, digest)
            self.last_path, self.last_step = self.newest, state['step']
            if best:
                self._same_as_newest(self.folder / 'ckpt_best.pt', digest)
            if self.keep:
                self._same_as_newest(self.folder / f'ckpt_{state["step"]:06}.pt', digest)
            # later steps than this one are damaged, or of a run that began again before them
            later = [p for p in self.milestones() if self.step_of(p) > state['step']]
            for path in later + self.milestones()[len(later) + self.keep :]:
                path.unlink()
                beside(path).unlink(missing_ok=True)
        except (OSError, RuntimeError) as e:
            self.temporary.unlink(missing_ok=True)
            raise InputError(f'{self.newest} could not be written ({e}); the one before is untouched') from None
        tqdm.write(
            f'checkpoint of step {self.last_step}: training stood still for {stood_still:.2f} s, written in '
            f'{time.perf_counter() - began:.2f} s'
        )

    def _put(self, path, digest):
        """The temporary file gets its name, and its SHA-256 a place beside it."""
        # a crash between these lines leaves a checkpoint without a digest, and never one with another's
        beside(path).unlink(missing_ok=True)
        replace_durably(self.temporary, path)
        self.temporary.write_text(f'{digest}  {path.name}\n')
        replace_durably(self.temporary, beside(path))

    def _same_as_newest(self, path, digest):
        """ckpt.pt's file under one more name, or a copy of it."""
        try:
            os.link(self.newest, self.temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.newest, self.temporary)
        self._put(path, digest)

    def kept(self):
        """A sentence for people on what a stopped run leaves."""
        with contextlib.suppress(InputError):  # then the one before stays
            self.wait()
        if self.last_step is None:
            return 'no checkpoint was written yet'
        return f'{self.last_path} is good, of step {self.last_step}: go on with --init_from=resume'
