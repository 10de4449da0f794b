"""
Samples text from a trained model, streaming it as it is made.

    $ python sample.py                                      # the newest checkpoint under this folder
    $ python sample.py --out_dir=out/mhf_tiny --start="def main(" --temperature=0.8 --top_p=0.95
    $ python sample.py --released=klein9692/hf_qwen3_100m-model_16384_4_0_64_twe --revision=checkpoint-20000 --start=FILE:prompt.txt
"""

import sys
import time
from pathlib import Path

import torch

from configurator import InputError, configure
from model import open_model, pick_device

out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id
revision = ''  # of the hub id
start = ''  # the prompt, or FILE:path; '' begins a new document
num_samples = 3
max_new_tokens = 200
temperature = 0.8  # 0 is greedy
top_k = None  # sample among the k likeliest tokens
top_p = None  # sample among the fewest tokens whose probability reaches p
seed = 1337
tokenizer = ''  # '' is the one the checkpoint was trained with
device = None  # cuda | cpu | mps; None takes what is there
dtype = None  # bfloat16 | float32; None is bfloat16 where the hardware has it

config = configure(globals())

# -----------------------------------------------------------------------------

for key, kind in (('top_k', int), ('top_p', (int, float)), ('temperature', (int, float))):
    if config[key] is not None and (not isinstance(config[key], kind) or isinstance(config[key], bool)):
        raise InputError(f'{key}={config[key]!r}: must be a number')
for key in ('num_samples', 'max_new_tokens'):
    if config[key] < 1:
        raise InputError(f'{key}={config[key]}: must be at least 1')
if not temperature >= 0:
    raise InputError(f'temperature={temperature}: must be 0 (greedy) or above')
device, dtype = pick_device(device, dtype)
if start.startswith('FILE:'):
    try:
        start = Path(start[5:]).read_text(encoding='utf-8', errors='replace')
    except OSError as e:
        raise InputError(f'--start={start}: {e.strerror}') from None

model, tok, which = open_model(out_dir, released, revision, tokenizer)
c, V = model.config, len(tok.tokens)
if top_k is not None and not 1 <= top_k <= V:
    raise InputError(f'top_k={top_k}: must be from 1 to the vocabulary size {V}')
if top_p is not None and not 0 < top_p <= 1:
    raise InputError(f'top_p={top_p}: must be above 0 and at most 1')

print(which, file=sys.stderr)
model.to(device, getattr(torch, dtype)).eval()
prompt = [tok.bos, *tok.encode([start])[0]]
if len(prompt) > c.block_size:
    print(f'the prompt has {len(prompt)} tokens, the context {c.block_size}: its end is used', file=sys.stderr)
    prompt = prompt[-c.block_size :]
generator = torch.Generator(device).manual_seed(seed)

made, seconds = 0, 0.0
for n in range(num_samples):
    print(f'----- sample {n + 1} of {num_samples}, seed {seed}')
    text, shown, ids = tok.decode(prompt), 0, list(prompt)
    began = time.perf_counter()
    stream = model.stream(torch.tensor([prompt], device=device), max_new_tokens, temperature, top_k, top_p, generator)
    try:
        for token in stream:
            made += 1
            if token.item() == tok.bos:  # the document is over
                break
            ids.append(token.item())
            text = tok.decode(ids)
            whole = text.rstrip('\ufffd')  # a character may take several tokens
            print(whole[shown:], end='', flush=True)
            shown = max(shown, len(whole))
    except KeyboardInterrupt:
        sys.exit('\ninterrupted')
    print(text[shown:])
    seconds += time.perf_counter() - began
print(f'{made / seconds:,.1f} tokens/s', file=sys.stderr)
