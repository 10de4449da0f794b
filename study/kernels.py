"""
Times the kernels of mhf/kernels.py on this machine's GPU, in each block size that may be the best one, and compares
them with a plain copy. It also prints how exact they are and how much memory they take.

    $ python -m study.kernels                                     # H4B16K, 32,768 words
    $ python -m study.kernels --buckets=7966                      # a width that is no multiple of 16
    $ python -m study.kernels --tokenizer=tekken                  # 131,072 words

The fastest sizes belong into kernels.Sizes. tests/compile_kernels.py says, without a GPU, how many registers and how
much shared memory a kernel of other sizes needs.
"""

import argparse
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from configurator import InputError
from hashing import signature_table
from mhf import kernels
from mhf.device import no_triton
from mhf.fused import Table, Tiles, exact_nll, invert_table
from mhf.kernels import Sizes
from mhf.tokenizers import get_tokenizer

# tokens of a block
TOKENS = (32, 64, 128)
# {kernel: the other sizes that are tried with each of TOKENS}
TRIED = {
    'lay_out': [dict(lay_out_warps=4), dict(lay_out_warps=8)],
    'normalise': [
        dict(words=32, normalise_warps=4),
        dict(words=64, normalise_warps=4),
        dict(words=64, normalise_warps=8),
        dict(words=128, normalise_warps=8),
    ],
    'derive': [
        dict(buckets=8, derive_warps=1),
        dict(buckets=16, derive_warps=2),
        dict(buckets=16, derive_warps=4),
        dict(buckets=32, derive_warps=4),
    ],
}
# what a GPU's head works on together, with the kernels and without
KERNELS = Tiles(chunk=4096, block=4096, columns=512, kernels=True)
COLUMNS = KERNELS._replace(kernels=False)
PER = 16384  # tokens that the times are printed for: a micro-batch of 8 x 2,048


class Case(NamedTuple):
    """What the kernels are called with."""

    table: Table
    o: list[Tensor]  # bucket logits, H of (n, B)
    y: Tensor  # (n, H), the targets' signatures

    def copies(self):
        return [o_i.clone() for o_i in self.o]


def table_of(signatures, token_mask, B):
    """Signatures (V, H) int64 and token_mask (V,) bool, tensors -> their Table, on the same device."""
    backwards = invert_table(signatures.cpu().numpy(), token_mask.cpu().numpy(), B)
    tensors = {name: torch.tensor(array, device=signatures.device) for name, array in backwards.items()}
    return Table(signatures, token_mask, **tensors, standard=False)


def random_case(signatures, B, n, dtype):
    """Signatures (V, H) of words, all of them tokens -> n random bucket logits and targets, the same in each run."""
    torch.manual_seed(0)
    V, H = signatures.shape
    device = signatures.device
    table = table_of(signatures, torch.ones(V, dtype=torch.bool, device=device), B)
    o = [torch.randn(n, B, device=device, dtype=dtype) for _ in range(H)]
    return Case(table, o, signatures[torch.randint(V, (n,), device=device)])


def exactness(case):
    """
    How far the kernels are from the sums in columns: nll, the largest difference of -log P in nats; gradient, the
    difference relative to the whole gradient; and same_bits, whether a second call gives the same bits.
    """
    by_kernels = case.copies()
    again = case.copies()
    in_columns = case.copies()
    nll = exact_nll(by_kernels, case.y, case.table, KERNELS, gradient=True)
    nll_again = exact_nll(again, case.y, case.table, KERNELS, gradient=True)
    expected = exact_nll(in_columns, case.y, case.table, COLUMNS, gradient=True)
    pairs = list(zip(by_kernels, in_columns, strict=True))
    distance = sum((a.double() - b.double()).square().sum() for a, b in pairs).sqrt()
    length = sum(b.double().square().sum() for _, b in pairs).sqrt()
    same = torch.equal(nll, nll_again) and all(map(torch.equal, by_kernels, again))
    return dict(nll=(nll - expected).abs().max().item(), gradient=(distance / length).item(), same_bits=same)


def calls(case, sizes):
    """{kernel: a function without arguments that calls it}. Evaluation calls the last one, which makes no gradient."""
    table = case.table
    inverse = [table.ids, table.begins]
    laid_out = kernels.lay_out(case.o, sizes)
    logits, _, logsumexp = kernels.normalise(laid_out, table.rows, table.token_mask, True, sizes)
    gradient = case.copies()
    return {
        'lay_out': lambda: kernels.lay_out(case.o, sizes),
        'normalise': lambda: kernels.normalise(laid_out, table.rows, table.token_mask, True, sizes),
        'derive': lambda: kernels.derive(logits, logsumexp, case.y, inverse, gradient, sizes),
        'normalise, no gradient': lambda: kernels.normalise(laid_out, table.rows, table.token_mask, False, sizes),
    }


