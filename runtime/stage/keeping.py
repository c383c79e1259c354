"""Runs a block so that what its ops make for the backward is kept, moved away, or made again.

The block's graph runs op by op, and autograd is asked for each tensor that it would keep: of which
memory it is, and so which op made it. What is to be made again is not held: before the backward of
the block the ops behind it run again in their order, on all ranks alike, from what is held. What
is to be offloaded leaves when the block has run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor, device, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_arg

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call
from meshwright.forms.retaining import Geometry, KeptMemory, RetentionRun
from meshwright.forms.retention import KEEP, Retention, decided, retention
from meshwright.ir.plan.keeping import keeping_of
from meshwright.ir.torch_private import StorageWeakRef, leaves, memory_of, storage_key
from meshwright.runtime.stage.rerun import Rerun, Wanted, invoke


@dataclass(frozen=True, eq=False)
class Script:
    """A block's nodes, and what becomes of what each makes."""

    nodes: tuple[fx.Node, ...]
    policy: Mapping[fx.Node, Retention]
    last_used: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, call: Call) -> "Script":
        return cls.of_nodes(call, tuple(call.code.module.graph.nodes))

    @classmethod
    def of_nodes(cls, call: Call, nodes: tuple[fx.Node, ...]) -> "Script":
        """That of a graph that does what the call's does."""
        policy = {
            n: retention(keeping_of(call.saved, n.meta["key"])) for n in nodes if "key" in n.meta
        }
        return cls(nodes, policy, {used: n for n in nodes for used in n.all_input_nodes})


class FormRuns:
    """What runs the forms of one stage, each made once."""

    def __init__(self, where: device, scripts: Iterable[Script]) -> None:
        self._device = where
        self._runs: dict[Callable[[device], RetentionRun], RetentionRun] = {}
        for script in scripts:
            for form in script.policy.values():
                self.of(form)

    def of(self, form: Retention) -> RetentionRun | None:
        """Return what holds the memories of a form; None if autograd holds them as they are."""
        if form.build is None:
            return None
        if form.build not in self._runs:
            self._runs[form.build] = form.build(self._device)
        return self._runs[form.build]


@dataclass(frozen=True, eq=False, slots=True)
class _MemoryMaker:
    """Who made a memory, and as which of its results."""

    node: fx.Node
    result: int
    alive: StorageWeakRef
    """Keeps the number of the storage from being used again."""


@dataclass(frozen=True, eq=False, slots=True)
class _InHands:
    """A tensor whose memory a form has."""

    memory: KeptMemory
    geometry: Geometry

    def view(self) -> Tensor:
        return self.memory.view(self.geometry)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Again:
    """A tensor that is made again: in the memory of a node's result, or inside the node."""

    wanted: Wanted
    geometry: Geometry
    memory: StorageWeakRef
    tensor: Tensor | None = None
    """Once it is there. Autograd lets go of it when it has been used."""


