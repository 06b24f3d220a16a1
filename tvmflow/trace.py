"""Traces: what runs when, in the JSON format of Chrome's traces, which Perfetto (https://ui.perfetto.dev) opens.

The format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from pathlib import Path
from typing import Any

_PROCESS = 1


class Trace:
    """The events of a trace; times are in seconds, of one clock."""

    def __init__(self, name: str) -> None:
        """Start a trace without events; `name` is shown above its threads."""
        self._events: list[dict[str, Any]] = []
        self._threads: dict[str, int] = {}
        self._describe("process_name", 0, name)

    def add_slice(self, thread: str, name: str, start: float, seconds: float, **details: object) -> None:
        """Add something that ran for `seconds` on the thread with this name; Perfetto shows the details beside it."""
        self._add("X", name, start, tid=self._find(thread), dur=seconds * 1e6, args=details)

    def add_count(self, name: str, time: float, value: float) -> None:
        """Add a value that holds from `time` on; the values of one name are a curve."""
        self._add("C", name, time, tid=0, args={name: value})

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    def _find(self, thread: str) -> int:
        """The number of a thread; threads are shown in the order in which they come first."""
        if thread not in self._threads:
            self._threads[thread] = len(self._threads) + 1
            self._describe("thread_name", self._threads[thread], thread)
        return self._threads[thread]

    def _describe(self, what: str, thread: int, name: str) -> None:
        self._events.append({"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}})

    def _add(self, kind: str, name: str, time: float, **fields: Any) -> None:
        self._events.append({"ph": kind, "name": name, "ts": time * 1e6, "pid": _PROCESS, **fields})
