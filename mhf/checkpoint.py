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
from dataclasses import asdict
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from configurator import InputError, settings_of
from mhf.files import replace_durably
from mhf.fused import FusedMHF
from model import MHFConfig

# what a checkpoint holds
PARTS = ('model', 'model_config', 'optimizer', 'config', 'step', 'best_val', 'data')


def beside(path):
    """The file beside a checkpoint that holds its SHA-256, as `sha256sum -c` reads it."""
    return path.with_name(f'{path.name}.sha256')


def checked_digest(path):
    """The SHA-256 of a checkpoint. Raises InputError where the file beside it says another one."""
    try:
        with open(path, 'rb') as f:
            digest = hashlib.file_digest(f, 'sha256').hexdigest()
        # without a file beside it, a checkpoint is taken as it is
        said = beside(path).read_text(errors='replace').split(' ')[0] if beside(path).exists() else ''
    except OSError as e:
        raise InputError(f'{path} cannot be read ({e.strerror})') from None
    if said and said != digest:
        raise InputError(f'{path} is damaged: its SHA-256 is {digest}, {beside(path).name} says {said}')
    return digest


def digest_of_state(state):
    """The SHA-256 of nested dicts and lists of tensors, numbers and strings."""
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
    """Nested dicts and lists -> the same with change(tensor) in place of each tensor."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: map_tensors(change, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_tensors(change, value) for value in state]
    return state


class Undrawn(TorchFunctionMode):
    """Leaves out torch.nn.init. Even on the meta device, drawing would import torch's compiler, 1.4 s."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', '') == 'torch.nn.init':
            return None
        return function(*args, **kwargs or {})


def build_on_meta(config, Model=FusedMHF):
    """A model whose tensors have shapes and no numbers, for set_weights."""
    with torch.device('meta'), Undrawn():
        return Model(config)


def set_weights(model, state):
    """Gives a model of build_on_meta the tensors of a state_dict. Raises RuntimeError where they do not fit."""
    model.load_state_dict(state, assign=True)
    model.set_vocabulary(state['signatures'].numpy(), state['token_mask'].numpy())


def load_checkpoint(path, Model=FusedMHF):
    """A train.py checkpoint -> (model, the checkpoint's dict), on the CPU. Raises InputError."""
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = [key for key in PARTS if key not in ckpt]
        if missing:
            raise ValueError(f'it has no {", ".join(missing)}')
        config = MHFConfig(**ckpt['model_config'])
        num_layers = sum(name.endswith('.input_layernorm.weight') for name in ckpt['model'])
        sizes = (*ckpt['model']['signatures'].shape, num_layers)
        if sizes != (config.vocab_size, config.num_coordinates, config.num_layers):
            raise ValueError(f'its tensors are of V, H, layers = {sizes}, its config says otherwise')
        model = build_on_meta(config, Model)
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
    """Raises InputError where a resumed run has other settings than its checkpoint. Those in `free` may differ."""
    # a setting that an older train.py did not have was what MHFConfig says, or else what its default is now
    before = settings_of('train.py') | asdict(MHFConfig(**ckpt['model_config'])) | ckpt['config'] | ckpt['data']
    fixed = [name for name in config if name not in free]
    changed = [f'{name}={before[name]} (now {config[name]})' for name in fixed if before[name] != config[name]]
    if changed:
        raise InputError(f'{source} was trained with {", ".join(changed)}; a resumed run keeps it')


