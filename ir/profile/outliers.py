"""Measurements of a profile that do not fit beside their neighbours, or vary much.

A machine that was disturbed while it was measured leaves such figures. They are used as they are;
measuring them anew (delete the file, or measure for longer) is the reader's choice.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from meshwright.ir.profile.profile import BlockRecord, CollectiveRecord, Profile, Timing
from meshwright.ir.text.units import size

LEAST_SPREAD = 0.25
"""Below it no measurement is said to vary much."""
TIMES_USUAL = 4.0
"""It varies much if it does so by so many times the profile's median spread."""
TURNED = 1.3
"""What is more work should not be so many times faster than what is less."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A measurement to distrust."""

    what: str
    time: Timing
    why: str


def outliers(profile: Profile) -> tuple[Outlier, ...]:
    """Those that vary most first, then those that more work beats; each once."""
    named = list(_timings(profile))
    usual = median([time.spread for _, time in named]) if named else 0.0
    most = max(LEAST_SPREAD, TIMES_USUAL * usual)
    wide = [
        Outlier(what, time, f"varies by {time.spread:.0%}, half of all by less than {usual:.0%}")
        for what, time in sorted(named, key=lambda one: -one[1].spread)
        if time.spread > most
    ]  # fmt: skip
    known = {one.what for one in wide}
    return (*wide, *(one for one in _turned(profile) if one.what not in known))


def _timings(profile: Profile) -> Iterator[tuple[str, Timing]]:
    for block in profile.blocks.values():
        yield _block(block, "forward"), block.forward
        yield _block(block, "backward"), block.backward
    for op in profile.ops.values():
        what = f"op {op.target} {'x'.join(map(str, op.inputs[0] if op.inputs else ()))}"
        yield what, op.forward
        if op.backward:
            yield f"{what}: backward", op.backward
    for sent in profile.collectives:
        yield _collective(sent), sent.time
    for copy in profile.copies:
        yield f"copy {copy.direction} of {size(copy.nbytes)}", copy.time
    for step in profile.optimizers:
        yield f"{step.optimizer} of {size(step.nbytes)}, {step.num_tensors} tensors", step.time


def _block(record: BlockRecord, part: str) -> str:
    return (
        f"block {record.pattern}, {record.samples} samples, tp {record.tp}, "
        f"{record.processes} at once: {part}"
    )


def _collective(record: CollectiveRecord) -> str:
    group = record.group
    busy = ", computing meanwhile" if record.loaded else ""
    return (
        f"{record.operation} of {size(record.nbytes)} over {group.size} ranks, {group.per_node} a "
        f"node, stride {group.stride}, {record.groups_at_once} at once{busy}"
    )


def _turned(profile: Profile) -> Iterator[Outlier]:
    """What took longer than more of the same."""
    rows: dict[tuple[object, ...], list[tuple[float, str, Timing]]] = defaultdict(list)
    for block in profile.blocks.values():
        # Blocks of one pattern may differ in more than their samples: what they keep tells.
        each = round(block.saved_bytes / block.samples, -2) if block.samples else 0
        alike = block.pattern, block.tp, block.processes, each
        for part in ("forward", "backward"):
            key = ("block", part, *alike)
            rows[key].append((block.samples, _block(block, part), getattr(block, part)))
    for sent in profile.collectives:
        over = ("collective", sent.operation, sent.group, sent.groups_at_once, sent.loaded)
        rows[over].append((sent.nbytes, _collective(sent), sent.time))
    for copy in profile.copies:
        what = f"copy {copy.direction} of {size(copy.nbytes)}"
        rows["copy", copy.direction].append((copy.nbytes, what, copy.time))
    for found in rows.values():
        for (less, what, slow), (more, other, fast) in pairwise(sorted(found, key=lambda r: r[0])):
            if less < more and slow.median_s > TURNED * fast.median_s:
                yield Outlier(what, slow, f"takes {slow.median_s / fast.median_s:.1f} times as long"
                                          f" as {other}")  # fmt: skip
