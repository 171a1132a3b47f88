"""The program `rankattn`: finds the commands, runs one, and turns every error into one line and an exit code."""

import errno
import inspect
import os
import re
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.metadata import version
from pkgutil import iter_modules
from typing import Any, NoReturn

import typer

from . import commands
from .console import printable


# what shells report for a program that Ctrl-C ended: 128 + SIGINT
INTERRUPTED = 130
LONGEST_ERROR = 1500
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp"}

app = typer.Typer(
    help="Measure, set and cut the rank of attention.",
    pretty_exceptions_enable=False,
    # plain help is the same in a terminal, a pipe and a log
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for found in iter_modules(commands.__path__):
    module = import_module(f"{commands.__name__}.{found.name}")
    register = app.command(found.name.replace("_", "-"), epilog=f"Example: {module.EXAMPLE}")
    register(getattr(module, found.name))


def print_version(wanted: bool) -> None:
    if wanted:
        print(version("hf_rankattn"))
        raise typer.Exit


Version = typer.Option(False, "--version", callback=print_version, is_eager=True, help="Print the version and exit.")


@app.callback(invoke_without_command=True, epilog="Example: rankattn demo")
def without_command(context: typer.Context, _: bool = Version) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def fail(message: str, code: int = 2) -> NoReturn:
    """Exit with one line on stderr. Messages of other libraries may have many lines; long messages are truncated."""
    line = printable(" ".join(message.split()))
    print(f"rankattn: {line if len(line) < LONGEST_ERROR else line[:LONGEST_ERROR] + ' ...'}", file=sys.stderr)
    sys.exit(code)


def given_value(error: Exception) -> str:
    """The value that was given, where the message of a usage error does not repeat it."""
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    given = errors[0].get("input") if errors else None
    if not isinstance(given, str) or repr(given) in str(error):
        return ""
    return f", got {given if len(given) < 80 else given[:77] + '...'!r}"


def options_of(arguments: Sequence[str]) -> list[str]:
    """The parameters of the command that was called, under their names in Python."""
    called = next((argument for argument in arguments if not argument.startswith("-")), "")
    callbacks = [command.callback for command in app.registered_commands if command.name == called]
    return [name for callback in callbacks if callback for name in inspect.signature(callback).parameters]


def in_options(message: str, names: Collection[str]) -> str:
    """A message of the library in terms of the command line: `qk_rank` and qk_rank=4 become --qk-rank and its value.

    Messages about a file are not changed: a field of a config may have the name of an option.
    """
    if "cannot be read" in message:
        return message

    def option(found: re.Match[str]) -> str:
        quote, name, value = found.groups()
        if name not in names or not (quote or value):
            return found[0]
        if value == "'auto'" and "auto" in names:
            return "--auto-values" if name == "v_head_dim" else "--auto"
        shown = "" if value in (None, "True") else f" {value.strip(chr(39))}"
        return f"--{name.replace('_', '-')}{shown}"

    # not inside a path, such as /runs/seed=1/out
    return re.sub(r"(?<![\w/\\.-])(`?)\b([a-z_]+)\1(?:=('[^']*'|[\w.+-]*\w))?(?![/\\])", option, message)


def describe_error(error: BaseException) -> tuple[str, int]:
    """The message for an error, and the exit code: 2 where the user can remove the cause, 1 elsewhere."""
    message, kind = str(error), type(error)
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in message:
        return f"the disk is full: free some space, or write to another disk ({message}).", 2
    if isinstance(error, MemoryError):
        return message or "there is not enough memory for this.", 2
    if kind.__name__ == "OutOfMemoryError" or "can't allocate memory" in message:
        return f"there is not enough memory for this: {message}", 2
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read.", 2
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not UTF-8 text: {message}.", 2
    if isinstance(error, (ConnectionError, TimeoutError)) or modules & NETWORK:
        return f"the network or the Hub did not answer as expected: {message or kind.__name__}", 2
    if isinstance(error, (ValueError, OSError)) or "Symlink loop" in message:
        return message or repr(error), 2
    return f"unexpected {kind.__name__}: {message or 'no message'}", 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. An error is one line on stderr and an exit code; with RANKATTN_DEBUG=1 it is raised."""
    debug = os.environ.get("RANKATTN_DEBUG", "0") not in ("", "0")
    try:
        code = app(args=arguments, prog_name="rankattn", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "rankattn"
        # typer checks values with pydantic, which puts "Value error" before the message
        message = error.format_message().replace("Value error, ", "") + given_value(error)
        stop = "" if message.endswith((".", "?")) else "."
        fail(f"{message}{stop} See {path} --help.", error.exit_code)
    except BrokenPipeError:
        # as for `| head -1`: the rest of the buffer has no reader, and Python would report that at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        if debug:
            raise
        message, code = describe_error(error)
        if code == 2:
            fail(in_options(message, options_of(sys.argv[1:] if arguments is None else arguments)))
        fail(f"{message.rstrip('.')}. RANKATTN_DEBUG=1 shows the traceback.", code)
    if code == INTERRUPTED:
        fail("interrupted.", INTERRUPTED)
    sys.exit(code)
