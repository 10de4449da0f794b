"""The device to compute on, the precision of its matrix products, and whether it can compile."""

import functools
import importlib
import os
import shutil
import sysconfig
import time
from pathlib import Path

import torch

from configurator import InputError


def pick_device(device=None):
    """
    The device to compute on: what was asked for, else cuda if it is there, else cpu. Apple's mps, on which this was
    never run, must be asked for. Raises InputError for a device that is not there.
    """
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'  # torchrun sets it: a GPU for each process
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as e:
        reason = str(e).splitlines()[0][:100]
        there = f'this machine has {torch.cuda.device_count()} GPUs; leave device out, or start a process for each GPU'
        raise InputError(f'device={device} is not there ({reason}): {there}') from None
    return device


def use_device(device, deterministic):
    """pick_device for training. A GPU becomes the current one and, if `deterministic`, always gives the same bits."""
    device = pick_device(device)
    if torch.device(device).type == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
        if deterministic:
            # cuBLAS reads this when it starts
            os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
    return device


def products_per_second(dtype, size):
    """FLOP/s of a (size, size) product on a core, the best of 16: the first one prepares, others may be held up."""
    x = torch.ones(size, size, dtype=dtype)
    threads = torch.get_num_threads()
    # several would wait for one another, and beside a busy process for its core
    torch.set_num_threads(1)
    seconds = []
    for _ in range(16):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return 2 * size**3 / min(seconds)


def pick_dtype(dtype, device):
    """
    (dtype of the matrix products, '' or why): what was asked for, else bfloat16 if the GPU has it, or if the CPU is
    measured to multiply 1.2 times as fast in it as in float32. Raises InputError for what the device does not have.
    """
    if dtype not in (None, 'bfloat16', 'float32'):
        raise InputError(f'dtype={dtype}: must be bfloat16 or float32 (float16 would need loss scaling)')
    device_type = torch.device(device).type
    if device_type == 'cuda':
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == 'bfloat16' and not has_it:
            name = torch.cuda.get_device_name(device)
            raise InputError(f'dtype=bfloat16: {name} does not have it; use --dtype=float32')
        return dtype or ('bfloat16' if has_it else 'float32'), ''
    if dtype or device_type != 'cpu':
        return dtype or 'float32', ''
    names = ('bfloat16', 'float32')
    # larger ones take longer than a process may run on beside busy ones, so that each of them would be held up
    for size in (256, 512):
        rates = {name: products_per_second(getattr(torch, name), size) for name in names}
        # a CPU without instructions for bfloat16 would need seconds for a large product
        if rates['bfloat16'] < rates['float32'] / 2:
            break
    dtype = 'bfloat16' if rates['bfloat16'] > 1.2 * rates['float32'] else 'float32'
    measured = ', '.join(f'{rate / 1e9:,.0f} GFLOP/s in {name}' for name, rate in rates.items())
    return dtype, f'a core multiplies at {measured}'


def pick_compile(compile, device):
    """
    (whether to use torch.compile, '' or why it cannot be used): what was asked for, else True on a GPU where there are
    Triton and a C compiler. Raises InputError.
    """
    if compile not in (None, True, False):
        raise InputError(f'compile={compile}: must be True or False')
    on_gpu = torch.device(device).type == 'cuda'
    missing = no_triton() if on_gpu else no_compiler('CXX', 'g++', 'clang++')
    if compile and missing:
        raise InputError(f'compile=True: {missing}; or leave --compile out')
    if compile is None:
        compile = on_gpu and not missing
    return compile, missing


def no_compiler(variable, *names):
    """'' if there is the compiler that an environment variable names, or one of `names`; otherwise what is missing."""
    compilers = os.environ.get(variable, '').split()[:1] or names
    if any(map(shutil.which, compilers)):
        return ''
    return f'no C compiler: install {" or ".join(names)}, or name one in ${variable}'


@functools.cache
def no_triton():
    """
    Why Triton cannot compile for this machine's GPU, or ''. torch.compile and the kernels of kernels.py need it there.
    Triton itself needs a C compiler and Python's headers.
    """
    try:
        version = importlib.import_module('triton').__version__
    except ImportError:
        return 'no package triton: pip install triton, on Linux'
    if tuple(int(n) for n in version.split('.')[:2]) < (3, 6):
        return f'triton {version} is older than 3.6; use torch 2.11 or newer, which brings it'
    # where Triton looks, too; Ubuntu's default scheme names another folder, which is empty
    headers = Path(sysconfig.get_path('include', 'posix_prefix'))
    if not (headers / 'Python.h').exists():
        return f"no Python.h in {headers} (Debian's package python3-dev has it)"
    return no_compiler('CC', 'gcc', 'clang')
