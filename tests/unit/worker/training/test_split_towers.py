"""Which MLPs of a model are split over the processes of a group, and which model is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparserow.proto.errors import InvalidArgument
from sparserow.worker.models import DCN, DLRM, mlp
from sparserow.worker.training.split_towers import check_towers, towers_of


class Own(nn.Module):
    """A class of a user's own, with an MLP that is no Tower."""

    def __init__(self, *layers: nn.Module, mlps: object = ("top",)) -> None:
        super().__init__()
        self.user = nn.Embedding(9, 4)
        self.top = nn.Sequential(*(layers or (nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))))
        self.norm = nn.LayerNorm(4)
        if mlps is not None:
            self.mlps = mlps


def test_towers_of_the_zoo_and_of_a_class_that_names_its_own() -> None:
    assert list(towers_of(DLRM({"user": 9, "item": 9}, numbers=["age"]))) == ["bottom", "top"]
    assert list(towers_of(Own())) == ["top"]
    assert list(towers_of(Own(mlps=["top"]))) == ["top"]
    both = Own()
    both.other = mlp([4, 8, 1])
    assert set(towers_of(both)) == {"top", "other"}
    assert not towers_of(Own(mlps=None))
    assert not towers_of(Own(mlps=nn.ModuleList([nn.Linear(4, 4)]))), "layers of that name are no names"
    for model in (DLRM({"user": 9, "item": 9}, top=[8, 6]), DCN({"user": 9}, hidden=[4, 2]), Own()):
        check_towers(model, 2)


def test_a_model_without_tables_is_checked_on_the_meta_device() -> None:
    with torch.device("meta"):
        check_towers(DLRM({"user": 2**40, "item": 2**40}), 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Own(mlps=None), "the model has no MLP with two linear layers to split; a class of your own names its MLPs"),
        (Own(nn.Linear(4, 1)), "the model has no MLP with two linear layers to split"),
        (
            Own(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 1)),
            "the width of top.0: 7 is not allowed; allowed: multiples of 2",
        ),
        (Own(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)), "top.1 is a LayerNorm, .* allowed: ReLU, LeakyReLU"),
        (Own(mlps=("tops",)), "mlps names 'tops', which is no layer; allowed: an nn.Sequential"),
        (Own(mlps=("norm",)), "mlps names 'norm', which is a LayerNorm; allowed: an nn.Sequential"),
        (Own(mlps="top"), "the attribute mlps: 'top' is not allowed; allowed: a tuple of paths"),
        (Own(mlps=3), "the attribute mlps: 3 is not allowed"),
        (DLRM({"user": 9, "item": 9}, top=[7]), "the width of top.0: 7 is not allowed"),
    ],
)
def test_what_cannot_be_split_is_named(model: nn.Module, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_towers(model, 2)
    check_towers(model, 1)
