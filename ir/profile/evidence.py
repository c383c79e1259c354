"""Measured curves of a device, kept as the source of what its preset says.

Files lie in `ir/presets/measured`; a preset names its own in `Preset.evidence`. A preset's numbers
are those of its file and change by hand alone: this is what to look at then, and what to cite.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from meshwright.ir.cluster.device import OpClass, OpCurve
from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import at_path, check_schema, format_json, parse_json, read_text

SCHEMA = "meshwright.measured-curves/1"
FOLDER = Path(__file__).parents[1] / "presets" / "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurves:
    """Curves that fit one profile of one device."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    preset: str
    """Of the device; the fit began with its curves."""
    date: str
    """UTC, as YYYY-MM-DD."""
    machine: str
    """Device, driver, torch: `Machine` as text."""
    fingerprint: str
    """Of the profile."""
    ops: int
    """How many were measured."""
    curves: Mapping[OpClass, OpCurve]
    """By class of ops that were measured."""


_ADAPTER = TypeAdapter(MeasuredCurves)


def save_curves(found: MeasuredCurves, folder: Path = FOLDER) -> Path:
    """Writes the file, named by preset and date; its path. An equal name is written over."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.preset}-{found.date}.json"
    data = {"schema": SCHEMA, **_ADAPTER.dump_python(found, mode="json")}
    path.write_text(format_json(data), encoding="utf-8")
    return path


def load_curves(path: Path) -> MeasuredCurves:
    """Reads a file; PlanError says what is wrong with it."""
    data = parse_json(read_text(path), str(path))
    check_schema(data, SCHEMA, str(path))
    data.pop("schema")
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise PlanError(f"{path}: {at_path(data, first['loc'])}: {first['msg']}") from error
