"""
Reads the released format of the paper's authors, which mhf/export.py writes.

    model = from_pretrained('user/name@revision')    # a folder, or from the hub
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from hashing import hash_buckets, lsh_coordinates
from mhf.checkpoint import LoadedModel
from mhf.errors import InputError
from mhf.tokenizers import JSON_FILES, download_from_hub, get_tokenizer, tokenizer_fingerprint
from model import MHF, MHFConfig

# fields of MHFConfig -> their keys in config.json, where these have another name
KEYS = dict(
    num_layers='num_hidden_layers', num_heads='num_attention_heads', num_kv_heads='num_key_value_heads',
    norm_eps='rms_norm_eps', block_size='max_position_embeddings', pad_id='pad_token_id', loss='trained_loss',
    bottleneck='bottle_neck_dim',
)  # fmt: skip
DEFAULTS = asdict(MHFConfig())
FIELDS = {KEYS.get(name, name): name for name in DEFAULTS}
# other keys that change the computation -> the values that model.py implements
SUPPORTED = dict(
    model_type=('qwen3', 'mhf'), hidden_act=('silu',), layer_types=('full_attention',), rope_type=('default',),
    type=('default',), partial_rotary_factor=(1,), attention_bias=(False,), use_sliding_window=(False,),
    lsh_only_embed=(False,),
)  # fmt: skip
# prefixes of tensor names -> ours; the rest of each name is the same
RELEASED_NAMES = {
    'model.embed_tokens.': 'embed.',
    'model.combiner.scorer.': 'encoder.gate.',
    'model.combiner.output_proj.0.': 'encoder.out.',
    'model.layers.': 'layers.',
    'model.norm.': 'norm.',
    'hash_head.cascade_mixer.': 'hash_decoder.',
}


def rename(name, prefixes):
    """Replaces the prefix of a tensor's name, by {prefix: its replacement}."""
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


# -----------------------------------------------------------------------------
# the model


def open_released(source, tokenizer=None):
    """
    Loads a released model and its tokenizer from a folder or from the hub -> LoadedModel. Raises InputError.

    Args: tokenizer, a name for get_tokenizer; default: the one that the files name, else mistral
    """
    folder = resolve_path(source)
    if not (folder / 'config.json').exists():
        raise InputError(f'{source} has no checkpoint (ckpt.pt) and no config.json of a released model')
    model = from_pretrained(folder)
    config_json = json.loads((folder / 'config.json').read_bytes())
    own_tokenizer, sha256 = find_tokenizer(folder, config_json)
    tok = get_tokenizer(tokenizer or own_tokenizer or 'mistral')
    mismatch = find_mismatch(model, tok, sha256)
    if mismatch:
        its_own = f", '{own_tokenizer}'" if own_tokenizer else ''
        fix = "name the model's tokenizer"
        raise InputError(f"{source}: tokenizer '{tok.name}' is not the model's{its_own} ({mismatch}); {fix}")
    without_token = [i for i, token in enumerate(tok.tokens) if token is None]
    model.set_vocabulary(model.table, [*without_token, *range(len(tok.tokens), model.config.vocab_size)])
    eos_ids = parse_eos_ids(config_json)
    if (folder / 'generation_config.json').exists():
        eos_ids = eos_ids + parse_eos_ids(json.loads((folder / 'generation_config.json').read_bytes()))
    # the authors trained without bos
    return LoadedModel(model, tok, str(source), str(source), config_json.get('add_bos') is True, eos_ids)


def find_mismatch(model, tok, sha256):
    """
    Returns how a tokenizer differs from that of a model, or ''. `sha256` is the fingerprint of the model's tokenizer,
    None if its files have none.
    """
    V = len(tok.tokens)
    if V > model.config.vocab_size or not has_padding_from(model, V):
        return f'{V} tokens, expected {model.config.vocab_size}'
    if sha256:
        return '' if tokenizer_fingerprint(tok) == sha256 else 'it gives other ids'
    if model.config.num_hashes and not has_signatures_of(model, tok.tokens):
        return 'its table is not that of these tokens'
    return ''


