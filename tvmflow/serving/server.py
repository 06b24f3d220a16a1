"""The server's process: it listens, watches the channel, and on SIGTERM answers what it has accepted and ends."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from tvmflow.errors import SettingsError, StoreError, TvmflowError
from tvmflow.serving.app import Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.source import Served, Source, load

_LOG = logging.getLogger("tvmflow.serving")
# How long requests that were accepted before SIGTERM may take.
_DRAIN_SECONDS = 30


@dataclass(frozen=True)
class Options:
    """How to serve: `threads` are TVM's workers, by default the bundle's; `port` 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8080
    threads: int | None = None
    max_batch: int = 64
    max_delay: float = 0.0
    """Seconds."""
    max_body: int = 64 * 2**20
    """Bytes."""
    poll: float = 5.0
    """Seconds between two looks at the channel."""


def serve(source: Source, options: Options, announce: Callable[[str, Served], object]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is told the address, and what is served there, as soon as it is.

    Must be called by the main thread. Raises SettingsError when the address cannot be listened on, StoreError,
    BundleError or VerdictError when there is nothing to serve.
    """
    metrics = Metrics()
    with _bound(options.host, options.port) as listener:
        served = load(source, source.wanted(), options.threads)
        batcher = Batcher(max_batch=options.max_batch, max_delay=options.max_delay, on_batch=metrics.batch_rows.observe)
        try:
            _warm(batcher, served)
            service = Service(served, batcher, metrics, options.max_body)
            asyncio.run(_serve(service, source, options, listener, announce))
        finally:
            batcher.close()


async def _serve(
    service: Service,
    source: Source,
    options: Options,
    listener: socket.socket,
    announce: Callable[[str, Served], object],
) -> None:
    loop, ended = asyncio.get_running_loop(), threading.Event()
    config = uvicorn.Config(
        application(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    server = _Server(config, on_startup=lambda: announce(_address(listener), service.served))

    def drain() -> None:
        service.draining = True
        service.batcher.hurry()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    if source.moves:
        # A daemon: a download that hangs must not keep the process from ending.
        watcher = Watcher(service, source, options, loop)
        threading.Thread(target=watcher.run, args=(ended,), name="tvmflow-channel", daemon=True).start()
    try:
        await server.serve(sockets=[listener])
    finally:
        ended.set()


class Watcher:
    """Looks at a channel, and swaps the version that is served when the channel has moved."""

    def __init__(self, service: Service, source: Source, options: Options, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._source = source
        self._options = options
        self._loop = loop
        # A version that was refused is not tried again before the channel has pointed elsewhere.
        self._refused: str | None = None

    def run(self, ended: threading.Event) -> None:
        """Look every so often until `ended` is set."""
        while not ended.wait(self._options.poll):
            try:
                self.look()
            except RuntimeError:
                # The loop was closed meanwhile.
                if not ended.is_set():
                    raise

    def look(self) -> None:
        """Look once: load, verify and warm what is wanted beside what is served, then swap."""
        try:
            version = self._source.wanted()
        except TvmflowError as error:
            self._service.metrics.failed_polls.inc()
            self._say(f"the channel cannot be read: {error}")
            return
        if version == self._service.served.version:
            self._refused = None
            self._say(None)
            return
        if version == self._refused:
            return
        try:
            following = load(self._source, version, self._options.threads)
            _warm(self._service.batcher, following)
        except StoreError as error:
            # Perhaps it can be fetched next time.
            self._service.metrics.failed_polls.inc()
            self._say(f"version {version} cannot be fetched: {error}")
            return
        except Exception as error:
            self._refused = version
            self._service.metrics.failed_swaps.inc()
            self._say(f"version {version} is refused: {error}")
            return
        self._refused = None
        _LOG.info("version %s takes over from %s", version, self._service.served.version)
        swapped = threading.Event()

        def swap() -> None:
            self._service.swap(following)
            swapped.set()

        self._loop.call_soon_threadsafe(swap)
        swapped.wait()

    def _say(self, problem: str | None) -> None:
        if problem is not None and problem != self._service.problem:
            _LOG.warning("%s; serving %s on", problem, self._service.served.version)
        self._service.problem = problem


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which end the process by the signal; tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_startup: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _warm(batcher: Batcher, served: Served) -> None:
    """Run the golden sample where requests will run: the first call makes the thread's virtual machine."""
    batcher.call(lambda: served.model(**served.model.sample[0])).result()


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the address but does not listen yet: the address is known to be free before work is spent."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # With the protocol said: asyncio sets TCP_NODELAY only then, without which every answer takes 40 ms.
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