def bytes_allocated(case):
    """Bytes that `lookups` allocates and frees for a gradient: of bucket logits, laid out anew, and of token logits."""
    bucket_logits = sum(o_i.numel() * o_i.element_size() for o_i in case.o)
    return bucket_logits, 4 * len(case.y) * len(case.table.rows)


def bytes_moved(case):
    """{kernel: bytes that it reads from and writes to the GPU's memory, if the cache holds what it reads again}."""
    bucket_logits, token_logits = bytes_allocated(case)
    return {
        'lay_out': 2 * bucket_logits,
        'normalise': bucket_logits + token_logits,
        'derive': token_logits + bucket_logits,
        'normalise, no gradient': bucket_logits,
    }


def fastest(case, seconds_of, copy_rate):
    """
    Times every kernel in all sizes and prints a line for each -> the Sizes that are the fastest together, and their
    seconds. seconds_of(f): the time of a call of f; copy_rate: bytes that a copy reads and writes a second.
    """
    moved = bytes_moved(case)
    totals = {}
    for tokens in TOKENS:
        best = Sizes(tokens=tokens)
        total = 0.0
        for kernel, tried in TRIED.items():
            times = {}
            for change in tried:
                sizes = Sizes(tokens=tokens)._replace(**change)
                times[sizes] = seconds_of(calls(case, sizes)[kernel])
                what = ', '.join(f'{field} {value}' for field, value in (dict(tokens=tokens) | change).items())
                report(f'{kernel}: {what}', times[sizes], len(case.y), moved[kernel], copy_rate)
            quickest = min(times, key=times.get)
            total += times[quickest]
            best = best._replace(**{field: getattr(quickest, field) for field in tried[0]})
        totals[best] = total
    return min(totals, key=totals.get), min(totals.values())


def report(what, seconds, n, moved=None, copy_rate=None):
    """Prints a time for n tokens, and the bytes moved a second beside those that a copy moves."""
    line = f'{what:<66}{seconds * 1e3 * PER / n:8.2f} ms'
    if moved:
        line += f'{moved / seconds / 1e9:8,.0f} GB/s{moved / seconds / copy_rate:6.0%} of a copy'
    print(line, flush=True)


def peak_memory(case):
    """The most bytes that the operator holds at a time, without its arguments."""
    o = case.copies()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact_nll(o, case.y, case.table, KERNELS, gradient=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hashes', type=int, default=4, help='H')
    parser.add_argument('--buckets', type=int, default=16384, help='B')
    parser.add_argument('--tokenizer', default='mistral')
    parser.add_argument('--tokens', type=int, default=4096, help="n: the head's chunk on a GPU")
    parser.add_argument('--dtype', choices=['bfloat16', 'float32'], default='bfloat16')
    args = parser.parse_args()
    if not torch.cuda.is_available() or no_triton():
        raise InputError(f'this needs a GPU and Triton; here: {no_triton() or "no GPU that torch can use"}')

    from triton.testing import do_bench

    def seconds_of(work):
        return do_bench(work, warmup=25, rep=100, return_mode='median') / 1e3

    tok = get_tokenizer(args.tokenizer)
    signatures = signature_table(tok.tokens, args.hashes, args.buckets, pad_id=tok.pad).astype('int64')
    case = random_case(torch.tensor(signatures).cuda(), args.buckets, args.tokens, getattr(torch, args.dtype))
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}')
    print(f'{args.tokens:,} tokens, H={args.hashes}, B={args.buckets:,}, V={len(signatures):,}')
    measure(case, seconds_of)
    counted = sum(bytes_allocated(case))
    print(f'memory {peak_memory(case) / 1e9:.3f} GB, counted {counted / 1e9:.3f}')


def measure(case, seconds_of):
    """Prints how exact the kernels are, their times beside the sums in columns, and the sizes that are the fastest."""
    n = len(case.y)
    distance = exactness(case)
    print(f'to the sums in columns: -log P {distance["nll"]:.1e}, gradient {distance["gradient"]:.1e} relative')
    print('a second time: ' + ('the same bits' if distance['same_bits'] else 'OTHER BITS'))
    logits = torch.cat(case.o)
    copy_rate = 2 * logits.nbytes / seconds_of(logits.clone)
    print(f'a copy runs at {copy_rate / 1e9:,.0f} GB/s; times for {PER:,} tokens:')
    o = case.copies()
    moved = bytes_moved(case)
    for name, tiles in (('kernels', KERNELS), ('columns', COLUMNS)):
        for what, gradient in (('-log P and its gradient', True), ('-log P', False)):
            work = functools.partial(exact_nll, o, case.y, case.table, tiles, gradient)
            report(f'{what}, by {name}', seconds_of(work), n)
    for name, work in calls(case, kernels.SIZES).items():
        report(f'{name}, as it is', seconds_of(work), n, moved[name], copy_rate)
    sizes, seconds = fastest(case, seconds_of, copy_rate)
    print(f'fastest: {sizes}, {seconds * 1e3 * PER / n:.2f} ms; as it is: {kernels.SIZES}')


if __name__ == '__main__':
    main()
