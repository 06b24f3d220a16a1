"""The server's endpoints: the Open Inference Protocol's, and `/metrics`."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tvmflow import __version__
from tvmflow.errors import InputError
from tvmflow.serving import protocol
from tvmflow.serving.batching import Batcher, OverloadedError
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.source import ServedModel


class Service:
    """The state that the endpoints share: the served version, and the batcher that runs it.

    `model` changes in the event loop's thread only, so that it cannot change while a request for it is read and queued.
    A request of more than `body_limit` bytes is refused.
    """

    def __init__(self, model: ServedModel, batcher: Batcher, metrics: Metrics, body_limit: int) -> None:
        self.model = model
        self.batcher = batcher
        self.metrics = metrics
        self.body_limit = body_limit
        self.is_draining = False
        self.problem: str | None = None
        """Why the server does not serve the version that its source names; None while it does."""
        metrics.model.labels(model.name, model.version).set(1)

    def swap(self, following: ServedModel) -> None:
        """Serve another version, which is loaded and warm, from the next request on.

        The previous version is closed after its last request.
        """
        previous, self.model, self.problem = self.model, following, None
        self.metrics.model.remove(previous.name, previous.version)
        self.metrics.model.labels(following.name, following.version).set(1)
        self.metrics.swaps.inc()
        # The batcher closes it after the last request for it.
        self.batcher.call(previous.model.close)


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
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        return self._readiness({})

    async def model_ready(self, request: Request) -> Response:
        model = self._served_model(request)
        return self._readiness({"name": model.name, "version": model.version})

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
        with metrics.in_flight.track_inprogress():
            response = await self._infer(request)
        metrics.seconds.observe(time.perf_counter() - start)
        return response

    async def _infer(self, request: Request) -> Response:
        body = await self._body(request)
        # Read again after the body: from here to the queue the event loop cannot swap the version.
        model = self._served_model(request)
        try:
            inference = protocol.parse(body, request.headers.get(protocol.HEADER_LENGTH), model.model.outputs)
            future = self._service.batcher.submit(model.model, model.model.check_inputs(inference.inputs))
            results = await asyncio.wrap_future(future)
            answer = protocol.render(inference, model.name, model.version, results)
        except InputError as error:
            raise HTTPException(400, str(error)) from error
        except OverloadedError as error:
            raise HTTPException(503, "too many requests wait; try again later", {"retry-after": "1"}) from error
        return Response(answer.body, headers=answer.headers)

    async def _body(self, request: Request) -> bytes:
        chunks, size, limit = [], 0, self._service.body_limit
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                # The rest is not read, so that the connection cannot serve another request.
                raise HTTPException(413, f"the request is larger than {limit} bytes", {"connection": "close"})
            chunks.append(chunk)
        return b"".join(chunks)

    def _served_model(self, request: Request) -> ServedModel:
        """The served version. Raises HTTPException, status 404, when the path names another model or version."""
        model = self._service.model
        name, version = request.path_params["name"], request.path_params.get("version", model.version)
        if name != model.name:
            raise HTTPException(404, f"there is no model {name!r} here; served is {model.name!r}")
        if version != model.version:
            raise HTTPException(404, f"version {version!r} of {name!r} is not served; served is {model.version!r}")
        return model

    def _readiness(self, document: dict[str, Any]) -> Response:
        is_ready = not self._service.is_draining
        document["ready"] = is_ready
        if self._service.problem is not None:
            document["problem"] = self._service.problem
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
