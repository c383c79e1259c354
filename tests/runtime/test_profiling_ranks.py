"""Profiling by several ranks: shared work on CPUs, dealt work on GPUs, one file."""

from itertools import chain
from pathlib import Path

import pytest

from meshwright.ir.profile.profile import Machine
from meshwright.ir.profile.profile_store import load_profile
from meshwright.profiling.ranks import dealt
from tests.warm import shell


def machine(name: str) -> Machine:
    return Machine(device=name, kind="cuda", driver="1", torch="2", backend="nccl")


A, B = machine("a"), machine("b")


def test_cpu_ranks_measure_the_same_together() -> None:
    assert dealt([A, A], {A: [3, 5]}, alike=True) == [[3, 3], [5, 5]]


def test_gpus_of_a_type_take_turns() -> None:
    rounds = dealt([A, B, A], {A: [0, 1, 2], B: [0, 2]}, alike=False)
    assert rounds == [[0, 0, 1], [2, 2, None]]


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("tasks", [0, 1, 7, 16])
def test_every_task_is_measured_once(ranks: int, tasks: int) -> None:
    rounds = dealt([A] * ranks, {A: list(range(tasks))}, alike=False)
    given = [number for number in chain(*rounds) if number is not None]
    assert sorted(given) == list(range(tasks))
    assert len(rounds) == -(-tasks // ranks)


def test_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    done = shell(
        "torchrun", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.runtime.profiled_ranks", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_profile(path)
    told = [Path(f"{path}.{rank}").read_text() for rank in range(2)]
    assert told == [found.fingerprint] * 2
    assert found.blocks and found.collectives and found.optimizers
    assert {record.processes for record in found.blocks.values()} == {2}
