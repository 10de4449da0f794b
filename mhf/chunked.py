"""
ChunkedMHF: model.MHF for training and evaluation, which processes the positions of the head in chunks.

The head of a batch would store H x B bucket logits per position. ChunkedMHF runs model.py's head for one chunk of
positions at a time, inside the forward pass of one autograd.Function (HeadLoss). It takes the gradients of the chunk
with autograd and adds them up, so one chunk's graph exists at a time, and nothing is computed twice.

Two functions of model.py have a second implementation here, because gathers are slow: log_normalizer and token_logits.
They transpose a few positions at a time, so that the logits of a bucket are one row ("columns"), and sum rows with
embedding_bag. On an NVIDIA GPU with Triton, the kernels of kernels.py compute log_normalizer instead. The first call of
a model compares both with model.py's. If they are deleted, model.py's run.
"""

import contextlib
import functools
import itertools
import math
import operator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import InputError
from mhf.runtime import no_triton
from model import MHF, MHFConfig, upcast

CPU_COLUMNS = 32  # fit in a CPU's cache: a position takes 154, 42 and 131 us with 16, 32 and 256 columns
GPU_COLUMNS = 512

# -----------------------------------------------------------------------------
# chunk size


def default_chunk(device_type, config):
    """
    Returns the largest number of positions that the head processes together. It must not depend on anything else, such
    as free memory, or a resumed run would round differently.
    """
    num_logits = config.num_coordinates * config.buckets_per_coordinate
    if device_type == 'cuda':
        # bytes per position: bfloat16 logits, probabilities and their gradient; float32 token logits
        bytes_per_position = 6 * num_logits + 4 * config.vocab_size
        return min(4096, 2 ** int(math.log2(2.2e9 / bytes_per_position)))
    # every chunk reads all of E, so chunks are large; their logits take up to 32 MiB at d=256, and 96 MiB at d=768
    return max(64, min(512, 2 ** int(math.log2(2**15 * config.hidden_size / num_logits))))


# -----------------------------------------------------------------------------
# signature index


class SignatureIndex(NamedTuple):
    """The signature table as rows of E, and its inverse, the tokens of a row of E."""

    token_mask: Tensor  # (V,) bool
    unused_ids: Tensor  # int64: ids without a token
    rows: Tensor  # (V, H) int32: signatures as rows of E, which has H*B rows
    row_offsets: Tensor  # (V + 1,) int32: the rows of token w are rows.flatten()[row_offsets[w] : row_offsets[w + 1]]
    ids: Tensor  # (tokens * H,) int32: token ids sorted by their rows of E
    id_offsets: Tensor  # (H*B + 1,) int32: row r belongs to the tokens ids[id_offsets[r] : id_offsets[r + 1]]


def invert_table(signatures, token_mask, B):
    """Signatures (V, H) int64, token_mask (V,) bool -> SignatureIndex on the same device."""
    device = signatures.device
    table = signatures.cpu().numpy()
    V, H = table.shape
    used_ids = token_mask.cpu().numpy().nonzero()[0]
    rows = table + B * np.arange(H)
    used_rows = rows[used_ids].T.ravel()
    row_ends = np.bincount(used_rows, minlength=H * B).cumsum()
    sorted_ids = np.tile(used_ids, H)[used_rows.argsort(kind='stable')]

    def int32(array):
        return torch.from_numpy(array.astype(np.int32)).to(device)

    return SignatureIndex(
        token_mask=token_mask,
        unused_ids=token_mask.logical_not().nonzero()[:, 0],
        rows=int32(rows),
        row_offsets=int32(np.arange(0, V * H + 1, H)),
        ids=int32(sorted_ids),
        id_offsets=int32(np.concatenate([[0], row_ends])),
    )


# -----------------------------------------------------------------------------
# sums over the vocabulary: in columns, or with kernels


def token_logits_in_columns(o, index):
    """Bucket logits, list of H (m, B) -> token logits (V, m), one row per token, float32 or better."""
    columns = upcast(torch.cat([o_i.T for o_i in o]))  # (H*B, m)
    logits = F.embedding_bag(index.rows.flatten(), columns, index.row_offsets, mode='sum', include_last_offset=True)
    return logits.index_fill_(0, index.unused_ids, -torch.inf)


