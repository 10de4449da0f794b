"""
The released format of the paper's authors, in both directions.

    model = from_pretrained('user/name@revision')               # a folder, or from the hub
    save_pretrained(model, 'folder', 'mistral')                 # from_pretrained reads back the same bits

    $ python -m mhf.released out/mhf_tiny FOLDER                # export the newest checkpoint of a run

An export has the authors' format, except that its model_type is `mhf` if H x B equals the vocabulary size, or if a
Standard model has unused ids or an embedding_scale. The tokenizer.json of a folder is used if it differs from the
tokenizer that config.json names.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hashing import hash_buckets, lsh_coordinates
from mhf.errors import InputError, install_excepthook
from mhf.tokenizers import JSON_FILES, download_from_hub, get_tokenizer
from model import MHF, MHFConfig, validate_table

# fields of config.json -> fields of MHFConfig; the last three and trained_loss are not in the authors' files
RELEASED_FIELDS = dict(
    vocab_size='vocab_size', hidden_size='hidden_size', intermediate_size='intermediate_size',
    num_hidden_layers='num_layers', num_attention_heads='num_heads', num_key_value_heads='num_kv_heads',
    head_dim='head_dim', rms_norm_eps='norm_eps', rope_theta='rope_theta', max_position_embeddings='block_size',
    pad_token_id='pad_id', trained_loss='loss', num_hashes='num_hashes', num_buckets='num_buckets', num_lsh='num_lsh',
    bottle_neck_dim='bottleneck', single_id='single_id', embedding_scale='embedding_scale',
    encoder_init='encoder_init',
)  # fmt: skip
# patterns of other keys of config.json that change the computation (/a/b is key b of the dict a) -> supported values;
# null is always supported
SUPPORTED = {
    '^/model_type$': ('qwen3', 'mhf', 'mhf_standard'),
    '^/hidden_act$': ('silu',),
    '^/layer_types$': ('full_attention',),
    '^/rope_parameters/(rope_)?type$': ('default',),
    # one dict per type of layer
    '^/rope_parameters/.*/': (),
    'bias|bidirectional|lsh_only_embed|mrope|quant|softcap|use_sliding_window': ('False', '0'),
    'factor|multiplier|rotary|scal(ar|e|ing)': ('False', '1', '1.0'),
}
# prefixes of tensor names -> ours; the rest of each name is the same
RELEASED_NAMES = {
    'model.embed_tokens.': 'embed.',
    'model.hash_map': 'signatures',
    'model.combiner.scorer.': 'encoder.gate.',
    'model.combiner.output_proj.0.': 'encoder.out.',
    'model.layers.': 'layers.',
    'model.norm.': 'norm.',
    'hash_head.cascade_mixer.': 'hash_decoder.',
}


def rename(name, prefixes):
    """Replaces the prefix of a tensor's name, by {prefix: its replacement}. Raises InputError for another prefix."""
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    raise InputError(f'tensor {name} has no name in RELEASED_NAMES (mhf/released.py); add it there')


# -----------------------------------------------------------------------------
# write the released format


def released_config(model):
    """Returns the config.json of a model, without its tokenizer."""
    c = model.config
    fields = dict(
        model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_act='silu', attention_bias=False,
        tie_word_embeddings=True, torch_dtype='float32',
    )  # fmt: skip
    fields |= {released: getattr(c, name) for released, name in RELEASED_FIELDS.items()}
    fields['unused_ids'] = (~model.token_mask).nonzero()[:, 0].tolist()
    if c.num_hashes:
        # transformers refuses other sizes of E; with this one it would take the model for a Qwen3
        is_misread = c.num_hashes * c.num_buckets == c.vocab_size
    else:
        is_misread = fields['unused_ids'] or c.embedding_scale != 1
    if is_misread:
        fields |= dict(model_type='mhf', architectures=['MHF'])
    return fields


