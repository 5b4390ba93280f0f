"""What distribute swaps, carries and refuses; deferred layers; rows by key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr

ROWS, DIM = 100, 4
SGD = sr.optim.SGD(lr=0.5)


@pytest.fixture
def cluster() -> sr.InProcessCluster:
    return sr.InProcessCluster(shards=2)


@pytest.fixture
def session(cluster: sr.InProcessCluster) -> Iterator[sr.Session]:
    with cluster.connect("ads") as session:
        yield session


class Tower(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.user_id = nn.Embedding(ROWS, DIM, **options)  # type: ignore[arg-type]
        self.small = nn.Embedding(5, DIM)


class Model(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.tower = Tower(**options)


def test_swaps_by_size_and_carries_weights(session: sr.Session) -> None:
    model = Model()
    weight = model.tower.user_id.weight.detach().clone()
    assert session.distribute(model, optimizer=SGD, min_rows=ROWS) is model
    assert type(model.tower.user_id).__name__ == "DistributedEmbedding"
    assert type(model.tower.small) is nn.Embedding
    np.testing.assert_array_equal(session.table("tower.user_id").pull(np.arange(ROWS)), weight)
    assert sorted(model.state_dict()) == ["tower.small.weight", "tower.user_id._extra_state"]
    assert "table='ads/tower.user_id'" in repr(model)


def test_options_by_pattern(session: sr.Session) -> None:
    model = Model()
    tables = {
        "tower.user_*": sr.Table(dtype="bfloat16", init=sr.Constant(2.0), optimizer=sr.optim.Adagrad(lr=0.3), seed=5)
    }
    session.distribute(model, optimizer=SGD, min_rows=10, tables=tables)
    schema = session.table("tower.user_id").schema
    assert (schema.dtype, schema.optimizer, schema.seed) == ("bfloat16", sr.optim.Adagrad(lr=0.3), 5)
    np.testing.assert_array_equal(session.table("tower.user_id").pull([1, 2]), np.full((2, DIM), 2.0))


def test_an_existing_table_keeps_its_rows(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("again") as first:
        first.distribute(Model(), optimizer=SGD, min_rows=10)
        first.table("tower.user_id").assign([1], np.full((1, DIM), 9, np.float32))
    with cluster.connect("again") as second:
        second.distribute(Model(), optimizer=SGD, min_rows=10)
        np.testing.assert_array_equal(second.table("tower.user_id").pull([1]), np.full((1, DIM), 9))


def tied(model: Model) -> None:
    model.tower.other = nn.Linear(DIM, ROWS, bias=False)
    model.tower.other.weight = model.tower.user_id.weight


REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: Model(max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (lambda: Model(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "tied": (lambda: (m := Model(), tied(m))[0], "tied to a parameter of no embedding"),
    "float64": (lambda: Model(dtype=torch.float64), "float64"),
    "hooks": (lambda: (m := Model(), m.tower.user_id.register_forward_hook(lambda *_: None))[0], "hooks"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_layer_and_reason(name: str, session: sr.Session) -> None:
    make, reason = REFUSALS[name]
    model = make()
    with pytest.raises(sr.errors.FailedPrecondition, match=rf"tower\.user_id.*{reason}"):
        session.distribute(model, optimizer=SGD, min_rows=10)
    assert type(model.tower.user_id) is nn.Embedding
    assert session.core.catalog.list_tables("ads") == ()


def test_a_pattern_without_a_layer_is_an_error(session: sr.Session) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"tables\['user_\*'\] matches no layer.*tower\.user_id"):
        session.distribute(Model(), optimizer=SGD, min_rows=10, tables={"user_*": sr.Table()})
    with pytest.raises(sr.errors.InvalidArgument, match="min_rows=1000"):
        session.distribute(Model(), optimizer=SGD, min_rows=1000)
    with pytest.raises(sr.errors.InvalidArgument, match="itself an embedding"):
        session.distribute(nn.Embedding(ROWS, DIM), optimizer=SGD, min_rows=10)


def test_names_in_use_are_an_error(session: sr.Session, cluster: sr.InProcessCluster) -> None:
    session.distribute(Model(), optimizer=SGD, min_rows=10)
    with pytest.raises(sr.errors.FailedPrecondition, match=r"'tower\.user_id' is already in use by this session"):
        session.distribute(Model(), optimizer=SGD, min_rows=10)
    with (
        cluster.connect("ads") as other,
        pytest.raises(sr.errors.FailedPrecondition, match="already bound in this process"),
    ):
        other.distribute(Model(), optimizer=SGD, min_rows=10)
    with cluster.connect("ads") as other, pytest.raises(sr.errors.FailedPrecondition, match="another schema"):
        other.distribute(Model(), optimizer=sr.optim.Adam(), min_rows=10)


def test_a_module_in_two_places_is_one_table(session: sr.Session) -> None:
    model = Model()
    model.again = model.tower.user_id
    session.distribute(model, optimizer=sr.optim.SGD(lr=1.0), min_rows=10)
    assert model.again is model.tower.user_id
    before = session.table("tower.user_id").pull([3])
    (model.again(torch.tensor([3])).sum() + model.tower.user_id(torch.tensor([3])).sum()).backward()
    session.step()
    np.testing.assert_allclose(session.table("tower.user_id").pull([3]), before - 2, atol=1e-6)


def test_weight_is_not_there(session: sr.Session) -> None:
    model = session.distribute(Model(), optimizer=SGD, min_rows=10)
    with pytest.raises(sr.errors.FailedPrecondition, match=r"\.weight is not here"):
        model.tower.user_id.weight.sum()
    assert not hasattr(model.tower.user_id, "weight")


def test_a_layer_that_is_excluded_stays_local(session: sr.Session) -> None:
    for given, words in (
        ("tower.*", r"exclude: 'tower\.\*' is not allowed; allowed: a sequence of patterns, such as \['tower\.\*'\]"),
        (["towr.*"], r"exclude 'towr\.\*' matches no layer; layers to distribute: tower\.user_id"),
    ):
        with pytest.raises(sr.errors.InvalidArgument, match=words):
            session.distribute(Model(), optimizer=SGD, min_rows=10, exclude=given)
    with pytest.raises(sr.errors.InvalidArgument, match=r"no nn\.Embedding or"):
        session.distribute(Model(), optimizer=SGD, min_rows=10, exclude=["*"])
    model = Model()
    model.tower.other = nn.Embedding(ROWS, DIM)
    session.distribute(model, optimizer=SGD, min_rows=10, exclude=["tower.u*"])
    assert model.tower.user_id.weight.requires_grad
    assert session.core.bound_tables() == ("tower.other",)


def test_a_model_is_distributed_once(session: sr.Session) -> None:
    model = session.distribute(Model(), optimizer=SGD, min_rows=10)
    with pytest.raises(sr.errors.FailedPrecondition, match=r"layers tower\.user_id.* are distributed already"):
        session.distribute(model, optimizer=SGD, min_rows=10)


def test_padding_row_begins_at_zero_without_carried_weights(session: sr.Session) -> None:
    session.distribute(Model(padding_idx=7), optimizer=SGD, min_rows=10, carry_weights=False)
    rows = session.table("tower.user_id").pull([7, 8])
    assert not rows[0].any()
    assert rows[1].any()


def test_deferred_layers_take_the_init_they_were_given(session: sr.Session) -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Embedding(1_000_000_000, 8)
            self.uniform = nn.EmbeddingBag(1_000_000_000, 8, mode="sum", padding_idx=0)
            nn.init.uniform_(self.uniform.weight, -0.25, 0.25)
            self.by_data = nn.Embedding(2_000_000, 8)
            self.by_data.weight.data.normal_(1.0, 0.5)
            self.constant = nn.Embedding(2_000_000, 8, device="cpu")
            nn.init.constant_(self.constant.weight, 3.0)
            self.xavier = nn.Embedding(2_000_000, 8)
            nn.init.xavier_uniform_(self.xavier.weight)
            self.small = nn.Embedding(10, 8)

    with sr.deferred(min_rows=1_000_000):
        model = Big()
    assert model.plain.weight.is_meta
    assert not model.small.weight.is_meta
    assert not nn.Embedding(2_000_000, 1).weight.is_meta
    session.distribute(model, optimizer=SGD, min_rows=1_000_000)
    inits = {schema.name: schema.init for schema in session.core.catalog.list_tables("ads")}
    assert inits["plain"] == sr.Normal(0.0, 1.0)
    assert inits["uniform"] == sr.Uniform(-0.25, 0.25)
    assert inits["by_data"] == sr.Normal(1.0, 0.5)
    assert inits["constant"] == sr.Constant(3.0)
    bound = (6 / (2_000_000 + 8)) ** 0.5
    assert inits["xavier"].high == -inits["xavier"].low == pytest.approx(bound)
    assert model.plain(torch.tensor([999_999_999])).shape == (1, 8)


@pytest.mark.parametrize("where", ["inside", "later"])
def test_deferred_layers_stay_when_their_model_is_moved(session: sr.Session, where: str) -> None:
    class Foreign(nn.Module):
        """As libraries of models build theirs: moved by the constructor, initialised before and after."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({"user": nn.Embedding(2_000_000, 8), "item": nn.Embedding(2_000_000, 8)})
            nn.init.normal_(self.tables["user"].weight, std=1e-4)
            self.out = nn.Linear(8, 1)
            if where == "inside":
                self.to("cpu").to(torch.float64).to(torch.float32)
            nn.init.uniform_(self.tables["item"].weight, -0.5, 0.5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.tables["user"](ids) + self.tables["item"](ids))

    with sr.deferred(min_rows=1_000_000):
        model = Foreign()
    if where == "later":
        model = copy.deepcopy(model).cpu().double().to(torch.float32)
    assert model.tables["user"].weight.is_meta
    assert (model.out.weight.device.type, model.tables["user"].weight.dtype) == ("cpu", torch.float32)
    session.distribute(model, optimizer=SGD, min_rows=1_000_000)
    inits = {schema.name: schema.init for schema in session.core.catalog.list_tables("ads")}
    assert inits == {"tables.user": sr.Normal(0.0, 1e-4), "tables.item": sr.Uniform(-0.5, 0.5)}
    assert model.to("cpu")(torch.tensor([1_999_999])).shape == (1, 1)


