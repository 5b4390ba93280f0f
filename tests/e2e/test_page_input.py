"""The page in a headless Chromium over statuses that a test makes up: hostile names, many shards, replies that are cut
or of another version, and how it reads by keyboard, on a phone and in the dark.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from browser import Browser, browser
from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import Unavailable
from stubbed_page import StubbedPage, large_status, stubbed_page

MARKUP = '<img src=x onerror="window.wasRun = 1"><script>window.wasRun = 1</script>'
LONG = "n" * 1000
DASH = "\u2013"
SCREENS = {"cluster": "Cluster", "tables": "Tables", "jobs": "Jobs", "serving": "Serving", "checkpoints": "Checkpoints"}


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def busy_status(name: str) -> pb.GetStatusReply:
    """Two shards, of which one does not answer; a table, a job, a stream and a fault of a name."""
    reply = large_status(2, 0)
    reply.checkpoint, reply.checkpoint_age_sec = f"file:///{name}/save-000001", 75.0
    reply.damaged_checkpoints.append(name)
    reply.shards[1].problem = f"shard 1 at {name} did not answer in time"
    reply.shards[0].torn_namespaces.append(name)
    reply.shards[0].data.host = name
    reply.tables.add(id=1, namespace=name, name=name, dim=4)
    for at_most, pulls in ((0, 60), (1, 30), (2**64 - 1, 10)):
        usage = reply.shards[0].tables.add(table_id=1, rows=1000)
        usage.staleness.add(at_most=at_most, pulls=pulls)
    job = reply.jobs.add(job_id=1, namespace=name, name=name, world_size=2, highest_step=7)
    figures = pb.TrainingFigures(samples=7, auc=0.75, test_metric=name[:255], test_value=0.5)
    job.members.add(rank=0, worker_id=1, epoch=1, step=7, samples_per_sec=3, loss=0.25, figures=figures)
    for fresh in (0.5, 14):
        figures = pb.FollowerFigures(
            behind_sec=0.1,
            fresh_p50_sec=0.1,
            fresh_p99_sec=fresh,
            goal_sec=10,
            aliases=name[:255],
            shard_behind_sec=0.2,
        )
        cursor = f"serving/0/1.0/{name}:{fresh:g}/ctr@1/x"
        reply.shards[0].load.following.add(cursor=cursor, namespace=name, figures=figures)
    job.stream.source, job.stream.lag = name, 12
    fault = reply.faults.add(namespace=name, job=name, rank=1, host=name, message=name, traceback=name)
    fault.time = time.time()
    return reply


def opened(chrome: Browser, page: StubbedPage, screen: str = "cluster") -> None:
    chrome.open(f"{page.url}#{screen}")
    chrome.wait_for(lambda: chrome.text("h1") == SCREENS[screen], f"the screen {screen}")


def read_again(chrome: Browser) -> None:
    """Has the page read at once, as when it becomes visible."""
    chrome.run("document.dispatchEvent(new Event('visibilitychange'))")


def test_names_are_text_and_no_markup(chrome: Browser) -> None:
    with stubbed_page(busy_status(MARKUP)) as page:
        for screen in SCREENS:
            opened(chrome, page, screen)
            assert MARKUP in chrome.text("#wrong")
            assert chrome.run("return document.querySelectorAll('img, main script, #wrong script').length") == 0
            assert chrome.run("return window.wasRun === undefined")
            assert chrome.errors() == []
            assert all(address.startswith(page.url) for address in chrome.requests())
            if screen == "tables":
                assert chrome.cells("#tables-table")[0][0] == f"{MARKUP}/{MARKUP}"
            if screen == "jobs":
                assert MARKUP in chrome.text("#faults")
                assert chrome.cells("#jobs-table")[0][5:9] == ["3.0/s", "0.25", "0.75", f"{MARKUP} 0.5"]
            if screen == "serving":
                assert [row[2] for row in chrome.cells("#following")] == [MARKUP, MARKUP]


def test_a_serving_process_beyond_its_goal_is_marked_and_named(chrome: Browser) -> None:
    with stubbed_page(busy_status("host")) as page:
        opened(chrome, page, "serving")
        bad = "return [...document.querySelectorAll('#following .bad-cell')].map((cell) => cell.textContent)"
        assert chrome.run(bad) == ["14 s"]
        assert "ctr@1 at host:14: 1 of 100 changes is served after 14 s; goal: 10 s" in chrome.text("#wrong")
        assert "sparserow status --serving host:14" in chrome.text("#wrong")
        assert chrome.cells("#followers")[0][2] == "200 ms"


def test_a_foreign_request_and_a_foreign_script_are_refused(chrome: Browser) -> None:
    with stubbed_page(busy_status("a")) as page:
        opened(chrome, page)
        script = (
            "const done = arguments[0]; const tag = document.createElement('script');"
            "tag.textContent = 'window.wasRun = 1'; document.body.append(tag);"
            "fetch('http://127.0.0.2:1/').then(() => done('sent'), error => done(error.message))"
        )
        assert chrome.driver.execute_async_script(script) == "Failed to fetch"
        assert chrome.run("return window.wasRun === undefined")
        refused = chrome.errors()
        assert any("connect-src" in error for error in refused), refused
        assert any("script-src" in error for error in refused), refused


@pytest.mark.parametrize("width", [360, 640])
def test_long_names_do_not_break_a_narrow_page(chrome: Browser, width: int) -> None:
    """640 is what 1,280 pixels are at a zoom of 200 %."""
    size = {"width": width, "height": 740, "deviceScaleFactor": 2, "mobile": False}
    chrome.devtools("Emulation.setDeviceMetricsOverride", **size)
    try:
        with stubbed_page(busy_status(LONG)) as page:
            for screen in SCREENS:
                opened(chrome, page, screen)
                assert chrome.run("return document.documentElement.scrollWidth") <= width, screen
                assert LONG not in chrome.text("body"), "a name is cut, and its length is named"
                assert "characters)" in chrome.text("#wrong")
    finally:
        chrome.devtools("Emulation.clearDeviceMetricsOverride")


def test_it_follows_the_scheme_of_the_system(chrome: Browser) -> None:
    colours = {}
    with stubbed_page(busy_status("a")) as page:
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            chrome.devtools("Emulation.setEmulatedMedia", features=[feature])
            opened(chrome, page)
            of_body = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
            colours[scheme] = chrome.run(of_body)
    chrome.devtools("Emulation.setEmulatedMedia", features=[])
    assert colours["light"][0] == "rgb(255, 255, 255)"
    assert colours["dark"][0] == "rgb(20, 23, 27)"
    assert colours["light"][1] != colours["dark"][1]


def test_it_is_read_by_keyboard_and_without_colours(chrome: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    with stubbed_page(busy_status("a")) as page:
        opened(chrome, page)
        reached = []
        for _ in range(30):
            ActionChains(chrome.driver).send_keys(Keys.TAB).perform()
            reached.append(chrome.run("return document.activeElement.textContent.slice(0, 12)"))
            if reached[-1] == "Jobs":
                break
        assert reached == ["Cluster", "Tables", "Jobs"]
        assert chrome.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
        ActionChains(chrome.driver).send_keys(Keys.ENTER).perform()
        chrome.wait_for(lambda: chrome.text("h1") == "Jobs", "the screen of jobs")
        assert chrome.text("nav a[aria-current]") == "Jobs"
        scrolls = "return [...document.querySelectorAll('.scroll')].every(it => it.tabIndex === 0 && it.ariaLabel)"
        assert chrome.run(scrolls)
        for caption in chrome.run("return [...document.querySelectorAll('figcaption')].map(it => it.textContent)"):
            assert caption
        assert "0 steps: 60 (60 %); up to 1: 30 (30 %); more steps: 10 (10 %)" in chrome.text("#stale-0")
        assert chrome.text("#wrong-title") == "5 things are wrong"
        assert "shard 1 at a did not answer in time" in chrome.text("#wrong")


def test_two_hundred_shards_and_three_hundred_tables(chrome: Browser) -> None:
    with stubbed_page(large_status(200, 300)) as page:
        began = time.monotonic()
        opened(chrome, page)
        drawn = time.monotonic() - began
        assert len(chrome.cells("#shards")) == 200
        opened(chrome, page, "tables")
        assert len(chrome.cells("#tables-table")) == 300
        nodes = chrome.run("return document.querySelectorAll('*').length")
        milliseconds = chrome.run("const began = performance.now(); show(); return performance.now() - began")
        print(f"loaded and drawn in {drawn:.2f} s, drawn again in {milliseconds:.0f} ms, {nodes} elements")
        assert nodes < 10_000
        assert drawn < 30, "far from a second, which a busy machine may miss"


def changed(change: Any) -> Any:
    """A change of a reply's document, as the stub takes it."""

    def tamper(data: bytes) -> bytes:
        document = json.loads(data)
        return json.dumps(change(document) or document).encode()

    return tamper


