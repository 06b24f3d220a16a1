"""Releases in a reduced precision: verified where this machine has the instructions, else published as unverified."""

from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from support.arrays import normal
from support.quantised import quantise
from tvmflow.bundle import read_manifest
from tvmflow.errors import BundleError
from tvmflow.hardware.target import host, missing_features

# Of each precision: a target, and the CPU feature that its products need.
_PRECISIONS = {"bf16": ("x86-64-v4-bf16", "avx512_bf16"), "int8": ("x86-64-v4-vnni", "avx512_vnni")}


@pytest.mark.skipif(host().arch != "x86_64", reason="a target that this machine cannot run is meant")
@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.long)])
def test_a_model_in_a_reduced_precision_is_released(machine: Any, make: Any, tmp_path: Path, precision: str) -> None:
    name, feature = _PRECISIONS[precision]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    model = make.onnx(tmp_path, nodes, {"w": normal(64, 32) / 8}, (16, 64))
    if precision == "int8":
        model = quantise(model, tmp_path / "quantised.onnx")
    file = make.file(
        tmp_path,
        name=f"in-{precision}",
        model={"onnx": model.name},
        targets=[name],
        build={"precision": precision},
        validate={"top1_agreement": None},
        gates={"unverified_targets": "allow"},
    )
    result = machine.release(file)
    assert result.code == 0, result.stderr

    (target,) = result.document["targets"]
    (released,) = machine.releases(f"in-{precision}")[0]["targets"]
    manifest = read_manifest(machine.home.parent / target["bundle_path"])
    assert feature in manifest.cpu_features
    assert released["cpu_features"] == list(manifest.cpu_features)
    assert released["verdict"]["precision"] == precision
    if missing_features(manifest.cpu_features):
        assert (target["max_abs_error"], target["latency_ms"]) == (None, None)
        with pytest.raises(BundleError, match=feature):
            manifest.check_host()
    else:
        # Rounding to bfloat16 is seen in the outputs.
        assert target["max_abs_error"] > 0 or precision == "int8"
        assert target["latency_ms"]["p50"] > 0
        manifest.check_host()
