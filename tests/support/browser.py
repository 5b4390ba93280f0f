"""A headless Chromium for tests: what it logs, what it asks for, and a wait that has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparserow_process import wait_until

CHROMIUM, DRIVER = (
    next(filter(None, map(shutil.which, names)), None)
    for names in (
        ("chromium", "google-chrome"),
        ("chromedriver",),
    )
)
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--no-default-browser-check"),
)


class Browser:
    """One window of a headless browser.

    Attributes:
        driver: selenium's driver.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Opens a page anew, in place of the one before; what was logged until then is dropped."""
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(url)

    def text(self, selector: str) -> str:
        """The text of an element, also of one that is hidden; empty where there is none."""
        found = self.run("const it = document.querySelector(arguments[0]); return it ? it.textContent : ''", selector)
        return str(found)

    def cells(self, selector: str) -> list[list[str]]:
        """The texts of a table's body, row by row."""
        script = "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map("
        return list(self.run(script + "row => [...row.children].map(cell => cell.textContent))", selector))

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, holds: Callable[[], object], what: str, deadline_sec: float = 60.0) -> None:
        """Waits until a condition of the page holds; fails with what the page shows."""
        try:
            wait_until(holds, what, deadline_sec)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text('body')[:3000]}") from None

    def errors(self) -> list[str]:
        """What the console has as an error since the page was opened, or since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """The addresses that the browser asked for since the page was opened, or since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def devtools(self, command: str, **arguments: Any) -> Any:
        """The reply to a command of the browser's own protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser for the duration of the block; the test is skipped where none is installed, but not by CI.

    Args:
        folder: the folder for its profile.
    """
    if CHROMIUM is None or DRIVER is None:
        missing = "chromium and chromium-driver are not installed"
        assert os.environ.get("CI") != "true", missing
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.accept_insecure_certs = True  # the certificates of tests have an authority of their own
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder}", "--window-size=1280,900"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER, env={**os.environ, "SE_OFFLINE": "true"}))
    try:
        driver.set_page_load_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
