"""The Open Inference Protocol over gRPC, asked by Triton's own client."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.models import save_text
from support.steps import compile_by_steps
from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.errors import InputError
from tvmflow.serving import messages
from tvmflow.serving.app import Service
from tvmflow.serving.batching import Batcher
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.rpc import start_server

MakeInputs = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]
DATATYPES = {"float32": "FP32", "int64": "INT64"}


@pytest.fixture(scope="module")
def running(serve: Any, bundle: Path) -> Iterator[Any]:
    with serve(bundle, "--grpc-port", 0, "--max-body-mb", 1) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(running.rpc_address) as each:
        yield each


def tensors(arrays: dict[str, Any]) -> list[Any]:
    items = []
    for name, array in arrays.items():
        items.append(triton.InferInput(name, list(array.shape), DATATYPES[array.dtype.name]))
        items[-1].set_data_from_numpy(array)
    return items


def test_the_server_says_what_it_is_and_serves(client: Any, bundle: Path) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    assert client.get_server_metadata().name == "tvmflow"
    metadata = client.get_model_metadata("small", sha256_file(bundle)[:12])
    assert (metadata.name, metadata.platform, list(metadata.versions)) == ("small", "tvm", [sha256_file(bundle)[:12]])
    assert [(item.name, item.datatype, list(item.shape)) for item in metadata.inputs] == [
        ("x", "FP32", [-1, 8]),
        ("y", "FP32", [-1, 4]),
        ("count", "INT64", [-1]),
    ]


@pytest.mark.parametrize("names", [["sum", "doubled"], ["doubled"], None])
def test_inference_gives_the_original_models_numbers(
    client: Any, inputs: MakeInputs, reference: Reference, names: list[str] | None
) -> None:
    outputs = None if names is None else [triton.InferRequestedOutput(name) for name in names]
    result = client.infer("small", tensors(inputs(3)), outputs=outputs, request_id="seven")
    assert result.get_response().id == "seven"
    expected = reference("1", inputs(3))
    assert [item.name for item in result.get_response().outputs] == (names or list(expected))
    for name in names or expected:
        np.testing.assert_allclose(result.as_numpy(name), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_strings_are_taken_where_the_model_takes_labels(serve: Any, tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml": 2]> g (string[n] x) => (string[n] y) {
      y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_strings = ["u", "v"], default_string = "w"> (x)
    }"""
    save_text(tmp_path / "model.onnx", text)
    bundle = compile_by_steps({"name": "labels", "model": {"onnx": "model.onnx"}}, tmp_path, tmp_path / "state")
    with serve(bundle, "--grpc-port", 0) as server, triton.InferenceServerClient(server.rpc_address) as client:
        item = triton.InferInput("x", [4], "BYTES")
        item.set_data_from_numpy(np.array([b"b", b"?", b"a", b"\xff"], object))
        assert client.infer("labels", [item]).as_numpy("y").tolist() == [1, 2, 0, 2]


def test_numbers_may_be_given_one_by_one(running: Any, inputs: MakeInputs, reference: Reference) -> None:
    """As clients in other languages do, which fill in the typed fields of the message."""
    import grpc

    request = service_pb2.ModelInferRequest(model_name="small")
    for name, array in inputs(2).items():
        field = {"float32": "fp32_contents", "int64": "int64_contents"}[array.dtype.name]
        item = request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=list(array.shape))
        getattr(item.contents, field).extend(array.ravel().tolist())
    with grpc.insecure_channel(running.rpc_address) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    total = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(2, 4)
    np.testing.assert_allclose(total, reference("1", inputs(2))["sum"], rtol=1e-5, atol=1e-6)


