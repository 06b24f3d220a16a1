"""What a bundle may just hold, and what goes one step too far."""

import dataclasses
import json
import os
import stat
import tarfile
from collections.abc import Callable
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvmflow.bundle import (
    FileEntry,
    Manifest,
    TensorSpec,
    Variant,
    Versions,
    archive,
    extract,
    installed_versions,
    keygen,
    missing_weights,
    pack,
    public_key,
    read_manifest,
    read_signer,
    sha256_file,
    sign,
)
from tvmflow.bundle.manifest import _version
from tvmflow.bundle.signature import check, trusted_keys
from tvmflow.errors import BundleError, SettingsError, UncheckedBundleError
from tvmflow.hardware.target import Host

WriteFiles = Callable[[Path], dict[str, Path]]
LARGEST = (1 << 63) - 1
DTYPES = [
    "bool", "bfloat16", "float16", "float32", "float64",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip


def spelled(manifest: Manifest, **changes: Any) -> bytes:
    document = {**json.loads(manifest.to_json()), **changes}
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def test_every_part_of_a_manifest_comes_back(manifest: Manifest) -> None:
    tensors = tuple(TensorSpec(dtype, (0, LARGEST, "n"), dtype) for dtype in DTYPES)
    full = dataclasses.replace(
        manifest,
        name="é b",
        cpu_features=("avx2", "fma"),
        threads=LARGEST,
        inputs=tensors,
        outputs=(TensorSpec("", (), "bool"),),
        dimensions={"n": (0, None), "m": (5, 5), "k": (0, LARGEST)},
        variants=(Variant("main_1", {"n": 0}), Variant("main_2", {"n": LARGEST}), Variant("main_3", {})),
        weights="apart",
        versions=Versions("1", "2", "3", "4"),
        provenance={"a": "b", "": ""},
        files={"mod.so": FileEntry("0123456789abcdef" * 4, 0), "mod.json": FileEntry("f" * 64, LARGEST)},
    )
    assert Manifest.from_json(full.to_json(), "b") == full
    assert full.to_json() == spelled(full)
    assert Manifest.from_json(spelled(full, later="ignored"), "b") == full


def test_a_bundle_may_be_built_for_one_thread(manifest: Manifest) -> None:
    single = dataclasses.replace(manifest, threads=1)
    assert Manifest.from_json(single.to_json(), "b") == single


@pytest.mark.parametrize("number", [-(1 << 63), (1 << 64) - 1])
def test_integers_of_64_bits_come_back(manifest: Manifest, number: int) -> None:
    data = dataclasses.replace(manifest, tvm_target={"kind": "llvm", "x": number}).to_json()
    assert Manifest.from_json(data, "b").tvm_target["x"] == number


@pytest.mark.parametrize("number", [-(1 << 63) - 1, 1 << 64])
def test_integers_that_other_readers_would_round_are_refused(manifest: Manifest, number: int) -> None:
    data = dataclasses.replace(manifest, tvm_target={"kind": "llvm", "x": number}).to_json()
    with pytest.raises(BundleError, match="more than 64 bits"):
        Manifest.from_json(data, "b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", LARGEST + 1),
        ("threads", False),
        ("dimensions", {"n": [LARGEST + 1, None]}),
        ("dimensions", {"n": [2, 1]}),
        ("dimensions", {"n": [None, 1]}),
        ("dimensions", {"n": [True, 1]}),
        ("dimensions", {"n": [1, 2, 3]}),
        ("dimensions", {"n\n": [1, 2]}),
        ("files", {"mod.so": {"sha256": "0" * 65, "size": 1}}),
        ("files", {"mod.so": {"sha256": "g" + "0" * 63, "size": 1}}),
        ("files", {"mod.so": {"sha256": "0" * 64, "size": LARGEST + 1}}),
        ("files", {"mod.so": {"sha256": "0" * 64, "size": False}}),
        ("inputs", [{"name": "x", "shape": [LARGEST + 1], "dtype": "bool"}]),
        ("inputs", [{"name": "x", "shape": [True], "dtype": "bool"}]),
        ("inputs", [{"name": "x", "shape": ["a\u202eb"], "dtype": "bool"}]),
        ("inputs", [{"name": "x", "shape": [], "dtype": "float8"}]),
        ("variants", [{"function": "f", "sizes": {"batch": LARGEST + 1}}]),
        ("cpu_features", ["a\x7f"]),
        ("weights", "Inside"),
    ],
)
def test_a_value_one_step_too_far_is_refused(manifest: Manifest, key: str, value: object) -> None:
    with pytest.raises(BundleError, match="'there'"):
        Manifest.from_json(spelled(manifest, **{key: value}), "there")


