"""What the command lines of all benchmarks share."""

import argparse
from pathlib import Path

from tvmflow import settings
from tvmflow.target import host


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--threads`, `--json` and `--state`; `doc` is the benchmark's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=positive, default=host().cores, help="of every runner (all cores)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    made.add_argument("--state", type=Path, help="where what is exported and built is kept (.tvmflow/benchmarks)")
    return made


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def state_folder(given: argparse.Namespace) -> Path:
    """The folder of `--state`, made where it is missing."""
    state: Path = (given.state or settings.load().state / "benchmarks").absolute()
    state.mkdir(parents=True, exist_ok=True)
    return state
