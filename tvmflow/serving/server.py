"""The server process: it listens, follows its channel, and on SIGTERM answers accepted requests and ends."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from tvmflow.bundle import missing_weights
from tvmflow.errors import BundleError, SettingsError, StoreError, TvmflowError, UncheckedBundleError
from tvmflow.http_server import PatientServer
from tvmflow.serving.app import Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.source import ServedModel, Source, load

_LOG = logging.getLogger("tvmflow.serving")
# The time that requests accepted before SIGTERM have to be answered.
DRAIN_SECONDS = 30
# The time that a batch has to end after that, when nobody waits for its answers any more.
_LAST_SECONDS = 5
# The longest time between two attempts to check a version.
_LONGEST_PAUSE = 600


@dataclass(frozen=True)
class Options:
    """The server's options.

    `threads` is the number of a model's workers, None for TVM_NUM_THREADS, else the machine's cores, at most the
    bundle's `max_threads`; port 0 means a free port.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    threads: int | None = None
    max_batch: int = 64
    max_delay: float = 0.0
    """Seconds."""
    limits: Limits = field(default_factory=Limits)
    grpc_port: int | None = None
    """The port for gRPC; None for none, 0 for a free one."""
    poll: float = 5.0
    """Seconds between two polls of the channel."""


Announce = Callable[[str, str | None, Sequence[ServedModel]], object]
"""Called with the server's URL, the address for gRPC or None, and the served versions."""


