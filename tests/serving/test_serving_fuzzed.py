"""Requests of any form: each is answered, or refused with a sentence and a status between 400 and 499."""

import asyncio
import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from support.fuzzing import examples
from tvmflow import runtime
from tvmflow.serving import protocol
from tvmflow.serving.app import Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.source import ServedModel

GOOD: dict[str, Any] = {
    "id": "one",
    "parameters": {"binary_data_output": False},
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [0.5] * 8},
        {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [[1, 2, 3, 4]]},
        {"name": "count", "datatype": "INT64", "shape": [1], "data": [7], "parameters": {}},
    ],
    "outputs": [{"name": "sum"}, {"name": "doubled", "parameters": {"binary_data": False}}],
}
LEAVES = some.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        8,
        32,
        1 << 31,
        1 << 63,
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "FP16",
        "INT64",
        "BOOL",
        "BYTES",
        "count",
        "sum",
        "�",
        "\x00",
        "é" * 50,
    ]
)
VALUES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.dictionaries(
            some.sampled_from(["name", "data", "shape", "parameters", "binary_data_size", "é"]), inner, max_size=3
        )
    ),
    max_leaves=8,
) | some.sampled_from([[0, 10**30], [1] * 70, [0] * 70, [[[[]]]], [[1], [2, 3]], [{"a": 1}]])
DEEP = [
    b"[" * 100_000,
    b'{"inputs":' * 100_000,
    b'{"inputs": [{"name": "x", "data": ' + b"[" * 900 + b"]" * 900 + b"}]}",
]


def places(part: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [*([keys] if keys else []), *(place for key, value in items for place in places(value, (*keys, key)))]


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(bundle: Path) -> Iterator[Ask]:
    """The answer of the application in this process; an exception that leaves it is raised here."""
    batcher = Batcher(max_batch=8, max_delay=0.0, on_batch=lambda rows: None)
    with runtime.load(bundle) as model, asyncio.Runner() as runner:
        service = Service([ServedModel("small", "1", model)], batcher, Metrics(), Limits(body=1 << 20))
        transport = httpx.ASGITransport(application(service))
        client = httpx.AsyncClient(transport=transport, base_url="http://server")

        def post(body: bytes, header_length: str | None = None, path: str = "/v2/models/small/infer") -> httpx.Response:
            headers = {} if header_length is None else {protocol.HEADER_LENGTH.encode(): header_length.encode()}
            return runner.run(client.post(path, content=body, headers=headers))

        yield post
        runner.run(client.aclose())
        batcher.close()


def is_answered(response: httpx.Response) -> bool:
    """Whether a request was answered; one that was refused has to say why."""
    if response.status_code == 200:
        head = int(response.headers.get(protocol.HEADER_LENGTH, len(response.content)))
        assert json.loads(response.content[:head])["model_name"] == "small"
        return True
    assert 400 <= response.status_code < 500, response.text
    sentence = response.json()["error"]
    assert sentence
    assert sentence.isprintable(), repr(sentence)
    return False


def test_the_fuzzed_request_is_answered(ask: Ask) -> None:
    assert is_answered(ask(json.dumps(GOOD).encode()))


@examples(normal=100, long=500)
@example([(("inputs", 0, "shape"), [0, 10**30]), (("inputs", 0, "data"), [])])
@example([(("inputs", 0, "shape"), [0] * 70), (("inputs", 0, "data"), [])])
@given(some.lists(some.tuples(some.sampled_from(places(GOOD)), VALUES), min_size=1, max_size=2))
def test_a_changed_request_is_answered_or_refused(ask: Ask, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = copy.deepcopy(GOOD)
    for place, value in changes:
        part: Any = document
        with contextlib.suppress(KeyError, IndexError, TypeError):  # An earlier change has removed the place.
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = copy.deepcopy(value)
    is_answered(ask(json.dumps(document).encode()))


@examples(normal=50, long=600)
@given(some.sampled_from(DEEP) | some.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_other_body_is_refused(ask: Ask, body: bytes) -> None:
    assert not is_answered(ask(body))


@examples(normal=100, long=500)
@given(
    some.sampled_from([32, 31, 0, -1, "32", None, 1 << 70, True, 32.0]),
    some.binary(max_size=40) | some.just(np.ones((1, 8), np.float32).tobytes()),
    some.sampled_from(["", "0", "1", "-1", "+5", "²", "9" * 5000, "exact", "exact", "exact"]),
    some.sampled_from([[1, 8], [8], [0, 8], [1, 0], [2, 4], [1 << 40, 1 << 40]]),
)
def test_binary_data_of_any_size_is_answered_or_refused(
    ask: Ask, size: object, data: bytes, length: str, shape: list[int]
) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({**GOOD, "inputs": [entry, *GOOD["inputs"][1:]]}).encode()
    header = str(len(head)) if length == "exact" else length
    response = ask(head + data, header)
    expected = length == "exact" and size == 32 and type(size) is int and len(data) == 32 and shape == [1, 8]
    assert is_answered(response) is expected


@examples(normal=40, long=1_000)
@given(
    some.text(max_size=8), some.sampled_from(["/infer", "", "/ready", "/versions/1/infer", "/versions/\ud800/infer"])
)
def test_a_path_of_any_form_is_answered_or_refused(ask: Ask, name: str, suffix: str) -> None:
    path = f"/v2/models/{name}{suffix}".encode(errors="replace").decode()
    try:
        response = ask(json.dumps(GOOD).encode(), path=path)
    except httpx.InvalidURL:
        return
    assert response.status_code < 500