def save_pretrained(model, folder, tokenizer, add_bos=False, eos_ids=()):
    """
    Writes a model and its tokenizer, a name for get_tokenizer, to a new folder in the released format. transformers
    loads a Standard model as Qwen3 with AutoModelForCausalLM, unless it has unused ids or an embedding_scale, and its
    tokenizer with AutoTokenizer. Raises InputError.

    Args:
        add_bos: whether the model was trained with bos before each document
        eos_ids: ids that end a document, besides the tokenizer's eos
    """
    from mhf.tokenizer_json import write_pretty_json, write_tokenizer

    if model.config.ablation:
        raise InputError(f'ablation={model.config.ablation} cannot be exported: the released format has no such model')
    state = model.state_dict()
    # token_mask follows from the table, and a Standard model has no table
    del state['token_mask']
    if not model.config.num_hashes:
        del state['signatures']
    released_names = {our_name: released for released, our_name in RELEASED_NAMES.items()}
    weights = {rename(name, released_names): tensor.contiguous() for name, tensor in state.items()}
    tok = get_tokenizer(tokenizer)
    eos_ids = sorted({tok.eos, *eos_ids})
    config = released_config(model) | dict(add_bos=add_bos, bos_token_id=tok.bos)
    config['eos_token_id'] = eos_ids if len(eos_ids) > 1 else tok.eos
    generation_config = dict(bos_token_id=tok.bos, eos_token_id=eos_ids, pad_token_id=tok.pad)
    if add_bos:  # bos starts the next document
        generation_config['eos_token_id'] = sorted({*eos_ids, tok.bos})
    folder = Path(folder)
    if folder.exists():
        raise InputError(f'{folder} already exists; choose another folder')
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}.') as temporary:
            complete = Path(temporary) / folder.name
            complete.mkdir()
            save_file(weights, complete / 'model.safetensors', metadata=dict(format='pt'))
            config['tokenizer'] = write_tokenizer(tok, complete, add_bos)
            config['tokenizer_files_sha256'] = hash_tokenizer_files(complete)
            write_pretty_json(complete / 'generation_config.json', generation_config)
            write_pretty_json(complete / 'config.json', config)
            # safetensors creates its file readable for the owner only
            os.chmod(complete / 'model.safetensors', (complete / 'config.json').stat().st_mode)
            os.rename(complete, folder)
    except (OSError, SafetensorError) as e:
        raise InputError(f'{folder} cannot be written ({e})') from None


# -----------------------------------------------------------------------------
# read the released format


def from_pretrained(path_or_hub_id):
    """
    Loads a model in the released format (config.json and safetensors, one file or several) from a folder, or from the
    Hugging Face hub by its id user/name[@revision]. A Qwen3 model with tied embeddings becomes a Standard model.
    Weights are float32. Raises InputError.
    """
    folder = resolve_path(path_or_hub_id)
    try:
        config_json = read_json(folder / 'config.json')
        refuse_unsupported(config_json)
        weights = read_weights(folder)
        config = convert_config(config_json, weights.get('model.hash_map'))
        state = convert_state_dict(config, weights, config_json.get('unused_ids') or ())
    except (OSError, SafetensorError, TypeError, ValueError, IndexError) as e:
        raise InputError(f'{path_or_hub_id} cannot be loaded: {" ".join(str(e).split())[:300]}') from None
    try:
        return MHF.from_state_dict(config, state)
    except RuntimeError as e:  # tensors of other names or shapes
        raise InputError(f'{path_or_hub_id} cannot be loaded: {" ".join(str(e).split())[:300]}') from None


def read_weights(folder):
    """
    Returns {name: tensor} of the files that model.safetensors.index.json names, or of model.safetensors. Other files,
    such as leftover shards or averaged weights, are not part of the model.
    """
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        return load_file(folder / 'model.safetensors')
    file_of = read_json(index).get('weight_map', {})
    weights = {}
    for file in set(file_of.values()):
        weights |= {name: tensor for name, tensor in load_file(folder / file).items() if file_of.get(name) == file}
    return weights


def read_json(path):
    """Returns the dict in a JSON file. Raises InputError."""
    try:
        return dict(json.loads(path.read_text(encoding='utf-8-sig')))
    except (OSError, TypeError, ValueError) as e:
        raise InputError(f'{path} cannot be read ({e})') from None


def resolve_path(path_or_hub_id):
    """Returns the folder of a released model, after a download if it is a hub id. Raises InputError."""
    if Path(path_or_hub_id).is_dir():
        return Path(path_or_hub_id)
    weights = ['model.safetensors', 'model.safetensors.index.json', 'model-*.safetensors']
    files = ['config.json', 'generation_config.json', 'tokenizer.model', *JSON_FILES, *weights]
    return download_from_hub(str(path_or_hub_id), files)


def refuse_unsupported(value, key=''):
    """
    Raises ValueError if a value of config.json, or a nested one, changes the computation and is not implemented. The
    key of a nested value is like '/a/b'.
    """
    if isinstance(value, dict):
        for name in value.keys() - RELEASED_FIELDS.keys():
            refuse_unsupported(value[name], f'{key}/{name}')
    elif isinstance(value, list):
        for nested in value:
            refuse_unsupported(nested, key)
    else:
        for pattern, supported in SUPPORTED.items():
            if re.search(pattern, key) and str(value) not in ('None', *supported):
                raise ValueError(f'{key[1:]}={json.dumps(value)} in config.json is not supported')


