"""The figures of prefetch in ``bench train`` are made from real runs; the sizes here judge nothing."""

from __future__ import annotations

from sparserow.deploy.bench.click_model import Size
from sparserow.deploy.bench.prefetched import measure_prefetch


def test_figures_of_prefetch() -> None:
    figures = {figure.metric: figure for figure in measure_prefetch(Size(300, 16, (2,), 10), 2)}
    assert all(name.startswith("train 2-hot, prefetch 2: ") for name in figures)
    values = {name.partition(": ")[2]: figure for name, figure in figures.items()}
    assert values["ahead, of torch"].limit == 1.15
    assert values["ahead, of torch"].ratio is not None
    assert all(figure.value >= 0 for figure in figures.values())
    assert 0 < values["keys that the batch before had as well"].value < 100
    assert 0 < values["rows left for their step"].value < 100
    assert values["sent again"].value == 0  # nobody else writes