def check_data(ckpt, source, data, out_dir):
    """Raises InputError where a resumed run has other data than its checkpoint. data: what meta.identity gives."""
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
    The checkpoints in out_dir: ckpt.pt is the newest, ckpt_best.pt has the lowest validation loss, and the last `keep`
    are also there as ckpt_000123.pt. A thread writes them, one at a time. All processes call save(), and the one that
    `writes` writes. last_path and last_step are of the newest checkpoint that is whole.
    """

    def __init__(self, out_dir, keep, writes=True):
        self.folder = Path(out_dir)
        self.keep = keep
        self.writes = writes
        self.newest = self.folder / 'ckpt.pt'
        self.temporary = self.folder / 'ckpt.pt.tmp'
        self.last_path = None
        self.last_step = None
        self.last_digest = None
        self.pending = None
        self.thread = ThreadPoolExecutor(1)
        # there is a SHA-256; computing a CRC-32 as well would keep training waiting
        torch.serialization.set_crc32_options(False)

    @staticmethod
    def step_of(path):
        """The step in the name of a checkpoint, or None."""
        match = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
        return int(match[1]) if match else None

    def milestones(self):
        """The checkpoints with a step in their name, the newest first."""
        paths = [path for path in self.folder.glob('ckpt_*.pt') if self.step_of(path) is not None]
        return sorted(paths, key=self.step_of, reverse=True)

    def there(self):
        """The checkpoints from which a run can go on, the newest first."""
        return [path for path in (self.newest, *self.milestones()) if path.exists()]

    def make_folder(self):
        """Makes out_dir. Raises InputError where it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / '.writable').touch()
            (self.folder / '.writable').unlink(missing_ok=True)
            self.temporary.unlink(missing_ok=True)  # of a run that was killed
        except OSError as e:
            raise InputError(f'out_dir={self.folder} cannot be written ({e})') from None

    def newest_whole(self, Model=FusedMHF):
        """
        (model, the checkpoint's dict) of the newest checkpoint that is not damaged; warns of those that are. Raises
        InputError where there is none.
        """
        *newer, oldest = self.there() or [self.newest]
        for path in newer:
            try:
                return self.read(path, Model)
            except InputError as e:
                if self.writes:
                    print(f'WARNING: {e}; going back to the checkpoint before', file=sys.stderr)
        return self.read(oldest, Model)

    def read(self, path, Model):
        """(model, the checkpoint's dict) of a checkpoint, which counts as the newest whole one from then on."""
        model, ckpt = load_checkpoint(path, Model)
        self.last_digest = checked_digest(path)
        self.last_path = path
        self.last_step = ckpt['step']
        return model, ckpt

    def save(self, state, best):
        """Copies the state, and leaves it to the thread to write it. Waits for the write before."""

        def on_host(tensor):
            # a copy, which training does not change
            return tensor.detach().to('cpu', copy=True) if self.writes else None

        self.wait()
        began = time.perf_counter()
        state = map_tensors(on_host, state)
        if self.writes:
            self.pending = self.thread.submit(self._write, state, best, time.perf_counter() - began)
        else:
            self.last_path = self.newest
            self.last_step = state['step']

    def wait(self):
        """Waits until the last write is over. Raises what it raised."""
        if self.pending:
            pending = self.pending
            self.pending = None
            pending.result()

    def raise_if_failed(self):
        """Raises what the last write raised, if it is over: a full disk stops a run at its next step."""
        if self.pending and self.pending.done():
            self.wait()

    def _write(self, state, best, stood_still):
        """
        Writes a checkpoint under all its names, and deletes those that are not kept. ckpt.pt is replaced by a file that
        is whole and on the disk, so it is whole at any moment. stood_still: seconds that training waited.
        """
        began = time.perf_counter()
        try:
            self.temporary.unlink(missing_ok=True)  # it may be a link to ckpt.pt
            with open(self.temporary, 'w+b') as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
                f.seek(0)
                digest = hashlib.file_digest(f, 'sha256').hexdigest()
            self._put(self.newest, digest)
            self.last_path = self.newest
            self.last_step = state['step']
            if best:
                self._same_as_newest(self.folder / 'ckpt_best.pt', digest)
            if self.keep:
                self._same_as_newest(self.folder / f'ckpt_{state["step"]:06}.pt', digest)
            # later checkpoints are damaged or belong to an abandoned run
            later = [path for path in self.milestones() if self.step_of(path) > state['step']]
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
        """Gives the temporary file its name, and puts its SHA-256 beside it."""
        # a crash between these lines leaves a checkpoint without a digest, never one with a wrong digest
        beside(path).unlink(missing_ok=True)
        replace_durably(self.temporary, path)  # of ckpt.pt: from here on a resumed run reads the new one
        self.temporary.write_text(f'{digest}  {path.name}\n')
        replace_durably(self.temporary, beside(path))

    def _same_as_newest(self, path, digest):
        """Gives ckpt.pt's file one more name, or makes a copy of it."""
        try:
            os.link(self.newest, self.temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.newest, self.temporary)
        self._put(path, digest)

    def kept(self):
        """A sentence for the user on what a stopped run leaves."""
        # if the last write fails, the checkpoint before it stays
        with contextlib.suppress(InputError):
            self.wait()
        if self.last_step is None:
            return 'no checkpoint was written yet'
        return f'{self.last_path} is good, of step {self.last_step}: go on with --init_from=resume'
