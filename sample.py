"""
Samples text from a trained model and streams it to the terminal.

    $ python sample.py                                      # the newest checkpoint, up to two folders below
    $ python sample.py --out_dir=out/mhf_tiny --start="def main(" --temperature=0.8 --top_p=0.95
    $ python sample.py --out_dir=klein9692/hf_qwen3_100m-model_16384_4_0_64_twe@checkpoint-20000 --start=FILE:in.txt
"""

import sys
import time
from pathlib import Path

import torch

from configurator import configure
from mhf.checkpoint import load
from mhf.generate import Engine
from mhf.runtime import pick_device, pick_dtype

# a run (its newest checkpoint), a *.pt, a folder in the released format, or a hub id[@revision]; '': the newest run up
# to two folders below
out_dir = ''
start = ''  # the prompt, or FILE:path; '' starts a new document
num_samples = 3
max_new_tokens = 200
temperature = 0.8  # 0 is greedy
top_k = None  # sample among the k likeliest tokens
top_p = None  # sample among the fewest tokens whose probability reaches p
seed = 1337
tokenizer = ''  # '': the one that the model was trained with
device = None  # cuda | cpu | mps; None: a GPU (CUDA) if available, else the CPU
dtype = None  # bfloat16 | float32; None: bfloat16 on a device with instructions for it
compile = None  # True | False; None: on a GPU
config = configure(globals())

# -----------------------------------------------------------------------------
# model and prompt

device = pick_device(device)
if compile is None:
    compile = torch.device(device).type == 'cuda'
if start.startswith('FILE:'):
    start = Path(start[5:]).expanduser().read_text(encoding='utf-8-sig')
loaded = load(out_dir, tokenizer)
model = loaded.model
tok = loaded.tok
# cuDNN's attention compiles a plan for every prompt length, which takes tens of milliseconds
torch.backends.cuda.enable_cudnn_sdp(False)
print(f'{loaded.name}; seed {seed}', file=sys.stderr)
dtype = pick_dtype(dtype, device)
model.to(device, getattr(torch, dtype))

prompt = tok.encode([start])[0]
if loaded.add_bos or not prompt:
    prompt = [tok.bos, *prompt]
ids = torch.tensor([prompt], device=device)
generator = torch.Generator(device).manual_seed(seed)
engine = Engine(model, temperature, top_k, top_p)

# -----------------------------------------------------------------------------
# sampling


def print_text(ids, printed):
    """Prints the text of `ids` after its first `printed` characters. Returns the new number of printed characters."""
    # decode() ends with replacement characters while the last character lacks some of its tokens
    text = tok.decode(ids).rstrip('\ufffd')
    print(text[printed:], end='', flush=True)
    return max(printed, len(text))


def print_sample():
    """Prints a sample up to the end of its document. Returns the number of tokens."""
    written = list(prompt)
    printed = print_text(written, 0)
    for token in map(int, engine.stream(ids, max_new_tokens, generator)):
        if token in loaded.stop_ids:
            break
        written.append(token)
        printed = print_text(written, printed)
    print()
    return len(written) - len(prompt)


if compile:
    print('compiling', file=sys.stderr)
    engine.compile(1, len(prompt) + max_new_tokens)
start_time = time.perf_counter()
num_tokens = 0
for n in range(num_samples):
    print(f'----- sample {n + 1} of {num_samples}')
    num_tokens += print_sample()
print(f'{num_tokens / (time.perf_counter() - start_time):,.1f} tokens/s', file=sys.stderr)