def convert_config(config_json, table):
    """Returns the MHFConfig for a config.json and a signature table (V, H), None for Standard. Raises ValueError."""
    # transformers 5 moves rope_theta to rope_parameters
    declared = config_json | (config_json.get('rope_parameters') or {})
    # load_state_dict detects sizes that are missing
    if declared.get('rope_theta') is None:
        raise ValueError('config.json has no rope_theta')
    fields = {name: declared[key] for key, name in RELEASED_FIELDS.items() if declared.get(key) is not None}
    fields = dict(num_hashes=0, loss='product') | fields
    eos_ids = parse_eos_ids(config_json)
    if table is not None:
        if table.amin() < 0:
            raise ValueError(f'model.hash_map contains bucket {table.amin()}; buckets must be from 0 on')
        fields['vocab_size'] = len(table)
        eos_ids = [i for i in eos_ids if 0 <= i < len(table) and not table[i].any()]
        fields.setdefault('single_id', table.shape[1] > 1 and bool((table == table[:, :1]).all()))
    # a tokenizer without pad uses eos
    for eos in eos_ids[:1]:
        fields.setdefault('pad_id', eos)
    config = MHFConfig(**fields)
    if not 0 <= config.num_lsh <= config.num_hashes:
        raise ValueError(f'num_lsh={config.num_lsh} in config.json: must be from 0 to num_hashes={config.num_hashes}')
    pad = config.pad_id
    if not 0 <= pad < config.vocab_size or table is not None and table[pad].any():
        raise ValueError(f'pad_token_id={pad} in config.json: must be an id whose signature is all zero')
    return config


def parse_eos_ids(config_json):
    """Returns the list of ids in eos_token_id, which is an id, a list of ids or missing."""
    declared = config_json.get('eos_token_id')
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]


def convert_state_dict(config, weights, unused_ids):
    """
    Returns our state_dict for released weights. Raises ValueError for an unknown tensor, a missing table or another
    head than the embedding.
    """
    head = weights.pop('lm_head.weight', None)
    if head is not None and not torch.equal(head, weights.setdefault('model.embed_tokens.weight', head)):
        raise ValueError('lm_head.weight differs from the embedding; only tied models are supported')
    table = weights.pop('model.hash_map', None)
    if config.num_hashes and table is None:
        raise ValueError(f'num_hashes={config.num_hashes} but no model.hash_map')
    state = {rename(name, RELEASED_NAMES): tensor.float() for name, tensor in weights.items()}
    signatures, token_mask = validate_table(config, table, unused_ids)
    state['signatures'] = torch.tensor(signatures)
    state['token_mask'] = torch.tensor(token_mask)
    return state


# -----------------------------------------------------------------------------
# the tokenizer of a released model


def find_tokenizer(folder, config_json):
    """
    Returns the name of the tokenizer of a released folder, None if it is unknown: that of an export if the files of the
    tokenizer are unchanged or absent, else the folder's own file, to which transformers may have added tokens.
    """
    own = {name: str(folder / name) for name in ('tokenizer.json', 'tokenizer.model') if (folder / name).exists()}
    exported_sha256 = config_json.get('tokenizer_files_sha256')
    if exported_sha256 and (not own or exported_sha256 == hash_tokenizer_files(folder)):
        named = config_json['tokenizer']
        return own.get(named) if named.endswith(('.model', '.json')) else named
    return next(iter(own.values()), None)


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
    rows = len(model.token_mask)
    is_rounded_up = rows % 128 == 0 and rows - V < 128
    return is_rounded_up or (V, rows) == (151669, 151936) or not model.embed.weight[V:].any()


def has_signatures_of(model, tokens):
    """
    Returns whether the signature table of a released MultiHashFormer is that of these token strings. One hash tells it:
    the first that is not LSH.
    """
    c = model.config
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


# -----------------------------------------------------------------------------
# what a folder declares about its model, and the command that exports a run


def read_facts(folder):
    """
    Returns what a folder declares about its model, as fields of LoadedModel (mhf/checkpoint.py): the name of its
    tokenizer, whether it was trained with bos, and the ids that end a document. Raises InputError.
    """
    config_json = read_json(folder / 'config.json')
    eos_ids = parse_eos_ids(config_json)
    if (folder / 'generation_config.json').exists():
        eos_ids = eos_ids + parse_eos_ids(read_json(folder / 'generation_config.json'))
    # the authors trained without bos
    add_bos = config_json.get('add_bos') is True
    return dict(tokenizer=find_tokenizer(folder, config_json), add_bos=add_bos, eos_ids=eos_ids)


if __name__ == '__main__':
    from mhf.checkpoint import load  # which imports this module

    install_excepthook()
    if len(sys.argv) != 3 or sys.argv[1].startswith('-'):
        raise InputError('usage: python -m mhf.released OUT_DIR FOLDER')
    out_dir, folder = sys.argv[1:]
    loaded = load(out_dir)
    save_pretrained(loaded.model, folder, loaded.tok.name, loaded.add_bos, loaded.eos_ids)
    print(f'{loaded.name} -> {folder}')
