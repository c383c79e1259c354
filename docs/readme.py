"""Writes what the README's example prints into the README: `python -m docs.readme`."""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
_SHOWN = 3
"""Alternatives that the README shows, the first ones."""
_PATIENT = "global_batch_size=128", "global_batch_size=128, time_limit_s=600"
"""What is shown is what the search ends with, however slow the machine: one that is slow or busy
may be out of its usual minute before."""
_CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_PRINTED = re.compile(r"(The code above prints[^\n]*\n\n```text\n).*?(^```$)", re.M | re.S)


def printed() -> str:
    """Runs the README's first block of code and gives what it prints, as the README shows it."""
    code = _CODE.search(README.read_text())
    assert code and _PATIENT[0] in code[1]
    said, here = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        os.chdir(folder)  # the code saves a file
        try:
            exec(compile(code[1].replace(*_PATIENT), "README.md", "exec"), {})
        finally:
            os.chdir(here)
    lines = [line.rstrip() for line in said.getvalue().splitlines() if line.strip()]
    rows = [
        i for i, line in enumerate(lines) if re.search(r"\d (?:[KMGT]i)?B  .*(slower|faster)", line)
    ]
    end = next(i for i in range(rows[-1] + 1, len(lines)) if not lines[i].startswith(" "))
    cut = rows[_SHOWN] if len(rows) > _SHOWN else end
    return "\n".join([*lines[:cut], *lines[end:]]) + "\n"


def with_printed(readme: str, text: str) -> str:
    """The README with another text in that place."""
    return _PRINTED.sub(lambda found: found[1] + text + found[2], readme)


if __name__ == "__main__":
    README.write_text(with_printed(README.read_text(), printed()))
