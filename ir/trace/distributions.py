"""Distributions of torch that a forward makes: their arguments are taken to be valid in a trace.

Each checks that all values lie where it wants them, as an assertion does, and those are not known.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def valid_distributions() -> Iterator[None]:
    """Inside, distributions do not check their arguments, unless they are asked to one by one."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
