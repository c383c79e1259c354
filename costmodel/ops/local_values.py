"""Values as one rank holds them, by number, so that their sizes for other samples are quick."""

from dataclasses import dataclass, field, replace
from math import prod

from meshwright.costmodel.block.site import StageSite
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import Placement, local_shape

Where = dict[str, Placement]
Shape = tuple[int, ...]
_Form = tuple[tuple[int, bool], ...]
"""Per dim its size for one sample, and whether it grows with the samples."""


@dataclass(slots=True)
class Values:
    """Values with their placements, by number."""

    graph: Graph
    numbers: dict[tuple[str, tuple[tuple[str, Placement], ...]], int] = field(default_factory=dict)
    held: list[tuple[str, Where]] = field(default_factory=list)
    forms: dict[int, _Form | None] = field(default_factory=dict)
    ends: tuple[StageSite, StageSite] | None = None
    """The site with one sample per replica, and with the whole batch."""

    def number(self, name: str, where: Where) -> int:
        key = name, tuple(where.items())
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.held)
            self.held.append((name, where))
        return found

    def shape(self, number: int, site: StageSite) -> Shape:
        """On a rank."""
        name, where = self.held[number]
        return local_shape(self.graph.tensors[name].shape, where, site.axes, site.coordinates)

    def shapes_for(self, numbers: range, site: StageSite, samples: int) -> list[Shape]:
        """On a rank, for so many samples; quicker where values are asked for at many numbers."""
        forms = self.forms
        for number in numbers:
            if number not in forms:
                forms[number] = self._form(number, site)
        return [
            self.shape(number, site)
            if (form := forms[number]) is None
            else tuple([size * samples if grows else size for size, grows in form])
            for number in numbers
        ]

    def _form(self, number: int, site: StageSite) -> _Form | None:
        """None where parts are rounded. Sizes are whole parts of a multiple of the samples, so what
        is exact for one and for the whole batch is exact between."""
        batch = self.graph.batch_size
        if self.ends is None:
            self.ends = with_samples(site, 1), with_samples(site, batch)
        one, all_of_it = (self.shape(number, end) for end in self.ends)
        form = tuple((a, a != b) for a, b in zip(one, all_of_it, strict=True))
        exact = all(
            b == (a * batch if grows else a) for (a, grows), b in zip(form, all_of_it, strict=True)
        )
        return form if exact else None


def with_samples(site: StageSite, samples: int) -> StageSite:
    """The site when each replica has so many."""
    data = site.axes["dp"]
    return replace(
        site, axes={**site.axes, "dp": replace(data, shares=(samples,) * len(data.shares))}
    )


@dataclass(slots=True)
class LocalValues:
    """Shapes of values on one rank."""

    values: Values
    site: StageSite
    samples: int = 0
    """Of a replica; 0: what the site says, and shapes are not asked for at other numbers."""
    shapes: list[Shape] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)

    def number(self, name: str, where: Where) -> int:
        """Shapes and elements of a value are there once it has a number here."""
        found = self.values.number(name, where)
        if found >= len(self.shapes):
            self._reach(found + 1)
        return found

    @classmethod
    def of(cls, values: Values, site: StageSite, samples: int) -> "LocalValues":
        """All values that have a number, for so many samples."""
        found = cls(values, site, samples)
        found._reach(len(values.held))
        return found

    def _reach(self, count: int) -> None:
        numbers = range(len(self.shapes), count)
        if self.samples:
            made = self.values.shapes_for(numbers, self.site, self.samples)
        else:
            made = [self.values.shape(i, self.site) for i in numbers]
        self.shapes += made
        self.elements += [prod(shape) for shape in made]
