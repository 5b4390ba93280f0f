"""Distributed layers whose tables have placement "device", and what makes their tables.

Rows are on the devices of the job's ranks (worker/device_tables); no server has them. A lookup calls all ranks.
Importing the compiler of torch takes seconds, so this file is imported when there is such a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.schema import TableSchema
from ..device_tables.device_tables import DeviceTables, NewTable, spread_rows
from ..device_tables.lookup import BagOptions, ReadRows, look_up
from ..device_tables.row_matrix import check_optimizer
from ..lookups.made_rows import take_joint
from ..lookups.makers.device_tables import anchor_of
from ..session.session import JobSession
from .embedding import DistributedEmbedding, DistributedEmbeddingBag, DistributedLayer
from .layer_swap import Swap, distributed_layer_of
from .weight_carry import CARRY_CHUNK_BYTES

_PLACE = "tables.placement 'device'"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled graph has no calls of all ranks
def _look_up(layer: DistributedLayer, ids: Tensor, bags: BagOptions | None = None) -> Tensor:
    others = (None, None) if bags is None else (bags.offsets, bags.weights)
    made = take_joint(layer, (ids, *others), ReadRows.of_ids)
    return look_up(layer.binding, ids, anchor_of(layer), padding=layer.padding_idx, bags=bags, made=made)


class DeviceEmbedding(DistributedEmbedding):
    """Replaces ``nn.Embedding``: looks its rows up on the devices of the ranks."""

    is_on_devices = True

    def _own_rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = _look_up(self, ids)
        return rows


class DeviceEmbeddingBag(DistributedEmbeddingBag):
    """Replaces ``nn.EmbeddingBag``: pools rows from the devices of the ranks."""

    is_on_devices = True

    def _own_pool(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        bags = BagOptions(self.mode_number, self.include_last_offset, offsets, weights)
        pooled: Tensor = _look_up(self, ids, bags)
        return pooled


def layers_on_devices(
    model: nn.Module, session: JobSession, swaps: Sequence[Swap]
) -> dict[str, tuple[TableSchema, DistributedLayer]]:
    """Makes tables on every rank, with their first rows, and returns their schemas and layers by name.

    Args:
        model: the model; where its layers have no rows yet, the tables are on the device of its parameters.
        session: the session.
        swaps: the layers to replace.

    Raises:
        InvalidArgument: the session has another staleness than 0, no kernel of an optimizer runs on devices, or a table
            does not fit on the device of a rank. Nothing was made.
        FailedPrecondition: the dense tensors are on the servers, the session is in a tensor group, several ranks have
            no process group of torch.distributed, a server has a table of the same name, or another rank has failed.
    """
    _check(session, swaps)
    made = [replace(swap.schema, id=_client.id_of_name(swap.schema.full_name)) for swap in swaps]
    tables = _tables_of(session, _device_of(model, swaps))
    tables.add([
        NewTable(schema, swap.layer.num_embeddings, swap.layer.padding_idx if _begins_with_zeros(swap) else None)
        for swap, schema in zip(swaps, made, strict=True)
    ])  # fmt: skip
    layers: dict[str, tuple[TableSchema, DistributedLayer]] = {}
    for swap, schema in zip(swaps, made, strict=True):
        if swap.is_carried:
            spread_rows(tables, schema.name, _chunks(swap.layer.weight.detach()))
        kinds = (DeviceEmbedding, DeviceEmbeddingBag)
        layer = distributed_layer_of(swap.layer, schema, session.core.origins, kinds)
        layers[schema.name] = schema, layer.to(tables.device)
    return layers


def _check(session: JobSession, swaps: Sequence[Swap]) -> None:
    """Refuses what tables on devices cannot be used with, before anything is changed."""
    core = session.core
    place = core.placement
    if place.staleness != 0:
        raise not_allowed("connect.staleness", place.staleness, f"0 with {_PLACE}")
    if core.tensor_group is not None:
        raise FailedPrecondition(
            f"{_PLACE}: not in a tensor group, where one rank alone has the rows; allowed: placement 'servers'"
        )
    if core.has_dense_rows:
        raise FailedPrecondition(
            f"{_PLACE}: the dense tensors of this session are on the servers (dense: ps), where workers need not step "
            "together; allowed: DistributedDataParallel (dense: ddp)"
        )
    if place.world_size > 1:
        is_group = dist.is_available() and dist.is_initialized()
        ranks = (dist.get_rank(), dist.get_world_size()) if is_group else None
        if ranks != (place.rank, place.world_size):
            raise FailedPrecondition(
                f"{_PLACE}: the job has {place.world_size} workers, which exchange rows by torch.distributed; call "
                "init_process_group with the ranks of the workers before connect"
            )
    for swap in swaps:
        check_optimizer(swap.schema)
        if swap.is_frozen or len(swap.layers) > 1:
            what = "frozen" if swap.is_frozen else "shared by several layers"
            raise FailedPrecondition(
                f"{_PLACE}: table {swap.schema.name!r} is {what}, which is possible on the servers alone; allowed: "
                "placement servers"
            )
    there = {schema.name for schema in core.catalog.list_tables(session.namespace)}
    for swap in swaps:
        if swap.schema.name in there:
            raise FailedPrecondition(
                f"{_PLACE}: namespace {session.namespace!r} has a table {swap.schema.name!r} on the servers, whose "
                "rows would not be used; drop that table, or take another namespace"
            )


def _begins_with_zeros(swap: Swap) -> bool:
    return isinstance(swap.layer, nn.Embedding) and not swap.is_carried


def _chunks(weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, CARRY_CHUNK_BYTES // (4 * weight.shape[1]))
    for begin in range(0, weight.shape[0], step):
        part = weight[begin : begin + step].float()
        yield torch.arange(begin, begin + len(part)), part


def _device_of(model: nn.Module, swaps: Sequence[Swap]) -> torch.device:
    """Returns the device of the tables: that of the layers, or that of the model for layers without rows."""
    weights = [swap.layer.weight for swap in swaps if not swap.layer.weight.is_meta]
    weights += [parameter for parameter in model.parameters() if not parameter.is_meta]
    return weights[0].device if weights else torch.device("cpu")


def _tables_of(session: JobSession, device: torch.device) -> DeviceTables:
    core = session.core
    if core.device_tables is None:
        if core.is_distributed and device.type == "cuda" and "cuda:nccl" not in dist.get_backend_config():
            raise InvalidArgument(
                f"{_PLACE}: the process group has no nccl for tensors on {device}; allowed: "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        core.device_tables = DeviceTables(core.native, core.placement, device)
    assert isinstance(core.device_tables, DeviceTables)
    if core.device_tables.device != device:
        raise FailedPrecondition(
            f"{_PLACE}: a model on {device}, but this session's tables are on {core.device_tables.device}"
        )
    return core.device_tables
