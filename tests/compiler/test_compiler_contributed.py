"""Operators of com.microsoft: models as ONNX Runtime's optimizer saves them, and each operator beside ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from support.machines import simple_target
from support.quantised import quantise_dynamically
from tvmflow.arrays import Array
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.compiler.inspection import Inspection
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session

MakeModel = Callable[..., Path]
Case = tuple[Any, ...]

_node = helper.make_node
_MS = "com.microsoft"


def _optimize(path: Path, level: str) -> tuple[Path, set[str]]:
    """The model as ONNX Runtime saves it at an optimization level, and the operators of com.microsoft in it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    output = path.with_suffix(f".{level}.onnx")
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return output, {node.op_type for node in onnx.load(output).graph.node if node.domain.startswith(_MS)}


def _mobile(make_model: MakeModel) -> Path:
    """A separable block with squeeze-and-excite, a residual sum and activations of several kinds."""
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        _node("Conv", ["x", "w0", "b0"], ["a"], strides=[2, 2], **pads),
        _node("Relu", ["a"], ["b"]),
        _node("Conv", ["b", "w1"], ["c"], group=16, **pads),
        _node("Clip", ["c", "zero", "six"], ["d"]),
        _node("Conv", ["d", "w2"], ["e"]),
        _node("Add", ["e", "b"], ["f"]),
        _node("Relu", ["f"], ["g"]),
        _node("Conv", ["g", "w2"], ["h"]),
        _node("LeakyRelu", ["h"], ["i"], alpha=0.1),
        _node("GlobalAveragePool", ["i"], ["j"]),
        _node("Conv", ["j", "w2"], ["k"]),
        _node("HardSigmoid", ["k"], ["l"]),
        _node("Mul", ["i", "l"], ["m"]),
        _node("Sigmoid", ["m"], ["n"]),
        _node("Mul", ["m", "n"], ["o"]),
        _node("MaxPool", ["o"], ["p"], kernel_shape=[8, 8]),
        _node("Flatten", ["p"], ["q"]),
        _node("Gemm", ["q", "w3", "b3"], ["r"]),
        _node("Relu", ["r"], ["y"]),
    ]
    weights = {
        "w0": normal(16, 3, 3, 3) / 5,
        "b0": normal(16),
        "w1": normal(16, 1, 3, 3) / 3,
        "w2": normal(16, 16, 1, 1) / 4,
        "w3": normal(16, 10) / 4,
        "b3": normal(10),
        "zero": np.array(0, "float32"),
        "six": np.array(6, "float32"),
    }
    return make_model(nodes, [("x", [1, 3, 16, 16])], ["y"], weights, "mobile.onnx")


def _layer_norm(x: str, y: str, name: str) -> list[onnx.NodeProto]:
    """A layer norm as exporters of old opsets write it."""
    return [
        _node("ReduceMean", [x], [f"{name}0"], axes=[-1]),
        _node("Sub", [x, f"{name}0"], [f"{name}1"]),
        _node("Pow", [f"{name}1", "two"], [f"{name}2"]),
        _node("ReduceMean", [f"{name}2"], [f"{name}3"], axes=[-1]),
        _node("Add", [f"{name}3", "epsilon"], [f"{name}4"]),
        _node("Sqrt", [f"{name}4"], [f"{name}5"]),
        _node("Div", [f"{name}1", f"{name}5"], [f"{name}6"]),
        _node("Mul", [f"{name}6", "gamma"], [f"{name}7"]),
        _node("Add", [f"{name}7", "beta"], [y]),
    ]


def _encoder(make_model: MakeModel) -> Path:
    """An encoder's layer of opset 13 without heads, with the norm, the activation and the mask as they are composed."""
    nodes = [
        *_layer_norm("x", "n", "first"),
        *(_node("MatMul", ["n", f"w{name}"], [name]) for name in "qkv"),
        _node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        _node("MatMul", ["q", "kt"], ["s"]),
        _node("Mul", ["s", "quarter"], ["t"]),
        _node("Softmax", ["t"], ["p"], axis=-1),
        _node("MatMul", ["p", "v"], ["o"]),
        _node("MatMul", ["o", "wo"], ["z0"]),
        _node("Add", ["z0", "bias"], ["z"]),
        _node("Add", ["z", "x"], ["u"]),
        *_layer_norm("u", "m", "second"),
        _node("MatMul", ["m", "wi"], ["f0"]),
        _node("Add", ["f0", "wide"], ["f"]),
        _node("Div", ["f", "root"], ["g0"]),
        _node("Erf", ["g0"], ["g1"]),
        _node("Add", ["g1", "one"], ["g2"]),
        _node("Mul", ["f", "g2"], ["g3"]),
        _node("Mul", ["g3", "half"], ["g"]),
        _node("MatMul", ["g", "wl"], ["y"]),
    ]
    numbers = {"two": 2.0, "epsilon": 1e-5, "quarter": 0.25, "root": 2**0.5, "one": 1.0, "half": 0.5}
    weights = {name: np.array(value, "float32") for name, value in numbers.items()}
    weights |= {f"w{name}": normal(16, 16, seed=place) / 4 for place, name in enumerate("qkvo")}
    weights |= {"wi": normal(16, 32) / 4, "wl": normal(32, 16) / 5, "wide": normal(32), "bias": normal(16)}
    weights |= {"gamma": normal(16), "beta": normal(16)}
    return make_model(nodes, [("x", [2, 6, 16])], ["y"], weights, "encoder.onnx", opset=13)


