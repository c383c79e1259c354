"""Models with one odd thing each: they train as in plain PyTorch, or are refused in words."""

import random
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.attack import odd_batches as batches
from benchmarks.attack import odd_nets as nets
from benchmarks.attack import odd_state as state
from benchmarks.attack import odd_values as values
from benchmarks.attack import odd_writes as writes
from benchmarks.attack.odd_nets import Net, net
from benchmarks.attack.odd_try import Odd, attempt, vectors
from benchmarks.attack.result import Result


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
    return batches.Given(*vectors(generator).values())


def _lengths(generator: torch.Generator) -> Any:
    return vectors(generator) | {"n": torch.randint(1, 4, (8,), generator=generator)}


def _nested(generator: torch.Generator) -> Any:
    given = vectors(generator)
    return {"x": {"inner": (None, given["x"])}, "y": given["y"]}


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
    "in_place_on_copy": Odd(writes.OnInput),
    "in_place_on_input": Odd(writes.OnGivenInput),
    "written_views": Odd(net(writes.written_views)),
    "masked_writes": Odd(net(writes.masked_writes)),
    "fft": Odd(values.Fourier),
    "complex_parameter": Odd(values.Complex),
    "complex_spectral": Odd(values.ComplexSpectral),
    "complex_buffer": Odd(values.ComplexBuffer),
    "packed_bits": Odd(values.Packed),
    "pack_padded": Odd(values.PackedSequence, "refused"),
    "pack_padded_lengths": Odd(values.GivenLengths, "refused", draw=_lengths),
    "lstm": Odd(partial(values.Sequence, nn.LSTM)),
    "lstm_two": Odd(partial(values.Sequence, nn.LSTM, num_layers=2, bidirectional=True)),
    "gru": Odd(partial(values.Sequence, nn.GRU)),
    "rnn": Odd(partial(values.Sequence, nn.RNN)),
    "embedding": Odd(values.Sparse),
    "embedding_sparse": Odd(partial(values.Sparse, sparse=True)),
    "embedding_freq": Odd(partial(values.Sparse, scale_grad_by_freq=True)),
    "embedding_padding": Odd(partial(values.Sparse, padding_idx=1)),
    "embedding_max_norm": Odd(partial(values.Sparse, max_norm=1.0), "refused"),
    "scripted": Odd(nets.Scripted, "refused"),
    "jit_traced": Odd(nets.JitTraced, "refused"),
    "scripted_function": Odd(nets.ScriptedFunction),
    "torch_compiled": Odd(nets.Compiled),
    "compiled_function": Odd(nets.CompiledFunction),
    "dynamo_disabled": Odd(nets.Dynamo),
    "frozen": Odd(writes.Frozen),
    "thawed_inside": Odd(writes.Thawed, "refused"),
    "frozen_inside": Odd(writes.FrozenInside, "refused"),
    "by_data": Odd(writes.ByData),
    "data_written": Odd(writes.DataWritten, "refused"),
    "data_assigned": Odd(writes.DataAssigned, "refused"),
    "updated": Odd(writes.Updated, "refused"),
    "averaged": Odd(writes.Averaged),
    "detached_in_place": Odd(net(writes.detached)),
    "data_of_hidden": Odd(net(writes.by_data)),
    "no_grad_in_place": Odd(writes.NoGrad, "refused"),
    "detach_in_place": Odd(net(writes.through_detach)),
    "bits_in_place": Odd(values.BitsInPlace),
    "autocast": Odd(values.Autocast, "refused"),
    "half": Odd(values.Half),
    "keyword_only": Odd(batches.KeywordOnly),
    "star": Odd(batches.Star, draw=_pair),
    "loss_none": Odd(partial(batches.Returns, lambda x: None), "refused"),
    "loss_tuple": Odd(partial(batches.Returns, lambda x: (x, 1)), "refused"),
    "loss_dict": Odd(partial(batches.Returns, lambda x: {"loss": x, "n": 1})),
    "loss_named": Odd(partial(batches.Returns, lambda x: batches.Given(x, 1))),
    "loss_many": Odd(partial(batches.Returns, lambda x: x.expand(2)), "refused"),
    "dataclass_batch": Odd(Net, draw=_record),
    "named_batch": Odd(batches.Star, draw=_named),
    "scalar_input": Odd(batches.Scaled, draw=_scaled),
    "number_input": Odd(batches.Scaled, "refused", draw=_flag),
    "none_input": Odd(batches.Optional_, draw=_none),
    "nested_batch": Odd(batches.Inside, draw=_nested),
    "nested_tensor": Odd(values.Nested, "refused"),
    "sparse_buffer": Odd(values.SparseProduct, "refused"),
    "data_parallel": Odd(nets.Parallel),
    "plain_attribute": Odd(writes.PlainAttribute, "refused"),
    "grown_buffer": Odd(writes.GrownBuffer, "refused"),
    "lazy": Odd(lambda: writes.Normed(nn.LazyBatchNorm1d), "refused"),
    "batch_norm": Odd(partial(writes.Normed, lambda: nn.BatchNorm1d(8))),
    "batch_norm_no_stats": Odd(
        partial(writes.Normed, lambda: nn.BatchNorm1d(8, track_running_stats=False))
    ),
    "batch_norm_average": Odd(
        partial(writes.Normed, lambda: nn.BatchNorm1d(8, momentum=None)), "refused"
    ),
    "group_norm": Odd(partial(writes.Normed, lambda: nn.GroupNorm(2, 8))),
    "evaluated": Odd(writes.Evaluated),
    "own_function_with_effect": Odd(nets.WithEffect),
    "backward_inside": Odd(nets.Backward, "refused"),
    "unfold": Odd(nets.Unfolded),
}


