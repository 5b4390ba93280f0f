"""Draws the pictures of the documents as SVG for light and dark: ``python -m sparserow.deploy.reference.pictures``."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_STYLE = """
  svg { background: #ffffff; }
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .small { font-size: 12px; fill: #57606a; }
  .box { fill: #f6f8fa; stroke: #57606a; }
  .heart { fill: #ddf4ff; stroke: #0969da; }
  .line { stroke: #57606a; fill: none; }
  .head { fill: #57606a; }
  .life { stroke: #8c959f; stroke-dasharray: 4 4; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .box { fill: #161b22; stroke: #8b949e; }
    .heart { fill: #0c2d6b; stroke: #58a6ff; }
    .line { stroke: #8b949e; }
    .head { fill: #8b949e; }
    .life { stroke: #484f58; }
  }
"""


@dataclass
class Picture:
    """An SVG that is being drawn; lengths are in pixels, from the top left.

    Args:
        width, height: the size of the picture.
        description: what the picture shows, for screen readers.
    """

    width: int
    height: int
    description: str
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: list[str], kind: str = "box") -> None:
        """Draws a box whose first line is its title."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * number, line, "small" if number else "title")

    def arrow(self, points: list[tuple[float, float]], *, both_ways: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = ' marker-start="url(#tail)"' if both_ways else ""
        self._parts.append(f'<polyline class="line" points="{path}" marker-end="url(#tip)"{start}/>')

    def life(self, x: float, top: float, bottom: float) -> None:
        self._parts.append(f'<line class="life" x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}"/>')

    def svg(self) -> str:
        """Returns the whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<title>{escape(self.description)}</title>\n<style>{_STYLE}</style>\n'
            '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path class="head" d="M0,0 L9,4 L0,8 z"/></marker>'
            '<marker id="tail" markerWidth="9" markerHeight="8" refX="1" refY="4" orient="auto">'
            '<path class="head" d="M9,0 L0,4 L9,8 z"/></marker></defs>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def architecture() -> Picture:
    """Draws the processes and what they exchange."""
    picture = Picture(900, 430, "Workers pull and push rows of shards; serving follows the shards; a coordinator leads")
    picture.box(
        30,
        30,
        330,
        84,
        ["Workers (PyTorch)", "dense tower: data-parallel, all-reduce", "gather op, row cache, prefetch"],
    )
    picture.box(
        570, 30, 300, 84, ["Inference services", "ServingClient, HTTP, gRPC", "or the model in their own process"]
    )
    picture.box(
        30,
        190,
        330,
        110,
        [
            "Shards of the parameter server",
            "rows by slot: RAM, RocksDB on SSD",
            "commits, versions, log of changes",
        ],
        "heart",
    )
    picture.box(
        570, 190, 300, 110, ["Serving processes", "rows of published versions", "no torch; replicas and peers"], "heart"
    )
    picture.box(30, 355, 330, 55, ["Coordinator", "routes, jobs, leases, saves and restores"])
    picture.box(570, 355, 300, 55, ["Files and object stores", "checkpoints, published versions"])
    picture.arrow([(195, 114), (195, 190)], both_ways=True)
    picture.text(207, 148, "pull, prepare, commit", "small", "start")
    picture.text(207, 165, "(data plane, TCP)", "small", "start")
    picture.arrow([(720, 114), (720, 190)], both_ways=True)
    picture.text(732, 157, "lookup, predict", "small", "start")
    picture.arrow([(360, 225), (570, 225)])
    picture.text(465, 216, "live sync: changed rows", "small")
    picture.arrow([(195, 355), (195, 300)], both_ways=True)
    picture.text(207, 332, "control plane (gRPC)", "small", "start")
    picture.arrow([(360, 270), (440, 270), (440, 382), (570, 382)], both_ways=True)
    picture.text(452, 372, "save, restore", "small", "start")
    picture.arrow([(720, 355), (720, 300)])
    picture.text(732, 332, "publish", "small", "start")
    picture.arrow([(30, 382), (14, 382), (14, 72), (30, 72)], both_ways=True)
    return picture


def step() -> Picture:
    """Draws one step of one worker over two shards."""
    picture = Picture(760, 520, "One step: pull, forward and backward, all-reduce, PREPARE and COMMIT on every shard")
    worker, first, second = 150.0, 430.0, 650.0
    for x, name in ((worker, "Worker"), (first, "Shard 0"), (second, "Shard 1")):
        picture.box(x - 70, 15, 140, 32, [name], "heart")
        picture.life(x, 47, 505)

    def message(y: float, words: str, *, back: bool = False) -> None:
        """Draws the same message to, or from, both shards."""
        for x, at in ((first, y), (second, y + 14)):
            picture.arrow([(x, at), (worker, at)] if back else [(worker, at), (x, at)])
        picture.text(worker + 12, y - 5, words, "small", "start")

    message(85, "PULL: distinct keys of the batch, by shard")
    message(140, "ROWS: as the staleness allows", back=True)
    picture.box(worker - 130, 175, 260, 62, ["Forward and backward", "gradients are summed by key"])
    picture.box(worker - 130, 250, 260, 40, ["All-reduce of the dense tower"])
    message(325, "PREPARE: gradients; memory is reserved")
    message(375, "ACK: with all of them COMMIT may leave", back=True)
    message(425, "COMMIT: repeated until it is acknowledged")
    message(475, "ACK: rows have new versions", back=True)
    return picture


PICTURES = {"architecture.svg": architecture, "step.svg": step}


def main() -> None:
    """Writes every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
