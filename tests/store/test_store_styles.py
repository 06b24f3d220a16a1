"""Addressing and checksums on real servers: the bucket in the path or in the host name, boto3's checksums or none."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.channels import move_channel
from support.releases import make_release, make_target
from tvmflow.store import ReleaseStore, StoreConfig, channels

WriteFile = Callable[[bytes], tuple[Path, str]]
MIB = 2**20


def _publish_and_read(config: StoreConfig, write_file: WriteFile, tmp_path: Path) -> list[str]:
    """Publish and read a release; return the address and headers of each request that was sent."""
    store = ReleaseStore(config)
    requests: list[str] = []
    hooks: Any = store.objects
    hooks.s3.meta.events.register(
        "before-send.s3", lambda request, **_: requests.append(f"{request.url} {dict(request.headers)}")
    )
    small, large = write_file(b"a bundle"), write_file(bytes(6 * MIB))
    targets = (make_target(path.name, digest, path.stat().st_size) for path, digest in (small, large))
    release = make_release("resnet", "1", *targets)
    store.publish(release, [small, large])
    assert store.verify_release("resnet", "1") == release
    store.get_blob(small[1], tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"a bundle"
    move_channel(store, "resnet", "production", "1")
    assert [pointer.version for pointer in channels.list_all(store, "resnet")] == ["1"]
    return requests


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_a_release_goes_its_whole_way_with_either_kind_of_checksums(
    server: StoreConfig, write_file: WriteFile, tmp_path: Path, checksums: Any
) -> None:
    requests = _publish_and_read(replace(server, checksums=checksums, part_size=5 * MIB), write_file, tmp_path)
    uses_checksums = any("x-amz-checksum-crc32" in request.lower() for request in requests)
    assert uses_checksums == (checksums == "when_supported")
    assert all(f"/{server.bucket}" in request.split(" ")[0] for request in requests)


def test_a_bucket_is_addressed_as_a_host_name_on_request(
    moto_server: StoreConfig, write_file: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve("127.0.0.1" if str(host).endswith("localhost") else host, *rest, **more),
    )
    endpoint = str(moto_server.endpoint).replace("127.0.0.1", "localhost")
    config = replace(moto_server, endpoint=endpoint, prefix="hosted", path_style=False)
    requests = _publish_and_read(config, write_file, tmp_path)
    assert all(request.startswith(f"http://{config.bucket}.localhost:") for request in requests)
    # It is the same bucket that others address by path.
    assert ReleaseStore(replace(moto_server, prefix="hosted")).list_versions("resnet") == ["1"]
