"""The server: a real process, asked by a real client."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from support import scale
from support.arrays import normal
from support.command_server import CommandServer
from support.items import POISON, images, tokens
from support.models import save_counter, save_model
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.bundle import sha256_file
from tvmflow.serving.app import Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.server import _bind_socket
from tvmflow.serving.source import ServedModel

Running = Any
Serve = Callable[..., Any]
MakeInputs = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]
Start = Callable[..., "subprocess.Popen[str]"]
DATATYPES = {"float32": "FP32", "int64": "INT64"}


def _body(arrays: dict[str, Any], **more: Any) -> dict[str, Any]:
    tensors = [
        {
            "name": name,
            "datatype": DATATYPES[array.dtype.name],
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }
        for name, array in arrays.items()
    ]
    return {"inputs": tensors, **more}


def _outputs(document: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: np.array(item["data"]).reshape(item["shape"]) for item in document["outputs"]}


def _error(response: httpx.Response) -> str:
    document = response.json()
    assert document.keys() == {"error"}
    return str(document["error"])


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_client_library_of_the_protocol_is_answered(
    server: Running, inputs: MakeInputs, reference: Reference, is_binary: bool
) -> None:
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

    with InferenceServerClient(server.address.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("small")
        metadata = client.get_model_metadata("small")
        arrays = inputs(3)
        tensors = []
        for description in metadata["inputs"]:
            array = arrays[description["name"]]
            tensors.append(InferInput(description["name"], list(array.shape), description["datatype"]))
            tensors[-1].set_data_from_numpy(array, binary_data=is_binary)
        outputs = [InferRequestedOutput(item["name"], binary_data=is_binary) for item in metadata["outputs"]]
        result = client.infer("small", tensors, outputs=outputs, request_id="seven")
        assert result.get_response()["id"] == "seven"
        for name, array in reference("1", arrays).items():
            np.testing.assert_allclose(result.as_numpy(name), array, rtol=1e-5, atol=1e-6)


def test_a_client_library_of_the_protocol_raises_what_the_server_refuses(server: Running, inputs: MakeInputs) -> None:
    from tritonclient.http import InferenceServerClient, InferInput
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(server.address.removeprefix("http://")) as client:
        tensor = InferInput("x", [1, 7], "FP32")
        tensor.set_data_from_numpy(inputs(1)["x"][:, :7])
        with pytest.raises(InferenceServerException, match="'x'"):
            client.infer("small", [tensor])
        with pytest.raises(InferenceServerException, match="'large'"):
            client.infer("large", [tensor])


def test_it_tells_what_it_is(server: Running) -> None:
    document = server.client.get("/v2").json()
    assert document["name"] == "tvmflow"
    assert document["extensions"] == ["binary_tensor_data"]
    assert server.client.get("/v2/health/live").json() == {"live": True}
    assert server.client.get("/v2/health/ready").json() == {"ready": True}


def test_it_tells_what_the_model_takes(server: Running, bundle: Path) -> None:
    version = sha256_file(bundle)[:12]
    document = server.client.get("/v2/models/small").json()
    assert (document["name"], document["versions"], document["platform"]) == ("small", [version], "tvm")
    assert document["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 8]},
        {"name": "y", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "count", "datatype": "INT64", "shape": [-1]},
    ]
    assert server.client.get(f"/v2/models/small/versions/{version}").json() == document
    ready = {"name": "small", "version": version, "ready": True}
    for path in ("/v2/models/small/ready", f"/v2/models/small/versions/{version}/ready"):
        assert server.client.get(path).json() == ready


def test_inference_gives_the_original_models_numbers(
    server: Running, inputs: MakeInputs, reference: Reference, bundle: Path
) -> None:
    arrays = inputs(3)
    version = sha256_file(bundle)[:12]
    for path in ("/v2/models/small/infer", f"/v2/models/small/versions/{version}/infer"):
        response = server.client.post(path, json=_body(arrays, id="seven"))
        document = response.json()
        assert response.status_code == 200
        assert (document["model_name"], document["model_version"], document["id"]) == ("small", version, "seven")
        assert [item["datatype"] for item in document["outputs"]] == ["FP32", "INT64"]
        actual, expected = _outputs(document), reference("1", arrays)
        np.testing.assert_allclose(actual["sum"], expected["sum"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(actual["doubled"], expected["doubled"])


def test_tensors_go_both_ways_as_bytes(server: Running, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(3)
    entries = [
        {
            "name": name,
            "datatype": DATATYPES[array.dtype.name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    response = server.client.post(
        "/v2/models/small/infer",
        content=head + b"".join(array.tobytes() for array in arrays.values()),
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    assert response.status_code == 200
    length = int(response.headers["Inference-Header-Content-Length"])
    document, tail = json.loads(response.content[:length]), response.content[length:]
    assert [item["parameters"]["binary_data_size"] for item in document["outputs"]] == [3 * 4 * 4, 3 * 8]
    expected = reference("1", arrays)
    np.testing.assert_allclose(np.frombuffer(tail[:48], "<f4").reshape(3, 4), expected["sum"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.frombuffer(tail[48:], "<i8"), expected["doubled"])


def test_another_model_or_version_is_not_found(server: Running) -> None:
    assert "served is 'small'" in _error(server.client.get("/v2/models/large"))
    for path in ("/v2/models/large/ready", "/v2/models/small/versions/9", "/v2/models/small/versions/9/ready", "/v3"):
        response = server.client.get(path)
        assert response.status_code == 404
        assert _error(response)
    response = server.client.post("/v2/models/small/versions/9/infer", json={})
    assert response.status_code == 404
    assert server.client.get("/v2/models/small/infer").status_code == 405


def _without(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: array for other, array in arrays.items() if other != name}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda arrays: _body(_without(arrays, "y")), "input 'y' is missing"),
    "unknown": (lambda arrays: _body({**arrays, "z": arrays["y"]}), "has no input 'z'"),
    "dtype": (lambda arrays: _body({**arrays, "y": arrays["y"].astype(np.int64)}), "is int64, expected float32"),
    "shape": (lambda arrays: _body({**arrays, "y": arrays["y"][:, :3]}), "expected [batch, 4]"),
    "sizes": (lambda arrays: _body({**arrays, "y": arrays["y"][:2]}), "'batch' is 2, but 3 in another input"),
    "output": (lambda arrays: _body(arrays, outputs=[{"name": "no"}]), "no output 'no'"),
    "document": (lambda arrays: [arrays["count"].tolist()], "not a JSON object"),
}


@pytest.mark.parametrize(("make", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_refused_with_a_reason(
    server: Running, inputs: MakeInputs, make: Any, complaint: str
) -> None:
    response = server.client.post("/v2/models/small/infer", json=make(inputs(3)))
    assert response.status_code == 400
    assert complaint in _error(response)


def test_a_batch_beyond_the_models_range_is_refused(server: Running, inputs: MakeInputs) -> None:
    response = server.client.post("/v2/models/small/infer", json=_body(inputs(65)))
    assert response.status_code == 400
    assert "dimension 'batch' is 65, expected 1 to 64" in _error(response)


@pytest.mark.parametrize("chunked", [False, True], ids=["told", "chunked"])
def test_a_body_that_is_too_large_is_refused_and_the_server_goes_on(server: Running, chunked: bool) -> None:
    content: Any = b"x" * (2**20 + 1)
    response = server.client.post("/v2/models/small/infer", content=iter([content]) if chunked else content)
    assert response.status_code == 413
    assert "larger than 1048576 bytes" in _error(response)
    assert server.client.get("/v2/health/ready").status_code == 200


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(server: Running) -> None:
    place = urlsplit(server.address)
    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 1048577\r\n\r\n"
    with socket.create_connection((place.hostname, place.port), 60) as connection:
        connection.sendall(head)
        # The server closes the connection: nothing more is read from it.
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 413 ")


def test_metrics_count_what_happened(server: Running, inputs: MakeInputs) -> None:
    before = {name: server.metric(name) for name in ("tvmflow_inference_seconds_count", "tvmflow_batch_rows_sum")}
    for _ in range(3):
        assert server.client.post("/v2/models/small/infer", json=_body(inputs(2))).status_code == 200
    assert server.metric("tvmflow_inference_seconds_count") == before["tvmflow_inference_seconds_count"] + 3
    assert server.metric("tvmflow_batch_rows_sum") == before["tvmflow_batch_rows_sum"] + 6
    text = server.client.get("/metrics").text
    assert 'tvmflow_requests_total{code="200"}' in text
    assert 'tvmflow_model_info{name="small",version="' in text
    assert "process_resident_memory_bytes" in text


def test_requests_at_a_time_run_as_one_batch_with_the_same_numbers(
    serve: Serve, bundle: Path, inputs: MakeInputs, reference: Reference
) -> None:
    clients = 8
    with (
        serve(bundle, "--max-batch", clients, "--max-delay-ms", 60_000, "--threads", 1) as running,
        ThreadPoolExecutor(clients) as pool,
    ):
        requests = [inputs(1, seed) for seed in range(clients)]
        url = f"{running.address}/v2/models/small/infer"
        answers = list(
            pool.map(lambda arrays: httpx.post(url, json=_body(arrays), timeout=60, trust_env=False), requests)
        )
        for arrays, answer in zip(requests, answers, strict=True):
            assert answer.status_code == 200
            actual, expected = _outputs(answer.json()), reference("1", arrays)
            np.testing.assert_allclose(actual["sum"], expected["sum"], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(actual["doubled"], expected["doubled"])
        assert running.metric("tvmflow_batch_rows_count") == 1
        assert running.metric("tvmflow_batch_rows_sum") == clients
        # The test of signals below takes the other one in a normal run.
        running.process.send_signal(signal.SIGINT)
        assert (running.process.wait(30), running.process.stderr.read()) == (0, "")


def _send_bytes(address: str, model: str, item: Any) -> Any:
    """Send an item of one float tensor as bytes, as JSON has no NaN, and return the answer's."""
    size = {"binary_data_size": item.nbytes}
    entry = {"name": "x", "datatype": "FP32", "shape": list(item.shape), "parameters": size}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    url = f"{address}/v2/models/{model}/infer"
    response = httpx.post(url, content=head + item.tobytes(), headers=headers, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content[int(response.headers["Inference-Header-Content-Length"]) :], "<f4")


