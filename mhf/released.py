"""
The released format of the paper's authors, both ways, with a tokenizer for transformers.

    $ python -m mhf.released out/mhf_tiny FOLDER         # exports the newest checkpoint of a run

    model = from_pretrained('user/name@revision')        # a folder, or from the hub
    save_pretrained(model, 'folder', 'mistral')          # from_pretrained reads back the same bits

An export has the authors' format, except that its model_type is `mhf` if H x B equals the vocabulary size, or if a
Standard model has unused ids or an embedding_scale.
"""

import argparse
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hashing import signature_table
from mhf.checkpoint import LoadedModel, load
from mhf.data import read_json, write_json
from mhf.errors import InputError, install_excepthook
from mhf.tokenizer_json import write_tokenizer
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
    """Loads a released model and its tokenizer from a folder or from the hub, as mhf.checkpoint.load does."""
    folder = resolve_path(source)
    config_json = read_json(folder / 'config.json')
    if config_json is None:
        raise InputError(f'{source} has no checkpoint (ckpt.pt) and no config.json of a released model')
    model = from_pretrained(folder)
    own_tokenizer, sha256 = find_tokenizer(folder, config_json)
    tok = get_tokenizer(tokenizer or own_tokenizer or 'mistral')
    if mismatch := find_mismatch(model, tok, sha256):
        found = f"tokenizer '{tok.name}' is not the model's, {own_tokenizer or 'whose name is unknown'}"
        raise InputError(f"{source}: {found} ({mismatch}); name the model's tokenizer")
    without_token = [i for i, token in enumerate(tok.tokens) if token is None]
    model.set_vocabulary(model.signatures, [*without_token, *range(len(tok.tokens), model.config.vocab_size)])
    eos_ids = parse_eos_ids(config_json) + parse_eos_ids(read_json(folder / 'generation_config.json') or {})
    # the authors trained without bos
    return LoadedModel(model, tok, str(source), str(source), config_json.get('add_bos') is True, eos_ids)


def find_mismatch(model, tok, sha256):
    """Returns how a tokenizer differs from that of a model, whose fingerprint is sha256 or None if unknown, or ''."""
    V = len(tok.tokens)
    rows = model.config.vocab_size
    if model.config.num_hashes:
        is_padding = not model.signatures[V:].any()
    else:
        # fewer than 128 rows that fill up a multiple of 128 (the authors' models), those of Qwen3, or zeros
        is_rounded_up = rows % 128 == 0 and rows - V < 128
        is_padding = is_rounded_up or (V, rows) == (151669, 151936) or not model.embed.weight[V:].any()
    if V > rows or not is_padding:
        return f'{V} tokens, expected {rows}'
    if sha256:
        return '' if tokenizer_fingerprint(tok) == sha256 else 'it gives other ids'
    if model.config.num_hashes and not has_signatures_of(model, tok.tokens):
        return 'its table is not that of these tokens'
    return ''


def from_pretrained(path_or_hub_id):
    """
    Loads a model in the released format (config.json and safetensors, one file or several) from a folder, or from the
    Hugging Face hub by its id user/name[@revision]. A Qwen3 model with tied embeddings becomes a Standard model.
    Weights are float32. Raises InputError, or torch's RuntimeError if config.json and the tensors differ, or if
    lm_head.weight is another matrix than the embedding.
    """
    folder = resolve_path(path_or_hub_id)
    config_json = json.loads((folder / 'config.json').read_bytes())
    weights = read_weights(folder)
    table = weights.pop('model.hash_map', None)
    E = weights['model.embed_tokens.weight']
    if torch.equal(weights.get('lm_head.weight', E), E):
        weights.pop('lm_head.weight', None)
    model = MHF(convert_config(config_json, table), table, config_json.get('unused_ids') or ())
    model.load_state_dict({rename(name, RELEASED_NAMES): tensor.float() for name, tensor in weights.items()})
    return model.eval()


def read_weights(folder):
    """Returns {name: tensor} of model.safetensors, or without it, as model.safetensors.index.json names its files."""
    single = folder / 'model.safetensors'
    if single.exists():
        return load_file(single)
    file_of = json.loads((folder / f'{single.name}.index.json').read_bytes())['weight_map']
    shards = {file: load_file(folder / file) for file in set(file_of.values())}
    return {name: shards[file][name] for name, file in file_of.items()}


def resolve_path(path_or_hub_id):
    """Returns the folder of a released model, after a download if it is a hub id. Raises InputError."""
    if Path(path_or_hub_id).is_dir():
        return Path(path_or_hub_id)
    weights = ['model.safetensors', 'model.safetensors.index.json', 'model-*.safetensors']
    files = ['config.json', 'generation_config.json', '*tokenizer.model', *JSON_FILES, *weights]
    return download_from_hub(str(path_or_hub_id), files)


