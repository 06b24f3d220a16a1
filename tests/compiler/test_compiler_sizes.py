"""Sizes of free dimensions that contradict each other: ONNX Runtime refuses them, and so does a built model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import builds
from support.models import join_models, save_model
from tvmflow.arrays import Array
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session

Shape = tuple[int, ...]


def _node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def _whole(name: str, result: str) -> onnx.NodeProto:
    """A cast of floats to int64, so that all inputs of the tests are floats."""
    return helper.make_node("Cast", [name], [result], to=TensorProto.INT64)


def _size(name: str, result: str) -> list[onnx.NodeProto]:
    """The number of columns of a tensor."""
    return [_node("Shape", name, f"{result}_of"), _node("Gather", f"{result}_of one", result)]


_WEIGHTS = {
    "kernel": np.ones((8, 4, 3, 3), "float32"),
    "grouped": np.ones((8, 2, 3, 3), "float32"),
    "to_256": np.array([1, 256]),
    "rows_of_4": np.array([-1, 4]),
    "pairs": np.array([0, 2, 3, -1]),
    "qkv": np.ones((8, 24), "float32"),
    "bias": np.ones(24, "float32"),
    "zero": np.array(0),
    "one": np.array(1),
    "first": np.array([0]),
    "words": np.ones((3, 8), "float32"),
    "lines": np.ones((6, 8), "float32"),
    "gamma": np.ones(8, "float32"),
    "nine": np.ones(9, "float32"),
}
# Nodes, the dimensions of the inputs, shapes that the model takes, and such that it does not.
_CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, list[Any]], list[Shape], list[list[Shape]]]] = {
    "reshape to a constant shape": (
        [_node("Reshape", "x to_256", "y")],
        {"x": ["n", 64, "h", "w"]},
        [(1, 64, 2, 2)],
        # Fewer elements, of which a kernel would read beyond the end, and more.
        [[(1, 64, 1, 2)], [(2, 64, 2, 2)], [(1, 64, 2, 4)]],
    ),
    "reshape to whole rows": ([_node("Reshape", "x rows_of_4", "y")], {"x": ["n", "c"]}, [(2, 6)], [[(2, 5)]]),
    "reshape to some and the rest": ([_node("Reshape", "x pairs", "y")], {"x": ["n", "c"]}, [(2, 12)], [[(2, 13)]]),
    "space to depth": (
        [_node("SpaceToDepth", "x", "y", blocksize=2)],
        {"x": ["n", 3, "h", "w"]},
        [(1, 3, 4, 6)],
        [[(1, 3, 5, 6)], [(1, 3, 4, 7)]],
    ),
    "depth to space": (
        [_node("DepthToSpace", "x", "y", blocksize=2)],
        {"x": ["n", "c", "h", "w"]},
        [(1, 8, 4, 6)],
        [[(1, 6, 4, 6)]],
    ),
    "channels": ([_node("Conv", "x kernel", "y")], {"x": ["n", "c", "h", "w"]}, [(1, 4, 6, 6)], [[(1, 5, 6, 6)]]),
    "channels of groups": (
        [_node("Conv", "x grouped", "y", group=2)],
        {"x": ["n", "c", "h", "w"]},
        [(1, 4, 6, 6)],
        [[(1, 6, 6, 6)]],
    ),
    "channels of a transposed convolution": (
        [_node("ConvTranspose", "x grouped", "y")],
        {"x": ["n", "c", "h", "w"]},
        [(1, 8, 6, 6)],
        [[(1, 9, 6, 6)]],
    ),
    "a grid for each image": (
        [_node("GridSample", "x grid", "y")],
        {"x": ["n", 2, "h", "w"], "grid": ["m", "a", "b", 2]},
        [(2, 2, 4, 4), (2, 3, 3, 2)],
        [[(2, 2, 4, 4), (1, 3, 3, 2)], [(2, 2, 4, 4), (3, 3, 3, 2)]],
    ),
    "gather elements": (
        [_whole("i", "whole"), _node("GatherElements", "x whole", "y", axis=1)],
        {"x": ["n", "c"], "i": ["m", "d"]},
        [(3, 4), (2, 5)],
        [[(3, 4), (4, 4)]],
    ),
    "scatter elements": (
        [_whole("i", "whole"), _node("ScatterElements", "x whole u", "y", axis=1)],
        {"x": ["n", "c"], "i": ["m", "d"], "u": ["k", "e"]},
        [(3, 4), (2, 1), (2, 1)],
        [[(3, 4), (4, 1), (4, 1)], [(3, 4), (2, 1), (3, 1)], [(3, 4), (2, 1), (2, 2)]],
    ),
    "gather by rows of a batch": (
        [_whole("i", "whole"), _node("GatherND", "x whole", "y", batch_dims=1)],
        {"x": ["n", "c"], "i": ["m", 1]},
        [(3, 4), (3, 1)],
        [[(3, 4), (2, 1)], [(3, 4), (4, 1)]],
    ),
    "lengths of sequences": (
        [_whole("l", "whole"), _node("ReverseSequence", "x whole", "y")],
        {"x": ["t", "n"], "l": ["m"]},
        [(4, 3), (3,)],
        [[(4, 3), (2,)], [(4, 3), (4,)]],
    ),
    "einsum": (
        [_node("Einsum", "x z", "y", equation="ij,jk->ik")],
        {"x": ["n", "c"], "z": ["d", "e"]},
        [(2, 3), (3, 4)],
        [[(2, 3), (4, 4)], [(2, 3), (2, 4)]],
    ),
    "a projection to queries, keys and values": (
        [_node("Attention", "x qkv bias", "y", domain="com.microsoft", num_heads=2)],
        {"x": ["n", "t", "c"]},
        [(1, 5, 8)],
        [[(1, 5, 9)]],
    ),
    "positions of embeddings": (
        [
            helper.make_node("Cast", ["i"], ["ids"], to=TensorProto.INT32),
            helper.make_node(
                "EmbedLayerNormalization",
                ["ids", "", "words", "lines", "", "gamma", "gamma"],
                ["y", "counts"],
                domain="com.microsoft",
            ),
        ],
        {"i": ["n", "t"]},
        [(2, 6)],
        [[(2, 7)]],
    ),
    # Each position plus one is looked up in a table of nine.
    "positions": (
        [
            *_size("x", "count"),
            _node("Range", "zero count one", "places"),
            _node("Add", "places one", "later"),
            _node("Unsqueeze", "later first", "row"),
            _node("Gather", "nine row", "values"),
            _node("Add", "x values", "y"),
        ],
        {"x": ["n", "t"]},
        [(2, 8)],
        [[(2, 9)], [(1, 2000)]],
    ),
    "positions after those of a cache": (
        [
            *_size("x", "count"),
            *_size("z", "past"),
            _node("Add", "past count", "end"),
            _node("Range", "past end one", "places"),
            _node("Gather", "nine places", "values"),
            _node("Add", "x values", "y"),
        ],
        {"x": ["n", "t"], "z": ["m", "p"]},
        [(2, 4), (1, 5)],
        [[(2, 5), (1, 5)], [(2, 4), (1, 6)]],
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, target: Target) -> tuple[Any, dict[str, Path]]:
    """One built model that does what all cases do, and the ONNX file of each."""
    folder = tmp_path_factory.mktemp("sizes")
    paths = {}
    for place, (name, (nodes, inputs, _, _)) in enumerate(_CASES.items()):
        read = {item for node in nodes for item in node.input}
        weights = {key: value for key, value in _WEIGHTS.items() if key in read}
        paths[name] = save_model(folder / f"{place}.onnx", nodes, list(inputs.items()), ["y"], weights)
    onnx.save(join_models([onnx.load(path) for path in paths.values()]), folder / "all.onnx")
    loaded = build(import_onnx(folder / "all.onnx"), target).load()
    assert builds.has_direct_main(loaded.library)
    return loaded, paths


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("name", "turn"), [(name, turn) for name, case in _CASES.items() for turn in range(len(case[3]))]
)
def test_a_built_model_refuses_sizes_that_onnx_runtime_refuses(
    built: tuple[Any, dict[str, Path]], name: str, turn: int
) -> None:
    loaded, paths = built
    shapes = {key: case[2] for key, case in _CASES.items()}
    outputs = loaded.run(*_zeros(shapes))
    session = open_session(paths[name], threads=1, prints_errors=False)
    names = list(_CASES[name][1])
    expected = session.run(None, dict(zip(names, _zeros({name: shapes[name]}), strict=True)))
    assert outputs[list(_CASES).index(name)].shape == expected[0].shape
    shapes[name] = _CASES[name][3][turn]
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session.run(None, dict(zip(names, _zeros({name: shapes[name]}), strict=True)))
    with pytest.raises(RuntimeError, match="match_cast"):
        loaded.run(*_zeros(shapes))
    # The outputs are those of sizes that agree, and may have another shape than these sizes ask for.
    with pytest.raises((RuntimeError, ValueError), match=r"match_cast error|Mismatched|Invalid"):
        builds.run_directly(loaded, _zeros(shapes), outputs)


def _zeros(shapes: dict[str, list[Shape]]) -> list[Array]:
    return [np.zeros(shape, "float32") for case in shapes.values() for shape in case]