def log_normalizer_in_columns(o, index, gradient):
    """The results of vocab_log_normalizer, for any device."""
    bucket_gradient = empty_bucket_gradient(o, gradient)
    normalizer = []
    start = 0
    for part in split_columns(o):
        logits = token_logits_in_columns(part, index)  # (V, m)
        top = logits.amax(dim=0, keepdim=True)
        P = logits.sub_(top).exp_()
        total = P.sum(dim=0, keepdim=True)
        normalizer.append((top + total.log())[0])
        if gradient:
            P.div_(total)
            g = F.embedding_bag(index.ids, P, index.id_offsets, mode='sum', include_last_offset=True)  # (H*B, m)
            bucket_gradient[:, start : start + P.shape[1]] = g.unflatten(0, (len(o), -1)).transpose(1, 2)
            start += P.shape[1]
    return torch.cat(normalizer), bucket_gradient


def split_columns(tensors):
    """Tensors (n, ...) -> tuples of (m, ...), the same for a few positions at a time."""
    size = CPU_COLUMNS if tensors[0].device.type == 'cpu' else GPU_COLUMNS
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def empty_bucket_gradient(o, gradient):
    """An uninitialized (H, n, B) for the gradient of log_normalizer, or an empty tensor."""
    return o[0].new_empty(len(o), *o[0].shape) if gradient else o[0].new_empty(0)


def has_kernels(device):
    """Returns whether the kernels of kernels.py run on this device."""
    return device.type == 'cuda' and torch.version.hip is None and not no_triton()


@torch.library.custom_op('mhf::vocab_log_normalizer', mutates_args=())
def vocab_log_normalizer(
    o: list[Tensor], index: list[Tensor], gradient: bool, use_kernels: bool | None
) -> tuple[Tensor, Tensor]:
    """
    MHF.log_normalizer as an operator, which torch.compile does not trace: bucket logits, H of (n, B), and the tensors
    of a SignatureIndex -> the logsumexp of the token logits (n,), float32 or better, and its gradient (H, n, B), or an
    empty tensor. The gradient of bucket b of o_i is the sum of P(w) over all tokens w with s_i(w) = b.
    """
    index = SignatureIndex(*index)
    if not (has_kernels(o[0].device) if use_kernels is None else use_kernels):
        return log_normalizer_in_columns(o, index, gradient)
    from mhf.kernels import log_normalizer  # needs the package triton

    return log_normalizer([o_i.contiguous() for o_i in o], index, gradient)


@vocab_log_normalizer.register_fake
def _(o, index, gradient, use_kernels):
    return upcast(o[0].new_empty(len(o[0]))), empty_bucket_gradient(o, gradient)


