"""What a run shows where there is no terminal."""

import pytest

from meshwright.ir.profile.measured import StepKind
from meshwright.running.display import recording
from meshwright.running.launch import step_kinds


@pytest.mark.parametrize("steps", [1, 3, 12, 100])
def test_steps_that_are_no_usual_ones_say_so(steps: int, capsys: pytest.CaptureFixture[str]):
    kinds = step_kinds(steps, trace=True)
    with recording("training", steps, 64, show=True) as recorder:
        for kind in kinds:
            recorder.start()
            recorder.stop(1.0, kind)
    lines = capsys.readouterr().err.splitlines()
    assert steps < 4 or len(lines) <= 9
    for kind, says in NOTES.items():
        assert sum(says in line for line in lines) == kinds.count(kind)


NOTES: dict[StepKind, str] = {
    "warm-up": "warming up", "tracked": "counts tensors", "traced": "writes a trace",
}  # fmt: skip