def test_a_message_shows_the_beginning_of_a_wrong_value_only(manifest: Manifest) -> None:
    for changes in ({"format": "9" * 10_000}, {"weights": "w" * 10_000}):
        with pytest.raises(BundleError) as caught:
            Manifest.from_json(spelled(manifest, **changes), "there")
        assert 200 < len(str(caught.value)) < 300


def test_the_machine_of_a_bundle_is_checked_by_architecture_features_and_versions(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Host("x86_64", frozenset({"avx2", "fma"}), 2)
    monkeypatch.setattr("tvmflow.bundle.manifest.host", lambda: machine)
    monkeypatch.setattr("tvmflow.hardware.target.host", lambda: machine)
    own = dataclasses.replace(manifest, arch="x86_64", cpu_features=("fma", "avx2"))
    own.check_host()
    dataclasses.replace(own, arch="").check_host()
    for host_target, is_accepted in (
        ({"mtriple": "x86_64-linux-gnu"}, True),
        ({"mtriple": ""}, True),
        ({"mtriple": "aarch64-linux-gnu"}, False),
    ):
        gpu = dataclasses.replace(own, arch="cuda", tvm_target={"host": host_target})
        if is_accepted:
            gpu.check_host()
        else:
            with pytest.raises(BundleError, match="aarch64"):
                gpu.check_host()
    running = installed_versions()
    for name in ("tvm", "tvm_ffi"):
        major, minor, *_ = getattr(running, name).split(".")
        for version, is_accepted in (
            (f"{major}.{minor}", True),
            (f"{major}.{minor}.999.post7", True),
            (f"{major}.{int(minor) + 1}.0", False),
            (f"{int(major) + 1}.{minor}.0", False),
        ):
            foreign = dataclasses.replace(own, versions=dataclasses.replace(own.versions, **{name: version}))
            if is_accepted:
                foreign.check_host()
            else:
                with pytest.raises(BundleError, match=rf"{name.replace('_', '-')} {version}"):
                    foreign.check_host()
    dataclasses.replace(own, versions=dataclasses.replace(own.versions, tvmflow="0", llvm="0")).check_host()


def test_versions_are_those_of_the_installed_packages_and_a_missing_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> metadata.Distribution:
        if name == "apache-tvm":
            raise metadata.PackageNotFoundError(name)
        return metadata.distribution(name)

    monkeypatch.setattr("tvmflow.bundle.manifest.distribution", find)
    monkeypatch.setattr("tvmflow.bundle.manifest._version", _version.__wrapped__)
    expected = (metadata.version("tvmflow"), "none", metadata.version("apache-tvm-ffi"), "19")
    assert installed_versions("19") == Versions(*expected)
    assert installed_versions().llvm == ""


def test_a_bundle_that_just_fits_on_the_disk_is_extracted(
    bundle: Path, content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, content.values()))
    for free, name in ((size, "enough"), (size - 1, "less")):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        if free == size:
            extract(bundle, tmp_path / name)
        else:
            with pytest.raises(UncheckedBundleError, match="MiB"):
                extract(bundle, tmp_path / name)
        assert len(list((tmp_path / name).iterdir())) == (3 if free == size else 0)