def test_deferred_refuses_what_a_server_cannot_repeat() -> None:
    with sr.deferred(min_rows=100):
        weight = nn.Embedding(100, 4).weight
        assert weight.is_meta  # asking is allowed
        for fill in (nn.init.trunc_normal_, nn.init.orthogonal_):
            with pytest.raises(sr.errors.FailedPrecondition, match=fill.__name__):
                fill(weight)
        with pytest.raises(sr.errors.FailedPrecondition, match="mul_"), torch.no_grad():
            weight.mul_(2.0)
    with pytest.raises(sr.errors.InvalidArgument, match="min_rows"), sr.deferred(min_rows=0):
        pass


def test_rows_by_key(session: sr.Session) -> None:
    table = session.create_table("keys", dim=2, optimizer=sr.optim.SGD(lr=0.5), init=sr.Constant(1.0))
    keys = np.array([5, 2**63 + 1, 5], dtype=np.uint64)
    np.testing.assert_array_equal(table.pull(keys), np.ones((3, 2)))
    table.push(keys, np.ones((3, 2), np.float32))  # 5 stands twice: its gradients are summed
    np.testing.assert_array_equal(table.pull(keys), [[0, 0], [0.5, 0.5], [0, 0]])
    table.push([5], np.ones((1, 2), np.float32), lr=2.0)
    np.testing.assert_array_equal(session.table("keys").pull([5]), [[-2, -2]])
    table.assign(["a", "b"], np.array([[1, 2], [3, 4]], np.float32))
    np.testing.assert_array_equal(table.pull([sr.hash_key("b"), sr.hash_key("a")]), [[3, 4], [1, 2]])
    assert sorted(k for keys_, _ in table.scan(batch_rows=1) for k in keys_.tolist()) == sorted(
        [5, 2**63 + 1, sr.hash_key("a"), sr.hash_key("b")]
    )
    assert table.delete([5, 6]) == 1
    np.testing.assert_array_equal(table.pull([5]), np.ones((1, 2)))
    assert table.pull([]).shape == (0, 2)


