"""Running a bundle on another machine: on a server of TVM's RPC, which a tracker finds by its key."""

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
    """Load a bundle on another machine, call `work` with the loaded model on this one, and return its result.

    The model runs on an RPC server that has `key` at the tracker at `host` and `port`. The bundle's files are checked
    on this machine; the CPU features of the server's machine are not. The whole call takes `timeout` seconds at most,
    while TVM itself would wait for ever for a busy or silent server. Raises BundleError for a damaged bundle, and
    RemoteError when there is no tracker, no such server, or no answer in time. A TvmflowError of `work` is raised
    unchanged, any other exception as a RemoteError.
    """

    def run_remotely() -> T:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            manifest = extract(bundle, Path(folder))
            session = _session(host, port, key, timeout)
            try:
                with CompiledModel(manifest, Path(folder), manifest.threads, session=session) as model:
                    return work(model)
            finally:
                # Otherwise the server waits until this process frees the last object of the session.
                with contextlib.suppress(Exception):
                    session.get_function("CloseRPCConnection")()

    where = f"the RPC server with key {key!r} of tracker {host}:{port}"
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def report() -> None:
        try:
            outcome.put((run_remotely(), None))
        except BaseException as error:
            outcome.put((None, error))

    # A call that waits for a silent server cannot be interrupted: its thread stays until the process ends.
    threading.Thread(target=report, daemon=True).start()
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
    raise RemoteError(f"{where} failed ({_last_line(error)}); look at its log") from error


def _session(host: str, port: int, key: str, timeout: float) -> Any:
    tracker = Tracker(Address(host, port))
    keys = tracker.summary().keys
    if key not in keys:
        alternatives = f"its keys are {', '.join(keys)}" if keys else "it has no server at all"
        raise RemoteError(f"the RPC tracker at {host}:{port} has no server with key {key!r}; {alternatives}")
    while (match := tracker.request(key, timeout)) is None:
        pass  # `run` has raised its timeout by then; this thread may go on waiting.
    with without_torch():
        from tvm import rpc
    return rpc.connect(match.address.host, match.address.port, match.key, session_timeout=timeout)


def _last_line(error: BaseException) -> str:
    """The last line of an error's message, where TVM says what happened; at most 200 letters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
