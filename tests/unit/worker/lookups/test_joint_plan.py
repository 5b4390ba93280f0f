"""The plan of joint lookups: which parts of a batch it knows, and when ranks have the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sparserow.worker.layers.embedding import DistributedEmbedding
from sparserow.worker.lookups.expressions import TracedIds
from sparserow.worker.lookups.made_rows import MadeRows
from sparserow.worker.lookups.makers.joint import JointPlan
from sparserow.worker.lookups.record import ForwardRecord

LAYERS = [
    DistributedEmbedding(
        f"plan/{name}", num_embeddings=50, embedding_dim=2, padding_idx=None, dtype=torch.float32, origins=[""]
    )
    for name in ("one", "two")
]
for each in LAYERS:
    each.is_on_devices = True
MODULUS = torch.tensor([[7, 11, 13, 17]])


def batch(rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (rows, 4), generator=draw), torch.randint(0, 50, (9,), generator=draw)


def plan_of(
    look: Callable[[Tensor, Tensor], Sequence[Tensor]], rows: int = 6, given: tuple[Tensor, Tensor] | None = None
) -> JointPlan:
    given = given or batch(rows)
    record = ForwardRecord(given, None)
    try:
        for layer, ids in zip(LAYERS, look(*given), strict=True):
            record.note(layer, (ids, None, None))
    finally:
        traced = record.leave()
    return JointPlan(record.plan(traced), given)


def found(plan: JointPlan, given: tuple[Tensor, Tensor], *, same_shapes: bool = False) -> list[Tensor] | None:
    lookups = plan.find(given, same_shapes=same_shapes)
    return None if lookups is None else [lookup.arguments[0] for lookup in lookups]


WAYS: dict[str, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {
    "columns": lambda ids, _: (ids[:, 0], ids[:, -1]),
    "rows": lambda ids, flat: (ids[2], flat),
    "ranges": lambda ids, flat: (ids[:, 1:3], flat[2:]),
    "arithmetic": lambda ids, flat: ((ids[:, 1] * 3 + 1) % 50, flat.to(torch.int32)),
    "a tensor of the model": lambda ids, flat: (torch.remainder(ids, MODULUS)[:, 2], flat.view(3, 3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_finds_the_arguments_of_another_batch(way: str) -> None:
    plan, other = plan_of(WAYS[way]), batch(seed=1)
    ids = found(plan, other)
    assert ids is not None
    assert all(map(torch.equal, ids, WAYS[way](*other)))
    assert plan.digest == plan_of(WAYS[way]).digest > 0
    assert len({plan_of(each).digest for each in WAYS.values()}) == len(WAYS)


def test_parts_are_known_by_their_memory_too() -> None:
    """Views that were made outside of the trace, as those of a compiled graph are."""
    ids, flat = given = batch()
    parts = {"whole": flat, "column": ids[:, 2], "row": ids[5], "range": ids[1:4], "columns": ids[:, 1:3]}
    other = batch(seed=1)
    wanted = {"whole": other[1], "column": other[0][:, 2], "row": other[0][5], "range": other[0][1:4]}
    wanted["columns"] = other[0][:, 1:3]
    for name, part in parts.items():
        ids_found = found(plan_of(lambda *_, part=part: (part, part), given=given), other)
        assert ids_found is not None
        assert len(ids_found) == len(LAYERS), name
        assert all(torch.equal(each, wanted[name]) for each in ids_found), name


def test_ranks_have_one_plan_whether_they_make_lookups_themselves_or_not() -> None:
    """The leader of a tensor group records ids that its ops were given; a rank that gets rows has no ops."""
    given = batch()
    record = ForwardRecord(given, None)
    ids = given[0] % 7
    record.note(LAYERS[0], (ids, None, None))
    record.note(LAYERS[1], (ids[:, 1], None, None))
    expression = record._trace.expression_of(ids)
    record.leave()
    assert expression is not None
    leader = JointPlan(record.plan([TracedIds(ids, expression, given[0])]), given)
    assert leader.digest == JointPlan(record.plan([]), given).digest > 0


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of two tensors of the batch": lambda ids, flat: ids[:, 0] + flat[:6],
    "with a tensor that the forward made": lambda ids, _: ids[:, 0] % torch.full((6,), 7),
    "chosen by values": lambda ids, _: ids[:, 0][ids[:, 1] > 20],
    "of nothing in the batch": lambda *_: torch.arange(5),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_ids_that_are_not_known_before_the_forward_are_left_out(way: str) -> None:
    plan = plan_of(lambda ids, flat: (UNKNOWN[way](ids, flat), flat))
    assert plan.digest == 0, "one lookup is left, which has nothing to go together with"


def test_sizes_fit_batches_of_the_traced_shapes_alone_where_ranks_have_different_batches() -> None:
    sized, free = plan_of(lambda ids, flat: (ids[:, 0], flat[: len(ids)])), plan_of(WAYS["columns"])
    assert found(sized, batch(seed=1), same_shapes=True) is not None
    assert found(sized, batch(5), same_shapes=True) is None
    assert found(sized, batch(5)) is not None
    assert found(free, batch(5), same_shapes=True) is not None
    assert sized.digest != plan_of(lambda ids, flat: (ids[:, 0], flat[: len(ids)]), rows=5).digest


def test_arguments_are_the_same_by_values_until_they_are_changed() -> None:
    layer, ids, weights = LAYERS[0], torch.arange(4), torch.rand(4)

    def is_taken(*arguments: Tensor | None) -> bool:
        made = MadeRows({layer: [0]}, [ids], [(None, weights)], ["rows"], lambda: 0)
        if changes:
            weights.mul_(2)
        taken = made.take(layer, *arguments)
        assert made.is_missed == (taken is None)
        return taken is not None

    changes = False
    assert is_taken(ids, None, weights)
    assert is_taken(ids.clone(), None, weights.clone())
    assert not is_taken(ids + 1, None, weights)
    assert not is_taken(ids.int(), None, weights)
    assert not is_taken(ids, ids, weights)
    assert not is_taken(ids, None, None)
    changes = True
    assert not is_taken(ids, None, weights)


def test_what_was_made_is_handed_out_once_and_to_a_layer_in_the_same_mode() -> None:
    one, two = LAYERS
    ids = torch.arange(4)
    made = MadeRows({one: [0], two: [1]}, [ids, ids], None, ["one", "two"], lambda: 0, [True, False])
    assert made.take(two, ids, None, None) is None, "the layer was in eval mode"
    two.eval()
    try:
        assert (made.take(one, ids, None, None), made.take(two, ids, None, None)) == ("one", "two")
    finally:
        two.train()
    assert made.take(one, ids, None, None) is None
    step = 1
    later = MadeRows({one: [0]}, [ids], None, ["one"], lambda: step)
    step = 2
    assert later.take(one, ids, None, None) is None, "rows of an earlier step"
    with torch.no_grad():
        without = MadeRows({one: [0]}, [ids], None, ["one"], lambda: 0)
    assert without.take(one, ids, None, None) is None, "it was made without gradient"
    assert not without.is_exact
