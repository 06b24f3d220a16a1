"""Functions of their own for chosen sizes of symbolic dimensions."""

from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper

from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower, workloads
from tvmflow.compiler.importer import Imported
from tvmflow.errors import BuildError
from tvmflow.hardware.target import Target

WEIGHT = np.random.default_rng(0).standard_normal((24, 48)).astype(np.float32)


@pytest.fixture
def imported(make_model) -> Imported:  # type: ignore[no-untyped-def]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    model: Path = make_model(nodes, [("x", ["batch", "length", 24])], ["y"], {"w": WEIGHT})
    return import_onnx(model)


def run(model: CompiledModel, function: str, x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    (result,) = model.load().run(x, function=function)
    return result


@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_a_variant_and_main_compute_the_same(imported: Imported, target: Target, weights: str) -> None:
    options = BuildOptions(weights=weights, variants=({"batch": 2, "length": 5},))  # type: ignore[arg-type]
    model = build(imported, target, options)
    assert model.variants == {"main_batch2_length5": {"batch": 2, "length": 5}}
    x = np.random.default_rng(1).standard_normal((2, 5, 24)).astype(np.float32)
    expected = np.maximum(x @ WEIGHT, 0)
    for function in ("main", "main_batch2_length5"):
        np.testing.assert_allclose(run(model, function, x), expected, rtol=1e-4, atol=1e-5)


def test_main_still_takes_other_sizes(imported: Imported, target: Target) -> None:
    model = build(imported, target, BuildOptions(variants=({"batch": 2, "length": 5},)))
    x = np.random.default_rng(1).standard_normal((3, 7, 24)).astype(np.float32)
    np.testing.assert_allclose(run(model, "main", x), np.maximum(x @ WEIGHT, 0), rtol=1e-4, atol=1e-5)


def test_a_dimension_that_is_not_fixed_stays_symbolic_in_a_variant(imported: Imported, target: Target) -> None:
    model = build(imported, target, BuildOptions(variants=({"batch": 1},)))
    for length in (1, 6):
        x = np.random.default_rng(1).standard_normal((1, length, 24)).astype(np.float32)
        np.testing.assert_allclose(run(model, "main_batch1", x), np.maximum(x @ WEIGHT, 0), rtol=1e-4, atol=1e-5)


def test_weights_are_kept_once_for_all_variants(imported: Imported, target: Target) -> None:
    alone = build(imported, target, BuildOptions(weights="apart"))
    with_variant = build(imported, target, BuildOptions(weights="apart", variants=({"batch": 1, "length": 4},)))
    sizes = [sum(value.nbytes for value in model.params.values()) for model in (alone, with_variant)]
    assert sizes[1] <= 2 * sizes[0]
    digests = {value.tobytes() for value in with_variant.params.values()}
    assert len(digests) == len(with_variant.params)


def test_a_variant_gives_the_tuner_static_workloads(imported: Imported, target: Target) -> None:
    def static(options: BuildOptions) -> int:
        functions = [item.func for item in workloads(lower(imported, target, options))]
        return sum(
            all(isinstance(size, tvm.tirx.IntImm) for buffer in function.params for size in buffer.ty.shape)
            for function in functions
            if all(hasattr(buffer.ty, "shape") for buffer in function.params)
        )

    assert static(BuildOptions()) == 0
    assert static(BuildOptions(variants=({"batch": 1, "length": 4},))) > 0


def test_positions_that_the_sizes_of_a_variant_make_constant_are_added(make_model, target: Target) -> None:  # type: ignore[no-untyped-def]
    """As learned positions of a text are: the first of a table, as many as the text is long."""
    table = np.random.default_rng(0).standard_normal((9, 24)).astype(np.float32)
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length", "zero"], ["positions"]),
        helper.make_node("Add", ["x", "positions"], ["y"]),
    ]
    constants = {"table": table, "zero": np.zeros(1, np.int64)}
    model: Path = make_model(nodes, [("x", ["batch", "length", 24])], ["y"], constants)
    built = build(import_onnx(model), target, BuildOptions(variants=({"batch": 2, "length": 5},)))
    x = np.random.default_rng(1).standard_normal((2, 5, 24)).astype(np.float32)
    for function in ("main", "main_batch2_length5"):
        np.testing.assert_allclose(run(built, function, x), x + table[:5], rtol=1e-6)


def test_a_size_within_the_model_is_a_number_where_a_variant_gives_it(make_model, target: Target) -> None:  # type: ignore[no-untyped-def]
    """The rows of a table are as many as the text is long or as the table has, and a size of their own in `main`."""
    table = np.random.default_rng(0).standard_normal((9, 24)).astype(np.float32)
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length", "zero"], ["positions"]),
        helper.make_node("QuantizeLinear", ["positions", "scale", "middle"], ["bytes"]),
        helper.make_node("DequantizeLinear", ["bytes", "scale", "middle"], ["rounded"]),
        helper.make_node("Add", ["x", "rounded"], ["y"]),
    ]
    quantisation = {"scale": np.float32(0.25), "middle": np.uint8(128)}
    constants = {"table": table, "zero": np.zeros(1, np.int64), **quantisation}
    model: Path = make_model(nodes, [("x", ["batch", "length", 24])], ["y"], constants)
    options = BuildOptions(weights="apart", variants=({"batch": 2, "length": 5}, {"length": 1}))
    built = build(import_onnx(model), target, options)
    for function, length in (("main", 5), ("main_batch2_length5", 5), ("main_length1", 1)):
        x = np.random.default_rng(1).standard_normal((2, length, 24)).astype(np.float32)
        np.testing.assert_allclose(run(built, function, x), x + np.rint(table[:length] * 4) / 4, rtol=1e-6)


def test_what_is_written_for_any_size_is_fused_where_a_variant_gives_the_size(make_model, target: Target) -> None:  # type: ignore[no-untyped-def]
    """The frames of a signal that is free are as many as a quotient of its length says."""
    constants = {"step": np.array(2), "window": np.hanning(4).astype(np.float32)}
    nodes = [helper.make_node("STFT", ["x", "step", "window"], ["y"])]
    model: Path = make_model(nodes, [("x", ["batch", "samples", 1])], ["y"], constants)
    lowered = lower(import_onnx(model), target, BuildOptions(variants=({"batch": 1, "samples": 9},)))
    fused = [item.func for item in workloads(lowered) if item.name.startswith("fused_frames_multiply")]
    assert [[int(size) for size in buffer.ty.shape] for buffer in fused[1].params] == [[1, 9], [4], [1, 3, 4]]


@pytest.mark.parametrize(
    ("node", "shape", "sizes", "message"),
    [
        ("Conv", [1, "c", 5, "w"], {"c": 5}, r"does not take the sizes c=5; tune for sizes that it takes$"),
        (
            "Reshape",
            ["n", "c"],
            {"n": 2, "c": 5},
            r"; the model must take the sizes that it gets functions for: c=5, n=2$",
        ),
    ],
    ids=["others free", "all fixed"],
)
def test_sizes_that_the_model_does_not_take_are_named(
    node: str,
    shape: list[int | str],
    sizes: dict[str, int],
    message: str,
    make_model,  # type: ignore[no-untyped-def]
    target: Target,
) -> None:
    weight = np.ones((8, 4, 3, 3), np.float32) if node == "Conv" else np.array([-1, 4])
    model: Path = make_model([helper.make_node(node, ["x", "w"], ["y"])], [("x", shape)], ["y"], {"w": weight})
    with pytest.raises(BuildError, match=message):
        lower(import_onnx(model), target, BuildOptions(variants=(sizes,)))