def test_an_optimized_network_for_images_is_compiled(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    path, operators = _optimize(_mobile(make_model), "EXTENDED")
    assert {"FusedConv", "FusedGemm", "QuickGelu"} <= operators
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 16, 16, seed=9)})


def test_an_optimized_encoder_is_compiled(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    path, operators = _optimize(_encoder(make_model), "EXTENDED")
    assert {"FusedMatMul", "Gelu", "SkipLayerNormalization"} <= operators
    # The standard has no such norm in this opset: ONNX Runtime writes its own under the standard's name.
    assert "LayerNormalization" in {node.op_type for node in onnx.load(path).graph.node}
    assert_same_as_onnxruntime(path, {"x": normal(2, 6, 16, seed=9)})


def test_an_optimized_model_that_quantises_as_it_runs_is_compiled(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel], tmp_path: Path
) -> None:
    path, operators = _optimize(quantise_dynamically(_encoder(make_model), tmp_path / "dynamic.onnx"), "EXTENDED")
    assert {"MatMulIntegerToFloat", "DynamicQuantizeMatMul"} <= operators
    assert_same_as_onnxruntime(path, {"x": normal(2, 6, 16, seed=9)}, rtol=0.02)


def test_the_layout_of_one_kind_of_processor_is_refused_in_one_sentence(make_model: MakeModel) -> None:
    path, operators = _optimize(_mobile(make_model), "ALL")
    assert "ReorderInput" in operators
    with pytest.raises(UnsupportedOperatorError, match=r"^[^\n]*com\.microsoft\.nchwc.*ORT_ENABLE_EXTENDED") as error:
        import_onnx(path)
    assert str(error.value).count("nchwc.") == 1


def _case(operator: str, inputs: dict[str, Any], outputs: int = 1, absent: str = "", **attributes: Any) -> Case:
    """A model of one node of com.microsoft and its inputs; what is in capitals is a weight, and `_` is left out."""
    feeds = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    infos = [
        (name, list(value.shape), helper.np_dtype_to_tensor_dtype(value.dtype))
        for name, value in feeds.items()
        if name.islower()
    ]
    names = [name if value is not None else "" for name, value in inputs.items()]
    results = [f"r{place}" if str(place) not in absent else "" for place in range(outputs)]
    node = _node(operator, names, results, domain=_MS, **attributes)
    weights = {name: value for name, value in feeds.items() if name.isupper()}
    return (([node], infos, [name for name in results if name], weights), {info[0]: feeds[info[0]] for info in infos})


def _ids(*shape: int, below: int) -> Array:
    return np.random.default_rng(3).integers(0, below, shape).astype("int32")


