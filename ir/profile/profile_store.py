"""Profiles in one SQLite file: a table per kind of record, a row per record, several machines.

Every `add` is a transaction, so that what was measured before an interruption is kept.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from meshwright.ir.cluster.device import OPERATIONS, OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.bounds import figure_problems
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    CopyRecord,
    Machine,
    MemoryRecord,
    OpRecord,
    OptimizerRecord,
    Profile,
)
from meshwright.ir.profile.record_rows import Cell, columns_of, record_of, row_of
from meshwright.ir.text.canonical import check_regular
from meshwright.ir.text.plain_text import check_texts, shown

Record = OpRecord | BlockRecord | CollectiveRecord | CopyRecord | MemoryRecord | OptimizerRecord
T = TypeVar("T")

APPLICATION_ID = 0x6D776466
"""Marks our files among SQLite's."""
SCHEMA_VERSION = 1
MAX_BYTES = 2**28
MAX_RECORDS = 300_000
"""Of one kind."""
_MAGIC = b"SQLite format 3\0"
_MACHINE = ("device", "kind", "driver", "torch", "backend", "cores")
"""Columns by which machines are told apart."""


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    record: type
    key: tuple[str, ...]


_TABLES = (
    _Table("ops", OpRecord, ("key",)),
    _Table("blocks", BlockRecord, ("key",)),
    _Table(
        "collectives",
        CollectiveRecord,
        ("operation", "group_size", "group_per_node", "group_stride", "groups_at_once", "loaded",
         "nbytes"),
    ),
    _Table("copies", CopyRecord, ("direction", "nbytes")),
    _Table("memory", MemoryRecord, ("name",)),
    _Table("optimizers", OptimizerRecord, ("optimizer", "num_tensors", "nbytes")),
)  # fmt: skip
_TABLE_OF = {table.record: table for table in _TABLES}


class ProfileStore:
    """An open file. Use it in a `with`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    def __enter__(self) -> "ProfileStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def machines(self) -> tuple[Machine, ...]:
        """All that something was measured on."""
        with _refusing(self.path):
            return tuple(_sound(Machine, row) for _, row in self._machine_rows())

    def add(self, machine: Machine, *records: Record) -> None:
        """Stores records of a machine; they replace older ones of the same key."""
        with _refusing(self.path), self._connection:
            number = self._number(machine)
            for record in records:
                table = _TABLE_OF[type(record)]
                names = ["machine", *(column.name for column in columns_of(table.record))]
                check_texts(row_of(record), f"a {table.record.__name__} of the profile")
                marks = ", ".join("?" * len(names))
                self._connection.execute(
                    f"INSERT OR REPLACE INTO {table.name} ({', '.join(names)}) VALUES ({marks})",
                    (number, *row_of(record)),
                )

    def has(self, machine: Machine, record: type[Record], *key: Cell) -> bool:
        """Whether a record of that type with that key is there: a block's or op's `key`, the
        direction and size of a copy, a memory record's name, and so on."""
        table = _TABLE_OF[record]
        where = " AND ".join(f"{name} = ?" for name in table.key)
        with _refusing(self.path):
            number = self._known(machine)
            query = f"SELECT 1 FROM {table.name} WHERE machine = ? AND {where}"
            return self._connection.execute(query, (number, *key)).fetchone() is not None

    def load(self, machine: Machine | str | None = None) -> Profile:
        """What was measured on a machine; it may be named by part of its text."""
        with _refusing(self.path):
            number, found = self._choose(machine)
            ops, blocks, collectives, copies, memory, optimizers = (
                self._records(table, number) for table in _TABLES
            )
            return Profile(
                machine=found,
                ops={r.key: r for r in _only(OpRecord, ops)},
                blocks={r.key: r for r in _only(BlockRecord, blocks)},
                collectives=_only(CollectiveRecord, collectives),
                copies=_only(CopyRecord, copies),
                memory={r.name: r for r in _only(MemoryRecord, memory)},
                optimizers=_only(OptimizerRecord, optimizers),
            )

    def _records(self, table: _Table, number: int) -> list[object]:
        """In the order of their keys, whatever order they were measured in."""
        query = f"SELECT * FROM {table.name} WHERE machine = ? ORDER BY {', '.join(table.key)}"
        cursor = self._connection.execute(query, (number,))
        names = [column[0] for column in cursor.description]
        return [_sound(table.record, dict(zip(names, row, strict=True))) for row in cursor]

    def _machine_rows(self) -> list[tuple[int, dict[str, Cell]]]:
        cursor = self._connection.execute("SELECT * FROM machines ORDER BY id")
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        return [(row.pop("id"), row) for row in rows]

    def _choose(self, machine: Machine | str | None) -> tuple[int, Machine]:
        rows = [(number, _sound(Machine, row)) for number, row in self._machine_rows()]
        if not rows:
            raise PlanError(f"{self.path} holds no measurements: run meshwright profile")
        if isinstance(machine, Machine):
            fitting = [(n, m) for n, m in rows if _identity(m) == _identity(machine)]
        else:
            fitting = [(n, m) for n, m in rows if machine is None or machine in str(m)]
        if len(fitting) == 1:
            return fitting[0]
        there = "; ".join(str(m) for _, m in rows)
        asked = "none is chosen" if machine is None else f"{str(machine)!r} fits {len(fitting)}"
        raise PlanError(f"{self.path} is of {len(rows)} machines and {asked}: {there}")

    def _known(self, machine: Machine) -> int:
        where = " AND ".join(f"{name} = ?" for name in _MACHINE)
        row = self._connection.execute(
            f"SELECT id FROM machines WHERE {where}", _identity(machine)
        ).fetchone()
        return -1 if row is None else int(row[0])

    def _number(self, machine: Machine) -> int:
        """The machine's number; new machines get one."""
        number = self._known(machine)
        if number < 0:
            names = [column.name for column in columns_of(Machine)]
            marks = ", ".join("?" * len(names))
            cursor = self._connection.execute(
                f"INSERT INTO machines ({', '.join(names)}) VALUES ({marks})", row_of(machine)
            )
            number = int(cursor.lastrowid or 0)
        return number


