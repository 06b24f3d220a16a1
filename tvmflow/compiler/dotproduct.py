"""Dot-product instructions: each lane of a vector adds several products to one number.

The products are 2 of bfloat16 numbers, added to a float32, or 4 of 8-bit or 2 of 16-bit integers, added to an int32.
The numbers of one operand that a lane multiplies are a group. The left operand is one group of neighbouring numbers,
the same for all lanes. The right operand is one group per lane.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvmflow.compiler import intrinsics
from tvmflow.hardware.target import Target


@dataclass(frozen=True)
class Dot:
    """A dot product of `group` numbers of type `data` and `group` of type `weight`, added to one `accumulator` number.

    A bfloat16 is stored as its bits (uint16), because TVM converts numbers of its own bfloat16 type to float32 and
    keeps them as float32 in local buffers.
    """

    name: str
    data: str
    weight: str
    accumulator: str
    group: int

    def product(self, data: Any, weight: Any) -> Any:
        """Return the product of two numbers, as the expression that `tensorize` replaces by the instruction."""
        return self.widen(data) * self.widen(weight)

    def widen(self, value: Any) -> Any:
        """Return an expression that converts a number of type `data` or `weight` to the accumulator's type."""
        if self is not BF16:
            return value.astype(self.accumulator)
        bits = tirx.shift_left(value.astype("uint32"), tirx.const(16, "uint32"))
        return tirx.reinterpret("float32", bits)


BF16 = Dot("bf16", "uint16", "uint16", "float32", 2)
# x86-64 with VNNI, and AMX.
INT8 = Dot("int8", "uint8", "int8", "int32", 4)
# ARM with i8mm, and ARM with dot products alone.
MIXED = Dot("mixed", "uint8", "int8", "int32", 4)
SIGNED = Dot("signed", "int8", "int8", "int32", 4)
# Every x86-64: two instructions, of which one multiplies and adds the pairs, and the other adds these sums.
PAIRS = Dot("pairs", "int16", "int16", "int32", 2)
DOTS = {dot.name: dot for dot in (BF16, INT8, MIXED, SIGNED, PAIRS)}


def integer_dot(target: Target) -> Dot | None:
    """Return the dot product that multiplies the 8-bit integers of a quantised model on a CPU; None if it has none."""
    if {"avx512_vnni", "avx_vnni"} & set(target.features):
        return INT8
    if target.arch == "x86_64":
        return PAIRS
    if "i8mm" in target.features:
        return MIXED
    return SIGNED if "asimddp" in target.features else None