def _attention_cases() -> list[Case]:
    weights = {"W": normal(16, 48) / 4, "B": normal(48)}
    tokens = {"x": normal(2, 5, 16), **weights}
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], "int32")
    keys = np.array([[1] * 7, [1] * 4 + [0] * 3], "int32")
    heads = {"q": normal(2, 5, 16), "k": normal(2, 7, 16, seed=1), "v": normal(2, 7, 24, seed=2)}
    cosine, sine = np.cos(normal(12, 4)), np.sin(normal(12, 4))
    places = {"p": _ids(2, 5, below=12).astype("int64")}
    cases = [
        _case("Attention", tokens, num_heads=4),
        _case("Attention", tokens | {"m": mask}, num_heads=4, mask_filter_value=-500.0),
        _case("Attention", tokens | {"m": np.array([3, 5], "int32")}, num_heads=2, scale=0.3),
        _case("Attention", tokens | {"m": np.array([3, 5, 1, 2], "int32")}, num_heads=2),
        _case("Attention", tokens | {"m": np.tril(np.ones((2, 5, 5), "int32"))}, num_heads=2),
        _case("Attention", tokens | {"m": None, "p": normal(2, 2, 4, 3, 4)}, 2, num_heads=4, unidirectional=1),
        _case("Attention", tokens | {"m": None, "p": None, "s": normal(2, 4, 5, 5)}, num_heads=4),
        _case("MultiHeadAttention", heads, num_heads=4),
        _case("MultiHeadAttention", heads | {"B": normal(56), "m": keys}, num_heads=4),
        _case(
            "MultiHeadAttention",
            {"q": heads["q"], "k": normal(2, 5, 16, seed=1), "v": normal(2, 5, 16, seed=2), "b": None, "m": None,
             "s": normal(2, 4, 5, 9), "pk": normal(2, 4, 4, 4), "pv": normal(2, 4, 4, 4)},
            3, num_heads=4,
        ),
        _case("RotaryEmbedding", {"x": normal(2, 5, 24), **places, "C": cosine, "S": sine}, num_heads=3),
        _case("RotaryEmbedding", {"x": normal(2, 3, 5, 8), **places, "C": cosine, "S": sine}, interleaved=1),
        _case("RotaryEmbedding", {"x": normal(2, 3, 5, 8), "p": np.array([4], "int64"), "C": cosine, "S": sine}),
        _case(
            "RotaryEmbedding", {"x": normal(2, 5, 36), **places, "C": cosine, "S": sine},
            num_heads=3, rotary_embedding_dim=8,
        ),
    ]  # fmt: skip
    # In a normal run the masks of each rank, a state, a bias, and the forms of a rotation.
    return scale.choose(normal=[cases[place] for place in (1, 3, 5, 8, 9, 11, 13)], long=cases)


def _group_query_cases() -> list[Case]:
    """Four heads of 16 channels on two of keys and values: a first call, a padded one, a next token and several."""

    def case(positions: int, former: list[int], past: int | None, total: int, **more: Any) -> Case:
        batch = len(former)
        state = None if past is None else normal(batch, 2, past, 16, seed=past)
        inputs = {
            "q": normal(batch, positions, 64),
            "k": normal(batch, positions, 32, seed=1),
            "v": normal(batch, positions, 32, seed=2),
            "pk": state,
            "pv": None if state is None else state[::-1] * 2,
            "s": np.array([length - 1 for length in former], "int32"),
            "T": np.array([total], "int32"),
        }
        inputs |= more.pop("inputs", {})
        return _case("GroupQueryAttention", inputs, 3, num_heads=4, kv_num_heads=2, **more)

    angles = normal(16, 8)
    turns = {"C": np.cos(angles), "S": np.sin(angles)}
    rotary = {"inputs": turns, "do_rotary": 1}
    packed = {"q": normal(2, 5, 128), "k": None, "v": None}
    return [
        case(5, [5, 5], 0, 5, inputs=turns | {"p": _ids(2, 5, below=9).astype("int64")}, do_rotary=1),
        case(5, [5, 5], None, 5, inputs=packed, scale=0.3),
        case(1, [7, 7], 6, 7, rotary_interleaved=1, **rotary),
        case(1, [4, 7], 6, 7, **rotary),
        case(1, [5, 6], 9, 7, softcap=2.0, local_window_size=3),
        case(3, [8], 5, 8, **rotary),
    ]


