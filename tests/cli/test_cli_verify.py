"""`tvmflow verify`, `keygen` and `sign`: their output, and how `--rebuild` builds a bundle again."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from support.channels import move_channel
from support.releases import describe_bundle, make_release
from tvmflow.bundle import extract, pack, public_key, read_manifest, sha256_file
from tvmflow.store import ReleaseStore, StoreConfig

Command = Callable[..., Any]


@pytest.fixture
def key(tvmflow: Command) -> Path:
    assert tvmflow("keygen", "key").code == 0
    return Path("key").absolute()


@pytest.fixture
def signed(tvmflow: Command, bundle: Path, key: Path) -> Path:
    result = tvmflow("sign", bundle, "--key", key, "-o", "signed.tar.gz")
    assert result.code == 0
    assert sha256_file(Path("signed.tar.gz")) in result.stdout
    return Path("signed.tar.gz")


def test_a_whole_bundle_is_said_to_be_so(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("verify", bundle)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{bundle}: small for native, whole, golden sample within ")


def test_json_has_the_manifest_and_the_error(tvmflow: Command, bundle: Path) -> None:
    document = json.loads(tvmflow("verify", bundle, "--json").stdout)
    assert document["max_abs_error"] < 1e-5
    assert document["manifest"] == json.loads(read_manifest(bundle).to_json())
    assert (document["signed_by"], document["trusted"], document["rebuilt"]) == (None, False, None)


def test_keygen_says_what_is_whose_and_overwrites_nothing(tvmflow: Command, key: Path) -> None:
    result = tvmflow("keygen", key)
    assert (result.code, "a key is never overwritten" in result.sentence) == (2, True)


def test_a_signed_bundle_passes_with_its_key_only(tvmflow: Command, signed: Path, bundle: Path, key: Path) -> None:
    assert "(not checked: no key is trusted here)" in tvmflow("verify", signed).stdout
    result = tvmflow("verify", signed, "--key", "key.pub")
    assert result.stdout.rstrip().endswith(f", signed with {public_key(key)[:16]}")
    assert tvmflow("keygen", "other").code == 0
    assert "which is not trusted here" in tvmflow("verify", signed, "--key", "other.pub").sentence
    assert "is not signed" in tvmflow("verify", bundle, "--key", "key.pub").sentence


def test_where_keys_are_trusted_nothing_else_runs(
    tvmflow: Command, signed: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", "key.pub")
    assert tvmflow("run", signed).code == 0
    for command in ("run", "verify"):
        assert "is not signed" in tvmflow(command, bundle).sentence


def test_sign_without_a_key_says_where_one_is_named(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("sign", bundle)
    assert result.code == 2
    assert "give --key or set TVMFLOW_SIGNING_KEY" in result.stderr


def test_compile_signs_with_the_key_of_the_settings_and_gives_the_same_bytes(
    tvmflow: Command, signed: Path, key: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_SIGNING_KEY", str(key))
    assert tvmflow("compile", models / "small.onnx", "-o", "compiled.tar.gz").code == 0
    assert Path("compiled.tar.gz").read_bytes() == signed.read_bytes()


def test_a_bundle_is_built_again_from_its_onnx_file_in_another_state_folder(
    tvmflow: Command, bundle: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle is of other processes, with another seed of hashes."""
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "elsewhere"))
    result = tvmflow("verify", bundle, "--rebuild", models / "small.onnx", "--json")
    assert result.code == 0, result.stderr
    parts = ["ONNX file", "Relax module", "weights", "samples", "mod.json", "mod.so", "sample.npz", "manifest"]
    assert json.loads(result.stdout)["rebuilt"] == parts