def test_a_request_reaches_no_other_of_its_batch_whatever_it_holds(
    serve: Serve, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Four clients at a time, one of them with NaN, an infinity or 1e30, of models that take every rule."""
    clients, bundles = 4, {}
    parts = scale.choose({"tokens": tokens()}, {"tokens": tokens(), "images": images()})
    for name, (nodes, shape, weights) in parts.items():
        model = save_model(tmp_path / f"{name}.onnx", nodes, [("x", ["batch", *shape])], ["y"], weights, opset=20)
        document = {"name": name, "model": {"onnx": str(model)}, "dimensions": {"batch": {"min": 1, "max": clients}}}
        bundles[name] = compile_by_steps(document, tmp_path, tmp_path_factory.mktemp(name))
    options = ("--max-batch", clients, "--max-delay-ms", 60_000, "--threads", 1)
    with serve(*bundles.values(), *options) as running, ThreadPoolExecutor(clients) as pool:
        for name, (_, shape, _) in parts.items():
            items = [normal(1, *shape, seed=seed) for seed in range(clients)]

            send = partial(_send_bytes, running.address, name)
            expected = list(pool.map(send, items))
            for place, poison in enumerate(POISON):
                poisoned = [np.full_like(item, poison) if i == place else item for i, item in enumerate(items)]
                actual = list(pool.map(send, poisoned))
                for other in set(range(clients)) - {place}:
                    # The place of a request in its batch is by chance, and with it the order of a few sums.
                    np.testing.assert_allclose(actual[other], expected[other], rtol=1e-4, atol=1e-5)
        assert running.metric("tvmflow_batch_rows_count") == len(parts) * (1 + len(POISON))


def test_a_request_that_only_a_run_refuses_leaves_the_others_of_its_batch_their_answers(
    serve: Serve, tmp_path: Path
) -> None:
    path = save_counter(tmp_path / "counter.onnx")
    bundle = compile_by_steps({"name": "counter", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    items = [np.full((1, 5), number, "float32").tolist() for number in (0, 11, -1)]
    bodies = [{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 5], "data": item}]} for item in items]
    with serve(bundle, "--max-batch", 3, "--max-delay-ms", 60_000) as running, ThreadPoolExecutor(3) as pool:
        url = f"{running.address}/v2/models/counter/infer"
        answers = list(pool.map(lambda body: httpx.post(url, json=body, timeout=60, trust_env=False), bodies))
        assert running.metric("tvmflow_batch_rows_count") == 1
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    assert answers[0].json()["outputs"][0]["data"] == [0] * 5
    assert answers[1].json()["error"].endswith("an index is not from -5 to 4")


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_accepted_requests_are_answered_after_a_signal(
    serve: Serve, bundle: Path, inputs: MakeInputs, number: int
) -> None:
    with (
        serve(bundle, "--max-batch", 64, "--max-delay-ms", 300_000) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        url = f"{running.address}/v2/models/small/infer"
        waiting = [pool.submit(httpx.post, url, json=_body(inputs(1)), timeout=60, trust_env=False) for _ in range(4)]
        while running.metric("tvmflow_inferences_in_flight") < 4:
            pass
        running.process.send_signal(number)
        assert [each.result().status_code for each in waiting] == [200] * 4
        assert running.process.wait(30) == 0
        assert running.process.stderr.read() == ""
        with pytest.raises(httpx.ConnectError):
            running.client.get("/v2/health/ready")


# A server whose batches hang, and which has little patience with them.
HUNG_SERVER = """
import sys, threading
from pathlib import Path
from tvmflow.serving import Options, batching, bundle_source, serve, server
server.DRAIN_SECONDS = server._LAST_SECONDS = 0.1

def hang(batcher, batch):
    print("a batch hangs", flush=True)
    threading.Event().wait()

batching.Batcher._answer = hang
serve([bundle_source(Path(sys.argv[1]))], Options(port=0), lambda address, *_: print(address, flush=True))
"""


def test_a_batch_that_hangs_does_not_keep_the_server_from_ending(bundle: Path, inputs: MakeInputs) -> None:
    command = [sys.executable, "-c", HUNG_SERVER, str(bundle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        place, content = urlsplit(process.stdout.readline().strip()), json.dumps(_body(inputs(1))).encode()
        head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((place.hostname, place.port), 60) as connection:
            connection.sendall(head.encode() + content)
            assert process.stdout.readline() == "a batch hangs\n"
            process.terminate()
            try:
                assert process.wait(30) == 1
            finally:
                process.kill()
        assert "does not end" in process.stderr.read()


def test_answers_are_not_held_back_to_fill_a_packet() -> None:
    """asyncio sets TCP_NODELAY on connections of a listener that says its protocol, and on no others."""
    with _bind_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def _sentence(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    return _checked(process.returncode, out, err)


def _checked(code: int, out: str, err: str) -> str:
    assert code != 0
    assert out == ""
    assert err.startswith("tvmflow: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def refusal(commands: CommandServer, environment: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """The sentence with which `tvmflow serve` refuses, in a process that need not import first."""

    def ask(*arguments: object) -> str:
        process = commands.run(["serve", *map(str, arguments)], environment, tmp_path, 120)
        return _checked(process.returncode, process.stdout, process.stderr)

    return ask


@pytest.fixture(scope="module")
def hurried(serve: Serve) -> Iterator[Running]:
    """A server of a release that gives half a second to a request to come."""
    with serve("small/2", "--timeout-s", "0.5") as running:
        yield running


def test_connections_without_a_whole_request_are_closed(hurried: Running) -> None:
    """Each takes a file descriptor, and somebody could open as many as there are."""
    request = b"GET /v2 HTTP/1.1\r\nHost: here\r\n"
    with ExitStack() as stack:
        place = urlsplit(hurried.address)
        answers = []
        for content in (b"", request, request + b"\r\n" + request):
            connection = stack.enter_context(socket.create_connection((place.hostname, place.port), 60))
            connection.sendall(content)
            answers.append(connection.makefile("rb").read())
        assert [answer[:12] for answer in answers] == [b"", b"", b"HTTP/1.1 200"]
        assert hurried.client.get("/v2/health/live").status_code == 200


def test_a_port_in_use_is_refused_before_anything_is_loaded(command: Start, bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = _sentence(command(bundle, "--port", port))
    assert f"port {port} of 127.0.0.1 cannot be taken" in message
    assert "choose another with --port" in message


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("absent.tar.gz", "there is no bundle 'absent.tar.gz'"),
        ("small@nowhere", "There is no channel 'nowhere' of small"),
        ("small/9", "There is no release small 9"),
        ("small/3", "differs from the original's"),
        *(
            (name, "give NAME@CHANNEL, NAME/VERSION or a bundle's path")
            for name in scale.choose(normal=["a/b/c"], long=["small", "@production", "a/b/c"])
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence(refusal: Callable[..., str], model: str, complaint: str) -> None:
    assert complaint in refusal(model, "--port", 0)


def test_an_impossible_address_is_one_sentence(refusal: Callable[..., str], bundle: Path) -> None:
    assert "correct --host" in refusal(bundle, "--host", "256.0.0.1")


def test_a_failure_of_the_model_is_reported_and_counted(bundle: Path, inputs: MakeInputs) -> None:
    """The server runs in this process and the model's library is closed, since no request makes a sound model fail."""
    model, metrics = runtime.load(bundle), Metrics()
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=metrics.batch_rows.observe)
    app = application(Service([ServedModel("small", "1", model)], batcher, metrics, Limits(body=2**20)))
    model.close()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v2/models/small/infer", json=_body(inputs(1)))

    response = asyncio.run(ask())
    batcher.close()
    assert response.status_code == 500
    assert "could not be run" in _error(response)
    assert metrics.registry.get_sample_value("tvmflow_requests_total", {"code": "500"}) == 1


def test_a_release_is_served_by_its_version(hurried: Running, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(2)
    document = hurried.client.post("/v2/models/small/versions/2/infer", json=_body(arrays)).json()
    assert document["model_version"] == "2"
    np.testing.assert_allclose(_outputs(document)["sum"], reference("2", arrays)["sum"], rtol=1e-5, atol=1e-6)
