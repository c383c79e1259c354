"""Triton's interpreter, which runs kernels on CPUs to test them, beside any numpy of ours.

Triton 3.6 makes the ends of loops of `int` of an array of one element, which numpy refuses from 2.4
on; Triton 3.9 does not.
"""

from typing import Any


def read_ends_of_loops() -> None:
    """Have the interpreter read a number from its array as numpy has it, in any version of both."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)  # which notes what was there, to put it back
        tensor.__index__ = lambda x: x.handle.data.item()

    interpreter._patch_lang_tensor = patched
