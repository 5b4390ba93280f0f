"""The dense side of a checkpoint when ranks have it in parts: files that torch.distributed.checkpoint (DCP) writes.

    save-N/manifest.json             last, as always
    save-N/worker.0.safetensors      tree "dense": the list of the files below, and what is no tensor
    save-N/dense/shard-00001-*.safetensors   the parts of one rank, in DCP's safetensors format, without pickles

Each rank writes its own parts of DTensors, as ``fully_shard`` and ``parallelize_module`` make them. Any number of ranks
reads them again, as parts or whole. A file belongs to the checkpoint by its checksum in the state of worker 0, which
the manifest covers. On an object store the files are written to a temporary folder and then sent.

Importing torch.distributed.checkpoint takes a second, so this file is imported when there are parts.

Invariants:
 1. Every rank calls the functions of this file, in the same order; followers of tensor groups too.
 2. A rank returns from ``save_parts`` when the files of all ranks are written.
 3. An error of one rank is an error of all ranks, so that none waits for another.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ...proto.checkpoint.dense_files import FOLDER, facts_of
from ...proto.checkpoint.entries import FileFacts
from ...proto.checkpoint.folder import Folder, typed
from ...proto.checkpoint.local_file import sync_folder
from ...proto.checkpoint.manifest import check_file
from ...proto.errors import FailedPrecondition, NotFound
from ..layers.table_handle import EXTRA_STATE, renamed
from ..session.compiled_module import plain_path
from .every_rank import gathered, is_alone, on_every_rank, rank_here, ranks

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def save_parts(folder: Folder, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Writes the tensors of model and optimizer that this rank has.

    Args:
        folder: the folder of the checkpoint.
        model: the model.
        optimizer: its dense optimizer; None: it is not saved.

    Returns:
        The same tree on every rank, for the state of worker 0: the files, the shapes, and what is no tensor.

    Raises:
        SparserowError: a rank cannot write; every rank raises it.
    """
    tensors, plain = _split(model, optimizer)
    parts = folder / FOLDER
    with _local(parts) as path, _typed(parts.url):
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp_save(dict(tensors), storage_writer=writer, no_dist=is_alone())
        files = on_every_rank(lambda: _own_files(parts, path))
    return {
        "files": [facts for rank in gathered(files) for facts in rank],
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        **plain,
    }


def load_parts(
    folder: Folder,
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    renames: Mapping[str, str],
) -> None:
    """Loads model and optimizer, in parts or whole, from files that any number of ranks wrote.

    Args:
        folder: the folder of the checkpoint.
        saved: the tree that :func:`save_parts` returned.
        model: the model.
        optimizer: its dense optimizer; None: it is not loaded.
        renames: tables that have another name now, {full name in the checkpoint: present full name}.

    Raises:
        DataLoss: a file is missing or damaged; every rank raises it, and nothing is changed.
        FailedPrecondition: the checkpoint's dense side has other tensors; nothing is changed.
        NotFound: the checkpoint has no state of the optimizer.
    """
    parts = folder / FOLDER
    if optimizer is not None and saved["groups"] is None:
        raise NotFound(f"restore: {folder.url} has no state of the optimizer")
    tensors, _ = _split(model, optimizer)
    _check_shapes(folder, saved["shapes"], {name: list(tensor.shape) for name, tensor in tensors.items()})
    files = facts_of(saved, folder.url)
    with _local(parts) as path, _typed(parts.url):
        on_every_rank(lambda: _checked_files(parts, path, files))
        dcp_load(tensors, storage_reader=HuggingFaceStorageReader(path), no_dist=is_alone())
    of_model = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
    set_model_state_dict(model, {**of_model, **renamed(saved["handles"], renames)})
    if optimizer is not None:
        # Not strict, because the empty parameters of distributed layers have no state; the shapes were checked.
        state = _optimizer_state(tensors, saved)
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


