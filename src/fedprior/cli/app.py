"""The program `fedprior`: its commands, in the order of its help, its lists and its errors.

torch takes seconds to import. Commands import what they need when they run, so that help appears at once.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core
from rich.markup import escape

from fedprior.cli import experiments, results, runs
from fedprior.cli.terminal import Stopped, console, errors
from fedprior.core.errors import FedpriorError, FedpriorWarning, SettingError
from fedprior.version import __version__


class Commands(typer.core.TyperGroup):
    """The commands, which say which one was meant."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None:
            from fedprior.core.options import nearest

            raise nearest(cmd_name, self.commands, "command")
        return found


app = typer.Typer(
    cls=Commands,
    help="Federated learning as hard EM: an algorithm is a prior over client parameters.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# typer contains its own copy of click or depends on it. Either way, this is the base class of command-line errors.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""
    if version:
        console.print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def tasks_command(
    task: Annotated[str | None, typer.Argument(help="A task, to say what each of its options is.")] = None,
) -> None:
    """List the tasks, or the options of one."""
    from rich.table import Table

    from fedprior.catalogue.tasks import TASKS, task_options
    from fedprior.core.options import described, listed, nearest, options_of

    if task is not None:
        if task not in TASKS:
            raise nearest(task, TASKS, "task")
        console.print(_described(described(options_of(TASKS[task]), task_options(task, {})), _summary(TASKS[task])))
        return
    table = Table("task", "what", "options")
    for name, build in TASKS.items():
        table.add_row(name, _summary(build), listed(options_of(build), task_options(name, {})))
    console.print(table)


def algorithms_command(
    algorithm: Annotated[str | None, typer.Argument(help="An algorithm, to say what each of its settings is.")] = None,
) -> None:
    """List the algorithms: prior, M-step and settings; or the settings of one."""
    from rich.padding import Padding
    from rich.text import Text

    from fedprior.catalogue.algorithms import ALGORITHMS, algorithm_settings, entry
    from fedprior.core.options import described, listed, options_of

    for name in ALGORITHMS if algorithm is None else (algorithm,):
        known, defaults = options_of(entry(name).build), algorithm_settings(name, {})
        about = f"prior: {entry(name).prior}  M-step: {entry(name).m_step}"
        if algorithm is not None:
            console.print(_described(described(known, defaults), about))
            return
        console.print(Text.assemble((name, "bold"), "  ", about))
        console.print(Padding(listed(known, defaults), (0, 0, 1, 4)))


def _summary(function: Any) -> str:
    """The first line of what a function says about itself."""
    return str(function.__doc__).strip().splitlines()[0]


def _described(rows: list[tuple[str, str, str]], title: str) -> Any:
    """A table for the terminal of settings, their defaults and what they are."""
    from fedprior.report.table import Table

    return Table(("setting", "default", "what"), rows, title=title, words=3).terminal()


class Command(typer.core.TyperCommand):
    """A command that refuses an option and a `--set` of the same name together."""

    def invoke(self, ctx: Any) -> Any:  # typer's context, or that of the click it depends on
        for text in ctx.params.get("set_") or ():
            key = text.split("=", 1)[0]
            source = ctx.get_parameter_source(key) if key in ctx.params else None
            if source is not None and source.name == "COMMANDLINE":
                raise SettingError(f"--{key.replace('_', '-')} and --set {key}=… are the same setting: use only one")
        return super().invoke(ctx)


for command in (*results.COMMANDS, *runs.COMMANDS, *experiments.COMMANDS, tasks_command, algorithms_command):
    app.command(command.__name__.removesuffix("_command"), cls=Command)(command)


@contextmanager
def _joined() -> Iterator[None]:
    """Join the other processes if `torchrun` started several; those work in silence."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    from fedprior.engines import ranks

    with ranks.joined():
        console.quiet = errors.quiet = not ranks.first()
        yield


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show our own warnings once each, without their line of code; leave others unchanged."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if issubclass(category, FedpriorWarning):
            errors.print(f"[bold yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=FedpriorWarning)
        warnings.showwarning = show
        yield


def main() -> None:
    """The entry point: errors that the user can fix become one line and exit code 2."""
    debug, how = "--debug" in sys.argv, ""
    try:
        with _joined(), _warnings_in_a_line():
            # Accepted anywhere on the line, not only before the command.
            code = app([argument for argument in sys.argv[1:] if argument != "--debug"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Stopped as error:
        code, how = 130, f"; {error}"
    except (FedpriorError, UsageError, OSError) as error:
        if debug:
            traceback.print_exc()
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        errors.print(f"[bold red]error:[/] {escape(' '.join(text.split()))}", highlight=False, soft_wrap=True)
        code = 2
    if code == 130:
        errors.print(f"stopped{escape(how)}", highlight=False, soft_wrap=True)
    sys.exit(code if isinstance(code, int) else 0)