@pytest.mark.parametrize("name", ["_MANIFEST_LIMIT", "_SIGNATURE_LIMIT", "_LARGEST_MEMBER"])
def test_a_member_of_the_largest_size_is_read_and_a_larger_one_refused(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keygen(tmp_path / "key")
    bundle = tmp_path / "signed.tar.gz"
    complete = pack(bundle, manifest, write_files(tmp_path / "files"), key=tmp_path / "key")
    sizes = {
        "_MANIFEST_LIMIT": len(complete.to_json()),
        "_SIGNATURE_LIMIT": len("ed25519 ") + 64 + 1 + 128 + 1,
        "_LARGEST_MEMBER": max(entry.size for entry in complete.files.values()),
    }
    for limit, folder in ((sizes[name], tmp_path / "read"), (sizes[name] - 1, tmp_path / "refused")):
        folder.mkdir()
        monkeypatch.setattr(f"tvmflow.bundle.archive.{name}", limit)
        if limit == sizes[name]:
            extract(bundle, folder, trusted=[tmp_path / "key.pub"])
            continue
        with pytest.raises(BundleError):
            extract(bundle, folder)
        if name == "_LARGEST_MEMBER":
            with pytest.raises(BundleError, match=r"mod\.so"):
                pack(tmp_path / "larger.tar.gz", manifest, write_files(tmp_path / "files"))
            assert not (tmp_path / "larger.tar.gz").exists()


def test_the_largest_member_is_the_largest_that_tar_has_digits_for() -> None:
    for size, is_possible in ((archive._LARGEST_MEMBER, True), (archive._LARGEST_MEMBER + 1, False)):
        info = tarfile.TarInfo("mod.params")
        info.size = size
        if is_possible:
            assert tarfile.TarInfo.frombuf(info.tobuf(tarfile.USTAR_FORMAT), "ascii", "strict").size == size
        else:
            with pytest.raises(ValueError, match="overflow"):
                info.tobuf(tarfile.USTAR_FORMAT)


def test_a_bundle_may_unpack_to_as_many_times_its_size_and_no_more(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bundle.stat().st_size
    unpacked = int.from_bytes(bundle.read_bytes()[-4:], "little")
    for limit in (unpacked, unpacked - 1):
        monkeypatch.setattr("tvmflow.bundle.archive._LARGEST_RATIO", Fraction(limit, packed))
        if limit == unpacked:
            missing_weights(bundle)
            extract(bundle, _folder(bundle))
        else:
            with pytest.raises(BundleError, match="unpacks to more"):
                extract(bundle, _folder(bundle))


def _folder(bundle: Path) -> Path:
    path = bundle.with_name(f"out-{len(list(bundle.parent.iterdir()))}")
    path.mkdir()
    return path


def test_small_chunks_and_reads_give_the_same_files(
    bundle: Path, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk, read in ((1, 1), (7, 3), (512, 1 << 20)):
        monkeypatch.setattr("tvmflow.bundle.archive._CHUNK", chunk)
        monkeypatch.setattr("tvmflow.bundle.archive._READ", read)
        folder = _folder(bundle)
        extract(bundle, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == content


def test_a_bundle_is_readable_by_all_and_packing_makes_its_folder(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    destination = tmp_path / "new" / "folder" / "bundle.tar.gz"
    files = write_files(tmp_path / "files")
    complete = pack(destination, manifest, files)
    assert stat.S_IMODE(destination.stat().st_mode) == 0o644
    assert list(destination.parent.iterdir()) == [destination]
    assert complete.files == {name: FileEntry(sha256_file(path), path.stat().st_size) for name, path in files.items()}
    assert list(complete.files) == sorted(files)
    assert read_manifest(destination) == complete
    with pytest.raises(ValueError, match="evil, other"):
        pack(destination, manifest, {**files, "other": files["mod.so"], "evil": files["mod.so"]})
    with pytest.raises(BundleError, match="'small\\\\n'"):
        pack(tmp_path / "bad.tar.gz", dataclasses.replace(manifest, name="small\n"), files)
    assert not (tmp_path / "bad.tar.gz").exists()


def test_keys_are_written_for_their_owner_and_never_over_another_file(tmp_path: Path) -> None:
    public = keygen(tmp_path / "key")
    assert public == tmp_path / "key.pub"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "key", public)]
    assert modes == [0o600, 0o644 & ~_umask()]
    assert public_key(tmp_path / "key") == public_key(public)
    assert len(bytes.fromhex(public_key(public))) == 32
    (tmp_path / "other.pub").write_text("mine")
    for name in ("key", "other"):
        with pytest.raises(SettingsError, match=name):
            keygen(tmp_path / name)
    assert (tmp_path / "other.pub").read_text() == "mine"
    assert not (tmp_path / "other").exists()
    with pytest.raises(SettingsError, match="absent"):
        keygen(tmp_path / "absent" / "key")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_trusted_keys_are_listed_as_a_path_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (
        (None, ()),
        ("", ()),
        ("a", (Path("a"),)),
        (f"a{os.pathsep}{os.pathsep}b/c", (Path("a"), Path("b/c"))),
    ):
        if value is None:
            monkeypatch.delenv("TVMFLOW_TRUSTED_KEYS", raising=False)
        else:
            monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", value)
        assert trusted_keys() == expected
    # Of variables that were to be joined, none was set.
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", os.pathsep)
    with pytest.raises(SettingsError, match="TVMFLOW_TRUSTED_KEYS is ':', which names no key; name the files"):
        trusted_keys()


def test_a_signature_is_of_these_bytes_by_a_trusted_key(tmp_path: Path) -> None:
    from tvmflow.bundle.signature import sign as sign_bytes

    public = keygen(tmp_path / "key")
    other = keygen(tmp_path / "other")
    line = sign_bytes(b"manifest", tmp_path / "key")
    assert line.split()[:2] == [b"ed25519", public_key(public).encode()]
    assert line == sign_bytes(b"manifest", tmp_path / "key")
    check(b"manifest", line, [other, public], "b")
    check(b"manifest", line, [tmp_path / "key"], "b")
    check(b"anything", None, [], "b")
    check(b"anything", b"damaged", [], "b")
    for data, signature, trusted in (
        (b"manifest!", line, [public]),
        (b"manifest", line, [other]),
        (b"manifest", None, [public]),
        (b"manifest", line + b"\n", [public]),
        (b"manifest", line.upper(), [public]),
    ):
        with pytest.raises(BundleError, match="'b'"):
            check(data, signature, trusted, "b")


@pytest.mark.parametrize("size", [1 << 14, (1 << 14) + 100])
def test_the_beginning_of_a_key_file_is_read(tmp_path: Path, size: int) -> None:
    keygen(tmp_path / "key")
    text = (tmp_path / "key").read_bytes()
    padded = tmp_path / "padded"
    padded.write_bytes(b"\n" * (size - len(text)) + text)
    if size > 1 << 14:
        with pytest.raises(SettingsError, match="padded"):
            public_key(padded)
    else:
        assert public_key(padded) == public_key(tmp_path / "key")


def test_weights_are_signed_with_the_rest_and_looked_for_by_digest(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    keygen(tmp_path / "key")
    files = write_files(tmp_path / "files")
    weights = tmp_path / "files" / "mod.params"
    weights.write_bytes(b"weights" * 100)
    bundle = tmp_path / "apart.tar.gz"
    apart = dataclasses.replace(manifest, weights="apart")
    complete = pack(bundle, apart, {**files, "mod.params": weights}, key=tmp_path / "key", leave_weights_out=True)
    entry = missing_weights(bundle)
    assert entry == complete.files["mod.params"] == FileEntry(sha256_file(weights), 700)
    assert read_signer(bundle) == public_key(tmp_path / "key")
    beside = bundle.with_name(entry.sha256)
    for wrong in (None, b"", b"weights" * 99, b"Weights" * 100):
        if wrong is not None:
            beside.write_bytes(wrong)
        folder = _folder(bundle)
        with pytest.raises(BundleError, match=r"apart\.tar\.gz"):
            extract(bundle, folder)
        assert not (folder / "mod.params").exists()
    beside.write_bytes(weights.read_bytes())
    folder = _folder(bundle)
    assert extract(bundle, folder, trusted=[tmp_path / "key.pub"]) == complete
    assert (folder / "mod.params").read_bytes() == weights.read_bytes()
    signed = tmp_path / "complete.tar.gz"
    sign(bundle, tmp_path / "key", signed)
    assert missing_weights(signed) is None
