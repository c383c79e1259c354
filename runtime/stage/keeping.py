"""Runs a block so that what its ops make for the backward is kept, moved away, or made again.

The block's graph runs op by op, and autograd is asked for each tensor that it would keep: of which
memory it is, and so which op made it. What is to be made again is not held: before the backward of
the block the ops behind it run again in their order, on all ranks alike, from what is held. What
is to be offloaded leaves when the block has run.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_arg

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call
from meshwright.forms.retention import KEEP, Retention, retention
from meshwright.ir.plan.keeping import keeping_of
from meshwright.ir.torch_private import StorageWeakRef, leaves, memory_of, storage_key
from meshwright.runtime.stage.offload_buffers import Geometry, HostMemory, Movable, whole
from meshwright.runtime.stage.rerun import Rerun, Wanted, invoke


@dataclass(frozen=True, eq=False)
class Script:
    """A block's nodes, and what becomes of what each makes."""

    nodes: tuple[fx.Node, ...]
    policy: Mapping[fx.Node, Retention]
    last_used: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, call: Call) -> "Script":
        nodes = tuple(call.code.module.graph.nodes)
        policy = {
            n: retention(keeping_of(call.saved, n.meta["key"])) for n in nodes if "key" in n.meta
        }
        return cls(nodes, policy, {used: n for n in nodes for used in n.all_input_nodes})

    @property
    def moves(self) -> bool:
        """Whether something may be moved to the host."""
        return any(form.moved or form.decide for form in self.policy.values())


@dataclass(frozen=True, eq=False, slots=True)
class _MemoryMaker:
    """Who made a memory, and as which of its results."""

    node: fx.Node
    result: int
    alive: StorageWeakRef
    """Keeps the number of the storage from being used again."""


@dataclass(frozen=True, eq=False, slots=True)
class _Moved:
    """A tensor whose memory is offloaded."""

    part: Movable
    geometry: Geometry


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Again:
    """A tensor that is made again: in the memory of a node's result, or inside the node."""

    wanted: Wanted
    geometry: Geometry
    memory: StorageWeakRef
    tensor: Tensor | None = None
    """Once it is there. Autograd lets go of it when it has been used."""


