"""The server's limits: probes are answered, requests end in time, those without room are told to come again."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tvmflow import runtime
from tvmflow.bundle import extract, pack, read_manifest
from tvmflow.serving import batching, conversion
from tvmflow.serving.app import TIMEOUT_HEADER, Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.conversion import Converter
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.source import ServedModel

URL = "/v2/models/small/infer"
MakeInputs = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]


class Server:
    """The application in this process; its batcher runs nothing before `open_gate`."""

    def __init__(self, service: Service, rows: list[int], client: httpx.AsyncClient) -> None:
        self.service, self.rows, self.client = service, rows, client
        self._gate, is_closed = threading.Event(), threading.Event()

        def wait() -> None:
            is_closed.set()
            self._gate.wait()

        service.batcher.call(wait)
        is_closed.wait()

    def open_gate(self) -> None:
        self._gate.set()

    async def waiting(self, count: int) -> None:
        """Return as soon as so many requests have been read."""
        while self.service.metrics.in_flight._value.get() < count or self.service.room.used == 0:
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(paths: dict[str, Path], limits: Limits) -> AsyncIterator[Server]:
    rows: list[int] = []
    batcher = Batcher(max_batch=8, max_delay=0.0, on_batch=rows.append)
    models = [ServedModel(name, "1", runtime.load(path)) for name, path in paths.items()]
    service = Service(models, batcher, Metrics(), limits)
    transport = httpx.ASGITransport(application(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
        server = Server(service, rows, client)
        try:
            yield server
        finally:
            server.open_gate()
            service.converter.close()
            batcher.close()
            for model in models:
                model.model.close()


Run = Callable[..., None]


@pytest.fixture
def run(bundle: Path) -> Run:
    """Runs a test's coroutine with a server of the small model."""

    def start(test: Callable[[Server], Coroutine[Any, Any, None]], **limits: Any) -> None:
        async def main() -> None:
            async with serving({"small": bundle}, Limits(**limits)) as server:
                await test(server)

        asyncio.run(main())

    return start


def body(arrays: dict[str, Any]) -> bytes:
    datatypes = {"float32": "FP32", "int64": "INT64"}
    entries = [
        {"name": name, "datatype": datatypes[array.dtype.name], "shape": list(array.shape), "data": array.tolist()}
        for name, array in arrays.items()
    ]
    return json.dumps({"inputs": entries}).encode()


