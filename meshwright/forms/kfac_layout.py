"""Who does what on the Kronecker factors of layers: found from shapes alone, so that every rank and
every price finds the same.

A layer has its owner among the ranks of dp_shard, and so as many ranks that precondition its
gradient as there are copies of a shard: KAISA's fraction of gradient workers (Pauloski et al. 2021)
is 1 / dp_shard. Among those each inverse is made by one, who sends it, or by all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.forms.factors import FactorRules
from meshwright.forms.placing import ALL, MatrixTask, Owners, placed
from meshwright.forms.settings import Course, FormSettings, Known, Number, Word
from meshwright.ir.plan.plan import Setting

SETTINGS: Known = {
    "damping": Course(1e-3, 1e-12, 1e18), "factor_decay": Course(0.95, 0.0, 1.0),
    "kl_clip": Course(1e-3, 0.0, 1e6), "lr": Course(0.1, 0.0, 1e6),
    "factor_update_steps": Course(1, 1, 2**30), "inv_update_steps": Course(1, 1, 2**30),
    "base": Word(("inverse", "eigen")), "sends": Word(("bases", "nothing", "cheapest")),
    "message": Number(0.0, 0.0, 1e18), "value": Number(0.0, 0.0, 1e18),
}  # fmt: skip
"""Users' names of the first; `kl_clip` 0: no limit. `lr` is that of the limit. `base`: what is made
of a factor. `sends`: of ranks that precondition the same layers, one makes each base and sends it,
or all make all, or what takes least of both. For that `message` and `value` are what it takes to
begin to send, and to send a value, as numbers of multiplications that a rank does meanwhile."""
EIGEN_TIMES = 3.5
"""What finding eigenvalues and eigenvectors of a matrix takes, in times of inverting it: 3 to 4
where `base_work` was measured."""
PANEL = 300
"""Rows of a matrix that are inverted as slowly as all others together, as each waits for those
before: inverses took 5.4 to 1.4 times a product of matrices of 64 to 1,024 rows (float32, four
processes on two cores of an AMD EPYC, torch 2.13, 2026-11-27). GPUs have more of such rows."""


@dataclass(frozen=True, slots=True)
class KfacSettings:
    """What a form was told."""

    told: FormSettings

    @classmethod
    def of(cls, said: Mapping[str, Setting]) -> "KfacSettings":
        return cls(FormSettings(SETTINGS, said))

    @property
    def eigen(self) -> bool:
        return self.told.word("base") == "eigen"

    def rules(self, step: int) -> FactorRules:
        """Returns how factors are kept and used in a step."""
        told = self.told
        return FactorRules(told.at("damping", step), told.at("factor_decay", step), self.eigen)

    def clip(self, step: int) -> tuple[float, float]:
        """Returns the limit of a step's length, 0: none, and the learning rate that it is for."""
        return self.told.at("kl_clip", step), self.told.at("lr", step)

    @property
    def clips(self) -> bool:
        return bool(self.told.finally_("kl_clip") or self.told.at("kl_clip", 0))

    def is_due(self, name: str, step: int) -> bool:
        """Tells whether what is done every so many steps is done in a step."""
        return step % int(self.told.at(name, step)) == 0

    def every(self, name: str) -> int:
        """Returns the steps between two times, in the end."""
        return int(self.told.finally_(name))

    def makers(self, dims: Sequence[int], workers: int) -> Owners:
        """Returns which of the ranks that precondition with factors of some sizes makes the base of
        each, or `ALL`."""
        sends = self.told.word("sends")
        tasks = [MatrixTask(base_work(n, eigen=self.eigen), self._told(n, sends)) for n in dims]
        if workers == 1 or sends == "nothing":
            return Owners((ALL,) * len(tasks), (0.0,) * workers, sum(t.work for t in tasks), True)
        return placed(tasks, workers, by_all=sends == "cheapest")

    def _told(self, size: int, sends: str) -> float:
        if sends != "cheapest":
            return 0.0
        values = size * size + size if self.eigen else size * (size + 1) / 2
        return self.told.number("message") + self.told.number("value") * values


def base_values(size: int, *, eigen: bool) -> float:
    """Returns how many values that product reads and writes."""
    return 3.0 * base_work(size, eigen=eigen) / size


def base_work(size: int, *, eigen: bool) -> float:
    """Returns what it takes to make the base of a factor, as a number of multiplications of a
    product of matrices that lasts as long."""
    return (EIGEN_TIMES if eigen else 1.0) * (float(size) ** 3 + PANEL * float(size) ** 2)


class KfacLayers:
    """Layers among parameters in order: a weight, and the vector after it if that has as many
    values as the weight has rows."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.layers: list[tuple[int, int]] = []
        """(columns, rows) of each."""
        self.weights: list[int] = []
        """Numbers of their weights among the parameters."""
        self._others: list[float] = []
        self._of: list[tuple[bool, int]] = []
        """Of each parameter: whether it is of a layer, and number of that or of the others."""
        for number, shape in enumerate(shapes):
            if len(shape) in (2, 4):
                self._of.append((True, len(self.layers)))
                self.layers.append((prod(shape[1:]), shape[0]))
                self.weights.append(number)
            elif self._of and self._of[-1][0] and shape == (self.layers[-1][1],):
                columns, rows = self.layers[-1]
                self._of.append((True, len(self.layers) - 1))
                self.layers[-1] = columns + 1, rows
            else:
                self._of.append((False, len(self._others)))
                self._others.append(float(prod(shape)))

    def owners(self, ranks: int) -> tuple[int, ...]:
        """Of all layers, then of the other parameters."""
        return layer_owners(self.layers, self._others, ranks)

    def per_shape(self, owners: Sequence[int]) -> list[int]:
        """Owner of each parameter."""
        return [owners[i if layer else len(self.layers) + i] for layer, i in self._of]


def layer_owners(
    layers: Sequence[tuple[int, int]], others: Sequence[float], ranks: int
) -> tuple[int, ...]:
    """Returns who of some ranks owns which layer, then which of the other parameters."""
    tasks = [
        MatrixTask(base_work(c, eigen=False) + base_work(o, eigen=False) + c * o * (c + o))
        for c, o in layers
    ]
    return placed([*tasks, *map(MatrixTask, others)], ranks).of
