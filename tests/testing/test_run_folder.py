"""What a run of tests writes is in one folder, and gone with the process that made it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.run_folder import FOLDER

MAKES = """
import os, tempfile
from pathlib import Path
tempfile.gettempdir()  # what was asked for before does not count
from tests.run_folder import FOLDER, make_folder
make_folder()
make_folder()
assert os.environ["TMPDIR"] == tempfile.gettempdir() == os.environ[FOLDER]
(Path(tempfile.mkdtemp()) / "left").write_text("")
print(os.environ[FOLDER], flush=True)
"""
KILLED = MAKES + "os.kill(os.getpid(), 9)"


def _run(code: str, **env: str) -> Path:
    given = {name: value for name, value in os.environ.items() if name != FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2], env={**given, **env},
    )  # fmt: skip
    assert done.returncode == (-9 if code is KILLED else 0)
    return Path(done.stdout.strip())


def test_its_maker_removes_it() -> None:
    found = _run(MAKES)
    assert found.name and not found.exists()


def test_the_next_run_removes_what_a_killed_one_has_left() -> None:
    killed = _run(KILLED)
    assert killed.exists()
    assert _run(MAKES) != killed and not killed.exists()


def test_another_process_uses_it_and_leaves_it(tmp_path: Path) -> None:
    found = _run(MAKES, **{FOLDER: str(tmp_path), "TMPDIR": str(tmp_path)})
    assert found == tmp_path and len([*tmp_path.iterdir()]) == 1
