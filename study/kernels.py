"""
Times the Triton kernels of mhf/kernels.py on this machine's GPU, in several block sizes, and compares them with a plain
copy and with the sums in columns. Also prints their errors and their memory.

    $ python -m study.kernels                                     # H4B16K, 32,768 tokens
    $ python -m study.kernels --buckets=7966                      # a width that is no multiple of 16
    $ python -m study.kernels --tokenizer=tekken                  # 131,072 tokens

Copy the fastest sizes to kernels.Sizes. tests/compile_kernels.py prints registers and shared memory of other sizes
without a GPU.
"""

import argparse
import functools
from typing import NamedTuple

import torch
from torch import Tensor

import configurator
from configurator import InputError
from hashing import signature_table
from mhf import kernels
from mhf.fused import ChunkSizes, SignatureIndex, exact_nll, invert_table
from mhf.kernels import Sizes
from mhf.runtime import no_triton
from mhf.tokenizers import get_tokenizer

POSITIONS = (32, 64, 128)  # per block
# {kernel: sizes to try with each of POSITIONS}
CANDIDATES = dict(
    transpose=[dict(transpose_warps=4), dict(transpose_warps=8)],
    logsumexp=[
        dict(tokens=32, logsumexp_warps=4),
        dict(tokens=64, logsumexp_warps=4),
        dict(tokens=64, logsumexp_warps=8),
        dict(tokens=128, logsumexp_warps=8),
    ],
    backward=[
        dict(buckets=8, backward_warps=1),
        dict(buckets=16, backward_warps=2),
        dict(buckets=16, backward_warps=4),
        dict(buckets=32, backward_warps=4),
    ],
)
KERNELS = ChunkSizes(chunk=4096, block=4096, columns=512, use_kernels=True)
COLUMNS = KERNELS._replace(use_kernels=False)
MICRO_BATCH = 16384  # positions that times are printed for: 8 x 2,048


class Case(NamedTuple):
    """Inputs of the kernels."""

    index: SignatureIndex
    o: list[Tensor]  # bucket logits, H of (n, B)
    y: Tensor  # (n, H), signatures of the targets

    def copies(self):
        return [o_i.clone() for o_i in self.o]


def build_index(signatures, token_mask, B):
    """Signatures (V, H) int64 and token_mask (V,) bool, tensors -> SignatureIndex on the same device."""
    inverse = invert_table(signatures.cpu().numpy(), token_mask.cpu().numpy(), B)
    tensors = {name: torch.tensor(array, device=signatures.device) for name, array in inverse.items()}
    return SignatureIndex(signatures, token_mask, **tensors, standard=False)


def random_case(signatures, B, n, dtype):
    """Signatures (V, H) -> n random bucket logits and targets, the same in each run."""
    torch.manual_seed(0)
    V, H = signatures.shape
    device = signatures.device
    index = build_index(signatures, torch.ones(V, dtype=torch.bool, device=device), B)
    o = [torch.randn(n, B, device=device, dtype=dtype) for _ in range(H)]
    return Case(index, o, signatures[torch.randint(V, (n,), device=device)])


def exactness(case):
    """
    Compares the kernels with the sums in columns: nll, the largest difference of -log P in nats; gradient, the relative
    difference; same_bits, whether a second call gives equal bits.
    """
    gradient = case.copies()
    again = case.copies()
    expected_gradient = case.copies()
    nll = exact_nll(gradient, case.y, case.index, KERNELS, gradient=True)
    nll_again = exact_nll(again, case.y, case.index, KERNELS, gradient=True)
    expected = exact_nll(expected_gradient, case.y, case.index, COLUMNS, gradient=True)
    pairs = list(zip(gradient, expected_gradient, strict=True))
    distance = sum((a.double() - b.double()).square().sum() for a, b in pairs).sqrt()
    length = sum(b.double().square().sum() for _, b in pairs).sqrt()
    same_bits = torch.equal(nll, nll_again) and all(map(torch.equal, gradient, again))
    return dict(nll=(nll - expected).abs().max().item(), gradient=(distance / length).item(), same_bits=same_bits)


def bytes_allocated(case):
    """Bytes that a gradient allocates temporarily: (transposed bucket logits, token logits)."""
    bucket_logits = sum(o_i.numel() * o_i.element_size() for o_i in case.o)
    return bucket_logits, 4 * len(case.y) * len(case.index.rows)