_NAMES = "tvmflow.dot."
# By the number of 32-bit lanes: the width of the vector in bits.
_BITS = {4: 128, 8: 256, 16: 512}
# LLVM's names of the instructions for integers, by the number of lanes.
_INSTRUCTIONS = {
    INT8: {lanes: f"llvm.x86.avx512.vpdpbusd.{bits}" for lanes, bits in _BITS.items()},
    MIXED: {4: "llvm.aarch64.neon.usdot.v4i32.v16i8"},
    SIGNED: {4: "llvm.aarch64.neon.sdot.v4i32.v16i8"},
    PAIRS: {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"},
}

# TVM has no operands of LLVM's type for bfloat16: the instruction stands in a function with operands of 32 bits.
_BF16_LLVM = """\
declare <{n} x float> @{name}(<{n} x float>, <{n2} x bfloat>, <{n2} x bfloat>)
define linkonce_odr <{n} x float> @dot_bf16_{bits}(<{n} x float> %sum, <{n} x i32> %a, <{n} x i32> %b) alwaysinline {{
  %left = bitcast <{n} x i32> %a to <{n2} x bfloat>
  %right = bitcast <{n} x i32> %b to <{n2} x bfloat>
  %result = call <{n} x float> @{name}(
      <{n} x float> %sum, <{n2} x bfloat> %left, <{n2} x bfloat> %right)
  ret <{n} x float> %result
}}
"""

# The name of that instruction in LLVM, by architecture and by the number of lanes.
_BF16_NAMES = {
    "x86_64": {lanes: f"llvm.x86.avx512bf16.dpbf16ps.{bits}" for lanes, bits in _BITS.items()},
    "aarch64": {4: "llvm.aarch64.neon.bfdot.v4f32.v8bf16"},
}

_FUNCTION = """\
@T.prim_func(s_tir=True)
def main(
    A: T.Buffer(({group},), "{data}", offset_factor=1),
    B: T.Buffer(({lanes}, {group}), "{weight}", offset_factor=1),
    C: T.Buffer(({lanes},), "{accumulator}", offset_factor=1),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:{lanes}], A[0:{group}], B[0:{lanes}, 0:{group}])
        T.writes(C[0:{lanes}])
"""
_MEANING = """\
        for i, k in T.grid({lanes}, {group}):
            with T.sblock("update"):
                vi, vk = T.axis.remap("SR", [i, k])
                C[vi] = C[vi] + {left_wide} * {right_wide}
"""
# The conversion of a narrow number to the accumulator's type, written in TVM's script.
WIDE = {
    "bf16": 'T.reinterpret(T.shift_left(T.Cast("uint32", {value}), T.uint32(16)), dtype="float32")',
    **{dot.name: 'T.Cast("int32", {value})' for dot in _INSTRUCTIONS},
}
_LEFT = 'T.broadcast(T.reinterpret(A.vload([0], "{data}x{group}"), dtype="int32"), {lanes})'
_RIGHT = 'B.vload([0, 0], "{weight}x{total}")'
_BF16_CALL = (
    'T.call_pure_extern("float32x{lanes}", "dot_bf16_{bits}", {sum}, {left}, '
    'T.reinterpret({right}, dtype="int32x{lanes}"))'
)
_CALL = (
    'T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id("{instruction}"), {sum}, '
    'T.reinterpret({left}, dtype="{data}x{total}"), {right}, dtype="int32x{lanes}")'
)
# The instruction for pairs does not add to a sum.
_PAIRS_CALL = "{sum} + " + _CALL.replace("{sum}, ", "")


def add_dot_int8(total: Any, left: Any, right: Any, lanes: int) -> Any:
    """Return `total`, int32, plus the dot product of 4 uint8 numbers with 4 int8 numbers of each lane.

    `left` has 4 numbers, `right` 4 for each of the `lanes`, one lane after the other. Raises KeyError for a number of
    lanes without such an instruction.
    """
    return add_bytes(INT8, total, tirx.Broadcast(tirx.reinterpret("int32", left), lanes), right, lanes)


def add_bytes(unit: Dot, total: Any, left: Any, right: Any, lanes: int) -> Any:
    """Return `total`, int32, plus the dot product by `unit` of 4 uint8 numbers with 4 int8 numbers of each lane.

    Both are vectors of these bytes, of whatever type. The numbers of `left` are at most 127 where `unit` is `SIGNED`.
    Raises KeyError for a number of lanes without such an instruction.
    """
    data, weight = (
        tirx.reinterpret(f"{kind}x{4 * lanes}", value) for kind, value in ((unit.data, left), ("int8", right))
    )
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", _INSTRUCTIONS[unit][lanes], total, data, weight)


# LLVM's names of the instruction that multiplies uint8 by int8 and adds the pairs to int16, by the number of lanes.
_PAIRS_OF_BYTES = {
    4: "llvm.x86.ssse3.pmadd.ub.sw.128",
    8: "llvm.x86.avx2.pmadd.ub.sw",
    16: "llvm.x86.avx512.pmaddubs.w.512",
}


def add_pairs_of_bytes(total: Any, left: Any, right: Any, lanes: int) -> Any:
    """Return `total`, two int16 for each lane, plus two products of an uint8 and an int8 each, on x86-64 with SSSE3.

    `left` and `right` are int32 vectors of 4 bytes in each lane. Sums beyond 16 bits are cut off. Raises KeyError for a
    number of lanes without such an instruction.
    """
    data, weight = (
        tirx.reinterpret(f"{kind}x{4 * lanes}", value) for kind, value in (("uint8", left), ("int8", right))
    )
    return total + tirx.call_llvm_pure_intrin(f"int16x{2 * lanes}", _PAIRS_OF_BYTES[lanes], data, weight)


def sum_of_pairs(pairs: Any, lanes: int) -> Any:
    """Return the int32 sum of two int16 of each lane, on x86-64."""
    ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", _INSTRUCTIONS[PAIRS][lanes], pairs, ones)


def has_dot(lanes: int) -> bool:
    """Return whether there are dot-product instructions of so many lanes."""
    return lanes in _BITS


# A call of this operator rounds a float32 to bfloat16. It stands in scheduled functions only. When loops have become
# vectors, code generation replaces it by a call of a function of `_ROUNDING_LLVM`.
_ROUND = "tvmflow.round_bf16"
# LLVM writes one instruction for it. On x86-64 that takes subnormal numbers for zero, as the dot product does.
_ROUNDING_LLVM = """\
define linkonce_odr {wide} @round_bf16_{n}({single} %x) alwaysinline {{
  %narrow = fptrunc {single} %x to {narrow}
  %bits = bitcast {narrow} %narrow to {wide}
  ret {wide} %bits
}}
"""
# LLVM has no instruction for two lanes; it would call a function of the compiler's library.
_ROUNDING_TWO_LLVM = """\
define linkonce_odr <2 x i16> @round_bf16_2(<2 x float> %x) alwaysinline {
  %four = shufflevector <2 x float> %x, <2 x float> %x, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  %bits = call <4 x i16> @round_bf16_4(<4 x float> %four)
  %two = shufflevector <4 x i16> %bits, <4 x i16> %bits, <2 x i32> <i32 0, i32 1>
  ret <2 x i16> %two
}
"""
_QUIET_NAN, _INFINITY, _MAGNITUDE = 0x7FC0, 0x7F800000, 0x7FFFFFFF


def round_bf16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even, and return its bits as uint16. NaN stays NaN."""
    bits = tirx.reinterpret("uint32", value)
    half = tirx.const(16, "uint32")
    odd = tirx.shift_right(bits, half) & tirx.const(1, "uint32")
    rounded = tirx.shift_right(bits + odd + tirx.const(0x7FFF, "uint32"), half)
    # Rounding could turn a NaN into infinity or zero. The bits are compared, because TVM simplifies `x != x` to false.
    is_nan = (bits & tirx.const(_MAGNITUDE, "uint32")) > tirx.const(_INFINITY, "uint32")
    return tirx.Select(is_nan, tirx.const(_QUIET_NAN, "uint32"), rounded).astype("uint16")


def use_rounding(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace every `round_bf16` in a scheduled function by one instruction, and attach the LLVM IR that it needs.

    A function without `round_bf16` is returned unchanged.
    """

    def instruct(cast: tirx.Cast) -> Any:
        value = _rounded(cast)
        return cast if value is None else tirx.call_intrin("uint16", _ROUND, value)

    body = tvm_ffi.structural_map(func.body, (tirx.Cast, instruct))
    if body.same_as(func.body):
        return func
    code = "".join(_rounding_code(lanes) for lanes in (1, *_BITS)) + _ROUNDING_TWO_LLVM
    return func.with_body(intrinsics.attach(body, code))


def _rounded(cast: tirx.Cast) -> Any | None:
    """The float32 that `round_bf16` rounds in a conversion of numbers; None for other conversions."""
    select = cast.value
    if (
        str(cast.ty.dtype) != "uint16"
        or not isinstance(select, tirx.Select)
        or not _is_number(select.true_value, _QUIET_NAN)
    ):
        return None
    # TVM writes `a > b` as `b < a` in places.
    condition = select.condition
    if isinstance(condition, tirx.GT):
        magnitude, infinity = condition.a, condition.b
    elif isinstance(condition, tirx.LT):
        magnitude, infinity = condition.b, condition.a
    else:
        return None
    if not _is_number(infinity, _INFINITY) or not isinstance(magnitude, tirx.BitwiseAnd):
        return None
    if not _is_number(magnitude.b, _MAGNITUDE) or not isinstance(magnitude.a, tvm.ir.Call):
        return None
    value = magnitude.a.args[0]
    return value if str(value.ty.dtype) == "float32" else None


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _rounding_code(lanes: int) -> str:
    words = {
        name: kind if lanes == 1 else f"<{lanes} x {kind}>"
        for name, kind in (("single", "float"), ("narrow", "bfloat"), ("wide", "i16"))
    }
    return _ROUNDING_LLVM.format(n=lanes, **words)


def _lower_rounding(call: tvm.ir.Call) -> Any:
    """Write a rounding of a number, or of a vector of them, as a call of the function that `use_rounding` attaches.

    Raises ValueError for a number of lanes without such a function.
    """
    dtype = str(call.ty.dtype)
    lanes = int(dtype.partition("x")[2] or 1)
    if lanes not in (1, 2, *_BITS):
        raise ValueError(f"no rounding has {lanes} lanes")
    return tirx.call_pure_extern(dtype, f"round_bf16_{lanes}", call.args[0])


tvm.ir.register_op_attr(_ROUND, "TVectorizable", True)
tvm.ir.register_op_attr(_ROUND, "TCallEffectKind", tirx.CallEffectKind.Pure.value)
tirx.op.register_intrin_lowering(_ROUND, target="llvm", f=_lower_rounding)


class Widened:
    """A view of a tensor whose elements `widen` converts to float32 when they are read.

    By default the elements are the bits of bfloat16 (uint16).
    """

    dtype = "float32"

    def __init__(self, narrow: te.Tensor, widen: Callable[[Any], Any] = BF16.widen) -> None:
        self._narrow = narrow
        self._widen = widen
        self.shape = narrow.shape

    def __getitem__(self, index: Any) -> Any:
        return self._widen(self._narrow[index])


def tensorize(sch: Schedule, arch: str, dot: Dot, lanes: int, task: LoopRV, lane: LoopRV) -> None:
    """Replace the loop `lane` of `lanes` iterations, and the loop inside it, by the dot-product instruction `dot`.

    The inner loop adds the `dot.group` products of one lane. For bfloat16, the LLVM IR that the instruction of the
    architecture `arch` needs, for all numbers of lanes, is attached to `task`, a loop around `lane`. Raises ValueError
    unless `lanes` is 4, 8 or 16, and TVM's ScheduleError if the loops do not compute such a dot product.
    """
    if lanes not in _BITS:
        raise ValueError(f"no dot product has {lanes} lanes")
    if dot is BF16:
        attach_bf16(sch, arch, task)
    sch.tensorize(lane, _intrinsic(dot, lanes))


def attach_bf16(sch: Schedule, arch: str, task: LoopRV) -> None:
    """Attach the functions of an architecture's dot products to a loop.

    Their names, `dot_bf16_128`, `dot_bf16_256` and `dot_bf16_512`, end in the bits of their vectors.
    """
    names = _BF16_NAMES[arch].items()
    code = "".join(_BF16_LLVM.format(n=lanes, n2=2 * lanes, bits=_BITS[lanes], name=name) for lanes, name in names)
    sch.annotate(task, "pragma_import_llvm", code)


def register(name: str) -> None:
    """Register the tensor intrinsic of the instruction `name` with TVM, which needs it to replay a schedule's trace.

    Ignores a name that is not one of a dot-product instruction.
    """
    if name.startswith(_NAMES):
        kind, lanes = name.removeprefix(_NAMES).split(".")
        _intrinsic(DOTS[kind], int(lanes))


@cache
def _intrinsic(dot: Dot, lanes: int) -> str:
    """Register the instruction with TVM; returns its name there."""
    words = {
        "lanes": lanes,
        "bits": _BITS[lanes],
        "group": dot.group,
        "total": dot.group * lanes,
        "instruction": "" if dot is BF16 else _INSTRUCTIONS[dot][lanes],
        "data": dot.data,
        "weight": dot.weight,
        "accumulator": dot.accumulator,
        "left_wide": WIDE[dot.name].format(value="A[vk]"),
        "right_wide": WIDE[dot.name].format(value="B[vi, vk]"),
        "sum": f'C.vload([0], "{dot.accumulator}x{lanes}")',
    }
    words |= {"left": _LEFT.format(**words), "right": _RIGHT.format(**words)}
    head = _FUNCTION.format(**words)
    instruction = _BF16_CALL if dot is BF16 else _PAIRS_CALL if dot is PAIRS else _CALL
    call = f"        C[T.ramp(0, 1, {lanes})] = {instruction.format(**words)}\n"
    name = f"{_NAMES}{dot.name}.{lanes}"
    intrinsics.define(name, head, _MEANING.format(**words), call)
    return name
