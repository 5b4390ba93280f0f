"""The command line finds every command's file, and every file is a command or a part of one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from sparserow.deploy import cli, commands as commands_package

SHARED = {"__init__", "bench_outcome", "model_options", "options", "result_file", "terminal"}
PARTS = {"node_doctor", "bench_peers"}  # of the commands doctor and bench: what --nodes and peers do
FILES = {path.stem for path in Path(commands_package.__file__).parent.glob("*.py")} - SHARED - PARTS


def test_every_file_is_in_the_table() -> None:
    assert not FILES - set(cli.COMMANDS), f"not in the table: {', '.join(sorted(FILES - set(cli.COMMANDS)))}"
    assert len(cli.COMMANDS) == len(set(cli.COMMANDS))


def test_every_command_and_option_has_a_help_text() -> None:
    wrong = []
    for name in sorted(FILES):
        function = getattr(import_module(f"{commands_package.__name__}.{name}"), name, None)
        if function is None or not function.__doc__:
            wrong.append(f"{name}: its file has no function {name} with a docstring")
            continue
        command = cli._command(name)
        for each in (command, *getattr(command, "commands", {}).values()):
            if not each.help:
                wrong.append(f"{name} {each.name}: no help")
            wrong += [
                f"{name} {each.name}: {parameter.name}: no help"
                for parameter in each.params
                if not getattr(parameter, "help", None) and not getattr(parameter, "hidden", False)
            ]
    assert len(FILES) > 20
    assert not wrong, "\n".join(wrong)


def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["up", "--shards=0"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("sparserow: InvalidArgument: --shards: 0 is not allowed")


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["up", "--shard=1"])
    assert caught.value.code == 2
    assert "--shards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["publish", "m", "--root=/nowhere"], "publish: Missing option '--namespace'; see 'sparserow publish --help'"),
        (["table", "export"], "table export: Missing argument"),
        (["up", "--shards=many"], "up: Invalid value for '--shards'"),
        (["nosuch"], "No such command 'nosuch'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.out == ""
    assert said.err.startswith("sparserow: InvalidArgument: ")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["table"])
    assert caught.value.code == 2
    assert "sweep" in capsys.readouterr().out
