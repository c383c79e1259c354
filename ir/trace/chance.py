"""Random draws and clocks of Python and NumPy that a model's code uses while it is looked at."""

import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from meshwright.ir.trace.on_thread import replaced_here

_STANDARD = sysconfig.get_paths()["stdlib"]
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")
_UNIT_DRAWS = ("random", "rand", "random_sample", "ranf", "sample")


def _numpy_random() -> Any:
    """NumPy's global generator, if anything has loaded it."""
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def _states() -> list[Any]:
    numpy = _numpy_random()
    return [random.getstate(), *([_as_tuple(numpy.get_state())] if numpy else [])]


def _as_tuple(state: Any) -> tuple[Any, ...]:
    return tuple(x.tolist() if hasattr(x, "tolist") else x for x in state)


def standing(value: Any) -> str | None:
    """Where a generator of random numbers stands, of Python or NumPy; None if it is none."""
    if isinstance(value, random.Random):
        return str(value.getstate())
    numpy = _numpy_random()
    if numpy and isinstance(value, numpy.Generator):
        return str(value.bit_generator.state)
    return str(value.get_state()) if numpy and isinstance(value, numpy.RandomState) else None


@contextmanager
def own_draws() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Python's or NumPy's generators have moved since."""
    before = _states()
    yield lambda: _states() != before


@contextmanager
def draws_as_before() -> Iterator[None]:
    """Afterwards Python's and NumPy's generators are where they were."""
    numpy = _numpy_random()
    python, other = random.getstate(), numpy.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        if other is not None:
            numpy.set_state(other)


def seed_all(seed: int) -> None:
    """Seed Python's and NumPy's generators."""
    random.seed(seed)
    if numpy := _numpy_random():
        numpy.seed(seed)


@contextmanager
def extreme_draws(value: float) -> Iterator[None]:
    """Inside, draws from [0, 1) give `value` on this thread, and those made of them follow."""
    numpy = _numpy_random()

    def between(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return _shaped(low + (high - low) * value, size)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (random, "random", lambda: value),
        (random, "uniform", lambda low, high: low + (high - low) * value),
    ]
    if numpy:
        changes.append((numpy, "uniform", between))
        units = [name for name in _UNIT_DRAWS if hasattr(numpy, name)]
        changes += [(numpy, name, lambda *size: _shaped(value, size or None)) for name in units]
    with ExitStack() as stack:
        for where, name, by in changes:
            stack.enter_context(replaced_here(where, name, partial(_instead, by)))
        yield


def _instead(by: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return by


def _shaped(value: float, size: Any) -> Any:
    if size is None:
        return value
    return sys.modules["numpy"].full(size[0] if isinstance(size[0], tuple) else size, value)


@contextmanager
def clocks(change: Callable[[float], Any] | None = None) -> Iterator[list[str]]:
    """List the clocks that a model's code reads on this thread; `change` is done to what they give.

    Other threads, of which one may watch a job, read the right time.
    """
    read: list[str] = []
    with ExitStack() as stack:
        for name in _CLOCKS:
            clock = partial(_clock, name=name, read=read, change=change)
            stack.enter_context(replaced_here(time, name, clock))
        yield read


def _clock(
    original: Callable[[], float], name: str, read: list[str],
    change: Callable[[float], Any] | None,
) -> Callable[[], Any]:  # fmt: skip
    def clock() -> Any:
        file = sys._getframe(2).f_code.co_filename  # of who called the function that calls this one
        if (file.startswith(_STANDARD) and "-packages" not in file) or "/torch/" in file:
            return original()
        read.append(name)
        return change(original()) if change else original()

    return clock
