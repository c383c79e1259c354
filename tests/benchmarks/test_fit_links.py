"""The benchmark that makes the presets of links, on made-up tables of the published form."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fit import links as fit_links
from benchmarks.fit.link_tables import NCCL, NETWORK, PLAYBOOK, SINGLE, nccl_rows, other_series
from benchmarks.fit.preset_text import IR, put
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.ir.cluster.device import Curve
from meshwright.ir.cluster.links import curve
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import LINKS

OPERATIONS = ("all_gather", "all_reduce", "alltoall", "reduce_scatter")


def nccl_table() -> list[dict[str, Any]]:
    return [
        {"gpu": gpu, "gpus": size, "op": op, "bytes": 2**k, "latency_us": 10 + size + 2**k / 2e5}
        for gpu in SINGLE
        for op in OPERATIONS
        for size in (2, 4, 8)
        for k in range(9, 30, 2)
    ]


def network_table() -> list[dict[str, Any]]:
    one = {"collective": "all_reduce", "tool": "nccl-tests", "source": "made/up table"}
    rows: list[dict[str, Any]] = [
        {**one, "hardware": {"gpu": "V100 (node)", "gpus": size, "nodes": 1}, "bytes": 2**k,
         "measured": {"time_us": 30 + 2**k / 1e5}}
        for size in (2, 8) for k in range(20, 31)
    ]  # fmt: skip
    rows += [
        {**one, "hardware": {"gpu": "B200-SXM", "gpus": 32, "nodes": 4}, "bytes": 2**k,
         "measured": {"busbw_gb_s": 300 * 2**k / (2**k + 2**24)}}
        for k in range(15, 34)
    ]  # fmt: skip
    two = {"gpu": "unstated", "nodes": 2, "gpus_per_node": 8}
    rows += [
        {"hardware": two, "collective": "p2p", "group_size": 2, "source": "made/up",
         "measured": {"bandwidth_gb_s": 8.0}},
        {"hardware": two, "collective": "all_reduce", "group_size": 4, "consecutive": False,
         "source": "made/up", "measured": {"bandwidth_gb_s": 16.0}},
    ]  # fmt: skip
    return rows


def playbook_table() -> list[dict[str, Any]]:
    return [
        {"kind": "collective_bandwidth", "collective": op, "bytes": 2**28,
         "hardware": {"gpu": "H100", "gpus": 8 * n, "nodes": n, "gpus_per_node": 8},
         "measured": {"busbw_gb_s": 200 / n}}
        for op in ("all_reduce", "all_gather") for n in (2, 4, 8)
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tables = {NCCL: nccl_table(), NETWORK: network_table(), PLAYBOOK: playbook_table()}
    for name, rows in tables.items():
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    return tmp_path


def test_rows_count_the_whole_value(folder: Path) -> None:
    rows = nccl_rows(folder)["nvlink3"]
    largest = {op: max(r.nbytes for r in rows if r.operation == op and r.size == 8)
               for op in ("all_reduce", "all_to_all")}  # fmt: skip
    assert largest == {"all_reduce": 2**29, "all_to_all": 8 * 2**29}
    bus = next(s for s in other_series(folder) if s.judges and s.nodes == 2)
    row = next(r for r in bus.rows if r.operation == "all_reduce")
    assert row.seconds == pytest.approx(2 * 15 / 16 * 2**30 / 100e9)


def test_the_files_of_presets_hold_the_fit(folder: Path, tmp_path: Path) -> None:
    ir = tmp_path / "ir"
    shutil.copytree(IR / "presets", ir / "presets")
    (ir / "cluster").mkdir()
    shutil.copy(IR / "cluster" / "links.py", ir / "cluster")
    curves = fit_links.shipped(folder)
    assert set(curves) == {*SINGLE.values(), "nvlink2", "efa-p5", "efa-p6"}
    texts = fit_links.texts(curves)
    assert all(put(name, text, folder=ir) for name, text in texts.items())
    assert not put("OF_NOBODY_CURVES", "", folder=ir)
    whole = "".join(path.read_text() for path in ir.rglob("*.py"))
    for (name, text), known in zip(texts.items(), curves.values(), strict=True):
        assert text in whole and whole.count(f"{name} = (") == 1
        assert max(map(len, text.splitlines())) <= 100
        made: dict[str, tuple[Curve, ...]] = {}
        exec(text, {"curve": curve}, made)
        for mine, written in zip(known, made[name], strict=True):
            assert (mine.operation, mine.size) == (written.operation, written.size)
            for (n, s), (m, t) in zip(mine.points, written.points, strict=True):
                assert m == pytest.approx(n, abs=1) and t == pytest.approx(s, rel=1e-3, abs=1e-9)


def test_the_report_tells_held_out_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fit_links.report(folder)
    assert "| nvlink3 | all_reduce |" in text and "efa-p6" in text
    # The made-up timings are straight lines, which a fit on half of them meets on the rest.
    cells = next(x for x in text.splitlines() if x.startswith("| nvlink4 | all |")).split("|")
    assert float(cells[6].split("%")[0]) < 1.0


def test_missing_tables_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fit_links", str(tmp_path)])
    with pytest.raises(SystemExit, match=NCCL):
        fit_links.main()


def test_every_preset_link_prices_every_operation() -> None:
    for link in LINKS.values():
        for word in (Primitive.ALL_REDUCE, Primitive.ALL_GATHER, Primitive.ALL_TO_ALL):
            times = [
                collective_time(word, nbytes, (Level(size, link),))
                for size in (2, 3, 8, 64)
                for nbytes in (0.0, 1e6)
            ]
            assert all(0 < seconds < 1 for seconds in times)
        assert 0 < link.band < 1 and link.reference