def convert_config(config_json, table):
    """
    Returns the MHFConfig for a config.json and a signature table (V, H), None for Standard. Keys that are neither
    fields nor in SUPPORTED are ignored; null is as good as absent. Raises InputError for a value that is not supported.
    """
    declared = dict(config_json)
    for name in ('rope_scaling', 'rope_parameters'):  # transformers 5 moves rope_theta to the second
        declared |= declared.pop(name, None) or {}
    declared = {key: value for key, value in declared.items() if value is not None}
    for key in SUPPORTED.keys() & declared.keys():
        values = declared[key] if isinstance(declared[key], list) else [declared[key]]
        if not all(value in SUPPORTED[key] for value in values):
            raise InputError(f'{key}={json.dumps(declared[key])} in config.json is not supported')
    # load_state_dict detects sizes that are missing
    fields = DEFAULTS | dict(num_hashes=0)
    fields |= {FIELDS[key]: value for key, value in declared.items() if key in FIELDS}
    fields['rope_theta'] = declared['rope_theta']
    if table is not None:
        fields['vocab_size'] = len(table)
        fields['single_id'] |= table.shape[1] > 1 and bool((table == table[:, :1]).all())
    # the signature of pad is the zero row; a tokenizer without pad uses eos
    pads = [declared.get('pad_token_id', -1), *parse_eos_ids(config_json), DEFAULTS['pad_id']]
    can_be_pad = [0 <= i < fields['vocab_size'] and (table is None or not table[i].any()) for i in pads]
    return MHFConfig(**fields | dict(pad_id=pads[can_be_pad.index(True)]))


def parse_eos_ids(config_json):
    """Returns the list of ids in eos_token_id, which is an id, a list of ids or missing."""
    declared = config_json.get('eos_token_id')
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]


# -----------------------------------------------------------------------------
# the tokenizer of a released model


def find_tokenizer(folder, config_json):
    """
    Returns a name for get_tokenizer and the fingerprint of a released folder's tokenizer, each None if unknown. They
    are those of the export if the tokenizer's files are unchanged or absent. Else the name is the folder's own file,
    which transformers may have changed, and there is a fingerprint only with frequency ranges.
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


def has_signatures_of(model, tokens):
    """
    Returns whether the signature table of a released MultiHashFormer is that of these token strings. With frequency
    ranges it cannot be told, because the table also depends on counts.
    """
    c = model.config
    if c.frequency_ranges:
        return False
    ids = [i for i, token in enumerate(tokens) if token is not None and i != c.pad_id]
    ids = ids[-256:] if c.num_lsh else ids  # an LSH hash of all tokens takes minutes
    table = signature_table([tokens[i] for i in ids], c.num_hashes, c.num_buckets, c.num_lsh, unique=not c.single_id)
    j = min(c.num_lsh, c.num_hashes - 1)  # the first hash that is not LSH
    # rounding may change an argmax of LSH, and the authors' code may rehash other tokens than ours: up to half of them
    # with H = 1 and B = V
    tolerance = 2 / 3 if j == c.num_hashes - 1 and not c.single_id else 0
    return (model.signatures[ids, j].numpy() != table[:, j]).mean() <= tolerance


# -----------------------------------------------------------------------------
# export


def released_config(model):
    """Returns the config.json of a model, without its tokenizer."""
    c = model.config
    fields = dict(
        model_type='qwen3', architectures=['Qwen3ForCausalLM'], hidden_act='silu', attention_bias=False,
        tie_word_embeddings=True, torch_dtype='float32',
    )  # fmt: skip
    fields |= {key: getattr(c, name) for key, name in FIELDS.items()}
    fields['unused_ids'] = model.unused_ids.tolist()
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
    Writes a model and its tokenizer, a name for get_tokenizer, to a new folder. transformers loads the tokenizer, and a
    Standard model without unused ids and embedding_scale as Qwen3. Raises InputError.

    Args:
        add_bos: whether the model was trained with bos before each document
        eos_ids: ids that end a document, besides the tokenizer's eos
    """
    if model.config.ablation:
        raise InputError(f'ablation={model.config.ablation} cannot be exported: the released format has no such model')
    released_names = {our_name: released for released, our_name in RELEASED_NAMES.items()}
    weights = {rename(name, released_names): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.num_hashes:
        weights['model.hash_map'] = model.signatures
    tok = get_tokenizer(tokenizer)
    eos_ids = {tok.eos, *eos_ids}
    if add_bos:  # bos starts the next document, so generation ends there
        eos_ids.add(tok.bos)
    generation_config = dict(bos_token_id=tok.bos, eos_token_id=sorted(eos_ids), pad_token_id=tok.pad)
    config = released_config(model) | dict(add_bos=add_bos, bos_token_id=tok.bos, eos_token_id=tok.eos)
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}.') as temporary:
        complete = Path(temporary) / folder.name
        complete.mkdir()
        save_file(weights, complete / 'model.safetensors', metadata=dict(format='pt'))
        config['tokenizer'] = write_tokenizer(tok, complete, add_bos)
        config['tokenizer_files_sha256'] = hash_tokenizer_files(complete)
        config['tokenizer_sha256'] = tokenizer_fingerprint(tok)
        write_json(complete / 'generation_config.json', generation_config)
        write_json(complete / 'config.json', config)
        os.rename(complete, folder)  # an OSError if the folder contains files


def main():
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', help='a run')
    parser.add_argument('folder', help='a new folder for the export')
    args = parser.parse_args()
    loaded = load(args.out_dir)
    save_pretrained(loaded.model, args.folder, loaded.tok.name, loaded.add_bos, loaded.eos_ids)
    print(f'{loaded.name} -> {args.folder}')


if __name__ == '__main__':
    main()