def refusal(client: Any, model: str, arrays: dict[str, Any], **more: Any) -> tuple[str, str]:
    """The status code and the sentence of a request that is refused."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, tensors(arrays), **more)
    return str(caught.value.status()), str(caught.value.message())


def test_a_wrong_request_is_refused_with_a_reason(client: Any, inputs: MakeInputs) -> None:
    arrays = inputs(2)
    code, text = refusal(client, "small", {**arrays, "x": arrays["x"][:, :7]})
    assert (code, "'x'" in text) == ("StatusCode.INVALID_ARGUMENT", True)
    code, text = refusal(client, "large", arrays)
    assert (code, "served is 'small'" in text) == ("StatusCode.NOT_FOUND", True)
    code, text = refusal(client, "small", arrays, model_version="9")
    assert (code, "'9'" in text) == ("StatusCode.NOT_FOUND", True)
    code, text = refusal(client, "small", arrays, outputs=[triton.InferRequestedOutput("none")])
    assert (code, "'none'" in text) == ("StatusCode.INVALID_ARGUMENT", True)
    code, _ = refusal(client, "small", {**arrays, "x": np.zeros((2**16, 8), np.float32)})
    assert code == "StatusCode.RESOURCE_EXHAUSTED"
    assert client.is_server_live()


def test_answers_are_counted(running: Any, client: Any, inputs: MakeInputs) -> None:
    before = running.metric("tvmflow_inference_seconds_count")
    client.infer("small", tensors(inputs(1)))
    assert running.metric("tvmflow_inference_seconds_count") == before + 1
    assert 'tvmflow_requests_total{code="OK"}' in running.client.get("/metrics").text


def test_bytes_that_are_no_message_are_refused(running: Any) -> None:
    import grpc

    with grpc.insecure_channel(running.rpc_address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff" * 100)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_sizes_beyond_the_dimensions_of_any_array_are_refused_at_once(bundle: Path) -> None:
    """Their product took ten seconds, in which no probe was answered."""
    request = service_pb2.ModelInferRequest(model_name="small")
    request.inputs.add(name="x", datatype="FP32", shape=[9999] * 120_000).contents.fp32_contents.append(1)
    with pytest.raises(InputError, match="'shape' is not a list of sizes, at most 64"):
        messages.parse(request.SerializeToString(), read_manifest(bundle))


def test_an_output_is_returned_once(bundle: Path) -> None:
    """A small request could ask for more bytes than the machine has."""
    request = service_pb2.ModelInferRequest(model_name="small")
    for _ in range(2):
        request.outputs.add(name="sum")
    with pytest.raises(InputError, match="'sum' is asked for twice"):
        messages.parse(request.SerializeToString(), read_manifest(bundle))


def test_numbers_as_bytes_are_read_at_once_and_all_else_counts_as_text(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    raw = service_pb2.ModelInferRequest(model_name="small", raw_input_contents=[bytes(2**20), b""])
    raw.inputs.add(name="x", datatype="FP32", shape=[2**18])
    assert messages.text_size(raw.SerializeToString(), manifest) == 0
    strings = replace(manifest, labels={"x": ("a",)})
    assert messages.text_size(raw.SerializeToString(), strings) == raw.ByteSize()
    typed = service_pb2.ModelInferRequest(model_name="small")
    typed.inputs.add(name="x", datatype="FP32", shape=[2**18]).contents.fp32_contents.extend([1.0] * 2**18)
    many = service_pb2.ModelInferRequest(raw_input_contents=[b""] * 2**13)
    for request in (typed, many, service_pb2.ModelInferRequest(id="x" * 2**20)):
        assert messages.text_size(request.SerializeToString(), manifest) == request.ByteSize()
    # An unknown field of eight bytes, seven of which would be read as the beginning of raw contents.
    hidden = b"\x79\x00\x3a\x80\x80\x80\x02\x00\x00" + typed.SerializeToString()
    assert messages.decode("ModelInferRequest", hidden).inputs[0].contents.fp32_contents
    assert messages.text_size(hidden, manifest) == len(hidden)


def test_the_largest_request_may_be_larger_than_any_of_grpc() -> None:
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=lambda rows: None)
    service = Service([], batcher, Metrics(), Limits(body=1 << 40))

    async def start() -> None:
        server, _ = await start_server(service, "127.0.0.1", 0)
        await server.stop(0)

    asyncio.run(start())
    batcher.close()


def test_a_port_in_use_is_one_sentence(command: Any, running: Any, bundle: Path) -> None:
    process = command(bundle, "--port", 0, "--grpc-port", running.rpc_address.rpartition(":")[2])
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--grpc-port" in error.splitlines()[-1]
