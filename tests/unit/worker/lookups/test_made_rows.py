"""The rows of a forward's lookups are made by one op; each layer trains as if it had looked its rows up itself."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparserow as sr
from sparserow.cpp_ext import torch_ops as ops
from sparserow.worker.lookups.made_rows import MadeRows
from sparserow.worker.lookups.makers import own_rank

ROWS, DIM = 60, 3
Look = Callable[["Net", Tensor, Tensor, Tensor], list[Tensor]]


class Net(nn.Module):
    """Two plain tables and bags of each mode; ``look`` decides how a forward reads them."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(ROWS, DIM, padding_idx=3), nn.Embedding(ROWS, DIM)
        self.sum, self.max = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True)
        self.head = nn.Linear(DIM, 1)
        self.look = look

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat(
            [torch.tanh(self.head(part)).reshape(-1, 1).sum(0) for part in self.look(self, ids, flat, offsets)]
        )


def all_of_them(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    return [net.one(ids[:, 0]), net.two(ids[:, 1:3]), net.sum(ids), net.max(ids), net.mean(flat, offsets)]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    cuts = torch.sort(torch.randint(0, 20, (5,), generator=random)).values
    flat = torch.randint(0, ROWS, (20,), generator=random)
    ids = torch.randint(0, ROWS, (6, 3), generator=random)
    return ids, flat, torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([20])])


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("ahead") as session:
        yield session


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were handed out by each forward whose rows were made ahead."""
    counts: list[int] = []

    class Counted(MadeRows):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            counts.append(0)

        def take(self, *arguments: Any) -> Tensor | None:
            rows = super().take(*arguments)
            counts[-1] += rows is not None
            return rows

    monkeypatch.setattr(own_rank, "MadeRows", Counted)
    return counts


def pair(session: sr.Session, look: Look) -> tuple[Net, Net]:
    """A distributed model and the same one in plain torch."""
    torch.manual_seed(2)
    plain = Net(look)
    model = session.distribute(copy.deepcopy(plain), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    return model, plain


def check_steps(
    session: sr.Session,
    model: Net,
    plain: Net,
    *,
    steps: int = 4,
    backward: Callable[[Tensor], Any] = lambda out: out.sum().backward(),
) -> None:
    """Both models have equal outputs in each step, so equal gradients before it."""
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = {id(layer.weight) for layer in plain.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    others = [parameter for parameter in plain.parameters() if id(parameter) not in tables]
    rows = [parameter for parameter in plain.parameters() if id(parameter) in tables]
    reference = torch.optim.SGD([{"params": others, "lr": 0.1}, {"params": rows, "lr": 0.5}])
    for seed in range(steps):
        out, wanted = model(*batch(seed)), plain(*batch(seed))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5, msg=f"step {seed}")
        backward(out)
        backward(wanted)
        session.step(dense)
        reference.step()
        reference.zero_grad()


def test_all_kinds_of_lookups_are_one_node(session: sr.Session, handed: list[int]) -> None:
    model, plain = pair(session, all_of_them)
    check_steps(session, model, plain)
    assert handed == [5, 5, 5], "each forward but the first, which is learnt from"
    out = model(*batch(9))
    nodes, rest = set(), [out.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            rest += [each for each, _ in node.next_functions]
    assert sum("Gather" in node.name() for node in nodes) == 1
    session.discard()


def computed(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    return [net.one(ids[:, 0] % 7), net.two((ids[:, 1] * 3 + 1) % ROWS), net.mean(flat, offsets)]


def test_computed_ids_are_compared_by_value(session: sr.Session, handed: list[int]) -> None:
    check_steps(session, *pair(session, computed))
    assert handed == [3, 3, 3]


def changing(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    parts = [net.one(ids[:, 0])]
    ids.add_(1).remainder_(ROWS)  # after the rows were made
    return [*parts, net.two(ids[:, 1]), net.one(ids[:, 2])]


def test_ids_that_the_forward_changes_in_place_are_looked_up_as_they_are(session: sr.Session) -> None:
    model, plain = pair(session, changing)
    for seed in range(3):
        out, wanted = model(*batch(seed)), plain(*batch(seed))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
        for each in (out, wanted):
            with pytest.raises(RuntimeError, match=r"inplace|in place"):
                each.sum().backward()
        session.discard()


def partial(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    rows = [net.one(ids[:, 0]), net.two(ids[:, 1])]
    return rows if int(ids[0, 0]) % 2 else rows[:1]


def again(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    return [net.one(ids[:, 0]), net.one(ids[:, 0]), net.one(ids[:, 1]), net.two(ids[:, 0]), net.sum(flat, offsets[:-1])]


def without_gradient(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    with torch.no_grad():
        gate = net.two(ids[:, 1]).sum()
    return [net.one(ids[:, 0]) * gate, net.two(ids[:, 1]), net.two(ids[:, 2])]


def in_place(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    return [net.one(ids[:, 0]).mul_(2), nn.functional.relu(net.two(ids[:, 1]), inplace=True)]


def weighted(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    weights = torch.sigmoid(net.head.weight).sum().expand(ids.shape)
    return [net.sum(ids, None, weights), net.one(ids[:, 0]), net.two(ids[:, 1])]


def checkpointed(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    inner = checkpoint(lambda x: torch.tanh(net.one(x) + net.two(x)), ids[:, 0], use_reentrant=False)
    assert isinstance(inner, Tensor)
    return [inner, net.sum(ids), net.max(ids)]


def in_another_state(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    was = net.two.training
    net.two.eval()
    still = net.two(ids[:, 1]).detach()
    net.two.train(was)
    return [net.one(ids[:, 0]) * still, net.sum(ids), net.max(ids)]


@pytest.mark.parametrize("look", [partial, again, without_gradient, in_place, weighted, checkpointed, in_another_state])
def test_it_trains_as_in_plain_torch(look: Look, session: sr.Session, handed: list[int]) -> None:
    check_steps(session, *pair(session, look), steps=5)
    assert handed
    assert sum(handed) > 0


def test_losses_of_parts_are_differentiated_one_after_the_other(session: sr.Session, handed: list[int]) -> None:
    def backward(out: Tensor) -> None:
        for part in out.split(1):  # each reaches a lookup of its own, and the head
            part.sum().backward()

    def look(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
        return [net.one(ids[:, 0]), net.two(ids[:, 1]), net.sum(ids)]

    class Apart(Net):
        def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
            return [part.square().sum() for part in self.look(self, ids, flat, offsets)]  # type: ignore[return-value]

    torch.manual_seed(2)
    plain = Apart(look)
    model = session.distribute(copy.deepcopy(plain), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for seed in range(4):
        for one, other in zip(model(*batch(seed)), plain(*batch(seed)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
            one.backward()
            other.backward()
        session.step()
        reference.step()
        reference.zero_grad()
    assert handed == [3, 3, 3]


def test_a_second_backward_needs_the_graph(session: sr.Session) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(ids[:, 0]).sum(), self.two(ids[:, 1]).sum()  # a sum keeps nothing of its own

    sums = session.distribute(Sums(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
    for seed in range(3):
        first, second = sums(batch(seed)[0])
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        with pytest.raises(RuntimeError, match="second time"):
            first.backward()
        session.discard()


def test_copies_threads_and_pickles_look_up_for_themselves(session: sr.Session, handed: list[int]) -> None:
    model, plain = pair(session, all_of_them)
    check_steps(session, model, plain, steps=2)
    twin = sr.copy_sharing_rows(model)
    loaded = pickle.loads(pickle.dumps(nn.ModuleDict({"one": model.one, "two": model.two})))
    wanted = plain(*batch(7))
    for other in (twin, model):
        torch.testing.assert_close(other(*batch(7)), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded["one"](batch(7)[0]), plain.one(batch(7)[0]), rtol=0, atol=1e-5)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(model(*batch(7)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    for out in found:
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
    session.discard()


def test_an_interrupted_forward_leaves_nothing_to_a_later_step(session: sr.Session) -> None:
    def look(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
        if net.head.bias.requires_grad is False:
            raise KeyboardInterrupt
        return [net.one(ids[:, 0]), net.two(ids[:, 1])]

    model, plain = pair(session, look)
    check_steps(session, model, plain, steps=2)
    model.head.bias.requires_grad_(False)
    with pytest.raises(KeyboardInterrupt):
        model(*batch(5))
    model.head.bias.requires_grad_(True)
    ids = batch(5)[0]
    (model.one(ids[:, :1]).sum() * 2).backward()  # ids of another shape; no rows were made for them
    session.step()
    wanted = session.table("one").pull(ids[:, 0].numpy())
    torch.testing.assert_close(model.one(ids[:, 0]), torch.from_numpy(wanted), rtol=0, atol=0)
    session.discard()


def columns(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
    return [net.one(ids[:, 0]), net.two(ids[:, 1]), net.two(ids[:, 2])]


@pytest.fixture
def pulled_before(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each forward that pulls before it makes its rows."""
    calls: list[int] = []
    describe = own_rank.descriptions

    def counted(tensors: Any) -> Any:
        calls.append(len(tensors))
        return describe(tensors)

    monkeypatch.setattr(own_rank, "descriptions", counted)
    return calls


