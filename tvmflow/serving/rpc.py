"""The server's endpoints over gRPC: the Open Inference Protocol, beside REST and with the same models and limits."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from tvmflow import __version__
from tvmflow.bundle import Manifest
from tvmflow.errors import InputError, SettingsError
from tvmflow.serving import messages, protocol
from tvmflow.serving.app import Service, UnknownModelError
from tvmflow.serving.limits import OverloadedError
from tvmflow.serving.messages import CLASSES, SERVICE
from tvmflow.serving.protocol import InferRequest

_LOG = logging.getLogger("tvmflow.serving")
# A message has more than the bytes of its tensors: names and shapes.
_MESSAGE_BYTES = 1 << 16
# gRPC takes no larger limit.
_LARGEST_MESSAGE = (1 << 31) - 1

Context = Any
"""`grpc.aio.ServicerContext`."""
Method = Callable[[bytes, Context], Awaitable[Any]]
"""From the bytes of a request's message to the message of the response."""


async def start_server(service: Service, host: str, port: int) -> tuple[Any, str]:
    """Start a gRPC server in the running event loop; return it, and its address as HOST:PORT.

    Port 0 takes a free one. Raises SettingsError when it cannot listen there.
    """
    most = min(service.limits.body + _MESSAGE_BYTES, _LARGEST_MESSAGE)
    options = [("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=[*options, ("grpc.max_send_message_length", -1)])
    endpoints = _Endpoints(service)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            endpoints.guard(method),
            response_serializer=CLASSES[f"{name}Response"].SerializeToString,
        )
        for name, method in endpoints.methods().items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    place = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_insecure_port(f"{place}:{port}")
    except RuntimeError as error:
        raise SettingsError(f"port {port} of {host} cannot be taken; choose another with --grpc-port") from error
    await server.start()
    return server, f"{place}:{bound}"


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    def methods(self) -> dict[str, Method]:
        """Return the protocol's methods by name."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }

    def guard(self, method: Method) -> Method:
        """Return the method with its errors turned into gRPC's status codes, and its answers counted."""

        async def call(body: bytes, context: Context) -> Any:
            code, text = grpc.StatusCode.INTERNAL, "the model could not be run; the server's log says why"
            try:
                answer = await method(body, context)
                self._service.metrics.requests.labels("OK").inc()
                return answer
            except UnknownModelError as error:
                code, text = grpc.StatusCode.NOT_FOUND, str(error)
            except InputError as error:
                code, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            except OverloadedError:
                code, text = grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests wait; try again later"
            except TimeoutError:
                code, text = grpc.StatusCode.DEADLINE_EXCEEDED, "the answer was not ready in time"
            except Exception:
                _LOG.exception("a request failed")
            self._service.metrics.requests.labels(code.name).inc()
            return await context.abort(code, text)

        return call

    async def server_live(self, body: bytes, context: Context) -> Any:
        return CLASSES["ServerLiveResponse"](live=self._service.is_live)

    async def server_ready(self, body: bytes, context: Context) -> Any:
        return CLASSES["ServerReadyResponse"](ready=self._service.is_ready)

    async def model_ready(self, body: bytes, context: Context) -> Any:
        self._service.find(*_model_of(body))
        return CLASSES["ModelReadyResponse"](ready=self._service.is_ready)

    async def server_metadata(self, body: bytes, context: Context) -> Any:
        return CLASSES["ServerMetadataResponse"](name="tvmflow", version=__version__)

    async def model_metadata(self, body: bytes, context: Context) -> Any:
        model = self._service.find(*_model_of(body))
        inputs, outputs = (protocol.describe(specs) for specs in (model.model.inputs, model.model.outputs))
        return CLASSES["ModelMetadataResponse"](
            name=model.name, versions=[model.version], platform="tvm", inputs=inputs, outputs=outputs
        )

    async def model_infer(self, body: bytes, context: Context) -> Any:
        metrics, start = self._service.metrics, time.perf_counter()
        # gRPC itself ends the call at the client's deadline, and cancels this coroutine.
        with metrics.in_flight.track_inprogress(), self._service.room.hold() as take:
            async with asyncio.timeout(self._service.limits.timeout):
                answer = await self._infer(body, take)
        metrics.seconds.observe(time.perf_counter() - start)
        return answer

    async def _infer(self, body: bytes, take: Callable[[int], int]) -> Any:
        take(len(body))

        def read(manifest: Manifest) -> Awaitable[InferRequest]:
            return self._service.converter.run(messages.text_size(body, manifest), messages.parse, body, manifest)

        model, inference, results = await self._service.infer(*_model_of(body), read, len(body), take)
        response = CLASSES["ModelInferResponse"](
            model_name=model.name, model_version=model.version, id=inference.id or ""
        )
        for output in inference.outputs:
            array = results[output.name]
            response.outputs.add(
                name=output.name, datatype=protocol.DATATYPES[array.dtype.name], shape=list(array.shape)
            )
            response.raw_output_contents.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return response


def _model_of(body: bytes) -> tuple[str, str | None]:
    """The name of the model that a request is for, and the version if it names one. Raises InputError."""
    # Of all requests, these two fields are the first.
    head = messages.decode("ModelReadyRequest", body)
    return head.name, head.version or None
