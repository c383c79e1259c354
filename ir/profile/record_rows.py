"""Flat rows of typed columns for the records of a profile, and back.

A nested record is spread over columns that begin with its name (`forward_median_s`); a tuple is
JSON text. What a row lacks gets the field's default, so that a field may be added later on.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import parse_json
from meshwright.ir.text.plain_text import shown

T = TypeVar("T")
Cell = int | float | str | None
_SQL = {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record's table."""

    name: str
    path: tuple[str, ...]
    """Field, and field of the nested record."""
    kind: type
    """int, bool, float or str; tuple for JSON text."""

    @property
    def sql(self) -> str:
        return f"{self.name} {_SQL.get(self.kind, 'TEXT')}"


@cache
def columns_of(record: type) -> tuple[Column, ...]:
    """The columns of a record type."""
    return tuple(_columns(record, ()))


def _columns(record: type, path: tuple[str, ...]) -> Iterator[Column]:
    for name, (kind, _) in _kinds(record).items():
        here = (*path, name)
        if is_dataclass(kind):
            yield from _columns(kind, here)
        else:
            yield Column("_".join(here), here, kind)


@cache
def _kinds(record: type) -> dict[str, tuple[type, bool]]:
    """Type of each field, and whether it may be None; a Literal is text."""
    hints = get_type_hints(record)
    return {field.name: _plain(hints[field.name]) for field in fields(record)}


def _plain(hint: Any) -> tuple[type, bool]:
    optional = isinstance(hint, UnionType)
    if optional:
        hint = next(x for x in get_args(hint) if x is not type(None))
    if get_origin(hint) is Literal:
        return str, optional
    found = get_origin(hint) or hint
    assert isinstance(found, type)
    return found, optional


def row_of(record: object) -> tuple[Cell, ...]:
    """The cells of a record, in the order of `columns_of`."""
    kind: Any = type(record)
    return tuple(_cell(record, column) for column in columns_of(kind))


def _cell(record: object, column: Column) -> Cell:
    value: Any = record
    for name in column.path:
        value = None if value is None else getattr(value, name)
    if value is None or column.kind is not tuple:
        # Whole numbers must come back as what they are.
        return float(value) if column.kind is float and value is not None else value
    return json.dumps(value)


def record_of(record: type[T], row: Mapping[str, Cell], path: tuple[str, ...] = ()) -> T:
    """The record that gave the row."""
    made: Any = record
    given: dict[str, Any] = {}
    for name, (kind, optional) in _kinds(made).items():
        here = (*path, name)
        nested = is_dataclass(kind)
        columns = [c.name for c in _columns(kind, here)] if nested else ["_".join(here)]
        if all(row.get(column) is None for column in columns):
            if optional and columns[0] in row:
                given[name] = None
        elif nested:
            given[name] = record_of(kind, row, here)
        else:
            given[name] = _value(kind, row[columns[0]], columns[0])
    try:
        return record(**given)
    except TypeError as error:
        raise PlanError(f"a {record.__name__} of the profile is incomplete: {error}") from error


def _value(kind: type, cell: Cell, name: str) -> object:
    if kind is bool and cell in (0, 1):
        return bool(cell)
    if kind is tuple and isinstance(cell, str):
        return _tuples(parse_json(cell, f"column {name} of the profile"), name)
    if kind is not bool and isinstance(cell, kind):
        return cell
    raise PlanError(f"column {name} of the profile holds {shown(cell)}, which is no {_NAMES[kind]}")


_NAMES = {int: "whole number", float: "number", str: "text", bool: "0 or 1", tuple: "list"}


def _tuples(value: object, name: str) -> object:
    """Shapes: lists of whole numbers, or of such lists."""
    if isinstance(value, list):
        return tuple(_tuples(item, name) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise PlanError(f"column {name} of the profile holds {shown(value)} in a list of shapes")
