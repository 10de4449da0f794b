"""
What the processes of one run need of each other: the same settings and files, and the sums of all. train.py calls the
methods of World in the order in which they stand here. Without torchrun a process is alone: it does not call meet() and
agree(), and the other methods return what they are given.
"""

import inspect
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import InputError


class World:
    """The processes of a run. This one is number `rank` of `size`; `distributed`: torchrun has started them."""

    def __init__(self):
        self.distributed = 'RANK' in os.environ
        try:
            self.rank = int(os.environ.get('RANK', 0))
            self.size = int(os.environ.get('WORLD_SIZE', 1))
        except ValueError:
            self.rank = -1
            self.size = -1
        if not 0 <= self.rank < self.size or self.distributed != ('WORLD_SIZE' in os.environ):
            named = ', '.join(f'{k}={os.environ.get(k)}' for k in ('RANK', 'WORLD_SIZE'))
            raise InputError(f'the environment has {named}; start this with torchrun, or unset them')

    def accumulation(self, batch_size, micro_batch_size):
        """How many micro-batches each process has in an update. Raises InputError where that is no whole number."""
        product = f'micro_batch_size={micro_batch_size} x {self.size} processes'
        if batch_size % (micro_batch_size * self.size):
            fitting = [m for m in range(1, micro_batch_size + 1) if batch_size % (m * self.size) == 0]
            use = f'--micro_batch_size={fitting[-1]}' if fitting else f'a batch_size that is a multiple of {self.size}'
            raise InputError(f'batch_size={batch_size} does not divide by {product}; use {use}')
        return batch_size // (micro_batch_size * self.size)

    def meet(self, device, timeout):
        """Waits until all processes are there, `timeout` seconds at most. Raises InputError."""
        # one graph, although DDP's buckets then wait for all of it
        torch._dynamo.config.optimize_ddp = False
        on_gpu = torch.device(device).type == 'cuda'
        backend = 'nccl' if on_gpu and dist.is_nccl_available() else 'gloo'
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
            # for objects, and to wait for a checkpoint that takes long to write
            self.host = dist.new_group(backend='gloo', timeout=timedelta(days=1))
        except (RuntimeError, ValueError) as e:  # nobody there, an address that is taken, a variable that is not set
            reason = f'did not meet the others within {timeout} s ({" ".join(str(e).split())[:200]})'
            raise InputError(f'process {self.rank} of {self.size} {reason}; start all of them by torchrun') from None

    def agree(self, mine):
        """Ends all processes where `mine`, a dict, is not the same in all of them. Process 0 says what differs."""
        everyone = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.host)
        for r, theirs in enumerate(everyone):
            differing = [f'{k}={theirs.get(k)} (process 0: {v})' for k, v in everyone[0].items() if theirs.get(k) != v]
            if differing:
                line = f'process {r} has {", ".join(differing)}; all need the same settings, files and torch'
                raise SystemExit(1) if self.rank else InputError(line)

    def together(self, read):
        """Returns read() in every process. If it raises InputError in one, all end, and process 0 says why."""
        result = problem = None
        try:
            result = read()
        except InputError as e:
            problem = e
        if self.distributed:
            problems = [None] * self.size
            dist.all_gather_object(problems, problem, group=self.host)
            problem = next((p for p in problems if p), None)
        if problem:
            raise SystemExit(1) if self.rank else problem
        return result

    def of_first(self, value):
        """The value that process 0 has, anything that can be pickled."""
        values = [value]
        if self.distributed:
            dist.broadcast_object_list(values, src=0, group=self.host)
        return values[0]

    def wrap(self, model):
        """The model that is trained: itself, or under DDP, which gives all processes the weights of process 0."""
        device = model.signatures.device
        if self.distributed:
            options = dict(device_ids=[device] if device.type == 'cuda' else None)
            # the buffers never change; torch 2.11 has the older name
            names = inspect.signature(DDP).parameters
            options['forward_sync_buffers' if 'forward_sync_buffers' in names else 'broadcast_buffers'] = False
            # gradients are views of DDP's buckets, so they exist once
            model = DDP(model, gradient_as_bucket_view=True, **options)
        return model

    def sum(self, tensor, device=None):
        """The sum of a tensor over all processes, which is made on `device` if that is not the tensor's."""
        if self.distributed:
            tensor = tensor.to(device)
            dist.all_reduce(tensor)
        return tensor

    def leave(self):
        """Waits for all: when one ends, torchrun ends the others, even a process 0 that is still writing."""
        if self.distributed:
            dist.barrier(group=self.host)
            dist.destroy_process_group()


def explain_crashes(world, checkpoints, device, micro_batch_size):
    """From now on an uncaught error ends this process with one line and no traceback, unless the code is at fault."""

    def explain(error_class, error, traceback):
        if isinstance(error, InputError):
            print(f'error: {error}', file=sys.stderr)
            return
        reason = ' '.join(str(error).split())[:300]
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in reason:
            less = f'a smaller --micro_batch_size (now {micro_batch_size}) or --activation_checkpointing needs less'
            configs = [argument for argument in sys.argv[1:] if not argument.startswith('--')]
            plan = ' '.join(['python bench.py', *configs, '--plan'])
            reason = f'not enough memory on {device} ({reason}); {less}, {plan} says how much'
        elif isinstance(error, dist.DistError) or 'gloo' in reason:
            reason = f'process {world.rank} of {world.size} lost the others ({reason})'
        elif error_class is KeyboardInterrupt:
            reason = 'interrupted'
        else:
            sys.__excepthook__(error_class, error, traceback)
            return
        print(f'error: {reason}; {checkpoints.kept()}', file=sys.stderr)

    sys.excepthook = explain
