"""All that we use of torch and that is not public, or not in every version we support.

Checked on the versions in CHECKED_ON (see tests/ir/test_torch_private.py).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl
from torch._C._distributed_c10d import _SymmetricMemory
from torch._ops import OpOverload as OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.fx import Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.ir.comm import p2p_collectives as direct
from meshwright.ir.comm.p2p_collectives import Waitable

CHECKED_ON = ("2.11", "2.13", "2.15")
ANY_REGION = ("wrap_with_set_grad_enabled", "wrap_with_autocast")

DispatchMode: Any = TorchDispatchMode
LazyGraphModule: Any = _LazyGraphModule
"""A `GraphModule` that makes its Python when it is first called: most are changed before that, or
only read."""

# torch 2.13 renamed these two and warns of the old names.
PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass of tensors: what is computed of one is a plain tensor."""
GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)
"""(rows [n, k], matrices [g, k, m], offs=ends of runs) -> [n, m]; or, of two matrices, products
over runs of what is summed. None where torch has none."""
SCALED_GROUPED_MM: Any = getattr(torch, "_scaled_grouped_mm", None)
"""The same of 8-bit floats: (left, right, factors of left, factors of right, offs=ends of runs,
out_dtype=bfloat16), the first by rows in memory, the second by columns. None where torch has none.
"""
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def fake_mode() -> AbstractContextManager[Any]:
    """Tensors made inside have shapes and dtypes but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def updates_without_memory() -> Iterator[None]:
    """Inside, optimizers' steps in one kernel that torch has no shapes of do nothing to tensors
    without memory, as those that it has do: they make no tensor, and write to what is there."""
    known = torch._C._dispatch_get_all_op_names()
    fused = [x for x in known if x.startswith("aten::_fused_") and x.split(".")[0].endswith("_")]
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in fused:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
                library.impl(name.removeprefix("aten::"), lambda *_, **__: None, "Meta")
        yield


def is_fake(x: object) -> bool:
    """Whether a tensor has no memory, since it was made inside the fake mode."""
    return bool(fake_tensor.is_fake(x))


def real_mode() -> AbstractContextManager[Any]:
    """Inside a fake mode: tensors are real again."""
    return unset_fake_temporarily()


def no_modes() -> AbstractContextManager[Any]:
    """Inside a trace: tensors are real again, and what is done with them is not recorded."""
    return _disable_current_modes()


def operator_library(namespace: str) -> Any:
    """A library to define operators in; they live as long as it does."""
    library: Any = torch.library.Library
    return library(namespace, "DEF")


def schema_arguments(target: Any) -> tuple[Any, ...]:
    """The arguments an ATen or custom operator declares."""
    return tuple(target._schema.arguments)


def written_arguments(target: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator changes in place."""
    return tuple(
        a.name
        for a in target._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    )


def returns_list(target: Any) -> bool:
    """Whether the operator's schema says that it returns a list of tensors."""
    returned = target._schema.returns
    return len(returned) == 1 and "List" in str(returned[0].type)


def makes_view(target: Any) -> bool:
    """Whether the operator's schema says that its result shares memory with an argument."""
    infos = (r.alias_info for r in target._schema.returns)
    return any(info is not None and not info.is_write for info in infos)


def region_of(node: Node) -> str:
    """The name of the higher-order operator that the node calls, if it is one we can look into."""
    name = getattr(node.target, "_name", None) or getattr(node.target, "__name__", "")
    return name if name in ANY_REGION else ""


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, real or fake."""
    return key_of(tensor.untyped_storage())


def backward_node() -> Any:
    """The node of autograd that runs, or whose gradients are handed on; None outside a backward."""
    inside = torch._C._current_graph_task_id() != -1
    return torch._C._current_autograd_node() if inside else None


def backward_reaches(nodes: Iterable[Any]) -> bool:
    """Whether the backward that runs goes on to one of these nodes of autograd. True where torch
    does not say: outside of a backward, and of leaves whose gradients somebody gets as results."""
    asked = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return asked is None or any([asked(node) for node in nodes])
    except RuntimeError:
        return True


def uses(tensor: Any) -> tuple[int, int]:
    """How many have the tensor, and its memory, on torch's side."""
    return tensor._use_count(), torch._C._storage_Use_Count(key_of(tensor.untyped_storage()))


def key_of(storage: torch.UntypedStorage) -> int:
    """What tells a storage, real or fake, from all others that are there."""
    return int(storage._cdata)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Does not keep the memory of a tensor, but its `storage_key` (in `cdata`) from being given to
    another one."""
    made: Any = StorageWeakRef
    found: StorageWeakRef = made(tensor.untyped_storage())
    return found


def all_gather(result: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Flat: `result` is every rank's `part`, one after the other."""
    start_all_gather(result, part, group).wait()


