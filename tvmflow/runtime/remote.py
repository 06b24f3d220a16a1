"""A bundle run on another machine: sent to a server of TVM's RPC, which a tracker finds by its key."""

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tvmflow.bundle import extract
from tvmflow.errors import RemoteError, TvmflowError
from tvmflow.runtime.library import without_torch
from tvmflow.runtime.model import CompiledModel
from tvmflow.runtime.tracker import Address, Tracker

T = TypeVar("T")


def run(bundle: Path, host: str, port: int, key: str, timeout: float, work: Callable[[CompiledModel], T]) -> T:
    """Load a bundle on a server with `key` of the tracker at `host` and `port`, and do `work` with the model.

    The bundle is checked here, save that the machine is the server's and not asked for its CPU's features. All of it
    takes `timeout` seconds at most: TVM waits for ever for a server that is busy or has fallen silent. Raises
    RemoteError when there is no tracker, no such server, or no answer in time.
    """

    def there() -> T:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            manifest = extract(bundle, Path(folder))
            session = _session(host, port, key, timeout)
            try:
                with CompiledModel(manifest, Path(folder), manifest.threads, session=session) as model:
                    return work(model)
            finally:
                # Else the server waits until the last object of the session is gone here.
                with contextlib.suppress(Exception):
                    session.get_function("CloseRPCConnection")()

    where = f"the RPC server with key {key!r} of tracker {host}:{port}"
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def watched() -> None:
        try:
            outcome.put((there(), None))
        except BaseException as error:
            outcome.put((None, error))

    # A call that waits for a silent server cannot be interrupted: its thread is left behind, and ends with the process.
    threading.Thread(target=watched, daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout)
    except queue.Empty:
        raise RemoteError(
            f"{where} gave no answer in {timeout:g} s; it is busy or hangs: try again, or allow more with --rpc-timeout"
        ) from None
    if error is None:
        return result  # type: ignore[return-value]
    if isinstance(error, TvmflowError) or not isinstance(error, Exception):
        raise error
    raise RemoteError(f"{where} failed ({_words(error)}); look at its log") from error


def _session(host: str, port: int, key: str, timeout: float) -> Any:
    tracker = Tracker(Address(host, port))
    keys = tracker.summary().keys
    if key not in keys:
        known = f"its keys are {', '.join(keys)}" if keys else "it has no server at all"
        raise RemoteError(f"the RPC tracker at {host}:{port} has no server with key {key!r}; {known}")
    while (place := tracker.request(key, timeout)) is None:
        pass  # Whoever waits for us has given up by then.
    with without_torch():
        from tvm import rpc
    return rpc.connect(place.address.host, place.address.port, place.word, session_timeout=timeout)


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
