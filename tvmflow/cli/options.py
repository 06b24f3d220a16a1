"""Arguments and options of several commands, and the files that they name."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.errors import InputError
from tvmflow.files import check_folder_writable, check_writable

if TYPE_CHECKING:
    from tvmflow.arrays import Array
    from tvmflow.operators import OwnOperator

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_LARGEST_NUMBER = 10**9


class OutputFile(click.Path):
    """A file that the command writes at its end: refused before the work when it cannot be written.

    With `replaces` a new file takes the place of an old one.
    """

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self._replaces = replaces

    def convert(
        self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path; `param` and `ctx` are click's, None outside of a command.

        Raises InputError when the file cannot be written, BadParameter for a folder.
        """
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        with naming_output(path):
            check_writable(path, replaces=self._replaces)
        return path


class NumberRange(click.FloatRange):
    """A range of numbers, none above 10**9: no NaN or infinity, and nothing that overflows as seconds or bytes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; `param` and `ctx` are click's, None outside of a command. Raises BadParameter."""
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= _LARGEST_NUMBER:
            self.fail(f"{value} is not a number of at most {_LARGEST_NUMBER}.", param, ctx)
        return number


def check_output_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, or made. Raises InputError."""
    with naming_output(folder):
        check_folder_writable(folder)


model_argument: Decorator = click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
file_argument: Decorator = click.argument("file", type=click.Path(path_type=Path))
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
target_option: Decorator = click.option(
    "--target", default="native", show_default=True, help="A preset, or a TVM target such as 'llvm -mcpu=znver4'."
)


def precision_option(text: str) -> Decorator:
    """Return the decorator that adds the option `--precision` with the help `text`."""
    choice = click.Choice(["fp32", "bf16", "fp16", "int8"])
    return click.option("--precision", type=choice, default="fp32", show_default=True, help=text)


relative_error_option: Decorator = click.option(
    "--max-relative-error",
    type=NumberRange(min=0),
    help="The largest error of an output over its largest magnitude, in place of the tolerances of each element.",
)


def input_shapes_option(text: str) -> Decorator:
    """Return the decorator that adds the option `--input-shapes`, whose help ends with `text`."""
    return click.option("--input-shapes", help=f'Shapes by input, e.g. "input:[1,3,224,224] mask:[batch,128]"{text}')


def trace_option(text: str) -> Decorator:
    """Return the decorator that adds the option `--trace`, whose help says what of a run is written: `text`."""
    return click.option(
        "--trace",
        type=OutputFile(),
        callback=_check_trace,
        help=f"Write {text}, for https://ui.perfetto.dev: as Perfetto's .pftrace, with any other suffix as JSON.",
    )


def _check_trace(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a format that cannot be written before anything runs."""
    from tvmflow.trace import PERFETTO_SUFFIXES

    if path is not None and path.suffix in PERFETTO_SUFFIXES:
        try:
            import perfetto.protos  # noqa: F401
        except ImportError as error:
            raise click.BadParameter(
                f"{path.suffix} needs the package perfetto: `pip install perfetto`, or end the name in .json"
            ) from error
    return path


operator_option: Decorator = click.option(
    "--operator",
    "operators",
    metavar="MODULE:OPERATOR",
    multiple=True,
    help="An operator of your own, of a module in this folder. Repeatable.",
)


def load_own_operators(addresses: tuple[str, ...]) -> "dict[str, OwnOperator]":
    """Return the operators that the option names, by name; modules of the current folder can be imported from now on.

    Raises ExportError.
    """
    from tvmflow.operators import load_operators

    for address in addresses:
        if ":" not in address:
            raise click.BadParameter(f"{address!r} is not of the form MODULE:OPERATOR", param_hint="--operator")
    if addresses:
        sys.path.insert(0, str(Path.cwd()))
    # What a module prints is none of the command's own output.
    with redirect_stdout(sys.stderr):
        return load_operators(addresses)


@contextmanager
def naming_output(path: Path) -> Iterator[None]:
    """Make an OSError from the body, which writes `path`, one sentence. Raises InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written ({error.strerror}); choose another place") from error


def read_inputs(path: Path) -> "dict[str, Array]":
    """Return the arrays of an .npz file by name. Raises InputError for a file that is missing or holds none."""
    from tvmflow import npz

    try:
        return npz.read(path)
    except FileNotFoundError as error:
        raise InputError(f"there is no inputs file {str(path)!r}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} is not a readable .npz of arrays; write it with numpy.savez") from error
