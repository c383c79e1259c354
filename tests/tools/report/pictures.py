"""Takes a page of a report whole, at three widths, light and dark, to look at.

python -m tests.tools.report.pictures PAGE FOLDER

Pictures of the docs are those of `docs.pictures`.
"""

import base64
import sys
from pathlib import Path

from tests.tools.report.browser import Browser, browser

WIDTHS = (390, 1400, 2560)


def take(chromium: Browser, page: Path, folder: Path) -> None:
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


def main(page: str, folder: str) -> None:
    with browser() as chromium:
        take(chromium, Path(page), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
