"""Draws the curves of a run as one HTML page that needs no network, by plotly."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from ...proto.errors import FailedPrecondition
from ...proto.extras import install_command
from .run_report import Curve, Run

_MOST_POINTS, _MOST_MARKED = 20_000, 100
_HEIGHT = 320
_GRID = "rgba(128,128,128,0.3)"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# Buttons are named one by one because plotly has some that send the figures to a host of its own.
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
}
_STYLE = """
  :root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #59636e; --edge: #d0d6dd; }
  @media (prefers-color-scheme: dark) {
    :root { --ground: #14171b; --ink: #e8ebef; --soft: #a3adb8; --edge: #3a414a; }
  }
  html { overflow-y: scroll; }
  body { margin: 0 auto; max-width: 70rem; padding: 0 1rem 2rem; background: var(--ground); color: var(--ink);
    font: 0.9375rem/1.45 system-ui, "Liberation Sans", sans-serif; overflow-wrap: anywhere; }
  h1 { font-size: 1.25rem; }
  section { margin: 0 0 1rem; padding: 0.5rem 0.75rem; border: 1px solid var(--edge); }
  h2 { margin: 0; font-size: 1rem; }
  .legendtext, .xtitle, .ytitle, .xtick text, .ytick text { fill: var(--ink) !important; }
"""


def page_of(run: Run, title: str) -> str:
    """Returns the page, with all that it needs inside; it is dark where the browser prefers that.

    Args:
        run: the curves.
        title: the title of the page.

    Raises:
        FailedPrecondition: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise FailedPrecondition(f"report: needs plotly; install it: {install_command('report')}") from error
    heading = escape(f"{run.job} ({title})" if run.job else title)
    charts = [(name, curves) for name, curves in run.charts.items() if any(curve.values for curve in curves.values())]
    sections = [_section(number, name, curves) for number, (name, curves) in enumerate(charts)]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{heading}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<h1>{heading}</h1>\n"
        f"{''.join(sections) or '<p>The run has no figures yet.</p>'}\n</body>\n</html>\n"
    )


def _section(number: int, name: str, curves: Mapping[str, Curve]) -> str:
    shown = _figure(name, curves).to_html(
        full_html=False, include_plotlyjs=False, default_height=_HEIGHT, div_id=f"chart-{number}", config=_CONFIG
    )
    return f"<section>\n<h2>{escape(name)}</h2>\n{shown}\n</section>\n"


def _figure(name: str, curves: Mapping[str, Curve]) -> Any:
    """Returns a chart; its names are escaped because plotly reads them as markup."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for label, curve in curves.items():
        if not curve.values:
            continue
        step = max(1, len(curve.values) // _MOST_POINTS)
        mode = "lines+markers" if len(curve.values) < _MOST_MARKED else "lines"
        points = Scatter(
            x=curve.samples[::step], y=curve.values[::step], mode=mode, name=escape(label), connectgaps=False
        )
        figure.add_trace(points)
    figure.update_xaxes(title_text="samples", gridcolor=_GRID, zeroline=False, automargin=True)
    figure.update_yaxes(title_text=escape(name), gridcolor=_GRID, zeroline=False, automargin=True)
    clear = "rgba(0,0,0,0)"
    figure.update_layout(
        template="plotly_white",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom", "yref": "container", "bgcolor": clear},
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        modebar={"bgcolor": clear, "color": "#7d8791", "activecolor": "#0a5bc4"},
    )
    return figure
