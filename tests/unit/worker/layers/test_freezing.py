"""Layers frozen and unfrozen after ``distribute``: what torch does to a local layer happens to the rows.

The reference is the same model and loop in plain torch, with SGD, whose rows the servers must have after each step.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM, STEPS = 40, 4, 3
RATE = 0.02


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"one": nn.Embedding(ROWS, DIM), "two": nn.EmbeddingBag(ROWS, DIM, mode="sum")})
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.embeddings["one"](ids[:, 0]), self.embeddings["two"](ids)], 1)).squeeze(1)


def layer(model: Tower, on: bool) -> None:
    model.embeddings["one"].requires_grad_(on)


def submodule(model: Tower, on: bool) -> None:
    model.embeddings.requires_grad_(on)


def whole(model: Tower, on: bool) -> None:
    model.requires_grad_(on)


def loop(model: Tower, on: bool) -> None:
    for parameter in model.embeddings.parameters():
        parameter.requires_grad = on


def loop_by_name(model: Tower, on: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("embeddings.two."):
            parameter.requires_grad_(on)


WAYS: list[Callable[[Tower, bool], None]] = [layer, submodule, whole, loop, loop_by_name]
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("freezing", staleness=0) as session:
        yield session


def plain() -> Tower:
    torch.manual_seed(0)
    return Tower()


def distributed(session: sr.Session, start: Callable[[Tower], None] | None = None) -> Tower:
    model = plain()
    if start is not None:
        start(model)
    return session.distribute(model, optimizer=sr.optim.SGD(lr=RATE), min_rows=10, carry_weights=True)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (8, 3), generator=generator) for _ in range(3 * STEPS)]


def compare(session: sr.Session, model: nn.Module, reference: Tower) -> None:
    for name in ("one", "two"):
        rows = session.table(f"embeddings.{name}").pull(np.arange(ROWS))
        np.testing.assert_allclose(rows, reference.embeddings[name].weight.detach(), atol=1e-6, err_msg=name)
    head = dict(model.named_parameters())
    (weight,) = [value for name, value in head.items() if name.endswith("head.weight")]
    torch.testing.assert_close(weight, reference.head.weight)


def check(
    session: sr.Session,
    model: Tower,
    reference: Tower,
    way: Callable[[Tower, bool], None],
    states: tuple[bool, bool, bool],
    called: nn.Module | None = None,
    ahead: bool = False,
) -> None:
    """Trains both models for three parts; at the beginning of each, ``way`` sets the state."""
    called = model if called is None else called
    trained = torch.optim.SGD([each for each in model.parameters() if each.numel()], lr=RATE)
    wanted = torch.optim.SGD(reference.parameters(), lr=RATE)
    given = session.prefetch(batches()) if ahead else batches()
    for at, ids in enumerate(given):
        if at % STEPS == 0:
            way(model, states[at // STEPS])
            way(reference, states[at // STEPS])
        outputs = []
        for each, of in ((called, trained), (reference, wanted)):
            loss = (each(ids) - 1).square().mean()
            outputs.append(loss.detach())
            if loss.requires_grad:
                loss.backward()
            if of is wanted:
                of.step()
                of.zero_grad()
            else:
                session.step(of, allow_empty=True)
        torch.testing.assert_close(outputs[0], outputs[1])
        compare(session, model, reference)


@pytest.mark.parametrize("states", [(True, False, True), (False, True, False)], ids=["frozen within", "frozen around"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetch"])
@ways
def test_rows_follow_requires_grad(
    session: sr.Session, way: Callable[[Tower, bool], None], states: tuple[bool, bool, bool], ahead: bool
) -> None:
    check(session, distributed(session), plain(), way, states, ahead=ahead)


@ways
def test_a_layer_that_was_frozen_before_trains_once_it_may(
    session: sr.Session, way: Callable[[Tower, bool], None]
) -> None:
    reference = plain()
    way(reference, False)
    check(session, distributed(session, lambda model: way(model, False)), reference, way, (False, True, True))


@pytest.mark.parametrize("states", [(True, False, True), (False, True, False)], ids=["frozen within", "frozen around"])
def test_a_compiled_model_follows(session: sr.Session, states: tuple[bool, bool, bool]) -> None:
    model = distributed(session)
    torch._dynamo.reset()
    check(session, model, plain(), submodule, states, torch.compile(model, backend="aot_eager"))


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("find_unused", [False, True])
def test_ddp_does_not_see_the_empty_parameters(find_unused: bool) -> None:
    with sr.InProcessCluster(shards=2).connect("freezing-ddp", staleness=0) as session:
        model = distributed(session)
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(model), find_unused_parameters=find_unused)
        check(session, model, plain(), submodule, (True, False, True), wrapped)


def test_the_empty_parameters_are_in_no_state(session: sr.Session) -> None:
    model = distributed(session)
    names = dict(model.named_parameters())
    assert {name: tuple(value.shape) for name, value in names.items()} == {
        "embeddings.one.rows": (0,),
        "embeddings.two.rows": (0,),
        "head.weight": (1, 2 * DIM),
        "head.bias": (1,),
    }
    state = model.state_dict()
    assert not {"embeddings.one.rows", "embeddings.two.rows"} & set(state)
    model.load_state_dict(state, strict=True)
    local = plain().state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*embeddings.one.weight"):
        model.load_state_dict(local, strict=True)
    assert len(list(model.embeddings["one"].parameters(recurse=False))) == 1


def test_copies_keep_their_own_state(session: sr.Session) -> None:
    model = distributed(session)
    model.embeddings["one"].requires_grad_(False)
    copied = pickle.loads(pickle.dumps(model.embeddings["one"]))
    assert copied.is_frozen
    copied.requires_grad_(True)
    assert model.embeddings["one"].is_frozen
    model.embeddings["one"].double()
    assert model.embeddings["one"].is_frozen


def test_two_layers_of_one_table_are_frozen_each_by_itself(session: sr.Session) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(ROWS, DIM)
            self.b = nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            return self.a(ids[:, 0]).sum() + 2 * self.b(ids[:, 1]).sum()

    torch.manual_seed(0)
    model = session.distribute(Shared(), optimizer=sr.optim.SGD(lr=1.0), min_rows=10, bind={"t": ["a", "b"]})
    ids = torch.tensor([[1, 2]])
    before = session.table("t").pull([1, 2])
    for a, b, moved in ((True, True, (1, 2)), (False, True, (0, 2)), (False, False, (0, 0)), (True, False, (1, 0))):
        model.a.requires_grad_(a)
        model.b.requires_grad_(b)
        loss = model(ids)
        if a or b:
            loss.backward()
        session.step(allow_empty=True)
        after = session.table("t").pull([1, 2])
        np.testing.assert_allclose((before - after)[:, 0], moved, atol=1e-6)
        before = after


def test_a_schedule_of_learning_rates_goes_on_while_a_table_is_frozen(session: sr.Session) -> None:
    model = distributed(session, lambda model: layer(model, False))
    schedule = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda step: 0.5**step)
    rows = session.table("embeddings.one")
    for step in range(4):
        if step == 2:
            model.embeddings["one"].requires_grad_(True)
        before = rows.pull([5])
        model.embeddings["one"](torch.tensor([5])).sum().backward() if step >= 2 else None
        session.step(allow_empty=True)
        moved = float((before - rows.pull([5]))[0, 0])
        assert moved == pytest.approx(0.0 if step < 2 else RATE * 0.5**step)
        schedule.step()


def test_a_frozen_layer_warns_of_nothing_in_eval_mode_and_weight_is_refused(session: sr.Session) -> None:
    model = distributed(session)
    with pytest.raises(AttributeError, match=r"the layer's requires_grad_ freezes it"):
        _ = model.embeddings["one"].weight
    with pytest.raises(sr.errors.FailedPrecondition, match=r"\.weight cannot be set.*assign\(keys, rows\)"):
        model.embeddings["one"].weight = nn.Parameter(torch.zeros(ROWS, DIM))
    assert not hasattr(model.embeddings["one"], "weight")
    copy.copy(model.embeddings["one"])
