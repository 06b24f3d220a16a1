"""Where the time goes: the part of a release's page on layers, as a graph, by module, and below the machine's roofs."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmflow.documents.release import Blob
from tvmflow.report import charts, page
from tvmflow.report.insight import Insight, Layer, Peaks
from tvmflow.report.page import Markup
from tvmflow.workspace import Record

# The layers that the page names where it compares with a release before.
_SHOWN = 10


class LayerRow(Record):
    """Figures that are computed from those of a layer; `name` is its innermost module.

    `share` is the layer's share of the time of all layers. `intensity` is its operations per byte. `of_roof` is
    `gflops` divided by the most GFLOP/s that the machine reaches at that intensity, with the bytes in the smallest
    level of the memory that holds them. Figures are None where the operations or the machine's peaks are unknown.
    """

    name: str
    share: float
    intensity: float | None
    gflops: float | None
    of_roof: float | None


class SlowerLayer(Record):
    """The time in ms of the layers of one name in two releases: `ms` now, `before`, and their `difference`."""

    name: str
    ms: float
    before: float
    difference: float


def layer_rows(insight: Insight) -> tuple[LayerRow, ...]:
    """Return a row for each layer of an insight, in their order."""
    total = sum(layer.ms for layer in insight.layers) or 1.0
    return tuple(_row(layer, total, insight.peaks) for layer in insight.layers)


def _row(layer: Layer, total: float, peaks: Peaks | None) -> LayerRow:
    intensity = gflops = of_roof = None
    if layer.gflop and layer.ms and layer.megabytes:
        intensity, gflops = layer.gflop * 1e3 / layer.megabytes, layer.gflop * 1e3 / layer.ms
        if peaks is not None:
            size = layer.megabytes * 1e6
            level = next(item for item in peaks.levels if item.bytes is None or size <= item.bytes)
            of_roof = gflops / min(peaks.gflops, intensity * level.gigabytes_per_second)
    return LayerRow(name=layer.scope[-1], share=layer.ms / total, intensity=intensity, gflops=gflops, of_roof=of_roof)


def times_of(data: Any) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the layers by target and name, from the JSON document of a release's page.

    The times of layers of the same name are added. Returns {} for a document without layers, and for None.
    """
    times: dict[str, dict[str, float]] = {}
    for target, insight in ((data or {}).get("insights") or {}).items():
        for layer in insight.get("layers", ()):
            by_name = times.setdefault(target, {})
            by_name[layer["scope"][-1]] = by_name.get(layer["scope"][-1], 0.0) + layer["ms"]
    return times


