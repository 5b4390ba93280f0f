"""Steps on a CUDA device: the host's results within 1e-6, no hidden wait, mixed precision, two batches ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr
from sparserow.cpp_ext.device.link import link_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, DIM, BATCH, STEPS = 500, 16, 128, 12
CUDA = torch.device("cuda", 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(5))
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.tower = nn.Sequential(nn.Linear(6 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, column]) for column, table in enumerate(self.tables)]
        return self.tower(torch.cat([*rows, self.bag(ids)], 1)).squeeze(1)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, ROWS, (BATCH, 5), generator=generator),
            torch.rand(BATCH, generator=generator).round(),
        )
        for _ in range(STEPS)
    ]


def model_of(session: sr.Session, where: torch.device) -> Net:
    torch.manual_seed(0)
    return session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.05), min_rows=1).to(where)


@contextmanager
def no_hidden_wait(on: bool) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(session: sr.Session, where: torch.device, *, ahead: bool, amp: torch.dtype | None = None) -> list[float]:
    model = model_of(session, where)
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(where.type) if amp == torch.float16 else None
    given = batches()
    source = session.prefetch(given, 2, device=where, on_host=lambda batch: [batch[0]]) if ahead else given
    losses = []
    for number, (ids, labels) in enumerate(source):
        with no_hidden_wait(ahead and where.type == "cuda" and number >= 4):
            with torch.autocast(where.type, amp) if amp is not None else torch.enable_grad():
                logits = model(ids).float()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(where))
            (loss if scaler is None else scaler.scale(loss)).backward()
            session.step(dense, scaler)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled in the forward", "prefetched"])
def test_losses_are_those_of_the_host(ahead: bool) -> None:
    cluster = sr.InProcessCluster(shards=2)
    with cluster.connect("host") as session:
        expected = train(session, torch.device("cpu"), ahead=False)
    with cluster.connect("cuda") as session:
        assert train(session, CUDA, ahead=ahead) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_step_crosses_twice_and_waits_once() -> None:
    with sr.InProcessCluster(shards=2).connect("crossings") as session:
        before = vars(link_of(CUDA).crossings).copy()
        train(session, CUDA, ahead=True)
        now = vars(link_of(CUDA).crossings)
    taken = {name: now[name] - before[name] for name in now}
    assert taken["to_device"] <= 2 * STEPS + 8  # the first forward, which has no plan, looks up table by table
    assert taken["waits"] <= STEPS + 8
    assert taken["to_host"] <= STEPS + 8


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_mixed_precision_trains(amp: torch.dtype) -> None:
    cluster = sr.InProcessCluster(shards=1)
    with cluster.connect("full") as session:
        expected = train(session, CUDA, ahead=True)
    with cluster.connect("mixed") as session:
        assert train(session, CUDA, ahead=True, amp=amp) == pytest.approx(expected, rel=0.05)


def test_a_compiled_model_trains_as_the_model() -> None:
    cluster = sr.InProcessCluster(shards=1)
    with cluster.connect("eager") as session:
        expected = train(session, CUDA, ahead=False)
    with cluster.connect("compiled") as session:
        model = model_of(session, CUDA)
        compiled, dense = sr.compile_model(model), torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for ids, labels in batches():
            loss = nn.functional.binary_cross_entropy_with_logits(compiled(ids), labels.to(CUDA))
            loss.backward()
            session.step(dense)
            losses.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_table_on_the_device_alone_is_as_one_on_servers() -> None:
    ends = []
    for placement in ("servers", "device"):
        torch.manual_seed(0)
        model = Net().to(CUDA)
        with sr.InProcessCluster(shards=1).connect(placement) as session:
            tables = {"*": sr.Table(placement=placement)}
            session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.05), min_rows=1, tables=tables)
            dense, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
            for ids, labels in batches():
                scores = model(ids.to(CUDA))
                loss = nn.functional.binary_cross_entropy_with_logits(scores, labels.to(CUDA))
                loss.backward()
                session.step(dense)
                losses.append(loss.item())
            if placement == "device":
                assert session.core.device_tables.table("bag").weights.device.type == "cuda"
                whole = session.gather_tables(model)
                assert whole is not None
                torch.testing.assert_close(whole(batches()[0][0]), model.eval()(batches()[0][0].to(CUDA)).cpu())
            ends.append(losses)
    torch.testing.assert_close(torch.tensor(ends[0]), torch.tensor(ends[1]), rtol=0, atol=1e-6)
