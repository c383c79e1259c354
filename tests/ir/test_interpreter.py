"""Loops of kernels end under Triton's interpreter, as the one of Triton 3.6 reads where they do."""

import os
import subprocess
import sys

from triton.runtime import interpreter


def as_triton_3_6() -> None:
    """Has ends of loops read as there."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *scope) -> None:  # type: ignore[no-untyped-def]
        patch(tensor, *scope)
        tensor.__index__ = lambda x: int(x.handle.data)

    interpreter._patch_lang_tensor = patched


def main() -> None:
    """Sums numbers in a loop whose end is told at launch."""
    as_triton_3_6()
    from tests.ir.loop_kernel import summed

    print(summed(5))


def test_an_end_of_a_loop_is_read_from_an_array_of_one() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error:.*ndim > 0.*:DeprecationWarning", "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout == "10\n", run.stderr[-2000:]


if __name__ == "__main__":
    main()
