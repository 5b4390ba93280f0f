"""What torch's own layers allow and a distributed one does not: refused by name, with what works instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.worker.api.in_process import InProcessCluster

IDS = torch.arange(4)


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with InProcessCluster(slot_count=16).connect() as session:
        yield session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.one(ids).sum() + self.bag(ids.reshape(2, 2)).sum()


@pytest.fixture
def model(session: sr.Session) -> Net:
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)


USES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "vmap": (lambda model: torch.func.vmap(model)(torch.stack([IDS, IDS])), r"torch\.func \(vmap"),
    "grad": (
        lambda model: torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (IDS,)))(
            dict(model.named_parameters())
        ),
        r"torch\.func",
    ),
    "jvp": (
        lambda model: torch.func.jvp(lambda x: model(IDS) * x, (torch.tensor(1.0),), (torch.tensor(1.0),)),
        r"torch\.func",
    ),
    "script": (torch.jit.script, r"torch\.jit\.script"),
    "trace": (lambda model: torch.jit.trace(model, IDS), r"torch\.jit\.trace"),
}


@pytest.mark.parametrize("trained", [0, 3], ids=["at first", "with a plan of its lookups"])
@pytest.mark.parametrize("use", USES)
def test_a_transform_is_named_with_what_works(session: sr.Session, model: Net, use: str, trained: int) -> None:
    for _ in range(trained):
        model(IDS).backward()
        session.step()
    call, name = USES[use]
    with pytest.raises(
        sr.errors.FailedPrecondition, match=rf"^table 'default/\w+': .*{name}.*allowed: torch\.compile, torch\.export"
    ):
        call(model)
    assert torch.isfinite(model(IDS))  # it goes on
    assert torch.isfinite(torch.func.functional_call(model, {}, (IDS,)))  # this is no transform


def test_layers_have_the_options_of_torchs(model: Net) -> None:
    for layer, local in ((model.one, nn.Embedding(10, 4)), (model.bag, nn.EmbeddingBag(10, 4))):
        for name in (
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "sparse",
        ):
            assert getattr(layer, name) == getattr(local, name), name
        with pytest.raises(sr.errors.FailedPrecondition, match="reset_parameters draws no rows"):
            layer.reset_parameters()


def test_texts_say_which_one(session: sr.Session, model: Net) -> None:
    assert repr(session) == "Session(namespace='default', rank=0, world_size=1)"
    assert repr(session.table("one")).startswith("TableRows('default/one', dim=4, optimizer=SGD(")
    with pytest.raises(sr.errors.InvalidArgument, match="of min_rows=100 rows; its largest has 10"):
        session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=100)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    ],
)
def test_a_schedule_of_momentum_names_the_option(
    session: sr.Session, model: Net, make: Callable[[torch.optim.Optimizer], object]
) -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"session\.optimizer: the momentum of rows .*; pass cycle_momentum=False"
    ):
        make(session.optimizer)
    assert "betas" not in session.optimizer.defaults  # others ask too, as a callback that logs the momentum
    schedule = torch.optim.lr_scheduler.OneCycleLR(session.optimizer, 0.4, total_steps=4, cycle_momentum=False)
    model(IDS).backward()
    session.step()
    schedule.step()
    assert session.optimizer.learning_rates()["one"] == pytest.approx(schedule.get_last_lr()[0])