def from_pretrained(path_or_hub_id):
    """
    Loads a model in the released format (config.json and safetensors, one file or several) from a folder, or from the
    Hugging Face hub by its id user/name[@revision]. A Qwen3 model with tied embeddings becomes a Standard model.
    Weights are float32. Raises InputError, or torch's RuntimeError if config.json and the tensors differ.
    """
    folder = resolve_path(path_or_hub_id)
    config_json = json.loads((folder / 'config.json').read_bytes())
    weights = read_weights(folder)
    table = weights.pop('model.hash_map', None)
    config = convert_config(config_json, table)
    model = MHF(config, table, config_json.get('unused_ids') or ())
    model.load_state_dict(convert_state_dict(config, weights, config_json))
    return model.eval()


def read_weights(folder):
    """
    Returns {name: tensor} of model.safetensors, or without it, of the files that model.safetensors.index.json names.
    Other files, such as leftover shards or averaged weights, are not part of the model.
    """
    index = folder / 'model.safetensors.index.json'
    single = folder / 'model.safetensors'
    if single.exists() or not index.exists():
        return load_file(single)
    file_of = json.loads(index.read_bytes()).get('weight_map', {})
    weights = {}
    for file in set(file_of.values()):
        weights |= {name: tensor for name, tensor in load_file(folder / file).items() if file_of.get(name) == file}
    return weights


def resolve_path(path_or_hub_id):
    """Returns the folder of a released model, after a download if it is a hub id. Raises InputError."""
    if Path(path_or_hub_id).is_dir():
        return Path(path_or_hub_id)
    weights = ['model.safetensors', 'model.safetensors.index.json', 'model-*.safetensors']
    files = ['config.json', 'generation_config.json', '*tokenizer.model', *JSON_FILES, *weights]
    return download_from_hub(str(path_or_hub_id), files)


def read_fields(config_json):
    """
    Returns the fields of MHFConfig that a config.json sets; null is as good as absent. Raises InputError for a value
    that is not supported. Keys that are neither fields nor in SUPPORTED are ignored.
    """
    declared = dict(config_json)
    for name in ('rope_scaling', 'rope_parameters'):  # transformers 5 moves rope_theta to the second
        declared |= declared.pop(name, None) or {}
    fields = {}
    for key, value in declared.items():
        if value is None:
            continue
        parts = value if isinstance(value, list) else [value]
        if key in FIELDS:
            fields[FIELDS[key]] = value
        elif key in SUPPORTED and not all(part in SUPPORTED[key] for part in parts):
            raise InputError(f'{key}={json.dumps(value)} in config.json is not supported')
    return fields


def convert_config(config_json, table):
    """Returns the MHFConfig for a config.json and a signature table (V, H), None for Standard. Raises InputError."""
    # load_state_dict detects sizes that are missing
    fields = DEFAULTS | dict(num_hashes=0, loss='product', rope_theta=None, pad_id=None) | read_fields(config_json)
    if fields['rope_theta'] is None:
        raise InputError('config.json has no rope_theta')
    if table is not None:
        fields['vocab_size'] = len(table)
        fields['single_id'] |= table.shape[1] > 1 and bool((table == table[:, :1]).all())

    def can_be_pad(i):
        return 0 <= i < fields['vocab_size'] and (table is None or not table[i].any())

    pad = fields['pad_id']
    if pad is None or pad == -1 and table is None:  # a tokenizer without pad uses eos
        pad = next(filter(can_be_pad, parse_eos_ids(config_json)), DEFAULTS['pad_id'])
    if not can_be_pad(pad):
        raise InputError(f'pad_token_id={pad} in config.json: must be an id of the vocabulary without a signature')
    return MHFConfig(**fields | dict(pad_id=pad))


