"""The printed plan says what a reader must know."""

from meshwright.ir.plan import Alternative, Evidence
from meshwright.ir.show import seconds, size, to_text
from tests.ir.plans import plan

EVIDENCE = Evidence(
    searcher="dp", seed=0, candidates=1234, infeasible=5, exhausted=True, bound_s=1.0, gap=0.25,
    alternatives=(Alternative(name="dp 4", step_s=1.5, peak_bytes=10**9, why="slower: 20 %"),),
)  # fmt: skip


def test_everything_is_there() -> None:
    text = str(plan(evidence=EVIDENCE, notes=("batch-norm",), constraints=("pp=2",)))
    for part in (
        "Toy", "a100-40", "4 of 4 devices", "batch 8 = 2 x 4", "1.25 s per step", "h.0 .. h.1",
        "0-2", "dp_replicate 3", "2+1+1", "one device", "optim.", "1.01 kB", "one_f_one_b",
        "0F0 0F1 0B0 0B1", "1,234 candidates", "gap 25.0%", "slower: 20 %", "note: batch-norm",
        "constraints: pp=2",
    ):  # fmt: skip
        assert part in text, part


def test_a_bare_plan_prints() -> None:
    text = to_text(plan(predicted=None), width=60)
    assert "Stages" in text and max(map(len, text.splitlines())) <= 60


def test_units() -> None:
    assert [seconds(x) for x in (2.5, 0.0123, 4e-6, 0.0)] == ["2.5 s", "12.3 ms", "4 us", "0 us"]
    assert [size(x) for x in (2e12, 3.21e9, 5e6, 7e3, 12)] == [
        "2 TB", "3.21 GB", "5 MB", "7 kB", "12 B",
    ]  # fmt: skip
