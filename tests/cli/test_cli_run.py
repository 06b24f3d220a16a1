"""`tvmflow run` and `tvmflow verify` on a bundle."""

import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.models import save_convolution
from support.traces import read_perfetto
from support.waits import wait_until
from tvmflow import npz
from tvmflow.bundle import TensorSpec, extract, pack, read_manifest

Command = Callable[..., Any]
Repack = Callable[..., Path]


@pytest.fixture
def input_arrays(tmp_path: Path) -> dict[str, Any]:
    """Inputs for a batch of three, also written to in.npz."""
    generator = np.random.default_rng(1)
    arrays = {
        "x": generator.normal(size=(3, 8)).astype(np.float32),
        "y": generator.normal(size=(3, 4)).astype(np.float32),
    }
    npz.write(tmp_path / "in.npz", arrays)
    return arrays


@pytest.fixture
def repack(bundle: Path, tmp_path: Path) -> Repack:
    """The bundle with other values in its manifest, or another golden sample."""

    def change(sample: Callable[[dict[str, Any]], None] | None = None, **values: Any) -> Path:
        folder = tmp_path / "files"
        folder.mkdir()
        manifest = extract(bundle, folder)
        if sample is not None:
            arrays = npz.read(folder / "sample.npz")
            sample(arrays)
            npz.write(folder / "sample.npz", arrays)
        path = tmp_path / "changed.tar.gz"
        pack(path, dataclasses.replace(manifest, **values), {item.name: item for item in folder.iterdir()})
        return path

    return change


def test_outputs_are_written_by_name_and_by_number(
    tvmflow: Command, bundle: Path, models: Path, input_arrays: dict[str, Any]
) -> None:
    import onnxruntime

    result = tvmflow("run", bundle, "--inputs", "in.npz", "--output", "out.npz")
    assert result.code == 0
    assert "written to out.npz" in result.stdout
    session = onnxruntime.InferenceSession(str(models / "small.onnx"), providers=["CPUExecutionProvider"])
    outputs = npz.read(Path("out.npz"))
    assert set(outputs) == {"sum", "positive", "above", "output_0", "output_1", "output_2"}
    for index, (name, expected) in enumerate(
        zip(("sum", "positive", "above"), session.run(None, input_arrays), strict=True)
    ):
        assert outputs[name].dtype == expected.dtype
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-5, atol=1e-6)
        assert (outputs[name] == outputs[f"output_{index}"]).all()


def test_without_inputs_the_golden_sample_is_run(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle)
    assert result.stdout.splitlines()[:3] == ["sum: float32[1, 4]", "positive: float32[1, 4]", "above: bool[1, 4]"]


def test_it_can_be_run_several_times(tvmflow: Command, bundle: Path) -> None:
    assert "\n5 runs: mean " in tvmflow("run", bundle, "--repeat", "5").stdout


def test_a_bundle_with_its_weights_apart_is_timed(tvmflow: Command) -> None:
    archive = Path(__file__).parent.parent / "bundle" / "files" / "format-1-apart.tar.gz"
    result = tvmflow("run", archive, "--print-time", "--repeat", "2")
    assert (result.code, result.stderr) == (0, "")
    assert "2 runs, in ms:" in result.stdout


def test_json_describes_the_outputs_and_the_times(tvmflow: Command, bundle: Path, input_arrays: dict[str, Any]) -> None:
    result = tvmflow("run", bundle, "--inputs", "in.npz", "--repeat", "2", "--json")
    document = json.loads(result.stdout)
    assert document["outputs"]["above"] == {"shape": [3, 4], "dtype": "bool"}
    assert document["runs"] == 2
    assert document["latency_ms"].keys() == {"mean", "p50", "max", "min", "std"}
    assert result.stderr == ""


def test_the_installed_command_runs_with_tvms_runtime_alone(
    executable: str, environment: dict[str, str], bundle: Path
) -> None:
    for command in ("run", "verify"):
        process = subprocess.run(
            [executable, command, str(bundle)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (process.returncode, process.stderr) == (0, "")


BAD_INPUTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"x": np.zeros((3, 9), np.float32)}, ["'x'", "[3, 9]", "[batch, 8]"]),
    ({"x": np.zeros((3, 8))}, ["'x'", "float64", "float32"]),
    ({"y": np.zeros((2, 4), np.float32)}, ["'y'", "'batch'", "2", "3"]),
    ({"z": np.zeros(3)}, ["'z'", "x float32[batch, 8]", "y float32[batch, 4]"]),
    ({"y": None}, ["'y'"]),
]


