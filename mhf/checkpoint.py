"""
Checkpoints: train.py writes them and resumes from them, and every script loads trained models.

    start = open_start('out/mhf_tiny', init_from='scratch', tokenizer='mistral')    # where a run of train.py starts
    loaded = load('out/mhf_tiny')        # the out_dir of a run, a *.pt, a folder in the released format, or a hub id
    loaded.model, loaded.tok

A run writes ckpt.pt, which is the newest checkpoint, ckpt_previous.pt, the one before, and ckpt_best.pt, which has the
lowest validation loss. Each is complete: a run can resume from it. The loop of train.py defines its contents.
"""

import atexit
import contextlib
import errno
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from mhf.data import check_table, check_tokenizer, lock_folder, replace_durably
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
    the old checkpoint: ckpt.pt or, between the last two renames, ckpt_previous.pt. Raises InputError.
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
            replace_durably(temporary, newest)  # its os.replace makes the new checkpoint the one that a resume reads
    except (OSError, RuntimeError) as e:
        for path in (temporary, copy):
            path.unlink(missing_ok=True)
        reason = e.__context__ or e  # torch.save hides a full disk behind a RuntimeError
        raise InputError(f'{folder}: the checkpoint of step {state["step"]} could not be written ({reason})') from None
    tqdm.write(f'checkpoint of step {state["step"]}, written in {time.perf_counter() - start:.2f} s')


# -----------------------------------------------------------------------------
# find and read


def find_checkpoints(out_dir):
    """Returns the paths of the checkpoints in out_dir; a run resumes from the first. The last may be the best one."""
    paths = [Path(out_dir) / name for name in ('ckpt.pt', 'ckpt_previous.pt', 'ckpt_best.pt')]
    return [path for path in paths if path.exists()]


def read_file(path, mmap=True):
    """
    Reads a checkpoint of train.py. Returns (MHFConfig, the checkpoint's dict); its tensors are on the CPU, mapped to
    the file. Raises InputError.
    """
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
        return MHFConfig(**ckpt['model_config']), ckpt
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; check the path, or train a model with train.py') from None
    except Exception as e:  # zipfile, pickle and torch raise many types
        # in a truncated file torch seeks before its start (EINVAL)
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise InputError(f'{path} cannot be read ({e})') from None
        if mmap and 'unable to mmap' in str(e):  # a file system without it
            return read_file(path, mmap=False)
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        others = [other.name for other in find_checkpoints(path.parent) if other.name != path.name]
        fix = f'; the folder also has {", ".join(others)}: move {path.name} away to use them' if others else ''
        raise InputError(f'{path} is damaged, or not a checkpoint of this version of train.py {reason}{fix}') from None


def read_checkpoint(path):
    """Reads a checkpoint of train.py. Returns (model, the checkpoint's dict); only the dict is mapped to the file."""
    config, ckpt = read_file(path)
    return MHF.from_state_dict(config, ckpt['model']), ckpt


# -----------------------------------------------------------------------------
# the start of a run

# what a resumed run may not change: every field of MHFConfig (model.py), these settings, and what the tokenizer and the
# bins contain, so also data_format. Every other setting may change
FIXED = {
    *MHFConfig.__annotations__,
    *('counts_from', 'init_from', 'seed', 'batch_size', 'unfrozen_end_layers'),
    *('tokenizer_sha256', 'train_sha256', 'val_sha256'),
}


