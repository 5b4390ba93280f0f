"""A device for torch that lies in the host's memory and counts what crosses to it, back from it, and waits for it.

``device()`` makes it known to torch (once a process) as ``counted:0``, and to the package as a device with a link.
Every operation of torch runs on it: a tensor is a wrapper around one on the host. Crossings that do not go through the
link, a hidden ``.item()`` say, are counted too, by what they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ...cpp_ext.device.link import Crossings, Fetched, HostLink, Sent, register_link

_SYNCHRONISING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique_consecutive", "_unique2"}
_NAME = "counted"
_WITHOUT_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "is_set_to"}


@dataclass
class Counts:
    """What happened since the last reset, whoever asked for it.

    Attributes:
        to_device, to_host: copies.
        waits: operations whose result the host waits for, copies to it apart.
        operations: those of torch that would launch a kernel, by name: no views and no allocations.
        log: each copy and each wait, in words.
    """

    to_device: int = 0
    to_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    waits: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Begins anew."""
        self.to_device = self.to_host = self.bytes_to_device = self.bytes_to_host = self.waits = 0
        self.operations.clear()
        self.log.clear()


COUNTS = Counts()


class CountedTensor(Tensor):
    """A tensor of the device; ``host`` has its values, and shares memory with those of its views."""

    host: Tensor

    @staticmethod
    def __new__(cls: type[CountedTensor], host: Tensor) -> CountedTensor:
        with torch.inference_mode(host.is_inference()):  # a view of a normal tensor is one in inference mode, too
            made: CountedTensor = Tensor._make_wrapper_subclass(
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device(_NAME, 0),
            )
        made.host = host
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"CountedTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it as torch.utils says
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func.namespace == "sparserow":
            return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return func.decompose(*args, **kwargs)  # below autograd it comes whole, ``to`` for one
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _WITHOUT_KERNEL:
            COUNTS.operations[name] += 1
        if name == "copy_":
            return _copy(*args[:2])
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
            _note("to_host", args[0], "to")
            return func(args[0].host, **kwargs)
        if name in _SYNCHRONISING:
            COUNTS.waits += 1
            COUNTS.log.append(f"wait: {name}")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        given: dict[int, CountedTensor] = {}

        def host_of(tensor: Tensor) -> Tensor:
            if isinstance(tensor, CountedTensor):
                given[id(tensor.host)] = tensor
                return tensor.host
            if tensor.dim() > 0 and name not in ("index", "index_put_", "_index_put_impl_"):
                raise RuntimeError(f"{name}: a tensor of the host among tensors of the device")
            return tensor

        out = func(*tree_map_only(Tensor, host_of, args), **tree_map_only(Tensor, host_of, kwargs))
        if name == "_local_scalar_dense":
            return out
        return tree_map_only(Tensor, lambda made: given[id(made)] if id(made) in given else CountedTensor(made), out)


def _note(way: str, tensor: Tensor, by: str) -> None:
    size = tensor.numel() * tensor.element_size()
    setattr(COUNTS, way, getattr(COUNTS, way) + 1)
    setattr(COUNTS, f"bytes_{way}", getattr(COUNTS, f"bytes_{way}") + size)
    COUNTS.log.append(f"{way}: {size} bytes by {by}")


def _copy(to: Tensor, source: Tensor) -> Tensor:
    is_there, was_there = isinstance(to, CountedTensor), isinstance(source, CountedTensor)
    if is_there != was_there:
        _note("to_device" if is_there else "to_host", source, "copy_")
    target = to.host if isinstance(to, CountedTensor) else to
    target.copy_(source.host if isinstance(source, CountedTensor) else source)
    return to


class CountingLink(HostLink):
    """The package's link to the device."""

    def send(self, host: Tensor) -> Sent:
        """See :class:`HostLink`."""
        self.crossings.count_send(host)
        return Sent(host.to(self.device))

    def fetch(self, tensor: Tensor) -> Fetched:
        """See :class:`HostLink`."""
        self.crossings.count_fetch(tensor)
        return Fetched(tensor.cpu())

    def address(self, tensor: Tensor) -> int:
        """See :class:`HostLink`."""
        return tensor.host.data_ptr() if isinstance(tensor, CountedTensor) else tensor.data_ptr()


_library: torch.library.Library | None = None
_links: list[CountingLink] = []


def _make_link(device: torch.device) -> CountingLink:
    _links.append(CountingLink(device))
    return _links[-1]


def crossings() -> Crossings:
    """What the package's own link has counted."""
    return _links[-1].crossings if _links else Crossings()


def device() -> torch.device:
    """The device, known to torch and to the package."""
    global _library
    if _library is None:
        _setup_privateuseone_for_python_backend(_NAME)
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("empty.memory_format", _empty, "PrivateUse1")
        _library.impl("empty_strided", _empty_strided, "PrivateUse1")
        register_link(_NAME, _make_link)
    return torch.device(_NAME, 0)


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return CountedTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return CountedTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))