def list_operators(data: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a table of layers by target, from the JSON document of a release's page.

    A row has the names of the layer, of its ONNX operators and nodes, and the figures of a `Layer` and its `LayerRow`.
    Returns {} for a document without layers, and for None.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for target, rows in ((data or {}).get("layers") or {}).items():
        layers = data["insights"][target]["layers"]
        tables[target] = [
            {
                "layer": row["name"],
                # MLflow shows the first columns without scrolling.
                "ms": layer["ms"],
                "share": row["share"],
                "error": layer["error"],
                "operators": ", ".join(layer["operators"]),
                **{name: layer[name] for name in ("gflop", "megabytes")},
                **{name: row[name] for name in ("intensity", "gflops", "of_roof")},
                "function": layer["function"],
                "rule": layer["rule"],
                "result": "x".join(map(str, layer["shape"])),
                "nodes": ", ".join(layer["nodes"]),
            }
            for layer, row in zip(layers, rows, strict=True)
        ]
    return {target: rows for target, rows in tables.items() if rows}


def fetch_times(report: Blob | None, fetch: Callable[[str, Path], object]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the layers of a published release by target and name; {} where its page has none.

    `report` is the page of the release, None where it has no page. `fetch` gets the SHA-256 of a blob and a path, and
    writes the blob to that path.
    """
    if report is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        path = Path(folder) / "report.html"
        fetch(report.sha256, path)
        return times_of(page.read_data(path.read_text()))


def compare_layers(now: Mapping[str, float], before: Mapping[str, float]) -> tuple[SlowerLayer, ...]:
    """Return all layers of two releases, sorted by the difference of their times: the largest increase comes first.

    `now` and `before` are the milliseconds of a release's layers by name. A layer that only one release has takes 0 ms
    in the other. The result is empty if a release has no layers.
    """
    if not now or not before:
        return ()
    times = {name: (now.get(name, 0.0), before.get(name, 0.0)) for name in dict.fromkeys((*now, *before))}
    rows = [SlowerLayer(name=name, ms=ms, before=old, difference=ms - old) for name, (ms, old) in times.items()]
    return tuple(sorted(rows, key=lambda row: -row.difference))


def show_losses(target: str, slower: Sequence[SlowerLayer], before: str) -> Iterator[Markup]:
    """Yield a table of at most ten layers that take longer than in the version `before`, if there are any.

    `slower` are the layers of the target in the order of `compare_layers`.
    """
    losses = [
        (row.name, page.number(row.before), page.number(row.ms), page.number(row.difference, "{:+.4g}"))
        for row in slower[:_SHOWN]
        if row.difference > 0
    ]
    if losses:
        caption = f"{target}: the layers that lost most since {before}"
        yield page.table(caption, ("layer", f"{before}, ms", "ms", "difference"), losses)


def show_layers(
    target: str, insight: Insight, rows: Sequence[LayerRow], slower: Sequence[SlowerLayer], before: str | None
) -> Iterator[Markup]:
    """Yield charts and tables of a target's layers; nothing where it has none.

    `rows` come from `layer_rows`, `slower` from `compare_layers`. `before` is the version that `slower` compares with.
    """
    layers = insight.layers
    if not layers:
        return
    yield from show_losses(target, slower, before or "")
    title = f"{target}: the time by layer, from the whole model to its parts"
    parts = [((*layer.scope, ", ".join(layer.operators) or layer.function), layer.ms) for layer in layers]
    yield page.figure(title, charts.icicle(title, parts, "of the time"))
    title = f"{target}: the layers in their order, their time, and their error relative to the largest value"
    graph = [
        charts.GraphRow(row.name, _describe(layer), layer.reads, layer.ms, layer.error)
        for layer, row in zip(layers, rows, strict=True)
    ]
    yield page.figure(title, charts.graph(title, graph))
    yield from _roofline(target, insight, rows)
    headings = (
        "number",
        "layer",
        "operators",
        "function",
        "rule",
        "result",
        "ms",
        "share",
        "GFLOP/s",
        "of roof",
        "MB",
        "error",
    )
    cells = [
        (
            index,
            Markup(f'<span title="{page.text(" / ".join(layer.scope))}">{page.text(row.name)}</span>'),
            ", ".join(layer.operators) or "-",
            layer.function,
            layer.rule or "-",
            "x".join(map(str, layer.shape)),
            page.number(layer.ms, "{:.4f}"),
            page.number(row.share, "{:.1%}"),
            page.number(row.gflops, "{:.1f}"),
            page.number(row.of_roof, "{:.0%}"),
            page.number(layer.megabytes, "{:.2f}"),
            page.number(layer.error, "{:.1e}"),
        )
        for index, (layer, row) in enumerate(zip(layers, rows, strict=True), 1)
    ]
    yield page.details(
        f"{target}: all {len(layers)} layers as a table", [page.table(f"{target}: layers", headings, cells)]
    )


def _roofline(target: str, insight: Insight, rows: Sequence[LayerRow]) -> Iterator[Markup]:
    peaks = insight.peaks
    points = {
        f"{index} {row.name}": (row.intensity, row.gflops, row.share)
        for index, row in enumerate(rows, 1)
        if row.intensity is not None and row.gflops is not None
    }
    if peaks is None or not points:
        return
    title = f"{target}: the layers below the roofs of the machine; the area of a point is its share of the time"
    rates = {level.name: level.gigabytes_per_second for level in peaks.levels}
    yield page.figure(title, charts.roofline(title, points, peaks.gflops, rates))
    yield page.paragraph(
        Markup(
            f"{page.text(peaks.processor)}, {page.number(peaks.threads, '{:d}')} threads: the rates per cycle of its "
            f"profile times the clock, which was {page.number(peaks.gigahertz, '{:.2f}')} GHz when it was measured. "
            "Arithmetic is fp32; layers in bf16 or int8 may stand above its roof."
        )
    )


def _describe(layer: Layer) -> str:
    nodes = ", ".join(layer.nodes) or "no value of the model"
    return f"{' / '.join(layer.scope)}: {nodes}; {layer.function}, {'x'.join(map(str, layer.shape))}"