def save_bucket_gradient(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def scale_bucket_gradient(ctx, scale, _):
    """scale (n,), the gradient of the logsumexp -> the gradients of the operator's four arguments."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError('log_normalizer has no second derivative; omit create_graph=True, or use model.MHF')
    (bucket_gradient,) = ctx.saved_tensors
    # in place: a second backward pass is an error
    return list(bucket_gradient.mul_(scale[:, None])), [None] * len(SignatureIndex._fields), None, None


vocab_log_normalizer.register_autograd(scale_bucket_gradient, setup_context=save_bucket_gradient)

# -----------------------------------------------------------------------------
# the model


class ChunkedMHF(MHF):
    """
    MHF whose head processes the positions in chunks: same parameters, names and results. No (n, H*B) tensor of a
    complete batch is stored. A loss must be a sum over positions.

    use_kernels: whether log_normalizer uses the Triton kernels; None: on an NVIDIA GPU with Triton.
    """

    def __init__(self, config, table=None, unused_ids=()):
        super().__init__(config, table, unused_ids)
        self.use_kernels = None
        self.max_chunk = None  # positions, set by tests only; None: default_chunk
        self.chunk_loss = MHF.head_loss  # compile() replaces it
        self.chunk_matrices = None  # the E_i while a chunk is computed
        self.is_checked = False  # whether check_second_implementations has run
        self.index = None  # the SignatureIndex
        self.indexed = (None, None)  # the two tensors that it was computed from
        self.indexed_versions = None  # their versions

    def compile(self, **options):
        """
        Compiles the Hash Encoder, each block, the final norm and the loss of a chunk. Blocks share one compilation.
        Parameters are arguments of the compiled graphs, so a copy of the model computes with its own.
        """
        for module in (self.encoder, *self.layers, self.norm):
            if module is not None:
                module.compile(**options)
        self.chunk_loss = torch.compile(MHF.head_loss, fullgraph=True, **options)

    # ---- the two second implementations

    def token_logits(self, o):
        index = self.signature_index()
        if not self.config.num_hashes and not len(index.unused_ids):
            return upcast(o[0])
        # gathers are faster for a few positions
        if not self.config.num_hashes or len(o[0]) <= 16:
            return super().token_logits(o)
        parts = [token_logits_in_columns(part, index).T for part in split_columns(o)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def log_normalizer(self, o):
        index = list(self.signature_index())
        return vocab_log_normalizer(o, index, torch.is_grad_enabled(), self.use_kernels)[0]

    def signature_index(self):
        """The SignatureIndex of the vocabulary, computed again if the vocabulary has changed."""
        if torch.compiler.is_compiling():
            return self.index
        tensors = (self.signatures, self.token_mask)
        # an inference tensor has no version
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        if versions != self.indexed_versions or any(map(operator.is_not, tensors, self.indexed)):
            self.index = invert_table(*tensors, self.config.buckets_per_coordinate)
            self.indexed = tensors
            self.indexed_versions = versions
        return self.index

    # ---- chunks

    def head_matrices(self):
        return self.chunk_matrices or super().head_matrices()

    def split_positions(self, *tensors):
        """Splits tensors (n, ...) evenly into chunks of at most max_chunk positions -> [tuple of views]."""
        max_chunk = self.max_chunk or default_chunk(self.embed.weight.device.type, self.config)
        num_chunks = max(1, -(-len(tensors[0]) // max_chunk))
        return list(zip(*(tensor.tensor_split(num_chunks) for tensor in tensors), strict=True))

    @contextlib.contextmanager
    def shared_matrices(self):
        """
        Computes all chunks with the same E_i, which are detached and, under autocast, converted once. Yields the E_i of
        model.py and the detached E_i.
        """
        matrices = super().head_matrices()
        dtype = matrices[0].dtype
        device_type = matrices[0].device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        self.chunk_matrices = [E_i.detach().to(dtype) for E_i in matrices]
        try:
            yield matrices, self.chunk_matrices
        finally:
            self.chunk_matrices = None

    @torch.no_grad()
    def map_chunks(self, function, h, y):
        """Calls a function of (h, y) for each chunk. Returns the list of results."""
        self.check_second_implementations(h)
        with self.shared_matrices():
            return [function(*chunk) for chunk in self.split_positions(h, y)]

    def head_loss(self, h, y):
        if not torch.is_grad_enabled():
            return sum(self.map_chunks(super().head_loss, h, y))
        self.check_second_implementations(h)
        return HeadLoss.apply(self, h, y, *(p for p in self.parameters() if p.requires_grad))

    def losses_per_position(self, h, y, losses):
        """As in MHF, without gradients."""
        function = functools.partial(super().losses_per_position, losses=losses)
        return [torch.cat(parts) for parts in zip(*self.map_chunks(function, h, y), strict=True)]

    def predict(self, h, ids):
        return [torch.cat(parts) for parts in zip(*self.map_chunks(super().predict, h, ids), strict=True)]

    def predict_from_logits(self, o, ids):
        results = [MHF.predict_from_logits(self, o, ids) for *o, ids in split_columns([*o, ids])]
        return [torch.cat(part) for part in zip(*results, strict=True)]

    def next_token_logits(self, h):
        self.check_second_implementations(h)
        with self.shared_matrices():
            return super().next_token_logits(h)

    @torch.no_grad()
    def check_second_implementations(self, h):
        """
        On the first call, compares token_logits and log_normalizer, with its gradient, with those of model.py on up to
        8 positions. Raises RuntimeError if they differ by more than rounding.
        """
        if torch.compiler.is_compiling():
            return
        self.signature_index()  # compiled code uses the last one
        if self.is_checked:
            return
        o = self.bucket_logits(h[:8])
        many = [o_i.repeat(3, 1) for o_i in o]  # token_logits uses columns for more than 16 positions
        pairs = dict(token_logits=([self.token_logits(many)], [MHF.token_logits(self, many)]))
        if self.config.num_hashes:  # the Standard model does not use it
            functions = (self.log_normalizer, functools.partial(MHF.log_normalizer, self))
            pairs['log_normalizer'] = [value_and_gradient(function, o) for function in functions]
        differing = [name for name, pair in pairs.items() if any(map(differ, *pair))]
        if differing:
            names = ' and '.join(differing)
            fix = f'change {names} of ChunkedMHF (mhf/chunked.py) as well, or delete them there'
            raise RuntimeError(f'model.py and mhf/chunked.py compute different {names}; {fix}')
        torch.clear_autocast_cache()  # of weights converted without gradients
        self.is_checked = True


def differ(measured, expected):
    """Returns whether two tensors differ by more than rounding, or in which values are not finite."""
    finite = expected.isfinite()
    error = (measured - expected)[finite].norm()
    is_close = error <= torch.finfo(measured.dtype).eps ** 0.5 * expected[finite].norm()
    return not (is_close and torch.equal(measured.isfinite(), finite))


def value_and_gradient(function, o):
    """A function of bucket logits, list of H (n, B) -> [its value, and the gradients of its sum with respect to o]."""
    o = [o_i.detach().requires_grad_() for o_i in o]
    with torch.enable_grad():
        value = function(o)
    return [value.detach(), *torch.autograd.grad(value, o, torch.ones_like(value))]


class HeadLoss(torch.autograd.Function):
    """
    The sum of MHF.head_loss over chunks. forward() also computes the gradients with respect to h, the E_i and the
    parameters, one chunk at a time. Hooks of parameters (Tensor.register_hook) run for each chunk that reads them, and
    again for the sum. Supports one backward pass and first derivatives.
    """

    @staticmethod
    def forward(ctx, model, h, y, *parameters):
        """
        Args: model, a ChunkedMHF; h (n, d); y (n, H); its parameters that require a gradient.
        Returns: the sum of the loss, a scalar.
        """
        dh = torch.zeros_like(h)
        loss = 0
        with torch.enable_grad(), model.shared_matrices() as (matrices, detached):
            trained = [E_i.requires_grad for E_i in matrices]
            matrices = list(itertools.compress(matrices, trained))
            inputs = [*parameters, *(E_i.requires_grad_() for E_i in itertools.compress(detached, trained))]
            sums = [None] * len(inputs)
            for h_chunk, y_chunk, dh_chunk in model.split_positions(h, y, dh):
                h_chunk = h_chunk.detach().requires_grad_()
                chunk_loss = model.chunk_loss(model, h_chunk, y_chunk)
                dh_of_chunk, *gradients = torch.autograd.grad(chunk_loss, [h_chunk, *inputs], allow_unused=True)
                dh_chunk.copy_(dh_of_chunk)
                sums = list(map(add_gradient, sums, gradients))
                loss += chunk_loss.detach()
        gradients = sums[: len(parameters)]
        if matrices:  # from the E_i to the parameters
            sums_of_matrices = sums[len(parameters) :]
            through_matrices = torch.autograd.grad(matrices, parameters, sums_of_matrices, allow_unused=True)
            gradients = list(map(add_gradient, gradients, through_matrices))
        ctx.gradients = [dh, None, *gradients]
        return loss

    @staticmethod
    def backward(ctx, scale):
        if torch.is_grad_enabled():
            raise RuntimeError('the head has no second derivative; omit create_graph=True, or use model.MHF')
        if ctx.gradients is None:
            raise RuntimeError('the head supports one backward pass; call the model again')
        gradients = [None if gradient is None else gradient.mul_(scale) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, *gradients


def add_gradient(total, gradient):
    """Adds the gradient of a chunk to the sum over chunks, in float32 or better; None is 0. Returns the sum."""
    if gradient is None:
        return total
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    if total.device.type != 'cpu' or total.dtype == gradient.dtype:
        return total.add_(gradient)
    # add_ makes a converted copy of the gradient; with 1,024 rows at a time it stays in the cache (16.8 -> 2.5 ms)
    for total_rows, rows in zip(total.split(1024), gradient.split(1024), strict=True):
        total_rows += rows
    return total


# -----------------------------------------------------------------------------
# construction


def make_config(settings, **fields):
    """Returns the MHFConfig of a script's settings and further fields. Raises InputError for settings out of range."""
    fields |= {name: value for name, value in settings.items() if name in MHFConfig.__annotations__}
    try:
        return MHFConfig(**fields)
    except ValueError as e:
        raise InputError(e) from None


def build_on_meta(config, Model=ChunkedMHF):
    """Builds a model on the meta device, without memory and random draws, for load_state_dict(state, assign=True)."""
    with torch.device('meta'):
        return Model(config)
