"""``DensePublisher``: a published version's dense weights follow training, as live sync has its rows follow."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import torch

from ...cpp_ext.torch_ops import is_operator
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, InvalidArgument
from ...proto.published.dense import DenseVersion, write_dense
from ...proto.published.program import read_program
from ...proto.published.program_proof import make_proof
from ...proto.published.registry import ModelRegistry
from ...proto.security.security import loaded_security
from ..checkpoint.state_tree import encode_tree

if TYPE_CHECKING:
    from ..session.session import Session


class DensePublisher:
    """Publishes a model's dense weights again on an interval, for a version that was published before. One worker has
    one; it belongs to the thread that trains.

    Args:
        session: that trains; its step is noted with the weights.
        name: of the model.
        root: folder of published models, by path or URL.
        model: whose weights they are, as it was given to :func:`publish`.
        every_sec: between publications by :meth:`step`.
        version: whose program they belong to; None: the one that ``live`` names.

    Raises:
        NotFound: no such model or version, or one without a program.
        InvalidArgument: the model's weights are not those of the program (names the first); ``every_sec`` is not above
            0.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        *,
        root: str,
        model: torch.nn.Module,
        every_sec: float = 60.0,
        version: int | None = None,
    ) -> None:
        if not every_sec > 0:
            raise InvalidArgument(f"DensePublisher: every_sec {every_sec} is not allowed; allowed: > 0")
        registry = ModelRegistry(root)
        self.version = version if version is not None else registry.resolve(name, "live").version
        security = session.core.catalog.security if isinstance(session.core.catalog, ControlClient) else None
        program = torch.export.load(
            io.BytesIO(read_program(root, name, self.version, security, is_operator=is_operator))
        )
        self._session = session
        self._name = name
        self._security = security
        self._model = model
        self._every_sec = every_sec
        self._folder = registry.folder(name, self.version)
        names = (*program.graph_signature.parameters, *program.graph_signature.buffers)
        weights = {name: program.state_dict[name] for name in names if name in program.state_dict}
        self._shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
        self._weights()
        self._published_at = time.monotonic()

    def step(self) -> DenseVersion | None:
        """After each ``session.step``: publishes when ``every_sec`` have passed since it was last done, else None."""
        if time.monotonic() - self._published_at < self._every_sec:
            return None
        return self.publish()

    def publish(self) -> DenseVersion:
        """Publishes now.

        Raises:
            FailedPrecondition: a weight is not finite (names it); nothing is published.
            FailedPrecondition, ResourceExhausted: it cannot be written.
        """
        weights = self._weights()
        for key, value in weights.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FailedPrecondition(f"DensePublisher: weight {key!r} is not finite")
        encoded = encode_tree(weights, {})
        security = loaded_security(self._security)
        published = write_dense(
            self._folder,
            encoded.pieces,
            encoded.size,
            encoded.xxh3,
            self._session.current_step,
            lambda facts: make_proof(self._name, self.version, facts, encoded.pieces, security),
        )
        self._published_at = time.monotonic()
        return published

    def _weights(self) -> dict[str, Any]:
        weights = self._model.state_dict()
        for key, (shape, dtype) in self._shapes.items():
            value = weights.get(key)
            if value is None or (tuple(value.shape), value.dtype) != (shape, dtype):
                found = "is not there" if value is None else f"is {value.dtype} of shape {tuple(value.shape)}"
                raise InvalidArgument(
                    f"DensePublisher: weight {key!r} of version {self.version} is {dtype} of shape {shape}; in the "
                    f"model it {found}; publish a new version"
                )
        return {key: weights[key] for key in self._shapes}
