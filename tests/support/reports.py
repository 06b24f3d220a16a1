"""The figures of a report's page, whether its data has them, and how a browser lays it out."""

import html
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def data_of(page: str) -> Any:
    """The JSON document that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def figures_of(page: str) -> list[float]:
    """The exact values of the figures that a page shows, in its text and in its charts."""
    return [float(value) for value in re.findall(r'<(?:data |text data-)value="([^"]*)"', page)]


def unmarked_figures(page: str) -> list[str]:
    """The texts of charts that are figures, but no marks of an axis, names of bars or figures of the page's data."""
    texts: list[str] = re.findall(r"<text (?!data-value|class=\"(?:tick|on)\")[^>]*>([^<]*)<", page)
    return [text for text in texts if re.fullmatch(r"[-+]?[\d.]+(e[-+]\d+)?( ?[A-Za-z%/]+)?", text)]


def unexplained_figures(page: str) -> list[float]:
    """The figures of a page that its data lacks."""
    numbers = set(_numbers(data_of(page)))
    return [figure for figure in figures_of(page) if figure not in numbers]


def read_table(client: Any, run_id: str, place: str) -> list[dict[str, Any]]:
    """The rows of a table of a run that MLflow's UI shows as one."""
    marks = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert {"path": place, "type": "table"} in marks
    table = json.loads(Path(client.download_artifacts(run_id, place)).read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def measure_overflow(page: str, folder: Path) -> list[int]:
    """By how many pixels a page is wider than a phone and than a desk, in a headless browser; `folder` is its own."""
    wide: list[int] = _ask_browser(page, folder, (360, 1280), "e.scrollWidth-e.clientWidth")
    return wide


def measure_hidden(page: str, folder: Path, width: int) -> dict[str, int]:
    """By how many pixels each table and chart of a page is wider than its place, by its name; `folder` is its own."""
    regions = "Object.fromEntries([...e.querySelectorAll('.scroll')].map(s=>[s.ariaLabel,s.scrollWidth-s.clientWidth]))"
    (hidden,) = _ask_browser(page, folder, (width,), regions)
    return {str(name): int(pixels) for name, pixels in hidden.items()}


def _ask_browser(page: str, folder: Path, widths: Sequence[int], question: str) -> list[Any]:
    """The values of a JavaScript expression on the root element `e` of a page, at each width in pixels."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:600px;border:0" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    measure = (
        "onload=()=>{document.title=JSON.stringify([...document.querySelectorAll('iframe')]"
        f".map(f=>f.contentDocument.documentElement).map(e=>{question}))}}"
    )
    style = '<!DOCTYPE html><meta charset="utf-8">'
    (folder / "frames.html").write_text(f"{style}<body>{frames}<script>{measure}</script></body>")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    dumped = subprocess.run(
        [*command, f"--user-data-dir={folder}", (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (title,) = re.findall(r"<title>(\[.*?\])</title>", dumped.stdout)
    values: list[Any] = json.loads(html.unescape(title))
    return values


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
