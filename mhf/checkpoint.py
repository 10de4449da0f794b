"""
Checkpoints: train.py writes them and resumes from them, and other scripts load trained models by load(). A run writes
ckpt.pt, the newest checkpoint, and ckpt_best.pt, which has the lowest validation loss. Each is a complete Checkpoint,
from which a run can resume.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock
from tqdm import tqdm

from mhf.data import replace_durably
from mhf.errors import InputError
from mhf.runtime import describe_changes
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint
from model import MHF, MHFConfig

# settings that decide which data a step reads, or what is trained
FIXED_SETTINGS = ('seed', 'batch_size', 'init_from', 'counts_from', 'unfrozen_end_layers')
FINGERPRINTS = ('tokenizer_sha256', 'train_sha256', 'val_sha256')


@dataclass
class Checkpoint:
    """The contents of a checkpoint. The file is a dict with these keys."""

    model: dict  # state_dict
    vocabulary: dict  # of the model
    optimizer: dict  # {name of a trained parameter: the optimizer's state}
    identity: dict  # what a resumed run may not change, from run_identity()
    settings: dict  # those of train.py that identity does not contain
    tokenizer: str  # its name
    step: int
    best_val_loss: float

    @property
    def model_config(self):
        """The MHFConfig of the model."""
        others = {*FIXED_SETTINGS, *FINGERPRINTS}
        return MHFConfig(**{name: value for name, value in self.identity.items() if name not in others})


# -----------------------------------------------------------------------------
# write


def lock(out_dir):
    """Creates out_dir and locks it. Returns the lock. Raises filelock.Timeout, an OSError, if another run has it."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(Path(out_dir, '.train.lock'), timeout=0, is_singleton=True)
    # a notebook still has the lock after a run that failed, also if out_dir was removed since
    file_lock.release(force=True)
    file_lock.acquire()
    return file_lock


def save(out_dir, checkpoint, is_best):
    """
    Writes a checkpoint to a temporary file and reads it back. Only then does it replace ckpt_best.pt, if `is_best`, and
    after that ckpt.pt. Raises InputError if a file cannot be written or read; earlier checkpoints stay.
    """
    newest = Path(out_dir, 'ckpt.pt')
    temporary = Path(out_dir, 'ckpt.pt.tmp')
    temporary_best = Path(out_dir, 'ckpt_best.pt.tmp')
    try:
        temporary.unlink(missing_ok=True)  # of a killed run
        with open(temporary, 'xb') as f:
            torch.save(vars(checkpoint), f)
        read_file(temporary)
        if is_best:
            # not a hard link, because a user who overwrites ckpt.pt would change ckpt_best.pt, too
            shutil.copyfile(temporary, temporary_best)
            replace_durably(temporary_best, newest.with_name('ckpt_best.pt'))
        replace_durably(temporary, newest)
    except (OSError, RuntimeError, InputError) as e:
        reason = f'the checkpoint of step {checkpoint.step} could not be written ({first_cause(e)})'
        raise InputError(f'{newest}: {reason}') from e
    finally:
        for path in (temporary, temporary_best):
            path.unlink(missing_ok=True)
    tqdm.write(f'step {checkpoint.step}: saved {newest}')


def first_cause(error):
    """Describes the first of nested errors: torch.save hides a full disk behind a RuntimeError."""
    while error.__context__:
        error = error.__context__
    return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


# -----------------------------------------------------------------------------
# find and read


def find_checkpoint(out_dir):
    """Returns the path of the checkpoint in out_dir from which a run resumes, ckpt.pt, else ckpt_best.pt, or None."""
    paths = [Path(out_dir, name) for name in ('ckpt.pt', 'ckpt_best.pt')]
    return next((path for path in paths if path.exists()), None)


def read_file(path):
    """Reads a checkpoint of train.py. Its tensors are on the CPU, mapped to the file. Raises InputError."""
    try:
        return Checkpoint(**torch.load(path, map_location='cpu', weights_only=True, mmap=True))
    except Exception as e:  # zipfile, pickle and torch raise many types
        if isinstance(e, OSError) and e.filename:
            raise
        raise InputError(f'{path} is damaged, or of another version of train.py ({first_cause(e)})') from e


def read_checkpoint(path):
    """Reads a checkpoint of train.py. Returns (model, Checkpoint); only the Checkpoint is mapped to the file."""
    checkpoint = read_file(path)
    model = MHF(checkpoint.model_config, **checkpoint.vocabulary)
    model.load_state_dict(checkpoint.model)
    return model.eval(), checkpoint


