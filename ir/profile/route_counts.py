"""Where tokens of mixtures go: counted on batches, or assumed to be Zipf's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.routing import Routing
from meshwright.ir.profile.zipf import ZIPF, zipf_exponent
from meshwright.ir.text.canonical import check_schema, parse_json, read_text

SCHEMA = "meshwright.routes/1.0"
_TOKENS, _ORDERS = 1024, 16
"""Tokens that are drawn of an assumed distribution, and orders in which experts may lie."""

Picks = npt.NDArray[np.bool_]
"""[tokens, experts]: whether a token picked an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """Of one layer, over all calls of it: sums of what one call has, where experts lie in so many
    equal runs, one a rank."""

    experts: int
    picked: int
    weightless: int = 0
    """Experts beside these that tokens pick as well (`ir.graph.expert_form`)."""
    tokens: int = 0
    reached: Mapping[int, int] = field(default_factory=dict)
    """Ranks -> pairs of a token and a rank that has some of its experts."""
    arrived: Mapping[int, int] = field(default_factory=dict)
    """Ranks -> tokens that came to the busiest one."""
    worked: Mapping[int, int] = field(default_factory=dict)
    """Ranks -> pairs of a token and an expert on the busiest one."""

    def __add__(self, other: "LayerCounts") -> "LayerCounts":
        return LayerCounts(
            experts=self.experts, picked=self.picked, weightless=self.weightless,
            tokens=self.tokens + other.tokens, reached=_sums(self.reached, other.reached),
            arrived=_sums(self.arrived, other.arrived), worked=_sums(self.worked, other.worked),
        )  # fmt: skip


