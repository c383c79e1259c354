"""What a software stack holds of a stage beside what a plan says (`ir.stack_memory`)."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple, Protocol

from meshwright.forms.exchange import Exchange
from meshwright.ir.stack_memory import LateFrees, StackMemory


class Scattering(Protocol):
    """Of a block what says how long the values live that it sends."""

    @property
    def forward_s(self) -> float: ...
    @property
    def behind_s(self) -> float: ...
    @property
    def scattered_bytes(self) -> int: ...


class SteppedGroup(NamedTuple):
    """Parameters that one form keeps, on a rank."""

    exchange: Exchange
    trained_bytes: int
    """Of all of them, as the optimizer steps them."""
    largest_bytes: int
    """Of the largest one."""
    shards: int
    """Ranks that share what is split of them."""
    ranks: int
    """Ranks that have copies, or share them."""


class StackBytes(NamedTuple):
    """Bytes of one stage on a rank."""

    always: int = 0
    stepping: int = 0
    """While the optimizer runs and what it has stepped is gathered."""
    apart: int = 0
    """Reserved beside all that is allocated at one time, until memory is short."""
    gradients_apart: int = 0
    """The same of a rank's parts of gradients, where they are not there at the peak anyway."""


NO_BYTES = StackBytes()


def stack_bytes(habits: StackMemory, groups: Iterable[SteppedGroup]) -> StackBytes:
    """Returns what a stack holds of groups of parameters."""
    always = stepping = apart = norms = gradients = 0.0
    for exchange, trained, largest, shards, ranks in groups:
        parts = exchange.parts("optimizer", shards)
        is_whole = not exchange.is_split("parameters")
        if ranks > 1 and parts == 1:
            always += habits.bucket_copies * trained
        if ranks == 1:
            apart += min(habits.flat_alone_bytes, exchange.summed * trained)
        each = habits.stepping + habits.stepping_flat * is_whole
        stepping += each * trained / parts
        if is_whole and parts > 1:
            whole, part = habits.gathers
            stepping += trained * (whole + part / parts)
            apart += habits.gathers_flat * trained
        if habits.gradients_apart and exchange.is_split("gradients"):
            gradients += trained / exchange.parts("gradients", shards)
        norms = max(norms, habits.norms * min(largest, trained / parts))
    stepping += norms + habits.stepping_bytes
    if habits.stepping_apart:
        return StackBytes(ceil(always), 0, ceil(stepping + apart), ceil(gradients))
    return StackBytes(ceil(always), ceil(stepping), ceil(apart), ceil(gradients))


def late_bytes(
    frees: LateFrees | None, blocks: Sequence[Scattering], stages: int, num_microbatches: int
) -> int:
    """Returns the most that values take which a rank's CPU has let go of and its GPU has yet to
    send; `blocks`: those of the rank, of `stages` pipeline ranks."""
    sent = [block.scattered_bytes for block in blocks if block.scattered_bytes]
    if frees is None or not sent:
        return 0
    of_block = sum(sent) / len(sent)
    forward_s = sum([block.forward_s for block in blocks])
    behind = sum([block.behind_s for block in blocks]) / forward_s if forward_s else 0.0
    if stages > 1:
        # Until the first gradient comes: as many micro-batches as there are stages. The first two
        # run at the CPU's pace where that is the slower one; then sends wait for the next stage.
        begun = min(stages, num_microbatches)
        begun = begun if behind else max(0, begun - 2)
        return ceil(of_block * min(frees.ahead_forward, len(sent) * begun))
    if frees.in_step and not behind:
        return 0
    forward = min(frees.ahead_forward, len(sent))
    if num_microbatches == 1:
        return ceil(of_block * forward * behind)
    # A whole forward, and of the backward before it what the queue still holds.
    left = (1 - forward / frees.ahead_forward) * frees.ahead_backward
    return ceil(of_block * (forward + min(left, len(sent))))
