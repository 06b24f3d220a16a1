"""Traces: what runs when, as files that Perfetto (https://ui.perfetto.dev) opens.

A file is in Perfetto's own format (protobuf, https://perfetto.dev/docs/reference/trace-packet-proto) or in the JSON
format of Chrome's traces (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PERFETTO_SUFFIXES = (".pftrace", ".perfetto-trace")
"""The suffixes of files in Perfetto's own format, which needs the package `perfetto`; all others are JSON."""

# The only process of a trace, and the only sequence of its packets.
_PROCESS = _SEQUENCE = 1


class _Slice(NamedTuple):
    thread: str
    name: str
    start: float
    seconds: float
    details: dict[str, object]


class _Count(NamedTuple):
    name: str
    time: float
    value: float


class Trace:
    """The slices of threads and the curves of a trace; times are in seconds, of one clock."""

    def __init__(self, name: str) -> None:
        """Start an empty trace; `name` is shown above its threads."""
        self._name = name
        self._slices: list[_Slice] = []
        self._counts: list[_Count] = []

    def add_slice(self, thread: str, name: str, start: float, seconds: float, **details: object) -> None:
        """Add something that ran for `seconds` on the thread with this name; Perfetto shows the details beside it."""
        self._slices.append(_Slice(thread, name, start, seconds, details))

    def add_count(self, name: str, time: float, value: float) -> None:
        """Add a number of bytes that holds from `time` on; the values of one name are a curve."""
        self._counts.append(_Count(name, time, value))

    def write(self, path: Path) -> None:
        """Write the trace to `path` in the format of its suffix.

        Raises OSError when the file cannot be written, ImportError when the package for the format is not installed.
        """
        if path.suffix in PERFETTO_SUFFIXES:
            path.write_bytes(self._perfetto())
        else:
            path.write_text(json.dumps({"traceEvents": list(self._chrome()), "displayTimeUnit": "ms"}))

    def _threads(self) -> dict[str, int]:
        """The numbers of the threads by name; they are shown in the order in which they come first."""
        return {name: number for number, name in enumerate(dict.fromkeys(item.thread for item in self._slices), 1)}

    def _chrome(self) -> Iterator[dict[str, Any]]:
        threads = self._threads()
        yield _event("M", "process_name", 0, args={"name": self._name})
        for name, number in threads.items():
            yield _event("M", "thread_name", number, args={"name": name})
        for item in self._slices:
            times = {"ts": item.start * 1e6, "dur": item.seconds * 1e6}
            yield _event("X", item.name, threads[item.thread], **times, args=item.details)
        for count in self._counts:
            yield _event("C", count.name, 0, ts=count.time * 1e6, args={count.name: count.value})

    def _perfetto(self) -> bytes:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        trace = protos.Trace()
        threads = self._threads()

        def add_track(number: int) -> Any:
            """Add a track; its identifier is `number`, and only the process has no parent."""
            track = trace.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
            track.uuid = number
            return track

        def add_event(kind: str, track: int, nanoseconds: int) -> Any:
            packet = trace.packet.add(timestamp=nanoseconds, trusted_packet_sequence_id=_SEQUENCE)
            packet.track_event.type = getattr(protos.TrackEvent, f"TYPE_{kind}")
            packet.track_event.track_uuid = track
            return packet.track_event

        # Numbers of tracks: the process, its threads, its curves.
        process = 1 + len(threads)
        curves: dict[str, int] = {}
        process_track = add_track(process).process
        process_track.pid, process_track.process_name = _PROCESS, self._name
        for name, number in threads.items():
            thread = add_track(number).thread
            thread.pid, thread.tid, thread.thread_name = _PROCESS, number, name
        for name in dict.fromkeys(count.name for count in self._counts):
            curves[name] = process + 1 + len(curves)
            track = add_track(curves[name])
            track.parent_uuid, track.name = process, name
            track.counter.unit = protos.CounterDescriptor.UNIT_SIZE_BYTES
        for name, number in threads.items():
            for item, begins, time in _nest([item for item in self._slices if item.thread == name]):
                event = add_event("SLICE_BEGIN" if begins else "SLICE_END", number, time)
                if begins:
                    event.name = item.name
                    for key, value in item.details.items():
                        event.debug_annotations.add(name=key, string_value=str(value))
        for count in self._counts:
            add_event("COUNTER", curves[count.name], _nanoseconds(count.time)).double_counter_value = count.value
        return bytes(trace.SerializeToString())


def _event(kind: str, name: str, thread: int, **fields: object) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": thread, **fields}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _nest(slices: list[_Slice]) -> Iterator[tuple[_Slice, bool, int]]:
    """Yield the begin (True) and the end of each slice of a thread with its time in ns, in the order of a call stack.

    A slice that begins within another one ends with it at the latest.
    """
    open_slices: list[tuple[_Slice, int]] = []
    for item in sorted(slices, key=lambda item: (item.start, -item.seconds)):
        start = _nanoseconds(item.start)
        while open_slices and open_slices[-1][1] <= start:
            last, time = open_slices.pop()
            yield last, False, time
        end = _nanoseconds(item.start + item.seconds)
        open_slices.append((item, min(end, open_slices[-1][1]) if open_slices else end))
        yield item, True, start
    for last, time in reversed(open_slices):
        yield last, False, time