def start_all_gather(result: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> Waitable:
    """Flat: starts to gather; `result` will be every rank's `part`, one after the other."""
    if result.device.type == "cpu":
        return direct.gather(result, part, group)
    work: Waitable = _all_gather(result, part, group=group, async_op=True)
    return work


def reduce_scatter(result: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Waitable:
    """Flat: starts to sum `whole` over the ranks; `result` will be this rank's part."""
    if result.device.type == "cpu":
        return direct.reduce_scatter(result, whole, group)
    work: Waitable = _reduce_scatter(result, whole, group=group, async_op=True)
    return work


def start_uneven_gather(
    result: Tensor, part: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Waitable:
    """The same where ranks have parts of different `sizes`, in elements."""
    if result.device.type == "cpu":
        return direct.gather_uneven(result, part, sizes, group)
    work: Waitable = dist.all_gather(
        list(torch.split(result, list(sizes))), part, group=group, async_op=True
    )
    return work


def reduce_scatter_uneven(
    result: Tensor, whole: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Waitable:
    """Flat: starts to sum `whole` over the ranks; `result` will be this rank's part, of `sizes`."""
    if result.device.type == "cpu":
        return direct.reduce_scatter_uneven(result, whole, sizes, group)
    work: Waitable = dist.reduce_scatter(
        result, list(torch.split(whole, list(sizes))), group=group, async_op=True
    )
    return work


def symmetric(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Bytes that all ranks of the group allocate alike and see, and the handle to the peers'."""
    found = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return found, symmetric_memory.rendezvous(found, group)


def write_signal(signals: Tensor, index: int) -> None:
    """On the stream, once what comes before is done and seen by all: the signal (uint32) is 1."""
    _SymmetricMemory.stream_write_value32(signals, index, 1)


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax along the last dim; zeros where all scores are -inf."""
    made: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
    return made


def store_of_launcher(timeout: timedelta) -> tuple[Any, int, int]:
    """Returns the store through which ranks are to meet, this rank and how many there are, as the
    launcher's environment says; ValueError where it does not."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    prefixed: Any = c10d.PrefixStore
    return prefixed(f"meshwright{_again()}", store), rank, size


RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable of launchers: how often they have started this job again."""


def _again() -> str:
    """Differs where a launcher has started the job again: torchrun's store has what ranks wrote in
    it before they died, and where they listened."""
    count = os.environ.get(RESTARTS, "0") or "0"
    return "" if count == "0" else f"-again-{count}"


def _of_this_start(store: Any) -> Any:
    prefixed: Any = c10d.PrefixStore
    return prefixed(f"start{again}", store) if (again := _again()) else store


def job_store() -> Any:
    """A connection of its own to the store through which the ranks of the job met."""
    store: Any = c10d._get_default_store()
    return _of_this_start(store.clone())


def store_of(group: dist.ProcessGroup | None) -> tuple[Any, str]:
    """Returns the store through which a group's ranks met, or those of the job, and the name of
    the group, which its keys begin with."""
    found: Any = group or c10d._get_default_group()
    store = _of_this_start(c10d._world.pg_map[found][1])
    return store, "" if group is None else str(found.group_name)


def member_group(ranks: Sequence[int], backend: str, name: str) -> dist.ProcessGroup:
    """Makes a process group of some ranks, which they alone call, each at its own time.

    torch names a group that is made so after its ranks and the number of groups that the process
    has, in which members of other groups differ: they would never meet. Here the caller gives the
    name, which no other group of the job may have, ever. A group is never split off that of the job
    either, as all ranks would have to take part in that.
    """
    private: Any = c10d
    world: Any = private._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made = private._new_process_group_helper(
            len(ranks), list(ranks).index(world.rank()), list(ranks), dist.Backend(backend),
            private._world.pg_map[world][1], name + _again(),
            timeout=private._get_default_timeout(backend),
        )  # fmt: skip
    finally:
        world.bound_device_id = bound
    group: dist.ProcessGroup = made[0]
    private._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
    return group


def is_random(target: Any) -> bool:
    """Whether the operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in target.tags


def reads_values(target: Any, *, masked: bool) -> bool:
    """Whether the host reads what the operator finds: a number, or the shape of a result. `masked`:
    an operand is of booleans, without which indexing has results of known shapes."""
    if not masked and target is torch.ops.aten.index.Tensor:
        return False
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return any(tag in target.tags for tag in tags)


def holders_of(tensor: Tensor) -> int:
    """How many tensors look into the memory of this one, those of autograd and itself counted."""
    memory = tensor.untyped_storage()
    counted: Any = torch._C
    return int(counted._storage_Use_Count(memory._cdata)) - 1


def on_gradient(parameters: Iterable[Tensor], made: Callable[[Tensor], None]) -> list[Any]:
    """Calls `made(parameter)` whenever its gradient was set or added to; handles to remove."""
    hooks: list[Any] = [p.register_post_accumulate_grad_hook for p in parameters]
    return [hook(made) for hook in hooks]


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Gives a parameter the hooks of another, which a copy of it lacks."""
    made: Any = target
    for hook in (source._backward_hooks or {}).values():
        made.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        made.register_post_accumulate_grad_hook(hook)


def has_stepped(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler of the optimizer is to know that it has stepped."""
    told: Any = optimizer
    told._opt_called = True


def gradient_hooks(tensor: Tensor) -> list[Any]:
    """Hooks that were registered on the gradient of a tensor."""
    found: Any = tensor
    kinds = (found._backward_hooks, getattr(found, "_post_accumulate_grad_hooks", None))
    return [hook for hooks in kinds if hooks for hook in hooks.values()]


def backward_hooks(module: nn.Module) -> list[Any]:
    """Hooks that were registered on the backward of a module."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def backward_hooks_of_all() -> list[Any]:
    """Hooks that were registered on the backward of every module."""
    every: Any = nn.modules.module
    return [*every._global_backward_hooks.values(), *every._global_backward_pre_hooks.values()]


def run_backward(roots: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """As `torch.autograd.backward`, without its check in Python of what the engine checks again:
    shape, dtype and device of each root's gradient. It takes as long as four operators."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


ENGINE = (torch.autograd, "_engine_run_backward")
"""What every backward in Python goes through."""


def read_compiler_rules() -> None:
    """Have torch's compiler make its table of functions now, which it makes once in a process."""
    from torch._dynamo import trace_rules  # takes a second: only traces need it

    trace_rules.get_torch_obj_rule_map()


def own_dispatch(tensor: Tensor) -> bool:
    """Whether the tensor's class has operators of its own, or is a parameter with more to it than
    its values, which a copy takes along; fake tensors do not count."""
    kind: Any = type(tensor)
    if kind in (Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, FakeTensor):
        return False
    plain = (Tensor.__torch_function__, _disabled_torch_function_impl)
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__) not in (
        *plain, getattr(Tensor.__torch_function__, "__func__", None)
    )  # fmt: skip
    copied = isinstance(tensor, nn.Parameter) and not nn.parameter.is_lazy(tensor) and (
        kind.__deepcopy__ is not nn.Parameter.__deepcopy__
    )  # fmt: skip
    return own or copied or wraps_tensors(tensor)


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether the tensor's data are in other tensors that it holds."""
    return bool(is_traceable_wrapper_subclass(tensor))


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's data: itself, unless it wraps others."""
    if not wraps_tensors(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [held for name in names for held in unwrapped(getattr(tensor, name))]


_ATTRIBUTES: Any = Tensor
REQUIRES_GRAD: Any = _ATTRIBUTES.requires_grad.__set__
"""How setting a tensor's `requires_grad` appears to a torch function mode."""
DATA: Any = _ATTRIBUTES.data.__get__
"""How reading a tensor's `data` appears to a torch function mode."""
DATA_SET: Any = _ATTRIBUTES.data.__set__
"""How setting it appears."""
GRAD_FN: Any = _ATTRIBUTES.grad_fn.__get__
"""How reading a tensor's `grad_fn` appears to a torch function mode."""


def leaves(tree: Any) -> list[Any]:
    """What nested dicts, lists and tuples hold."""
    found: list[Any] = []
    _put_leaves(tree, found)
    return found


_ALONE = (int, float, bool, str, type(None), torch.dtype, torch.device)


def _put_leaves(tree: Any, found: list[Any]) -> None:
    # Asked at each call while a model is traced: torch's own walk takes three times as long.
    kind = type(tree)
    if kind is tuple or kind is list:
        for one in tree:
            _put_leaves(one, found)
    elif kind is dict:
        for one in tree.values():
            _put_leaves(one, found)
    elif kind in _ALONE or isinstance(tree, Tensor):
        found.append(tree)
    else:
        found += tree_leaves(tree)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Nested dicts, lists and tuples with each tensor changed."""
    return tree_map_only(Tensor, change, tree)
