"""The profile's file: what goes in comes out, several machines, and what is refused."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.ir.cluster.device import OPERATIONS, OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    CopyRecord,
    GroupShape,
    Machine,
    MemoryRecord,
    OpRecord,
    OptimizerRecord,
    Profile,
    Timing,
)
from meshwright.ir.profile.profile_store import SCHEMA_VERSION, load_profile, open_store
from meshwright.ir.text.plain_text import odd_character

CPU = Machine(
    device="Some CPU", kind="cpu", driver="6.1", torch="2.13", backend="gloo", cores=2,
    memory_bytes=2**34,
)  # fmt: skip
GPU = Machine(device="Some GPU", kind="cuda", driver="570.1", torch="2.13", backend="nccl")

text = st.text(st.characters(codec="utf-8").filter(lambda c: not odd_character(c)), max_size=12)
count = st.integers(0, 2**50)
number = st.floats(0, 1e18, allow_nan=False)
seconds = st.floats(0, 1e9, allow_nan=False)
some = st.integers(1, 2**50)
shapes = st.lists(st.lists(count, max_size=4).map(tuple), max_size=3).map(tuple)
timing = st.builds(Timing, median_s=seconds, spread=number, count=count)
maybe = st.none() | timing
group = st.builds(GroupShape, size=some, per_node=some, stride=some)
op_class, operation = st.sampled_from(tuple(OpClass)), st.sampled_from(OPERATIONS)
RECORDS = {
    "ops": st.builds(
        OpRecord, key=text, target=text, op_class=op_class, dtype=text, inputs=shapes, flops=number,
        moved_bytes=number, forward=timing, backward=maybe, backward_input=maybe,
        backward_weight=maybe, saved_bytes=count, causal=st.booleans(),
    ),
    "blocks": st.builds(
        BlockRecord, key=text, pattern=text, samples=some, tp=some, processes=some,
        forward=timing, backward=timing, backward_input=maybe, backward_weight=maybe,
        no_grad_forward=maybe, accumulate=maybe, saved_bytes=count, workspace_bytes=count,
    ),
    "collectives": st.builds(
        CollectiveRecord, operation=operation, nbytes=count, group=group, groups_at_once=some,
        time=timing, loaded=st.booleans(), compute_slowdown=number,
    ),
    "copies": st.builds(
        CopyRecord, direction=st.sampled_from(("to_device", "to_host", "within")), nbytes=count,
        time=timing,
    ),
    "memory": st.builds(MemoryRecord, name=text, value=number, unit=text),
    "optimizers": st.builds(
        OptimizerRecord, optimizer=text, num_tensors=count, nbytes=count, time=timing
    ),
}  # fmt: skip
KEYS = {
    "ops": lambda r: r.key,
    "blocks": lambda r: r.key,
    "collectives": lambda r: (r.operation, r.group, r.groups_at_once, r.loaded, r.nbytes),
    "copies": lambda r: (r.direction, r.nbytes),
    "memory": lambda r: r.name,
    "optimizers": lambda r: (r.optimizer, r.num_tensors, r.nbytes),
}


def held(profile: Profile, kind: str) -> list[object]:
    found = getattr(profile, kind)
    return list(found.values() if isinstance(found, dict) else found)


def some_block(key: str = "k", seconds: float = 0.5) -> BlockRecord:
    timing = Timing(median_s=seconds, spread=0.1, count=5)
    return BlockRecord(
        key=key, pattern="h.*", samples=4, tp=2, processes=2, forward=timing, backward=timing,
        backward_input=None, backward_weight=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_round_trip(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    records = data.draw(st.lists(RECORDS[kind], max_size=4, unique_by=KEYS[kind]))
    shuffled = data.draw(st.permutations(records))
    folder = tmp_path_factory.mktemp("profiles")
    for name, order in (("one.db", records), ("two.db", shuffled)):
        with open_store(folder / name) as store:
            store.add(CPU)
            for record in order:
                store.add(CPU, record)
    one, two = load_profile(folder / "one.db"), load_profile(folder / "two.db")
    assert one.machine == CPU
    assert sorted(held(one, kind), key=repr) == sorted(records, key=repr)
    # Whatever the order of measuring, it is the same profile.
    assert one == two
    assert one.fingerprint == two.fingerprint


def test_a_newer_record_replaces_the_older(tmp_path: Path):
    with open_store(tmp_path / "p.db") as store:
        store.add(CPU, some_block(seconds=0.5))
        before = store.load().fingerprint
        store.add(CPU, some_block(seconds=0.25))
        assert store.load().blocks["k"].forward.median_s == 0.25
        assert store.load().fingerprint != before


def test_what_was_added_stays_when_the_process_dies(tmp_path: Path):
    store = open_store(tmp_path / "p.db")
    store.add(CPU, some_block())
    # Not closed, and in the middle of a transaction.
    store._connection.execute("DELETE FROM blocks")
    assert load_profile(tmp_path / "p.db").blocks["k"] == some_block()


def test_has_is_per_machine(tmp_path: Path):
    with open_store(tmp_path / "p.db") as store:
        store.add(CPU, some_block(), MemoryRecord(name="process", value=1.5, unit="bytes"))
        assert store.has(CPU, BlockRecord, "k")
        assert not store.has(CPU, BlockRecord, "other")
        assert not store.has(GPU, BlockRecord, "k")
        assert store.has(CPU, MemoryRecord, "process")


def test_several_machines(tmp_path: Path):
    with open_store(tmp_path / "p.db") as store:
        store.add(CPU, some_block("a"))
        store.add(GPU, some_block("b"))
        assert store.machines() == (CPU, GPU)
    assert set(load_profile(tmp_path / "p.db", CPU).blocks) == {"a"}
    assert set(load_profile(tmp_path / "p.db", "Some GPU").blocks) == {"b"}
    with pytest.raises(PlanError, match=r"2 machines and none is chosen: Some CPU.*; Some GPU"):
        load_profile(tmp_path / "p.db")
    with pytest.raises(PlanError, match="'Other' fits 0: Some CPU"):
        load_profile(tmp_path / "p.db", "Other")


def _text_file(path: Path):
    path.write_text("not a database, but long enough to look like a file with something in it")


def _other_database(path: Path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cookies (name TEXT)")


def _newer(path: Path):
    open_store(path).__exit__(None, None, None)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def _full(path: Path):
    with open_store(path) as store:
        store.add(CPU, *(some_block(f"block {i}") for i in range(200)))


def _truncated(path: Path):
    _full(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _scribbled(path: Path):
    _full(path)
    content = bytearray(path.read_bytes())
    content[6000:12000] = b"\xab" * 6000
    path.write_bytes(bytes(content))


def _wrong_cell(path: Path):
    _full(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE blocks SET forward_median_s = 'fast' WHERE key = 'block 3'")


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_text_file, "no SQLite database"),
        (_other_database, "something else"),
        (_newer, "newer meshwright"),
        (_truncated, "damaged|malformed"),
        (_scribbled, "damaged|malformed"),
        (_wrong_cell, "'fast', which is no number"),
        (Path.touch, "empty"),
        (Path.mkdir, "is a folder; give a file"),
        (lambda path: None, "no profile"),
    ],
)
def test_refused(spoil, word: str, tmp_path: Path):
    path = tmp_path / "p.db"
    spoil(path)
    with pytest.raises(PlanError, match=word):
        load_profile(path)


def test_nothing_foreign_is_overwritten(tmp_path: Path):
    for spoil in (_text_file, _other_database):
        path = tmp_path / spoil.__name__
        spoil(path)
        before = path.read_bytes()
        with pytest.raises(PlanError):
            open_store(path)
        assert path.read_bytes() == before


def test_a_column_that_is_added_later_has_its_default_in_old_files(tmp_path: Path):
    path = tmp_path / "p.db"
    _full(path)
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE blocks DROP COLUMN workspace_bytes")
        connection.execute("ALTER TABLE blocks DROP COLUMN accumulate_median_s")
        connection.execute("ALTER TABLE blocks DROP COLUMN accumulate_spread")
        connection.execute("ALTER TABLE blocks DROP COLUMN accumulate_count")
    assert load_profile(path).blocks["block 7"] == some_block("block 7")
