"""
What the processes of one run need of each other: weights and settings of one kind, gradients and sums of all. train.py
calls the methods of World in the order in which they stand here. Without torchrun a process is alone: meet() and
agree() are not called, and the others give back what they are given.
"""

import inspect
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from checkpoint import map_tensors
from configurator import InputError
from model import without_weights


class World:
    """All processes of a run: this one is `rank` of `size`; they are `distributed` if torchrun has started them."""

    def __init__(self):
        self.distributed = 'RANK' in os.environ
        try:
            self.rank, self.size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
        except ValueError:
            self.rank, self.size = -1, -1
        if not 0 <= self.rank < self.size or self.distributed != ('WORLD_SIZE' in os.environ):
            named = ', '.join(f'{k}={os.environ.get(k)}' for k in ('RANK', 'WORLD_SIZE'))
            raise InputError(f'the environment has {named}; start this with torchrun, or unset them')

    def meet(self, device, backend, timeout):
        """Waits `timeout` seconds for all, and checks that they are as many as each was told. Raises InputError."""
        # one graph, although DDP's buckets then wait for the whole of it; it is here that all import dynamo at once, a
        # second that they would else take in turn: process 0 in DDP, the others in a model on meta
        torch._dynamo.config.optimize_ddp = False
        patience, gpu = timedelta(seconds=timeout), torch.device(device).type == 'cuda'
        try:
            store, *_ = next(dist.rendezvous('env://', timeout=patience))
            numbers = {self.rank: self.size}
            # process 0, which keeps the store, tells the others before it asks them; they ask before they tell
            if self.rank:
                numbers[0] = int(store.get('process 0 of'))
            store.set(f'process {self.rank} of', str(self.size))
            if self.rank == 0:
                numbers |= {r: int(store.get(f'process {r} of')) for r in range(1, self.size)}
            if others := [f'process {r} is one of {number}' for r, number in numbers.items() if number != self.size]:
                raise ValueError(', '.join(others))
            backend = backend or ('nccl' if gpu and dist.is_nccl_available() else 'gloo')
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
            # for objects, and to wait for a checkpoint that takes long to write
            self.host = dist.new_group(backend='gloo', timeout=timedelta(days=1))
        except (RuntimeError, ValueError) as e:  # nobody there, an address that is taken, a variable that is not set
            reason = f'did not meet the others within {timeout} s ({" ".join(str(e).split())[:200]})'
            raise InputError(f'process {self.rank} of {self.size} {reason}; start all of them by torchrun') from None

    def agree(self, mine):
        """Ends all where `mine`, a dict, is not the same in all; process 0 says it."""
        everyone = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.host)
        for r, theirs in enumerate(everyone):
            differing = [f'{k}={theirs.get(k)} (process 0: {v})' for k, v in everyone[0].items() if theirs.get(k) != v]
            if differing:
                line = f'process {r} has {", ".join(differing)}; all need the same settings, files and torch'
                raise SystemExit(1) if self.rank else InputError(line)

    def told_by_first(self, read):
        """
        What read() returns in process 0, an MHF or None, a checkpoint's dict or None, and more; elsewhere their tensors
        have only shapes. Its InputError ends all.
        """
        model, ckpt, more, refused = None, None, [], None
        if self.rank == 0:
            try:
                model, ckpt, *more = read()
            except InputError as e:
                refused = e
        if self.distributed:
            # a single number stays
            shapes = map_tensors(lambda t: t.to('meta') if t.dim() else t, ckpt and {**ckpt, 'model': None})
            told = [(refused, model and model.config, shapes, *more)]
            dist.broadcast_object_list(told, group=self.host)
            if self.rank:
                refused, architecture, ckpt, *more = told[0]
                model = architecture and without_weights(architecture)
        if refused:
            raise SystemExit(1) if self.rank else refused
        return model, ckpt, *more

    def give_weights(self, model, device):
        """Process 0's model -> the same in all, each on its device."""
        model = model.to_empty(device=device) if self.rank else model.to(device)
        for tensor in (*model.parameters(), *model.buffers()) if self.distributed else ():
            dist.broadcast(tensor.detach(), 0)
        return model

    def wrap(self, model):
        """The model as it is trained: as it is, or under DDP."""
        device = model.signatures.device
        if self.distributed:
            # the buffers never change; torch 2.11 has the older name
            names = inspect.signature(DDP).parameters
            how = {'forward_sync_buffers' if 'forward_sync_buffers' in names else 'broadcast_buffers': False}
            how['device_ids'] = [device] if device.type == 'cuda' else None
            # one copy of the gradients, not two: buckets are views of them
            model = DDP(model, gradient_as_bucket_view=True, init_sync=False, **how)
        return model

    def give_moments(self, state, parameters):
        """Process 0's {k: {name: tensor}} -> in all."""
        for k, p in enumerate(parameters):
            for name, tensor in state[k].items():
                if tensor.dim():
                    tensor = torch.empty_like(tensor, device=p.device) if self.rank else tensor.to(p.device)
                    if self.distributed:
                        dist.broadcast(tensor, 0)
                    state[k][name] = tensor

    def sum(self, tensor, device=None):
        """Of all processes; on the device, where that is not the tensor's."""
        if self.distributed:
            tensor = tensor.to(device)
            dist.all_reduce(tensor)
        return tensor

    def leave(self):
        """Waits for all: the first to end makes torchrun end the others, also a process 0 that is still writing."""
        if self.distributed:
            dist.barrier(group=self.host)
            dist.destroy_process_group()
