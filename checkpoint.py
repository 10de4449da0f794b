"""
Models on disk: the checkpoints of a run, and the released format of the paper's authors.

    model, ckpt = load_checkpoint('out/mhf_tiny/ckpt.pt')       # a run's
    model = from_pretrained('user/name@revision')               # a released one: a folder, or from the hub
    save_pretrained(model, 'folder', 'mistral')                 # from_pretrained reads back the same bits
    opened = open_model()                                       # the newest under this folder, with its tokenizer

    $ python -m checkpoint out/mhf_tiny FOLDER                  # a run's newest checkpoint, in the released format

train.py writes and resumes by Checkpoints. What a resumed run may not change is train.py's FIXED_ON_RESUME.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from bins import replace_durably, tokenizer_facts
from configurator import InputError
from hashing import JSON_FILES, from_hub, get_tokenizer, signature_table
from loss import no_compiler, no_triton
from model import MHF, MHFConfig, check_table, without_weights


def pick_device(device=None):
    """
    The device to compute on: what was asked for, else cuda where it is there, else cpu. Apple's mps, where this was
    never run, only if it is asked for. Raises InputError for what is not there.
    """
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'  # torchrun sets it: a GPU for each process
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as e:
        reason = str(e).splitlines()[0][:100]
        there = f'this machine has {torch.cuda.device_count()} GPUs; leave device out, or start a process for each GPU'
        raise InputError(f'device={device} is not there ({reason}): {there}') from None
    return device


def products_per_second(dtype, size):
    """FLOP/s of a (size, size) product on the CPU, the better of two."""
    x = torch.ones(size, size, dtype=dtype)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def pick_dtype(dtype, device):
    """
    (dtype of the matrix products, '' or why): what was asked for, else bfloat16 where a GPU has it, and on a CPU where
    a product in it is measured to be 1.2 times as fast as in float32. Raises InputError for what is not there.
    """
    if dtype not in (None, 'bfloat16', 'float32'):
        raise InputError(f'dtype={dtype}: must be bfloat16 or float32 (float16 would need loss scaling)')
    device_type = torch.device(device).type
    if device_type == 'cuda':
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == 'bfloat16' and not has_it:
            name = torch.cuda.get_device_name(device)
            raise InputError(f'dtype=bfloat16: {name} does not have it; use --dtype=float32')
        return dtype or ('bfloat16' if has_it else 'float32'), ''
    if dtype or device_type != 'cpu':
        return dtype or 'float32', ''
    names = ('bfloat16', 'float32')
    for size in (256, 1024):
        rates = {name: products_per_second(getattr(torch, name), size) for name in names}
        # a CPU without instructions for bfloat16 would take seconds for a large product
        if rates['bfloat16'] < rates['float32'] / 2:
            break
    dtype = 'bfloat16' if rates['bfloat16'] > 1.2 * rates['float32'] else 'float32'
    measured = ', '.join(f'{rate / 1e9:,.0f} GFLOP/s in {name}' for name, rate in rates.items())
    return dtype, f'products run at {measured}'


def pick_compile(compile, device):
    """
    (whether to use torch.compile: what was asked for, else on a GPU where Triton and a C compiler are; '' or why it
    can't be used). Raises InputError.
    """
    if compile not in (None, True, False):
        raise InputError(f'compile={compile}: must be True or False')
    cuda = torch.device(device).type == 'cuda'
    missing = no_triton() if cuda else no_compiler('CXX', 'g++', 'clang++')
    if compile and missing:
        raise InputError(f'compile=True: {missing}; or leave --compile out')
    return cuda and not missing if compile is None else compile, missing


# -----------------------------------------------------------------------------
# the checkpoints of a run

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


def load_checkpoint(path):
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
        model = without_weights(config)
        # copies, because the mapped file may be replaced while a training run goes on
        model.load_state_dict({k: v.clone() for k, v in ckpt['model'].items()}, assign=True)
    except FileNotFoundError:
        raise InputError(f'no checkpoint at {path}; train.py writes one there') from None
    except Exception as e:  # torch.load's errors are many: zip, pickle, missing keys
        reason = f'({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        raise InputError(f'{path} is no checkpoint of train.py, or is damaged {reason}') from None
    return model, ckpt


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

    def newest_whole(self):
        """(model, the checkpoint's dict): the newest whose digest fits; warns of damaged ones. Raises InputError."""
        paths = self.there() or [self.newest]
        for path in paths:
            try:
                model, ckpt = load_checkpoint(path)
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


# -----------------------------------------------------------------------------
# the released format: config.json and safetensors

# config.json's fields -> MHFConfig's; the first six are required
RELEASED_FIELDS = dict(
    vocab_size='vocab_size', hidden_size='hidden_size', intermediate_size='intermediate_size',
    num_hidden_layers='num_layers', num_attention_heads='num_heads', num_key_value_heads='num_kv_heads',
    head_dim='head_dim', rms_norm_eps='norm_eps', rope_theta='rope_theta', max_position_embeddings='block_size',
    pad_token_id='pad_id', trained_loss='loss',
    num_hashes='num_hashes', num_buckets='num_buckets', num_lsh='num_lsh', bottle_neck_dim='bottleneck',
)  # fmt: skip
OF_HASHES = ('num_hashes', 'num_buckets', 'num_lsh', 'bottle_neck_dim')
# names of tensors -> ours, by prefix; the rest of each name is the same
RELEASED_NAMES = {
    'model.embed_tokens.': 'embed.',
    'model.hash_map': 'signatures',
    'model.combiner.scorer.': 'encoder.gate.',
    'model.combiner.output_proj.0.': 'encoder.out.',
    'model.layers.': 'layers.',
    'model.norm.': 'norm.',
    'hash_head.cascade_mixer.': 'mixers.',
}


def save_pretrained(model, folder, tokenizer):
    """
    Writes the authors' released format into a new folder: config.json, with the name of the tokenizer, and
    model.safetensors; a tokenizer that is a file goes beside them as tokenizer.model or tokenizer.json. from_pretrained
    reads back the same bits. Raises InputError.
    """
    from safetensors.torch import save_file

    c, folder, weights = model.config, Path(folder), {}
    if c.ablation:
        raise InputError(f'the released format knows no ablation={c.ablation}')
    for name, tensor in model.state_dict().items():
        prefix = next((p for p, ours in RELEASED_NAMES.items() if name.startswith(ours)), None)
        if prefix is None and name != 'is_token':
            raise InputError(f'{name} has no name in the released format; see RELEASED_NAMES')
        if prefix and (name != 'signatures' or c.num_hashes):
            weights[prefix + name[len(RELEASED_NAMES[prefix]) :]] = tensor.contiguous()
    fields = dict(
        model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_act='silu', attention_bias=False,
        tie_word_embeddings=True, torch_dtype='float32', tokenizer=tokenizer,
    )  # fmt: skip
    of_this_kind = {k: v for k, v in RELEASED_FIELDS.items() if c.num_hashes or k not in OF_HASHES}
    fields |= {theirs: getattr(c, ours) for theirs, ours in of_this_kind.items()}
    if folder.exists():
        raise InputError(f'{folder} is there already; choose another folder')
    temporary = folder.with_name(f'{folder.name}.tmp')
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / 'model.safetensors', metadata=dict(format='pt'))
        if (kind := Path(tokenizer).suffix) in ('.model', '.json'):
            fields['tokenizer'] = f'tokenizer{kind}'
            shutil.copyfile(tokenizer, temporary / fields['tokenizer'])
        for path in map(Path(tokenizer).with_name, JSON_FILES[1:] if kind == '.json' else ()):
            if path.exists():
                shutil.copyfile(path, temporary / path.name)
        (temporary / 'config.json').write_text(json.dumps(fields, indent=1) + '\n')
        # safetensors writes for the owner alone
        os.chmod(temporary / 'model.safetensors', (temporary / 'config.json').stat().st_mode)
        os.rename(temporary, folder)
    except BaseException as e:  # a full disk, or Ctrl-C
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, OSError):
            raise InputError(f'{folder} cannot be written ({e})') from None
        raise


