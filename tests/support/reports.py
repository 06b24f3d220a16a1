"""The figures of a report's page, and whether its data has them."""

import json
import re
from collections.abc import Iterator
from typing import Any


def data_of(page: str) -> Any:
    """The JSON document that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def figures_of(page: str) -> list[float]:
    """The exact values of the figures that a page shows."""
    return [float(value) for value in re.findall(r'<data value="([^"]*)">', page)]


def unexplained_figures(page: str) -> list[float]:
    """The figures of a page that its data lacks."""
    numbers = set(_numbers(data_of(page)))
    return [figure for figure in figures_of(page) if figure not in numbers]


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
