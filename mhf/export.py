"""
Writes the released format of the paper's authors, with a tokenizer for transformers.

    $ python -m mhf.export out/mhf_tiny FOLDER         # export the newest checkpoint of a run

    save_pretrained(model, 'folder', 'mistral')        # from_pretrained (mhf/released.py) reads back the same bits

An export has the authors' format, except that its model_type is `mhf` if H x B equals the vocabulary size, or if a
Standard model has unused ids or an embedding_scale.
"""

import os
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from mhf.checkpoint import load
from mhf.errors import InputError, install_excepthook
from mhf.released import FIELDS, RELEASED_NAMES, hash_tokenizer_files, rename
from mhf.tokenizer_json import write_pretty_json, write_tokenizer
from mhf.tokenizers import get_tokenizer, tokenizer_fingerprint


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
    Writes a model and its tokenizer, a name for get_tokenizer, to a new folder in the released format. transformers
    loads a Standard model as Qwen3 with AutoModelForCausalLM, unless it has unused ids or an embedding_scale, and its
    tokenizer with AutoTokenizer. Raises InputError.

    Args:
        add_bos: whether the model was trained with bos before each document
        eos_ids: ids that end a document, besides the tokenizer's eos
    """
    if model.config.ablation:
        raise InputError(f'ablation={model.config.ablation} cannot be exported: the released format has no such model')
    released_names = {our_name: released for released, our_name in RELEASED_NAMES.items()}
    weights = {rename(name, released_names): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.num_hashes:
        weights['model.hash_map'] = model.table
    tok = get_tokenizer(tokenizer)
    eos_ids = {tok.eos, *eos_ids}
    generation_config = dict(bos_token_id=tok.bos, eos_token_id=sorted(eos_ids), pad_token_id=tok.pad)
    if add_bos:  # bos starts the next document, so generation ends there
        generation_config['eos_token_id'] = sorted(eos_ids | {tok.bos})
        eos_ids = eos_ids - {tok.bos} | {tok.eos}
    config = released_config(model) | dict(add_bos=add_bos, bos_token_id=tok.bos)
    config['eos_token_id'] = sorted(eos_ids) if len(eos_ids) > 1 else tok.eos
    folder = Path(folder)
    if folder.exists():
        raise InputError(f'{folder} already exists; choose another folder')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}.') as temporary:
        complete = Path(temporary) / folder.name
        complete.mkdir()
        save_file(weights, complete / 'model.safetensors', metadata=dict(format='pt'))
        config['tokenizer'] = write_tokenizer(tok, complete, add_bos)
        config['tokenizer_files_sha256'] = hash_tokenizer_files(complete)
        config['tokenizer_sha256'] = tokenizer_fingerprint(tok)
        write_pretty_json(complete / 'generation_config.json', generation_config)
        write_pretty_json(complete / 'config.json', config)
        # safetensors creates its file readable for the owner only
        os.chmod(complete / 'model.safetensors', (complete / 'config.json').stat().st_mode)
        os.rename(complete, folder)


if __name__ == '__main__':
    install_excepthook()
    if len(sys.argv) != 3 or sys.argv[1].startswith('-'):
        raise InputError('usage: python -m mhf.export OUT_DIR FOLDER')
    out_dir, folder = sys.argv[1:]
    loaded = load(out_dir)
    save_pretrained(loaded.model, folder, loaded.tok.name, loaded.add_bos, loaded.eos_ids)
    print(f'{loaded.name} -> {folder}')