def _kept(rule: state.Hidden, **own: Any) -> Any:
    """Builds a net that keeps something; lists and dicts are new for each."""
    return lambda: state.Stateful(rule, **{k: copy(v) for k, v in own.items()})


def _norm(function: Any) -> Any:
    return state.hooked(lambda net: function(net.a))


_STATE = {
    "counter": Odd(_kept(state.counter, calls=0), "refused", "`calls`"),
    "counter_in_dict": Odd(_kept(state.counter_in_dict, state={"n": 0}), "refused", "state['n']"),
    "late_branch": Odd(_kept(state.late_branch, calls=0), "refused", "net.calls > 1000"),
    "late_branch_of_list": Odd(_kept(state.late_branch_of_list, seen=[]), "refused", "`seen`"),
    "late_by_product": Odd(_kept(state.late_by_product, calls=0), "refused", "`calls`"),
    "warm_up": Odd(_kept(state.warm_up, calls=0), "refused", "`calls`"),
    "only_logged": Odd(_kept(state.only_logged, calls=0)),
    "toggled": Odd(_kept(state.toggled, flag=False), "refused", "`flag`"),
    "text": Odd(_kept(state.text, mode="first"), "refused", "`mode`"),
    "past": Odd(_kept(state.past, past=None), "refused", "`past`"),
    "list_of_past": Odd(_kept(state.list_of_past, seen=[]), "refused", "`seen[0]`"),
    "list_not_read": Odd(_kept(state.list_not_read, seen=[])),
    "average_not_read": Odd(_kept(state.average_not_read, average=None)),
    "set_by_data": Odd(_kept(state.set_by_data, scale=None), "refused", "`scale`"),
    "cached_mask": Odd(_kept(state.cached_mask, mask=None)),
    "global_counter": Odd(_kept(state.global_counter), "refused", "global COUNT"),
    "global_cache": Odd(_kept(state.global_cache)),
    "cached_function": Odd(_kept(state.cached_function)),
    "python_noise": Odd(_kept(state.python_noise), "refused", "random.random()"),
    "layer_drop": Odd(_kept(state.layer_drop, p=0.01), "refused", "random numbers"),
    "layer_drop_never": Odd(_kept(state.layer_drop, p=0.0)),
    "numpy_noise": Odd(_kept(state.numpy_noise), "refused", "np.random.rand()"),
    "numpy_drop": Odd(_kept(state.numpy_drop), "refused", "random numbers"),
    "own_generator": Odd(
        _kept(state.own_generator, generator=random.Random(0)), "refused", "generator.random()"
    ),
    "clock": Odd(_kept(state.clock), "refused", "time.time()"),
    "deadline": Odd(_kept(state.deadline, started=0.0), "refused", "time.time()"),
    "clock_not_read": Odd(_kept(state.clock_not_read)),
    "weight_in_loss": Odd(state.Logits, loss=state.weight_in_loss),
    "all_weights_in_loss": Odd(state.Logits, loss=state.all_weights_in_loss),
    "model_in_loss": Odd(state.Logits, loss=state.model_in_loss),
    "alias_in_loss": Odd(state.Logits, "refused", "alias of a.weight", loss=state.alias_in_loss),
    "counting_loss": Odd(state.Logits, "refused", "`calls around", loss=state.counting_loss),
    "counting_loss_object": Odd(state.Logits, "refused", "calls`", loss=state.CountingLoss),
}
_HOOKS = {
    "hook_on_hidden": Odd(_kept(state.hook_on_hidden), "refused", "h.register_hook"),
    "hook_on_node": Odd(_kept(state.hook_on_node), "refused", "node.register_hook"),
    "saved_hooks": Odd(_kept(state.saved_hooks), "refused", "saved_tensors_hooks"),
    "saved_on_host": Odd(_kept(state.saved_on_host)),
    "retained": Odd(_kept(state.retained)),
    "checkpointed": Odd(_kept(state.checkpointed)),
    "checkpointed_reentrant": Odd(_kept(state.checkpointed_reentrant)),
    "weight_hook": Odd(
        state.hooked(lambda net: net.a.weight.register_hook(lambda g: g * 3)), "refused", "a.weight"
    ),
    "accumulate_hook": Odd(
        state.hooked(lambda n: n.a.weight.register_post_accumulate_grad_hook(state.triple_grad)),
        "refused", "triple_grad",
    ),
    "backward_hook": Odd(
        state.hooked(lambda net: net.b.register_full_backward_hook(state.triple)),
        "refused", "module b",
    ),
    "backward_pre_hook": Odd(
        state.hooked(lambda net: net.b.register_full_backward_pre_hook(state.triple)),
        "refused", "module b",
    ),
    "backward_hook_everywhere": Odd(
        Net, "refused", "all modules",
        around=state.everywhere("register_module_full_backward_hook", state.triple),
    ),
    "forward_hook": Odd(state.hooked(lambda n: n.a.register_forward_hook(lambda m, i, o: o * 2))),
    "forward_pre_hook": Odd(
        state.hooked(lambda net: net.a.register_forward_pre_hook(lambda m, i: (i[0] * 2,)))
    ),
    "forward_hook_kwargs": Odd(
        state.hooked(lambda net: net.register_forward_pre_hook(
            lambda m, a, k: (a, k | {"x": k["x"] * 2}), with_kwargs=True
        ))
    ),
    "forward_hook_on_weight": Odd(
        state.hooked(lambda n: n.a.register_forward_hook(lambda m, i, o: o + n.b.weight.sum()))
    ),
    "forward_hook_everywhere": Odd(
        Net, around=state.everywhere("register_module_forward_hook", state.doubled_linear)
    ),
    "weight_norm": Odd(_norm(parametrizations.weight_norm)),
    "spectral_norm": Odd(_norm(parametrizations.spectral_norm)),
    "orthogonal": Odd(_norm(parametrizations.orthogonal)),
    "old_weight_norm": Odd(_norm(nn.utils.weight_norm)),
    "old_spectral_norm": Odd(_norm(nn.utils.spectral_norm)),
}  # fmt: skip
ODD |= _STATE | _HOOKS


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Each model of the table; `size` percent of them."""
    for index, (name, odd) in enumerate(ODD.items()):
        if index * size // 100 != (index + 1) * size // 100:
            yield attempt(name, odd)
