"""Release documents: one spelling, a format number that readers honour, and the blobs that they refer to."""

import json
from typing import Any

import pytest

from tvmflow.errors import StoreError
from tvmflow.store.documents import RELEASE_FORMAT, decode, encode, list_references
from tvmflow.store.keys import blob_key, channel_key, numeric_order, release_key, require_name

A, B, C = "a" * 64, "b" * 64, "c" * 64
URI = "s3://models/releases/resnet/1/release.json"


def test_equal_documents_are_equal_bytes() -> None:
    assert encode("m", "1", {"b": "ü", "a": (1, 2)}) == encode("m", "1", {"a": [1, 2], "b": "ü"})
    assert encode("m", "1", {"b": "ü", "a": [1]}) == '{\n  "a": [\n    1\n  ],\n  "b": "ü"\n}\n'.encode()


def test_a_document_comes_back_as_it_was_written() -> None:
    document = {"format": RELEASE_FORMAT, "name": "m", "targets": [{"p50": 0.5}]}
    assert decode(encode("m", "1", document), URI) == document


def test_a_document_without_a_format_is_one_of_the_first() -> None:
    assert decode(b'{"name": "m"}', URI) == {"name": "m"}


def test_a_document_of_a_newer_format_asks_for_an_upgrade() -> None:
    with pytest.raises(StoreError, match=rf"{URI} has format {RELEASE_FORMAT + 1}, .* upgrade"):
        decode(json.dumps({"format": RELEASE_FORMAT + 1}).encode(), URI)


@pytest.mark.parametrize("number", [0, -1, True, "1", 1.0, None, [1]])
def test_a_format_that_is_no_number_is_damage(number: Any) -> None:
    with pytest.raises(StoreError, match=f"{URI} is damaged"):
        decode(json.dumps({"format": number}).encode(), URI)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"1", b'"text"', b"null", b"[" * 100_000])
def test_what_is_no_json_object_is_damage(content: bytes) -> None:
    with pytest.raises(StoreError, match=f"{URI} is damaged"):
        decode(content, URI)


def test_a_document_too_deep_for_json_is_refused_with_the_release() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(StoreError, match="resnet 7"):
        encode("resnet", "7", {"value": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1: "one", "two": 2}, object()])
def test_a_value_that_json_cannot_hold_is_refused_with_the_release(value: Any) -> None:
    with pytest.raises(StoreError, match="resnet 7 cannot be written"):
        encode("resnet", "7", {"value": value})


def test_references_are_read_at_any_depth_with_their_sizes() -> None:
    document = {
        "targets": [{"bundle": {"sha256": A, "size": 8}}, ({"weights": {"sha256": B}},)],
        "report": f"s3://models/prefix/blobs/sha256/{C}",
        "again": {"sha256": A, "size": 9},
        "size": 3,
    }
    assert list_references(document) == {A: {8, 9}, B: set(), C: set()}


def test_what_only_looks_like_a_reference_is_none() -> None:
    document = {
        "longer": f"blobs/sha256/{A}/more",
        "beside": f"myblobs/sha256/{A}",
        "other": f"blobs/sha1/{A}",
        "number": {"sha256": 7},
        "nothing": {"sha256": None},
    }
    assert list_references(document) == {}
    assert list_references({"at the start": f"blobs/sha256/{A}"}) == {A: set()}


def test_a_size_that_is_no_number_is_not_compared() -> None:
    assert list_references({"sha256": A, "size": "8"}) == {A: set()}


def test_references_come_in_the_order_of_the_document() -> None:
    document = {"x": {"sha256": C, "inner": {"sha256": A}}, "y": [{"sha256": B}]}
    assert list(list_references(document)) == [C, A, B]


@pytest.mark.parametrize("digest", ["", "abc", "A" * 64, "0" * 65])
def test_a_reference_that_is_no_digest_is_refused(digest: str) -> None:
    with pytest.raises(StoreError, match="SHA-256"):
        list_references({"sha256": digest})


def test_a_deep_document_is_searched_too() -> None:
    document: Any = {"sha256": A}
    for _ in range(5000):
        document = [document]
    assert list_references({"deep": document}) == {A: set()}


def test_keys_are_those_that_the_reference_names() -> None:
    assert blob_key(A) == f"blobs/sha256/{A}"
    assert release_key("resnet", "1.0") == "releases/resnet/1.0/release.json"
    assert channel_key("resnet", "production") == "channels/resnet/production.json"


@pytest.mark.parametrize("text", ["a", "_", "0", "a.b-c_d", "A" * 128])
def test_plain_names_are_taken(text: str) -> None:
    require_name("name", text)


@pytest.mark.parametrize("text", ["", ".", "..", ".a", "-a", "a/b", "a b", "ü", "a\n", "A" * 129])
def test_other_names_are_refused_with_their_role(text: str) -> None:
    with pytest.raises(StoreError, match="release role"):
        require_name("role", text)
    for key in (release_key, channel_key):
        with pytest.raises(StoreError, match="release name"):
            key(text, "1")
    with pytest.raises(StoreError, match="release version"):
        release_key("m", text)
    with pytest.raises(StoreError, match="release channel"):
        channel_key("m", text)


def test_versions_sort_by_their_numbers() -> None:
    versions = ["10", "9", "1.10", "1.9", "v2", "2", "a1b10", "a1b9"]
    assert sorted(versions, key=numeric_order) == ["1.9", "1.10", "2", "9", "10", "a1b9", "a1b10", "v2"]
