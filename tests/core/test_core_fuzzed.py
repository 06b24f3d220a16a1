"""Release files, documents, targets and shapes of any form: each is read, or refused in one sentence with the fault."""

import copy
import json
from datetime import date
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from support.fuzzing import examples
from tvmflow.cli.compile import parse_shapes
from tvmflow.documents.encoding import Document, decode, encode
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import Verdict
from tvmflow.errors import SpecError, StoreError, TargetError
from tvmflow.hardware.target import presets, resolve
from tvmflow.runtime.tracker import Address
from tvmflow.spec import Spec, amend, load, parse, template, to_document
from tvmflow.spec.messages import printable
from tvmflow.store.channel_document import Channel

Keys = tuple[str | int, ...]

DOCUMENT: dict[str, Any] = {
    **yaml.safe_load(template("fuzzed")),
    "model": {"factory": "model:create", "arguments": {"width": 3}},
    "train": {"function": "train:train", "arguments": {"epochs": 5}, "reads": ["data.csv"]},
    "inputs": [
        {"name": "x", "shape": ["batch", 3], "samples": {"kind": "uniform", "low": 0, "high": 2}},
        {"name": "ids", "shape": ["batch"], "dtype": "int64", "samples": {"kind": "integers", "low": 0, "high": 9}},
    ],
    "outputs": ["scores"],
    "export": {"opset": 18, "options": {"a": 1}},
    "targets": ["native", {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "mattr": ["+avx2"]}],
    "build": {"opt_level": 3, "disabled_passes": ["FuseOps"], "config": {"a": True}, "precision": "fp32"},
    "tune": {"until": "2%", "trials": 8},
    "validate": {"samples": 2, "task": {"dataset": "data:held_out", "metric": "metrics:f1", "drop": 0.1}},
    "benchmark": {"repeats": 5, "peers": ["onnxruntime"]},
    "gates": {"max_latency_ms": 20.5, "max_ratio_onnxruntime": 1.0},
    "channels": {"staging": {"automatic": True}, "production": {"after": "staging", "gates": {"min_metric": 0.5}}},
    "retrain": {"channel": "production", "min_gain": -0.1},
    "registry": {"tags": {"team": "vision"}},
    "store": {"bucket": "models"},
}

WORDS = [
    "",
    "-",
    "2%",
    "%",
    "x:y",
    "a:b:c",
    "native",
    "cuda-sm90",
    "batch",
    "é",
    "\ud800",
    "\x1b[2J",
    "²",
    "9" * 5000,
    "\0",
]
LEAVES: Any = (
    some.sampled_from(
        [None, True, False, 0, -1, 1 << 70, 10**400, 0.5, float("nan"), float("inf"), date(2024, 1, 2), b"x"]
    )
    | some.sampled_from(WORDS)
    | some.text(max_size=8)
)
VALUES = some.recursive(
    LEAVES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(LEAVES, inner, max_size=3),
    max_leaves=6,
)


