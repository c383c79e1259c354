"""How often rows of embedding tables occur: counted on batches, or assumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import check_schema, parse_json, read_text

_Floats = npt.NDArray[np.float64]
SCHEMA = "meshwright.rows/1.0"
ZIPF = "zipf:"


@dataclass(frozen=True)
class RowCounts:
    """Per table (module path of its weight): how many rows occurred how often."""

    tables: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Path -> times that a row occurred -> rows that occurred so often."""
    zipf: float | None = None
    """Exponent for tables that were not counted; None: nothing is assumed of them."""

    def distinct(self, path: str, rows: int, lookups: int) -> float | None:
        """Returns how many of a table's rows so many lookups name, on average, each drawn alone;
        None if nothing is known of the table."""
        if (known := self._shares(path, rows)) is None:
            return None
        share, count = known
        return float((count * _named(share, lookups)).sum())

    def again(self, path: str, rows: int, lookups: int, others: int) -> float | None:
        """Returns which share of the rows that so many lookups name is also named by so many
        others, on average; None if nothing is known of the table."""
        if (known := self._shares(path, rows)) is None:
            return None
        share, count = known
        named = count * _named(share, lookups)
        return float((named * _named(share, others)).sum() / named.sum())

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
        Path(path).write_text(json.dumps({"schema": SCHEMA, "tables": tables}) + "\n")

    @classmethod
    def load(cls, given: "str | Path | RowCounts | None") -> "RowCounts | None":
        """Reads a file, or `zipf:1.05`, what is assumed; what is loaded already is returned.
        PlanError names what is wrong."""
        if given is None or isinstance(given, RowCounts):
            return given
        if str(given).startswith(ZIPF):
            return cls(zipf=_exponent(str(given)))
        data = parse_json(read_text(given), str(given))
        check_schema(data, SCHEMA, str(given))
        found = data.get("tables")
        try:
            tables = {
                name: {int(times): int(rows) for times, rows in pairs}
                for name, pairs in found.items()
            }
            odd = [n for n, own in tables.items() if not own or min(*own, *own.values()) < 1]
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(
                f"{given}: tables are lists of [times, rows], as `mw.count_rows(model, "
                "batches).save(path)` writes them"
            ) from error
        if odd:
            raise PlanError(f"{given}: counts of {odd[0][:80]!r} must be 1 or more")
        return cls(tables)


def _named(share: _Floats, lookups: int) -> _Floats:
    """How likely so many lookups name a row at least once."""
    # As log1p: of rare rows among many lookups 1 - share is 1.
    with np.errstate(divide="ignore"):
        return np.asarray(1 - np.exp(lookups * np.log1p(-share)))


def _exponent(text: str) -> float:
    try:
        found = float(text.removeprefix(ZIPF))
    except ValueError:
        found = -1.0
    if not 0 < found < 10:
        raise PlanError(f"rows={text[:40]!r}: an exponent from 0 to 10, such as zipf:1.05")
    return found