def check_model(folder: Folder, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Checks that the tensors of a model have the names and shapes of a tree that :func:`save_parts` returned.

    Args:
        folder: the folder of the checkpoint.
        saved: the tree.
        model: the model.

    Raises:
        FailedPrecondition: the checkpoint's model has other tensors; the text names one.
    """
    tensors, _ = _split(model, None)
    shapes = {name: shape for name, shape in saved["shapes"].items() if name.startswith(_MODEL)}
    _check_shapes(folder, shapes, {name: list(tensor.shape) for name, tensor in tensors.items()})


def load_whole_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a model that ranks have in parts from the whole ``state_dict`` of a checkpoint without parts."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the optimizer of a model that ranks have in parts from its whole ``state_dict``.

    Parameters count in the order of the optimizer, as torch's ``load_state_dict`` has it.
    """
    paths = {id(parameter): plain_path(path) for path, parameter in model.named_parameters()}
    mine = [paths[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [mine[index] for index in group["params"]]} for group in state["param_groups"]]
    of_path: dict[str, Any] = {"state": {mine[index]: values for index, values in state["state"].items()}}
    set_optimizer_state_dict(
        model,
        optimizer,
        {**of_path, "param_groups": groups},
        options=StateDictOptions(full_state_dict=True, strict=False),
    )


def _split(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of the dense side by name, and the rest: handles of tables, groups and numbers."""
    of_model: dict[str, Any] = dict(get_model_state_dict(model))
    handles = {name: value for name, value in of_model.items() if name.rpartition(".")[2] == EXTRA_STATE}
    tensors = {f"{_MODEL}{name}": value for name, value in of_model.items() if name not in handles}
    plain: dict[str, Any] = {"handles": handles, "groups": None, "numbers": {}}
    if optimizer is not None:
        of_optimizer: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        plain["groups"] = of_optimizer["param_groups"]
        empty = {plain_path(path) for path, parameter in model.named_parameters() if parameter.numel() == 0}
        for path, values in of_optimizer["state"].items():
            if path in empty:  # as of a distributed layer, where torch has made it with zeros for gradients
                continue
            for key, value in values.items():
                place = tensors if isinstance(value, Tensor) else plain["numbers"]
                place[f"{_OPTIMIZER}{path}/{key}"] = value
    return tensors, plain


def _optimizer_state(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, value in {**tensors, **saved["numbers"]}.items():
        if name.startswith(_OPTIMIZER):
            path, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
            state.setdefault(path, {})[key] = value
    return {"state": state, "param_groups": saved["groups"]}


def _check_shapes(folder: Folder, saved: Mapping[str, list[int]], mine: Mapping[str, list[int]]) -> None:
    for name, shape in mine.items():
        if saved.get(name) != shape:
            was = f"has the shape {saved[name]}" if name in saved else "has no such tensor"
            raise FailedPrecondition(
                f"restore: {name} of this model has the shape {shape}, and {folder.url} {was}; build the same model "
                "with the same dense optimizer"
            )
    left = [name for name in saved if name.startswith(_MODEL) and name not in mine]
    if left:
        raise FailedPrecondition(f"restore: {folder.url} has {left[0]}, which this model lacks; build the same model")


def _own_files(parts: Folder, path: str) -> list[dict[str, Any]]:
    """Returns the facts of the files that this rank wrote; sends them where the checkpoint is not on a local disk."""
    prefix = f"shard-{rank_here() + 1:05d}-"
    written = Folder(path)
    facts = []
    for file in sorted(name for name in written.names() if name.startswith(prefix)):
        data = written.read(file)
        if not parts.is_local:
            parts.write(file, [data])
        facts.append({"file": file, "bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)})
    if parts.is_local:
        with typed(parts.url):
            sync_folder(path)
    return facts


def _checked_files(parts: Folder, path: str, files: list[FileFacts]) -> None:
    """Checks all files: the ranks together on a local disk; on an object store each rank all that it fetches.

    ``path`` is the folder on a local disk, which has the files afterwards.
    """
    if parts.is_local:
        for facts in files[rank_here() :: ranks()]:
            check_file(parts, facts)
        return
    for facts in files:
        data = check_file(parts, facts)
        with typed(path), open(f"{path}/{facts.file}", "wb") as file:
            file.write(data)


@contextmanager
def _local(parts: Folder) -> Iterator[str]:
    """Yields the path of the folder of parts, or of a temporary folder in its place on an object store."""
    if not parts.is_local:
        with tempfile.TemporaryDirectory(prefix="sparserow-dense-") as path:
            yield path
        return
    parts.make()
    yield parts.path


@contextmanager
def _typed(url: str) -> Iterator[None]:
    """Turns DCP's errors, which hold those of all ranks, into the error of the lowest rank that failed."""
    try:
        with typed(url), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, OSError):
            with typed(f"{url} on rank {rank}"):
                raise cause from None
        raise FailedPrecondition(f"{url}: rank {rank}: {type(cause).__name__}: {cause}") from error
