"""A served program on a device: the scores of the host, arguments and rows in a copy each, rows that stay there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparserow as sr
from scored_program import batch, publish_scorer
from sparserow.deploy.bench.counting_device import COUNTS, device
from sparserow.serving.inference.inference import ServedModel


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Tensor]]:
    """A folder with the model, and the scores of its forward for some batches."""
    root = str(tmp_path_factory.mktemp("models"))
    return root, publish_scorer(root, 6)


def test_scores_are_those_of_the_host_and_hot_rows_stay_on_the_device(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    with sr.local_serving("ctr", root=root, poll="50ms") as serving, sr.ServingClient(serving.addresses) as client:
        with ServedModel(client, root, device=device(), device_bytes=1 << 16) as served:
            for seed, expected in enumerate(scores):
                out = served(*batch(seed))
                assert out.device == device()
                torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
            first = served.stats()
            COUNTS.reset()
            again = served(*batch(0))
            crossed = COUNTS.bytes_to_device, COUNTS.to_device
            torch.testing.assert_close(again.cpu(), scores[0], rtol=1e-5, atol=1e-6)
            stats = served.stats()
            assert stats.device_hits > first.device_hits
            assert stats.device_misses == first.device_misses
            assert 0 < stats.device_bytes <= 1 << 16
            # The arguments in one copy; the program's own ids come back in one, and their positions cross.
            assert crossed[1] <= 3, COUNTS.log
        with ServedModel(client, root, device=device()) as plain:
            plain(*batch(0))
            COUNTS.reset()
            plain(*batch(0))
            assert COUNTS.bytes_to_device > crossed[0]
            stats = plain.stats()
            assert (stats.device_hits, stats.device_misses, stats.device_bytes) == (0, 0, 0)
        with ServedModel(client, root, device=device(), device_bytes=1 << 16, device_dtype="float16") as halved:
            for seed, expected in enumerate(scores):
                torch.testing.assert_close(halved(*batch(seed)).cpu(), expected, rtol=1e-2, atol=1e-3)


def test_calls_from_several_threads_do_not_mix(published: tuple[str, list[Tensor]]) -> None:
    root, scores = published
    wrong: list[int] = []
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        ServedModel(client, root, device=device(), device_bytes=1 << 12) as served,
    ):

        def work(seed: int) -> None:
            for _ in range(15):
                if not torch.allclose(served(*batch(seed)).cpu(), scores[seed], rtol=1e-5, atol=1e-6):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


def test_rows_are_kept_on_a_device_alone(published: tuple[str, list[Tensor]], tmp_path: Path) -> None:
    root, _ = published
    with (
        sr.local_serving("ctr", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        pytest.raises(sr.errors.InvalidArgument, match=r"ServedModel\.device_bytes: 5 is not allowed"),
    ):
        ServedModel(client, root, device_bytes=5)
