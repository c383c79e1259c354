"""Times tiles on a device, class by class as long as there is time.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.tile_times PLACE` tries the same on a CPU, tiny: facts
as lines of JSON.
"""

import json
import sys
from collections.abc import Iterator
from itertools import groupby

import torch

from benchmarks.gpu.step import Fact, Place, guarded
from benchmarks.gpu.steps.kernels import seconds_of
from benchmarks.gpu.tile_cases import TileCase, proposal, tile_cases
from meshwright.ir.launch import INTERPRETED, triton
from meshwright.ir.tiles import ANY, device_of, tile

SPARE_S = 4.0
"""Left of the step where no class is begun any more."""


def times(place: Place) -> Iterator[Fact]:
    """Yields what each tile takes, and how much longer the counted one takes than the best; writes
    `tiles.json` as the device proposes it. Classes that were not compared whole are left out."""
    if place.device != "cuda" and not INTERPRETED:
        yield "tiles/why", "Triton runs on no CPU, but for its interpreter"
        return
    if triton is None:
        yield "tiles/why", "Triton is not installed"
        return
    timed: dict[TileCase, float] = {}
    classes = groupby(tile_cases(place.device, place.rehearsal), key=lambda one: one.kind)
    for (kernel, most), cases in classes:
        title = f"tiles of {kernel} to {most or 'more'}"
        if place.left_s < place.of(int(SPARE_S), 0):
            yield f"{title}/why", "left out: no time was left"
            continue
        yield from guarded(title, _class(list(cases), place, timed))
    yield from _told(place, timed)


def _class(cases: list[TileCase], place: Place, timed: dict[TileCase, float]) -> Iterator[Fact]:
    """Of one kernel and one width."""
    from triton.runtime.errors import OutOfResources

    found = {}
    for case in cases:
        if place.left_s < place.of(int(SPARE_S), 0) / 2:
            yield f"{case.name}/why", "left out: no time was left"
            return
        try:
            found[case] = seconds_of(case.run, place)
        except OutOfResources as error:  # which is an answer
            yield f"{case.name}/why", str(error).partition("\n")[0]
            continue
        yield f"{case.name}/measured_s", found[case]
    timed |= found


def _told(place: Place, timed: dict[TileCase, float]) -> Iterator[Fact]:
    """Yields what all say together."""
    device = device_of(torch.empty(1, device=place.device))
    if device != ANY or place.rehearsal:
        name = torch.cuda.get_device_name() if place.device == "cuda" else "an interpreter"
        data = proposal(device, name, {(c.kernel, c.tile): s for c, s in timed.items()})
        (place.out / "tiles.json").write_text(json.dumps(data, indent=1))
        yield "tiles/proposal", "tiles.json"
    shares = []
    for kernel, most in {case.kind for case in timed}:
        found = {c.tile: s for c, s in timed.items() if c.kind == (kernel, most)}
        counted = tile(device, kernel, 2, most or 1 << 20)
        same = [s for own, s in found.items() if counted and own.launch == counted.launch]
        shares += [min(same) / min(found.values())] if same else []
    yield "tiles/classes_compared", len(shares)
    if shares:
        yield "tiles/counted_over_best", max(shares)


def main() -> None:
    """Prints facts as lines of JSON."""
    for found in times(Place.of_text(sys.argv[1])):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