def from_pretrained(path_or_hub_id, revision=None):
    """
    The authors' released format (config.json and safetensors, one file or sharded), from a folder or from the Hugging
    Face hub (a revision may also follow the id, after @); a plain Qwen3 model with tied embeddings becomes a Standard
    model. float32. Raises InputError.
    """
    from safetensors.torch import load_file

    folder = fetched(path_or_hub_id, revision)
    try:
        released = json.loads((folder / 'config.json').read_text())
    except (OSError, ValueError) as e:
        raise InputError(f'{path_or_hub_id}: no readable config.json ({e})') from None
    files, weights = sorted(folder.glob('model*.safetensors')), {}
    if not files:
        raise InputError(f'{path_or_hub_id}: no model.safetensors')
    for file in files:
        try:
            weights.update(load_file(file))
        except Exception as e:  # truncated, or not safetensors
            raise InputError(f'{file} cannot be read: {" ".join(str(e).split())[:200]}') from None
    return _from_released(released, weights, str(path_or_hub_id))


def fetched(path_or_hub_id, revision=None):
    """The folder of a released model, from the hub unless it is one here."""
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    if folder.parent != Path() and folder.parent.is_dir():
        raise InputError(f'{path_or_hub_id}: no such folder in {folder.parent}')
    files = ['config.json', 'tokenizer.model', *JSON_FILES, 'model*.safetensors']
    return from_hub(str(path_or_hub_id), files, revision)


