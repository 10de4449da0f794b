#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained of a custom model leaves a buffer that is computed in __init__ and not saved,
# such as the table from tokens to hash ids, uninitialized.
# Guess: so, for persistent=False (60 %).
# Expected, and seen with 4.57.1: the buffer has the values of __init__, as that of a model that is created from its
# config. Seen: the model is built on the meta device, and the buffer then gets memory that nothing writes to. Where it
# is zero, every token selects row 0, and the model runs without an error or a warning. A plain attribute stays a meta
# tensor. Compute such tables in _init_weights too, or save them (transformers issue 48892).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile

os.environ['HF_HUB_OFFLINE'] = '1'
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()


class HashConfig(PretrainedConfig):
    model_type = 'hash_toy'


class HashModel(PreTrainedModel):
    config_class = HashConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(64, 8)
        self.register_buffer('buckets', torch.arange(4000) * 7919 % 63 + 1, persistent=False)
        self.weights = torch.arange(4.0)
        self.post_init()


created = HashModel(HashConfig())
with tempfile.TemporaryDirectory() as folder:
    created.save_pretrained(folder)
    loaded = HashModel.from_pretrained(folder)
print('parameters equal:', torch.equal(created.table.weight, loaded.table.weight))
print('buckets equal:   ', torch.equal(created.buckets, loaded.buckets), '| device', loaded.buckets.device)
print('plain attribute: ', loaded.weights.device)
assert torch.equal(created.table.weight, loaded.table.weight)
assert not torch.equal(created.buckets, loaded.buckets) and loaded.weights.is_meta, 'changed'
PYTHON
