"""Prints `tvmflow serve` beside other servers of the same ONNX model: `python benchmarks/serving.py [FILE.onnx]`.

The peers are a minimal server of ONNX Runtime on the same web framework and protocol, a thread per request, and
`mlflow models serve` of the model logged by MLflow's own ONNX flavor. Requests are JSON with one row each, sent by
clients that keep their connections and ask again as soon as they are answered. Every server has a process of its own;
they take turns, the others stopped meanwhile. A rate over one and a latency below one are in our favour.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from commandline import add_peers, new_parser, positive, run_main, separated, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow import samples
from tvmflow.errors import InputError

_START_SECONDS = 180.0
_TITLES = {"onnxruntime": "ONNX Runtime", "mlflow": "MLflow"}
_BASELINE = "baseline"


@dataclass
class Server:
    """A running server, and the request to send to it: a POST of `body`, which is JSON, to `path`.

    `seconds` are the times of all answers, and `rates` the answers per second of each turn, by the number of clients.
    """

    process: "subprocess.Popen[str]"
    address: str
    path: str
    body: bytes
    seconds: dict[int, list[float]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)

    def turn(self, clients: int, seconds: float) -> None:
        """Send requests for `seconds` from `clients` clients; the process is stopped before and afterwards."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            until = time.perf_counter() + seconds
            with ThreadPoolExecutor(clients) as pool:
                answers = [each for some in pool.map(self._send_requests, [until] * clients) for each in some]
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.seconds.setdefault(clients, []).extend(answers)
        self.rates.setdefault(clients, []).append(len(answers) / seconds)

    def answer(self) -> Any:
        """Send one request and return its answer."""
        return self._once(self._connect())

    def _send_requests(self, until: float) -> list[float]:
        """Send requests one after another until a time of `perf_counter`; return the seconds of each."""
        connection, answers = self._connect(), []
        self._once(connection)
        while time.perf_counter() < until:
            start = time.perf_counter()
            self._once(connection)
            answers.append(time.perf_counter() - start)
        connection.close()
        return answers

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _once(self, connection: http.client.HTTPConnection) -> Any:
        connection.request("POST", self.path, self.body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise InputError(f"{self.address} answers {response.status}: {content[:300].decode(errors='replace')}")
        return json.loads(content)


def small_cnn(path: Path) -> Path:
    """Write a network with seeded weights to `path`, and return the path.

    It has two convolutions and a dense layer, is as large as one for digits, and has a symbolic batch.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    shapes = {"w1": (32, 1, 3, 3), "w2": (64, 32, 3, 3), "w3": (4096, 10)}
    weights = {
        name: (generator.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        for name, shape in shapes.items()
    }
    padded = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["c1"], **padded),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], **padded),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Flatten", ["r2"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w3"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def row(model: Path) -> dict[str, Any]:
    """Return inputs of one row by name."""
    from tvmflow.onnx_model.reading import declared_inputs, read_onnx

    inputs = declared_inputs(read_onnx(model))
    symbols = {size: 1 for item in inputs for size in item.shape if isinstance(size, str)}
    return dict(samples.make_at_sizes(inputs, symbols, 0, model.parent))


@contextlib.contextmanager
def running(command: Sequence[str], path: str, document: Any, threads: int, port: int = 0) -> Iterator[Server]:
    """Start a server, wait for its first answer, stop it (SIGSTOP) and yield it; kill it when the body ends.

    `path` and `document` are those of a request. With a `port` of 0 the server's first line of output must be JSON with
    its `address`. Raises InputError when the server does not answer.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL if port else subprocess.PIPE,
        stderr=subprocess.DEVNULL if port else None,
        text=True,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}" if port else json.loads(process.stdout.readline())["address"]  # type: ignore[union-attr]
        server = Server(process, address, path, json.dumps(document).encode())
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                server.answer()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise InputError(f"{' '.join(command[:4])} ... does not answer") from error
                time.sleep(0.1)
        os.killpg(process.pid, signal.SIGSTOP)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def peer(model: Path, threads: int) -> None:
    """Run the minimal server of ONNX Runtime until it is killed."""
    import onnxruntime
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from tvmflow.bundle import TensorSpec
    from tvmflow.serving import protocol

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # As ours: idle workers leave the cores to reading and writing requests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    outputs = [TensorSpec(name, (), "") for name in names]

    async def infer(request: Request) -> Response:
        inference = protocol.parse(await request.body(), None, outputs)
        results = await run_in_threadpool(session.run, names, inference.inputs)
        answer = protocol.render(inference, "model", "1", dict(zip(names, results, strict=True)))
        return Response(answer.body, headers=answer.headers)

    app = Starlette(routes=[Route("/v2/models/model/infer", infer, methods=["POST"])])
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        print(json.dumps({"address": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run([listener])


def saved_by_mlflow(model: Path, state: Path) -> Path:
    """Save the model in MLflow's ONNX flavor and return its folder."""
    import shutil

    import mlflow.onnx
    import onnx

    folder = state / "serving-mlflow"
    shutil.rmtree(folder, ignore_errors=True)
    mlflow.onnx.save_model(onnx.load(str(model)), folder, pip_requirements=[])
    return folder


def compare(arguments: argparse.Namespace, state: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Measure all servers, which take turns; return our rate, p50 and p99 over the peer's, by peer and clients."""
    from tvmflow.serving import protocol

    model = arguments.model or small_cnn(state / "serving.onnx")
    bundle = state / "serving.tar.gz"
    tvmflow = str(Path(sys.executable).parent / "tvmflow")
    subprocess.run(
        [tvmflow, "compile", str(model), "-o", str(bundle)],
        check=True,
        env={**os.environ, "TVMFLOW_HOME": str(state / "serving-state")},
        stdout=subprocess.DEVNULL,
    )
    arrays = row(model)
    tensors = [
        {"name": name, "datatype": protocol.DATATYPES[array.dtype.name], "shape": list(array.shape)}
        | {"data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]
    ours = [tvmflow, "serve", str(bundle), "--port", "0", "--json", "--threads", str(arguments.threads)]
    ours += ["--max-delay-ms", str(arguments.max_delay_ms)]
    from tvmflow.bundle import read_manifest

    path = f"/v2/models/{read_manifest(bundle).name}/infer"
    with contextlib.ExitStack() as stack:

        def start(*details: Any) -> Server:
            return stack.enter_context(running(*details))

        document = {"inputs": tensors}
        servers = {"tvmflow": start(ours, path, document, arguments.threads)}
        if arguments.baseline is not None:
            command = [str(arguments.baseline), *ours[1:]]
            servers[_BASELINE] = start(command, path, document, arguments.threads)
        if "onnxruntime" in arguments.peers:
            command = [sys.executable, __file__, str(model), "--peer", "--threads", str(arguments.threads)]
            servers["onnxruntime"] = start(command, "/v2/models/model/infer", document, arguments.threads)
        if "mlflow" in arguments.peers:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            folder = saved_by_mlflow(model, state)
            command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
            command += ["--port", str(port)]
            inputs = {"inputs": {name: array.tolist() for name, array in arrays.items()}}
            servers["mlflow"] = start(command, "/invocations", inputs, arguments.threads, port)
        for _ in range(arguments.rounds):
            for clients in arguments.clients:
                for server in servers.values():
                    server.turn(clients, arguments.seconds)
    return _ratios(servers, arguments.clients)


def _ratios(servers: dict[str, Server], counts: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    ours = servers.pop("tvmflow")
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for name, server in servers.items():
        for clients in counts:
            mine, theirs = sorted(ours.seconds[clients]), sorted(server.seconds[clients])
            ratios.setdefault(name, {})[str(clients)] = {
                "rate": statistics.median(ours.rates[clients]) / statistics.median(server.rates[clients]),
                "p50": statistics.median(mine) / statistics.median(theirs),
                "p99": mine[int(len(mine) * 0.99)] / theirs[int(len(theirs) * 0.99)],
            }
    return ratios


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="an ONNX file; without one, a network of digits' size")
    parser.add_argument(
        "--clients",
        type=separated(positive),
        default=[1, 8],
        metavar="N,...",
        help="at a time, separated by commas (1,8)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (1)")
    parser.add_argument("--max-delay-ms", type=float, default=0.0, help="of ours (0)")
    add_peers(parser, list(_TITLES))
    parser.add_argument("--baseline", type=Path, help="the command tvmflow of another version, as one more peer")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Compare the servers and print one table."""
    arguments = parse()
    if arguments.peer:
        peer(arguments.model, arguments.threads)
        return
    state = state_folder(arguments)
    ratios = compare(arguments, state)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("over", "clients", "rate", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "over" else "right")
    for name, by_clients in ratios.items():
        for clients, figures in by_clients.items():
            table.add_row(
                _TITLES.get(name, name), clients, *(f"{figures[item]:.2f}" for item in ("rate", "p50", "p99"))
            )
    Console(width=100).print(table, highlight=False)
    print(f"threads {arguments.threads}, {arguments.rounds} rounds of {arguments.seconds:g} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    run_main(main)
