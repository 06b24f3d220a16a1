"""What a user or a machine can get wrong: one sentence, a non-zero exit, and nothing published."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.databases import Databases
from support.servers import free_port

_INPUTS = [{"name": "x", "shape": ["batch", 4]}]

_MODELS = """
from torch import nn


def raising():
    raise RuntimeError("no such checkpoint")


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1

"""


@pytest.fixture(autouse=True)
def _a_small_model(tmp_path: Path, make: Any) -> None:
    make.onnx(tmp_path)
    (tmp_path / "faulty.py").write_text(_MODELS)


def _refused(machine: Any, file: Path, code: int = 1) -> str:
    """The one sentence of a release that must fail without publishing anything."""
    result = machine.release(file)
    assert result.code == code, (result.stdout, result.stderr)
    assert result.document["error"]["message"] == result.sentence
    assert machine.nothing_is_published()
    if (machine.home / "mlflow" / "mlflow.db").exists():
        assert machine.versions("tiny") == []
    return str(result.sentence)


# -- The release file --------------------------------------------------------------------------------------------------


def test_a_missing_release_file(fresh_machine: Any, tmp_path: Path) -> None:
    sentence = _refused(fresh_machine, tmp_path / "none.yaml", code=2)
    assert "none.yaml" in sentence
    assert "tvmflow init" in sentence


def test_a_release_file_that_is_no_yaml(fresh_machine: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("name: tiny\nmodel: {onnx: [\n")
    sentence = _refused(fresh_machine, tmp_path / "broken.yaml", code=2)
    assert "line" in sentence


def test_an_unknown_key(fresh_machine: Any, tmp_path: Path, make: Any) -> None:
    sentence = _refused(fresh_machine, make.file(tmp_path, tragets=["native"]), code=2)
    assert "'tragets'" in sentence
    assert "'targets'" in sentence


def test_a_model_file_that_is_not_there(fresh_machine: Any, tmp_path: Path, make: Any) -> None:
    sentence = _refused(fresh_machine, make.file(tmp_path, model={"onnx": "other.onnx"}), code=2)
    assert "other.onnx" in sentence


def test_an_unknown_target(fresh_machine: Any, tmp_path: Path, make: Any) -> None:
    sentence = _refused(fresh_machine, make.file(tmp_path, targets=["x86-64-v5"]), code=2)
    assert "'x86-64-v5'" in sentence


def test_an_unknown_setting(fresh_machine: Any, tmp_path: Path, make: Any) -> None:
    settings = tmp_path / "machine.toml"
    settings.write_text("s3_endpiont = 'http://127.0.0.1:1'\n")
    wrong = replace(fresh_machine, settings={**fresh_machine.settings, "TVMFLOW_SETTINGS": str(settings)})
    result = wrong.release(make.file(tmp_path))
    assert result.code == 2
    assert "'s3_endpiont'" in result.sentence


# -- The model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("raising", "RuntimeError: no such checkpoint"),
        pytest.param("Branching", "ONNX", marks=pytest.mark.long),
    ],
)
def test_a_factory_whose_model_cannot_be_exported(
    machine: Any, tmp_path: Path, make: Any, factory: str, reason: str
) -> None:
    sentence = _refused(machine, make.file(tmp_path, model={"factory": f"faulty:{factory}"}, inputs=_INPUTS))
    assert f"faulty:{factory}" in sentence
    assert reason in sentence


def test_a_function_that_shows_samples_and_is_not_there(machine: Any, tmp_path: Path, make: Any) -> None:
    sentence = _refused(machine, make.file(tmp_path, inputs=_INPUTS, validate={"show": "faulty:shwo"}))
    assert "'faulty:shwo': module 'faulty' has no 'shwo'" in sentence


@pytest.mark.long  # The factory above fails in the same step.
def test_a_corrupt_onnx_file(machine: Any, tmp_path: Path, make: Any) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(model.read_bytes()[:-40])
    assert "model.onnx'" in _refused(machine, make.file(tmp_path))


def test_an_operator_that_tvm_does_not_know(machine: Any, tmp_path: Path, make: Any) -> None:
    make.onnx(tmp_path, [helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")], {}, (3, 2, 4))
    sentence = _refused(machine, make.file(tmp_path))
    assert "RandomNormalLike" in sentence
    assert "noise" in sentence
    assert "model.onnx" in sentence
    assert str(machine.home) not in sentence


def test_an_input_that_is_not_the_model_s(machine: Any, tmp_path: Path, make: Any) -> None:
    sentence = _refused(machine, make.file(tmp_path, inputs=[{"name": "x", "shape": ["batch", 5]}]))
    assert [name for name in ("'x'", "[batch, 4]", "[batch, 5]") if name not in sentence] == []


@pytest.mark.long
def test_held_out_data_that_does_not_fit(machine: Any, tmp_path: Path, make: Any) -> None:
    returned = "{'x': np.zeros((2, 5), np.float32)}, np.zeros(2)"
    (tmp_path / "wrong.py").write_text(f"import numpy as np\n\n\ndef held_out():\n    return {returned}\n")
    sentence = _refused(machine, make.file(tmp_path, validate={"task": {"dataset": "wrong:held_out"}}))
    assert "'wrong:held_out'" in sentence


# -- The target --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("llvm -mcpu=pentium9", "'pentium9'"),
        pytest.param("llvm -mtriple=riscv64-linux-gnu", "'riscv64'", marks=pytest.mark.long),
        pytest.param({"kind": "metal"}, "'metal'", marks=pytest.mark.long),
    ],
)
def test_a_target_that_this_tvm_cannot_build(
    fresh_machine: Any, tmp_path: Path, make: Any, target: object, reason: str
) -> None:
    assert reason in _refused(fresh_machine, make.file(tmp_path, targets=[target]), code=2)


@pytest.mark.parametrize(
    ("target", "compiler"),
    [
        ("aarch64-cortex-a72", "aarch64-linux-gnu-g++"),
        pytest.param("native", "C++ compiler", marks=pytest.mark.long),
    ],
)
def test_a_target_whose_compiler_is_not_installed(
    machine: Any, tmp_path: Path, make: Any, target: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No compiler is found in a folder that does not exist, wherever these tests run.
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    sentence = _refused(machine, make.file(tmp_path, targets=[target], gates={"unverified_targets": "allow"}))
    assert repr(target) in sentence
    assert compiler in sentence


# -- The servers -------------------------------------------------------------------------------------------------------


def _with_s3(machine: Any, endpoint: str | None, key: str | None) -> Any:
    settings = {
        "TVMFLOW_S3_ENDPOINT": endpoint,
        "TVMFLOW_S3_ACCESS_KEY": key,
        "TVMFLOW_S3_SECRET_KEY": "not-the-secret",
    }
    return replace(machine, settings={**machine.settings, **settings})


def test_an_s3_endpoint_that_is_down(machine: Any, tmp_path: Path, make: Any) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    sentence = _refused(_with_s3(machine, address, "nobody"), make.file(tmp_path))
    assert address in sentence


def test_an_s3_endpoint_that_refuses_the_credentials(machine: Any, tmp_path: Path, make: Any, s3: Any) -> None:
    wrong = _with_s3(machine, s3.config.endpoint, s3.config.access_key)
    result = wrong.release(make.file(tmp_path))
    assert result.code == 1
    assert "credentials" in result.sentence
    assert "not-the-secret" not in result.stdout + result.stderr
    assert s3.list_names() == []


def test_an_mlflow_server_that_is_down(machine: Any, tmp_path: Path, make: Any) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    without = replace(machine, settings={**machine.settings, "TVMFLOW_MLFLOW_TRACKING_URI": address})
    result = without.release(make.file(tmp_path))
    assert result.code == 1
    assert f"MLflow at {address}" in result.sentence
    assert machine.nothing_is_published()


def test_a_prefect_server_that_is_down(fresh_machine: Any, tmp_path: Path, make: Any) -> None:
    address = f"http://127.0.0.1:{free_port()}/api"
    without = replace(fresh_machine, settings={"TVMFLOW_PREFECT_API_URL": address})
    sentence = _refused(without, make.file(tmp_path))
    assert address in sentence


# -- The disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    # Lazily: this process has looked into MLflow's database there and may hold it open.
    subprocess.run(["/bin/umount", "--lazy", folder], check=True)


def test_a_full_disk(machine: Any, tmp_path: Path, make: Any, small_disk: Path) -> None:
    _large_model(tmp_path, make)
    full = replace(machine, home=small_disk / "state")
    assert os.strerror(errno.ENOSPC) in _refused(full, make.file(tmp_path))


@pytest.mark.long
def test_a_file_size_limit(tmp_path: Path, make: Any, fresh_machine: Any, databases: Databases) -> None:
    _large_model(tmp_path, make)
    databases.mlflow(fresh_machine.home / "mlflow" / "mlflow.db")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit is inherited by the command; this process writes nothing meanwhile.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
    try:
        process = fresh_machine.start("release", make.file(tmp_path), "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    result = fresh_machine.finish(process)
    assert result.code == 1
    assert os.strerror(errno.EFBIG) in result.sentence
    assert fresh_machine.nothing_is_published()


def _large_model(folder: Path, make: Any) -> None:
    """A model whose weights alone are 4 MB."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    make.onnx(folder, nodes, {"w": np.random.default_rng(0).normal(size=(4, 250_000)).astype(np.float32)})