def test_rows_by_key_refuses(session: sr.Session) -> None:
    table = session.create_table("keys", dim=2, optimizer=sr.optim.SGD(lr=0.5))
    with pytest.raises(sr.errors.InvalidArgument, match="-3 is not allowed"):
        table.pull([1, -3])
    with pytest.raises(sr.errors.InvalidArgument, match="float64"):
        table.pull(np.array([1.5]))
    with pytest.raises(sr.errors.InvalidArgument, match=r"grads: the shape must be \(1, 2\)"):
        table.push([1], np.ones((1, 3), np.float32))
    with pytest.raises(sr.errors.InvalidArgument, match="grads of key 4 is not finite"):
        table.push([3, 4], np.array([[1, 1], [1, np.nan]], np.float32))
    np.testing.assert_array_equal(table.pull([3]), np.zeros((1, 2)))
    with pytest.raises(sr.errors.NotFound, match="tables there: keys"):
        session.table("other")
    with pytest.raises(sr.errors.FailedPrecondition):
        session.create_table("keys", dim=3, optimizer=sr.optim.SGD(lr=0.5))


def test_hash_key_is_pinned() -> None:
    import xxhash

    assert sr.hash_key("user:42") == xxhash.xxh3_64_intdigest(b"user:42") >> 1
    assert sr.hash_key(b"") == xxhash.xxh3_64_intdigest(b"") >> 1
    assert sr.hash_key(("a", "bc")) != sr.hash_key(("ab", "c"))
    assert 0 <= sr.hash_key("x" * 1000) < 2**63