@dataclass(frozen=True)
class RouteCounts:
    """Per layer of experts, by module path."""

    layers: Mapping[str, LayerCounts] = field(default_factory=dict)
    zipf: float | None = None
    """Exponent for layers that were not counted: the i-th most popular expert is picked in
    proportion to i to the power of minus it, and nobody knows where it lies."""
    known: tuple[Routing, ...] = ()
    """What a plan says of kinds of layers (`Plan.routing`)."""

    def routing(self, experts: int, picked: int, weightless: int = 0) -> Routing | None:
        """Returns what layers with so many experts, of which tokens pick so many, do on average;
        None if nothing is known of such layers."""
        size = experts, picked, weightless
        alike = [layer for layer in self.layers.values() if _size(layer) == size]
        if alike:
            return _routing_of(sum(alike[1:], alike[0]), "counted")
        said = [routing for routing in self.known if _size(routing) == size]
        if said or self.zipf is None:
            return said[0] if said else None
        return _assumed(*size, self.zipf)

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Experts, how many a token picks, and how many there are beside them without weights, of
        the kinds of layers that it tells of."""
        return sorted({*map(_size, self.layers.values()), *map(_size, self.known)})

    def save(self, path: str | Path) -> None:
        """Writes them as JSON."""
        layers = {
            name: {
                "experts": x.experts, "picked": x.picked,
                **({"weightless": x.weightless} if x.weightless else {}), "tokens": x.tokens,
                "ranks": [[n, x.reached[n], x.arrived[n], x.worked[n]] for n in sorted(x.reached)],
            } for name, x in sorted(self.layers.items())
        }  # fmt: skip
        Path(path).write_text(json.dumps({"schema": SCHEMA, "layers": layers}) + "\n")

    @classmethod
    def load(cls, given: "RoutesGiven") -> "RouteCounts | None":
        """Reads a file, or `zipf:0.5`, what is assumed; what is loaded already is returned, and
        what a plan says is taken. PlanError names what is wrong."""
        if given is None or isinstance(given, RouteCounts):
            return given
        if isinstance(given, tuple):
            return cls(known=given) if given else None
        if str(given).startswith(ZIPF):
            return cls(zipf=zipf_exponent(str(given), "routes", "zipf:0.5"))
        data = parse_json(read_text(given), str(given))
        check_schema(data, SCHEMA, str(given))
        try:
            layers = {name: _layer(said) for name, said in data["layers"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{given}: layers have experts, picked, tokens and ranks as `mw.count_routes(model,"
                " batches).save(path)` writes them"
            ) from error
        if not layers:
            raise PlanError(f"{given}: it has no layer; count some with `mw.count_routes`")
        return cls(layers)


RoutesGiven = RouteCounts | tuple[Routing, ...] | Path | str | None
"""A `Plan.routing`, or what `RouteCounts.load` reads."""


def _size(of: LayerCounts | Routing) -> tuple[int, int, int]:
    return of.experts, of.picked, of.weightless


def counts_of(picks: Picks, picked: int, weightless: int = 0) -> LayerCounts:
    """Counts one call of a layer; of dropped tokens, and of experts without weights, there is no
    pick."""
    tokens, experts = picks.shape
    reached, arrived, worked = {}, {}, {}
    for ranks in _divisors(experts):
        mine = picks.reshape(tokens, ranks, experts // ranks)
        come = mine.any(2).sum(0)
        reached[ranks], arrived[ranks] = int(come.sum()), int(come.max())
        worked[ranks] = int(mine.sum((0, 2)).max())
    return LayerCounts(
        experts=experts, picked=picked, weightless=weightless, tokens=tokens, reached=reached,
        arrived=arrived, worked=worked,
    )  # fmt: skip


def _routing_of(counts: LayerCounts, source: str, band: float = 0.0) -> Routing:
    ranks, tokens = tuple(sorted(counts.reached)), counts.tokens
    return Routing(
        experts=counts.experts, picked=counts.picked, weightless=counts.weightless,
        source=source, band=band, ranks=ranks,
        reached=tuple(_short(counts.reached[n] / tokens) for n in ranks),
        arrived=tuple(_short(counts.arrived[n] * n / counts.reached[n]) for n in ranks),
        worked=tuple(_short(counts.worked[n] * n / (tokens * counts.picked)) for n in ranks),
    )  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.6g}")


@lru_cache(maxsize=64)
def _assumed(experts: int, picked: int, weightless: int, exponent: float) -> Routing:
    """What experts so popular get, on average over the orders in which they may lie; its band is
    how much the busiest rank's work differs among these."""
    random, choices = np.random.default_rng(0), experts + weightless
    weights = -exponent * np.log(np.arange(1, choices + 1))
    # The first of perturbed logarithms are a draw without putting back.
    drawn = weights + random.gumbel(size=(_TOKENS, choices))
    chosen = np.argpartition(-drawn, picked - 1, axis=1)[:, :picked]
    picks = np.zeros((_TOKENS, choices), bool)
    np.put_along_axis(picks, chosen, True, axis=1)
    orders = (random.permutation(choices)[:experts] for _ in range(_ORDERS))
    found = [counts_of(picks[:, order], picked, weightless) for order in orders]
    works = np.array([[one.worked[n] for n in sorted(one.worked)] for one in found])
    band = float((works.std(0) / works.mean(0)).max())
    return _routing_of(sum(found[1:], found[0]), "assumed", _short(band))


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _sums(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {n: one[n] + other[n] for n in one}


def _layer(said: Any) -> LayerCounts:
    """ValueError and the like where the file says something else or what cannot be."""
    experts, picked, tokens = (_whole(said[name]) for name in ("experts", "picked", "tokens"))
    weightless = _whole(said["weightless"]) if "weightless" in said else 0
    rows = {_whole(row[0]): tuple(map(_whole, row[1:])) for row in said["ranks"]}
    if sorted(rows) != _divisors(experts) or not 1 <= picked <= experts + weightless:
        raise ValueError
    _, _, pairs = rows[1]
    for ranks, (reached, arrived, worked) in rows.items():
        if not reached <= min(pairs, tokens * ranks) or not pairs <= tokens * picked:
            raise ValueError
        # The busiest has no less than the mean, and no more than there is.
        if not reached <= arrived * ranks or not pairs <= worked * ranks:
            raise ValueError
        if not arrived <= reached or not arrived <= worked <= pairs:
            raise ValueError
    sums = [{n: row[i] for n, row in rows.items()} for i in range(3)]
    return LayerCounts(
        experts=experts, picked=picked, weightless=weightless, tokens=tokens, reached=sums[0],
        arrived=sums[1], worked=sums[2],
    )  # fmt: skip


def _whole(said: Any) -> int:
    if type(said) is not int or not 1 <= said < 2**53:
        raise ValueError
    return said