@dataclass
class Start:
    """Where a run starts. The defaults are a new run with a new model."""

    source: str = ''  # a description of the model's origin
    model: MHF | None = None
    tok: object = None  # the tokenizer of the model that init_from names
    step: int = 0
    best_val_loss: float = math.inf
    optimizer: dict = field(default_factory=dict)  # {name of a trained parameter: the optimizer's state}
    settings: dict = field(default_factory=dict)  # of a resumed run, as they were given
    data: dict = field(default_factory=dict)  # fingerprints of the tokenizer and the data of a resumed run

    @property
    def architecture(self):
        """The settings that the model decides, {} without a model."""
        fields = asdict(self.model.config) if self.model else {}
        return {name: value for name, value in fields.items() if name not in ('block_size', 'loss')}

    def check(self, values):
        """
        Raises InputError if a resumed run has other `values`, settings or fingerprints, than it had before.
        """
        if not self.settings:
            return
        recorded = asdict(self.model.config) | self.settings | self.data
        changes = describe_changes(recorded, {name: values[name] for name in values.keys() & FIXED})
        if changes:
            fix = 'undo the change, or choose another --out_dir for a new run'
            raise InputError(f'{self.source} is the checkpoint of a run with other settings: {changes}; {fix}')

    def check_data(self, folder, meta, data):
        """Raises InputError unless the model can be trained on a folder. `data` contains its fingerprints."""
        self.check(data)
        if self.tok:
            check_tokenizer(folder, meta, self.tok)
            table = self.model.signatures[: meta['vocab_size']].numpy()
            check_table(folder, meta, table if self.model.config.num_hashes else None)

    def restore_optimizer(self, optimizer, model):
        """Copies the optimizer's state of a resumed run. Raises InputError if other parameters were trained."""
        if not self.settings:
            return
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        others = ', '.join(sorted(trained.keys() ^ self.optimizer.keys()))
        if others:
            fix = f'undo the change of the code, or use its weights: --init_from={self.source}, with another --out_dir'
            raise InputError(f'{self.source}: its trained parameters are not those of the model ({others:.200}); {fix}')
        for name, p in trained.items():
            # copied, because the checkpoint is mapped to a file that the run will replace
            state = tree_map_only(torch.Tensor, lambda x, p=p: x.to(p.device, copy=True), self.optimizer[name])
            optimizer.state[p] = state
        self.optimizer = {}

    def describe(self, config):
        """Returns a line that says where the run starts, and which settings differ."""
        if self.settings:
            changes = describe_changes(self.settings, config)
            return f'resumed at step {self.step}' + (f'; changed settings: {changes}' if changes else '')
        if self.model:
            changes = describe_changes(config, self.architecture, 'the setting is')
            return f'model: {self.source}' + (f', with another architecture: {changes}' if changes else '')
        return f'model: new, seed={config["seed"]}'


def describe_changes(old, new, word='was'):
    """Describes the names in both dicts whose values differ: 'seed=7 (was 42), loss=exact (was product)'."""
    names = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    return ', '.join(f'{name}={new[name]!s:.64} ({word} {old[name]!s:.64})' for name in names)


def open_start(out_dir, init_from, tokenizer):
    """
    Returns the Start of a run: that of the newest checkpoint if out_dir has one; else the model that init_from names,
    whose tokenizer must be `tokenizer`; else, with 'scratch', an empty one. Raises InputError.
    """
    paths = find_checkpoints(out_dir)
    if not paths and init_from == 'scratch':
        return Start()
    if not paths:
        loaded = load(init_from, tokenizer)
        return Start(loaded.name, loaded.model, loaded.tok)
    model, ckpt = read_checkpoint(paths[0])
    if 'settings' not in ckpt:
        fix = f'use its weights: --init_from={paths[0]}, with another --out_dir'
        raise InputError(f'{paths[0]} was written by an earlier version of train.py and cannot be resumed; {fix}')
    # after a return to an earlier checkpoint, ckpt_best.pt may be better than all that follow
    _, best = read_file(paths[-1])
    best_val_loss = min(ckpt['best_val_loss'], best['best_val_loss'])
    names = ('step', 'optimizer', 'settings', 'data')
    return Start(str(paths[0]), model, best_val_loss=best_val_loss, **{name: ckpt[name] for name in names})


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
        # a checkpoint of commit 76650e7 has no settings, and another kind of fingerprint
        sha256 = ckpt['data']['tokenizer_sha256'] if 'settings' in ckpt else None
        facts = dict(tokenizer=ckpt['data']['tokenizer'], tokenizer_sha256=sha256, add_bos=ckpt['add_bos'], eos_ids=[])
    else:
        folder = resolve_path(source)
        if not (folder / 'config.json').exists():
            raise InputError(f'{source} has no checkpoint (ckpt.pt) and no config.json of a released model')
        model = from_pretrained(folder)
        name = str(source)
        facts = read_facts(folder)
    own_tokenizer = facts.pop('tokenizer')
    tok = get_tokenizer(tokenizer or own_tokenizer or 'mistral')
    mismatch = find_mismatch(model, tok, facts.pop('tokenizer_sha256'))
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
    None if its files have none.
    """
    V = len(tok.tokens)
    if V > len(model.token_mask) or not has_padding_from(model, V):
        return f'{V} tokens, expected {model.config.vocab_size}'
    if sha256:
        return '' if tokenizer_fingerprint(tok) == sha256 else 'it gives other ids'
    if model.config.num_hashes and not has_signatures_of(model, tok.tokens):
        return 'its table is not that of these tokens'
    return ''


def mask_ids(model, ids):
    """Sets the probability of `ids` to 0."""
    token_mask = model.token_mask.cpu().numpy().copy()
    token_mask[ids] = False
    model.set_vocabulary(model.signatures.cpu().numpy(), token_mask)
