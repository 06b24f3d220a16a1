"""Training: what the weights of a release were trained with."""

import json
from typing import Any

from pydantic import JsonValue

from tvmflow.workspace import Record


class Training(Record):
    """The training of a release's weights: the function, its arguments, and the SHA-256 of the files that it read.

    An argument that is no finite number is a word, see `finite_json`. `files` are those of `train.reads`, by path.
    """

    function: str
    arguments: dict[str, JsonValue]
    files: dict[str, str]


def finite_json(value: JsonValue) -> Any:
    """Return a JSON value with the words `NaN`, `Infinity` and `-Infinity` in the place of the numbers."""
    return json.loads(json.dumps(value), parse_constant=str)
