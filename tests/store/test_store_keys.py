"""Keys of the release store: the names that are allowed, the places of objects, and the order of versions."""

import pytest

from tvmflow.errors import StoreError
from tvmflow.store.keys import blob_key, channel_key, numeric_order, release_key, require_name

A = "a" * 64


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
