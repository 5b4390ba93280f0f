"""Takes the pictures of the coordinator's page that the documents show: ``make pictures``.

A cluster trains and serves for two minutes, so that the charts have lines; then a headless Chromium opens each screen.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from browser import Browser, browser
from sparserow.deploy.reference.pictures import FOLDER
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher

JOB = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml"
SCREENS = {
    "cluster": 900,
    "tables": 900,
    "jobs": 900,
    "serving": 640,
    "checkpoints": 480,
}  # with the height of each picture in pixels
WIDTH, TRAINING_SEC = 1280, 120
MOST_BYTES = 150_000


def started(launcher: Launcher, folder: Path) -> str:
    """Starts a cluster, a job and a serving process; returns the address of the page."""
    up = launcher.start("up", "--shards=4", "--port=0", "--page-port=0", "--memory-budget=1GiB", "--sweep-every=20s")
    ready = up.wait_for(r"page at (\S+)\n")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    log = write_click_log(folder, rows=1_500_000, test_rows=5_000, seed=0)
    settings = (
        f"data.train={log.train}", f"data.test={log.test}", f"cluster={{address: '{address}'}}", "publish.local=null",
        "train.workers=2", "train.threads=1", "train.epochs=1000", "train.batch_size=256",
        "tables={'*': {admit_after: 2, evict_after_steps: 100000}}", "train.test_every={steps: 500}",
        f"train.checkpoint={{url: '{folder / 'saves'}', every_seconds: 30}}",
    )  # fmt: skip
    launcher.start("train", str(JOB), *(f"--set={each}" for each in settings)).wait_for(r"samples/s")
    launcher.start("serve", "--model=demo", f"--follow={address}", "--namespace=demo", "--port=0")
    return str(ready[1])


def take(chrome: Browser, screen: str, height: int) -> Path:
    """Writes the picture of a screen."""
    chrome.run("location.hash = arguments[0]", screen)
    chrome.wait_for(lambda: chrome.text("h1").lower() == screen, f"the screen {screen}")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = chrome.devtools("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    data, path = base64.b64decode(shot["data"]), FOLDER / f"page-{screen}.png"
    assert len(data) <= MOST_BYTES, f"{path.name} has {len(data)} bytes; allowed: {MOST_BYTES}"
    path.write_bytes(data)
    return path


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = Launcher(folder)
        try:
            page = started(launcher, folder)
            print(f"training for {TRAINING_SEC} s", flush=True)
            time.sleep(TRAINING_SEC)
            with browser(folder / "profile") as chrome:
                chrome.devtools(
                    "Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False
                )
                chrome.open(page)
                chrome.wait_for(lambda: chrome.text("h1") == "Cluster", "figures")
                for screen, height in SCREENS.items():
                    print(f"wrote {take(chrome, screen, height)}", flush=True)
        finally:
            launcher.kill_all()


if __name__ == "__main__":
    main()
