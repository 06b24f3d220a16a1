"""Grouped convolutions whose groups are narrower than a vector: one vector of output channels spans several groups.

Those groups have as many input channels as output channels, so one vector holds their inputs. One shuffle of it brings
the first input channel of its group to every lane, the next shuffle the second channel, and so on.
"""

from functools import cache

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvmflow.compiler import intrinsics

_NAMES = "tvmflow.groups."
_DESCRIPTION = """\
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    step = T.int64()
    A = T.match_buffer(a, ({lanes},), "float32", offset_factor=1)
    B = T.match_buffer(b, ({size}, {lanes}), "float32", offset_factor=1, strides=[step, 1])
    C = T.match_buffer(c, ({lanes},), "float32", offset_factor=1)
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:{lanes}], B[0:{size}, 0:{lanes}])
        T.writes(C[0:{lanes}])
"""
_MEANING = """\
        for k, l in T.grid({size}, {lanes}):
            with T.sblock("update"):
                vl, vk = T.axis.remap("SR", [l, k])
                C[vl] = C[vl] + A[vl // {size} * {size} + vk] * B[vk, vl]
"""
_STEP = """\
        C[T.ramp(0, 1, {lanes})] = C.vload([0], "float32x{lanes}") + T.Shuffle(
            [A.vload([0], "float32x{lanes}")], {places}
        ) * B.vload([{k}, 0], "float32x{lanes}")
"""


def use(sch: Schedule, size: int, lanes: int, channel: LoopRV) -> None:
    """Replace the loop `channel` over a group's input channels, and the loop over lanes inside it, by shuffles.

    `size` is the number of channels of a group, `lanes` the number of lanes. Raises TVM's ScheduleError if the loops do
    not compute such a convolution.
    """
    name = f"{_NAMES}{size}.{lanes}"
    register(name)
    sch.tensorize(channel, name)


@cache
def register(name: str) -> None:
    """Register the tensor intrinsic `name`, which writes such shuffles; TVM needs it to replay a schedule's trace.

    Ignores a name that is not one of this module's.
    """
    if not name.startswith(_NAMES):
        return
    size, lanes = map(int, name.removeprefix(_NAMES).split("."))
    steps = (
        _STEP.format(lanes=lanes, k=k, places=[lane // size * size + k for lane in range(lanes)]) for k in range(size)
    )
    head, meaning = (text.format(size=size, lanes=lanes) for text in (_DESCRIPTION, _MEANING))
    intrinsics.define(name, head, meaning, "".join(steps))
