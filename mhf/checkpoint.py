"""
Checkpoints: train.py writes them and resumes from them, and every script loads trained models.

    loaded = load('out/mhf_tiny')        # the out_dir of a run, a *.pt, a folder in the released format, or a hub id
    loaded.model, loaded.tok

A run writes ckpt.pt, which is the newest checkpoint, ckpt_previous.pt, the one before, and ckpt_best.pt, which has the
lowest validation loss. Each is complete: a run can resume from it. get_checkpoint (train.py) returns its contents.
"""

import atexit
import contextlib
import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mhf.data import lock_folder, replace_durably
from mhf.errors import InputError
from mhf.released import from_pretrained, has_padding_from, has_signatures_of, read_facts, resolve_path
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint
from model import MHF, MHFConfig

# -----------------------------------------------------------------------------
# write


def lock(out_dir):
    """
    Creates out_dir, locks it until this process ends, and deletes the temporary files of a killed run. Raises
    InputError if another run holds the lock.
    """
    folder = Path(out_dir)
    lock_of_process = contextlib.ExitStack()
    lock_of_process.enter_context(lock_folder(folder, '.train.lock'))
    atexit.register(lock_of_process.close)
    for temporary in folder.glob('ckpt*.pt.tmp'):
        temporary.unlink()


def save(out_dir, state, is_best):
    """
    Writes a checkpoint to a temporary file. When it is on the disk, renames a copy to ckpt_best.pt if `is_best`, then
    ckpt.pt to ckpt_previous.pt, then the new file to ckpt.pt. A run that is killed before the last rename resumes from
    the checkpoint before. Raises InputError.
    """
    start = time.perf_counter()
    folder = Path(out_dir)
    newest = folder / 'ckpt.pt'
    temporary = folder / 'ckpt.pt.tmp'
    copy = folder / 'ckpt_best.pt.tmp'
    torch.serialization.set_crc32_options(False)  # torch.load does not verify them
    try:
        with open(temporary, 'wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        try:
            if is_best:
                shutil.copyfile(temporary, copy)
                replace_durably(copy, folder / 'ckpt_best.pt')
        finally:  # also if the copy does not fit on the disk
            if newest.exists():
                os.replace(newest, folder / 'ckpt_previous.pt')
            replace_durably(temporary, newest)  # now the new checkpoint is current
    except (OSError, RuntimeError) as e:
        for path in (temporary, copy):
            path.unlink(missing_ok=True)
        reason = e.__context__ or e  # torch.save hides a full disk behind a RuntimeError
        raise InputError(f'{folder}: the checkpoint of step {state["step"]} could not be written ({reason})') from None
    tqdm.write(f'checkpoint of step {state["step"]}, written in {time.perf_counter() - start:.2f} s')


# -----------------------------------------------------------------------------
# find and read


def find_checkpoints(out_dir):
    """
    Returns the paths of the checkpoints in out_dir; a run resumes from the first. ckpt_000123.pt are those of earlier
    versions of train.py.
    """
    folder = Path(out_dir)
    numbered = sorted(folder.glob(f'ckpt_{"[0-9]" * 6}.pt'), reverse=True)
    names = ['ckpt.pt', 'ckpt_previous.pt', *(path.name for path in numbered), 'ckpt_best.pt', 'ckpt_best_old.pt']
    return [folder / name for name in names if (folder / name).exists()]


def read_checkpoint(path, mmap=True):
    """
    Reads a checkpoint of train.py. Returns (model, the checkpoint's dict), on the CPU; the dict is mapped to the file,
    the model is not. Raises InputError.
    """
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
        config = MHFConfig(**ckpt['model_config'])
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; check the path, or train a model with train.py') from None
    except Exception as e:  # zipfile, pickle and torch raise many types
        # in a truncated file torch seeks before its start (EINVAL)
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise InputError(f'{path} cannot be read ({e})') from None
        if mmap and 'unable to mmap' in str(e):  # a file system without it
            return read_checkpoint(path, mmap=False)
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        others = [other.name for other in find_checkpoints(path.parent) if other.name != path.name]
        fix = f'; the folder also has {", ".join(others)}: move {path.name} away to use them' if others else ''
        raise InputError(f'{path} is damaged, or not a checkpoint of this version of train.py {reason}{fix}') from None
    # an error of a changed model.py is not damage
    model = MHF.from_state_dict(config, ckpt['model'])
    return model, ckpt


def resume(out_dir):
    """Reads the checkpoint that a run resumes from. Returns (model, the checkpoint's dict). Raises InputError."""
    paths = find_checkpoints(out_dir) or [Path(out_dir) / 'ckpt.pt']
    return read_checkpoint(paths[0])


# -----------------------------------------------------------------------------
# trained models


def make_config(settings, **fields):
    """Returns the MHFConfig of a script's settings and further fields. Raises InputError for settings out of range."""
    fields |= {name: value for name, value in settings.items() if name in MHFConfig.__annotations__}
    try:
        return MHFConfig(**fields)
    except ValueError as e:
        raise InputError(e) from None


@dataclass
class LoadedModel:
    """A trained model, its tokenizer, and what its files say about it."""

    model: MHF
    tok: object
    source: str  # out_dir, folder or hub id
    name: str  # for messages
    add_bos: bool  # whether the model was trained with bos before each document
    eos_ids: list  # ids that end a document according to the files of a released model

    @property
    def stop_ids(self):
        """The ids that end a document: bos, eos, pad, and each eos that the model declares."""
        return frozenset([self.tok.bos, self.tok.eos, self.tok.pad, *self.eos_ids])


def load(source='', tokenizer=None):
    """
    Loads a trained model and its tokenizer -> LoadedModel. Ids without a token have probability 0. Raises InputError.

    Args:
        source: the out_dir of a run, for its newest checkpoint; a *.pt; a folder in the released format, or its hub
            id[@revision]; '' is the newest run up to two folders below the working folder
        tokenizer: a name for get_tokenizer; default: the one that the files name, else mistral
    """
    if not source:
        paths = [path for depth in ('', '*/', '*/*/') for path in Path().glob(f'{depth}ckpt.pt')]
        if not paths:
            found = 'no ckpt.pt here or up to two folders below'
            raise InputError(f'{found}; train a model with: python train.py config/mhf_tiny.py')
        source = max(paths, key=lambda path: path.stat().st_mtime).parent
    paths = [Path(source)] if Path(source).suffix == '.pt' else find_checkpoints(source)
    if paths:
        model, ckpt = read_checkpoint(paths[0])
        name = f'{paths[0]}, step {ckpt["step"]}'
        facts = dict(tokenizer=ckpt['data']['tokenizer'], add_bos=ckpt['add_bos'], eos_ids=[])
        sha256 = ckpt['data']['tokenizer_sha256']
    else:
        folder = resolve_path(source)
        if not (folder / 'config.json').exists():
            raise InputError(f'{source} has no checkpoint (ckpt.pt) and no config.json of a released model')
        model = from_pretrained(folder)
        name = str(source)
        facts = read_facts(folder)
        sha256 = None
    own_tokenizer = facts.pop('tokenizer')
    tok = get_tokenizer(tokenizer or own_tokenizer or 'mistral')
    mismatch = find_mismatch(model, tok, sha256)
    if mismatch:
        its_own = f", '{own_tokenizer}'" if own_tokenizer else ''
        fix = "name the model's tokenizer"
        raise InputError(f"{name}: tokenizer '{tok.name}' is not the model's{its_own} ({mismatch}); {fix}")
    unused_ids = [i for i, token in enumerate(tok.tokens) if token is None]
    mask_ids(model, [*unused_ids, *range(len(tok.tokens), len(model.token_mask))])
    return LoadedModel(model, tok, str(source), name, **facts)


def find_mismatch(model, tok, sha256):
    """
    Returns how a tokenizer differs from that of a model, or ''. `sha256` is the fingerprint of the model's tokenizer,
    None for the released format, which has no fingerprint.
    """
    V = len(tok.tokens)
    if sha256:
        return '' if tokenizer_fingerprint(tok) == sha256 else 'other tokens'
    if V > len(model.token_mask) or not has_padding_from(model, V):
        return f'{V} tokens, expected {model.config.vocab_size}'
    if model.config.num_hashes and not has_signatures_of(model, tok.tokens):
        return 'its table is not that of these tokens'
    return ''


def mask_ids(model, ids):
    """Sets the probability of `ids` to 0."""
    token_mask = model.token_mask.cpu().numpy().copy()
    token_mask[ids] = False
    model.set_vocabulary(model.signatures.cpu().numpy(), token_mask)