class Recording:
    """What is known of one run of a graph, from its forward to the end of its backward."""

    def __init__(self, block: str, script: Script, runs: FormRuns) -> None:
        self._block, self._script, self._runs = block, script, runs
        self._makers: dict[int, _MemoryMaker] = {}
        self._in_hands: dict[RetentionRun, MutableMapping[int, KeptMemory]] = {}
        """Per form, memories by their number, as long as something looks into them."""
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
            self._fates[node] = decided(form, self._block, node.meta.get("key", ""))
        return self._fates[node]

    # Forward.

    def watching(self) -> AbstractContextManager[None]:
        """Inside, autograd is asked for what it would keep."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def step(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Adds what a node makes to the values that it reads."""
        self._now, self._place = node, 0
        values[node] = invoke(node, values)
        self.note(node, values)

    def given(self, node: fx.Node, value: Any) -> None:
        """A value that was there before: autograd holds it as it is."""
        self._fates[node] = retention(KEEP)
        self._made_by(node, value)

    def _made_by(self, node: fx.Node, value: Any) -> list[Tensor]:
        found = [x for x in leaves(value) if isinstance(x, Tensor)]
        for i, x in enumerate(found):
            made = _MemoryMaker(node, i, memory_of(x))
            self._makers.setdefault(storage_key(x), made)
        self._differs[node] = any(x.requires_grad for x in found)
        return found

    def note(self, node: fx.Node, values: Mapping[fx.Node, Any], *, differs: bool = False) -> None:
        """Who made the memory of its results; and what it reads, if it may have to run again.
        `differs`: they have a gradient, whatever they say."""
        found = self._made_by(node, values[node])
        self._differs[node] |= differs
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
        handed = self._handed(value, self._makers[storage_key(value)].node)
        return value.detach() if handed is None else handed

    def _handed(self, x: Tensor, maker: fx.Node) -> _InHands | None:
        """The tensor in the hands of its maker's form; None if autograd holds it as it is."""
        run = self._runs.of(self._fate(maker))
        if run is None:
            return None
        known = self._in_hands.setdefault(run, WeakValueDictionary())
        memory = known.get(storage_key(x))
        if memory is None:
            memory = known[storage_key(x)] = KeptMemory.of(x)
        return _InHands(memory, Geometry.of(x))

    def _pack(self, x: Tensor) -> Any:
        """What autograd holds in place of a tensor. What nobody has made yet is made by the node
        that runs."""
        place = self._place
        self._place += 1
        maker = self._makers.get(storage_key(x))
        node = maker.node if maker else self._now
        assert node is not None
        if (handed := self._handed(x, node)) is not None:
            return handed
        if not self._fate(node).again:
            # What its own node keeps must not lead back to that: nobody would let go of the two
            # where a backward is in halves, which frees nothing itself.
            return x.detach()
        wanted = (node, maker.result, 0) if maker else (node, -1, place)
        handle = _Again(wanted, Geometry.of(x), memory_of(x))
        self._handles.append(ref(handle))
        return handle

    def settle(self, results: Sequence[Tensor]) -> None:
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
            self._rerun = Rerun(self._block, order, self._differs, wanted)
        self._makers, self._listed = {}, {}
        for run, known in self._in_hands.items():
            run.produced([memory for key, memory in known.items() if key not in leaving])

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
        """Forms may bring back beside the block before what they have elsewhere."""
        for run, known in self._in_hands.items():
            if run.ahead:
                run.fetch(list(known.values()))

    def prepare(self, comm: Comm, casts: Callable[[], AbstractContextManager[None]]) -> None:
        """All that the backward needs is here afterwards. `casts`: as in the forward."""
        for run, known in self._in_hands.items():
            run.needed(list(known.values()))
        if self._rerun is None:
            return
        held = {
            node: value.view() if isinstance(value, _InHands) else value
            for node, value in self._held.items()
        }
        with _again(comm, self._block), casts():
            made = self._rerun.run(held)
        for handle in self._alive():
            if handle.tensor is None:
                handle.tensor = handle.geometry.into(made[handle.wanted])
        self._rerun, self._held = None, {}

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _InHands):
            return kept.view()
        found = kept.tensor if isinstance(kept, _Again) else kept
        assert isinstance(found, Tensor), "prepared before it is used"
        return found


class Keeper(Recording):
    """One run of a block."""

    def __init__(self, call: Call, script: Script, runs: FormRuns) -> None:
        super().__init__(call.block, script, runs)

    def run(self, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The block's results."""
        comm.block = self._block
        with self.watching():
            results = self._forward((comm, *tensors))
        self.settle(results)
        return results

    def _forward(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        values: dict[fx.Node, Any] = {}
        rest = iter(given)
        for node in self._script.nodes[:-1]:
            if node.op == "placeholder":
                values[node] = next(rest)
                self.note(node, values)
            else:
                self.step(node, values)
            for used in node.all_input_nodes:
                if self._script.last_used[used] is node:
                    del values[used]
        given_out: Any = self._script.nodes[-1].args[0]
        results: tuple[Tensor, ...] = map_arg(given_out, values.__getitem__)
        return results


@contextmanager
def _again(comm: Comm, block: str) -> Iterator[None]:
    """Random numbers are those of the forward, and buffers are not changed twice."""
    comm.block, comm.recomputing = block, True
    try:
        yield
    finally:
        comm.recomputing = False
