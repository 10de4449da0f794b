"""
Samples text from a trained model, streaming it as it is made.

    $ python sample.py                                      # the newest checkpoint under this folder
    $ python sample.py --out_dir=out/mhf_tiny --start="def main(" --temperature=0.8 --top_p=0.95
    $ python sample.py --released=klein9692/hf_qwen3_100m-model_16384_4_0_64_twe@checkpoint-20000 --start=FILE:in.txt
"""

import sys
import time
from itertools import islice
from pathlib import Path

import torch

from configurator import InputError, configure
from mhf.device import pick_compile, pick_device, pick_dtype
from mhf.generate import Writer
from mhf.released import open_model
from model import sample_token

out_dir = ''  # the folder of the checkpoint; '' is the newest one under the working folder
released = ''  # or a released model: a folder, or a hub id[@revision]
start = ''  # the prompt, or FILE:path; '' begins a new document
num_samples = 3
max_new_tokens = 200
temperature = 0.8  # 0 is greedy
top_k = None  # sample among the k likeliest tokens
top_p = None  # sample among the fewest tokens whose probability reaches p
seed = 1337
tokenizer = ''  # '' is the one the checkpoint was trained with
device = None  # cuda | cpu | mps; None takes cuda where it is there
dtype = None  # bfloat16 | float32; None is bfloat16 where the hardware has it
compile = None  # one graph a token: True | False; None is True on cuda where a C compiler is found
config = configure(globals())

if top_k is not None and type(top_k) is not int or top_p is not None and type(top_p) not in (int, float):
    raise InputError(f'top_k={top_k!r}, top_p={top_p!r}: must be numbers')
if min(num_samples, max_new_tokens) < 1:
    raise InputError(f'num_samples={num_samples}, max_new_tokens={max_new_tokens}: must be at least 1')
if not 0 <= seed < 2**64:
    raise InputError(f'seed={seed}: must be from 0 to 2**64 - 1')
device = pick_device(device)
dtype, why_dtype = pick_dtype(dtype, device)
compile, no_compiler = pick_compile(compile, device)
if start.startswith('FILE:'):
    try:
        start = Path(start[5:]).read_text(encoding='utf-8', errors='replace')
    except OSError as e:
        raise InputError(f'--start={start}: {e.strerror}') from None
model, tok, name, _ = open_model(out_dir, released, tokenizer)
# refuses what means nothing for this vocabulary, before anything is printed
sample_token(torch.zeros(1, len(tok.tokens)), temperature, top_k, top_p)
print(f'{name}; seed {seed}', file=sys.stderr)
if why_dtype:
    print(f'dtype={dtype}: {why_dtype}', file=sys.stderr)
if 'cuda' in device and no_compiler:
    print(f'not compiled: {no_compiler}', file=sys.stderr)

model.to(device, getattr(torch, dtype)).eval()
context = model.config.block_size
prompt = [tok.bos, *tok.encode([start])[0]]
if len(prompt) > context:
    print(f'the prompt has {len(prompt)} tokens, the context {context}: its end is used', file=sys.stderr)
    prompt = prompt[-context:]
ids = torch.tensor([prompt], device=device)
generator = torch.Generator(device).manual_seed(seed)
writer = Writer(model, temperature, top_k, top_p)


def tokens_of(stream):
    """The ids of a stream, one by one. Reading an id waits for the GPU, so a GPU is given eight steps at a time."""
    while block := list(islice(stream, 1 if device == 'cpu' else 8)):
        yield from torch.cat(block).tolist()


made = 0
try:
    if compile:
        print('compiling', file=sys.stderr)
        writer.compile(1, len(prompt) + max(4, max_new_tokens))
        list(writer.stream(ids, 4))
    began = time.perf_counter()
    for n in range(num_samples):
        print(f'----- sample {n + 1} of {num_samples}')
        text = tok.decode(prompt)
        printed = 0
        written = list(prompt)
        for token in tokens_of(writer.stream(ids, max_new_tokens, generator)):
            if token == tok.bos:  # the document is over
                break
            made += 1
            written.append(token)
            text = tok.decode(written)
            # a character may take several tokens
            whole = text.rstrip('\ufffd')
            print(whole[printed:], end='', flush=True)
            printed = max(printed, len(whole))
        print(text[printed:])
except KeyboardInterrupt:
    sys.exit('\ninterrupted')
print(f'{made / (time.perf_counter() - began):,.1f} tokens/s', file=sys.stderr)