def _few_bits_cases() -> list[Case]:
    def product(bits: int, depth: int, block: int, **more: Any) -> Case:
        rng, blocks = np.random.default_rng(bits), -(-depth // block)
        packed = rng.integers(0, 256, (24, blocks, block * bits // 8)).astype("uint8")
        operands = {"x": normal(2, 5, depth), "W": packed, "S": np.abs(normal(24, blocks)) / 8, **more}
        return _case("MatMulNBits", operands, K=depth, N=24, bits=bits, block_size=block)

    def bnb(kind: int, depth: int, block: int) -> Case:
        packed = np.random.default_rng(kind).integers(0, 256, (24 * depth + 1) // 2).astype("uint8")
        scales = np.abs(normal(-(-24 * depth // block)))
        operands = {"x": normal(2, 5, depth), "W": packed, "S": scales}
        return _case("MatMulBnb4", operands, K=depth, N=24, block_size=block, quant_type=kind)

    def rows(bits: int, columns: int, block: int, points: Array | None = None) -> Case:
        packed = np.random.default_rng(bits).integers(0, 256, (20, columns * bits // 8)).astype("uint8")
        operands = {"W": packed, "i": _ids(2, 5, below=20), "S": np.abs(normal(20, -(-columns // block))), "Z": points}
        return _case("GatherBlockQuantized", operands, bits=bits, block_size=block)

    points = np.random.default_rng(0).integers(0, 256, (24, 2)).astype("uint8")
    return [
        bnb(0, 64, 32),
        bnb(1, 50, 16),
        rows(4, 48, 16),
        rows(4, 40, 16, points[:20]),
        rows(8, 32, 32),
        product(4, 64, 16),
        product(4, 50, 16, Z=points),
        product(4, 64, 32, Z=None, g=None, B=normal(24)),
        product(8, 64, 32),
        product(8, 64, 32, Z=points),
    ]


def _other_cases() -> list[Case]:
    x, gamma, beta = normal(2, 5, 16), normal(16), normal(16, seed=1)
    ids, words = _ids(2, 5, below=20), {"W": normal(20, 16), "P": normal(9, 16), "S": normal(2, 16)}
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], "int32")
    norm = {"G": gamma, "B": beta}
    embed, feeds = _case("EmbedLayerNormalization", {"i": ids, "t": _ids(2, 5, below=2), **words, **norm, "m": mask}, 2)
    image = {"x": normal(1, 4, 6, 6), "W": normal(8, 4, 3, 3), "B": normal(8)}
    cases = [
        _case("Gelu", {"x": x}),
        _case("FastGelu", {"x": x, "B": beta}),
        _case("QuickGelu", {"x": x}, alpha=1.3),
        _case("BiasGelu", {"x": x, "B": beta}),
        _case("SkipLayerNormalization", {"x": x, "s": normal(2, 5, 16), "G": gamma}),
        _case(
            "SkipLayerNormalization", {"x": x, "s": normal(2, 5, 16), "G": gamma, "B": beta, "A": beta}, 4, "12",
            epsilon=1e-3,
        ),
        _case("SkipSimplifiedLayerNormalization", {"x": x, "s": normal(2, 5, 16), "G": gamma, "B": beta}, 4, "12"),
        ((embed[0], embed[1], ["r0", ("r1", None, TensorProto.INT32)], embed[3]), feeds),
        _case("FusedMatMul", {"a": normal(3, 4, 5), "b": normal(3, 6, 4)}, transA=1, transB=1, alpha=0.5),
        _case("TransposeMatMul", {"a": normal(3, 4, 5), "b": normal(3, 6, 4)}, transA=1, transB=1),
        _case("CDist", {"a": normal(7, 5), "B": normal(6, 5, seed=1)}, metric="euclidean"),
        _case("CDist", {"a": normal(7, 5), "b": normal(6, 5, seed=1)}, metric="sqeuclidean"),
        _case("ExpandDims", {"x": x, "A": np.array(1, "int32")}),
        _case("GatherND", {"x": x, "i": _ids(2, 3, below=2)}),
        _case("GridSample", {"x": normal(1, 2, 5, 6), "g": normal(1, 4, 4, 2)}, mode="bilinear"),
        _case("Pad", {"x": x, "P": np.array([0, 1, 2, 0, 0, 1])}),
        _case("Trilu", {"x": x, "K": np.array(1)}, upper=0),
        _case("FusedConv", image, activation="Clip", activation_params=[-1.0, 2.0]),
        _case("FusedConv", image | {"z": normal(1, 8, 4, 4)}, activation="LeakyRelu", activation_params=[0.2]),
        _case(
            "FusedGemm", {"a": normal(3, 4), "W": normal(4, 5), "B": normal(5)},
            activation="LeakyRelu", activation_alpha=0.2,
        ),
        _case("Inverse", {"x": normal(3, 4, 4)}),
    ]  # fmt: skip
    # In a normal run each operator once, and the plain Gelu as one of those with a bias.
    return scale.choose(normal=[case for place, case in enumerate(cases) if place not in (0, 4, 17)], long=cases)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_attention_cases, id="attention"),
        pytest.param(_group_query_cases, id="groups", marks=pytest.mark.long),
        pytest.param(_few_bits_cases, id="bits"),
        pytest.param(_other_cases, id="others"),
    ],
)
def test_operators_of_the_optimizer_equal_onnx_runtime(
    cases: Callable[[], list[Case]], assert_all_same: Callable[..., CompiledModel]
) -> None:
    assert_all_same(cases())


def test_attention_of_a_decoder_with_free_sizes_equals_onnx_runtime(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    # The number of all positions is computed from the mask, as exporters of language models write it.
    operands = ["q", "k", "v", "pk", "pv", "lengths", "total", "C", "S"]
    nodes = [
        _node("ReduceSum", ["mask", "last"], ["counts"], keepdims=0),
        _node("Sub", ["counts", "one"], ["ends"]),
        _node("Cast", ["ends"], ["lengths"], to=TensorProto.INT32),
        _node("Shape", ["mask"], ["shape"]),
        _node("Gather", ["shape", "one"], ["all"]),
        _node("Cast", ["all"], ["total"], to=TensorProto.INT32),
        _node("GroupQueryAttention", operands, ["y", "nk", "nv"], domain=_MS, num_heads=2, kv_num_heads=1, do_rotary=1),
    ]
    inputs: list[Any] = [("q", ["n", "new", 32]), ("k", ["n", "new", 16]), ("v", ["n", "new", 16])]
    inputs += [("pk", ["n", 1, "old", 16]), ("pv", ["n", 1, "old", 16]), ("mask", ["n", "all"], TensorProto.INT64)]
    outputs = [("y", ["n", "new", 32]), ("nk", ["n", 1, "all", 16]), ("nv", ["n", 1, "all", 16])]
    angles = normal(9, 8)
    weights = {"last": np.array([1]), "one": np.array(1), "C": np.cos(angles), "S": np.sin(angles)}
    path = make_model(nodes, inputs, outputs, weights)

    def feed(batch: int, new: int, old: int) -> dict[str, Array]:
        tokens = {name: normal(batch, new, 32 if name == "q" else 16, seed=new) for name in "qkv"}
        states = {name: normal(batch, 1, old, 16, seed=old) for name in ("pk", "pv")}
        return {**tokens, **states, "mask": np.ones((batch, old + new), "int64")}

    assert_same_as_onnxruntime(path, feed(2, 1, 4), feed(1, 3, 2))


@pytest.mark.parametrize("packed", ["queries, keys and values", "keys and values"])
def test_operands_of_attention_in_one_tensor_are_taken_apart(
    make_model: MakeModel, run_built: Callable[..., list[Array]], target: Target, packed: str
) -> None:
    # ONNX Runtime has this form for GPUs only.
    heads = {name: normal(2, 5, 2, 8, seed=place) for place, name in enumerate("qkv")}
    flat = {name: value.reshape(2, 5, 16) for name, value in heads.items()}
    if packed == "keys and values":
        operands, names = {"q": flat["q"], "p": np.stack([heads["k"], heads["v"]], 3)}, ["q", "p"]
    else:
        operands, names = {"p": np.stack([heads[name] for name in "qkv"], 3)}, ["p"]
    weights = {name.upper(): value for name, value in flat.items()}
    nodes = [
        _node("MultiHeadAttention", names, ["y"], domain=_MS, num_heads=2),
        _node("MultiHeadAttention", ["Q", "K", "V"], ["z"], domain=_MS, num_heads=2),
    ]
    path = make_model(nodes, [(name, list(value.shape)) for name, value in operands.items()], ["y", "z"], weights)
    y, z = run_built(build(import_onnx(path), target), *operands.values())
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)


def test_a_softmax_with_a_bias_is_the_softmax_of_a_sum(
    make_model: MakeModel, run_built: Callable[..., list[Array]], target: Target
) -> None:
    # ONNX Runtime has the operator for GPUs only.
    nodes = [
        _node("BiasSoftmax", ["x", "b"], ["y"], domain=_MS, axis=3, is_inner_broadcast=1),
        _node("Add", ["x", "b"], ["s"]),
        _node("Softmax", ["s"], ["z"], axis=3),
    ]
    path = make_model(nodes, [("x", [2, 3, 4, 5]), ("b", [2, 1, 4, 5])], [("y", [2, 3, 4, 5]), "z"])
    y, z = run_built(build(import_onnx(path), target), normal(2, 3, 4, 5), normal(2, 1, 4, 5))
    assert np.array_equal(y, z)


@pytest.mark.few(2)
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantised_means_between_two_integers_are_those_of_onnx_runtime(
    dtype: str, free: bool, make_model: Any, target: Target, run_built: Any
) -> None:
    limits, (zero, result) = np.iinfo(dtype), {"uint8": (100, 90), "int8": (-28, 9)}[dtype]
    x = np.random.default_rng(1).integers(limits.min, limits.max + 1, (2, 40, 4, 4)).astype(dtype)
    weights = {"U": np.float32(0.02), "Z": np.array(zero, dtype), "V": np.float32(0.01), "Y": np.array(result, dtype)}
    nodes = [
        _node("QLinearGlobalAveragePool", [name, *weights], [f"r{name}"], domain=_MS, channels_last=place)
        for place, name in enumerate("xy")
    ]
    feeds, kind = {"x": x, "y": np.moveaxis(x, 1, -1).copy()}, helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = [
        (name, [f"{name}{place}" if free else size for place, size in enumerate(item.shape)], kind)
        for name, item in feeds.items()
    ]
    path = make_model(nodes, infos, [("rx", None, kind), ("ry", None, kind)], weights)
    model = build(import_onnx(path), target)
    first, last = run_built(model, *feeds.values())
    # An eighth of a step for each of the sum: many sums lie between two integers.
    steps = np.round((x.astype("int32") - zero).sum((2, 3), keepdims=True) / 8)
    expected = np.clip(steps + result, limits.min, limits.max).astype(dtype)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(last, np.moveaxis(expected, 1, -1))
    assert rule_counts(model)["free_reduction"] == 1


def test_quantised_operators_of_the_optimizer_equal_onnx_runtime(assert_all_same: Callable[..., CompiledModel]) -> None:
    rng = np.random.default_rng(1)
    scale, zero = np.array(0.02, "float32"), np.array(121, "uint8")
    a, b = (rng.integers(0, 256, (2, 3, 4, 4)).astype("uint8") for _ in range(2))
    scales = {"U": scale, "Z": zero}
    outputs = [("r0", None, TensorProto.UINT8)]
    where = _case(
        "QLinearWhere", {"c": a > b, "a": a, **scales, "b": b, "V": scale * 2, "Y": zero, "R": scale, "T": zero}
    )
    pool = _case("NhwcMaxPool", {"a": a}, kernel_shape=[2, 2], strides=[2, 2])
    means = {"a": a, **scales, "V": scale / 2, "Y": zero}
    average = _case("QLinearGlobalAveragePool", means, channels_last=1)
    # The mean of the last window counts what is beyond the data, too.
    windows = {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [1, 0, 0, 0], "ceil_mode": 1, "count_include_pad": 1}
    part = _case("QLinearAveragePool", means, **windows)
    weight = rng.integers(0, 256, (4, 12)).astype("uint8")
    attention = {
        "x": rng.integers(0, 256, (2, 5, 4)).astype("uint8"),
        "W": weight,
        "B": normal(12),
        "U": scale,
        "V": scale,
    }
    quantised = _case("QAttention", attention | {"m": None, "Z": zero, "Y": zero}, num_heads=2)
    # The new keys and values follow those of three former positions.
    state = attention | {"m": None, "Z": zero, "Y": zero, "p": normal(2, 2, 2, 3, 2)}
    decoding = _case("QAttention", state, 2, num_heads=2, unidirectional=1)
    shapes = {"W": (20, 16), "P": (9, 16), "S": (2, 16), "G": (16,), "B": (16,)}
    tables = {name: rng.integers(0, 256, shape).astype("uint8") for name, shape in shapes.items()}
    ids = {"i": _ids(2, 5, below=20), "t": _ids(2, 5, below=2)}
    scales = {f"U{name}": scale * (place + 1) for place, name in enumerate(tables)}
    zeros = {f"Z{name}": np.array(100 + place, "uint8") for place, name in enumerate(tables)}
    (embed, infos, _, weights), feeds = _case(
        "QEmbedLayerNormalization", ids | tables | {"m": None} | scales | zeros, 2
    )
    embedded = (embed, infos, ["r0", ("r1", None, TensorProto.INT32)], weights), feeds
    cases = [
        ((nodes, infos, outputs, weights), feeds) for (nodes, infos, _, weights), feeds in (where, pool, average, part)
    ]
    assert_all_same([*cases, quantised, decoding, embedded])


@pytest.mark.parametrize("zero", [100, 101])
def test_means_of_quantised_windows_round_with_their_zero_point(
    zero: int, make_model: MakeModel, native: Target, run_built: Any
) -> None:
    # Of windows of four integers, every fourth mean lies between two integers.
    x = np.random.default_rng(1).integers(0, 256, (1, 8, 20, 22)).astype("uint8")
    scales = {"S": np.array(0.05, "float32"), "Z": np.array(zero, "uint8")}
    windows = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [_node("QLinearAveragePool", ["x", "S", "Z", "S", "Z"], ["y"], domain=_MS, **windows)]
    path = make_model(nodes, [("x", x.shape, TensorProto.UINT8)], [("y", None, TensorProto.UINT8)], scales)
    (expected,) = open_session(path).run(None, {"x": x})
    assert np.array_equal(run_built(build(import_onnx(path), native), x)[0], expected)


def test_a_row_of_embeddings_beyond_a_table_ends_the_run(make_model: MakeModel, native: Target, run_built: Any) -> None:
    tables = {"W": normal(20, 16), "P": normal(9, 16), "S": normal(2, 16), "G": normal(16), "B": normal(16)}
    tables |= {"C": normal(9, 4), "R": normal(9, 4)}
    nodes = [
        _node("EmbedLayerNormalization", ["i", "t", "W", "P", "S", "G", "B", "", "p"], ["a", "b"], domain=_MS),
        _node("RotaryEmbedding", ["x", "places", "C", "R"], ["c"], domain=_MS),
    ]
    integers = [(name, [1, 3], TensorProto.INT32) for name in "itp"]
    inputs = [*integers, ("x", [1, 2, 3, 8]), ("places", [1, 3], TensorProto.INT64)]
    path = make_model(nodes, inputs, ["a", ("b", [1], TensorProto.INT32), "c"], tables)
    model, x = build(import_onnx(path), native), normal(1, 2, 3, 8)

    def feed(*lasts: int) -> list[Array]:
        i, t, p, places = (np.array([[0, 1, last]], "int32") for last in lasts)
        return [i, t, p, x, places.astype("int64")]

    largest = (19, 1, 8, 8)
    within = feed(*largest)
    session = open_session(path)
    expected = session.run(None, dict(zip((item.name for item in session.get_inputs()), within, strict=True)))
    for ours, other in zip(run_built(model, *within), expected, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5)
    for place, last in enumerate(largest):
        for wrong in (last + 1, -1):
            with pytest.raises(RuntimeError, match=f"index error: an index is not from 0 to {last}"):
                run_built(model, *feed(*(wrong if other == place else item for other, item in enumerate(largest))))


@pytest.mark.few(1)
@pytest.mark.parametrize(("units", "direction"), [(20, "bidirectional"), (200, "forward")])
def test_a_dynamically_quantised_lstm_equals_onnx_runtimes(
    units: int, direction: str, make_model: MakeModel, native: Target, run_built: Any
) -> None:
    """The target without dot-product instructions computes with dequantised weights."""
    rng, directions = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    matrices = {
        name: rng.integers(-127, 128, (directions, depth, 4 * units)).astype("int8")
        for name, depth in (("W", 5), ("R", units))
    }
    scales = {
        "ws": (rng.random((directions, 4 * units)) / 200 + 0.002).astype("float32"),
        "rs": np.array([0.003, 0.004], "float32")[:directions],
    }
    zeros = {"wz": np.zeros((directions, 4 * units), "int8"), "rz": np.zeros(directions, "int8")}
    operands = ["x", "W", "R", "B", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    node = _node(
        "DynamicQuantizeLSTM", operands, ["y", "last_h", "last_c"],
        domain=_MS, hidden_size=units, direction=direction,
    )  # fmt: skip
    inputs: list[Any] = [("x", [3, "batch", 5]), *((name, [directions, "batch", units]) for name in ("h", "c"))]
    weights = {**matrices, **scales, **zeros, "B": normal(directions, 8 * units)}
    path = make_model([node], inputs, ["y", "last_h", "last_c"], weights)
    # Without such instructions, both targets have the same schedules.
    targets = [native, simple_target()] if {"avx512_vnni", "avx_vnni", "asimddp"} & set(native.features) else [native]
    built = [build(import_onnx(path), target) for target in targets]
    if "avx512_vnni" in native.features:
        # The inputs are multiplied as integers too.
        assert "dot_rows" in [rule for _, rule in built[0].schedules]
    # Several threads quantise the states of a batch in parts.
    session = open_session(path, threads=1)
    for batch in (1, 3):
        x, h, c = normal(3, batch, 5), 3 * normal(directions, batch, units), normal(directions, batch, units)
        expected = session.run(None, {"x": x, "h": h, "c": c})
        for model in built:
            for ours, theirs in zip(run_built(model, x, h, c), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_unidirectional_attention_has_any_number_of_positions(
    make_model: MakeModel, assert_same_as_onnxruntime: Any
) -> None:
    heads = {"num_heads": 2, "unidirectional": 1}
    nodes = [
        _node("Attention", ["x", "w", "b"], ["one"], domain=_MS, **heads),
        _node("Attention", ["x", "w", "b", "mask", "past"], ["two", "present"], domain=_MS, **heads),
        _node("MultiHeadAttention", ["x", "x", "x", "", "", "", "pk", "pv"], ["three", "k", "v"], domain=_MS, **heads),
        _node("MultiHeadAttention", ["x", "other", "other"], ["four"], domain=_MS, **heads),
    ]
    infos = [
        ("x", ["batch", "new", 16]),
        ("mask", ["batch", "all"], TensorProto.INT32),
        ("past", [2, "batch", 2, "former", 8]),
        *((name, ["batch", 2, "former", 8]) for name in ("pk", "pv")),
        ("other", ["batch", "others", 16]),
    ]
    outputs = ["one", "two", "present", "three", "k", "v", "four"]
    path = make_model(nodes, infos, outputs, {"w": normal(16, 48) / 4, "b": normal(48)})

    def feeds(batch: int, new: int, former: int, others: int) -> dict[str, Array]:
        mask = np.ones((batch, former + new), "int32")
        mask[:, 1] = 0
        states = {name: normal(batch, 2, former, 8, seed=seed) for seed, name in enumerate(("pk", "pv"))}
        past = normal(2, batch, 2, former, 8)
        return {"x": normal(batch, new, 16), "mask": mask, "past": past, "other": normal(batch, others, 16), **states}

    assert_same_as_onnxruntime(path, feeds(2, 5, 3, 7), feeds(1, 1, 9, 1), feeds(3, 4, 1, 2))


def test_of_three_numbers_for_each_row_a_mask_has_the_first(
    make_model: MakeModel, assert_same_as_onnxruntime: Any
) -> None:
    node = _node("Attention", ["x", "w", "b", "mask"], ["y"], domain=_MS, num_heads=2)
    path = make_model(
        [node],
        [("x", [2, 5, 16]), ("mask", [8], TensorProto.INT32)],
        ["y"],
        {"w": normal(16, 48) / 4, "b": normal(48)},
    )
    mask = np.array([3, 4, 0, 5, 10, 0, 5, 10], "int32")
    assert_same_as_onnxruntime(path, {"x": normal(2, 5, 16), "mask": mask})


@pytest.mark.parametrize("interleaved", [0, 1])
def test_a_rotation_of_heads_side_by_side_computes_its_parts_apart(
    interleaved: int, make_model: MakeModel, assert_same_as_onnxruntime: Any
) -> None:
    node = _node("RotaryEmbedding", ["x", "p", "c", "s"], ["y"], domain=_MS, num_heads=3, interleaved=interleaved)
    tables = {"c": np.cos(normal(9, 16)), "s": np.sin(normal(9, 16)), "p": np.array([2], "int64")}
    path = make_model([node], [("x", [2, 5, 96])], ["y"], tables)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 5, 96)}, inspect=Inspection(code=("tir",)))
    # The two halves of a head, or the two kinds of neighbours, apart from each other.
    assert ("T.unroll" if interleaved else "_partition") in model.inspected.code["tir"]
    assert rule_counts(model).total() == 1


@pytest.mark.parametrize("is_smooth", [False, True], ids=["sink", "smooth"])
def test_a_sink_has_a_share_of_the_weights_of_attention(
    is_smooth: bool, make_model: MakeModel, assert_same_as_onnxruntime: Any
) -> None:
    names = ["q", "k", "v", "pk", "pv", "last", "total", *([] if is_smooth else ["", "", "", "", "sink"])]
    node = _node(
        "GroupQueryAttention",
        names,
        ["y", "keys", "values"],
        domain=_MS,
        num_heads=4,
        kv_num_heads=2,
        smooth_softmax=int(is_smooth),
    )
    infos = [
        ("q", ["batch", 2, 64]),
        *((name, ["batch", 2, 32]) for name in ("k", "v")),
        *((name, ["batch", 2, 5, 16]) for name in ("pk", "pv")),
        ("last", ["batch"], TensorProto.INT32),
    ]
    weights = {"total": np.array([7], "int32")} | ({} if is_smooth else {"sink": normal(4)})
    path = make_model([node], infos, ["y", "keys", "values"], weights)
    feeds = {"q": normal(1, 2, 64), "k": normal(1, 2, 32, seed=1), "v": normal(1, 2, 32, seed=2)}
    feeds |= {name: normal(1, 2, 5, 16, seed=seed) for seed, name in enumerate(("pk", "pv"))}
    assert_same_as_onnxruntime(path, {**feeds, "last": np.array([6], "int32")})
