"""Commands whose options are fields of a section: names, types, help, what is given, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

import sparserow as sr
from sparserow.deploy.cli import COMMANDS, _command
from sparserow.deploy.commands.model_options import Fields, takes
from sparserow.proto.config.cluster_config import ClusterConfig
from sparserow.proto.config.listen_config import ListenConfig
from sparserow.proto.config.log_config import LogConfig
from sparserow.proto.options.strict_model import Bytes, FromList, Seconds, StrictModel
from sparserow.serving.serve_config import ServeConfig


class Section(StrictModel):
    """A section with a field of each type."""

    size: Bytes | None = Field(None, description="Bytes of it; null: no bound.")
    wait: Seconds = Field(0.25, ge=0.1, description="Time that is waited.")
    every: Seconds | None = Field(60.0, description="Time between two; null: by command alone.")
    count_of_all: int = Field(3, ge=1, description="Number of all.")
    share: float = Field(0.5, description="Part of count_of_all.")
    kind: Literal["plain", "json"] = Field("plain", description="Form of a line.")
    fast: bool = Field(False, description="Whether it is fast.")
    seen: bool = Field(True, description="Whether it is seen.")
    places: Annotated[tuple[str, ...], FromList] = Field((), description="Places.")


def run(fields: Fields, *arguments: str, code: int = 0) -> tuple[Any, str]:
    """Returns the section that a command gets, and what was printed."""
    found: list[Any] = []

    @takes(section=fields)
    def command(*, section: Section, other: int = 7) -> None:
        """Do it."""
        assert other == 7
        found.append(section)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return (found[0] if found else None), " ".join(result.output.split())


def test_a_section_has_what_was_given_alone() -> None:
    section, _ = run(Fields(Section))
    assert section == Section()
    assert not section.model_fields_set
    words = ("--size=2KiB", "--wait=1min", "--count-of-all=5", "--share=0.25", "--kind=json", "--fast", "--no-seen")
    section, _ = run(Fields(Section), *words, "--places=a", "--places=b")
    wanted = {"size": 2048, "wait": 60.0, "count_of_all": 5, "share": 0.25, "kind": "json", "fast": True, "seen": False}
    assert section.model_dump(exclude_unset=True) == {**wanted, "places": ("a", "b")}


def test_help_has_descriptions_defaults_and_choices() -> None:
    _, text = run(Fields(Section, off={"every": "never"}), "--help")
    for words in (
        "Bytes of it. Default: no bound.",
        "Time that is waited. Default: 250ms.",
        "Time between two; never: by command alone. Default: 60s.",
        "Number of all. Default: 3.",
        "Part of --count-of-all. Default: 0.5.",
        "Form of a line. One of plain, json. Default: plain.",
        "--no-seen Whether it is seen. Default: true.",
    ):
        assert words in text, words


def test_names_defaults_and_values_of_a_command() -> None:
    fields = Fields(
        Section,
        ("every", "places", "wait", "kind"),
        prefix="log",
        defaults={"wait": 2.0},
        renamed={"places": "place"},
        off={"every": "never"},
        changed={"places": lambda given: [each.upper() for each in given]},
        required=("kind",),
    )
    section, _ = run(fields, "--log-kind=json", "--log-every=never", "--log-place=a")
    assert section.model_dump(exclude_unset=True) == {"kind": "json", "every": None, "places": ("A",), "wait": 2.0}
    _, text = run(fields, code=2)
    assert "--log-kind" in text
    _, text = run(fields, "--log-kind=json", "--size=1", code=2)
    assert "--size" in text


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--size=much", "--size: 'much' is not allowed; allowed: bytes"),
        ("--wait=1ms", "--wait: 0.001 is not allowed; allowed: seconds"),
        ("--count-of-all=0", "--count-of-all: 0 is not allowed; allowed: an integer >= 1"),
        ("--kind=xml", "--kind: 'xml' is not allowed; allowed: plain, json"),
    ],
)
def test_a_mistake_names_the_option(argument: str, words: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument) as error:
        run(Fields(Section), argument)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("serve", (ServeConfig, LogConfig)),
        ("ps", (ListenConfig, LogConfig)),
        ("coordinator", (ListenConfig, LogConfig)),
    ],
)
def test_a_command_has_each_field_once(command: str, sections: tuple[type[StrictModel], ...]) -> None:
    names = [each.name for each in _command(command).params]
    assert len(names) == len(set(names))
    for section in sections:
        start = "log_" if section is LogConfig else ""
        assert {start + name for name in section.model_fields} <= set(names)


def test_commands_say_the_same_of_an_option_of_a_cluster() -> None:
    """An option of several commands that is one field has one type and one sentence."""
    for field in ClusterConfig.model_fields:
        found = {
            str(each.help).partition(" Default: ")[0]
            for name in COMMANDS
            if name in ("up", "ps", "coordinator")
            for each in _command(name).params
            if each.name == field and field != "port"
        }
        assert len(found) <= 1, field