class Keeper:
    """One run of a block, from its forward to the end of its backward."""

    def __init__(self, call: Call, script: Script, host: HostMemory | None) -> None:
        self._call, self._script, self._host = call, script, host
        self._makers: dict[int, _MemoryMaker] = {}
        self._parts: MutableMapping[int, Movable] = WeakValueDictionary()
        self._handles: list[ref[_Again]] = []
        self._held: dict[fx.Node, Any] = {}
        """What nodes that may run again read of those that do not."""
        self._differs: dict[fx.Node, bool] = {}
        """Whether they have a gradient."""
        self._listed: dict[fx.Node, None] = {}
        """The nodes that may run again."""
        self._fates: dict[fx.Node, Retention] = {}
        self._now: fx.Node | None = None
        self._place = 0
        self._rerun: Rerun | None = None

    def _fate(self, node: fx.Node) -> Retention:
        """What becomes of what a node makes, in this run."""
        if node not in self._fates:
            form = self._script.policy.get(node, retention(KEEP))
            if form.decide:
                form = retention(form.decide(self._call.block, node.meta["key"]))
            self._fates[node] = form
        return self._fates[node]

    # Forward.

    def run(self, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The block's results."""
        comm.block = self._call.block
        with saved_tensors_hooks(self._pack, self._unpack):
            results = self._forward((comm, *tensors))
        self._settle(results)
        return results

    def _forward(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        values: dict[fx.Node, Any] = {}
        rest = iter(given)
        for node in self._script.nodes[:-1]:
            if node.op == "placeholder":
                values[node] = next(rest)
            else:
                self._now, self._place = node, 0
                values[node] = invoke(node, values)
            self._note(node, values)
            for used in node.all_input_nodes:
                if self._script.last_used[used] is node:
                    del values[used]
        given_out: Any = self._script.nodes[-1].args[0]
        results: tuple[Tensor, ...] = map_arg(given_out, values.__getitem__)
        return results

    def _note(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Who made the memory of its results; and what it reads, if it may have to run again."""
        found = [x for x in leaves(values[node]) if isinstance(x, Tensor)]
        for i, x in enumerate(found):
            made = _MemoryMaker(node, i, memory_of(x))
            self._makers.setdefault(storage_key(x), made)
        self._differs[node] = any(x.requires_grad for x in found)
        # Views go with what they look into, whoever makes them.
        owners = {node, *(self._makers[storage_key(x)].node for x in found)}
        if node.op == "placeholder" or not any(self._fate(o).again for o in owners):
            return
        self._listed[node] = None
        for used in node.all_input_nodes:
            if used not in self._listed and used not in self._held:
                self._held[used] = self._hold(values[used])

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self._fate(self._makers[storage_key(value)].node).moved:
            return _Moved(self._part(value), Geometry.of(value))
        return value.detach()

    def _part(self, x: Tensor) -> Movable:
        part = self._parts.get(storage_key(x))
        if part is None:
            part = self._parts[storage_key(x)] = Movable(whole(x))
        return part

    def _pack(self, x: Tensor) -> Any:
        """What autograd holds in place of a tensor. What nobody has made yet is made by the node
        that runs."""
        place = self._place
        self._place += 1
        maker = self._makers.get(storage_key(x))
        node = maker.node if maker else self._now
        assert node is not None
        if self._fate(node).moved:
            return _Moved(self._part(x), Geometry.of(x))
        if not self._fate(node).again:
            return x
        wanted = (node, maker.result, 0) if maker else (node, -1, place)
        handle = _Again(wanted, Geometry.of(x), memory_of(x))
        self._handles.append(ref(handle))
        return handle

    def _settle(self, results: Sequence[Tensor]) -> None:
        """What leaves the block stays; all else goes where it is to be."""
        leaving = {storage_key(x): x.detach() for x in results}
        for handle in self._alive():
            if handle.memory.cdata in leaving:
                handle.tensor = handle.geometry.into(leaving[handle.memory.cdata])
        wanted = frozenset(h.wanted for h in self._alive() if h.tensor is None)
        order = self._behind({node for node, _, _ in wanted})
        reads = {used for node in order for used in node.all_input_nodes}
        self._held = {node: value for node, value in self._held.items() if node in reads}
        if order:
            self._rerun = Rerun(self._call.block, order, self._differs, wanted)
        self._makers, self._listed = {}, {}
        if self._host is not None:
            self._host.leave([part for key, part in self._parts.items() if key not in leaving])

    def _alive(self) -> Iterator[_Again]:
        return (handle for known in self._handles if (handle := known()) is not None)

    def _behind(self, wanted: set[fx.Node]) -> list[fx.Node]:
        """The nodes that run again, in order: those wanted and those that make what they read."""
        found: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [used for used in node.all_input_nodes if used in self._listed]
        return [node for node in self._script.nodes if node in found]

    # Backward.

    @property
    def runs_again(self) -> bool:
        """Whether something is to be made again before the backward."""
        return self._rerun is not None

    def fetch(self) -> None:
        """Starts to bring back what was moved away."""
        if self._host is not None:
            self._host.fetch(list(self._parts.values()))

    def prepare(self, comm: Comm, casts: Callable[[], AbstractContextManager[None]]) -> None:
        """All that the backward needs is here afterwards. `casts`: as in the forward."""
        if self._host is not None:
            self._host.wait(list(self._parts.values()))
        if self._rerun is None:
            return
        held = {
            node: value.part.view(value.geometry) if isinstance(value, _Moved) else value
            for node, value in self._held.items()
        }
        with _again(comm, self._call.block), casts():
            made = self._rerun.run(held)
        for handle in self._alive():
            if handle.tensor is None:
                handle.tensor = handle.geometry.into(made[handle.wanted])
        self._rerun, self._held = None, {}

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Moved):
            return kept.part.view(kept.geometry)
        found = kept.tensor if isinstance(kept, _Again) else kept
        assert isinstance(found, Tensor), "prepared before it is used"
        return found


@contextmanager
def _again(comm: Comm, block: str) -> Iterator[None]:
    """Random numbers are those of the forward, and buffers are not changed twice."""
    comm.block, comm.recomputing = block, True
    try:
        yield
    finally:
        comm.recomputing = False
