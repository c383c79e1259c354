"""Plans, predictions and bounds are those of the record, to 12 digits.

A change that means to move a number writes the record anew (`python -m tests.record.make`, with
the names of cases for some of them) and says in its commit which numbers moved and why.
"""

import json

import pytest

from tests.record.make import RECORD, first_difference, names, recorded

OLD = json.loads(RECORD.read_text())


def test_the_record_has_all_cases() -> None:
    assert tuple(OLD) == names()


@pytest.mark.parametrize("name", names())
def test_numbers_are_those_of_the_record(name: str) -> None:
    found = first_difference(OLD[name], recorded(name))
    assert not found, f"{name}: {found}"


def test_more_than_a_rounding_is_a_difference() -> None:
    name = next(iter(OLD))
    other = json.loads(json.dumps(OLD[name]))
    seconds = other["exact"]["stages"][0]["forward_s"]
    other["exact"]["stages"][0]["forward_s"] = seconds * (1 + 2**-52)
    assert not first_difference(OLD[name], other)
    other["exact"]["stages"][0]["forward_s"] = seconds * (1 + 1e-11)
    assert first_difference(OLD[name], other).startswith(".exact.stages[0].forward_s is")
    assert not first_difference(OLD[name], json.loads(json.dumps(OLD[name])))
