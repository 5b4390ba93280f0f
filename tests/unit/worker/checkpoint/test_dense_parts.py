"""Files of a dense side in parts, by one process: an object store, and what a restore refuses."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted
from sparserow.worker.checkpoint import dense_parts
from sparserow.worker.checkpoint.dense_parts import check_model, load_parts, load_whole_optimizer, save_parts
from sparserow.worker.checkpoint.dense_state import check_state, load_state, plain_state
from sparserow.worker.checkpoint.every_rank import on_every_rank


def made(seed: int, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(params=["memory", "local"])
def folder(request: pytest.FixtureRequest, tmp_path: Any) -> Folder:
    url = f"memory://dense-{id(request)}" if request.param == "memory" else str(tmp_path)
    return Folder(url) / "save-000001"


def test_parts_come_back(folder: Folder) -> None:
    (model, optimizer), (other, its_optimizer) = made(1), made(2)
    saved = save_parts(folder, model, optimizer)
    load_parts(folder, saved, other, its_optimizer, {})
    assert other.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    mine, its = optimizer.state_dict(), its_optimizer.state_dict()
    assert its["param_groups"][0]["lr"] == mine["param_groups"][0]["lr"] == 0.01
    for number, values in mine["state"].items():
        assert all(torch.equal(value, its["state"][number][name]) for name, value in values.items())


def test_damaged_files_change_nothing(folder: Folder) -> None:
    (model, optimizer), (other, its_optimizer) = made(1), made(2)
    saved = save_parts(folder, model, optimizer)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    (entry,) = saved["files"]
    data = bytearray((folder / "dense").read(entry["file"]))
    data[-1] ^= 1
    (folder / "dense").write(entry["file"], [bytes(data)])
    for damage in (lambda: None, lambda: (folder / "dense").delete(entry["file"]), lambda: saved.pop("files")):
        damage()
        with pytest.raises(DataLoss, match=re.escape(folder.url)):
            load_parts(folder, saved, other, its_optimizer, {})
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())


def test_each_file_is_read_once_in_a_call_whose_error_all_ranks_share(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails outside of such a call leaves the others waiting for it."""
    (model, optimizer), (other, its_optimizer) = made(1), made(2)
    saved = save_parts(folder, model, optimizer)
    read, shares, read_one = [], [False], Folder.read

    def shared(call: Callable[[], Any]) -> Any:
        shares[0] = True
        try:
            return on_every_rank(call)
        finally:
            shares[0] = False

    def noted(self: Folder, name: str) -> memoryview:
        read.append((name, shares[0]))
        return read_one(self, name)

    monkeypatch.setattr(dense_parts, "on_every_rank", shared)
    monkeypatch.setattr(Folder, "read", noted)
    load_parts(folder, saved, other, its_optimizer, {})
    assert read == [(entry["file"], True) for entry in saved["files"]]


def test_a_disk_without_room_for_fetched_files_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), (other, its_optimizer) = made(1), made(2)
    folder = Folder(f"memory://dense-full-{id(model)}") / "save-000001"
    saved = save_parts(folder, model, optimizer)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dense_parts, "open", full, raising=False)
    with pytest.raises(ResourceExhausted, match="No space left on device"):
        load_parts(folder, saved, other, its_optimizer, {})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            lambda: made(2, width=5),
            r"model/0\.weight of this model has the shape \[5, 4\], and .* the shape \[3, 4\]",
        ),
        (lambda: (nn.Linear(4, 3), None), r"model/weight of this model has the shape .* has no such tensor"),
        (lambda: (nn.Sequential(made(2)[0][0]), None), r"has model/1\.weight, which this model lacks"),
    ],
)
def test_another_model_is_refused(folder: Folder, other: Callable[[], Any], text: str) -> None:
    model, optimizer = made(1)
    with pytest.raises(FailedPrecondition, match=text):
        load_parts(folder, save_parts(folder, model, optimizer), *other(), {})


def test_the_tensors_of_another_model_are_told_before_a_load(folder: Folder) -> None:
    model, optimizer = made(1)
    saved = save_parts(folder, model, optimizer)
    check_model(folder, saved, made(2)[0])
    with pytest.raises(FailedPrecondition, match=r"model/0\.weight of this model has the shape \[5, 4\]"):
        check_model(folder, saved, made(2, width=5)[0])


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "_orig_mod.module."])
def test_older_states_of_compiled_models_are_loaded(prefix: str) -> None:
    (model, _), (other, _) = made(1), made(2)
    state = plain_state({f"{prefix}{key}": value for key, value in model.state_dict().items()}, other)
    check_state(other, state, "here")
    load_state(other, state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


class Grown(nn.Linear):
    """Takes states that lack its bias."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}bias", torch.zeros(self.out_features))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_that_load_in_their_own_way_are_not_compared() -> None:
    state = nn.Sequential(nn.Linear(4, 3, bias=False)).state_dict()
    check_state(nn.Sequential(Grown(4, 3)), state, "here")
    with pytest.raises(FailedPrecondition, match=r"restore: here has another model: it lacks 0\.bias; build the same"):
        check_state(nn.Sequential(nn.Linear(4, 3)), state, "here")


def test_an_optimizer_that_was_not_saved_is_not_found(folder: Folder) -> None:
    model, optimizer = made(1)
    with pytest.raises(NotFound, match="has no state of the optimizer"):
        load_parts(folder, save_parts(folder, model, None), model, optimizer, {})


def test_a_whole_state_counts_parameters_in_the_order_of_the_optimizer() -> None:
    (model, optimizer), (other, its_optimizer) = made(1), made(2)
    load_whole_optimizer(other, its_optimizer, optimizer.state_dict())
    for mine, its in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], its["exp_avg"])
    del model


def test_a_call_that_fails_raises_its_own_error() -> None:
    def fail() -> None:
        raise NotFound("no such thing")

    with pytest.raises(NotFound, match=r"^no such thing$"):
        on_every_rank(fail)
    assert on_every_rank(lambda: 3) == 3
