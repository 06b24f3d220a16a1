"""Loading a bundle: the modules that it imports, the bundles that it refuses to run, and the files that it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import scale
from tvmflow import runtime
from tvmflow.bundle import read_manifest
from tvmflow.errors import BundleError

Repack = Callable[..., Path]

RUN_AND_LIST = """
import json, sys
from tvmflow import runtime
with runtime.load(sys.argv[1]) as model:
    outputs = model(**model.sample[0])
print(json.dumps([sorted(outputs), sorted({name.partition(".")[0] for name in sys.modules})]))
"""
THREADS = """
import sys
from tvmflow import runtime
print(runtime.load(sys.argv[1]).threads)
"""


def python(code: str, *arguments: object, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TVM_")}
    settings = {**inherited, "TVM_USE_RUNTIME_LIB": "1", **environment}
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=settings, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("runtime_only", ["0", "1"])
def test_running_a_bundle_imports_nothing_of_the_pipeline(bundle: Path, runtime_only: str) -> None:
    outputs, modules = json.loads(python(RUN_AND_LIST, bundle, TVM_USE_RUNTIME_LIB=runtime_only))
    assert outputs == ["positive", "sum"]
    heavy = {"tvm", "torch", "prefect", "mlflow", "onnx", "onnxruntime", "pydantic", "yaml", "boto3", "rich"}
    assert not heavy.intersection(modules)


def test_the_library_of_a_closed_model_is_unloaded(bundle: Path) -> None:
    """It holds the weights, and its file, which has no name any more, takes space of the disk."""

    def count_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("mod.so")

    before = count_mappings()
    with runtime.load(bundle) as model:
        outputs = model(**model.sample[0])
        assert count_mappings() > before
    assert count_mappings() <= before
    assert sorted(outputs) == ["positive", "sum"]


def test_torch_can_be_imported_after_a_bundle_is_loaded(bundle: Path) -> None:
    code = "import importlib.util as u, sys; from tvmflow import runtime; runtime.load(sys.argv[1]); "
    assert "ModuleSpec" in python(code + "print(u.find_spec('torch'))", bundle)


def test_the_workers_are_no_more_than_the_cores(repack: Repack) -> None:
    cores = len(os.sched_getaffinity(0))
    assert int(python(THREADS, repack(threads=1000))) == cores


def test_the_bundle_says_how_many_workers(repack: Repack) -> None:
    assert int(python(THREADS, repack(max_threads=1))) == 1


def test_the_environments_number_of_workers_stands(bundle: Path) -> None:
    assert int(python(THREADS, bundle, TVM_NUM_THREADS="3")) == 3


def test_nothing_is_left_in_the_temporary_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with runtime.load(bundle) as model:
        model(**model.sample[0])
        assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_is_one_sentence(bundle: Path) -> None:
    code = """
import resource, signal, sys
from tvmflow import errors, runtime
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    runtime.load(sys.argv[1])
except errors.UncheckedBundleError as error:
    print(error)
"""
    output = python(code, bundle)
    assert "cannot be unpacked (File too large); free space, or set TMPDIR" in output


def test_a_bundle_for_another_machine_is_refused_before_it_is_loaded(repack: Repack) -> None:
    path = repack(library=b"this would crash the process", cpu_features=("avx4096",))
    with pytest.raises(BundleError, match="avx4096"):
        runtime.load(path)


def test_a_truncated_bundle_is_refused_before_it_is_loaded(bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(BundleError, match="damaged"):
        runtime.load(tmp_path / "cut.tar.gz")


def test_a_library_that_is_none_is_one_sentence(repack: Repack) -> None:
    with pytest.raises(BundleError, match=r"^bundle 'small': its library cannot be loaded \(.*\)$"):
        runtime.load(repack(library=b"no library"))


def test_a_library_without_a_function_that_packs_its_weights_is_one_sentence(repack: Repack) -> None:
    with pytest.raises(BundleError, match=r"'small'.*pack_weights.*build it again$"):
        runtime.load(repack(weights="unpacked"))


def test_a_golden_sample_without_arrays_is_one_sentence_where_it_is_asked_for(
    repack: Repack, inputs: Callable[..., Any]
) -> None:
    with runtime.load(repack(sample=b"no archive")) as model:
        assert set(model(**inputs(2))) == {"positive", "sum"}
        with pytest.raises(
            BundleError, match=r"^bundle 'small': its sample.npz holds no plain arrays \(.*build it again$"
        ):
            _ = model.sample


def test_a_bundle_can_be_named_by_a_string(bundle: Path) -> None:
    with runtime.load(str(bundle)) as model:
        assert model.manifest == read_manifest(bundle)


@pytest.mark.parametrize("runtime_only", scale.choose(normal=["1"], long=["0", "1"]))
def test_tvm_can_be_imported_after_a_bundle_has_run(bundle: Path, runtime_only: str) -> None:
    code = """
import sys
import numpy as np
from tvmflow import runtime
model = runtime.load(sys.argv[1])
before = model(**model.sample[0])["sum"]
def same(model):
    return np.array_equal(model(**model.sample[0])["sum"], before)
import tvm
with runtime.load(sys.argv[1]) as again:
    print(same(again), same(model))
print(type(model.machine).__module__, same(model))
"""
    lines = python(code, bundle, TVM_USE_RUNTIME_LIB=runtime_only).splitlines()
    assert lines == ["True True", "tvm.runtime.vm True"]


def test_sorting_is_there_without_the_compiler(bundle: Path) -> None:
    code = """
import sys
from tvmflow import runtime
runtime.load(sys.argv[1])
import tvm_ffi
print(tvm_ffi.get_global_func("tvm.contrib.sort.argsort", allow_missing=True) is not None)
"""
    assert python(code, bundle) == "True\n"
