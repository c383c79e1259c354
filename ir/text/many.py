"""A list of a file as a tuple. Reading stops at its first wrong item: of a million wrong ones each
would be told, which takes gigabytes.
"""

from typing import Annotated, TypeVar

from pydantic import FailFast

Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], FailFast()]
