"""Cuts the global batch into what each stage reads in each micro-batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.codegen.lower.program import StageProgram
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.bags import given_bags
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.graph import Tensor as GraphTensor
from meshwright.ir.layout.border import Side
from meshwright.ir.pinned import sent
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.loss_module import Batch, flatten_batch
from meshwright.runtime.step.bags import Bags, Runs
from meshwright.runtime.step.input_lane import ComingBatch, InputLane, Parts


class BatchCutter:
    """Knows which samples a rank reads. A rank with several stages reads the union of theirs."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        programs: tuple[StageProgram, ...],
        rank: int,
        device: torch.device,
        lane: InputLane | None = None,
    ) -> None:
        """`lane`: by which the next batch may be sent ahead; None: that of the device, if it has
        one."""
        self._graph, self._plan, self._device = graph, plan, device
        self._lane = lane or InputLane.of(device)
        self._coming: ComingBatch | None = None
        self._reads = {program.index: program.inputs for program in programs}
        self.offsets: dict[int, int] = {}
        """Per stage: this rank's first sample within a micro-batch."""
        self.samples: dict[int, int] = {}
        """Per stage: this rank's samples of a micro-batch."""
        for program in programs:
            stage = plan.stages[program.index]
            coordinate = stage.coordinates(rank)["dp"]
            side = Side(stage.batch_shares, stage.model_size, stage.devices)
            start, stop = side.spans()[coordinate]
            self.offsets[program.index], self.samples[program.index] = start, stop - start
        inputs = list(zip(graph.input_names, graph.inputs, strict=True))
        self._expected = {name: graph.tensors[tensor] for name, tensor in inputs}
        self._names = {tensor: name for name, tensor in inputs}
        self._bags = given_bags(graph)
        self._places = {bags.offsets: name for name, bags in self._bags.items()}
        """Inputs that say where bags lie, and one that has what is in them."""
        self._spans = {stage: self._of_stage(stage) for stage in self._reads}
        self.own_samples = self._find_own_samples()
        """Global indices of the samples that this rank reads, ascending."""
        self._own_runs = _runs(self.own_samples)

    def _of_stage(self, stage: int) -> list[tuple[int, int]]:
        """Global samples of the stage, per micro-batch."""
        size, first = self._plan.samples_per_microbatch, self.offsets[stage]
        starts = [first + m * size for m in range(self._plan.num_microbatches)]
        return [(start, start + self.samples[stage]) for start in starts]

    def _find_own_samples(self) -> list[int]:
        spans = [
            span for stage, reads in self._reads.items() if reads for span in self._spans[stage]
        ]
        return sorted({sample for span in spans for sample in range(*span)})

    def shard(self, batch: Batch) -> dict[str, Tensor]:
        """This rank's samples of a global batch, by input name: copies."""
        return self._sharded(self._checked(batch, self._plan.global_batch_size))

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """The same for whoever reads them at once: parts of the batch itself where they can be."""
        values = self._checked(batch, self._plan.global_batch_size)
        if len(self._own_runs) != 1:
            return self._sharded(values)
        return {name: self._of_samples(name, values, self._own_runs) for name in values}

    def _sharded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        lie = self._bags.keys() | self._places.keys()
        index = torch.tensor(self.own_samples, dtype=torch.int64)
        return {
            name: self._of_samples(name, values, self._own_runs) if name in lie
            else x.index_select(0, index.to(x.device)) if self._is_batch(name) else x
            for name, x in values.items()
        }  # fmt: skip

    def _of_samples(self, name: str, values: Mapping[str, Tensor], runs: Runs) -> Tensor:
        """What a batch has of some samples."""
        x = values[name]
        if name in self._bags:
            return self._bags_of(name, values).values(x, runs)
        if name in self._places:
            count = len(values[self._places[name]])
            return self._bags_of(self._places[name], values).places(runs, count)
        ((first, end),) = runs
        return x[first:end] if self._is_batch(name) else x

    def _bags_of(self, name: str, values: Mapping[str, Tensor]) -> Bags:
        bags = self._bags[name]
        return Bags(values[bags.offsets], bags.last)

    def cut(self, batch: Batch, *, sharded: bool) -> Parts:
        """(stage, micro-batch) -> graph input name -> this rank's part, on the device."""
        given = self.checked(batch, sharded=sharded)
        coming = self._coming
        if coming is None or self._lane is None or not coming.is_this(given, sharded):
            return self._parts(given, sharded)
        self._coming = None
        self._lane.arrived(x for part in coming.parts.values() for x in part.values())
        return coming.parts

    @property
    def sends_ahead(self) -> bool:
        """Whether `send_ahead` does anything."""
        return self._lane is not None

    def send_ahead(self, batch: Batch, *, sharded: bool) -> None:
        """Starts to send the batch that is cut next, beside what the device computes."""
        if self._lane is None:
            return
        try:
            given = self.checked(batch, sharded=sharded)
        except PlanError:
            return  # whoever takes a step with it is told
        if any(x.is_inference() for x in given.values()):
            return  # nothing would tell of a change of these
        with self._lane.beside():
            self._coming = ComingBatch.of(given, sharded, self._parts(given, sharded))

    def checked(self, batch: Batch, *, sharded: bool) -> dict[str, Tensor]:
        """The batch's tensors by input name; PlanError unless they have the plan's sizes."""
        size = len(self.own_samples) if sharded else self._plan.global_batch_size
        return self._checked(batch, size)

    def _parts(self, given: Mapping[str, Tensor], sharded: bool) -> Parts:
        at = {sample: n for n, sample in enumerate(self.own_samples)} if sharded else None
        found = {}
        for stage, reads in self._reads.items():
            for microbatch, (start, stop) in enumerate(self._spans[stage]):
                first = start if at is None else at.get(start, 0)
                runs = [(first, first + stop - start)]
                found[stage, microbatch] = {
                    tensor: sent(self._of_samples(self._names[tensor], given, runs), self._device)
                    for tensor in reads
                }
        return found

    def _is_batch(self, input_name: str) -> bool:
        index = self._graph.input_names.index(input_name)
        return self._graph.inputs[index] in self._graph.batch_inputs

    def _checked(self, batch: Batch, size: int) -> dict[str, Tensor]:
        """The batch's tensors by input name, with the sizes that the plan is for."""
        values, expected = flatten_batch(batch), self._expected
        if missing := expected.keys() - values.keys():
            raise PlanError(f"the batch lacks {sorted(missing)}; it needs {list(expected)}")
        if unknown := values.keys() - expected.keys():
            raise PlanError(f"the batch has {sorted(unknown)}; the plan knows {list(expected)}")
        for name, tensor in expected.items():
            self._check(name, values[name], tensor, size)
        for name, bags in self._bags.items():
            self._bags_of(name, values).checked(bags.offsets, len(values[name]))
        return values

    def _check(self, name: str, x: Tensor, tensor: GraphTensor, size: int) -> None:
        shape = tensor.shape
        if name in self._bags:  # there are as many as there are
            shape = (*x.shape[:1], *shape[1:])
        elif name in self._places:
            shape = (size + self._bags[self._places[name]].last,)
        elif self._is_batch(name):
            shape = (size * shape[0] // self._graph.batch_size, *shape[1:])
        if tuple(x.shape) != shape:
            raise PlanError(
                f"batch input {name!r} has shape {tuple(x.shape)}; the plan expects {shape} "
                f"({size} samples; trace and search again for another size)"
            )
        if x.dtype is not getattr(torch, tensor.dtype):
            raise PlanError(f"batch input {name!r} is {x.dtype}, the plan expects {tensor.dtype}")


def _runs(samples: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of consecutive ones."""
    found: list[tuple[int, int]] = []
    for sample in samples:
        if found and found[-1][1] == sample:
            found[-1] = found[-1][0], sample + 1
        else:
            found.append((sample, sample + 1))
    return found
