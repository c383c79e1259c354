"""One data parallel step under WFBP, MG-WFBP and DeAR, through the simulator's channel.

A gradient is ready when its op's backward is over. Jobs go over the channel in the order in which
they are started, beside the computing (`costmodel.stage.program`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshwright.costmodel.stage.program import Do, Program, Step, play, run

Seconds = Callable[[float], float]
"""Of a collective, by its bytes."""
SMALL_BYTES = 4 * 8192
"""MG-WFBP always merges gradients of fewer than 8,192 values with the next."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradients in the order of the backward, each with the computing just before it."""

    backward_s: float
    """From the gradient before to this one."""
    nbytes: float
    forward_s: float = 0.0
    """Of the ops up to the parameter's of the gradient after this one."""


@dataclass(frozen=True, slots=True)
class Line:
    """alpha + beta * bytes."""

    alpha_s: float
    beta_s: float
    """Per byte."""

    def __call__(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s * nbytes


def merged_by_bytes(gradients: Sequence[Gradient], limit_bytes: float) -> tuple[int, ...]:
    """Sizes of groups that are closed once they reach the limit."""
    sizes, count, held = [], 0, 0.0
    for gradient in gradients:
        count, held = count + 1, held + gradient.nbytes
        if held >= limit_bytes:
            sizes.append(count)
            count, held = 0, 0.0
    return (*sizes, count) if count else tuple(sizes)


def merged_by_wait(gradients: Sequence[Gradient], line: Line) -> tuple[int, ...]:
    """MG-WFBP's groups (Shi et al., INFOCOM 2019): a gradient waits for the next one where the
    channel is busy anyway, or where the wait is shorter than the start-up time that it saves."""
    sizes: list[int] = []
    free = ready = 0.0
    count, held = 0, 0.0
    for index, gradient in enumerate(gradients):
        ready += gradient.backward_s
        count, held = count + 1, held + gradient.nbytes
        if index + 1 == len(gradients):
            break
        following = ready + gradients[index + 1].backward_s
        start = max(free, ready)
        waits = following < start + line(held) and following - start < line.alpha_s
        if not waits and held >= SMALL_BYTES:
            free = start + line(held)
            sizes.append(count)
            count, held = 0, 0.0
    return (*sizes, count)


def reduced_step(
    forward_s: float, gradients: Sequence[Gradient], sizes: Sequence[int], seconds: Seconds
) -> float:
    """Forward, and backward with one collective per group of `sizes` gradients."""
    steps = [run(forward_s, "forward"), *backward(gradients, sizes, seconds)]
    return play(Program(tuple(steps)).steps)[0]


def backward(gradients: Sequence[Gradient], sizes: Sequence[int], seconds: Seconds) -> list[Step]:
    """A backward with one collective per group, and a wait for them all."""
    steps: list[Step] = []
    for job, group in enumerate(groups_of(gradients, sizes)):
        steps.append(run(sum(g.backward_s for g in group), "backward"))
        nbytes = sum(g.nbytes for g in group)
        steps.append(Step(Do.START, seconds(nbytes), job, "gradients"))
    steps.append(Step(Do.WAIT_ALL))
    return steps


def groups_of(gradients: Sequence[Gradient], sizes: Sequence[int]) -> list[Sequence[Gradient]]:
    """The gradients in groups of these sizes."""
    ends = list(accumulate(sizes))
    return [gradients[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def dear_step(gradients: Sequence[Gradient], sizes: Sequence[int], half: Seconds) -> float:
    """DeAR (ICDCS 2023): reduce-scatter per group in the backward, and in the forward after it
    the gather of the next group beside the computing of this one. `half`: of either."""
    steps = backward(gradients, sizes, half)
    groups = groups_of(gradients, sizes)
    gathers = [half(sum(g.nbytes for g in group)) for group in reversed(groups)]
    computing = [sum(g.forward_s for g in group) for group in reversed(groups)]
    steps.append(Step(Do.START, gathers[0], 0, "gather"))
    for job, forward_s in enumerate(computing):
        steps.append(Step(Do.WAIT, 0.0, job, "gather"))
        if job + 1 < len(gathers):
            steps.append(Step(Do.START, gathers[job + 1], job + 1, "gather"))
        steps.append(run(forward_s, "forward"))
    return play(tuple(steps))[0]
