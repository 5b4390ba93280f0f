"""The command ``sparserow``: it finds the file of a command, and turns errors into one line.

To add a command, add a file ``commands/NAME.py`` with a function ``NAME``. Its options are typer's, and the first line
of its docstring is the help. A command with subcommands has a typer app named ``app`` instead. Then add a line in
``COMMANDS``, and a test. The file of a command is imported only when the command is used, so ``sparserow ps`` never
imports torch. Slow imports belong inside the function all the same.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..cpp_ext import UnsupportedError
from ..proto.errors import SparserowError
from ..proto.process.startup import begin_start, end_as_first_process

# The order is that of the help text.
COMMANDS: tuple[str, ...] = (
    *("demo", "train", "up", "status", "top", "doctor", "plan", "table", "namespace", "checkpoint", "inspect"),
    *("report", "publish", "list", "alias", "rollback", "prune", "serve", "query", "row", "probe", "predict"),
    *("bench", "security", "coordinator", "ps", "gateway"),
)


def _command(name: str) -> Any:
    module = import_module(f".commands.{name}", __package__)
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name)(getattr(module, name))
    return typer.main.get_command(app)


class LazyCommands(TyperGroup):
    """The commands of ``COMMANDS``, each of which is imported when it is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the base class's signature
        """Returns the names of the commands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - as above
        """Returns the command; None when there is none of that name."""
        return _command(cmd_name) if cmd_name in COMMANDS else None


def _print_version(wanted: bool) -> None:
    if wanted:
        from ..cpp_ext import _client, supported_torches
        from .preflight.versions import installed_torch, version_lines

        typer.echo("\n".join(version_lines(_client.build(), supported_torches(), installed_torch())))
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    security: Annotated[
        str | None,
        typer.Option(
            envvar="SPARSEROW_SECURITY", help="File that names certificates and tokens, of clients and servers alike."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Sparserow: a parameter server for sparse recommendation models, native to PyTorch."""
    del debug, version  # --debug is read by main(), which also sees errors of the parsing itself
    if security is not None:
        from ..proto.security.security import use_security

        use_security(security)


# These classes belong to click, or to the copy of click that typer brings.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, and ends the process with 0, 1 (an error) or 2 (wrong usage).

    An error is reported in one line on stderr.

    Args:
        arguments: the arguments without the program's name; None reads those of the process.
    """
    begin_start()
    end_as_first_process()
    arguments = sys.argv[1:] if arguments is None else arguments
    app = typer.Typer(
        cls=LazyCommands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.callback(no_args_is_help=True)(_root)
    try:
        code = app(args=arguments, prog_name="sparserow", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # otherwise the help text was printed
            print(f"sparserow: InvalidArgument: {_one_line_of_usage(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        print("sparserow: stopped", file=sys.stderr)
        raise SystemExit(1) from None
    except UnsupportedError as error:
        print(f"sparserow: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except SparserowError as error:
        if arguments[:1] == ["--debug"]:
            traceback.print_exc()
        one_line = " ".join(str(error).split())
        print(f"sparserow: {error.code}: {one_line}", file=sys.stderr)
        raise SystemExit(1) from None


def _one_line_of_usage(error: Any) -> str:
    """Returns one line with the problem, the command, and where its help is."""
    message = " ".join(error.format_message().split()).rstrip(".")
    where = error.ctx.command_path if error.ctx is not None else "sparserow"
    return f"{where.removeprefix('sparserow ')}: {message}; see '{where} --help'"


if __name__ == "__main__":
    main()
