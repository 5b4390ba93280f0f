"""The dense side of a model as a program to publish: what is in it is the model's own, and none of it is data.

A tensor that is a view of a larger one would take the whole storage along, which may be a column of training data.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.folder import Folder
from ...proto.config.units import format_bytes
from ...proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from ...proto.published.program_archive import confined

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

_SHOWN = 3


@dataclass(frozen=True)
class ProgramSource:
    """A model to export: the module, example arguments of its forward, and which of their dimensions vary."""

    model: torch.nn.Module
    example: tuple[Any, ...]
    dynamic_shapes: Any = None


@dataclass(frozen=True)
class ProgramTensor:
    """A tensor that a program holds: a parameter, a buffer or a constant."""

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class Program:
    """An exported program.

    Attributes:
        archive: as ``torch.export.load`` takes it from a file.
        largest: its three largest tensors.
    """

    archive: bytes
    largest: tuple[ProgramTensor, ...]


def export_program(source: ProgramSource, *, is_signed: bool) -> Program:
    """The model's program, with lookups that do not wait for each other in one round trip.

    Args:
        source: what to export. Its example is copied first, so that no program refers to it.
        is_signed: whether the program may use operators that are not among the known ones.

    Raises:
        InvalidArgument: it cannot be exported (says why), or a tensor of the model shares its memory with the example.
    """
    import torch
    from torch.utils import _pytree as pytree

    from ...cpp_ext.torch_ops import is_operator
    from ..layers.fuse_lookups import count_merged, merge_lookups

    example = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), source.example)
    shapes = source.dynamic_shapes
    if shapes is None:
        batch = torch.export.Dim("batch", min=1)
        shapes = tuple({0: batch} if isinstance(value, torch.Tensor) and value.dim() else None for value in example)
    was_training = source.model.training
    source.model.eval()
    try:
        with torch.no_grad(), _without_warnings_of_torch():
            program = torch.export.export(source.model, example, dynamic_shapes=shapes)
            merged = merge_lookups(program)  # not compared: rows may change while others train
            if count_merged(merged):
                program = torch.export.export(merged, example, dynamic_shapes=shapes)
    except Exception as error:  # torch.export has errors of many kinds
        raise InvalidArgument(f"publish: the model cannot be exported: {' '.join(str(error).split())[:500]}") from error
    finally:
        source.model.train(was_training)
    program._example_inputs = None  # torch would pickle them
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
    """A program that was exported before, checked as one that is exported now.

    Args:
        path: of the file, or its URL.
        tables: that there are, as NAMESPACE/TABLE.
        is_signed: as of :func:`export_program`.

    Raises:
        NotFound: there is no such file.
        DataLoss: it is no program, or says what a program may not.
        FailedPrecondition: it looks up a table that is not among them (names it).
    """
    import torch

    from ...cpp_ext.torch_ops import is_operator

    folder, _, name = path.rpartition("/")
    place = Folder(folder or ".")
    if not place.exists(name):
        raise NotFound(f"program: {path} is not there")
    archive = confined(bytes(place.read(name)), path, is_signed=is_signed, is_operator=is_operator)
    try:
        with _without_warnings_of_torch():
            program = torch.export.load(io.BytesIO(archive))
    except Exception as error:  # torch has errors of many kinds for what it cannot read
        raise DataLoss(f"{path}: torch cannot read it: {type(error).__name__}: {error}") from error
    absent = sorted(_lookups(program) - tables)
    if absent:
        known = ", ".join(sorted(tables)) or "none"
        raise FailedPrecondition(f"{path}: looks up table {absent[0]!r}, which is not published; there are: {known}")
    return Program(archive, _largest(program))


def _lookups(program: ExportedProgram) -> set[str]:
    """NAMESPACE/TABLE of each lookup of a program."""
    found: set[str] = set()
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "") == "sparserow":
            texts = [part for value in node.args for part in (value if isinstance(value, list | tuple) else [value])]
            lines = [line for text in texts if isinstance(text, str) for line in text.split("\n")]  # of merged lookups
            found.update(line for line in lines if "/" in line)
    return found


def _has_memory(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > 0


def _own(tensors: dict[str, Any], data: set[int]) -> None:
    """Gives each tensor that is a part of a larger storage a storage of its own.

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
    """Leaves out what torch warns of itself; warnings of the model's own code are shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"copyreg")
        yield
