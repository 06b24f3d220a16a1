"""The server's endpoints over gRPC: the Open Inference Protocol, beside REST and with the same models and limits."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np

from tvmflow import __version__
from tvmflow.errors import InputError, SettingsError
from tvmflow.serving import protocol
from tvmflow.serving.app import Service, UnknownModelError
from tvmflow.serving.limits import OverloadedError
from tvmflow.serving.messages import CLASSES, SERVICE
from tvmflow.serving.protocol import InferRequest, OutputRequest

_LOG = logging.getLogger("tvmflow.serving")
# A message has more than the bytes of its tensors: names and shapes.
_MESSAGE_BYTES = 1 << 16
_FIELDS = ("bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents",
           "fp64_contents", "bytes_contents")  # fmt: skip

Context = Any
"""`grpc.aio.ServicerContext`."""


async def start_server(service: Service, host: str, port: int) -> tuple[Any, str]:
    """Start a gRPC server in the running event loop; return it, and its address as HOST:PORT.

    Port 0 takes a free one. Raises SettingsError when it cannot listen there.
    """
    options = [("grpc.max_receive_message_length", service.limits.body + _MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=[*options, ("grpc.max_send_message_length", -1)])
    endpoints = _Endpoints(service)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            endpoints.guarded(method),
            request_deserializer=CLASSES[f"{name}Request"].FromString,
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

    def methods(self) -> dict[str, Callable[[Any, Context], Awaitable[Any]]]:
        """Return the protocol's methods by name."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }

    def guarded(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return the method with its errors turned into gRPC's status codes, and its answers counted."""

        async def call(request: Any, context: Context) -> Any:
            code, text = grpc.StatusCode.INTERNAL, "the model could not be run; the server's log says why"
            try:
                answer = await method(request, context)
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

    async def server_live(self, request: Any, context: Context) -> Any:
        return CLASSES["ServerLiveResponse"](live=self._service.is_live)

    async def server_ready(self, request: Any, context: Context) -> Any:
        return CLASSES["ServerReadyResponse"](ready=self._service.is_ready)

    async def model_ready(self, request: Any, context: Context) -> Any:
        self._service.find(request.name, request.version or None)
        return CLASSES["ModelReadyResponse"](ready=self._service.is_ready)

    async def server_metadata(self, request: Any, context: Context) -> Any:
        return CLASSES["ServerMetadataResponse"](name="tvmflow", version=__version__)

    async def model_metadata(self, request: Any, context: Context) -> Any:
        model = self._service.find(request.name, request.version or None)
        inputs, outputs = (protocol.describe(specs) for specs in (model.model.inputs, model.model.outputs))
        return CLASSES["ModelMetadataResponse"](
            name=model.name, versions=[model.version], platform="tvm", inputs=inputs, outputs=outputs
        )

    async def model_infer(self, request: Any, context: Context) -> Any:
        metrics, start = self._service.metrics, time.perf_counter()
        # gRPC itself ends the call at the client's deadline, and cancels this coroutine.
        with metrics.in_flight.track_inprogress(), self._service.room.hold() as take:
            async with asyncio.timeout(self._service.limits.timeout):
                answer = await self._infer(request, take)
        metrics.seconds.observe(time.perf_counter() - start)
        return answer

    async def _infer(self, request: Any, take: Callable[[int], int]) -> Any:
        take(request.ByteSize())
        model = self._service.find(request.model_name, request.model_version or None)
        inference = _read(request, [spec.name for spec in model.model.outputs])
        results = await self._service.run(model, inference.inputs)
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


def _read(request: Any, names: list[str]) -> InferRequest:
    """The inputs of a request, and the outputs that it asks for, by default all `names`. Raises InputError."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs; expected one for each")
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    for index, item in enumerate(request.inputs):
        entry: dict[str, Any] = {"name": item.name, "datatype": item.datatype, "shape": list(item.shape)}
        if raw:
            entry["parameters"] = {"binary_data_size": len(raw[index])}
        else:
            entry["data"] = next((list(values) for name in _FIELDS if (values := getattr(item.contents, name))), [])
        name, array, _ = protocol.read_tensor(entry, memoryview(raw[index] if raw else b""))
        if name in inputs:
            raise InputError(f"input {name!r} is given twice")
        inputs[name] = array
    outputs = [output.name for output in request.outputs] or names
    for name in outputs:
        if name not in names:
            raise InputError(f"the model has no output {name!r}; it returns {', '.join(names)}")
    return InferRequest(request.id or None, inputs, tuple(OutputRequest(name, True) for name in outputs))
