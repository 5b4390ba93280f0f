"""``bench reader`` in its quick form: figures of real runs; the sizes here judge nothing."""

from __future__ import annotations

from sparserow.deploy.bench.reader import QUICK, run_reader


def test_each_reader_has_a_figure() -> None:
    figures = run_reader(QUICK)
    assert [figure.metric.partition(",")[0] for figure in figures] == [
        "pyarrow's scan to texts",
        "pyarrow's scan to codes",
        "reader with features",
        "reader of the same rows as text",
        "reader with features",
        "a step of training on it: 26 tables x 64",
        "of it",
        "of it",
    ]
    assert all(figure.value > 0 for figure in figures[:6])
    assert all(figure.value >= 0 for figure in figures[6:])
    assert figures[2].ratio is not None
