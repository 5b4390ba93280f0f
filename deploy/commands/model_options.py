"""Options of commands from fields of a configuration, so that a name, a type, a default and a sentence are said once.

    @takes(cluster=Fields(ClusterConfig, ("memory_budget", "ssd_path")), log=Fields(LogConfig, prefix="log"))
    def ps(*, cluster: ClusterConfig, log: LogConfig, shard: ...) -> None:

gives the command ``--memory-budget``, ``--ssd-path``, ``--log-format`` and ``--log-level`` in place of the two
arguments. A section has those fields that were given; a mistake names the option.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ...proto.errors import InvalidArgument
from ...proto.options.document import validate
from ...proto.options.strict_model import StrictModel

HANDED_DOWN = "cluster_json"  # the hidden option by which a parent process passes a whole section


@dataclass(frozen=True)
class Fields:
    """The fields of a section that a command takes.

    Attributes:
        model: the section.
        names: its fields; (): all.
        prefix: begins the names of the options; "": none.
        defaults: values of the command where a field is not given, in place of those of the section.
        renamed: names of options by the field, where an option is given several times and so has another number.
        off: texts that stand for null, by the field.
        changed: what is made of a given value before it is checked, by the field.
        required: the fields that must be given.
        is_handed_down: whether a parent process may pass the whole section.
    """

    model: type[StrictModel]
    names: Sequence[str] = ()
    prefix: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    required: Sequence[str] = ()
    is_handed_down: bool = False

    def options(self) -> dict[str, str]:
        """Returns the field of each option by its name as an argument of a function."""
        names = self.names or tuple(self.model.model_fields)
        start = f"{self.prefix}_" if self.prefix else ""
        return {start + self.renamed.get(name, name): name for name in names}

    def parameters(self) -> list[inspect.Parameter]:
        """Returns a parameter for each option, as typer reads it."""
        return [
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name in self.required else None,
                annotation=self._annotation(option, name, self.model.model_fields[name]),
            )
            for option, name in self.options().items()
        ]

    def _annotation(self, option: str, name: str, of: FieldInfo) -> Any:
        kind = str if _form(of).startswith(("bytes", "seconds")) else _type_of(of.annotation)
        flag = f"{_flag(option)}/--no-{_flag(option)[2:]}" if kind is bool and of.default else _flag(option)
        return Annotated[kind if name in self.required else kind | None, typer.Option(flag, help=self._help(name, of))]

    def _help(self, name: str, of: FieldInfo) -> str:
        """Returns the field's description, with options in place of fields, and with its default and its choices."""
        null = f"{self.off[name]}:" if name in self.off else "Default:"
        text = re.sub(r"[;.] null: ", f". {null} " if null == "Default:" else f"; {null} ", of.description or "")
        for option, other in self.options().items():
            if "_" in other:
                text = re.sub(rf"\b{other}\b", _flag(option), text)
        choices = [choice for choice in _choices(of.annotation) if not re.search(rf"\b{choice}\b", text)]
        text += f" One of {', '.join(_choices(of.annotation))}." if choices else ""
        default = None if name in self.required else self.defaults.get(name, of.default)
        return text if default is None or default in ((), False) else f"{text} Default: {_shown(default, of)}."

    def section(self, given: Mapping[str, Any]) -> Any:
        """Returns the section of the options that were given.

        Raises:
            InvalidArgument: a value is not allowed; the text names the option.
        """
        values = {name: given[option] for option, name in self.options().items() if given.get(option) is not None}
        values |= {name: None for name, off in self.off.items() if values.get(name) == off}
        values |= {name: change(values[name]) for name, change in self.changed.items() if name in values}
        handed_down = given.get(HANDED_DOWN) if self.is_handed_down else None
        if handed_down is not None:
            try:
                tree = json.loads(handed_down)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"--cluster-json: the value is not JSON: {error}") from None
            return validate(self.model, tree, where="--cluster-json")
        try:
            return validate(self.model, {**self.defaults, **values})
        except InvalidArgument as error:
            raise InvalidArgument(self._by_option(str(error).removeprefix("the document: "))) from None

    def _by_option(self, text: str) -> str:
        """Returns an error text with the options in place of their fields: the first word, and words with ``_``."""
        options = {name: option for option, name in self.options().items()}
        first = re.match(r"[a-z_]+", text)
        if first is not None and first[0] in options:
            text = _flag(options[first[0]]) + text[first.end() :]
        for name, option in options.items():
            if "_" in name:
                text = re.sub(rf"(?<![-\w]){name}\b", _flag(option), text)
        return text


def takes(**sections: Fields) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command the options of sections, in place of its arguments of these names."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            parameters += sections[name].parameters() if name in sections else [parameter]

        def run(**given: Any) -> None:
            own = {name: given[name] for name in signature.parameters if name not in sections}
            command(**own, **{name: fields.section(given) for name, fields in sections.items()})

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorated


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _shown(default: Any, of: FieldInfo) -> str:
    """Returns a default as the command line takes it; a duration has its unit."""
    if _form(of).startswith("seconds"):
        return f"{default:g}s" if default >= 1 else f"{default * 1000:g}ms"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _form(of: FieldInfo) -> str:
    """Returns the form of a field's values in words; "" where it has none."""
    parts = [of, *(part for each in get_args(of.annotation) for part in get_args(each))]
    extras = (each.json_schema_extra for each in parts if isinstance(each, FieldInfo))
    return next((str(extra["allowed"]) for extra in extras if isinstance(extra, dict) and "allowed" in extra), "")


def _type_of(annotation: Any) -> Any:
    """Returns the type by which typer reads a field: texts of sizes, durations and choices are checked by the field."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        (kind,) = {_type_of(part) for part in get_args(annotation) if part is not type(None)}
        return kind
    if origin is Literal:
        return str
    if origin in (tuple, list):
        return list[str]
    return annotation if annotation in (int, float, bool) else str