def kernel_calls(case, sizes):
    """{kernel: (a function without arguments that calls it, bytes that it moves if the cache holds repeated reads)}."""
    index = case.index
    transposed = kernels.transpose(case.o, sizes)
    logits, lse = kernels.logsumexp(transposed, index.rows, index.token_mask, True, sizes)
    gradient = case.copies()
    inverse = [index.ids, index.offsets]
    bucket_logits, token_logits = bytes_allocated(case)
    logsumexp = functools.partial(kernels.logsumexp, transposed, index.rows, index.token_mask, sizes=sizes)
    return {
        'transpose': (lambda: kernels.transpose(case.o, sizes), 2 * bucket_logits),
        'logsumexp': (lambda: logsumexp(keep_logits=True), bucket_logits + token_logits),
        'backward': (
            lambda: kernels.backward(gradient, case.y, logits, lse, inverse, sizes),
            token_logits + bucket_logits,
        ),
        'logsumexp, no gradient': (lambda: logsumexp(keep_logits=False), bucket_logits),
    }


def find_fastest(case, measure_seconds, copy_rate):
    """Times every kernel in all sizes and prints a line for each. Returns the fastest Sizes and their total seconds."""
    totals = {}
    for positions in POSITIONS:
        best = Sizes(positions=positions)
        total = 0.0
        for kernel, candidates in CANDIDATES.items():
            times = {}
            for change in candidates:
                sizes = Sizes(positions=positions)._replace(**change)
                call, moved = kernel_calls(case, sizes)[kernel]
                times[sizes] = measure_seconds(call)
                what = ', '.join(f'{field} {value}' for field, value in (dict(positions=positions) | change).items())
                report(f'{kernel}: {what}', times[sizes], len(case.y), moved, copy_rate)
            fastest = min(times, key=times.get)
            total += times[fastest]
            best = best._replace(**{field: getattr(fastest, field) for field in candidates[0]})
        totals[best] = total
    return min(totals, key=totals.get), min(totals.values())


def report(what, seconds, n, moved=None, copy_rate=None):
    """Prints the time of n positions, and the bytes per second compared with a copy."""
    line = f'{what:<66}{seconds * 1e3 * MICRO_BATCH / n:8.2f} ms'
    if moved:
        line += f'{moved / seconds / 1e9:8,.0f} GB/s{moved / seconds / copy_rate:6.0%} of a copy'
    print(line, flush=True)


def peak_memory(case):
    """The peak memory of the operator in bytes, without its arguments."""
    o = case.copies()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact_nll(o, case.y, case.index, KERNELS, gradient=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case, measure_seconds):
    """Prints errors and times of the kernels, and their fastest sizes."""
    n = len(case.y)
    errors = exactness(case)
    print(f'compared with columns: -log P {errors["nll"]:.1e}, gradient {errors["gradient"]:.1e} relative')
    print('a second call: ' + ('equal bits' if errors['same_bits'] else 'OTHER BITS'))
    logits = torch.cat(case.o)
    copy_rate = 2 * logits.nbytes / measure_seconds(logits.clone)
    print(f'a copy runs at {copy_rate / 1e9:,.0f} GB/s; times for {MICRO_BATCH:,} positions:')
    o = case.copies()
    for name, sizes in (('kernels', KERNELS), ('columns', COLUMNS)):
        for what, gradient in (('-log P and its gradient', True), ('-log P', False)):
            call = functools.partial(exact_nll, o, case.y, case.index, sizes, gradient)
            report(f'{what}, {name}', measure_seconds(call), n)
    for name, (call, moved) in kernel_calls(case, kernels.SIZES).items():
        report(f'{name}, current sizes', measure_seconds(call), n, moved, copy_rate)
    sizes, seconds = find_fastest(case, measure_seconds, copy_rate)
    print(f'fastest: {sizes}, {seconds * 1e3 * MICRO_BATCH / n:.2f} ms; current: {kernels.SIZES}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hashes', type=int, default=4, help='H')
    parser.add_argument('--buckets', type=int, default=16384, help='B')
    parser.add_argument('--tokenizer', default='mistral')
    parser.add_argument('--positions', type=int, default=4096, help="n: the head's chunk on a GPU")
    parser.add_argument('--dtype', choices=['bfloat16', 'float32'], default='bfloat16')
    args = parser.parse_args()
    if not torch.cuda.is_available() or no_triton():
        raise InputError(f'this needs a GPU and Triton; here: {no_triton() or "no GPU that torch can use"}')

    from triton.testing import do_bench

    def measure_seconds(call):
        return do_bench(call, warmup=25, rep=100, return_mode='median') / 1e3

    tok = get_tokenizer(args.tokenizer)
    signatures = signature_table(tok.tokens, args.hashes, args.buckets, pad_id=tok.pad).astype('int64')
    case = random_case(torch.tensor(signatures).cuda(), args.buckets, args.positions, getattr(torch, args.dtype))
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}')
    print(f'{args.positions:,} positions, H={args.hashes}, B={args.buckets:,}, V={len(signatures):,}')
    measure(case, measure_seconds)
    counted = sum(bytes_allocated(case))
    print(f'memory {peak_memory(case) / 1e9:.3f} GB, counted {counted / 1e9:.3f}')


if __name__ == '__main__':
    configurator.install_excepthook()
    main()
