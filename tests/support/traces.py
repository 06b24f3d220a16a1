"""Traces in Perfetto's own format, as Perfetto reads them."""

from pathlib import Path
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos


class Slice(NamedTuple):
    """A slice of a thread: its name, its start and its length in ns, and its details."""

    thread: str
    name: str
    start: int
    length: int
    details: dict[str, str]


class PerfettoTrace(NamedTuple):
    """The process of a trace, its slices, and its curves by name: times in ns with values."""

    process: str
    slices: list[Slice]
    curves: dict[str, list[tuple[int, float]]]


def read_perfetto(path: Path) -> PerfettoTrace:
    """Read a trace; an end belongs to the last slice of its track that is open."""
    trace: Any = protos.Trace.FromString(path.read_bytes())
    tracks = {packet.track_descriptor.uuid: packet.track_descriptor for packet in trace.packet}
    (process,) = [track.process.process_name for track in tracks.values() if track.HasField("process")]
    slices: list[Slice] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    stacks: dict[int, list[tuple[Any, int]]] = {}
    for packet in trace.packet:
        event, time = packet.track_event, packet.timestamp
        stack = stacks.setdefault(event.track_uuid, [])
        match event.type:
            case protos.TrackEvent.TYPE_SLICE_BEGIN:
                stack.append((event, time))
            case protos.TrackEvent.TYPE_SLICE_END:
                began, start = stack.pop()
                details = {item.name: item.string_value for item in began.debug_annotations}
                thread = tracks[event.track_uuid].thread.thread_name
                slices.append(Slice(thread, began.name, start, time - start, details))
            case protos.TrackEvent.TYPE_COUNTER:
                curves.setdefault(tracks[event.track_uuid].name, []).append((time, event.double_counter_value))
    assert not any(stacks.values()), "a slice has no end"
    return PerfettoTrace(process, slices, curves)
