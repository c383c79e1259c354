"""Processes that begin before meshwright is imported, as others have it imported already."""

import os

import pytest

from meshwright.testing.fresh import python


def test_a_process_is_told_apart_from_this_one() -> None:
    text = (
        "import os, sys\n"
        "print([name for name in sys.modules if name.startswith('meshwright.ir')])\n"
        "print('torch' in sys.modules, os.environ['WOMBAT'], sys.argv, __name__)\n"
        "print('more', file=sys.stderr)\n"
        "raise SystemExit(7)"
    )
    done = python("-c", text, "one", "two", WOMBAT="3")
    assert done.stdout == "[]\nTrue 3 ['-c', 'one', 'two'] __main__\n"
    assert done.stderr == "more\n" and done.returncode == 7
    assert "WOMBAT" not in os.environ


def test_errors_and_modules() -> None:
    done = python("-c", "raise ArithmeticError('the seventh seal')")
    assert done.returncode == 1 and "the seventh seal" in done.stderr
    assert python("-m", "meshwright", "show", "none.json").returncode == 4


def test_one_that_does_not_end_is_killed() -> None:
    with pytest.raises(RuntimeError, match=r"had not ended after 0\.5 s"):
        python("-c", "import time; time.sleep(60)", timeout_s=0.5)
