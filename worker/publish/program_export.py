"""Exports the dense side of a model as a program to publish, and makes sure that no training data is in it.

A tensor that is a view of a larger tensor would be exported with the whole storage, which may be a column of training
data. So each tensor of a program gets a storage of its own.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.urls import parent_of
from ...proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from ...proto.options.units import format_bytes
from ...proto.published.program_archive import confined

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

_SHOWN = 3


@dataclass(frozen=True)
class ProgramSource:
    """A model to export.

    Attributes:
        model: the model.
        example: example arguments of its forward.
        dynamic_shapes: the dimensions that vary, as ``torch.export.export`` takes them; None: the first dimension of
            every tensor varies.
    """

    model: torch.nn.Module
    example: tuple[Any, ...]
    dynamic_shapes: Any = None


@dataclass(frozen=True)
class ProgramTensor:
    """A parameter, buffer or constant of a program.

    Attributes:
        name: the name of the tensor.
        shape: its shape.
        bytes: its size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class Program:
    """An exported program.

    Attributes:
        archive: the bytes of the file that ``torch.export.load`` reads.
        largest: its largest tensors, at most three.
    """

    archive: bytes
    largest: tuple[ProgramTensor, ...]


def _exportable(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model, or a copy whose lookups need no tensor group.

    Raises:
        FailedPrecondition: ranks have the model in parts, or tables on their devices.
    """
    from ..checkpoint.every_rank import is_in_parts
    from ..layers.embedding import copy_sharing_rows
    from ..layers.gather_tables import layers_on_devices
    from ..lookups.makers.tensor_group import without_group

    there = layers_on_devices(model)
    if there:
        raise FailedPrecondition(
            f"publish: the table of layer {next(iter(there))!r} is on the devices of the ranks; publish the copy that "
            "session.gather_tables(model), which every rank calls, returns on rank 0"
        )

    if is_in_parts(model):
        raise FailedPrecondition(
            "publish: ranks have the model in parts, which torch cannot export; gather it into a plain copy of the "
            "model on one rank (docs/parallel-towers.md)"
        )
    is_grouped = any(getattr(module, "tensor_group", None) is not None for module in model.modules())
    return without_group(copy_sharing_rows(model)) if is_grouped else model


def export_program(source: ProgramSource, *, is_signed: bool) -> Program:
    """Exports a model; its lookups that do not depend on each other are merged into one round trip.

    Args:
        source: the model to export. Its example is copied first, so that the program does not refer to it.
        is_signed: whether the program will be signed, and may use operators that are not among the known ones.

    Raises:
        InvalidArgument: the model cannot be exported, for the reason in the text, or a tensor of the model shares
            memory with the example.
        FailedPrecondition: ranks have the model in parts, or tables on their devices.
    """
    from ..session.compiled_module import uncompiled

    with uncompiled(source.model) as model:
        return _export(replace(source, model=_exportable(model)), is_signed=is_signed)


def _export(source: ProgramSource, *, is_signed: bool) -> Program:
    import torch
    from torch.utils import _pytree as pytree

    from ...cpp_ext.torch_ops import is_operator
    from ..layers.embedding import without_empty_parameters
    from ..layers.fuse_lookups import count_merged, merge_lookups

    example = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), source.example)
    shapes = source.dynamic_shapes
    if shapes is None:
        batch = torch.export.Dim("batch", min=1)
        shapes = tuple({0: batch} if isinstance(value, torch.Tensor) and value.dim() else None for value in example)
    was_training = source.model.training
    source.model.eval()
    try:
        with torch.no_grad(), _without_warnings_of_torch(), without_empty_parameters(source.model):
            program = torch.export.export(source.model, example, dynamic_shapes=shapes)
            merged = merge_lookups(program)  # without a check, as rows may change while other workers train
            if count_merged(merged):
                program = torch.export.export(merged, example, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has errors of many kinds
        text = " ".join(str(error).split())[:500]
        hint = " (len(tensor) in forward fixes a size; tensor.shape[0] does not)" if "specialized" in text else ""
        raise InvalidArgument(f"publish: the model cannot be exported: {text}{hint}") from error
    finally:
        source.model.train(was_training)
    program._example_inputs = None  # torch would pickle them
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)  # it names files of this machine
    data = {value.untyped_storage().data_ptr() for value in pytree.tree_leaves(source.example) if _has_memory(value)}
    for tensors in (program.state_dict, program.constants):
        _own(tensors, data)
    out = io.BytesIO()
    with _without_warnings_of_torch():
        torch.export.save(program, out)
    try:
        confined(out.getvalue(), "the model", is_signed=is_signed, is_operator=is_operator)
    except DataLoss as error:
        raise InvalidArgument(f"publish: {error}") from None
    return Program(out.getvalue(), _largest(program))


def program_of_file(path: str, tables: set[str], *, is_signed: bool) -> Program:
    """Reads a program that was exported before, with the same checks as for a new one.

    Args:
        path: the path or URL of the file.
        tables: the tables that are published, as NAMESPACE/TABLE.
        is_signed: whether the program will be signed; see :func:`export_program`.

    Raises:
        NotFound: there is no such file.
        DataLoss: the file is not a program, or has contents that a program must not have.
        FailedPrecondition: the program looks up a table that is not published; the text names it.
    """
    import torch

    from ...cpp_ext.torch_ops import is_operator

    folder, name = parent_of(path)
    place = Folder(folder)
    if not place.exists(name):
        raise NotFound(f"program: {path} does not exist")
    archive = confined(bytes(place.read(name)), path, is_signed=is_signed, is_operator=is_operator)
    try:
        with _without_warnings_of_torch():
            program = torch.export.load(io.BytesIO(archive))
    except Exception as error:  # torch has errors of many kinds for what it cannot read
        raise DataLoss(f"{path}: torch cannot read it: {type(error).__name__}: {error}") from error
    absent = sorted(_lookups(program) - tables)
    if absent:
        known = ", ".join(sorted(tables)) or "none"
        raise FailedPrecondition(
            f"{path}: the program looks up table {absent[0]!r}, which is not published; published tables: {known}"
        )
    return Program(archive, _largest(program))


def _lookups(program: ExportedProgram) -> set[str]:
    """Returns the tables that a program looks up, as NAMESPACE/TABLE."""
    found: set[str] = set()
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "") == "sparserow":
            texts = [part for value in node.args for part in (value if isinstance(value, list | tuple) else [value])]
            # Merged lookups name one table a line.
            lines = [line for text in texts if isinstance(text, str) for line in text.split("\n")]
            found.update(line for line in lines if "/" in line)
    return found


def _has_memory(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > 0


def _own(tensors: dict[str, Any], data: set[int]) -> None:
    """Gives each tensor that is a part of a larger storage a storage of its own, in place.

    ``data`` has the addresses of the storages of the example.

    Raises:
        InvalidArgument: a tensor lies in the memory of the example.
    """
    import torch

    for name, tensor in tensors.items():
        if not _has_memory(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in data:
            raise InvalidArgument(
                f"publish: {name!r} of the model, {tuple(tensor.shape)}, lies in the memory of an argument in "
                f"`example` ({format_bytes(storage.nbytes())}): data would go to serving; give the model a copy of it"
            )
        if storage.nbytes() > tensor.numel() * tensor.element_size():
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            tensors[name] = torch.nn.Parameter(own, requires_grad=tensor.requires_grad) if is_parameter else own


def _largest(program: ExportedProgram) -> tuple[ProgramTensor, ...]:
    found = [
        ProgramTensor(name, tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for tensors in (program.state_dict, program.constants)
        for name, tensor in tensors.items()
        if _has_memory(tensor)
    ]
    return tuple(sorted(found, key=lambda tensor: -tensor.bytes)[:_SHOWN])


@contextlib.contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """Suppresses warnings of torch about its own code; warnings of the model's code are shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"copyreg")
        yield
