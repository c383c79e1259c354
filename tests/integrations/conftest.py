"""What tests of integrations share."""

from contextlib import suppress
from importlib import import_module

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Trainers take seconds to import, which every rank would do anew: here, before ranks fork."""
    for name in ("hf", "lightning"):
        with suppress(ImportError):  # what is not installed is skipped by the tests
            import_module(f"meshwright.integrations.{name}")
