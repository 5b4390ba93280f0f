"""Functions whose arguments mirror the fields of a section: the same names and defaults, and each is described."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import sparserow as sr
from sparserow.proto.config.cluster_config import ClusterConfig
from sparserow.proto.config.train_config import TrainConfig
from sparserow.proto.options.document import validate
from sparserow.proto.options.strict_model import StrictModel
from sparserow.serving.serve_config import ServeConfig

# The function, its section, the fields that it leaves out on purpose (None: it takes those that it has), and arguments
# whose default stands for the field's.
MIRRORS: list[tuple[Callable[..., Any], type[StrictModel], set[str] | None, set[str]]] = [
    (sr.local_cluster, ClusterConfig, {"address"}, {"ssd_engine"}),
    (sr.local_serving, ServeConfig, None, {"model", "root", "sync_interval"}),
    (sr.connect, TrainConfig, None, {"cache"}),
]

NEEDED: dict[type[StrictModel], dict[str, Any]] = {ServeConfig: {"model": ["m"], "root": "/models"}}


@pytest.mark.parametrize(
    ("function", "section", "left_out", "stands_for"), MIRRORS, ids=[each[0].__name__ for each in MIRRORS]
)
def test_arguments_have_the_names_and_the_defaults_of_their_fields(
    function: Callable[..., Any], section: type[StrictModel], left_out: set[str] | None, stands_for: set[str]
) -> None:
    parameters, fields = inspect.signature(function).parameters, section.model_fields
    shared = parameters.keys() & fields.keys()
    assert len(shared) >= 5
    if left_out is not None:
        assert fields.keys() - parameters.keys() == left_out
    for name in shared - stands_for:
        if fields[name].is_required():
            continue
        default = parameters[name].default
        default = list(default) if isinstance(default, tuple) else default
        given = validate(section, {**NEEDED.get(section, {}), name: default})
        assert getattr(given, name) == fields[name].default, name


@pytest.mark.parametrize("function", [each[0] for each in MIRRORS], ids=lambda each: each.__name__)
def test_each_argument_is_described(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    described = set(re.findall(r"^    (\w+):", text.partition("Args:")[2].partition("\n\n")[0], re.MULTILINE))
    assert described == set(inspect.signature(function).parameters)
