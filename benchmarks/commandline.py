"""The common options of the benchmarks' command lines, and the report of their mistakes."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from tvmflow.errors import SettingsError, TvmflowError
from tvmflow.files import check_writable
from tvmflow.hardware.target import host
from tvmflow.settings import Settings

Item = TypeVar("Item", int, str)


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options `--threads`, `--json` and `--state`; `doc` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=host().cores, help="of every runner (all cores)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--state", type=Path, help="folder of exported and built models (.tvmflow/benchmarks)")
    return parser


def output_file(text: str) -> Path:
    """Return the path of a file that is written at the end, for `type=` of an option.

    Raises ArgumentTypeError for a file that cannot be written, before anything is measured.
    """
    try:
        check_writable(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written ({error.strerror})") from error
    return Path(text)


def positive(text: str) -> int:
    """Return the whole number above zero in a text, for `type=` of an option.

    Raises ArgumentTypeError for a number below one, ValueError for other text.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def not_negative(text: str) -> int:
    """Return the whole number of zero or more in a text, for `type=` of an option.

    Raises ArgumentTypeError for a negative number, ValueError for other text.
    """
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def add_peers(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the option `--peers`: some of `names`, by default all of them."""
    parser.add_argument(
        "--peers",
        type=separated(str, names),
        default=list(names),
        metavar="PEERS",
        help=f"separated by commas, of {', '.join(names)} (all)",
    )


def separated(convert: Callable[[str], Item], choices: Collection[Item] | None = None) -> Callable[[str], list[Item]]:
    """Return a function that reads items separated by commas, for `type=` of an option.

    `convert` reads one item; it raises as a `type=` does. `choices` are the items that are allowed, None for all.
    """

    def read(text: str) -> list[Item]:
        items = [convert(word.strip()) for word in text.split(",") if word.strip()]
        others = [item for item in items if choices is not None and item not in choices]
        if others:
            raise argparse.ArgumentTypeError(f"{others[0]!r} is not one of {', '.join(map(str, choices or ()))}")
        return items

    return read


def state_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of `--state`, which is created if it is missing. Raises SettingsError if that fails."""
    state: Path = (arguments.state or Settings.load().state / "benchmarks").absolute()
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"no folder {str(state)!r} can be made ({error.strerror}); give another --state") from error
    return state


def run_main(main: Callable[[], int | None]) -> None:
    """Run a benchmark and exit with its result; a TvmflowError ends it with one sentence and exit code 1."""
    try:
        sys.exit(main())
    except TvmflowError as error:
        sys.exit(f"error: {error}")
