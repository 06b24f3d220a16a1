"""Layers: every function of a bundle's run leads back to the nodes that it computes, with its error."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from support.models import make_model, value_info
from tasks.layers import find_layers, measure_peaks
from tvmflow.arrays import NamedArrays
from tvmflow.compiler import BuildOptions, Choices, build, import_onnx, lower
from tvmflow.hardware.target import resolve
from tvmflow.report.insight import Layer
from tvmflow.runtime.profile import find_functions, measure_calls


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    """A stem, a block that adds its input to the result of its two convolutions, and a classifier."""
    generator = np.random.default_rng(0)
    weights = {
        "stem": generator.normal(0, 0.3, (32, 3, 3, 3)),
        "first": generator.normal(0, 0.1, (32, 32, 3, 3)),
        "second": generator.normal(0, 0.1, (32, 32, 1, 1)),
        "dense": generator.normal(0, 0.1, (32, 10)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "stem"], ["a"], "/stem/conv/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "/stem/relu/Relu"),
        helper.make_node("Conv", ["b", "first"], ["c"], "/block/first/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], "/block/relu/Relu"),
        helper.make_node("Conv", ["d", "second"], ["e"], "/block/second/Conv"),
        helper.make_node("Add", ["e", "b"], ["f"], "/block/Add"),
        helper.make_node("GlobalAveragePool", ["f"], ["g"], "/pool/GlobalAveragePool"),
        helper.make_node("Flatten", ["g"], ["h"], "/Flatten"),
        helper.make_node("MatMul", ["h", "dense"], ["y"], "/classifier/MatMul"),
    ]
    arrays = {name: array.astype("float32") for name, array in weights.items()}
    return make_model(nodes, [("x", [1, 3, 24, 24])], ["y"], arrays)


def _scaled_layers(model: onnx.ModelProto, folder: Path, scale: float = 1.0, block: str = "apart") -> tuple[Layer, ...]:
    """The layers of a build of `model`, whose second weights are `scale` times those that ONNX Runtime sees.

    `block` says whether the two convolutions of its block are one function, "whole", or two, "apart".
    """
    scaled = onnx.ModelProto()
    scaled.CopyFrom(model)
    for tensor in scaled.graph.initializer:
        if tensor.name == "second":
            array = onnx.numpy_helper.to_array(tensor) * np.float32(scale)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    x = np.random.default_rng(1).normal(size=(1, 3, 24, 24)).astype("float32")
    return _layers(scaled, model, {"x": x}, folder, block)


def _layers(
    model: onnx.ModelProto, original: onnx.ModelProto, inputs: NamedArrays, folder: Path, block: str = "apart"
) -> tuple[Layer, ...]:
    """The layers of a build of `model`, compared with `original`; processors differ in whether a block is `block`."""
    import tvm

    onnx.save(model, folder / "model.onnx")
    imported, target, choices = import_onnx(folder / "model.onnx"), resolve("native"), Choices()
    lower(imported, target, BuildOptions(), choices)
    blocks = {site.key: block for site in choices.sites.values() if site.kind == "block"}
    if block == "whole" and not blocks:
        pytest.skip("this CPU has no functions of two convolutions")
    built = build(imported, target, BuildOptions(), choices=Choices(blocks))
    loaded = built.load()
    machine = loaded.machine
    run = partial(machine["main"], *map(tvm.runtime.tensor, inputs.values()), *loaded.weights)
    functions = find_functions(tvm.ir.load_json(built.ir_json))
    return find_layers(machine, run, functions, measure_calls(machine, run, 2), original, inputs)


@pytest.fixture(scope="module")
def layers(network: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, ...]:
    return _scaled_layers(network, tmp_path_factory.mktemp("layers"))


def test_every_node_belongs_to_one_layer(network: onnx.ModelProto, layers: tuple[Layer, ...]) -> None:
    nodes = [name for layer in layers for name in layer.nodes]
    assert sorted(nodes) == sorted(node.name for node in network.graph.node)


def test_a_layer_belongs_to_the_module_of_its_weights(layers: tuple[Layer, ...]) -> None:
    scopes = {node: layer.scope for layer in layers for node in layer.nodes}
    assert scopes["/stem/relu/Relu"] == ("stem", "conv")
    assert scopes["/block/Add"] == ("block", "second")
    assert scopes["/classifier/MatMul"] == ("classifier",)


def test_layers_read_the_results_of_layers_before_them(layers: tuple[Layer, ...]) -> None:
    place = {node: index for index, layer in enumerate(layers) for node in layer.nodes}
    stem, first, add = (place[name] for name in ("/stem/conv/Conv", "/block/first/Conv", "/block/Add"))
    assert all(layers[source].nodes == () for source in layers[stem].reads)
    assert {stem, first} <= set(layers[add].reads) | set(layers[first].reads)
    assert all(source < index for index, layer in enumerate(layers) for source in layer.reads)


def test_layers_have_a_time_their_operations_and_a_small_error(layers: tuple[Layer, ...]) -> None:
    assert all(layer.ms > 0 for layer in layers)
    (stem,) = [layer for layer in layers if "/stem/conv/Conv" in layer.nodes]
    assert stem.gflop * 1e9 >= 2 * 24 * 24 * 32 * 27
    assert stem.megabytes * 1e6 >= 4 * (24 * 24 * (3 + 32) + 32 * 27)
    errors = [layer.error for layer in layers if layer.nodes]
    assert max(error for error in errors if error is not None) < 1e-5


def test_a_wrong_layer_shows_and_those_before_it_do_not(network: onnx.ModelProto, tmp_path: Path) -> None:
    errors = {node: layer.error for layer in _scaled_layers(network, tmp_path, scale=1.05) for node in layer.nodes}
    before, wrong = errors["/block/first/Conv"], errors["/block/Add"]
    assert before is not None
    assert before < 1e-5
    assert wrong is not None
    assert wrong > 1e-3


def test_two_layers_in_one_function_are_one_layer_of_the_module_with_more_weights(
    network: onnx.ModelProto, tmp_path: Path
) -> None:
    layers = _scaled_layers(network, tmp_path, block="whole")
    (block,) = [layer for layer in layers if "/block/Add" in layer.nodes]
    assert {"/block/first/Conv", "/block/relu/Relu", "/block/second/Conv"} < set(block.nodes)
    assert block.scope == ("block", "first")
    assert block.error is not None
    assert block.error < 1e-5


@pytest.mark.parametrize("length", [7, 40])
def test_the_operations_of_free_sizes_are_those_of_the_run(length: int, tmp_path: Path) -> None:
    weights = np.random.default_rng(3).normal(size=(64, 32)).astype("float32")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "/product")]
    model = make_model(nodes, [("x", ["n", 64])], ["y"], {"w": weights})
    x = np.random.default_rng(2).normal(size=(length, 64)).astype("float32")
    layers = _layers(model, model, {"x": x}, tmp_path)
    # Rows are computed in tiles, which a number of rows need not fill.
    assert 2 * length * 64 * 32 <= sum(layer.gflop for layer in layers) * 1e9 <= 2 * (length + 16) * 64 * 32


@pytest.mark.parametrize("length", [3, 0])
def test_layers_of_free_sizes_lie_in_branches_and_read_those_before_them(length: int, tmp_path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(operator, ["a"], [name])], name, [], [value_info(name)])
        for name, operator in (("then", "Neg"), ("else", "Exp"))
    }
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], "/scores"),
        helper.make_node("If", ["c"], ["b"], "/choice", **branches),
        helper.make_node("Tanh", ["b"], ["y"], "/end"),
    ]
    model = make_model(nodes, [("x", ["n", 64]), ("c", [], onnx.TensorProto.BOOL)], ["y"])
    x = np.random.default_rng(2).normal(size=(length, 64)).astype("float32")
    layers = _layers(model, model, {"x": x, "c": np.array(True)}, tmp_path)
    assert [layer.shape for layer in layers] == [(length, 64)] * 3
    if length:
        assert [layer.nodes for layer in layers] == [("/scores",), ("/choice",), ("/end",)]
        assert [layer.reads for layer in layers] == [(), (0,), (1,)]


def test_the_peaks_of_this_machine_grow_towards_the_core() -> None:
    target = resolve("native")
    peaks = measure_peaks(target, target.threads)
    assert peaks.gflops > 1
    rates = [level.gigabytes_per_second for level in peaks.levels]
    assert rates == sorted(rates, reverse=True)
    assert [level.bytes is None for level in peaks.levels] == [False] * (len(rates) - 1) + [True]