def compiled_whole(model: Model) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_tower(model: Model) -> nn.Module:
    model.tower = torch.compile(model.tower, backend="eager")  # type: ignore[assignment]
    return model


def compiled_layer(model: Model) -> nn.Module:
    model.tower.user_id = torch.compile(model.tower.user_id, backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_tower, compiled_layer])
def test_compiled_modules_leave_no_trace_in_names_of_tables(
    cluster: sr.InProcessCluster, compiled: Callable[[Model], nn.Module]
) -> None:
    with cluster.connect("run") as first:
        first.distribute(Model(), optimizer=SGD, min_rows=ROWS)
        first.table("tower.user_id").assign([1], np.full((1, DIM), 9, np.float32))
    with cluster.connect("run") as second:
        model = compiled(Model())
        options = {"tower.user_id": sr.Table(seed=0)}
        second.distribute(model, optimizer=SGD, min_rows=ROWS, tables=options)
        assert second.core.bound_tables() == ("tower.user_id",)
        plain = model.get_submodule("_orig_mod") if compiled is compiled_whole else model
        layer = plain.tower.user_id if compiled is not compiled_tower else plain.tower._orig_mod.user_id
        assert type(layer).__name__ == "DistributedEmbedding"
        np.testing.assert_array_equal(layer(torch.tensor([1])).detach(), np.full((1, DIM), 9))


def test_weights_of_a_compiled_model_are_imported(session: sr.Session) -> None:
    session.distribute(Model(), optimizer=SGD, min_rows=ROWS)
    for compiled in (compiled_whole, compiled_tower, compiled_layer):
        model = Model()
        weight = model.tower.user_id.weight.detach().clone()
        assert session.import_weights(compiled(model).state_dict()) == {"tower.user_id": ROWS}
        np.testing.assert_array_equal(session.table("tower.user_id").pull(np.arange(ROWS)), weight)
