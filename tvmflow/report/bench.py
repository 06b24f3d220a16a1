"""The page of `tvmflow bench`: a build beside other runtimes."""

from collections.abc import Mapping, Sequence
from typing import Any

from tvmflow.comparison import runs_needed
from tvmflow.report import charts, page
from tvmflow.report.page import Markup


def write_page(name: str, contest: Mapping[str, Any], sentences: Sequence[str]) -> str:
    """Return the HTML page of a comparison of the model `name` with other runtimes.

    `contest` is the JSON document of `tvmflow bench`; its `ratios` has the interval of our latency over each peer's.
    `sentences` say these ratios in words.
    """
    ratios: Mapping[str, Mapping[str, float]] = contest["ratios"]
    missing: dict[str, dict[str, int]] = {
        runner: {
            which: runs_needed(int(which)) - item["runs"]
            for which, value in item["percentiles_ms"].items()
            if value is None
        }
        for runner, item in contest["figures"].items()
    }
    rows = [
        (
            runner,
            *(_show_percentile(value, missing[runner].get(which)) for which, value in item["percentiles_ms"].items()),
            page.number(item["throughput"], "{:.1f}"),
            page.number(item["load_ms"], "{:.0f}"),
            page.number(item["first_ms"], "{:.1f}"),
            page.number(item["peak_memory"]),
            page.number(item["joules"], "{:.3g}"),
            page.number(item["error"], "{:.1e}"),
        )
        for runner, item in contest["figures"].items()
    ]
    which = next(iter(contest["figures"].values()))["percentiles_ms"]
    figures = ("runs/s", "load ms", "first ms", "memory bytes", "J/run", "largest error")
    headings = ("runner", *(f"p{each} ms" for each in which), *figures)
    intervals = {peer: (item["low"], item["ratio"], item["high"]) for peer, item in ratios.items()}
    title = "Our latency over the peer's"
    chart = [page.figure(title, charts.intervals(title, intervals, 1.0))] if intervals else []
    sections = {
        "Ratios": [*chart, page.items(sentences)],
        "Figures": [page.table("Every runner on the same sample", headings, rows)],
    }
    return page.write(f"{name} beside other runtimes", sections, {**contest, "missing_runs": missing})


def _show_percentile(value: float | None, missing: int | None) -> Markup:
    """A percentile in ms, or the number of runs that it lacks."""
    if value is not None or missing is None:
        return page.number(value, "{:.3f}")
    return Markup(f"-, runs missing: {page.number(missing, '{:d}')}")
