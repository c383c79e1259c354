"""How often rows of embedding tables occur: counted on batches, or assumed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.ir.errors import PlanError
from meshwright.ir.profile.zipf import ZIPF, zipf_exponent
from meshwright.ir.text.canonical import check_schema, parse_json, read_text

_Floats = npt.NDArray[np.float64]
SCHEMA = "meshwright.rows/1.0"
MOST_ROWS = 4_000_000
"""Rows that a file has numbers of, at most."""


@dataclass(frozen=True)
class RowCounts:
    """Per table (module path of its weight): how many rows occurred how often."""

    tables: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Path -> times that a row occurred -> rows that occurred so often."""
    zipf: float | None = None
    """Exponent for tables that were not counted; None: nothing is assumed of them."""
    parts: Mapping[str, Sequence[Mapping[int, int]]] = field(default_factory=dict)
    """The same as `tables` of each of so many equal parts of a table, in the order of its rows;
    nothing of tables of which nobody knows where rows lie that occur often."""
    each: Mapping[str, _Floats] = field(default_factory=dict, compare=False)
    """Of tables that were counted row by row: how often each row occurred."""

    def distinct(self, path: str, rows: int, lookups: int) -> float | None:
        """Returns how many of a table's rows so many lookups name, on average, each drawn alone;
        None if nothing is known of the table."""
        if (known := self._shares(path, rows)) is None:
            return None
        share, count = known
        return float((count * _named(share, lookups)).sum())

    def named(self, path: str, rows: int, lookups: int) -> tuple[_Floats, _Floats] | None:
        """Returns how likely so many lookups name a row, the likeliest rows first, and how many
        rows are as likely; None if nothing is known of the table."""
        if (known := self._shares(path, rows)) is None:
            return None
        share, count = known
        if (unseen := rows - count.sum()) > 0:
            share, count = np.append(share, 0.0), np.append(count, unseen)
        order = np.argsort(-share, kind="stable")
        return _named(share[order], lookups), count[order]

    def again(self, path: str, rows: int, lookups: int, others: int) -> float | None:
        """Returns which share of the rows that so many lookups name is also named by so many
        others, on average; None if nothing is known of the table."""
        if (known := self._shares(path, rows)) is None:
            return None
        share, count = known
        named = count * _named(share, lookups)
        return float((named * _named(share, others)).sum() / named.sum())

    def busiest(self, path: str, rows: int, lookups: int, owners: int) -> float:
        """Returns how many times the mean one of so many owners has, each of a chunk of the rows,
        of the rows that so many lookups name: the one that has most. 1.0 if nobody knows where rows
        lie that occur often."""
        parts = self.parts.get(path, ())
        if not parts or owners < 2:
            return 1.0
        every = sum(times * count for times, count in self.tables[path].items())
        named = np.array([
            sum(n * float(_named(np.array(times / every), lookups)) for times, n in part.items())
            for part in parts
        ])  # fmt: skip
        # As many of a part as lie in a chunk.
        until = np.concatenate([[0.0], named.cumsum()])
        chunk = -(-rows // owners) / rows * len(parts)
        bounds = np.minimum(np.arange(owners + 1) * chunk, len(parts))
        owned = np.diff(np.interp(bounds, np.arange(len(parts) + 1), until))
        return max(1.0, float(owned.max() / owned.mean()))

    def _shares(self, path: str, rows: int) -> tuple[_Floats, _Floats] | None:
        """How often a lookup names a row, and how many rows are named so often."""
        if path in self.tables:
            times = np.array(list(self.tables[path]), dtype=float)
            count = np.array(list(self.tables[path].values()), dtype=float)
            return times / (times * count).sum(), count
        if self.zipf is None:
            return None
        share = np.arange(1, rows + 1, dtype=float) ** -self.zipf
        return share / share.sum(), np.ones(rows)

    @property
    def source(self) -> str:
        """Where they are from, for people."""
        assumed = f"assumed to be Zipf's with exponent {self.zipf:g}" if self.zipf else ""
        return " and ".join(filter(None, ("counted" if self.tables else "", assumed)))

    def save(self, path: str | Path) -> None:
        """Writes them as JSON."""
        tables = {
            name: [[times, rows] for times, rows in sorted(found.items())]
            for name, found in sorted(self.tables.items())
        }
        parts = {
            name: [sorted(part.items()) for part in found]
            for name, found in sorted(self.parts.items())
        }
        each = {
            name: {"of": len(found), "rows": _by_times(found)}
            for name, found in sorted(self.each.items())
        }
        data = {"schema": SCHEMA, "tables": tables} | ({"parts": parts} if parts else {})
        data |= {"each": each} if each else {}
        Path(path).write_text(json.dumps(data) + "\n")

    @classmethod
    def load(cls, given: "str | Path | RowCounts | None") -> "RowCounts | None":
        """Reads a file, or `zipf:1.05`, what is assumed; what is loaded already is returned.
        PlanError names what is wrong."""
        if given is None or isinstance(given, RowCounts):
            return given
        if str(given).startswith(ZIPF):
            return cls(zipf=zipf_exponent(str(given), "rows", "zipf:1.05"))
        data = parse_json(read_text(given), str(given))
        check_schema(data, SCHEMA, str(given))
        found = data.get("tables")
        try:
            tables = {
                name: {int(times): int(rows) for times, rows in pairs}
                for name, pairs in found.items()
            }
            parts = {
                name: tuple({int(times): int(rows) for times, rows in part} for part in found)
                for name, found in data.get("parts", {}).items()
            }
            odd = [n for n, own in tables.items() if not own or min(*own, *own.values()) < 1]
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(
                f"{given}: tables are lists of [times, rows], as `mw.count_rows(model, "
                "batches).save(path)` writes them"
            ) from error
        each = _each(data.get("each", {}), tables, str(given))
        if odd:
            raise PlanError(f"{given}: counts of {odd[0][:80]!r} must be 1 or more")
        if strange := [name for name in parts if _added(parts[name]) != tables.get(name)]:
            raise PlanError(f"{given}: parts of {strange[0][:80]!r} are not those of its table")
        return cls(tables, parts=parts, each=each)


def _by_times(counts: _Floats) -> list[list[Any]]:
    """[times, rows that occurred so often], the most frequent first: as many rows as a file may
    have, the rest counts as not seen."""
    seen = np.flatnonzero(counts)
    most = seen[np.argsort(-counts[seen], kind="stable")][:MOST_ROWS]
    found: list[list[Any]] = []
    for row in most.tolist():
        times = int(counts[row])
        if not found or found[-1][0] != times:
            found.append([times, []])
        found[-1][1].append(row)
    return found


def _each(data: Any, tables: Mapping[str, Mapping[int, int]], where: str) -> dict[str, _Floats]:
    found: dict[str, _Floats] = {}
    try:
        for name, said in data.items():
            counts = np.zeros(_rows_of(said["of"]))
            for times, rows in said["rows"]:
                own = np.array(rows, dtype=np.int64)
                if not len(own) or own.min() < 0 or int(times) < 1:
                    raise ValueError
                counts[own] = int(times)
            if name not in tables:
                raise ValueError
            found[name] = counts
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{where}: `each` has of tables that were counted the number of rows and lists of "
            "[times, rows], as `mw.count_rows(model, batches).save(path)` writes them"
        ) from error
    return found


def _rows_of(said: Any) -> int:
    if type(said) is not int or not 1 <= said < 2**31:
        raise ValueError
    return said


def _added(parts: Sequence[Mapping[int, int]]) -> Mapping[int, int]:
    """Of a table, what is told of its parts."""
    found: Counter[int] = Counter()
    for part in parts:
        found.update(part)
    return found


def _named(share: _Floats, lookups: int) -> _Floats:
    """How likely so many lookups name a row at least once."""
    # As log1p: of rare rows among many lookups 1 - share is 1.
    with np.errstate(divide="ignore"):
        return np.asarray(1 - np.exp(lookups * np.log1p(-share)))