@pytest.mark.parametrize(("change", "names"), BAD_INPUTS)
def test_inputs_that_do_not_fit_are_one_sentence(
    tvmflow: Command, bundle: Path, input_arrays: dict[str, Any], change: dict[str, Any], names: list[str]
) -> None:
    bad_arrays = {name: array for name, array in {**input_arrays, **change}.items() if array is not None}
    npz.write(Path("bad.npz"), bad_arrays)
    result = tvmflow("run", bundle, "--inputs", "bad.npz", "--output", "out.npz")
    assert result.code == 1
    assert [name for name in names if name not in result.sentence] == []
    assert not Path("out.npz").exists()


def test_a_missing_inputs_file_is_one_sentence(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle, "--inputs", "absent.npz")
    assert result.code == 1
    assert "'absent.npz'" in result.sentence


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 255]) + data[201:]


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda data: b"", lambda data: b"no arrays", lambda data: data[4:]])
def test_a_damaged_inputs_file_is_one_sentence(
    tvmflow: Command, bundle: Path, input_arrays: dict[str, Any], damage: Callable[[bytes], bytes]
) -> None:
    Path("in.npz").write_bytes(damage(Path("in.npz").read_bytes()))
    result = tvmflow("run", bundle, "--inputs", "in.npz")
    assert result.code == 1
    assert "'in.npz'" in result.sentence


def test_a_single_array_is_no_inputs_file(tvmflow: Command, bundle: Path) -> None:
    np.save("in.npy", np.zeros(3))
    result = tvmflow("run", bundle, "--inputs", "in.npy")
    assert result.code == 1
    assert "'in.npy'" in result.sentence


def test_pickled_objects_are_refused(tvmflow: Command, bundle: Path) -> None:
    np.savez("in.npz", x=np.array([{}], dtype=object))
    result = tvmflow("run", bundle, "--inputs", "in.npz")
    assert result.code == 1
    assert "'in.npz'" in result.sentence


def test_a_folder_is_no_inputs_file(tvmflow: Command, bundle: Path, tmp_path: Path) -> None:
    result = tvmflow("run", bundle, "--inputs", tmp_path)
    assert result.code == 1
    assert repr(str(tmp_path)) in result.sentence


def test_a_folder_is_no_output(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle, "--output", ".")
    assert result.code == 2
    assert "'.' is a directory" in result.sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_damaged_bundle_is_one_sentence(tvmflow: Command, bundle: Path, command: str) -> None:
    Path("cut.tar.gz").write_bytes(_cut(bundle.read_bytes()))
    result = tvmflow(command, "cut.tar.gz")
    assert result.code == 1
    assert "'cut.tar.gz'" in result.sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_bundle_for_another_machine_is_one_sentence(tvmflow: Command, repack: Repack, command: str) -> None:
    result = tvmflow(command, repack(cpu_features=("avx4096",)))
    assert result.code == 1
    assert "avx4096" in result.sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_path_through_a_file_is_one_sentence(tvmflow: Command, bundle: Path, command: str) -> None:
    result = tvmflow(command, bundle / "b")
    assert result.code == 1
    assert os.strerror(errno.ENOTDIR) in result.sentence


