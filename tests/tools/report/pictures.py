"""Takes the pictures of the docs: `python -m tests.tools.report.pictures PLAN [RUN_DIR] -o DIR`.

With `--page` the first argument is a page: it takes that whole, at three widths,
light and dark, to look at.
"""

import argparse
import base64
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.ir.plan import plan_io
from meshwright.tools.report.page import write_report
from tests.tools.report.browser import Browser, browser

WIDTH = 1220
WIDTHS = (390, 1400, 2560)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--page", action="store_true", help="PLAN is a page")
    given = parser.parse_args()
    if given.page:
        with browser() as chromium:
            whole(chromium, given.plan, given.output)
        return
    with TemporaryDirectory() as folder, browser() as chromium:
        page = Path(folder) / "plan.html"
        write_report(plan_io.load(given.plan), page)
        take(chromium, page, given.output / "report.png", "main", "timeline")
        take(chromium, page, given.output / "report-dark.png", "traffic", "model", dark=True)
        if given.run:
            write_report(plan_io.load(given.run / "plan.json"), page, given.run)
            take(chromium, page, given.output / "report-run.png", "timeline", "measured", most=760)


def whole(chromium: Browser, page: Path, folder: Path) -> None:
    """The page from top to end."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for dark in (False, True):
            chromium.open(page, width=width, dark=dark)
            chromium.frame()
            height = chromium.run("return document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            taken = chromium.command(
                "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
            )
            name = f"{width}{'-dark' if dark else ''}.png"
            (folder / name).write_bytes(base64.b64decode(taken["data"]))


def take(
    chromium: Browser, page: Path, path: Path, first: str, last: str, *, dark: bool = False,
    most: int = 1150,
) -> None:  # fmt: skip
    """From the top of one part of the page to the end of another, `most` pixels high."""
    chromium.open(page, width=WIDTH, height=3600, dark=dark)
    chromium.frame()
    top, bottom = (
        chromium.run(
            "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [box.top, box.bottom]",
            name if name == "main" else f"#{name}",
        )[edge]
        for edge, name in ((0, first), (1, last))
    )
    top = max(0, top - 12)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(most, bottom + 12 - top), "scale": 1}
    taken = chromium.command("Page.captureScreenshot", format="png", clip=clip)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
