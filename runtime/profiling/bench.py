"""One block set up to run as in training: several layers of it, each with tensors of its own.

Between a layer's forward and its backward those of the others run, as in a stage. So what was kept
comes from memory and not from a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.program import StageProgram
from meshwright.codegen.lower.stage_context import Where, where
from meshwright.forms.running import SyncRun
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.images import channels_last, is_channels_last
from meshwright.ir.precision import autocast_of
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.runtime.profiling.tasks import BlockTask
from meshwright.runtime.profiling.values import drawn, parameter, rows_below
from meshwright.runtime.stage.stage import StageModule

_COLD_BYTES = 64 * 2**20
"""More than caches hold."""
_LAYERS = (2, 6)
_MEMORY_SHARE = 0.3
_SEED = 20


@dataclass(frozen=True, eq=False)
class BenchBlock:
    """A block with its own parameters, what arrives in forward and what arrives in backward."""

    module: StageModule
    tensors: Mapping[str, Tensor]
    """By graph tensor name."""
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def given(self) -> list[Tensor]:
        """All that is there before the forward."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return [*tensors, *self.values.values()]

    def forget_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def forward(self, keep: bool = True) -> Mapping[str, Tensor]:
        return self.module(0, self.values, keep)  # type: ignore[no-any-return]

    def backward(self) -> None:
        self.module.backward(0, dict(self.gradients), True)

    def backward_input(self) -> None:
        self.module.backward_input(0, dict(self.gradients))

    def backward_weight(self) -> None:
        self.module.backward_weight(0, True)


def bench(graph: Graph, task: BlockTask, device: torch.device) -> "Bench":
    """Lowers the block as the task's plan has it."""
    stage = task.plan.stages[task.stage]
    at = where(graph, task.plan, task.stage, stage.devices[0])
    program = alone(lower(graph, task.plan, stage.devices[0])[0])
    return Bench(graph, task, at, program, device)


def layers_for(layer: BenchBlock, kept_bytes: int, processes: int) -> int:
    """As many as it takes to fill the caches, within what memory there is."""
    given = sum(x.nbytes for x in (*layer.given, *layer.gradients.values())) + 1
    device = layer.module.comm.device
    free = psutil.virtual_memory().available / processes
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    # With gradients, and what is made meanwhile.
    most = int(_MEMORY_SHARE * free / (2 * (given + kept_bytes)))
    wanted = -(-_COLD_BYTES // (given + kept_bytes))
    return max(1, min(max(_LAYERS[0], wanted), _LAYERS[1], most))


def alone(program: StageProgram) -> StageProgram:
    """The program without what only passes through its stage."""
    (call,) = program.calls
    return replace(
        program,
        receives=tuple(v for v in program.receives if v.name in call.inputs),
        sends=tuple(v for v in program.sends if v.name in call.outputs),
    )


@dataclass(frozen=True, eq=False)
class Bench:
    """Makes layers of one block."""

    graph: Graph
    task: BlockTask
    at: Where
    program: StageProgram
    device: torch.device

    def layer(self) -> BenchBlock:
        """Equal for every call: times must not depend on numbers drawn."""
        draw = torch.Generator().manual_seed(_SEED)
        program, comm = self.program, self._comm()
        tensors = {p.name: parameter(self.graph, p, self.device, draw) for p in program.params}
        plain = replace(program, prelude=None, totals=None)
        module = StageModule(plain, comm, tensors, SyncRun(), autocast_of(self.task.plan.precision))
        values = self._inputs(draw) | self._received(draw)
        for call in (program.totals, program.prelude):
            if call is not None:
                with torch.no_grad():
                    made = call.run(
                        comm,
                        *(tensors[name] for name in call.params),
                        *(values[name] for name in call.inputs),
                    )
                values |= dict(zip(call.outputs, made, strict=True))
        return BenchBlock(module, tensors, values, self._gradients(module, values, draw))

    def _comm(self) -> Comm:
        sizes = {axis: along.size for axis, along in self.at.axes.items()}
        lines = {axis: FreeLine(n, self.at.coordinates[axis]) for axis, n in sizes.items()}
        return Comm(lines, sizes, self.at.coordinates, device=self.device)

    def _inputs(self, draw: torch.Generator) -> dict[str, Tensor]:
        """The micro-batch. Its floating-point values are in [0, 1): they may be probabilities."""
        found = {}
        for name in self.program.inputs:
            shape = self.at.local_shape(name, self.at.input_layout(name))
            dtype, below = self.graph.tensors[name].dtype, rows_below(self.graph, name)
            found[name] = drawn(shape, dtype, self.device, below, draw, positive=True)
        return found

    def _received(self, draw: torch.Generator) -> dict[str, Tensor]:
        found = {}
        for value in self.program.receives:
            dtype = self.task.dtypes.get(value.name, value.dtype)
            below = rows_below(self.graph, value.name)
            x = drawn(value.shape, dtype, self.device, below, draw)
            last = self.graph.tensors[value.name].channels_last
            found[value.name] = channels_last(x) if last else x
        return found

    def _gradients(
        self, module: StageModule, values: Mapping[str, Tensor], draw: torch.Generator
    ) -> dict[str, Tensor]:
        """Of what leaves the block; small, as they are."""
        made = module(0, values, False)
        found = {}
        for value in self.program.sends:
            if value.requires_grad:
                like = made[value.name]
                dtype = str(like.dtype).split(".")[1]
                x = drawn(tuple(like.shape), dtype, self.device, 0, draw) * 1e-3
                found[value.name] = channels_last(x) if is_channels_last(like) else x
        return found
