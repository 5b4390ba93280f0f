"""The one HTML file of the page, joined of its sources, and the policy that lets the browser run these alone."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_SCRIPTS = ("values.js", "elements.js", "chart.js", "screens.js", "page.js")
_NO_TOKEN = '<meta name="sparserow-token" content="none">'
_TOKEN = '<meta name="sparserow-token" content="needed">'
_STYLE_PLACE, _SCRIPT_PLACE = "<style></style>", "<script></script>"


@dataclass(frozen=True)
class PageSource:
    """The page as it is sent.

    Attributes:
        html: the whole file, with its script and style inside.
        asking: the same file, which asks for a token before its first request.
        policy: the value of ``Content-Security-Policy``: this script and this style, and requests to this server.
    """

    html: bytes
    asking: bytes
    policy: str


def page_source() -> PageSource:
    """Reads the sources, which lie beside this module, and joins them."""
    html, style = _text("page.html"), "\n" + _text("page.css")
    script = "\n" + "\n".join(map(_text, _SCRIPTS))
    for place, name, text in ((_STYLE_PLACE, "style", style), (_SCRIPT_PLACE, "script", script)):
        assert html.count(place) == 1, f"page.html has {place} once"
        html = html.replace(place, f"<{name}>{text}</{name}>")
    directives = (
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    assert html.count(_NO_TOKEN) == 1, "page.html says once whether a token is needed"
    return PageSource(html.encode(), html.replace(_NO_TOKEN, _TOKEN).encode(), "; ".join(directives))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
