"""`tvmflow run`: run a bundle on arrays of an .npz file."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


@click.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--inputs", type=click.Path(path_type=Path), help="An .npz by input name; without it, the golden sample.")
@click.option("-o", "--output", "--outputs", "output", type=click.Path(path_type=Path), help="The .npz to write.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Timed runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def run_command(bundle: Path, inputs: Path | None, output: Path | None, repeat: int, as_json: bool) -> None:
    """Run BUNDLE, verified first, and write its outputs by name and as output_0, output_1, ..."""
    # The compiler is not needed to run: TVM's runtime alone loads in a fraction of the time.
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    from tvmflow import runtime

    with runtime.load(bundle) as model:
        given = model.sample[0] if inputs is None else _read(inputs)
        arrays = model.check_inputs(given)
        results, seconds = {}, []
        for _ in range(repeat):
            start = time.perf_counter()
            results = model(**arrays)
            seconds.append(time.perf_counter() - start)
        if output is not None:
            _write(output, results)
    milliseconds = [value * 1e3 for value in seconds]
    times = {"mean": statistics.mean(milliseconds), "p50": statistics.median(milliseconds), "min": min(milliseconds)}
    if as_json:
        shapes = {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in results.items()}
        document = {"outputs": shapes, "output": output and str(output), "runs": repeat, "latency_ms": times}
        click.echo(json.dumps(document))
        return
    for name, array in results.items():
        click.echo(f"{name}: {array.dtype.name}{list(array.shape)}")
    click.echo(
        f"{repeat} run{'s' * (repeat > 1)}: mean {times['mean']:.3f} ms, "
        f"median {times['p50']:.3f} ms, min {times['min']:.3f} ms"
    )
    if output is not None:
        click.echo(f"written to {output}")


def _read(path: Path) -> "dict[str, Array]":
    from tvmflow import npz

    try:
        return npz.read(path)
    except FileNotFoundError as error:
        raise InputError(f"there is no inputs file {str(path)!r}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} is not a readable .npz of arrays; write it with numpy.savez") from error


def _write(path: Path, results: "dict[str, Array]") -> None:
    from tvmflow import npz

    numbered = {f"output_{index}": array for index, array in enumerate(results.values())}
    try:
        npz.write(path, {**numbered, **results})
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written ({error.strerror}); choose another place") from error
