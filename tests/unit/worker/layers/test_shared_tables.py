"""Several layers on one table, and frozen tables: what they read and train, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparserow as sr

ROWS, DIM, BATCH, STEPS = 60, 4, 16, 12
SGD = sr.optim.SGD(lr=0.5)


@pytest.fixture
def cluster() -> sr.InProcessCluster:
    return sr.InProcessCluster(shards=2)


@pytest.fixture
def session(cluster: sr.InProcessCluster) -> Iterator[sr.Session]:
    with cluster.connect("shop") as session:
        yield session


class Shop(nn.Module):
    """An item, and a history of items; both read one matrix when it is tied, or the layers are bound together."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.history = nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True)
        self.brand = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(3 * DIM, 1)
        if is_tied:
            self.history.weight = self.item.weight

    def forward(self, item: Tensor, history: tuple[Tensor, Tensor], brand: Tensor) -> Tensor:
        values, offsets = history
        # The arithmetic of ids is part of the forward, as in models whose keys have 63 bits.
        parts = [self.item(item % ROWS), self.history(values % ROWS, offsets), self.brand(brand)]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


def batches(count: int = STEPS) -> Iterator[tuple[tuple[Tensor, tuple[Tensor, Tensor], Tensor], Tensor]]:
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        lengths = torch.randint(0, 5, (BATCH,), generator=random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        history = torch.randint(0, 1 << 40, (int(lengths.sum()),), generator=random)
        item, brand = (torch.randint(0, limit, (BATCH,), generator=random) for limit in (1 << 40, ROWS))
        yield (item, (history, offsets), brand), torch.randint(0, 2, (BATCH,), generator=random).float()


def train(model: nn.Module, session: sr.Session | None, *, lr: float = 0.5) -> list[float]:
    losses = []
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=lr)
    for inputs, labels in batches():
        loss = binary_cross_entropy_with_logits(model(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if session is None:
            optimizer.step()
        else:
            session.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("way", ["tied", "bound"])
def test_layers_of_one_table_train_it_as_one_matrix(session: sr.Session, way: str) -> None:
    local = Shop(is_tied=True)
    model = copy.deepcopy(local) if way == "tied" else Shop(is_tied=False)
    bind = {}
    if way == "bound":
        bind = {"items": ["item", "history"]}
        model.load_state_dict(local.state_dict())
    session.distribute(model, optimizer=SGD, min_rows=10, bind=bind)
    name = "items" if bind else "item"
    assert sorted(session.core.bound_tables()) == sorted([name, "brand"])
    assert model.item.binding == model.history.binding
    np.testing.assert_allclose(train(model, session), train(local, None), atol=1e-5)
    np.testing.assert_allclose(session.table(name).pull(np.arange(ROWS)), local.item.weight.detach(), atol=1e-5)


def test_layers_of_one_table_share_a_pull_and_a_sum(session: sr.Session) -> None:
    model = session.distribute(Shop(is_tied=True), optimizer=SGD, min_rows=10)
    train(model, session)
    stats = session.stats()
    unique = 0
    for (item, (history, _), brand), _ in batches():
        unique += len(torch.cat([item, history]).remainder(ROWS).unique()) + len(brand.unique())
    assert stats.rows_pulled == unique
    assert stats.rows_pushed == unique
    assert stats.lookups_missed == 0
    # The first forward learns which ids reach which lookup; each later one pulls for all of its lookups at once.
    assert stats.pulls_merged == STEPS - 1


def test_layers_tied_before_they_have_rows_begin_as_one(session: sr.Session) -> None:
    with sr.deferred(min_rows=10):
        model = Shop(is_tied=True)
        nn.init.constant_(model.item.weight, 3.0)
    session.distribute(model, optimizer=SGD, min_rows=10)
    assert float(model.history(torch.tensor([1, 1]), torch.tensor([0, 2])).sum()) == 3.0 * DIM
    with sr.deferred(min_rows=10):
        model = Shop(is_tied=False)
        nn.init.constant_(model.item.weight, 3.0)
        nn.init.constant_(model.history.weight, 4.0)
    with pytest.raises(sr.errors.FailedPrecondition, match=r"initialised differently: Constant.*3.* and Constant.*4"):
        session.distribute(model, optimizer=SGD, min_rows=10, bind={"all": ["item", "history"]})


def frozen_shop() -> Shop:
    model = Shop(is_tied=True)
    model.item.weight.requires_grad_(False)
    return model


def test_a_frozen_table_is_read_and_never_pushed(session: sr.Session) -> None:
    local = frozen_shop()
    model = session.distribute(copy.deepcopy(local), optimizer=SGD, min_rows=10)
    before = session.table("item").pull(np.arange(ROWS))
    np.testing.assert_array_equal(before, local.item.weight)
    assert not model.item(torch.tensor([1])).requires_grad
    np.testing.assert_allclose(train(model, session), train(local, None), atol=1e-5)
    np.testing.assert_array_equal(session.table("item").pull(np.arange(ROWS)), before)
    assert session.optimizer.learning_rates() == {"item": 0.5, "brand": 0.5}
    brands = sum(len(inputs[2].unique()) for inputs, _ in batches())
    assert session.stats().rows_pushed == brands


def test_a_model_whose_tables_are_all_frozen_trains_its_tower(session: sr.Session) -> None:
    local = frozen_shop()
    local.brand.weight.requires_grad_(False)
    model = session.distribute(copy.deepcopy(local), optimizer=SGD, min_rows=10)
    np.testing.assert_allclose(train(model, session), train(local, None), atol=1e-5)
    assert session.stats().rows_pushed == 0


def test_reading_a_frozen_table_creates_no_row(session: sr.Session) -> None:
    with sr.deferred(min_rows=10):
        model = frozen_shop()
        nn.init.constant_(model.item.weight, 0.25)
    model.head = nn.Linear(3 * DIM, 1)
    session.distribute(model, optimizer=SGD, min_rows=10)
    train(model, session)
    assert float(model.item(torch.tensor([5])).sum()) == 0.25 * DIM
    assert not list(session.table("item").scan())


def test_a_table_that_another_job_trains_may_be_frozen_here(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("shop") as first:
        first.distribute(Shop(is_tied=True), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=10)
    with cluster.connect("shop") as reader, cluster.connect("shop") as writer:
        model = reader.distribute(frozen_shop(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=10)
        writer.table("item").assign([7], np.full((1, DIM), 2.0, np.float32))
        assert model.item(torch.tensor([7])).tolist() == [[2.0] * DIM]
        writer.table("item").assign([7], np.full((1, DIM), 3.0, np.float32))
        reader.step(allow_empty=True)
        assert model.item(torch.tensor([7])).tolist() == [[3.0] * DIM]


@pytest.mark.parametrize("staleness", [0, 4])
def test_prefetch_leaves_frozen_tables_to_their_lookups(cluster: sr.InProcessCluster, staleness: int) -> None:
    local = frozen_shop()
    with cluster.connect(f"ahead{staleness}", staleness=staleness) as session:
        model = session.distribute(copy.deepcopy(local), optimizer=SGD, min_rows=10)
        dense, count = torch.optim.SGD(model.head.parameters(), lr=0.5), 0
        for inputs, labels in session.prefetch(batches(), depth=2):
            binary_cross_entropy_with_logits(model(*inputs), labels).backward()
            session.step(dense)
            dense.zero_grad()
            count += 1
        assert count == STEPS
        np.testing.assert_array_equal(session.table("item").pull(np.arange(ROWS)), local.item.weight)
        assert session.stats().rows_prefetched > 0


def test_what_cannot_be_one_table_is_refused(session: sr.Session) -> None:
    def refused(match: str, **options: object) -> None:
        with pytest.raises((sr.errors.InvalidArgument, sr.errors.FailedPrecondition), match=match):
            session.distribute(Shop(is_tied=False), optimizer=SGD, min_rows=10, **options)  # type: ignore[arg-type]
        assert session.core.catalog.list_tables("shop") == ()

    refused(r"bind\['items'\]: the model has no layer 'itme' to distribute; nearest: item", bind={"items": ["itme"]})
    refused(r"bind\['items'\].*a sequence of the paths", bind={"items": "item"})
    refused("'item' is bound to 'a' and to 'b'", bind={"a": ["item"], "b": ["item"]})
    refused("layer 'brand' is not among the layers of the table of its name", bind={"brand": ["item"]})
    model = Shop(is_tied=False)
    model.brand = nn.Embedding(ROWS, 2 * DIM)
    with pytest.raises(sr.errors.InvalidArgument, match="'item' and 'brand' of table 'all' differ in columns: 4 and 8"):
        session.distribute(model, optimizer=SGD, min_rows=10, bind={"all": ["item", "brand"]})
    with pytest.raises(sr.errors.FailedPrecondition, match=r"'item' is frozen.*no option of admission"):
        session.distribute(frozen_shop(), optimizer=SGD, min_rows=10, tables={"item": sr.Table(evict_after_steps=5)})
