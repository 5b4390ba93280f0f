"""What a plan of lookups knows of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..session.tensor_group import TensorGroup

ROWS = "rows"  # the name of a layer's one parameter, which is empty
ROWS_OF_IDS = -1  # the mode of a lookup that is not a bag (cpp_ext/ops/merged_lookups.h)


class LayerChanges:
    """Counts the changes of what decides whether a layer's rows can be made ahead, over all layers of the process.

    Attributes:
        count: the number of changes so far; ``DistributedLayer`` adds to it.
    """

    count = 0


class PlannedLayer(nn.Module):
    """The base class of distributed layers, as the rooms below them see it.

    Attributes:
        binding: the name by which the ops find the table, ``namespace/table``.
        embedding_dim: the number of columns.
        padding_idx: the id whose row gets no gradient; None: there is none.
        dtype: the dtype of the output.
        mode_number: how the rows of a bag are pooled, as torch's ``embedding_bag`` numbers it; ``ROWS_OF_IDS``: there
            are no bags.
        include_last_offset: whether offsets end with the number of ids.
        anchor: a float32 tensor of shape (1,) that requires grad and so makes autograd record lookups.
        tensor_group: the ranks that get the rows from the one that looks them up; None: each rank looks up its own.
        is_on_devices: whether the rows are on the devices of the job's ranks, and not on servers.
    """

    is_on_devices = False
    mode_number = ROWS_OF_IDS
    include_last_offset = False
    dtype: torch.dtype
    binding: str
    embedding_dim: int
    padding_idx: int | None
    anchor: Tensor
    tensor_group: TensorGroup | None

    @property
    def is_frozen(self) -> bool:
        """Whether this layer does not train its rows; then it reads them without a clock and without gradient."""
        weight = self._parameters.get(ROWS)
        return weight is not None and not weight.requires_grad

    @property
    def padding_number(self) -> int:
        """``padding_idx`` as the ops take it: -1 where there is none."""
        return -1 if self.padding_idx is None else self.padding_idx

    @property
    def is_joint(self) -> bool:
        """Whether several ranks make a lookup of this layer together."""
        return self.is_on_devices or self.tensor_group is not None

    @property
    def is_trained(self) -> bool:
        """Whether a lookup belongs to the session's step."""
        return self.training and not self.is_frozen

    def lookup_options(self, *, has_offsets: bool = False, has_weights: bool = False) -> list[int]:
        """Returns the numbers that ``gather_all`` takes for a lookup of this layer (cpp_ext/ops/merged_lookups.h)."""
        raise NotImplementedError

    def look_up(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """Returns the float32 output of a forward with these arguments, by a lookup that this rank makes itself."""
        raise NotImplementedError

    def shape_of(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> tuple[int, ...]:
        """Returns the shape of the output of a forward with these arguments."""
        raise NotImplementedError