def outputs(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {item["name"]: np.array(item["data"]).reshape(item["shape"]) for item in response.json()["outputs"]}


def test_a_probe_is_answered_while_a_large_request_is_parsed(run: Run) -> None:
    async def test(server: Server) -> None:
        large = asyncio.create_task(server.client.post(URL, content=b"[" + b"0," * 2**20 + b"0}"))
        await server.waiting(1)
        assert (await server.client.get("/v2/health/live")).status_code == 200
        assert not large.done()
        response = await large
        assert response.status_code == 400
        assert "not JSON" in response.json()["error"]

    run(test)


def test_a_large_request_gets_the_same_numbers(
    run: Run, inputs: MakeInputs, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Server) -> None:
        server.open_gate()
        answer, expected = outputs(await server.client.post(URL, content=body(inputs(3)))), reference("1", inputs(3))
        np.testing.assert_allclose(answer["sum"], expected["sum"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(answer["doubled"], expected["doubled"])
        refused = await server.client.post(URL, content=body({**inputs(3), "z": inputs(1)["y"]}))
        assert (refused.status_code, "'z'" in refused.json()["error"]) == (400, True)

    monkeypatch.setattr(conversion, "_SMALL_BYTES", 0)
    run(test)


def test_strings_as_bytes_count_as_text(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each becomes an object of Python, while numbers as bytes are read at once."""
    sizes = []

    async def run(converter: Converter, size: int, *arguments: object) -> None:
        sizes.append(size)

    monkeypatch.setattr(Converter, "run", run)
    manifest = read_manifest(bundle)
    for each in (manifest, replace(manifest, labels={"sum": ("a",)}), replace(manifest, labels={"count": ("a",)})):
        asyncio.run(Converter().parse(bytes(1000), "10", each))
    assert sizes == [10, 10, 1000]


@pytest.mark.parametrize("header", [True, False])
def test_a_request_that_is_not_answered_in_time_ends_and_frees_its_place(
    run: Run, inputs: MakeInputs, header: bool
) -> None:
    async def test(server: Server) -> None:
        headers = {TIMEOUT_HEADER: "1"} if header else {}
        response = await server.client.post(URL, content=body(inputs(1)), headers=headers)
        assert response.status_code == 504
        assert "within 0.001 seconds" in response.json()["error"]
        assert server.service.room.used == 0
        server.open_gate()
        server.service.batcher.call(lambda: None).result()
        # The request that had no time left was not run.
        assert server.rows == []

    run(test, timeout=60.0 if header else 0.001)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", ""])
def test_a_time_that_is_none_is_refused(run: Run, inputs: MakeInputs, value: str) -> None:
    async def test(server: Server) -> None:
        response = await server.client.post(URL, content=body(inputs(1)), headers={TIMEOUT_HEADER: value})
        assert response.status_code == 400
        assert TIMEOUT_HEADER in response.json()["error"]

    run(test)


def test_requests_beyond_the_bytes_that_may_wait_are_told_to_come_again(run: Run, inputs: MakeInputs) -> None:
    content = body(inputs(1))

    async def test(server: Server) -> None:
        # There is room for two, of the largest size each.
        first = [asyncio.create_task(server.client.post(URL, content=content)) for _ in range(2)]
        await server.waiting(2)
        refused = await server.client.post(URL, content=content)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        server.open_gate()
        assert [each.status_code for each in await asyncio.gather(*first)] == [200, 200]
        assert (await server.client.post(URL, content=content)).status_code == 200

    run(test, body=len(content), waiting=1)


def test_requests_beyond_the_queue_are_told_to_come_again(
    run: Run, inputs: MakeInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Server) -> None:
        refused = await server.client.post(URL, content=body(inputs(1)))
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)

    monkeypatch.setattr(batching, "QUEUE_LIMIT", 0)
    run(test)


def test_a_server_with_a_hung_batch_is_not_live(run: Run) -> None:
    async def test(server: Server) -> None:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/small/ready"):
            assert (await server.client.get(path)).status_code == 503
        server.open_gate()
        while (await server.client.get("/v2/health/live")).status_code != 200:
            await asyncio.sleep(0)

    run(test, hang=0.0)


def renamed(bundle: Path, name: str, folder: Path) -> Path:
    """A copy of a bundle with another name."""
    members = folder / "members"
    members.mkdir()
    manifest = extract(bundle, members)
    pack(folder / f"{name}.tar.gz", replace(manifest, name=name), {path.name: path for path in members.iterdir()})
    return folder / f"{name}.tar.gz"


def test_one_server_serves_several_models(
    serve: Any, bundles: dict[str, Path], inputs: MakeInputs, reference: Reference, tmp_path: Path
) -> None:
    other = renamed(bundles["2"], "other", tmp_path)
    with serve(bundles["1"], other) as running:
        for name, version in (("small", "1"), ("other", "2")):
            answer = outputs(running.client.post(f"/v2/models/{name}/infer", content=body(inputs(2))))
            np.testing.assert_allclose(answer["sum"], reference(version, inputs(2))["sum"], rtol=1e-5, atol=1e-6)
            assert running.client.get(f"/v2/models/{name}").json()["name"] == name
        assert "'small', 'other'" in running.client.get("/v2/models/none").json()["error"]


def test_two_models_of_one_name_are_refused(command: Any, bundles: dict[str, Path]) -> None:
    process = command(bundles["1"], bundles["2"], "--port", 0)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "two of the models have one name" in error
