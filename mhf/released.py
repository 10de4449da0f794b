"""
Models from disk: the released format of the paper's authors, in both directions, and open_model, with which sample.py
and eval.py open a model.

    model = from_pretrained('user/name@revision')               # a folder, or from the hub
    save_pretrained(model, 'folder', 'mistral')                 # from_pretrained reads back the same bits
    opened = open_model()                                       # the newest run under this folder, with its tokenizer

    $ python -m mhf.released out/mhf_tiny FOLDER                # a run's newest checkpoint, in the released format
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from configurator import InputError
from hashing import signature_table
from mhf.checkpoint import Checkpoints, build_on_meta, load_checkpoint, set_weights
from mhf.fused import FusedMHF
from mhf.tokenizers import JSON_FILES, from_hub, get_tokenizer, tokenizer_facts
from model import MHF, MHFConfig, validate_table

# config.json's fields -> MHFConfig's; the first six are required
RELEASED_FIELDS = dict(
    vocab_size='vocab_size', hidden_size='hidden_size', intermediate_size='intermediate_size',
    num_hidden_layers='num_layers', num_attention_heads='num_heads', num_key_value_heads='num_kv_heads',
    head_dim='head_dim', rms_norm_eps='norm_eps', rope_theta='rope_theta', max_position_embeddings='block_size',
    pad_token_id='pad_id', trained_loss='loss',
    num_hashes='num_hashes', num_buckets='num_buckets', num_lsh='num_lsh', bottle_neck_dim='bottleneck',
)  # fmt: skip
# those that a Standard model does not have
OF_HASHES = ('num_hashes', 'num_buckets', 'num_lsh', 'bottle_neck_dim')
# names of tensors -> ours, by prefix; the rest of each name is the same
RELEASED_NAMES = {
    'model.embed_tokens.': 'embed.',
    'model.hash_map': 'signatures',
    'model.combiner.scorer.': 'encoder.gate.',
    'model.combiner.output_proj.0.': 'encoder.out.',
    'model.layers.': 'layers.',
    'model.norm.': 'norm.',
    'hash_head.cascade_mixer.': 'hash_decoder.',
}

# -----------------------------------------------------------------------------
# writing the released format


def released_weights(model):
    """{released name: tensor} of a model. Raises InputError for a tensor that the format has no name for."""
    weights = {}
    for name, tensor in model.state_dict().items():
        # which ids are tokens follows from the table; a Standard model has no table
        if name == 'token_mask' or name == 'signatures' and not model.config.num_hashes:
            continue
        prefix = next((theirs for theirs, ours in RELEASED_NAMES.items() if name.startswith(ours)), None)
        if prefix is None:
            raise InputError(f'{name} has no name in the released format; see RELEASED_NAMES')
        weights[prefix + name[len(RELEASED_NAMES[prefix]) :]] = tensor.contiguous()
    return weights


def as_plain_qwen3(weights, scale):
    """
    Released weights of a Standard model whose rows of E enter `scale` times as large -> those of the plain Qwen3 model
    that computes the same. There the residual stream is divided by the scale: RMSNorm takes that out again, where its
    eps is divided by the square. The norms of q and k share that eps, which changes them by some 1e-5.
    """
    last_of_branches = ('.o_proj.weight', '.down_proj.weight')
    return {name: tensor / scale if name.endswith(last_of_branches) else tensor for name, tensor in weights.items()}


def copy_tokenizer(tokenizer, folder):
    """
    Copies a tokenizer that is a file into the folder of a released model, with the files beside it that say which token
    has which role -> its name there.
    """
    path = Path(tokenizer)
    if path.suffix not in ('.model', '.json'):
        return tokenizer
    name = f'tokenizer{path.suffix}'
    shutil.copyfile(path, folder / name)
    for roles in JSON_FILES[1:] if path.suffix == '.json' else ():
        if path.with_name(roles).exists():
            shutil.copyfile(path.with_name(roles), folder / roles)
    return name


def save_pretrained(model, folder, tokenizer):
    """
    Writes the authors' released format into a new folder: config.json, with the name of the tokenizer, and
    model.safetensors. A tokenizer that is a file goes beside them as tokenizer.model or tokenizer.json. from_pretrained
    reads back the same bits, but for a Standard model with an embedding_scale, see as_plain_qwen3. Raises InputError.
    """
    from safetensors.torch import save_file

    c = model.config
    if c.ablation:
        raise InputError(f'the released format knows no ablation={c.ablation}')
    weights = released_weights(model)
    fields = dict(
        model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_act='silu', attention_bias=False,
        tie_word_embeddings=True, torch_dtype='float32', tokenizer=tokenizer,
    )  # fmt: skip
    for theirs, ours in RELEASED_FIELDS.items():
        if c.num_hashes or theirs not in OF_HASHES:
            fields[theirs] = getattr(c, ours)
    if not c.num_hashes and c.embedding_scale != 1:
        weights = as_plain_qwen3(weights, c.embedding_scale)
        fields['rms_norm_eps'] = c.norm_eps / c.embedding_scale**2
    folder = Path(folder)
    if folder.exists():
        raise InputError(f'{folder} is there already; choose another folder')
    temporary = folder.with_name(f'{folder.name}.tmp')
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / 'model.safetensors', metadata=dict(format='pt'))
        fields['tokenizer'] = copy_tokenizer(tokenizer, temporary)
        (temporary / 'config.json').write_text(json.dumps(fields, indent=1) + '\n')
        # safetensors lets only the owner read its file
        os.chmod(temporary / 'model.safetensors', (temporary / 'config.json').stat().st_mode)
        os.rename(temporary, folder)
    except BaseException as e:
        # a full disk, or Ctrl-C
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, OSError):
            raise InputError(f'{folder} cannot be written ({e})') from None
        raise


# -----------------------------------------------------------------------------
# reading it


def from_pretrained(path_or_hub_id, revision=None, Model=FusedMHF):
    """
    A model in the authors' released format (config.json and safetensors, one file or several), from a folder or from
    the Hugging Face hub; a revision may also follow the id, after @. A plain Qwen3 model with tied embeddings becomes a
    Standard model. Weights are float32. Raises InputError.
    """
    from safetensors.torch import load_file

    source = str(path_or_hub_id)
    folder = fetched(path_or_hub_id, revision)
    try:
        released = json.loads((folder / 'config.json').read_text())
    except (OSError, ValueError) as e:
        raise InputError(f'{source}: no readable config.json ({e})') from None
    files = sorted(folder.glob('model*.safetensors'))
    if not files:
        raise InputError(f'{source}: no model.safetensors')
    weights = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except Exception as e:  # truncated, or not safetensors
            raise InputError(f'{file} cannot be read: {" ".join(str(e).split())[:200]}') from None
    refuse_unsupported(released, weights, source)
    config = config_of(released, weights)
    state = state_of(config, weights, source)
    model = build_on_meta(config, Model)
    try:
        set_weights(model, state)
    except RuntimeError as e:
        raise InputError(f'{source}: weights and config.json disagree: {" ".join(str(e).split())[:300]}') from None
    return model


def fetched(path_or_hub_id, revision=None):
    """The folder of a released model, fetched from the hub unless it is a folder here. Raises InputError."""
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    if folder.parent != Path() and folder.parent.is_dir():
        raise InputError(f'{path_or_hub_id}: no such folder in {folder.parent}')
    files = ['config.json', 'tokenizer.model', *JSON_FILES, 'model*.safetensors']
    return from_hub(str(path_or_hub_id), files, revision)


def refuse_unsupported(released, weights, source):
    """Raises InputError for a model that this code would compute otherwise. released: the contents of config.json."""
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
    for key in list(RELEASED_FIELDS)[:6]:
        if released.get(key) is None:
            raise InputError(f"{source}: config.json has no '{key}'")
    E = weights.get('model.embed_tokens.weight')
    if E is None:
        raise InputError(f'{source}: the weights have no model.embed_tokens.weight')
    head = weights.get('lm_head.weight')
    if head is not None and not torch.equal(head, E):
        raise InputError(f'{source}: lm_head.weight differs from the embedding; only tied models are supported')


def config_of(released, weights):
    """The MHFConfig of a released model. What config.json leaves out is as the authors have it."""
    # the authors train with the product loss
    fields = dict(num_hashes=0, loss='product', head_dim=released['hidden_size'] // released['num_attention_heads'])
    eos = released.get('eos_token_id')
    if eos is not None:
        fields['pad_id'] = eos[0] if isinstance(eos, list) else eos
    rope = released.get('rope_parameters') or {}
    if rope.get('rope_theta') is not None:
        fields['rope_theta'] = rope['rope_theta']
    for theirs, ours in RELEASED_FIELDS.items():
        if released.get(theirs) is not None:
            fields[ours] = released[theirs]
    if 'model.hash_map' in weights:
        fields['vocab_size'] = len(weights['model.hash_map'])
    return MHFConfig(**fields)


def state_of(config, weights, source):
    """The state_dict of a released model. Raises InputError for a tensor that is unknown, and for a missing table."""
    state = {}
    for name, tensor in weights.items():
        if name == 'lm_head.weight':  # the embedding once more
            continue
        prefix = next((theirs for theirs in RELEASED_NAMES if name.startswith(theirs)), None)
        if prefix is None:
            raise InputError(f'{source}: unknown tensor {name}')
        state[RELEASED_NAMES[prefix] + name[len(prefix) :]] = tensor.float() if tensor.is_floating_point() else tensor
    if config.num_hashes and 'signatures' not in state:
        raise InputError(f'{source}: num_hashes={config.num_hashes} but no model.hash_map')
    table = state['signatures'].numpy() if config.num_hashes else None
    signatures, token_mask = validate_table(config, table)
    state['signatures'] = torch.tensor(signatures)
    state['token_mask'] = torch.tensor(token_mask)
    return state


# -----------------------------------------------------------------------------
# a model to begin with, or to use


def init_model(init_from, checkpoints, Model):
    """
    What train.py begins with: (model, the checkpoint's dict), each None where there is none. init_from is 'scratch',
    'resume', or what load_model takes; checkpoints are those in the run's out_dir. Raises InputError.
    """
    if init_from == 'resume':
        return checkpoints.newest_whole(Model)
    if checkpoints.there():
        there = f'{checkpoints.folder} has a checkpoint'
        raise InputError(f'{there}; --init_from=resume goes on, or choose another --out_dir')
    if init_from == 'scratch':
        return None, None
    return load_model(init_from, Model)[0], None


def load_model(source, Model=FusedMHF):
    """
    A run's out_dir, or the released format from a folder or the hub -> (model, its tokenizer's name or None, the
    SHA-256 of that tokenizer or None). Raises InputError.
    """
    if (Path(source) / 'ckpt.pt').exists():
        model, ckpt = load_checkpoint(Path(source) / 'ckpt.pt', Model)
        return model, ckpt['data']['tokenizer'], ckpt['data']['tokenizer_sha256']
    folder = fetched(source)
    model = from_pretrained(folder, Model=Model)
    # we write one of the two; the authors' tokenizer.json has tokens that a tokenizer.model beside it may lack
    for name in ('tokenizer.json', 'tokenizer.model'):
        if (folder / name).exists():
            return model, str(folder / name), None
    name = json.loads((folder / 'config.json').read_text()).get('tokenizer')
    if isinstance(name, str) and not name.endswith(('.model', '.json')):
        return model, name, None
    return model, None, None


def limit_to_tokenizer(model, V, unused_ids):
    """
    Gives probability 0 to the ids that a tokenizer of V ids has no token for: its unused_ids, and those from V on. Returns
    whether the model can have that tokenizer. It cannot if the tokenizer has more ids, if an id from V on has a
    signature, or if a Standard model has too many rows more.
    """
    beyond = len(model.token_mask) - V
    if beyond < 0:
        return False
    token_mask = model.token_mask.cpu().numpy().copy()
    token_mask[V:] = False
    token_mask[unused_ids] = False
    model.set_vocabulary(model.signatures.cpu().numpy(), token_mask)
    if model.config.num_hashes == 0:
        # a table is rounded up: by the authors to a multiple of 128; Qwen3's 151,669 tokens have 151,936 rows
        return beyond < max(128, V // 100)
    return not model.signatures[V:].any()


def check_vocabulary(model, source, meta, table):
    """
    Raises InputError where a model that was read from `source` is not one for the bins of `meta`, whose tokens have the
    signatures `table` (V, H), None for a Standard model. Ids that are no tokens there get probability 0.
    """
    V = meta['vocab_size']
    theirs = model.signatures.numpy()
    if not limit_to_tokenizer(model, V, meta['unused_ids']):
        raise InputError(f'{source} has vocab_size={len(theirs)}, the bins {V}')
    if table is None:
        return
    ours = np.pad(table, ((0, len(theirs) - V), (0, 0)))
    differing = np.flatnonzero((theirs != ours).any(axis=1))
    if len(differing):
        i = differing[0]
        rows = f'id {i} is {theirs[i].tolist()} there, {ours[i].tolist()} here'
        raise InputError(f"{source} has another signature table than tokenizer '{meta['tokenizer']}' gives: {rows}")


class Opened(NamedTuple):
    model: MHF
    tok: object  # of tokenizers.get_tokenizer
    name: str  # what it is, for people
    source: str  # where it came from: a folder, or a hub id with its revision


def open_model(out_dir='', released='', tokenizer=''):
    """
    Opens a checkpoint of train.py, the newest under the working folder if no out_dir is given, or a released model. The
    tokenizer must be the one whose table is in the model. Raises InputError.
    """
    if not (out_dir or released):
        paths = [path for depth in ('', '*/', '*/*/') for path in Path().glob(f'{depth}ckpt.pt')]
        if not paths:
            raise InputError('no ckpt.pt under this folder; train one with: python train.py config/mhf_tiny.py')
        out_dir = max(paths, key=lambda path: path.stat().st_mtime).parent
    if released:
        source = released
        model, its_tokenizer, sha256 = load_model(source)
        name = f'{source}, a released model'
    else:
        source = str(out_dir)
        model, ckpt = load_checkpoint(Path(out_dir) / 'ckpt.pt')
        name = f'{Path(out_dir) / "ckpt.pt"}, step {ckpt["step"]}'
        its_tokenizer = ckpt['data']['tokenizer']
        sha256 = ckpt['data']['tokenizer_sha256']
    # cuDNN's attention plans anew for every length of prompts, which takes tens of milliseconds
    torch.backends.cuda.enable_cudnn_sdp(False)
    tok = get_tokenizer(tokenizer or its_tokenizer or 'mistral')
    c = model.config
    facts = tokenizer_facts(tok)
    if sha256 and facts['tokenizer_sha256'] != sha256:
        raise InputError(f"tokenizer '{tok.name}' has another vocabulary than the '{its_tokenizer}' of the model")
    if not limit_to_tokenizer(model, facts['vocab_size'], facts['unused_ids']):
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
    """Writes the newest whole checkpoint of a run into a new folder, in the released format. Raises InputError."""
    checkpoints = Checkpoints(out_dir, keep=0, writes=False)
    model, ckpt = checkpoints.newest_whole()
    save_pretrained(model, folder, ckpt['config']['tokenizer'])
    print(f'{checkpoints.last_path}, step {ckpt["step"]} -> {folder}')


if __name__ == '__main__':
    if len(sys.argv) != 3 or sys.argv[1].startswith('-'):
        raise InputError('usage: python -m mhf.released OUT_DIR FOLDER')
    export(*sys.argv[1:])