def without_leaves(value: Any) -> Any:
    """A document whose records have unknown fields alone, and whose plain values are of another kind."""
    if isinstance(value, dict):
        return {**{name: without_leaves(each) for name, each in value.items()}, "of a later version": [{"x": None}]}
    if isinstance(value, list):
        return [without_leaves(each) for each in value]
    return {"unknown": value}


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["status"].clear(),
        lambda document: [document["status"].update({name: None}) for name in document["status"]] and None,
        lambda document: {"status": without_leaves(document["status"]), "series": 7},
        lambda document: {"status": dict.fromkeys(document["status"], 5), "series": {"jobs": [], "cluster": 3}},
    ],
    ids=["nothing", "nulls", "other kinds", "numbers"],
)
def test_a_status_of_another_version_is_shown_with_dashes(chrome: Browser, change: Any) -> None:
    with stubbed_page(busy_status("a")) as page:
        page.tamper = changed(change)
        for screen in SCREENS:
            opened(chrome, page, screen)
            assert DASH in chrome.text("main")
            assert "does not understand" not in chrome.text("main")
        assert chrome.errors() == []


def test_replies_that_are_cut_or_fail_leave_the_last_figures(chrome: Browser) -> None:
    with stubbed_page(busy_status("a")) as page:
        opened(chrome, page)
        page.tamper = lambda data: data[: len(data) // 2]
        read_again(chrome)
        chrome.wait_for(lambda: "the answer was cut, or is not one of a coordinator" in chrome.text("#link"), "the cut")
        assert len(chrome.cells("#shards")) == 2
        page.tamper, page.status = None, Unavailable("this coordinator is starting; try again")
        time.sleep(1.1)  # until then the reply before counts
        read_again(chrome)
        chrome.wait_for(lambda: "this coordinator is starting" in chrome.text("#link"), "the reason of the coordinator")
        page.status = busy_status("a")
        read_again(chrome)
        chrome.wait_for(lambda: chrome.run("return document.getElementById('link').hidden"), "figures again")


def test_the_clock_of_the_browser_does_not_matter(chrome: Browser) -> None:
    source = "const now = Date.now; Date.now = () => now() + 7 * 3600e3;"
    script = chrome.devtools("Page.addScriptToEvaluateOnNewDocument", source=source)
    try:
        with stubbed_page(busy_status("a")) as page:
            opened(chrome, page, "checkpoints")
            assert abs(chrome.run("return Date.now()") / 1000 - time.time() - 7 * 3600) < 600
            assert "age75 s" in chrome.text("#facts")
            assert chrome.text("#age").startswith("Read 0 s ago")
    finally:
        chrome.devtools("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_a_hidden_page_reads_nothing(chrome: Browser) -> None:
    with stubbed_page(busy_status("a")) as page:
        opened(chrome, page)
        hide = "Object.defineProperty(document, 'visibilityState', {value: arguments[0], configurable: true})"
        chrome.run(hide, "hidden")
        chrome.requests()
        time.sleep(6)  # longer than the pause between two readings
        assert chrome.requests() == []
        chrome.run(hide, "visible")
        read_again(chrome)
        chrome.wait_for(chrome.requests, "another reading")
