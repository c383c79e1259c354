"""Annotations mark what is made or called inside, change nothing else, and are found by tracing."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.trace.annotate import marks_of
from meshwright.ir.trace.hints import Hint, hints_of
from meshwright.ir.trace.trace import trace


def layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


class Annotated(nn.Module):
    """A backbone and a head, annotated where they are made."""

    def __init__(self) -> None:
        super().__init__()
        with mw.replicate():
            self.backbone = nn.Sequential(layer(), layer())
        with mw.split(2):
            self.head = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)).square().mean()


class Plain(Annotated):
    """The same without annotations."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.backbone = nn.Sequential(layer(), layer())
        self.head = nn.Linear(8, 32)


class Called(Plain):
    """Annotated where modules are called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mw.stage(0), mw.replicate():
            y = self.backbone(x)
        with mw.stage(1), mw.split():
            return self.head(y).square().mean()


X = {"x": torch.zeros(4, 8)}
FOUND = (Hint("replicate", "backbone"), Hint("split", "head", 2))


def test_what_is_made_inside() -> None:
    assert trace(Annotated(), X).hints == FOUND
    assert trace(Plain(), X).hints == ()


def test_what_is_called_inside() -> None:
    assert set(trace(Called(), X).hints) == {
        Hint("replicate", "backbone"), Hint("stage", "backbone", 0),
        Hint("split", "head"), Hint("stage", "head", 1),
    }  # fmt: skip


def test_tracing_leaves_no_marks_on_the_users_model() -> None:
    model = Called()
    trace(model, X)
    assert not any("_meshwright_marks" in vars(module) for module in model.modules())


def test_hints_are_no_part_of_the_model() -> None:
    torch.manual_seed(0)
    plain = Plain()
    torch.manual_seed(0)
    annotated = Annotated()
    called = Called()
    called.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8)
    assert plain(x).equal(annotated(x)) and plain(x).equal(called(x))
    assert list(plain.state_dict()) == list(annotated.state_dict())
    fingerprints = {trace(model, X).fingerprint for model in (plain, annotated, called)}
    assert len(fingerprints) == 1


def test_marks_survive_copies() -> None:
    model = Annotated()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert trace(other, X).hints == FOUND


def test_the_innermost_counts() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with mw.replicate():
                self.one = layer()
                with mw.split():
                    self.two = layer()
                    self.weight = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with mw.stage(2):
                return (self.two(self.one(x)) @ self.weight).sum()

    assert trace(Nested(), X).hints == (
        Hint("split", "weight"), Hint("replicate", "one"), Hint("stage", "one", 2),
        Hint("split", "two"), Hint("stage", "two", 2),
    )  # fmt: skip


def test_a_module_that_was_made_elsewhere_is_marked_where_it_is_assigned() -> None:
    made = layer()
    holder = nn.Module()
    with mw.split():
        holder.layer = made
    assert hints_of(marks_of(holder)) == (Hint("split", "layer"),)


def test_other_threads_are_not_inside() -> None:
    found: list[nn.Module] = []
    with mw.replicate():
        thread = threading.Thread(target=lambda: found.append(layer()))
        thread.start()
        thread.join()
    assert hints_of(marks_of(found[0])) == ()


def test_a_forward_that_calls_nothing_inside_is_refused() -> None:
    class Empty(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with mw.split(2):
                x = x.relu()
            return self.head(x).sum()

    with pytest.raises(TraceError, match=r"with split\(2\) in a forward: nothing with parameters"):
        trace(Empty(), X)


@pytest.mark.parametrize("make", [lambda: mw.split(0), lambda: mw.stage(-1), lambda: mw.split("2")])
def test_sizes_are_whole_numbers(make: object) -> None:
    with pytest.raises(PlanError, match="a whole number from"):
        with make():  # type: ignore[operator]
            pass
