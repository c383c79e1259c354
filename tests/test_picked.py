"""Which cases of slow tests run: as many, and the same ones, on every machine."""

import pytest

from tests.sampled import ALL_CASES, in_turn, picked

NAMES = tuple(f"case{i}" for i in range(10))
VALUES = {f"{a}{b}": frozenset({f"a {a}", f"b {b}"}) for a in range(4) for b in range(3)}


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_CASES, raising=False)


def test_each_has_its_turn() -> None:
    turns = [in_turn(NAMES, turn) for turn in range(3)]
    assert sorted(name for turn in turns for name in turn) == list(NAMES)
    assert [len(turn) for turn in turns] == [4, 3, 3] and turns[1] == in_turn(NAMES, 4)
    assert all(list(turn) == sorted(turn) for turn in turns)
    assert [in_turn(NAMES[:1], turn) for turn in range(3)] == [NAMES[:1]] * 3


def test_those_come_first_that_have_what_no_other_has() -> None:
    found = picked(VALUES)
    assert len(found) == 4
    assert {x for name in found for x in VALUES[name]} == frozenset().union(*VALUES.values())
    assert picked(dict(reversed(VALUES.items()))) == found


@pytest.mark.sampled
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
def test_cases_of_a_test_that_run_have_all_values(
    a: int, b: int, request: pytest.FixtureRequest
) -> None:
    here = [x for x in request.session.items if x.name.split("[")[0] == request.node.originalname]
    if len(here) > 1 and not any("::" in argument for argument in request.config.args):
        assert len(here) == (12 if request.config.getoption("--all-cases") else 4)
        for name, values in (("a", range(4)), ("b", range(3))):
            found = {x.callspec.params[name] for x in here if isinstance(x, pytest.Function)}
            assert found == set(values)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", [*range(3), *(pytest.param(n, marks=pytest.mark.gpu) for n in range(3, 6))]
)
def test_cases_for_a_gpu_are_never_left_out(case: int, request: pytest.FixtureRequest) -> None:
    assert case in range(6)
    here = [x for x in request.session.items if x.name.split("[")[0] == request.node.originalname]
    if len(here) > 1 and not request.config.getoption("--all-cases"):
        needs = [x.get_closest_marker("gpu") is not None for x in here]
        assert sum(needs) in (0, 3)  # 0: `-m "not gpu"`
        assert "::" in str(request.config.args) or needs.count(False) <= 1


@pytest.mark.slow
def test_what_is_slow_runs_only_if_asked(request: pytest.FixtureRequest) -> None:
    named = any("::" in argument for argument in request.config.args)
    assert named or request.config.getoption("--all-cases")


def test_what_is_slow_is_left_out(request: pytest.FixtureRequest) -> None:
    named = any("::" in argument for argument in request.config.args)
    if not named and not request.config.getoption("--all-cases"):
        assert not [x for x in request.session.items if x.get_closest_marker("slow")]


def test_all_run_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALL_CASES, "1")
    assert in_turn(NAMES, 0) == NAMES and picked(VALUES) == set(VALUES)
