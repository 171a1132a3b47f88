"""Arguments of training scripts: one dataclass, from the command line, from a YAML file, or from both."""

import dataclasses
import difflib
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import yaml
from transformers import HfArgumentParser


CONFIG_FILES = (".yaml", ".yml")
NULL = "tag:yaml.org,2002:null"
LONGEST_ERROR = 1000
# what may change between a run and its continuation: none of these changes a weight
FREE = ("output_dir", "resume", "stop_at", "save_every", "expect_processes", "report_to", "push_to")


def option(default: Any, words: str) -> Any:
    """A field of arguments with its default and its help."""
    return field(default=default, metadata={"help": words})


@dataclass(kw_only=True)
class RunArguments:
    """What every training script takes. A script adds its own fields, and may change defaults."""

    output_dir: str = option("runs/run", "folder of the run: its checkpoints and its model")
    resume: bool = option(False, "go on from the last checkpoint in output_dir, or start if there is none")
    steps: int = option(1000, "training steps; the schedule spans all of them")
    batch_size: int = option(256, "rows of one step over ALL processes together")
    learning_rate: float = option(0.01, "highest learning rate")
    warmup: float = option(0.05, "share of the steps in which the rate rises")
    seed: int = option(0, "seed of weights")
    data_seed: int | None = option(None, "seed of data; by default that of the weights")
    log_every: int = option(10, "steps over which a logged loss is averaged")
    save_every: int = option(500, "steps between checkpoints; a multiple of log_every")
    stop_at: int | None = option(None, "save a checkpoint at this step and stop, as when time runs out")
    expect_processes: int | None = option(None, "refuse to start unless exactly so many processes came up")
    report_to: str = option("none", "a tracker that Trainer or Accelerate knows")
    push_to: str | None = option(None, "Hub repository to push the model to")

    def __post_init__(self) -> None:
        check_counts(self, "steps", "batch_size", "log_every", "save_every", "stop_at", "expect_processes")
        check_seeds(self, "seed", "data_seed")
        for name in ("save_every", "stop_at"):
            value = getattr(self, name)
            if value is not None and value % self.log_every:
                raise ValueError(
                    f"--{name} {value} is not a multiple of --log_every {self.log_every}, over which losses are averaged: "
                    f"make it a multiple of {self.log_every}."
                )
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"--learning_rate must be a positive finite number, got {self.learning_rate}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup is a share of the steps, at least 0 and below 1; got {self.warmup}.")
        if self.data_seed is None:
            self.data_seed = self.seed

    def settings(self) -> dict[str, Any]:
        """The arguments that decide about the weights."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE}


def check_counts(arguments: Any, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")


def check_seeds(arguments: Any, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < 2**32:
            raise ValueError(f"--{name} must be at least 0 and below 2**32, got {value}.")


Arguments = TypeVar("Arguments")


class Formatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Docstrings keep their lines, so that commands can be copied, and options tell their defaults."""


class ScriptParser(HfArgumentParser):
    """HfArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message} See {self.prog} --help.")


def parse_arguments(
    kind: type[Arguments], description: str | None = None, argv: Sequence[str] | None = None
) -> Arguments:
    """Fill a dataclass from `script.py --name value ...`, or from `script.py config.yaml --name value ...`.

    A YAML file is read as if its lines stood on the command line before the rest: the same types and checks (`010` is 10, and
    `1e-3` is a number), and what follows on the command line wins. Bad input ends the process with code 2 and one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    given: dict[str, Any] = {"description": description, "formatter_class": Formatter}
    parser = ScriptParser([cast(Any, kind)], allow_abbrev=False, **given)
    parser.usage = f"{parser.prog} [config.yaml] [--name value ...]"
    known = {item.name: item for item in dataclasses.fields(cast(Any, kind)) if item.init}
    if argv and argv[0].endswith(CONFIG_FILES):
        file = argv.pop(0)
        argv = [*file_arguments(file, parser, known), *argv]
    try:
        arguments, *_, rest = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:
        refuse(f"{parser.prog}: {error}")
    if rest:
        parser.error(f"unknown argument {rest[0]}{did_you_mean(rest[0].lstrip('-').split('=')[0], known)}")
    return arguments


def file_arguments(file: str, parser: ScriptParser, known: dict[str, Any]) -> list[str]:
    """The lines of a YAML file as command-line arguments. Values stay the text that the file has, as on a command line."""
    if Path(file).exists() and not Path(file).is_file():  # opening a named pipe would wait for ever
        parser.error(f"{file} cannot be read: it is not a regular file.")
    try:
        tree = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except RecursionError:
        parser.error(f"{file} cannot be read: it is nested too deeply.")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"{file} cannot be read: {' '.join(str(error).split())}.")
    if tree is None:
        return []
    if not isinstance(tree, yaml.MappingNode):
        parser.error(f"{file} must hold lines `name: value`, got a {tree.id}.")
    found: list[str] = []
    for key, node in tree.value:
        name = key.value
        if not isinstance(key, yaml.ScalarNode) or name not in known:
            parser.error(f"{file}: unknown key {name!r:.80}{did_you_mean(str(name), known)}")
        if [other.value for other, _ in tree.value].count(name) > 1:
            parser.error(f"{file}: {name} is given twice.")
        values = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(value, yaml.ScalarNode) for value in values):
            kind = "mapping" if isinstance(node, yaml.MappingNode) else "list of lists or mappings"
            parser.error(f"{file}: {name} takes one value or a list of values, got a {kind}.")
        if isinstance(node, yaml.SequenceNode):
            found += [f"--{name}", *(value.value for value in values)]
        elif node.tag == NULL:
            if type(None) not in getattr(known[name].type, "__args__", ()) and known[name].default is not None:
                parser.error(f"{file}: {name} must have a value.")
            parser.set_defaults(**{name: None})
        else:
            found.append(f"--{name}={node.value}")
    return found


def did_you_mean(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(known)}."


def refuse(message: str) -> NoReturn:
    """End this process with code 2 and one line that says why."""
    rank = os.environ.get("RANK", "0")
    # all of several processes speak, as what is wrong may be wrong in one of them only
    line = " ".join(message.split())
    line = line if len(line) < LONGEST_ERROR else f"{line[:LONGEST_ERROR]} ..."
    sys.stderr.write(("" if rank == "0" else f"[process {rank}] ") + line + "\n")
    sys.stderr.flush()
    sys.exit(2)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the ValueErrors of setting up a run, which are about what the user gave, into refusals."""
    try:
        yield
    except ValueError as error:
        refuse(str(error))
