"""The command line: `meshwright search`, `run`, `check`, `explain` and the like, one file each.

A file has the function `command` and its `EXAMPLES`; its name is the command's, with dashes.
MESHWRIGHT_COMMANDS names folders with more.

Exit codes: 0 done; 1 a failure while running; 2 wrong usage; 3 no plan meets the constraints;
4 an input (plan, cluster, model) breaks a rule; 5 ranks or world do not match the plan;
70 the same failure came again, so that another try would be in vain; 75 the job was asked to end
and has saved all: start it again and it goes on; 128 + n signal n ended it.
"""

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright import __version__
from meshwright.ir.errors import Infeasible, MeshwrightError, MismatchError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.garbage import FEWER_OBJECTS, rare_collections
from meshwright.ir.text.terminal import Terminal
from meshwright.runtime.world import children

add_folders("MESHWRIGHT_COMMANDS", __path__)
COMMANDS = Files(sys.modules[__name__], "command", dashed=True)
err = Terminal(stderr=True)


class _Commands(TyperGroup):
    """Imports a command when it is asked for: few need a search, some not even torch. The list of
    all takes their first sentences from the files' text."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        names: dict[str, Any] = dict.fromkeys(COMMANDS.names)
        self.commands.update(names)
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=_said_of(COMMANDS.file(cmd_name)))
        if self.commands[cmd_name] is None:
            self.commands[cmd_name] = _made(cmd_name)
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _said_of(file: Path) -> str:
    """The docstring of a file's `command`; the file is not run."""
    functions = (x for x in ast.parse(file.read_text()).body if isinstance(x, ast.FunctionDef))
    return next((ast.get_docstring(x) or "" for x in functions if x.name == "command"), "")


def _made(name: str) -> Any:
    """The command of a file, with its examples at the end of its help."""
    file, alone = COMMANDS.load(name), typer.Typer(add_completion=False)
    epilog = "\n\n".join(("For example:", *(f"`{line}`" for line in file.EXAMPLES)))
    alone.command(name, epilog=epilog)(file.command)
    return typer.main.get_command(alone)


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    asked: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="say which this is"),
    ] = False,
) -> None:
    """Find the fastest way to train a PyTorch model on a cluster, look at it, run it."""


def _fail(error: Exception, code: int) -> NoReturn:
    err.print(f"{type(error).__name__}: {error}", style="red", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def main(command: Callable[[], None] = app) -> None:
    """Entry point: turns our errors into one line and an exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank does not outlive torchrun
        children.die_with_parent()
    try:
        with rare_collections(FEWER_OBJECTS):
            command()
    except Infeasible as error:
        _fail(error, 3)
    except MismatchError as error:
        _fail(error, 5)
    except MeshwrightError as error:
        _fail(error, 4)
