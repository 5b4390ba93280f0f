"""``gather_tables``: a plain copy of a model whose tables are on devices, with all of their rows, to publish."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...proto.errors import FailedPrecondition, not_allowed
from ..device_tables.device_tables import DeviceTables, whole_rows
from ..session.session import JobSession
from .embedding import DistributedEmbeddingBag, DistributedLayer, copy_sharing_rows
from .table_handle import EXTRA_STATE


def gather_tables(session: JobSession, model: nn.Module, *, into: nn.Module | None = None) -> nn.Module | None:
    """Copies a model whose tables have placement "device", with all rows of these tables. Every rank calls it.

    The copy is on the host and has an ``nn.Embedding`` or ``nn.EmbeddingBag`` in place of each layer whose table is on
    devices. :func:`publish` and :class:`DensePublisher` take it: such rows are served as dense weights are. Layers
    whose tables are on servers stay as they are.

    Args:
        model: the model, with or without DDP.
        into: an earlier copy that gets the present weights, for :meth:`DensePublisher.publish`; None: a new copy.

    Returns:
        The copy on rank 0, and None on other ranks.

    Raises:
        FailedPrecondition: the session has no table on devices.
        InvalidArgument: ``into`` is not a copy of this model.
        Unavailable, DeadlineExceeded: a rank is gone, or did not call it in time.
    """
    tables = session.core.device_tables
    if not isinstance(tables, DeviceTables) or not tables.names:
        raise FailedPrecondition("gather_tables: no table of this session has placement 'device'")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    rows = {name: whole_rows(tables, name) for name in tables.names}
    if session.rank != 0:
        return None
    layers = layers_on_devices(inner)
    weights = {path: rows[layer.binding.partition("/")[2]] for path, layer in layers.items()}
    if into is None:
        return _copy_of(inner, layers, weights)
    state = {
        key: value for key, value in inner.state_dict().items() if key.removesuffix(f".{EXTRA_STATE}") not in layers
    }
    state.update({f"{path}.weight": weight for path, weight in weights.items() if weight is not None})
    try:
        into.load_state_dict(state)
    except RuntimeError as error:
        wanted = f"a copy of this model that gather_tables returned ({' '.join(str(error).split())[:200]})"
        raise not_allowed("gather_tables.into", type(into).__name__, wanted) from None
    return into


def layers_on_devices(model: nn.Module) -> dict[str, DistributedLayer]:
    """Returns the layers of a model whose tables are on devices, by every path of each."""
    return {
        path: layer
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, DistributedLayer) and layer.is_on_devices
    }


def _copy_of(model: Any, layers: dict[str, DistributedLayer], weights: dict[str, Tensor | None]) -> nn.Module:
    made: nn.Module = copy_sharing_rows(model).to("cpu")
    plain: dict[int, nn.Module] = {}
    for path, layer in layers.items():
        weight = weights[path]
        assert weight is not None  # on rank 0
        made.set_submodule(path, plain.setdefault(id(layer), _plain(layer, weight.to(layer.dtype))))
    return made


def _plain(layer: DistributedLayer, weight: Tensor) -> nn.Module:
    if isinstance(layer, DistributedEmbeddingBag):
        return nn.EmbeddingBag(
            layer.num_embeddings,
            layer.embedding_dim,
            mode=layer.mode,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
            _weight=weight,
        ).train(layer.training)
    return nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx, _weight=weight).train(
        layer.training
    )
