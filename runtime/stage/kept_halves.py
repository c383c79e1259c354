"""What becomes of what the ops of a block make where it runs on two halves of a micro-batch: as of
a whole block (`runtime.stage.keeping`), each half by itself."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call
from meshwright.codegen.passes.halves import Halves, Watched
from meshwright.codegen.passes.segments import Moved, Phase
from meshwright.runtime.stage.keeping import FormRuns, Recording, Script


def scripts_of(call: Call) -> tuple[Script, ...]:
    """Of each half of a call; of the whole where it is not cut."""
    if call.code.halves is None:
        return (Script.of(call),)
    return tuple(Script.of_nodes(call, tuple(c.nodes.values())) for c in call.code.halves.cuts)


class _HalfRecording:
    """Runs the phases of a half node by node."""

    def __init__(self, nodes: Mapping[str, fx.Node], recording: Recording) -> None:
        self._nodes, self.recording = nodes, recording
        self._comm: tuple[fx.Node, Comm] | None = None

    def begin(self, comm: Comm, values: Mapping[str, Any]) -> None:
        """The half begins with parameters, inputs and what is made of parameters alone."""
        self._comm = self._nodes["comm"], comm
        for name, value in values.items():
            self.recording.given(self._nodes[name], value)

    def run(self, phase: Phase, given: Mapping[str, Any]) -> Sequence[Any]:
        values = self._by_node(given)
        with self.recording.watching():
            for node in phase.nodes:
                self.recording.step(node, values)
        return [values[self._nodes[name]] for name in phase.made]

    def arrived(self, moved: Moved, values: Mapping[str, Any], *, differs: bool) -> None:
        node = self._nodes[moved.made]
        read = {used.name for used in node.all_input_nodes} | {moved.made}
        known = self._by_node({name: values[name] for name in read if name in values})
        self.recording.note(node, known, differs=differs)

    def _by_node(self, given: Mapping[str, Any]) -> dict[fx.Node, Any]:
        assert self._comm is not None
        return dict([self._comm]) | {self._nodes[name]: value for name, value in given.items()}


class HalvesKeeper:
    """One run of a block on halves, from its forward to the end of its backward."""

    def __init__(
        self, call: Call, halves: Halves, scripts: Sequence[Script], runs: FormRuns
    ) -> None:
        self._call, self._halves = call, halves
        self._halved = tuple(
            _HalfRecording(half.nodes, Recording(call.block, script, runs))
            for half, script in zip(halves.cuts, scripts, strict=True)
        )

    @property
    def watched(self) -> Watched:
        """Who runs the phases."""
        return self._halved

    def run(self, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The block's results."""
        comm.block = self._call.block
        results = self._halves(comm, *tensors, watched=self.watched)
        self.settle()
        return results

    def settle(self) -> None:
        """Both halves are through: what they have made goes where it is to be."""
        for half in self._halved:
            half.recording.settle(())

    @property
    def runs_again(self) -> bool:
        """Whether something is to be made again before the backward."""
        return any(half.recording.runs_again for half in self._halved)

    def fetch(self) -> None:
        """Forms may bring back beside the block before what they have elsewhere."""
        for half in self._halved:
            half.recording.fetch()

    def prepare(self, comm: Comm, casts: Callable[[], AbstractContextManager[None]]) -> None:
        """All that the backward needs is here afterwards. `casts`: as in the forward."""
        offset = comm.sample_offset
        for number, half in enumerate(self._halved):
            comm.sample_offset = offset + number * self._halves.samples[0]
            half.recording.prepare(comm, casts)
        comm.sample_offset = offset