def open_store(path: Path | str) -> ProfileStore:
    """The store in a file, which is made unless it is there; PlanError if it is something else."""
    path = Path(path)
    _check_magic(path)
    with _refusing(path), ExitStack() as on_failure:
        connection = on_failure.enter_context(closing(sqlite3.connect(path)))
        with connection:
            _prepare(path, connection)
        on_failure.pop_all()
    return ProfileStore(path, connection)


def load_profile(path: Path | str, machine: Machine | str | None = None) -> Profile:
    """What a file holds of a machine; of the only one if none is named."""
    if not Path(path).exists():
        raise PlanError(f"there is no profile {path}: run meshwright profile -o {path}")
    check_regular(Path(path), MAX_BYTES)
    if not Path(path).stat().st_size:
        raise PlanError(f"{path} is empty, not a profile: remove it and run meshwright profile")
    with open_store(path) as store:
        return store.load(machine)


def _check_magic(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise PlanError(f"{path} cannot be a profile: it must be a file in a folder that is there")
    if path.exists():
        check_regular(path, MAX_BYTES)
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise PlanError(f"{path} is not a profile: it is no SQLite database")


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Checks whose file it is, and makes what is missing."""
    (ours,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and ours != APPLICATION_ID:
        raise PlanError(f"{path} is not a profile: it is a database of something else")
    if version > SCHEMA_VERSION:
        raise PlanError(
            f"{path} is a profile of schema {version}; this meshwright reads {SCHEMA_VERSION}: "
            "use a newer meshwright"
        )
    connection.execute("PRAGMA trusted_schema = OFF")
    _check_tables(path, connection)
    (health,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if health != "ok":
        raise PlanError(f"{path} is damaged ({health}): remove it and profile again")
    if not tables:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    for statement in _schema(connection):
        connection.execute(statement)


def _check_tables(path: Path, connection: sqlite3.Connection) -> None:
    """PlanError for a database with more than tables of ours: a view or a trigger is a program."""
    known = {"machines": ("id",)} | {t.name: ("machine", *t.key) for t in _TABLES}
    query = "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master"
    for kind, name, table, page, sql in connection.execute(query):
        own = kind == "table" and name in known and isinstance(page, int) and page > 0
        if not own and not (kind == "index" and table in known and sql is None):
            raise PlanError(f"{path} is not a profile: it has {shown(kind)} {shown(name)}")
        if not own:
            continue
        columns = connection.execute(f"PRAGMA table_xinfo({name})").fetchall()
        keys = tuple(c[1] for c in sorted(columns, key=lambda c: c[5]) if c[5])
        if keys != known[name] or any(c[6] for c in columns):
            raise PlanError(f"{path} is not a profile: its table {name} has other columns")
        (count,) = connection.execute(f"SELECT count(*) FROM {name}").fetchone()
        if count > MAX_RECORDS:
            raise PlanError(f"{path} has {count:,} {name}; at most {MAX_RECORDS:,} are read")


def _schema(connection: sqlite3.Connection) -> Iterator[str]:
    """What makes the file's tables those of this version: new ones, and new columns."""
    machine = ", ".join(column.sql for column in columns_of(Machine))
    yield (
        f"CREATE TABLE IF NOT EXISTS machines (id INTEGER PRIMARY KEY, {machine}, "
        f"UNIQUE ({', '.join(_MACHINE)}))"
    )
    for table in _TABLES:
        columns = columns_of(table.record)
        yield (
            f"CREATE TABLE IF NOT EXISTS {table.name} (machine INTEGER NOT NULL REFERENCES "
            f"machines (id), {', '.join(c.sql for c in columns)}, "
            f"PRIMARY KEY (machine, {', '.join(table.key)}))"
        )
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")}
        for column in columns:
            if there and column.name not in there:
                yield f"ALTER TABLE {table.name} ADD COLUMN {column.sql}"


def _sound(record: type[T], row: Mapping[str, Cell]) -> T:
    """The record of a row, whose texts and figures can be those of one."""
    check_texts(row, f"a {record.__name__} of the profile")
    found = record_of(record, row)
    for name, words in _WORDS.get(record, {}).items():
        if (word := getattr(found, name)) not in words:
            known = ", ".join(words)
            raise PlanError(
                f"the profile: {record.__name__}.{name} is {shown(word)}, none of {known}"
            )
    for problem in figure_problems(record.__name__, found, frozenset(), _COUNTS):
        raise PlanError(f"the profile: {problem}")
    return found


_WORDS: Mapping[type, Mapping[str, Sequence[str]]] = {
    OpRecord: {"op_class": tuple(OpClass)},
    CollectiveRecord: {"operation": OPERATIONS},
    CopyRecord: {"direction": ("to_device", "to_host", "within")},
    Machine: {"kind": ("cuda", "cpu")},
}
_COUNTS = frozenset({"size", "per_node", "stride", "groups_at_once", "samples", "tp", "processes"})


def _identity(machine: Machine) -> tuple[Cell, ...]:
    return tuple(getattr(machine, name) for name in _MACHINE)


def _only(record: type[T], found: list[object]) -> tuple[T, ...]:
    return tuple(x for x in found if isinstance(x, record))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """SQLite's complaints become ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise PlanError(f"{path} cannot be used as a profile: {error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is damaged: a name in it is no text") from error
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
