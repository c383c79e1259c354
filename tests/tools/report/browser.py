"""A headless Chromium that says what pages log; tests are skipped where there is none."""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")


@contextmanager
def browser() -> Iterator["Browser"]:
    """A browser without a window."""
    if not (_CHROMIUM and _DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    options = Options()
    options.binary_location = _CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What tests do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[theme])
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.logged()  # what the page before said
        self.driver.get(page.as_uri())
        assert self.run("return document.body.dataset.ready") == "yes", self.logged()

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def frame(self) -> None:
        """Waits until the page has drawn itself anew."""
        done = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        self.driver.execute_async_script(done)

    def command(self, name: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def logged(self) -> list[str]:
        """Warnings and errors on the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> set[str]:
        """Addresses that were asked for."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.add(message["params"]["request"]["url"])
        return found

    def pdf(self) -> bytes:
        printed = self.command("Page.printToPDF", printBackground=True)
        return base64.b64decode(printed["data"])
