"""Graphs that the benchmark keeps between runs are those that it would trace anew."""

from dataclasses import replace

import pytest

from benchmarks.published.report import evaluate
from benchmarks.published.rows import Table
from tests.benchmarks.published_rows import row

SMALL = {"hidden": 64, "layers": 2, "heads": 2, "ffn": 256, "vocab": 128}
ALONE = {"hardware": {"gpu": "A100-SXM4-80GB", "gpus": 1}, "parallel": {"pp": 1},
         "batch": {"gbs": 2, "mbs": 1, "seq": 64}}  # fmt: skip


def test_a_row_is_predicted_alike_from_a_kept_graph(tmp_path, monkeypatch):
    table = Table("small", (row(model=SMALL, **ALONE),), ())
    plain = evaluate(table)
    assert plain.cases
    assert not plain.skipped
    assert evaluate(table, traces=tmp_path) == plain
    assert len(list(tmp_path.iterdir())) == 1

    monkeypatch.setattr("benchmarks.published.route._traced", None)
    assert evaluate(table, traces=tmp_path) == plain, "from what was kept"
    deeper = replace(table, rows=(row(model=SMALL | {"layers": 3}, **ALONE),))
    with pytest.raises(TypeError):
        evaluate(deeper, traces=tmp_path)
