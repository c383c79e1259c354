"""Calls of a step are compared with each other; nothing of the user's is changed by that."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache, wraps

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.retrace import check_repeats, undisturbed
from meshwright.ir.trace.trace import trace

EXAMPLE = (torch.ones(2, 4),)
TABLES: dict[int, Tensor] = {}
CALLS = 0


@cache
def table(size: int) -> Tensor:
    return torch.ones(size)


def cached_inside(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """As transformers caches what layers need of sizes alone."""
    kept = cache(function)

    @wraps(function)
    def wrapper(size: int) -> Tensor:
        return kept(size)

    return wrapper


@cached_inside
def places(size: int) -> Tensor:
    return torch.arange(size) / size


class Untidy(nn.Module):
    """Uses globals, caches and random numbers that its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        self.calls += 1
        TABLES[4] = torch.ones(4)
        self.seen.append(x)
        random.random()
        return (self.linear(x) * TABLES[4] * table(4) * places(4)).sum()


def test_nothing_of_the_users_is_changed() -> None:
    model, before = Untidy(), random.getstate()
    graph = trace(model, EXAMPLE)
    check_repeats(model, EXAMPLE, None, graph)
    assert (CALLS, TABLES, model.calls, model.seen) == (0, {}, 0, [])
    assert table.cache_info().currsize == 0
    assert type(places(4)) is Tensor
    assert random.getstate() == before
    assert type(model.linear.weight.detach()) is Tensor


class Layers(dict[str, type[nn.Module]]):
    """Makes a layer of whoever asks for one, as tables of transformers do."""

    def __getitem__(self, name: str) -> nn.Module:
        MADE.append(name)
        return super().__getitem__(name)()


MADE: list[str] = []
LAYERS = Layers(relu=nn.ReLU)


class OfTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (LAYERS["relu"](x) if x.ndim > 9 else x).sum()


def test_a_table_makes_nothing_when_it_is_looked_into() -> None:
    graph = trace(OfTable(), EXAMPLE)
    check_repeats(OfTable(), EXAMPLE, None, graph)
    assert MADE == []


class Hidden:
    """State that a trace's look at attributes does not find."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(4, 4), Hidden()

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        return self.linear(x).sum() * self.state.calls


def test_state_that_no_look_finds_is_seen_by_comparing_calls() -> None:
    model = Slotted()
    graph = trace(model, EXAMPLE)
    with pytest.raises(TraceError, match=r"second call of the model .* 1 becomes 2") as error:
        check_repeats(model, EXAMPLE, None, graph)
    assert "test_retrace.py:" in str(error.value) and "register_buffer" in str(error.value)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("low", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.low = x.detach().mean(0).bfloat16()
        return (x * self.low).sum()


def test_a_buffer_keeps_its_dtype() -> None:
    with pytest.raises(TraceError, match=r"buffer low of Cast .4,. of torch.bfloat16, it was"):
        trace(Cast(), EXAMPLE)


class LayerDrop(nn.Module):
    """Leaves a layer out by chance, which Python's generator decides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x if random.random() < 0.5 else self.a(x)
        return (h + self.a(h)).sum()


def test_what_chance_decides_is_said_to_be_chance() -> None:
    # Two calls of which chance has only one leave the layer out are no reason to speak of state.
    for seed in range(10):
        random.seed(seed)
        with pytest.raises(TraceError, match="another draw of Python's"):
            trace(LayerDrop(), {"x": torch.ones(2, 4)})


class _ByClass(dict[str, int]):
    """A registry whose keys are made of what it is asked for, as transformers' of outputs is."""

    def __setitem__(self, key: object, value: int) -> None:
        super().__setitem__(f"of {type(key).__name__}", value)

    def get(self, key: object, default: int | None = None) -> int | None:  # type: ignore[override]
        return super().get(f"of {type(key).__name__}", default)


KNOWN = _ByClass()
ORDERED = OrderedDict(a=1, b=2)
COUNTED = Counter("aab")
LISTS = defaultdict(list, a=[1])
LATEST = deque([1, 2], maxlen=3)


class _Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for one in (self, self.linear):
            KNOWN[one] = 2  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        assert KNOWN.get(self) == 2
        if self.training:
            ORDERED[str(len(ORDERED))], COUNTED["c"] = 3, 1
            LISTS["b"].append(len(LISTS))
            LATEST.append(1)
        return self.linear(x).square().mean()


def test_containers_of_libraries_are_as_before() -> None:
    """After a trace as well as for its second call, and for whoever has the model afterwards."""
    model = _Registered()
    kept = [*KNOWN.items()]
    assert len(kept) == 2
    with undisturbed(model, None):
        model(torch.ones(2, 4))
        KNOWN["one more"] = 3
    assert [*KNOWN.items()] == kept
    assert [*ORDERED.items()] == [("a", 1), ("b", 2)] and [*reversed(ORDERED)] == ["b", "a"]
    assert COUNTED == Counter("aab") and LISTS == {"a": [1]} and [*LATEST] == [1, 2]
    model(torch.ones(2, 4))
