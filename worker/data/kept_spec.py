"""Compares what samples became for the reader that a position was saved of with what they become for a reader now."""

from __future__ import annotations

from ...proto.errors import InvalidArgument
from .features import FeatureSpec


def check_inputs(spec: FeatureSpec, saved: dict[str, str]) -> None:
    """Refuses a state of a reader whose samples became other inputs, so that rows would get other keys.

    Args:
        spec: the inputs of the present reader.
        saved: the inputs of that reader.

    Raises:
        InvalidArgument: an input differs, or their order does.
    """
    mine = spec.described()
    if list(saved.items()) == list(mine.items()):
        return
    names = [name for name in (*saved, *mine) if saved.get(name) != mine.get(name)]
    if not names:
        raise InvalidArgument("reader state: the inputs of the model are the same in another order")
    was, now = (inputs.get(names[0], "not there") for inputs in (saved, mine))
    raise InvalidArgument(
        f"reader state: the input {names[0]!r} was {was}; this reader has {now}, so the model would read other "
        "numbers or keys than it was trained with"
    )


def check_targets(spec: FeatureSpec, saved: dict[str, str]) -> None:
    """Refuses a state of a reader with other labels, which the saved weights were trained on.

    Args:
        spec: has the labels of the present reader.
        saved: the labels of that reader.

    Raises:
        InvalidArgument: the column or the values of a label differ.
    """
    mine = dict(spec.targets)
    for name in (*saved, *mine):
        was, now = (labels.get(name, "not there") for labels in (saved, mine))
        if was != now:
            raise InvalidArgument(
                f"reader state: the label {name!r} was {was}; this reader has {now}, so the model would go on with "
                "another label than it was trained with"
            )
