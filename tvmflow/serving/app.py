"""The server's endpoints: the Open Inference Protocol's, and `/metrics`."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tvmflow import __version__
from tvmflow.bundle import Manifest
from tvmflow.errors import InputError
from tvmflow.serving import protocol
from tvmflow.serving.batching import Batcher
from tvmflow.serving.conversion import Converter
from tvmflow.serving.limits import Limits, OverloadedError, Room
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.protocol import InferRequest
from tvmflow.serving.source import ServedModel

if TYPE_CHECKING:
    from tvmflow.arrays import NamedArrays


Read = Callable[[Manifest], Awaitable[InferRequest]]

TIMEOUT_HEADER = "tvmflow-timeout-ms"


class UnknownModelError(Exception):
    """The server serves no model of the name, or another version of it."""


class Service:
    """The state that the endpoints share: the served versions by their models' names, and the batcher that runs them.

    `models` changes in the event loop's thread only, so that it cannot change while a request is queued.
    """

    def __init__(self, models: Iterable[ServedModel], batcher: Batcher, metrics: Metrics, limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        self.batcher = batcher
        self.metrics = metrics
        self.limits = limits
        # A request of the largest size has room when it is alone: its text, and as many bytes again for its numbers.
        self.room = Room(max(limits.waiting, 2 * limits.body))
        self.converter = Converter()
        self.is_draining = False
        self.problems: dict[str, str] = {}
        """By a model's name, why the server does not serve the version that its source names."""
        for model in self.models.values():
            metrics.model.labels(model.name, model.version).set(1)

    @property
    def is_live(self) -> bool:
        """Whether the batcher is idle, or has been running its present batch for at most `limits.hang` seconds."""
        return self.batcher.busy_seconds <= self.limits.hang

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests: it is live, and has not begun to shut down."""
        return not self.is_draining and self.is_live

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """Return the served version of a model, which must be `version` unless that is None.

        Raises UnknownModelError when another version is served, or none.
        """
        model = self.models.get(name)
        if model is None:
            names = ", ".join(map(repr, self.models))
            raise UnknownModelError(f"there is no model {protocol.brief(name)} here; served is {names}")
        if version not in (None, model.version):
            raise UnknownModelError(
                f"version {protocol.brief(version)} of {name!r} is not served; served is {model.version!r}"
            )
        return model

    def swap(self, following: ServedModel) -> None:
        """Serve `following` in place of the version of the same model that is served now, from the next request on.

        The new version must be loaded, and have run once. The previous version is closed after its last request.
        """
        previous, self.models[following.name] = self.models[following.name], following
        self.problems.pop(following.name, None)
        self.metrics.model.remove(previous.name, previous.version)
        self.metrics.model.labels(following.name, following.version).set(1)
        self.metrics.swaps.inc()
        # The batcher closes it after the last request for it.
        self.batcher.call(previous.model.close)

    async def infer(
        self, name: str, version: str | None, read: Read, size: int, take: Callable[[int], int]
    ) -> "tuple[ServedModel, InferRequest, NamedArrays]":
        """Read a request of `size` bytes, and run its model; return the model, the request and the outputs by name.

        `version` is None for the one that is served. `read` returns the request as arrays for the model of a manifest.
        `take` reserves bytes in the room that all requests share. Raises UnknownModelError when no such version is
        served, InputError for a request that breaks the protocol or does not fit the model, and OverloadedError when
        too many requests wait.
        """
        while True:
            model = self.find(name, version)
            request = await read(model.model.manifest)
            # The version may have been swapped meanwhile; from here to the queue it cannot be.
            if self.find(name, version) is model:
                break
        # Numbers may take more bytes than their text.
        take(max(0, sum(array.nbytes for array in request.inputs.values()) - size))
        return model, request, await self.run(model, request.inputs)

    async def run(self, model: ServedModel, inputs: "NamedArrays") -> "NamedArrays":
        """Run a model on arrays by name, perhaps in a batch with other requests, and return the outputs by name.

        If the call is cancelled, for example at its timeout, its request is taken out of the queue; a batch that is
        running already runs to its end. Raises InputError for inputs that do not fit the model, OverloadedError when
        too many requests wait.
        """
        future = self.batcher.submit(model.model, model.model.check_inputs(inputs))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self.batcher.discard(future)


def application(service: Service) -> ASGIApp:
    """Return the endpoints of a service as an ASGI application."""
    model = "/v2/models/{name}"
    version = model + "/versions/{version}"
    endpoints = _Endpoints(service)
    app = Starlette(
        # In the order in which a request's path is compared with them: the most frequent first.
        routes=[
            *(Route(f"{path}/infer", endpoints.infer, methods=["POST"]) for path in (model, version)),
            Route("/v2", endpoints.server),
            Route("/v2/health/live", endpoints.live),
            Route("/v2/health/ready", endpoints.ready),
            *(Route(path, endpoints.metadata) for path in (model, version)),
            *(Route(f"{path}/ready", endpoints.model_ready) for path in (model, version)),
            Route("/metrics", endpoints.metrics),
        ],
        exception_handlers={HTTPException: _answer_refusal, Exception: _answer_failure},
    )
    # Outermost, so that it also counts the answers to failures.
    return _CountingApplication(app, service.metrics)


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def server(self, request: Request) -> Response:
        return JSONResponse({"name": "tvmflow", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self, request: Request) -> Response:
        is_live = self._service.is_live
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        return self._readiness({}, self._service.problems.values())

    async def model_ready(self, request: Request) -> Response:
        model = self._served_model(request)
        problem = self._service.problems.get(model.name)
        return self._readiness({"name": model.name, "version": model.version}, [] if problem is None else [problem])

    async def metadata(self, request: Request) -> Response:
        model = self._served_model(request)
        return JSONResponse(
            {
                "name": model.name,
                "versions": [model.version],
                "platform": "tvm",
                "inputs": protocol.describe(model.model.inputs),
                "outputs": protocol.describe(model.model.outputs),
            }
        )

    async def metrics(self, request: Request) -> Response:
        text = generate_latest(self._service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def infer(self, request: Request) -> Response:
        metrics, start = self._service.metrics, time.perf_counter()
        self._served_model(request)
        seconds = self._timeout(request)
        with metrics.in_flight.track_inprogress():
            try:
                async with asyncio.timeout(seconds):
                    response = await self._infer(request)
            except TimeoutError as error:
                raise HTTPException(504, f"the answer was not ready within {seconds:g} seconds") from error
        metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _infer(self, request: Request) -> Response:
        try:
            with self._service.room.hold() as take:
                return await self._answer(request, await self._body(request, take), take)
        except InputError as error:
            raise HTTPException(400, str(error)) from error
        except UnknownModelError as error:
            raise HTTPException(404, str(error)) from error
        except OverloadedError as error:
            # The rest of the body is not read, so that the connection cannot serve another request.
            headers = {"retry-after": "1", "connection": "close"}
            raise HTTPException(429, "too many requests wait; try again later", headers) from error

    async def _body(self, request: Request, take: Callable[[int], int]) -> bytes:
        chunks, limit = [], self._service.limits.body
        refusal = HTTPException(413, f"the request is larger than {limit} bytes", {"connection": "close"})
        # The server has checked that the header is a number; a chunked request lacks it.
        if int(request.headers.get("content-length", 0)) > limit:
            raise refusal
        async for chunk in request.stream():
            if take(len(chunk)) > limit:
                raise refusal
            chunks.append(chunk)
        return b"".join(chunks)

    async def _answer(self, request: Request, body: bytes, take: Callable[[int], int]) -> Response:
        service, header_length = self._service, request.headers.get(protocol.HEADER_LENGTH)

        def read(manifest: Manifest) -> Awaitable[InferRequest]:
            return service.converter.parse(body, header_length, manifest)

        name, version = request.path_params["name"], request.path_params.get("version")
        model, inference, results = await service.infer(name, version, read, len(body), take)
        answer = await service.converter.render(inference, model.name, model.version, results)
        return Response(answer.body, headers=answer.headers)

    def _timeout(self, request: Request) -> float:
        """The seconds that the request has: those of its header, at most the server's. Raises HTTPException."""
        limit, header = self._service.limits.timeout, request.headers.get(TIMEOUT_HEADER)
        if header is None:
            return limit
        try:
            seconds = float(header) / 1e3
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise HTTPException(400, f"{TIMEOUT_HEADER} is {header!r}, expected a positive number of milliseconds")
        return min(limit, seconds)

    def _served_model(self, request: Request) -> ServedModel:
        """The served version. Raises HTTPException, status 404, when the path names another model or version."""
        try:
            return self._service.find(request.path_params["name"], request.path_params.get("version"))
        except UnknownModelError as error:
            raise HTTPException(404, str(error)) from error

    def _readiness(self, document: dict[str, Any], problems: Iterable[str]) -> Response:
        is_ready = document["ready"] = self._service.is_ready
        if text := "; ".join(problems):
            document["problem"] = text
        return JSONResponse(document, 200 if is_ready else 503)


class _CountingApplication:
    """Counts answers by their status code."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for this class only
    headers: Mapping[str, str] | None = error.headers
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the model could not be run; the server's log says why"}, 500)