def test_the_op_that_makes_all_rows_pulls_them_too(
    session: sr.Session, handed: list[int], pulled_before: list[int]
) -> None:
    model, plain = pair(session, columns)
    check_steps(session, model, plain, steps=2)
    assert len(pulled_before) == 1, "the forward after the one that is learnt from sees which rows there are"
    before = session.stats()
    for seed in range(3):  # with two forwards in each step
        for part in (2 * seed, 2 * seed + 1):
            out, wanted = model(*batch(part)), plain(*batch(part))
            torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
            out.sum().backward()
        session.discard()
    after = session.stats()
    assert (after.pulls - before.pulls, after.lookups_missed) == (6, 0)
    assert (len(pulled_before), handed) == (1, [3] * 7)


def test_a_lookup_after_that_op_which_pulls_is_missed(session: sr.Session, pulled_before: list[int]) -> None:
    shift = 0

    def shifted(net: Net, ids: Tensor, flat: Tensor, offsets: Tensor) -> list[Tensor]:
        return columns(net, (ids + shift) % ROWS if shift else ids, flat, offsets)

    model, plain = pair(session, shifted)
    check_steps(session, model, plain, steps=3)
    assert (len(pulled_before), session.stats().lookups_missed) == (1, 0)
    shift = 1
    check_steps(session, *pair_again(session, model, plain), steps=3)
    assert session.stats().lookups_missed > 0


