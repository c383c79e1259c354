"""Models with one odd thing each: they train as in plain PyTorch, or are refused in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attack import odd_nets as nets
from benchmarks.attack.odd_try import Odd, attempt, vectors
from benchmarks.attack.result import Result
from benchmarks.attack.odd_nets import Net, net


@dataclass
class Record:
    x: Tensor
    y: Tensor


@dataclass
class Deep:
    x: Tensor
    more: Record


def _record(generator: torch.Generator) -> Any:
    return Record(**vectors(generator))


def _scaled(generator: torch.Generator) -> Any:
    return vectors(generator) | {"scale": torch.tensor(2.0, dtype=torch.float64)}


def _none(generator: torch.Generator) -> Any:
    return vectors(generator) | {"mask": None}


def _flag(generator: torch.Generator) -> Any:
    return vectors(generator) | {"scale": 3.0}


def _pair(generator: torch.Generator) -> Any:
    return tuple(vectors(generator).values())


def _named(generator: torch.Generator) -> Any:
    return nets.Given(*vectors(generator).values())


def _lengths(generator: torch.Generator) -> Any:
    return vectors(generator) | {"n": torch.randint(1, 4, (8,), generator=generator)}


def _nested(generator: torch.Generator) -> Any:
    given = vectors(generator)
    return {"x": {"inner": given["x"]}, "y": given["y"]}


ODD: dict[str, Odd] = {
    "plain": Odd(Net),
    "vmap": Odd(nets.Vmapped, "refused"),
    "cond": Odd(nets.Cond, "refused"),
    "while_loop": Odd(nets.Loop, "refused"),
    "gradient_penalty": Odd(nets.Penalty, "refused"),
    "inner_grad": Odd(nets.InnerGrad, "refused"),
    "func_grad": Odd(nets.FuncGrad, "refused"),
    "functional_call": Odd(nets.Functional),
    "parameter_lists": Odd(nets.Lists),
    "module_twice": Odd(nets.Twice),
    "module_shared": Odd(nets.Shared),
    "in_place_on_copy": Odd(nets.OnInput),
    "in_place_on_input": Odd(nets.OnGivenInput),
    "written_views": Odd(net(nets.written_views)),
    "masked_writes": Odd(net(nets.masked_writes)),
    "fft": Odd(nets.Fourier),
    "complex_parameter": Odd(nets.Complex),
    "complex_spectral": Odd(nets.ComplexSpectral),
    "complex_buffer": Odd(nets.ComplexBuffer),
    "packed_bits": Odd(nets.Packed),
    "pack_padded": Odd(nets.PackedSequence, "refused"),
    "pack_padded_lengths": Odd(nets.GivenLengths, "refused", draw=_lengths),
    "lstm": Odd(partial(nets.Sequence, nn.LSTM)),
    "lstm_two": Odd(partial(nets.Sequence, nn.LSTM, num_layers=2, bidirectional=True)),
    "gru": Odd(partial(nets.Sequence, nn.GRU)),
    "rnn": Odd(partial(nets.Sequence, nn.RNN)),
    "embedding": Odd(nets.Sparse),
    "embedding_sparse": Odd(partial(nets.Sparse, sparse=True)),
    "embedding_freq": Odd(partial(nets.Sparse, scale_grad_by_freq=True)),
    "embedding_padding": Odd(partial(nets.Sparse, padding_idx=1)),
    "embedding_max_norm": Odd(partial(nets.Sparse, max_norm=1.0), "refused"),
    "scripted": Odd(nets.Scripted, "refused"),
    "jit_traced": Odd(nets.JitTraced, "refused"),
    "scripted_function": Odd(nets.ScriptedFunction),
    "torch_compiled": Odd(nets.Compiled),
    "compiled_function": Odd(nets.CompiledFunction),
    "dynamo_disabled": Odd(nets.Dynamo),
    "frozen": Odd(nets.Frozen),
    "thawed_inside": Odd(nets.Thawed, "refused"),
    "frozen_inside": Odd(nets.FrozenInside, "refused"),
    "by_data": Odd(nets.ByData),
    "data_written": Odd(nets.DataWritten, "refused"),
    "data_assigned": Odd(nets.DataAssigned, "refused"),
    "updated": Odd(nets.Updated, "refused"),
    "averaged": Odd(nets.Averaged),
    "detached_in_place": Odd(net(nets.detached)),
    "data_of_hidden": Odd(net(nets.by_data), "refused"),
    "no_grad_in_place": Odd(nets.NoGrad, "refused"),
    "detach_in_place": Odd(net(nets.through_detach), "refused"),
    "bits_in_place": Odd(nets.BitsInPlace),
    "autocast": Odd(nets.Autocast, "refused"),
    "half": Odd(nets.Half),
    "keyword_only": Odd(nets.KeywordOnly),
    "star": Odd(nets.Star, draw=_pair),
    "loss_none": Odd(partial(nets.Returns, lambda x: None), "refused"),
    "loss_tuple": Odd(partial(nets.Returns, lambda x: (x, 1)), "refused"),
    "loss_dict": Odd(partial(nets.Returns, lambda x: {"loss": x, "n": 1})),
    "loss_named": Odd(partial(nets.Returns, lambda x: nets.Given(x, 1))),
    "loss_many": Odd(partial(nets.Returns, lambda x: x.expand(2)), "refused"),
    "dataclass_batch": Odd(Net, draw=_record),
    "named_batch": Odd(nets.Star, draw=_named),
    "scalar_input": Odd(nets.Scaled, draw=_scaled),
    "number_input": Odd(nets.Scaled, "refused", draw=_flag),
    "none_input": Odd(nets.Optional_, draw=_none),
    "nested_batch": Odd(Net, "refused", draw=_nested),
    "nested_tensor": Odd(nets.Nested, "refused"),
    "sparse_buffer": Odd(nets.SparseProduct, "refused"),
    "data_parallel": Odd(nets.Parallel),
    "plain_attribute": Odd(nets.PlainAttribute, "refused"),
    "grown_buffer": Odd(nets.GrownBuffer, "refused"),
    "lazy": Odd(lambda: nets.Normed(nn.LazyBatchNorm1d), "refused"),
    "batch_norm": Odd(partial(nets.Normed, lambda: nn.BatchNorm1d(8))),
    "batch_norm_no_stats": Odd(
        partial(nets.Normed, lambda: nn.BatchNorm1d(8, track_running_stats=False))
    ),
    "batch_norm_average": Odd(
        partial(nets.Normed, lambda: nn.BatchNorm1d(8, momentum=None)), "refused"
    ),
    "group_norm": Odd(partial(nets.Normed, lambda: nn.GroupNorm(2, 8))),
    "evaluated": Odd(nets.Evaluated),
    "own_function_with_effect": Odd(nets.WithEffect),
    "backward_inside": Odd(nets.Backward, "refused"),
    "unfold": Odd(nets.Unfolded),
}


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Each model of the table; `size` percent of them."""
    for index, (name, odd) in enumerate(ODD.items()):
        if index * size // 100 != (index + 1) * size // 100:
            yield attempt(name, odd)