# -----------------------------------------------------------------------------
# the start of a run


def open_start(out_dir, init_from, tokenizer):
    """Returns the model with which a run starts, and the Checkpoint from which it resumes; each may be None."""
    path = find_checkpoint(out_dir)
    if path:
        return read_checkpoint(path)
    return (None if init_from == 'scratch' else load(init_from, tokenizer).model), None


def run_config(settings, meta, model=None):
    """Returns the MHFConfig of a run. The model of init_from decides all fields but block_size and loss."""
    fields = asdict(model.config) if model else dict(vocab_size=meta['vocab_size'], pad_id=meta['pad_id'])
    names = MHFConfig.__annotations__ if settings['init_from'] == 'scratch' else ('block_size', 'loss')
    return MHFConfig(**fields | {name: settings[name] for name in names if name in settings})


def run_identity(model_config, settings, train_bins, val_bins):
    """Returns what a resumed run may not change: model, data, and the settings that decide what a step trains on."""
    fingerprints = (train_bins.meta['tokenizer_sha256'], train_bins.fingerprint, val_bins.fingerprint)
    fixed = {name: settings[name] for name in FIXED_SETTINGS} | dict(zip(FINGERPRINTS, fingerprints, strict=True))
    return asdict(model_config) | fixed


def check_identity(out_dir, checkpoint, identity):
    """Raises InputError if the run of a checkpoint had another identity."""
    recorded = asdict(checkpoint.model_config) | checkpoint.identity  # a field that its version lacked has its default
    if changes := describe_changes(recorded, identity):
        found = f'{out_dir} contains a run with other settings: {changes}'
        raise InputError(f'{found}; undo the change, or choose another --out_dir for a new run')


def describe_start(settings, identity, checkpoint=None):
    """Returns a line that says where a run starts, and which settings its model or this command changes."""
    if checkpoint:
        line = f'resumed at step {checkpoint.step}'
        changes = describe_changes(checkpoint.settings, settings)
    else:
        line = f'init_from={settings["init_from"]}, seed={settings["seed"]}'
        changes = describe_changes(settings, identity)
    return f'{line}; changed settings: {changes}' if changes else line


def optimizer_state(optimizer, model):
    """Returns {name: the optimizer's state} of the trained parameters; a tied parameter has one name."""
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}


def restore_optimizer(optimizer, model, states):
    """Copies the result of optimizer_state() to the optimizer of the same model."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            optimizer.state[p] = {key: value.to(p.device, copy=True) for key, value in states[name].items()}


# -----------------------------------------------------------------------------
# trained models


@dataclass
class LoadedModel:
    """A trained model, its tokenizer, and what its files say about it."""

    model: MHF
    tok: object
    source: str  # out_dir, folder or hub id
    name: str  # for messages
    add_bos: bool = True  # whether the model was trained with bos before each document, as prepare.py writes it
    eos_ids: tuple = ()  # ids that end a document according to the files of a released model

    @property
    def stop_ids(self):
        """The ids that end a document: bos, eos, pad, and each eos that the model declares."""
        return frozenset([self.tok.bos, self.tok.eos, self.tok.pad, *self.eos_ids])


def load(source='', tokenizer=None):
    """
    Loads a trained model and its tokenizer -> LoadedModel. Raises InputError.

    Args:
        source: the out_dir of a run, a *.pt, a folder in the released format, or a hub id; '': the newest run
        tokenizer: a name for get_tokenizer; default: the one that the files name, else mistral
    """
    if not source:
        paths = [path for depth in ('', '*/', '*/*/') for path in Path().glob(f'{depth}ckpt.pt')]
        if not paths:
            found = 'no ckpt.pt here or up to two folders below'
            raise InputError(f'{found}; train a model with: python train.py config/mhf_tiny.py')
        source = max(paths, key=lambda path: path.stat().st_mtime).parent
    path = Path(source) if Path(source).suffix == '.pt' else find_checkpoint(source)
    if not path:
        from mhf.released import open_released  # runs do not need it

        return open_released(source, tokenizer)
    model, ckpt = read_checkpoint(path)
    name = f'{path}, step {ckpt.step}'
    tok = get_tokenizer(tokenizer or ckpt.tokenizer)
    if tokenizer_fingerprint(tok) != ckpt.identity['tokenizer_sha256']:
        raise InputError(f"{name}: tokenizer '{tok.name}' is not the model's; name '{ckpt.tokenizer}'")
    return LoadedModel(model, tok, str(source), name)
