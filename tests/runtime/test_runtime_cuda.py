"""Bundles for NVIDIA GPUs, on machines without a GPU or with one of a lower compute capability."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvmflow.errors import BundleError
from tvmflow.runtime import cuda, model


def manifest(arch: str) -> Any:
    """The manifest of a bundle for a GPU."""
    return SimpleNamespace(name="digits", tvm_target={"kind": "cuda", "arch": arch})


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has an NVIDIA GPU")
def test_a_machine_without_a_gpu_says_what_to_install() -> None:
    with pytest.raises(BundleError, match=r"'digits' needs an NVIDIA GPU: TVM's library .* install the NVIDIA driver"):
        model._gpu_for(manifest("sm_90"))


@pytest.mark.parametrize(("arch", "runs"), [("sm_80", True), ("sm_86", True), ("sm_89", False), ("sm_90a", False)])
def test_a_gpu_runs_bundles_for_its_capability_and_lower_ones(
    arch: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(capability=(8, 6))
    monkeypatch.setattr(cuda, "Memory", lambda: memory)
    if runs:
        assert model._gpu_for(manifest(arch)) is memory
        return
    needed = {"sm_89": "8.9", "sm_90a": "9.0"}[arch]
    with pytest.raises(BundleError, match=f"compute capability {needed}, this machine's has 8.6; build for cuda-sm86"):
        model._gpu_for(manifest(arch))


def test_a_runtime_of_cuda_in_a_python_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert library in list(cuda._find_in_packages())
