"""
Times the Triton kernels of mhf/kernels.py on this machine's GPU, next to the sums in columns.

    $ python -m study.kernels                                     # H4B16K, 32,768 tokens
    $ python -m study.kernels --buckets=7966                      # a width that is no multiple of 16
    $ python -m study.kernels --tokenizer=tekken                  # 131,072 tokens

It then times each change of one of kernels.SIZES; copy the fastest there. tests/test_gpu.py tests the results, and
tests/compile_kernels.py prints the registers and the shared memory of other sizes without a GPU.
"""

import argparse
import functools

import torch

import configurator
from configurator import InputError
from hashing import signature_table
from mhf import kernels
from mhf.chunked import ChunkedMHF, ChunkSizes, exact_nll
from mhf.runtime import no_triton
from mhf.tokenizers import get_tokenizer
from model import MHFConfig

CHANGES = dict(
    positions=(32, 128), tokens=(32, 128), buckets=(8, 32), transpose_warps=(8,), logsumexp_warps=(8,),
    backward_warps=(1, 4),
)  # fmt: skip
COLUMNS = ChunkSizes(chunk=4096, block=4096, columns=512)
KERNELS = COLUMNS._replace(use_kernels=True)


def signature_index(table, B, unused_ids=()):
    """Signature table (V, H) without padding -> its SignatureIndex."""
    V, H = table.shape
    config = MHFConfig(vocab_size=V, num_hashes=H, num_buckets=B, pad_id=-1, num_layers=1, hidden_size=1)
    return ChunkedMHF(config, table, unused_ids).signature_index()


def random_inputs(index, n, dtype):
    """n random bucket logits o, H of (n, B), and signatures y (n, H) of used ids; the same in each run."""
    torch.manual_seed(0)
    H = index.signatures.shape[1]
    B = (len(index.offsets) - 1) // H
    o = [torch.randn(n, B, device=index.rows.device).to(dtype) for _ in range(H)]
    used_ids = index.token_mask.nonzero()[:, 0]
    return o, index.signatures[used_ids[torch.randint(len(used_ids), (n,))]]


def measure(o, y, index, measure_ms):
    """Prints the times of the kernels, of the columns, and of the kernels in other sizes, from measure_ms(function)."""
    for name, sizes in (('kernels', KERNELS), ('columns', COLUMNS)):
        for gradient in (True, False):
            ms = measure_ms(functools.partial(exact_nll, o, y, index, sizes, gradient))
            print(f'{name}, -log P{" and its gradient" if gradient else ""}: {ms:.2f} ms', flush=True)
    print(f'kernels, -log P and its gradient, with one change of {kernels.SIZES}:')
    arguments = (o, y, index.rows, index.token_mask, [index.ids, index.offsets])
    for field, values in CHANGES.items():
        for value in values:
            sizes = kernels.SIZES._replace(**{field: value})
            ms = measure_ms(functools.partial(kernels.sum_over_vocabulary, *arguments, sizes))
            print(f'{field}={value}: {ms:.2f} ms', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hashes', type=int, default=4, help='H')
    parser.add_argument('--buckets', type=int, default=16384, help='B')
    parser.add_argument('--tokenizer', default='mistral')
    parser.add_argument('--positions', type=int, default=4096, help="n: the head's chunk on a GPU")
    parser.add_argument('--dtype', choices=['bfloat16', 'float32'], default='bfloat16')
    args = parser.parse_args()
    if not torch.cuda.is_available() or no_triton():
        raise InputError(f'this needs a GPU and Triton: {no_triton() or "torch finds no GPU"}')

    from triton.testing import do_bench

    torch.set_default_device('cuda')
    tok = get_tokenizer(args.tokenizer)
    index = signature_index(signature_table(tok.tokens, args.hashes, args.buckets), args.buckets)
    o, y = random_inputs(index, args.positions, getattr(torch, args.dtype))
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}')
    print(f'{args.positions:,} positions, H={args.hashes}, B={args.buckets:,}, V={len(tok.tokens):,}')
    measure(o, y, index, functools.partial(do_bench, warmup=25, rep=100, return_mode='median'))


if __name__ == '__main__':
    configurator.install_excepthook()
    main()
