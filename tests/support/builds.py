"""Building models with the compiler alone, and what it did to them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
import tvm
import tvm_ffi
from tvm import relax

from support.models import join_models, joined_name
from tvmflow.arrays import Array
from tvmflow.bundle import DIRECT_MAIN, MAIN_CONSTANTS
from tvmflow.compiler import BuildOptions, Choices, CompiledModel, LoadedModel, build, import_onnx
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.passes import canonicalize
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session

T = TypeVar("T")


@dataclass
class Preferring(Choices):
    """Choices that take an option wherever it is one, and the cost model's elsewhere."""

    option: str = ""

    def choose(
        self,
        kind: str,
        subject: str,
        options: Mapping[str, T],
        parts: tuple[str, ...] = (),
        cycles: Mapping[str, float] = MappingProxyType({}),
    ) -> T:
        """The value of `option`, or else of the cost model's first."""
        first = super().choose(kind, subject, options, parts, cycles)
        return options.get(self.option, first)


def canonical_form(path: Path, disabled: Sequence[str] = ()) -> tvm.IRModule:
    """A model with its weights bound, after the canonicalisation passes without those `disabled`."""
    imported = import_onnx(path)
    variables = imported.mod["main"].params[len(imported.inputs) :]
    values = (tvm.runtime.tensor(value) for value in imported.params.values())
    mod = relax.transform.BindParams("main", dict(zip(variables, values, strict=True)))(imported.mod)
    with tvm.transform.PassContext(opt_level=3, disabled_pass=list(disabled)):
        mod = tvm.transform.Sequential(canonicalize())(mod)
    return relax.transform.DeadCodeElimination()(mod)


def rule_counts(model: CompiledModel) -> Counter[str]:
    """How many functions that run with a built model each schedule rule scheduled, by the rule's name."""
    return Counter(rule for _, rule in model.schedules if rule != "packing")


def run_in_memory(model: CompiledModel, feeds: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Return the outputs for each of `feeds`, the inputs in order, of a library that is neither linked nor exported.

    The inputs are in memory that is aligned to an element alone. Where `main` has a direct form, that must give the
    same outputs to the last bit.
    """
    loaded = model.load()
    outputs = [loaded.run(*map(unaligned, feed)) for feed in feeds]
    if has_direct_main(loaded.library):
        for feed, expected in zip(feeds, outputs, strict=True):
            for direct, array in zip(run_directly(loaded, feed, expected), expected, strict=True):
                np.testing.assert_array_equal(direct, array)
    return outputs


def unaligned(array: Array) -> Any:
    """Return a tensor of a copy of an array that begins one element behind an address of which 64 is a divisor."""
    array = np.asarray(array, order="C")
    if not array.size:
        # NumPy gives an empty array strides of its own.
        return tvm.runtime.tensor(array)
    memory = np.empty(array.nbytes + 64 + array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return tvm_ffi.from_dlpack(copy)


def has_direct_main(library: Any) -> bool:
    """Whether the `main` of a library has a direct form."""
    return bool(library.implements_function(DIRECT_MAIN, query_imports=True))


def run_directly(loaded: LoadedModel, inputs: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Run the direct form of `main` and return its outputs, which are written over what memory like `like` had."""
    results = [tvm.runtime.tensor(np.full_like(array, 77)) for array in like]
    arguments = [*map(unaligned, inputs), *loaded.weights, *loaded.machine[MAIN_CONSTANTS](), *results]
    loaded.library.get_function(DIRECT_MAIN, query_imports=True)(*arguments)
    return [result.numpy() for result in results]


def assert_same_as_onnxruntime(
    path: Path,
    feeds: Sequence[Mapping[str, Array]],
    target: Target,
    options: BuildOptions | None = None,
    rtol: float = 1e-4,
    choices: Choices | None = None,
    inspect: Inspection | None = None,
) -> CompiledModel:
    """Build an ONNX file and compare its outputs with those of ONNX Runtime for each of `feeds`, inputs by name.

    The tolerance is `rtol` of an element, or 1e-5 of the output's largest.
    """
    imported = import_onnx(path)
    model = build(imported, target, options, choices=choices, inspect=inspect)
    session = open_session(path, threads=1)
    outputs = run_in_memory(model, [[feed[item.name] for item in imported.inputs] for feed in feeds])
    for feed, actual in zip(feeds, outputs, strict=True):
        expected = session.run(None, dict(feed))
        for output, ours, theirs in zip(imported.outputs, actual, expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), output.name
            scale = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)) or 1.0
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-5 * scale, err_msg=output.name)
    return model


def assert_all_same_as_onnxruntime(
    cases: Sequence[tuple[Path, Sequence[Mapping[str, Array]]]],
    target: Target,
    options: BuildOptions | None = None,
    choices: Choices | None = None,
) -> CompiledModel:
    """Build several ONNX files as one model, and compare as `assert_same_as_onnxruntime` does.

    Each case is a file and the feeds to run it on. A failure names the output: `m3_y` is output y of the fourth case.
    """
    path = cases[0][0].with_name("joined.onnx")
    onnx.save(join_models([onnx.load(case) for case, _ in cases]), path)
    feeds = [
        {
            joined_name(place, name): value
            for place, (_, feeds) in enumerate(cases)
            for name, value in feeds[min(turn, len(feeds) - 1)].items()
        }
        for turn in range(max(len(feeds) for _, feeds in cases))
    ]
    return assert_same_as_onnxruntime(path, feeds, target, options, choices=choices)