def test_a_good_bundle_is_verified(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("verify", bundle)
    assert result.code == 0
    assert [name for name in ("small", "native") if name not in result.stdout] == []


def test_verify_prints_the_manifest_as_json(tvmflow: Command, bundle: Path) -> None:
    document = json.loads(tvmflow("verify", bundle, "--json").stdout)
    assert document["max_abs_error"] < 1e-5
    assert document["manifest"] == json.loads(read_manifest(bundle).to_json())


@pytest.mark.parametrize("output", ["sum", "above"])
def test_other_outputs_than_the_originals_exit_with_three(tvmflow: Command, repack: Repack, output: str) -> None:
    def falsify(arrays: dict[str, Any]) -> None:
        array = arrays[f"output:{output}"]
        arrays[f"output:{output}"] = ~array if array.dtype == bool else array + 1

    result = tvmflow("verify", repack(falsify))
    assert result.code == 3
    assert repr(output) in result.sentence


def _sum(path: str = "out.npz") -> Any:
    return npz.read(Path(path))["sum"]


def _weights(models: Path) -> Any:
    import onnx
    from onnx import numpy_helper

    return numpy_helper.to_array(onnx.load(models / "small.onnx").graph.initializer[0])


def test_inputs_can_be_zeros_or_ones_of_any_size(tvmflow: Command, bundle: Path, models: Path) -> None:
    assert tvmflow("run", bundle, "--fill-mode", "zeros", "--size", "batch=3", "-o", "out.npz").code == 0
    np.testing.assert_array_equal(_sum(), np.zeros((3, 4)))
    assert tvmflow("run", bundle, "--fill-mode", "ones", "-o", "out.npz").code == 0
    np.testing.assert_allclose(_sum(), _weights(models).sum(0, keepdims=True) + 1, rtol=1e-5)


@pytest.mark.parametrize("mode", ["ones", "random"])
def test_a_golden_sample_without_an_input_is_one_sentence(tvmflow: Command, repack: Repack, mode: str) -> None:
    def leave_one_out(arrays: dict[str, Any]) -> None:
        del arrays[next(name for name in arrays if name.startswith("input:"))]

    assert "its golden sample lacks input" in tvmflow("run", repack(leave_one_out), "--fill-mode", mode).sentence


def test_random_inputs_are_zeros_where_the_golden_sample_has_no_elements() -> None:
    from tvmflow.cli.run import fill_inputs

    spec = TensorSpec(name="x", dtype="float32", shape=("n", 2))
    model: Any = SimpleNamespace(inputs=(spec,), typical_inputs={"x": np.zeros((0, 2), "float32")})
    np.testing.assert_array_equal(fill_inputs(model, "random", {"n": 3})["x"], np.zeros((3, 2), "float32"))


def test_random_inputs_are_the_same_each_time_and_within_the_golden_samples_range(bundle: Path) -> None:
    from tvmflow.cli.run import fill_inputs
    from tvmflow.runtime import load

    with load(bundle) as model:
        one, two = (fill_inputs(model, "random", {"batch": 500}) for _ in range(2))
        for name, golden in model.sample[0].items():
            assert (one[name] == two[name]).all()
            assert one[name].dtype == golden.dtype
            assert golden.min() <= one[name].min() < one[name].max() <= golden.max()
            assert np.ptp(one[name]) > 0.9 * np.ptp(golden)


def test_random_indices_stay_where_the_golden_sample_has_them() -> None:
    from tvmflow.cli.run import fill_inputs

    sample = {
        "index": np.array([3, 5], np.int64),
        "byte": np.array([0, 255], np.uint8),
        "mask": np.array([True]),
        "constant": np.full(1, 7, np.float32),
    }
    inputs = tuple(TensorSpec(name, ("n",), array.dtype.name) for name, array in sample.items())
    model = SimpleNamespace(typical_inputs=sample, inputs=inputs)
    filled = fill_inputs(model, "random", {"n": 500})
    assert {name: array.dtype for name, array in filled.items()} == {name: item.dtype for name, item in sample.items()}
    assert set(filled["index"]) == {3, 4, 5}
    assert (filled["byte"].min(), filled["byte"].max()) == (0, 255)
    assert set(filled["mask"]) == {True, False}
    assert 0 <= filled["constant"].min() < 0.1 < 0.9 < filled["constant"].max() <= 1


WRONG_RUNS = [
    (("--inputs", "in.npz", "--fill-mode", "ones"), "--inputs and --fill-mode both say what to run on"),
    (("--size", "batch=2"), "--size needs --fill-mode"),
    (("--fill-mode", "ones", "--size", "batch"), "'batch' is not of the form NAME=SIZE"),
    (("--fill-mode", "ones", "--size", "batch=-1"), "'batch=-1' is not of the form NAME=SIZE"),
    (("--fill-mode", "ones", "--size", "bach=2"), "no symbolic dimension 'bach'; did you mean 'batch'?"),
    (("--fill-mode", "ones", "--size", "batch=0"), "batch is 0, expected 1 to any"),
    (("--fill-mode", "twos"), "'twos' is not one of 'zeros', 'ones', 'random'"),
    (("--device", "cuda"), "is built for cpu; compile for another target"),
    (("--device", "tpu"), "'tpu' is not one of 'cpu', 'cuda'"),
    (("--number", "0"), "0 is not in the range x>=1"),
    (("--print-top", "0"), "0 is not in the range x>=1"),
    (("--rpc-tracker", "127.0.0.1:9190"), "--rpc-tracker and --rpc-key go together"),
    (("--rpc-key", "board"), "--rpc-tracker and --rpc-key go together"),
    (("--rpc-tracker", "localhost", "--rpc-key", "k"), "'localhost' is not of the form HOST:PORT"),
    (("--rpc-tracker", "localhost:99999", "--rpc-key", "k"), "'localhost:99999' is not of the form HOST:PORT"),
    (("--rpc-tracker", "h:1", "--rpc-key", "k", "--profile"), "--profile works on this machine only"),
    (("--rpc-tracker", "h:1", "--rpc-key", "k", "--trace", "t.json"), "--trace works on this machine only"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_RUNS)
def test_a_wrong_option_exits_with_two(tvmflow: Command, bundle: Path, options: tuple[str, ...], message: str) -> None:
    result = tvmflow("run", bundle, *options)
    assert result.code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_the_device_of_the_bundle_is_accepted(tvmflow: Command, bundle: Path) -> None:
    assert tvmflow("run", bundle, "--device", "cpu").code == 0


def test_the_runs_are_as_many_as_asked_for(tvmflow: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvmflow.runtime import CompiledModel

    calls = []
    call = CompiledModel.__call__

    def count_call(model: CompiledModel, /, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(model, *args, **kwargs)

    monkeypatch.setattr(CompiledModel, "__call__", count_call)
    numbers = ("--repeat", "2", "--number", "4", "--warmup", "3")
    assert json.loads(tvmflow("run", bundle, *numbers, "--end-to-end", "--json").stdout)["runs"] == 8
    assert len(calls) == 1 + 3 + 2 * 4  # the first gives the outputs
    calls.clear()
    # The function alone is called by TVM's evaluator.
    assert json.loads(tvmflow("run", bundle, *numbers, "--json").stdout)["end_to_end"] is False
    assert len(calls) == 1


def test_the_times_are_printed_as_a_table(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle, "--print-time", "--repeat", "3", "--number", "2", "--end-to-end")
    title, headings, figures = result.stdout.splitlines()[-3:]
    assert re.findall(r"\d+", title) == ["6"]
    times = dict(zip(headings.split(), map(float, figures.split()), strict=True))
    assert times.keys() == {"mean", "median", "max", "min", "std"}
    assert 0 < times["min"] <= times["median"] <= times["max"]


def test_the_largest_values_are_printed(tvmflow: Command, bundle: Path, models: Path) -> None:
    expected = _weights(models).sum(0) + 1
    first, second = np.argsort(-expected)[:2]
    options = ("run", bundle, "--fill-mode", "ones", "--print-top", "2")
    line = f"sum, largest of the last axis: [{first}] {expected[first]:.6g}, [{second}] {expected[second]:.6g}"
    assert line in tvmflow(*options).stdout.splitlines()
    top = json.loads(tvmflow(*options, "--json").stdout)["top"]["sum"]
    assert [item["index"] for item in top] == [first, second]
    assert top[0]["value"] == pytest.approx(expected[first], rel=1e-5)


def test_the_profile_says_which_rule_made_each_function(tvmflow: Command, bundle: Path) -> None:
    profile = json.loads(tvmflow("run", bundle, "--profile", "--repeat", "3", "--json").stdout)["profile"]
    functions = {item["name"]: item for item in profile}
    assert functions.keys() == {"fused_dense_add", "relu", "greater", "(virtual machine)"}
    assert functions["fused_dense_add"]["rule"]
    assert functions["(virtual machine)"]["rule"] == ""
    assert functions["relu"]["calls"] == 1
    assert sum(item["share"] for item in profile) == pytest.approx(1)
    assert [item["microseconds"] for item in profile] == sorted((f["microseconds"] for f in profile), reverse=True)
    lines = tvmflow("run", bundle, "--profile").stdout.splitlines()
    assert ["function", "rule", "calls", "us", "share"] in [line.split() for line in lines]
    assert any(re.fullmatch(r"relu +fallback +1 +\d+\.\d +\d+\.\d%", line) for line in lines)


def test_a_profile_leaves_the_outputs_as_they_are(
    tvmflow: Command, bundle: Path, input_arrays: dict[str, Any], models: Path
) -> None:
    assert tvmflow("run", bundle, "--inputs", "in.npz", "--profile", "-o", "out.npz").code == 0
    np.testing.assert_allclose(_sum(), input_arrays["x"] @ _weights(models) + input_arrays["y"], rtol=1e-4, atol=1e-5)


def test_a_trace_has_the_functions_in_their_order_and_the_memory_of_the_run(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle, "--fill-mode", "ones", "--size", "batch=64", "--trace", "trace.json")
    assert "trace written to trace.json" in result.stdout
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    (caller,) = [thread for thread, name in names.items() if name.endswith(", the caller")]
    slices = [event for event in events if event["ph"] == "X"]
    calls = [event for event in slices if event["tid"] == caller]
    functions = [event["name"] for event in calls if event["name"] in ("fused_dense_add", "relu", "greater")]
    assert functions[0] == "fused_dense_add"
    assert sorted(functions[1:]) == ["greater", "relu"]
    assert next(event for event in calls if event["name"] == "relu")["args"]["shapes"] == "64x4 64x4"
    assert all(event["dur"] > 0 for event in slices)
    starts, ends = ([event["ts"] + share * event["dur"] for event in calls] for share in (0, 1))
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    allocated = [event["args"]["allocated bytes"] for event in events if event["ph"] == "C"]
    assert allocated == sorted(allocated)
    # The outputs: two of float32[64, 4] and one of bool[64, 4].
    assert allocated[-1] >= 2 * 64 * 4 * 4 + 64 * 4


def test_a_trace_for_perfetto_has_the_functions_and_the_memory(tvmflow: Command, bundle: Path) -> None:
    result = tvmflow("run", bundle, "--trace", "trace.pftrace")
    assert (result.code, "trace written to trace.pftrace" in result.stdout) == (0, True)
    trace = read_perfetto(Path("trace.pftrace"))
    calls = [item for item in trace.slices if item.thread.endswith(", the caller")]
    names = [item.name for item in calls if item.name in ("fused_dense_add", "relu", "greater")]
    assert (names[0], sorted(names)) == ("fused_dense_add", ["fused_dense_add", "greater", "relu"])
    assert next(item for item in calls if item.name == "relu").details["shapes"]
    assert all(item.length > 0 for item in calls)
    (curve,) = trace.curves.values()
    assert [value for _, value in curve] == sorted(value for _, value in curve)


def test_a_worker_of_a_trace_works_no_longer_than_its_function(tvmflow: Command, bundle: Path) -> None:
    tvmflow("run", bundle, "--trace", "trace.json")
    slices = [event for event in json.loads(Path("trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    longest = {(event["name"], event["ts"]): event["dur"] for event in slices if event["tid"] == 1}
    assert all(event["dur"] <= longest[event["name"], event["ts"]] for event in slices)


_RPC = """
import runpy, sys
from tvmflow.processes.launch import die_with_parent
die_with_parent(int(sys.argv[1]))
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[str]:
    """A tracker of TVM's RPC on loopback, with one server of key `board`; its address."""
    folder = tmp_path_factory.mktemp("rpc")
    # tvm_ffi would import torch, also in the processes that the server starts.
    modules = tmp_path_factory.mktemp("modules")
    (modules / "torch.py").write_text("raise ImportError")
    processes = []

    def start(module: str, *arguments: str) -> Path:
        log = folder / f"{module}.log"
        command = [
            sys.executable,
            "-c",
            _RPC,
            str(os.getpid()),
            f"tvm.exec.{module}",
            "--host",
            "127.0.0.1",
            *arguments,
        ]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, "PYTHONPATH": str(modules)},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return log

    def logs() -> str:
        return "\n".join(path.read_text() for path in folder.iterdir())

    try:
        log = start("rpc_tracker", "--port", "9190", "--port-end", "9990")
        bound = re.compile(r"bind to (127\.0\.0\.1:\d+)\n")
        address = wait_until(lambda: bound.search(log.read_text()), message=logs, process=processes[-1])[1]
        start("rpc_server", "--port", "9090", "--port-end", "9990", "--tracker", address, "--key", "board")
        from tvm import rpc

        host, port = address.split(":")
        session = rpc.connect_tracker(host, int(port))
        wait_until(
            lambda: session.summary()["queue_info"].get("board", {}).get("free"), message=logs, process=processes[-1]
        )
        session.close()
        yield address
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_bundle_is_sent_to_a_server_and_run_there(
    tvmflow: Command, bundle: Path, input_arrays: dict[str, Any], models: Path, tracker: str
) -> None:
    there = ("--rpc-tracker", tracker, "--rpc-key", "board", "--rpc-timeout", "60", "--json")
    result = tvmflow("run", bundle, "--inputs", "in.npz", "-o", "there.npz", "--repeat", "2", "--number", "3", *there)
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout)["runs"] == 6
    assert tvmflow("run", bundle, "--inputs", "in.npz", "-o", "here.npz").code == 0
    here, remote = npz.read(Path("here.npz")), npz.read(Path("there.npz"))
    assert here.keys() == remote.keys()
    for name, array in here.items():
        np.testing.assert_array_equal(array, remote[name])
    result = tvmflow("run", bundle, "--fill-mode", "ones", "-o", "ones.npz", "--end-to-end", *there)
    assert result.code == 0, result.stderr
    np.testing.assert_allclose(_sum("ones.npz"), _weights(models).sum(0, keepdims=True) + 1, rtol=1e-5)


@pytest.mark.long
def test_a_library_packs_its_weights_on_the_server(tvmflow: Command, tmp_path: Path, tracker: str) -> None:
    assert tvmflow("compile", save_convolution(tmp_path / "c.onnx"), "-o", "c.tar.gz").code == 0
    assert read_manifest(Path("c.tar.gz")).weights == "unpacked"
    there = ("--rpc-tracker", tracker, "--rpc-key", "board", "--rpc-timeout", "60")
    for name, options in (("here", ()), ("there", there), ("whole", (*there, "--end-to-end"))):
        result = tvmflow("run", "c.tar.gz", "--fill-mode", "ones", "-o", f"{name}.npz", *options)
        assert result.code == 0, result.stderr
    here, *remotes = (npz.read(Path(f"{name}.npz"))["y"] for name in ("here", "there", "whole"))
    for remote in remotes:
        np.testing.assert_array_equal(remote, here)


def test_an_input_that_does_not_fit_is_reported_before_anything_runs_on_the_server(
    tvmflow: Command, bundle: Path, tracker: str
) -> None:
    npz.write(Path("bad.npz"), {"x": np.zeros((3, 9), np.float32), "y": np.zeros((3, 4), np.float32)})
    there = ("--rpc-tracker", tracker, "--rpc-key", "board", "--rpc-timeout", "60")
    result = tvmflow("run", bundle, "--inputs", "bad.npz", *there)
    assert result.code == 1
    assert [name for name in ("'x'", "[3, 9]", "[batch, 8]") if name not in result.sentence] == []


def test_a_key_that_no_server_has_is_reported_with_the_existing_ones(
    tvmflow: Command, bundle: Path, tracker: str
) -> None:
    result = tvmflow("run", bundle, "--rpc-tracker", tracker, "--rpc-key", "bord")
    assert result.code == 1
    assert [name for name in ("'bord'", "board") if name not in result.sentence] == []


def test_a_tracker_that_is_not_there_is_one_sentence(tvmflow: Command, bundle: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        port = probe.getsockname()[1]
        result = tvmflow("run", bundle, "--rpc-tracker", f"127.0.0.1:{port}", "--rpc-key", "board")
    assert result.code == 1
    assert f"127.0.0.1:{port}" in result.sentence


@pytest.mark.long
def test_a_silent_or_busy_server_is_given_up_after_the_time_allowed(
    executable: str, environment: dict[str, str], bundle: Path, tracker: str
) -> None:
    from tvm import rpc

    def run(address: str) -> str:
        options = ["--rpc-tracker", address, "--rpc-key", "board", "--rpc-timeout", "2"]
        process = subprocess.run(
            [executable, "run", str(bundle), *options], env=environment, capture_output=True, text=True, timeout=60
        )
        assert process.returncode == 1
        return process.stderr

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = run(address)
        assert [name for name in ("'board'", address, "2 s") if name not in message] == []
    host, port = tracker.split(":")
    session = rpc.connect_tracker(host, int(port)).request("board")
    message = run(tracker)
    assert [name for name in ("'board'", tracker, "2 s") if name not in message] == []
    del session