def parse_eos_ids(config_json):
    """Returns the list of ids in eos_token_id, which is an id, a list of ids or missing."""
    declared = config_json.get('eos_token_id')
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]


def convert_state_dict(config, weights, config_json):
    """Returns our state_dict for released weights. Raises InputError for another head than the embedding."""
    head = weights.pop('lm_head.weight', None)
    if head is not None and not torch.equal(head, weights.setdefault('model.embed_tokens.weight', head)):
        raise InputError('lm_head.weight differs from the embedding; only tied models are supported')
    # the head of a MultiHashFormer is always the embedding
    if head is None and not config.num_hashes and not config_json.get('tie_word_embeddings'):
        raise InputError('tie_word_embeddings is not true, and lm_head.weight is missing')
    return {rename(name, RELEASED_NAMES): tensor.float() for name, tensor in weights.items()}


# -----------------------------------------------------------------------------
# the tokenizer of a released model


def find_tokenizer(folder, config_json):
    """
    Returns the name and the fingerprint of the tokenizer of a released folder, None where unknown: those of an export
    if the files of the tokenizer are unchanged or absent, else the name of the folder's own file, to which transformers
    may have added tokens, and for frequency ranges the fingerprint of the export.
    """
    own = {name: str(folder / name) for name in ('tokenizer.json', 'tokenizer.model') if (folder / name).exists()}
    exported_sha256 = config_json.get('tokenizer_files_sha256')
    if exported_sha256 and (not own or exported_sha256 == hash_tokenizer_files(folder)):
        name = config_json['tokenizer']
        if name.endswith(('.model', '.json')):
            name = str(folder / name) if (folder / name).exists() else None
        return name, config_json.get('tokenizer_sha256')
    # whether a tokenizer is the model's follows from the table, or with frequency ranges from the fingerprint only
    sha256 = config_json.get('tokenizer_sha256') if config_json.get('frequency_ranges') else None
    return next(iter(own.values()), None), sha256


def hash_tokenizer_files(folder):
    """Returns a SHA-256 of the files of a tokenizer, which takes less time than to load them."""
    paths = [folder / name for name in ('tokenizer.model', *JSON_FILES)]
    return hashlib.sha256(b''.join(path.read_bytes() for path in paths if path.exists())).hexdigest()


def has_padding_from(model, V):
    """
    Returns whether the rows of a model from V on are padding. MultiHashFormer: they have no signature. Standard: they
    are zero, or fewer than 128 that fill up a multiple of 128 (the authors' models), or those of Qwen3.
    """
    if model.config.num_hashes:
        return not model.signatures[V:].any()
    rows = model.config.vocab_size
    is_rounded_up = rows % 128 == 0 and rows - V < 128
    return is_rounded_up or (V, rows) == (151669, 151936) or not model.embed.weight[V:].any()


def has_signatures_of(model, tokens):
    """
    Returns whether the signature table of a released MultiHashFormer is that of these token strings. One hash tells it:
    the first that is not LSH. With frequency ranges it cannot be told, because the table also depends on counts.
    """
    c = model.config
    if c.frequency_ranges:
        return False
    ids = [i for i, token in enumerate(tokens) if token is not None and i != c.pad_id]
    j = min(c.num_lsh, c.num_hashes - 1)
    if j < c.num_lsh:
        ids = ids[-256:]  # an LSH hash of all tokens takes minutes
        hashes = lsh_coordinates([tokens[i] for i in ids], c.num_lsh, c.num_buckets)[:, j]
    else:
        hashes = hash_buckets([tokens[i] for i in ids], j, c.num_buckets)
    # rounding may change an argmax of LSH, and the authors' code may rehash other tokens than ours: up to half of them
    # with H = 1 and B = V
    tolerance = 2 / 3 if j == c.num_hashes - 1 and not c.single_id else 0
    return (model.signatures[ids, j].numpy() != hashes).mean() <= tolerance