def places(part: Any, keys: Keys = ()) -> list[Keys]:
    """The keys that lead to every value of a document."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [*([keys] if keys else []), *(place for key, value in items for place in places(value, (*keys, key)))]


def find(document: Any, keys: Keys) -> Any:
    """The value of a document at a place."""
    for key in keys:
        document = document[key]
    return document


PLACES = places(DOCUMENT)
FORMATS = Path(__file__).parents[1] / "store" / "formats"
"""Documents as older versions of tvmflow wrote them."""


def read(document: object, folder: Path) -> Spec | str:
    """The specification of a document, or the sentence that refuses it."""
    try:
        return parse(document, folder, "release.yaml")
    except SpecError as error:
        return checked(error)


def checked(error: Exception) -> str:
    sentence = str(error)
    assert sentence.isprintable(), repr(sentence)
    return sentence


def mentions(error: Exception, value: str) -> None:
    assert value in str(error)


def changed(whole: dict[str, Any], place: Keys, action: str, value: object, key: str = "") -> dict[str, Any]:
    """A document with the value at a place replaced or removed, or with another one of the name `key` beside it."""
    document = copy.deepcopy(whole)
    parent: Any = document
    for part in place[:-1]:
        parent = parent[part]
    if action == "remove":
        del parent[place[-1]]
    elif action == "add" and isinstance(parent, dict):
        parent[key] = value
    else:
        parent[place[-1]] = value
    return document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.csv").touch()
    return tmp_path


def test_the_fuzzed_document_is_a_release_file(folder: Path) -> None:
    assert isinstance(read(DOCUMENT, folder), Spec)
    assert len(PLACES) > 70


@examples(normal=75, long=1_000)
@given(some.sampled_from(PLACES), some.sampled_from(["replace", "remove", "add"]), VALUES, some.text(max_size=8))
def test_a_changed_document_is_read_or_refused_by_the_name_of_what_is_wrong(
    folder: Path, place: Keys, action: str, value: object, key: str
) -> None:
    spec = read(changed(DOCUMENT, place, action, value, key), folder)
    if isinstance(spec, Spec):
        # A specification can be copied with a change, and pickled for another process.
        assert amend(spec, {"tune.trials": 3}).tune.trials == 3
        json.dumps(to_document(spec))
    else:
        assert spec.startswith("release.yaml: ")
        names = [part for part in (*place, key) if isinstance(part, str)]
        texts = [*filter(None, names), *map(repr, names), repr(value)]
        assert any(text in spec for text in texts), (place, spec)


DOCUMENTS: list[tuple[type[Document], dict[str, Any]]] = [
    (kind, json.loads(path.read_text()))
    for kind in (Release, Verdict, Channel)
    for path in sorted(FORMATS.glob(f"{kind.__name__.lower()}-*.json"))
]
JSON_VALUES = some.recursive(
    some.sampled_from([None, True, False, 0, -1, 10**400, 0.5, 1e300, float("nan"), float("inf"), *WORDS])
    | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@examples(normal=150, long=3_000)
@given(
    some.sampled_from(DOCUMENTS),
    some.data(),
    some.sampled_from(["replace", "remove", "add"]),
    JSON_VALUES,
    some.text(max_size=8),
)
def test_a_changed_document_of_the_store_is_read_whole_or_refused_by_file_and_field(
    case: tuple[type[Document], dict[str, Any]], data: some.DataObject, action: str, value: object, key: str
) -> None:
    kind, whole = case
    place = data.draw(some.sampled_from(places(whole)))
    try:
        document = decode(kind, json.dumps(changed(whole, place, action, value, key)).encode(), "s3://models/document")
    except StoreError as error:
        mentions(error, "s3://models/document")
        sentence = checked(error)
        names = [*place, key, *(value if isinstance(value, dict) else ())]
        assert any(printable(str(name) or "''") in sentence for name in names), sentence
    else:
        content = encode(document)
        assert decode(kind, content, "") == document
        assert encode(decode(kind, content, "")) == content


@examples(normal=100, long=3_000)
@given(some.sampled_from(DOCUMENTS), some.data())
def test_every_value_of_a_document_survives_being_read_and_written(
    case: tuple[type[Document], dict[str, Any]], data: some.DataObject
) -> None:
    """A float that is replaced by another float, and so on, is in the document that is read and written again."""
    kind, whole = case
    values = {float: some.floats(1e-9, 1e9), int: some.integers(1, 2**40), str: some.text(max_size=8)}
    at = [keys for keys in places(whole) if type(find(whole, keys)) in values and keys != ("format",)]
    place = data.draw(some.sampled_from(at))
    value = data.draw(values[type(find(whole, place))])
    try:
        document = decode(kind, json.dumps(changed(whole, place, "replace", value)).encode(), "")
    except StoreError:
        # Of a text, not every one is allowed, and a number of answers must be that of their bits.
        assert isinstance(value, str) or place[-2:] == ("answers", "count")
    else:
        assert find(json.loads(encode(document)), place) == value


@examples(normal=30, long=500)
@given(some.data())
def test_a_damaged_text_is_read_or_refused(folder: Path, data: some.DataObject) -> None:
    text = data.draw(some.sampled_from([template("fuzzed"), yaml.safe_dump(DOCUMENT)]))
    for _ in range(data.draw(some.integers(1, 3))):
        start = data.draw(some.integers(0, len(text)))
        end = min(len(text), start + data.draw(some.integers(0, 20)))
        text = (
            text[:start]
            + data.draw(some.text(alphabet=some.sampled_from("{}[]:-&*!|>'\"%@`#,?\n\t x1é\0"), max_size=6))
            + text[end:]
        )
    path = folder / "release.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load(path)
    except SpecError as error:
        mentions(error, str(path))
        checked(error)


@examples(normal=30, long=500)
@given(some.binary(max_size=60) | VALUES.map(lambda value: repr(value).encode(errors="replace")))
def test_any_bytes_are_refused_as_a_release_file(folder: Path, content: bytes) -> None:
    path = folder / "release.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(path) in checked(caught.value)


OPTIONS = [
    "-mcpu=x86-64-v3",
    "-mcpu",
    "x86-64-v3",
    "-mattr=+avx2",
    "-mattr=avx2",
    "-num-cores",
    "4",
    "-num-cores=²",
    "=",
]
TARGETS = (
    some.sampled_from(sorted(presets())).flatmap(
        lambda name: some.sampled_from([name, name[:-1], f" {name}\n", name.upper()])
    )
    | some.lists(some.sampled_from(["llvm", "cuda", "c", *OPTIONS]) | some.text(max_size=5), max_size=5).map(" ".join)
    | some.text(max_size=12)
    | VALUES.map(lambda value: repr(value))
    | some.sampled_from(
        [
            "{" * 5000,
            '{"a":' * 5000,
            '{"kind": "llvm", "num-cores": ' + "9" * 5000 + "}",
            "llvm -num-cores " + "9" * 5000,
        ]
    )
)
TARGET_KEYS = ["kind", "mtriple", "mattr", "num-cores", "host", "arch", "keys", "libs"]


@examples(normal=75, long=1_000)
@given(
    TARGETS | some.dictionaries(some.sampled_from(TARGET_KEYS), VALUES | some.sampled_from(["llvm", "cuda", ["+avx2"]]))
)
def test_a_target_is_resolved_or_refused(text: Any) -> None:
    try:
        target = resolve(text)
    except TargetError as error:
        mentions(error, "target")
        checked(error)
    else:
        assert resolve(target.canonical).canonical == target.canonical
        assert target.threads >= 1
        assert set(target.features) == set(map(str, target.features))


@examples(normal=50, long=1_000)
@given(
    some.lists(
        some.sampled_from(["x", ":", "[", "]", ",", "1", "224", " ", "-", "--5", "²", "٣", "n", '"', "'", "9" * 5000]),
        max_size=12,
    ).map("".join)
    | some.text(max_size=12)
)
def test_shapes_are_read_or_refused(text: str) -> None:
    try:
        shapes = parse_shapes(text)
    except click.BadParameter as error:
        checked(error)
    else:
        for name, shape in shapes.items():
            assert isinstance(name, str)
            assert all(isinstance(size, int | str) for size in shape)


@examples(normal=30, long=500)
@given(
    some.lists(
        some.sampled_from(["host", ":", "[", "]", "::1", "80", "0", "65536", "²", "-1", "9" * 5000]), max_size=5
    ).map("".join)
)
def test_an_address_is_read_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError as error:
        mentions(error, repr(text))
    else:
        assert 0 < address.port < 65536
