"""Runs the programs of one rank without a runtime: for tests and for looking at a model."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call, StageProgram


def run_local(
    programs: Sequence[StageProgram],
    params: Mapping[str, Tensor],
    microbatches: Sequence[Mapping[str, Tensor]],
    comm: Comm | None = None,
    starts: Sequence[int] | None = None,
) -> Tensor:
    """The rank's loss, summed over `microbatches` (graph inputs by name, this rank's samples).

    All stages run here one after the other; `params` are by graph tensor name, as stored. With a
    `comm` of several ranks, the loss is this rank's summand. `starts` are the global indices of
    the first sample of each micro-batch; by default they follow each other.
    """
    comm = comm or Comm({}, {"dp": 1}, {"dp": 0})
    counts = [_samples(batch) for batch in microbatches]
    starts = starts or [sum(counts[:number]) for number in range(len(counts))]
    sums = [_totals(program, params, microbatches, comm, starts) for program in programs]
    losses = []
    for number, batch in enumerate(microbatches):
        comm.microbatch, comm.sample_offset = number, starts[number]
        values: dict[str, Tensor] = dict(batch)
        for program, totals in zip(programs, sums, strict=True):
            values |= totals
            for call in (program.prelude, *program.calls):
                if call:
                    values |= _run(call, comm, params, values)
        losses.append(values[programs[-1].loss])
    return sum(losses[1:], losses[0])


def _samples(batch: Mapping[str, Tensor]) -> int:
    return next((len(x) for x in batch.values() if x.ndim), 0)


def _run(
    call: Call, comm: Comm, params: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    tensors = [params[name] for name in call.params] + [values[name] for name in call.inputs]
    return dict(zip(call.outputs, call.run(comm, *tensors), strict=True))


def _totals(
    program: StageProgram,
    params: Mapping[str, Tensor],
    microbatches: Sequence[Mapping[str, Tensor]],
    comm: Comm,
    starts: Sequence[int],
) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(microbatches if program.totals else ()):
        comm.microbatch, comm.sample_offset = number, starts[number]
        assert program.totals is not None
        for name, summand in _run(program.totals, comm, params, batch).items():
            sums[name] = sums[name] + summand if name in sums else summand
    return {name: comm.sum_over(total, "dp") for name, total in sums.items()}