def test_the_log_of_a_rebuild_that_fails_is_where_its_error_says(
    executable: str, environment: dict[str, str], bundle: Path, models: Path, tmp_path: Path
) -> None:
    """A rebuild has a workspace that goes with it."""
    hurried = {**environment, "TVMFLOW_HOME": str(tmp_path / "state"), "TVMFLOW_STEP_TIMEOUT_MINUTES": "0.0001"}
    arguments = [executable, "verify", str(bundle), "--rebuild", str(models / "small.onnx")]
    process = subprocess.run(arguments, env=hurried, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1, process.stderr
    (log,) = re.findall(r"its log is (\S+)$", process.stderr.strip())
    assert Path(log).is_relative_to(tmp_path / "state" / "logs")
    assert Path(log).is_file()


def test_another_model_is_reported_with_the_first_difference(tvmflow: Command, bundle: Path, models: Path) -> None:
    model = onnx.load(models / "small.onnx")
    weights = onnx.numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "weights"))
    onnx.save(model, "other.onnx")
    result = tvmflow("verify", bundle, "--rebuild", "other.onnx")
    assert result.code == 3
    assert "is not what its provenance gives: the first that differs is ONNX file" in result.sentence


def test_a_library_that_was_not_built_from_its_provenance_is_reported(
    tvmflow: Command, bundle: Path, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    manifest = extract(bundle, tmp_path / "files")
    with (tmp_path / "files" / "mod.so").open("ab") as library:
        library.write(b"\0")
    pack(tmp_path / "odd.tar.gz", manifest, {path.name: path for path in (tmp_path / "files").iterdir()})
    assert tvmflow("verify", "odd.tar.gz").code == 0
    result = tvmflow("verify", "odd.tar.gz", "--rebuild", models / "small.onnx")
    assert result.code == 3
    assert "the first that differs is mod.so" in result.sentence


def test_a_release_file_that_differs_is_reported_with_its_section(tvmflow: Command, bundle: Path, models: Path) -> None:
    Path("release.yaml").write_text(f"name: small\nmodel: {{onnx: {models / 'small.onnx'}}}\nbuild: {{opt_level: 2}}\n")
    result = tvmflow("verify", bundle, "--rebuild", "release.yaml")
    assert result.code == 3
    assert "was not built from 'release.yaml' as it is now: build differs" in result.sentence


def test_a_bundle_of_an_older_tvmflow_cannot_be_built_again(tvmflow: Command, models: Path) -> None:
    old = Path(__file__).parents[1] / "bundle" / "files" / "format-1.tar.gz"
    result = tvmflow("verify", old, "--rebuild", models / "small.onnx")
    assert result.code == 1
    assert "does not say with which options it was built" in result.sentence


def test_verify_says_who_signed_a_channel_its_release_and_its_bundles(
    tvmflow: Command, signed: Path, key: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ReleaseStore(StoreConfig("tvmflow", folder=state / "s3" / "tvmflow"))
    store.publish(make_release("small", "1", describe_bundle(signed)), [(signed, sha256_file(signed))])
    move_channel(store, "small", "production", "1")
    short, public = public_key(key)[:16], f"{key}.pub"
    doubtful = tvmflow("verify", "release://small@production")
    assert doubtful.stdout.splitlines() == [
        "channel small@production: not signed",
        "release small 1: not signed",
        f"bundle for native: signed with {short} (not checked: no key is trusted here)",
    ]
    refused = tvmflow("verify", "release://small@production", "--key", public)
    assert (refused.code, "The channel small@production is not signed" in refused.sentence) == (1, True)
    for uri in ("release://small/1", "release://small@production"):
        assert tvmflow("sign", uri, "--key", key).stdout == f"{uri}: signed with {short}\n"
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", public)
    answer = json.loads(tvmflow("verify", "release://small@production", "--json").stdout)
    assert (answer["trusted"], answer["release"]) == (True, "release://small@production")
    assert answer["statements"] == [
        {"what": what, "signed_by": public_key(key)}
        for what in ("channel small@production", "release small 1", "bundle for native")
    ]
    assert tvmflow("keygen", "other").code == 0
    for uri in ("release://small/1", "release://small@production"):
        other = tvmflow("verify", uri, "--key", "other.pub")
        assert (other.code, "which is not trusted here" in other.sentence) == (1, True)
    for arguments in (("verify", uri, "--rebuild", signed), ("sign", uri, "--key", key, "-o", "elsewhere")):
        assert tvmflow(*arguments).code == 2