def _from_released(released, weights, source):
    rope = released.get('rope_parameters') or {}
    for key, value, ours in (
        ('lsh_only_embed', released.get('lsh_only_embed'), False),
        ('attention_bias', released.get('attention_bias'), False),
        ('use_sliding_window', released.get('use_sliding_window'), False),
        ('hidden_act', released.get('hidden_act'), 'silu'),
        ('rope_type', rope.get('rope_type'), 'default'),
    ):
        if value not in (None, ours):
            raise InputError(f'{source}: {key}={value} in config.json, this code has only {ours}')
    if missing := [key for key in list(RELEASED_FIELDS)[:6] if released.get(key) is None]:
        raise InputError(f"{source}: config.json has no '{missing[0]}'")
    head, E = weights.pop('lm_head.weight', None), weights.get('model.embed_tokens.weight')
    if E is None:
        raise InputError(f'{source}: the weights have no model.embed_tokens.weight')
    if head is not None and not torch.equal(head, E):
        raise InputError(f'{source}: lm_head.weight differs from the embedding; only tied models are supported')

    # what a config.json may leave out, or say elsewhere; product is what the authors train with
    fields = dict(num_hashes=0, loss='product', head_dim=released['hidden_size'] // released['num_attention_heads'])
    eos = released.get('eos_token_id')
    if eos is not None:
        fields['pad_id'] = eos[0] if isinstance(eos, list) else eos
    if rope.get('rope_theta') is not None:
        fields['rope_theta'] = rope['rope_theta']
    fields |= {ours: released[key] for key, ours in RELEASED_FIELDS.items() if released.get(key) is not None}
    if 'model.hash_map' in weights:
        fields['vocab_size'] = len(weights['model.hash_map'])
    config, state = MHFConfig(**fields), {}

    for name, tensor in weights.items():
        prefix = next((p for p in RELEASED_NAMES if name.startswith(p)), None)
        if prefix is None:
            raise InputError(f'{source}: unknown tensor {name}')
        state[RELEASED_NAMES[prefix] + name[len(prefix) :]] = tensor.float() if tensor.is_floating_point() else tensor
    if config.num_hashes and 'signatures' not in state:
        raise InputError(f'{source}: num_hashes={config.num_hashes} but no model.hash_map')
    table = state['signatures'].numpy() if config.num_hashes else None
    state['signatures'], state['is_token'] = map(torch.tensor, check_table(config, table))
    model = without_weights(config)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as e:
        raise InputError(f'{source}: weights and config.json disagree: {" ".join(str(e).split())[:300]}') from None
    return model


class Opened(NamedTuple):
    model: MHF
    tok: object  # of hashing.get_tokenizer
    name: str  # what it is, for people
    source: str  # where it came from: a folder, or a hub id with its revision


def load_model(source):
    """
    A run's out_dir, or the released format from a folder or the hub -> (model, its tokenizer's name or None, the
    SHA-256 of that tokenizer or None). Raises InputError.
    """
    if (Path(source) / 'ckpt.pt').exists():
        model, ckpt = load_checkpoint(Path(source) / 'ckpt.pt')
        return model, ckpt['data']['tokenizer'], ckpt['data']['tokenizer_sha256']
    folder = fetched(source)
    model = from_pretrained(folder)
    # ours have one of them; the authors' tokenizer.json has the tokens that a tokenizer.model beside it may lack
    for beside in ('tokenizer.json', 'tokenizer.model'):
        if (folder / beside).exists():
            return model, str(folder / beside), None
    named = json.loads((folder / 'config.json').read_text()).get('tokenizer')
    return model, named if isinstance(named, str) and not named.endswith(('.model', '.json')) else None, None


def only_tokens(model, V, gaps):
    """
    Ids that are no tokens of a tokenizer of V ids get no probability: its gaps, and those from V on. False if they are
    tokens of the model, whose tokenizer is another: they have signatures, or are too many rows of a Standard model.
    """
    beyond, own = len(model.is_token) - V, model.signatures[V:]
    if beyond < 0:
        return False
    model.is_token[V:] = False
    model.is_token[gaps] = False
    if model.config.num_hashes == 0:
        # what rounds it up: the authors to a multiple of 128; Qwen3's 151,669 tokens have 151,936 rows
        return beyond < max(128, V // 100)
    # nothing is read of a model that is elsewhere
    return own.is_meta or not own.any()


def open_model(out_dir='', released='', tokenizer=''):
    """
    From a checkpoint of train.py, the newest under the working folder if no out_dir is given, or from a released
    model. The tokenizer must be the one whose table is in the model. Raises InputError.
    """
    if not (out_dir or released):
        found = [p for depth in ('', '*/', '*/*/') for p in Path().glob(f'{depth}ckpt.pt')]
        if not found:
            raise InputError('no ckpt.pt under this folder; train one with: python train.py config/mhf_tiny.py')
        out_dir = max(found, key=lambda p: p.stat().st_mtime).parent
    if released:
        source = released
        model, its_tokenizer, sha256 = load_model(source)
        name = f'{source}, a released model'
    else:
        source = str(out_dir)
        model, ckpt = load_checkpoint(Path(out_dir) / 'ckpt.pt')
        name = f'{Path(out_dir) / "ckpt.pt"}, step {ckpt["step"]}'
        its_tokenizer, sha256 = ckpt['data']['tokenizer'], ckpt['data']['tokenizer_sha256']
    # on a GPU it would plan anew, for tens of milliseconds, for every length of prompts and of requests to score
    torch.backends.cuda.enable_cudnn_sdp(False)
    tok, c = get_tokenizer(tokenizer or its_tokenizer or 'mistral'), model.config
    facts = tokenizer_facts(tok)
    if sha256 and facts['tokenizer_sha256'] != sha256:
        raise InputError(f"tokenizer '{tok.name}' has another vocabulary than the '{its_tokenizer}' of the model")
    if not only_tokens(model, facts['vocab_size'], facts['gaps']):
        sizes = f'has {len(tok.tokens)} tokens, the model {c.vocab_size}'
        raise InputError(f"tokenizer '{tok.name}' {sizes}: not its own, which --tokenizer names")
    j = c.num_lsh  # the first coordinate that is a plain hash; the last one may have been rehashed
    if released and j < c.num_hashes - 1:
        ours = signature_table(tok.tokens, c.num_hashes, c.num_buckets, 0, c.pad_id)[:, j]
        if (model.signatures[: len(ours), j].numpy() != ours).any():
            other = f"another signature table than tokenizer '{tok.name}' gives"
            raise InputError(f'{released} has {other}; name its own with --tokenizer')
    return Opened(model, tok, name, source)


def export(out_dir, folder):
    """The newest whole checkpoint of a run, in the released format, into a new folder. Raises InputError."""
    checkpoints = Checkpoints(out_dir, keep=0, writes=False)
    model, ckpt = checkpoints.newest_whole()
    save_pretrained(model, folder, ckpt['config']['tokenizer'])
    print(f'{checkpoints.last_path}, step {ckpt["step"]} -> {folder}')


if __name__ == '__main__':
    if len(sys.argv) != 3 or sys.argv[1].startswith('-'):
        raise InputError('usage: python -m checkpoint OUT_DIR FOLDER')
    export(*sys.argv[1:])