def serve(sources: Sequence[Source], options: Options, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT; must be called by the main thread. A batch that hangs ends the process with 1.

    Calls `announce` as soon as the server listens. Raises SettingsError when it cannot listen on the address or two
    sources have one name, and StoreError, BundleError or VerdictError when a source's version cannot be served.
    """
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise SettingsError(f"two of the models have one name ({', '.join(names)}); serve each by a server of its own")
    metrics = Metrics()
    with _bind_socket(options.host, options.port) as listener:
        models = [load(source, source.desired_version(), options.threads) for source in sources]
        batcher = Batcher(max_batch=options.max_batch, max_delay=options.max_delay, on_batch=metrics.batch_rows.observe)
        try:
            for model in models:
                _warm(batcher, model)
            service = Service(models, batcher, metrics, options.limits)
            asyncio.run(_serve(service, sources, options, listener, announce))
        finally:
            if not batcher.close(_LAST_SECONDS):
                _LOG.error("the batch that runs does not end; the server ends without it")
                # Python would wait for the model's threads.
                os._exit(1)


async def _serve(
    service: Service, sources: Sequence[Source], options: Options, listener: socket.socket, announce: Announce
) -> None:
    loop, is_over = asyncio.get_running_loop(), threading.Event()
    config = uvicorn.Config(
        application(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    rpc, rpc_address = None, None
    if options.grpc_port is not None:
        rpc, rpc_address = await _start_rpc(service, options.host, options.grpc_port)
    models = list(service.models.values())
    server = _Server(
        config, options.limits.timeout, on_startup=lambda: announce(_address(listener), rpc_address, models)
    )
    ends: list[asyncio.Task[None]] = []

    def drain() -> None:
        service.is_draining = True
        service.batcher.hurry()
        server.should_exit = True
        if rpc is not None:
            ends.append(asyncio.create_task(rpc.stop(DRAIN_SECONDS)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    for source in sources:
        if source.is_channel:
            # A daemon, so that a download that hangs does not keep the process from ending.
            watcher = Watcher(service, source, options, loop)
            threading.Thread(target=watcher.run, args=(is_over,), name="tvmflow-channel", daemon=True).start()
    try:
        await server.serve(sockets=[listener])
    finally:
        is_over.set()
        await asyncio.gather(*ends)
        service.converter.close()


async def _start_rpc(service: Service, host: str, port: int) -> tuple[Any, str]:
    """Start the gRPC server. Raises SettingsError when it cannot listen or grpcio is not installed."""
    try:
        from tvmflow.serving.rpc import start_server
    except ModuleNotFoundError as error:
        if error.name not in ("grpc", "google"):
            raise
        raise SettingsError("gRPC needs 'grpcio'; install it with `pip install tvmflow[serve]`") from error
    return await start_server(service, host, port)


class Watcher:
    """A loop that polls a channel and swaps the served version when the channel holds another one."""

    def __init__(self, service: Service, source: Source, options: Options, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._source = source
        self._options = options
        self._loop = loop
        # The version that was refused last, when it is tried again, and the pause after that attempt, in seconds.
        self._refused_version: str | None = None
        self._next_attempt, self._pause = 0.0, options.poll
        self._paths = [self._served_model.path]

    @property
    def _served_model(self) -> ServedModel:
        return self._service.models[self._source.name]

    def run(self, is_over: threading.Event) -> None:
        """Poll every `options.poll` seconds until `is_over` is set."""
        while not is_over.wait(self._options.poll):
            try:
                self.poll()
            except RuntimeError:
                # The loop was closed meanwhile.
                if not is_over.is_set():
                    raise

    def poll(self) -> None:
        """Poll once: if the channel holds another version, load and verify it, run it once, then swap to it.

        A version that fails is refused until the channel has held another one. One that this machine cannot check now
        is tried again after a pause that doubles; a store that fails is polled again.
        """
        try:
            version = self._source.desired_version()
        except TvmflowError as error:
            self._report(f"the channel cannot be read: {error}")
            self._service.metrics.failed_polls.inc()
            return
        if version == self._served_model.version:
            self._refused_version = None
            self._report(None)
            return
        if version != self._refused_version:
            self._pause = self._options.poll
        elif time.monotonic() < self._next_attempt:
            return
        try:
            following = load(self._source, version, self._options.threads)
            _warm(self._service.batcher, following)
        except StoreError as error:
            # The next poll tries again.
            self._report(f"version {version} cannot be fetched: {error}")
            self._service.metrics.failed_polls.inc()
            return
        except (UncheckedBundleError, OSError, MemoryError) as error:
            self._refuse(version, self._pause, f"version {version} cannot be checked now, and will be again: {error}")
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return
        except Exception as error:
            self._refuse(version, math.inf, f"version {version} is refused: {error}")
            return
        self._refused_version = None
        _LOG.info("version %s takes over from %s", version, self._served_model.version)
        is_done = threading.Event()

        def swap() -> None:
            self._service.swap(following)
            is_done.set()

        self._loop.call_soon_threadsafe(swap)
        is_done.wait()
        self._keep_two(following.path)

    def _refuse(self, version: str, pause: float, problem: str) -> None:
        """Refuse a version for so many seconds."""
        self._refused_version, self._next_attempt = version, time.monotonic() + pause
        # Who sees the count rise finds the problem.
        self._report(problem)
        self._service.metrics.failed_swaps.inc()

    def _keep_two(self, path: Path | None) -> None:
        """Remove the bundles that this server fetched, but for the last two: a rollback finds its bundle here.

        Weights that lie beside them go with the last bundle that needs them.
        """
        self._paths = [*(item for item in self._paths if item != path), path]
        last_two = {file for item in self._paths[-2:] for file in _list_files(item)}
        for file in {file for item in self._paths[:-2] for file in _list_files(item)} - last_two:
            file.unlink(missing_ok=True)
        del self._paths[:-2]

    def _report(self, problem: str | None) -> None:
        """Log a new problem, and let the readiness endpoints show it; None when there is none any more."""
        problems, name = self._service.problems, self._source.name
        if problem is None:
            problems.pop(name, None)
        elif problem != problems.get(name):
            _LOG.warning("%s; still serving %s", problem, self._served_model.version)
            problems[name] = problem


def _list_files(path: Path | None) -> list[Path]:
    """Return the file of a bundle, and that of its weights where it is without them; none where it is gone."""
    if path is None or not path.exists():
        return []
    try:
        weights = missing_weights(path)
    except BundleError:  # somebody has changed the file since it was loaded
        weights = None
    return [path] if weights is None else [path, path.with_name(weights.sha256)]


class _Server(PatientServer):
    """The server without uvicorn's signal handlers, which would end the process; calls `on_startup` when it listens."""

    def __init__(self, config: uvicorn.Config, patience: float, on_startup: Callable[[], object]) -> None:
        super().__init__(config, patience)
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _warm(batcher: Batcher, model: ServedModel) -> None:
    """Run the golden sample in the batcher's thread: the first call creates that thread's virtual machine."""
    batcher.call(lambda: model.model(**model.model.sample[0])).result()


@contextlib.contextmanager
def _bind_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the address that does not listen yet: an address in use shows before a model is loaded.

    Raises SettingsError.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        # The protocol is given because asyncio sets TCP_NODELAY only then; without it every answer takes 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(
            f"{host!r} is no address to listen on ({error.strerror or error}); correct --host"
        ) from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(
                f"port {port} of {host} cannot be taken ({reason}); choose another with --port"
            ) from error
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
