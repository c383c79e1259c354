"""Takes the pictures of reports in docs/images with a browser that runs without a window.

python -m docs.pictures PLAN RUN_PLAN RUN_DIR

PLAN is shown by itself, RUN_PLAN with what the run in RUN_DIR measured. Those in the repository are
of

    meshwright search 'hf:GPT2Config{"n_embd": 4096, "n_layer": 32, "n_head": 32}' -c a100-80:8x8 \
        -b 256 --pin 'pp in 4,8' --pin 'tp in 2,4' --pin num_microbatches=8 -o plan.json

and of what `make demo` leaves (`demo-run/plan.json`, `demo-run/run`), or of its model with
`profile --minutes 0.6 --pin pp=4`, `search --pin pp=4` and `run --steps 24`. Chromium must be
installed.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from meshwright.ir.plan import plan_io
from meshwright.tools.report.page import write_report

IMAGES = Path(__file__).parent / "images"
WIDTH = 1220
_BROWSERS = "chromium", "chromium-browser", "google-chrome"
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
"""Of a report: it allows no styles but its own."""
_ONLY = "<style>main > :not({parts}) {{ display: none !important; }}</style>"


def take(page: Path, image: Path, height: int, parts: Sequence[str] = (), *, dark: bool) -> None:
    """Writes a picture of the page, or of some of its sections; OSError without a browser."""
    browser = next((found for name in _BROWSERS if (found := which(name))), None)
    if browser is None:
        raise OSError(f"none of {', '.join(_BROWSERS)} is installed: pictures are of one of them")
    text = page.read_text(encoding="utf-8")
    if parts:
        text = _POLICY.sub("", text) + _ONLY.format(parts=", ".join(f"#{part}" for part in parts))
    page.write_text(text, encoding="utf-8")
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size={WIDTH},{height}", f"--screenshot={image}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def main(plan: str, run_plan: str, run_dir: str) -> None:
    """Takes all three."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_report(plan_io.load(plan), page)
        take(page, IMAGES / "report.png", 930, dark=False)
        take(page, IMAGES / "report-dark.png", 1150, ("traffic", "model"), dark=True)
        write_report(plan_io.load(run_plan), page, run=run_dir)
        take(page, IMAGES / "report-run.png", 860, ("timeline", "measured"), dark=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
