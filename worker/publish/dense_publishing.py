"""``DensePublisher``: publishes a version's dense weights again while training goes on, as live sync does for rows."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import torch

from ...cpp_ext.torch_ops import is_operator
from ...proto.arguments import check_integer, check_number
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.published.dense import DenseVersion, prove_dense, write_dense
from ...proto.published.program import read_program
from ...proto.published.proof import trusted_keys
from ...proto.published.registry import ModelRegistry
from ...proto.security.security import loaded_security
from ..checkpoint.state_tree import encode_tree
from ..session.compiled_module import bare, plain_path
from .asked_version import check_session

if TYPE_CHECKING:
    from ..session.session import JobSession


class DensePublisher:
    """Publishes a model's dense weights at intervals, for a version that was published before.

    One worker of the job makes it, and only the thread that trains calls it.

    Args:
        session: the session that trains; its step is stored with the weights.
        name: the name of the model.
        root: the folder of published models, by path or URL.
        model: the model whose weights are published; the one that :func:`publish` was given.
        every_sec: the interval of publications by :meth:`step`, in seconds.
        version: the version to whose program the weights belong; None: the one that the alias ``live`` names.

    Attributes:
        version: the version to whose program the weights belong.

    Raises:
        NotFound: there is no such model or version, or the version has no program.
        InvalidArgument: an argument has a wrong type or is out of range, or the model's weights do not match those of
            the program; the text names the first that differs.
        FailedPrecondition: there is a verification key, and no trusted publisher signed the version as it is.
    """

    def __init__(
        self,
        session: JobSession,
        name: str,
        *,
        root: str,
        model: torch.nn.Module,
        every_sec: float = 60.0,
        version: int | None = None,
    ) -> None:
        check_number("DensePublisher.every_sec", every_sec)
        if version is not None:
            check_integer("DensePublisher.version", version, 1)
        if not isinstance(model, torch.nn.Module):
            raise not_allowed("DensePublisher.model: type", type(model).__name__, "a torch.nn.Module")
        check_session(session, "DensePublisher")
        registry = ModelRegistry(root)
        self.version = version if version is not None else registry.resolve(name, "live").version
        security = session.core.catalog.security if isinstance(session.core.catalog, ControlClient) else None
        keys = trusted_keys(security)
        manifest = registry.trusted_manifest(name, self.version, keys)
        folder = registry.folder(name, self.version)
        program = torch.export.load(io.BytesIO(read_program(folder, manifest, keys, is_operator=is_operator)))
        self._session = session
        self._name = name
        self._security = security
        self._model = model
        self._every_sec = every_sec
        self._folder = folder
        names = (*program.graph_signature.parameters, *program.graph_signature.buffers)
        weights = {name: program.state_dict[name] for name in names if name in program.state_dict}
        self._shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
        self._weights()
        self._published_at = time.monotonic()

    def step(self) -> DenseVersion | None:
        """Publishes when ``every_sec`` have passed since the last publication. Call it after each ``session.step``.

        Returns:
            The published weights; None when nothing was published.

        Raises:
            FailedPrecondition, NotFound, ResourceExhausted: see :meth:`publish`.
        """
        if time.monotonic() - self._published_at < self._every_sec:
            return None
        return self.publish()

    def publish(self) -> DenseVersion:
        """Publishes the present weights.

        Raises:
            FailedPrecondition: the session is closed, or a weight is not finite; the text names it. Nothing was
                published.
            NotFound: the version was removed.
            FailedPrecondition, ResourceExhausted: the weights cannot be written.
        """
        check_session(self._session, "DensePublisher")
        weights = self._weights()
        for key, value in weights.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FailedPrecondition(f"DensePublisher: weight {key!r} is not finite; nothing was published")
        prove = prove_dense(self._name, self.version, loaded_security(self._security))
        published = write_dense(self._folder, encode_tree(weights, {}).pieces, self._session.current_step, prove)
        self._published_at = time.monotonic()
        return published

    def _weights(self) -> dict[str, Any]:
        own = self._model.state_dict()
        weights = {**{plain_path(key): value for key, value in bare(self._model).state_dict().items()}, **own}
        for key, (shape, dtype) in self._shapes.items():
            value = weights.get(key)
            if value is None or (tuple(value.shape), value.dtype) != (shape, dtype):
                found = "is not there" if value is None else f"is {value.dtype} of shape {tuple(value.shape)}"
                raise InvalidArgument(
                    f"DensePublisher: weight {key!r} of version {self.version} is {dtype} of shape {shape}; in the "
                    f"model it {found}; publish a new version"
                )
        return {key: weights[key] for key in self._shapes}