@pytest.mark.parametrize(
    ("lookups", "learnt", "column", "layer"),
    [(all_of_them, 2, 0, "one"), (columns, 3, 1, "two")],
    ids=["pulled before", "pulled by the op"],
)
def test_an_id_out_of_range_is_told_by_its_layer(
    session: sr.Session, lookups: Look, learnt: int, column: int, layer: str
) -> None:
    model, plain = pair(session, lookups)
    check_steps(session, model, plain, steps=learnt)
    ids, flat, offsets = batch(3)
    ids[2, column] = ROWS
    with pytest.raises(sr.errors.InvalidArgument, match=rf"'ahead/{layer}'.*{ROWS}"):
        model(ids, flat, offsets)
    session.discard()
    check_steps(session, *pair_again(session, model, plain), steps=2)


def test_a_first_forward_under_hooks_of_saved_tensors_is_learnt_from(session: sr.Session, handed: list[int]) -> None:
    model, _ = pair(session, columns)
    with torch.autograd.graph.save_on_cpu():
        model(*batch(0)).sum().backward()
    session.step()
    for seed in (1, 2):
        model(*batch(seed)).sum().backward()
        session.step()
    assert handed == [3, 3]


def test_shards_that_do_not_answer_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with sr.InProcessCluster(shards=1).connect("unreachable") as session:
        model, plain = pair(session, columns)
        check_steps(session, model, plain, steps=3)

        def fails(*_: Any) -> list[Tensor]:
            asked.append("rows")
            raise RuntimeError("Unavailable: shard 0 cannot be reached")

        monkeypatch.setattr(own_rank.ops, "gather_all", fails)
        with pytest.raises(sr.errors.Unavailable, match="shard 0 cannot be reached"):
            model(*batch(4))
        assert (asked, session.stats().pulls_merged) == (["rows"], 2)


def pair_again(session: sr.Session, model: Net, plain: Net) -> tuple[Net, Net]:
    """The same models; the plain one gets the rows that the servers have."""
    with torch.no_grad():
        for name in ("one", "two", "sum", "max", "mean"):
            rows = session.table(name).pull(torch.arange(ROWS).numpy())
            plain.get_submodule(name).weight.copy_(torch.from_numpy(rows))
        plain.head.load_state_dict(model.head.state_dict())
    return model, plain


def test_the_op_alone_refuses_ids_that_were_changed(session: sr.Session) -> None:
    model, _ = pair(session, all_of_them)
    ids = batch(0)[0][:, 0].contiguous()
    options = [*model.one.lookup_options(), *model.two.lookup_options()]
    tables = f"{model.one.binding}\n{model.two.binding}"
    rows = ops.gather_all([ids, ids], [ids, ids], [ids, ids], model.one.anchor, tables, options, True)
    ids[0] = 5
    with pytest.raises(RuntimeError, match="changed in place"):
        rows[0].sum().backward()
    session.discard()


def test_ids_on_another_device_than_expected_are_looked_up_by_the_layer(session: sr.Session) -> None:
    model, _ = pair(session, all_of_them)
    ids = batch(0)[0][:, 0]
    made = MadeRows({model.one: [0]}, [ids], None, [torch.zeros(6, DIM)], lambda: 0)
    assert made.take(model.one, torch.empty(6, dtype=torch.int64, device="meta"), None, None) is None
    assert made.take(model.one, ids.clone(), None, None) is not None
