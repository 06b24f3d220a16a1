"""`tvmflow compile`: an ONNX file to a bundle, or one sentence and no file."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from onnx import helper

from support import scale
from support.machines import on_two_cores
from support.models import save_amplifier, save_dense, save_model
from support.skips import needs
from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.cli.compile import parse_shapes
from tvmflow.hardware.target import host, missing_features, needed_features, resolve
from tvmflow.runtime import load

Command = Callable[..., Any]


def write_model(nodes: list[onnx.NodeProto], path: Path, shape: Sequence[int | None] = (1, 4)) -> Path:
    """A model of one input x and one output y, both float32 and of the same shape."""
    return save_model(path, nodes, [("x", list(shape))], [("y", list(shape))])


def test_the_same_model_gives_the_same_bundle_from_what_is_done(tvmflow: Command, bundle: Path, models: Path) -> None:
    result = tvmflow("compile", models / "small.onnx", "-o", "again.tar.gz", "--json")
    assert result.code == 0
    assert Path("again.tar.gz").read_bytes() == bundle.read_bytes()
    document = json.loads(result.stdout)
    assert document["bundle"] == "again.tar.gz"
    assert document["sha256"] == sha256_file(bundle)
    assert document["verified"] is True
    assert document["max_abs_error"] < 1e-5
    assert [line.split()[-1] for line in result.stderr.splitlines()] == ["cached"] * 6


def test_symbolic_dimensions_can_be_fixed(tvmflow: Command, models: Path) -> None:
    shapes = "x:[4,8] y:[4,4]"
    assert tvmflow("compile", models / "small.onnx", "-o", "four.tar.gz", "--input-shapes", shapes).code == 0
    manifest = read_manifest(Path("four.tar.gz"))
    assert [item.shape for item in (*manifest.inputs, *manifest.outputs)] == [(4, 8), (4, 4), (4, 4), (4, 4), (4, 4)]
    assert manifest.dimensions == {}
    assert tvmflow("run", "four.tar.gz").stdout.startswith("sum: float32[4, 4]\n")


def test_a_model_whose_dimensions_have_no_names_compiles(tvmflow: Command) -> None:
    path = write_model([helper.make_node("Relu", ["x"], ["y"])], Path("unnamed.onnx"), shape=[-1, None, 4])
    _compiled(tvmflow, path)
    (item,) = read_manifest(Path("b.tar.gz")).inputs
    assert item.shape == ("x_0", "x_1", 4)


def test_a_class_that_rounding_decides_is_right_either_way(tvmflow: Command) -> None:
    """Every class has the same score, a sum of the same numbers in another order: the largest is chance."""
    generator = np.random.default_rng(0)
    terms = generator.standard_normal(200).astype("float32") * 100
    weights = np.stack([generator.permutation(terms) for _ in range(16)], axis=1)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=1, axes=[1]),
        helper.make_node("Mul", ["mean", "ones"], ["row"]),
        helper.make_node("MatMul", ["row", "weights"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["label"], axis=1, keepdims=0),
    ]
    outputs = [("label", [16], onnx.TensorProto.INT64), ("scores", [16, 16])]
    constants = {"weights": weights, "ones": np.ones((1, 200), "float32")}
    path = save_model(Path("chance.onnx"), nodes, [("x", [16, 9])], outputs, constants, opset=17)
    _compiled(tvmflow, path)
    assert tvmflow("verify", "b.tar.gz").code == 0


def test_a_bundle_asks_for_sizes_at_which_poolings_have_data(tvmflow: Command) -> None:
    # ONNX Runtime pools a row of one as well: it rounds the number of windows towards zero.
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 3], strides=[2, 3], pads=[0, 1, 0, 1])
    _compiled(tvmflow, save_model(Path("pool.onnx"), [node], [("x", ["n", 3, "h", "w"])], ["y"]))
    assert read_manifest(Path("b.tar.gz")).dimensions == {"n": (1, None), "h": (2, None), "w": (1, None)}


def test_a_bundle_asks_for_sizes_at_which_none_is_one_by_chance(tvmflow: Command) -> None:
    # A row of one, halved and doubled, has two elements; ONNX Runtime repeats the one beside them.
    nodes = [
        helper.make_node("MaxPool", ["x"], ["half"], kernel_shape=[1, 1], strides=[1, 2]),
        helper.make_node("Resize", ["half", "", "scales"], ["again"]),
        helper.make_node("Add", ["x", "again"], ["y"]),
    ]
    scales = {"scales": np.array([1, 1, 1, 2], "float32")}
    _compiled(tvmflow, save_model(Path("doubled.onnx"), nodes, [("x", ["n", 3, 2, "t"])], ["y"], scales))
    assert read_manifest(Path("b.tar.gz")).dimensions == {"n": (1, None), "t": (2, None)}


@pytest.mark.long
def test_a_bundle_with_a_small_golden_sample_has_typical_inputs_beside_it(tvmflow: Command, tmp_path: Path) -> None:
    """All outputs of a typical size are much larger than the model."""
    weights = {"w": np.ones((4, 20_000), "float32")}
    path = save_model(
        tmp_path / "wide.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, "t", 4])], ["y"], weights
    )
    assert tvmflow("compile", path, "-o", tmp_path / "wide.tvmb").code == 0
    assert (tmp_path / "wide.tvmb").stat().st_size < 2 * weights["w"].nbytes
    with load(tmp_path / "wide.tvmb") as model:
        inputs, outputs = model.sample
        assert (inputs["x"].shape, outputs["y"].shape) == ((1, 1, 4), (1, 1, 20_000))
        rows = model.typical_inputs["x"].shape[1]
        assert rows * outputs["y"].nbytes > weights["w"].nbytes
    random = tvmflow("run", tmp_path / "wide.tvmb", "--fill-mode", "random")
    assert f"[1, {rows}, 20000]" in random.stdout


def test_a_bundle_asks_for_the_one_item_that_the_file_leaves_out_of_an_output(tvmflow: Command) -> None:
    # ONNX Runtime gives a vector for several items, which is not what the file says.
    nodes = [helper.make_node("ReduceSum", ["x", "last"], ["sums"]), helper.make_node("Squeeze", ["sums"], ["y"])]
    _compiled(tvmflow, save_model(Path("one.onnx"), nodes, [("x", ["n", 4])], [("y", [])], {"last": np.array([1])}))
    manifest = read_manifest(Path("b.tar.gz"))
    assert (manifest.inputs[0].shape, manifest.outputs[0].shape, manifest.dimensions) == ((1, 4), (), {})


# The shapes, the type of the error, and the values that its sentence names.
BAD_SHAPES = [
    ("z:[1,8]", "InputError", ["small.onnx", "'z'", "x, y"]),
    ("x=[1,8]", "UsageError", ["x=[1,8]"]),
    ("x:[1,8", "UsageError", ["x:[1,8"]),
    ("1,8", "UsageError", ["1,8"]),
    ("x:[0,8]", "SpecError", ["small.onnx", "dimension 0"]),
    ("x:[-1,8]", "SpecError", ["small.onnx", "dimension -1"]),
    ("x:[1,2.5]", "SpecError", ["small.onnx", "'2.5'"]),
    ("x:[4,9]", "ExportError", ["small.onnx", "'x'", "[batch, 8]", "[4, 9]"]),
    ("x:[8]", "ExportError", ["small.onnx", "'x'", "[batch, 8]", "[8]"]),
]


@pytest.mark.parametrize(("shapes", "kind", "values"), BAD_SHAPES)
def test_shapes_that_do_not_fit_are_one_sentence(
    tvmflow: Command, models: Path, shapes: str, kind: str, values: list[str]
) -> None:
    _assert_refused(tvmflow, models / "small.onnx", kind, values, "--input-shapes", shapes)


def _assert_refused(tvmflow: Command, model: object, kind: str, values: Sequence[str], *options: object) -> None:
    """Assert that a compilation fails with one sentence that names the values, and writes no bundle."""
    result = tvmflow("compile", model, "-o", "b.tar.gz", "--json", *options)
    assert json.loads(result.stdout)["error"]["type"] == kind
    for value in values:
        assert value in result.sentence
    assert not Path("b.tar.gz").exists()


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("", {}),
        ("x:[1,3,224,224]", {"x": (1, 3, 224, 224)}),
        ("x:[1, 3] mask:[batch, 128]", {"x": (1, 3), "mask": ("batch", 128)}),
        (" x : [ 1 ] , y:[2]", {"x": (1,), "y": (2,)}),
        ("scalar:[]", {"scalar": ()}),
        ("serving_default_x:0:[1,2]", {"serving_default_x:0": (1, 2)}),
        ('"quoted":[1]', {"quoted": (1,)}),
    ],
)
def test_shapes_are_read_as_tvmc_took_them(text: str, shapes: dict[str, tuple[int | str, ...]]) -> None:
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize("text", ["x", "x:", "x:[1", "[1]", "x:[1] y", "x:[[1]]"])
def test_shapes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(repr(text))):
        parse_shapes(text)


def test_a_missing_model_is_one_sentence(tvmflow: Command) -> None:
    _assert_refused(tvmflow, "absent.onnx", "UsageError", ["absent.onnx"])


def test_a_missing_model_with_shapes_is_one_sentence(tvmflow: Command) -> None:
    _assert_refused(tvmflow, "absent.onnx", "UsageError", ["absent.onnx"], "--input-shapes", "x:[1]")


def test_a_folder_is_no_model(tvmflow: Command, tmp_path: Path) -> None:
    _assert_refused(tvmflow, tmp_path, "UsageError", [str(tmp_path)])


@pytest.mark.parametrize("text", scale.choose(normal=[b"not a model"], long=[b"", b"\x08\xff\xff\xff", b"\0" * 1000]))
def test_a_file_that_is_no_model_is_one_sentence(tvmflow: Command, text: bytes) -> None:
    Path("bad.onnx").write_bytes(text)
    _assert_refused(tvmflow, "bad.onnx", "ExportError", ["bad.onnx"])


def _without_outputs(path: Path) -> None:
    model = onnx.load(path)
    del model.graph.output[:]
    onnx.save(model, path)


def _without_its_weights(path: Path) -> None:
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    path.with_name("weights.bin").unlink()


def _with_an_unknown_operator(path: Path) -> None:
    save_model(path, [helper.make_node("Mine", ["x"], ["y"], domain="org.example")], [("x", [2, 3])], [("y", [2, 3])])


@pytest.mark.parametrize(
    ("spoil", "values"),
    [
        (_without_outputs, ("has no outputs", "export it again")),
        (_without_its_weights, ("'weights.bin'", "is missing", "put it there")),
        (_with_an_unknown_operator, ("org.example:Mine", "`tvmflow doctor`")),
    ],
)
def test_a_model_that_cannot_be_compiled_says_what_to_do(
    tvmflow: Command, spoil: Callable[[Path], None], values: tuple[str, ...]
) -> None:
    spoil(save_dense(Path("model.onnx")))
    result = tvmflow("compile", "model.onnx", "-o", "b.tar.gz")
    assert result.code == 1
    assert all(value in result.sentence for value in ("model.onnx", *values)), result.sentence
    assert not Path("b.tar.gz").exists()


def test_an_input_without_a_shape_gets_one_from_the_command_line(tvmflow: Command) -> None:
    save_model(Path("model.onnx"), [helper.make_node("Relu", ["x"], ["y"])], [("x", None)], [("y", ["n", 3])])
    for options in ((), ("--input-shapes", "")):
        refused = tvmflow("compile", "model.onnx", "-o", "b.tar.gz", *options)
        assert refused.code == 1
        assert "input 'x'" in refused.sentence
        assert "--input-shapes" in refused.sentence
    result = tvmflow("compile", "model.onnx", "-o", "b.tar.gz", "--input-shapes", "x:[n,3]", "--json")
    assert result.code == 0, result.stderr
    assert read_manifest(Path("b.tar.gz")).inputs[0].shape == ("n", 3)


def test_a_model_that_is_not_valid_is_one_sentence(tvmflow: Command) -> None:
    write_model([helper.make_node("Relu", ["nowhere"], ["y"])], Path("bad.onnx"))
    _assert_refused(tvmflow, "bad.onnx", "ExportError", ["bad.onnx", "nowhere"])


def test_an_operator_that_tvm_does_not_know_is_named_with_the_users_own_file(tvmflow: Command, state: Path) -> None:
    write_model([helper.make_node("RandomUniformLike", ["x"], ["y"], name="toss")], Path("toss.onnx"))
    result = tvmflow("compile", "toss.onnx", "-o", "b.tar.gz", "--json")
    assert result.code == 1
    assert json.loads(result.stdout)["error"]["type"] == "UnsupportedOperatorError"
    for value in ("toss.onnx", "RandomUniformLike", "'toss'"):
        assert value in result.sentence
    assert str(state) not in result.sentence
    assert not Path("b.tar.gz").exists()


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("x86-64-v9", ["'x86-64-v9'", "'x86-64-v"]),
        ("llvm -mcpu=nonesuch -mtriple=x86_64-linux-gnu", ["'nonesuch'"]),
        ("vulkan", ["'vulkan'"]),
    ],
)
def test_an_impossible_target_is_one_sentence(tvmflow: Command, models: Path, target: str, values: list[str]) -> None:
    _assert_refused(tvmflow, models / "small.onnx", "SpecError", values, "--target", target)


def test_a_target_that_only_tvm_can_refuse_is_one_sentence(tvmflow: Command, bundle: Path, models: Path) -> None:
    target = '{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "nonsense": 1}'
    _assert_refused(tvmflow, models / "small.onnx", "TargetError", ["small.onnx", "nonsense"], "--target", target)


def test_a_state_folder_that_cannot_be_written_is_one_sentence(
    tvmflow: Command, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("TVMFLOW_HOME", "file/state")
    _assert_refused(tvmflow, models / "small.onnx", "StepError", ["file/state"])


@pytest.mark.skipif("avx512_bf16" not in host().features, reason="this CPU has no avx512_bf16")
def test_a_bundle_in_bfloat16_is_within_its_bound_and_needs_the_instructions(tvmflow: Command, models: Path) -> None:
    result = tvmflow("compile", models / "small.onnx", "-o", "narrow.tar.gz", "--precision", "bf16", "--json")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert (document["precision"], document["verified"]) == ("bf16", True)
    assert 1e-4 < document["max_abs_error"] < 0.2  # beyond what float32 is allowed
    assert "avx512_bf16" in read_manifest(Path("narrow.tar.gz")).cpu_features


@pytest.mark.skipif(
    bool(missing_features(needed_features(resolve("x86-64-v4-amx"), "fp32"))), reason="this CPU has no avx512_bf16"
)
def test_a_bundle_that_does_not_use_amx_is_verified_without_it(tvmflow: Command, models: Path) -> None:
    assert _compiled(tvmflow, models / "small.onnx", "--target", "x86-64-v4-amx")["verified"]


def test_a_precision_that_the_target_has_no_instructions_for_is_refused(tvmflow: Command, models: Path) -> None:
    options = ("--precision", "bf16", "--target", "x86-64-v3")
    _assert_refused(tvmflow, models / "small.onnx", "SpecError", ["'x86-64-v3'", "bf16"], *options)


def test_int8_without_a_quantised_model_says_how_to_make_one(tvmflow: Command, models: Path) -> None:
    values = ["int8", "onnxruntime.quantization.quantize_static"]
    _assert_refused(tvmflow, models / "small.onnx", "BuildError", values, "--precision", "int8")


@pytest.fixture(scope="module")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """conv.onnx: a convolution of 16 channels by 3x3 weights, and its ReLU."""
    weights = np.random.default_rng(0).normal(size=(16, 16, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "weights"], ["convolved"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["convolved"], ["y"]),
    ]
    path = tmp_path_factory.mktemp("conv") / "conv.onnx"
    return save_model(path, nodes, [("x", [1, 16, 9, 9])], ["y"], {"weights": weights})


def _compiled(tvmflow: Command, model: Path, *options: object) -> dict[str, Any]:
    result = tvmflow("compile", model, "-o", "b.tar.gz", "--json", *options)
    assert result.code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_code_is_written_beside_the_bundle_which_stays_the_same(
    tvmflow: Command, bundle: Path, models: Path
) -> None:
    Path("out").mkdir()
    result = tvmflow("compile", models / "small.onnx", "-o", "out/b.tar.gz", "--dump-code", "ll,asm,relax,tir")
    assert result.code == 0
    assert result.stdout.startswith("out/small.ll: code\nout/small.asm: code\n")
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "b.tar.gz",
        "small.asm",
        "small.ll",
        "small.relax",
        "small.tir",
    ]
    assert re.search(r"^define .*fused_dense_add", Path("out/small.ll").read_text(), re.MULTILINE)
    assert ".text" in Path("out/small.asm").read_text()
    assert "R.call_tir(cls.fused_dense_add" in Path("out/small.relax").read_text()
    assert '"schedule_rule": "rows"' in Path("out/small.relax").read_text()
    tir = Path("out/small.tir").read_text()
    assert "def fused_dense_add(" in tir
    assert '"tirx.is_scheduled": True' in tir
    assert "R.function" not in tir
    assert Path("out/b.tar.gz").read_bytes() == bundle.read_bytes()


def test_a_form_of_code_is_written_only_when_asked_for(tvmflow: Command, models: Path) -> None:
    assert _compiled(tvmflow, models / "small.onnx", "--dump-code", "tir")["code"] == ["small.tir"]
    assert sorted(path.name for path in Path().iterdir()) == ["b.tar.gz", "small.tir"]


# The three tests below look at one build.
_PRINTED = ("--print-ir-before", "FuseOps", "--print-ir-after", "FuseOps,ConvertLayout", "--print-pass-times")


def test_the_module_is_printed_before_and_after_a_pass(tvmflow: Command, models: Path) -> None:
    result = tvmflow("compile", models / "small.onnx", "-o", "b.tar.gz", *_PRINTED)
    assert result.code == 0
    before, after = result.stdout.removeprefix("# before FuseOps\n").split("# after FuseOps\n")
    assert "def fused_dense_add" not in before
    assert "def fused_dense_add" in after
    assert "'ConvertLayout' did not run" in result.stderr.splitlines()[-1]


def test_what_is_printed_of_the_passes_is_data_for_programs(tvmflow: Command, models: Path) -> None:
    document = _compiled(tvmflow, models / "small.onnx", *_PRINTED)
    assert [(item["when"], item["name"]) for item in document["passes"]] == [
        ("before", "FuseOps"),
        ("after", "FuseOps"),
    ]
    assert document["pass_seconds"]["FuseOps"] > 0


def test_the_times_of_the_passes_are_printed_the_longest_first(tvmflow: Command, models: Path) -> None:
    result = tvmflow("compile", models / "small.onnx", "-o", "b.tar.gz", *_PRINTED)
    heading, *lines, total, _ = result.stdout.partition("\npass ")[2].splitlines()
    assert heading.split() == ["ms"]
    times = [float(line.split()[1]) for line in lines]
    assert times == sorted(times, reverse=True)
    assert float(total.split()[1]) == pytest.approx(sum(times), abs=1e-3 * len(times))
    assert any(line.startswith("FuseOps ") for line in lines)


def test_a_disabled_pass_does_not_run(tvmflow: Command, models: Path) -> None:
    fused = _compiled(tvmflow, models / "small.onnx")["schedules"]
    apart = _compiled(tvmflow, models / "small.onnx", "--disabled-pass", "FuseOps,FuseTIR")["schedules"]
    assert sum(apart.values()) == sum(fused.values()) + 1


def test_a_required_pass_runs_below_its_level_and_others_do_not(tvmflow: Command, models: Path) -> None:
    options = ("--opt-level", "0", "--required-pass", "EliminateCommonSubexpr", "--print-pass-times")
    passes = _compiled(tvmflow, models / "small.onnx", *options)["pass_seconds"]
    assert "EliminateCommonSubexpr" in passes
    assert "FuseBlocks" not in passes  # which is of level 2


def test_an_option_of_the_pass_context_reaches_the_code(tvmflow: Command, models: Path) -> None:
    vectors = {}
    # Without optimising, so that LLVM makes no vectors of its own.
    target = "llvm -mcpu=x86-64-v3 -opt-level=0"
    for value in ("false", "True"):
        option = ("--pass-config", f"tirx.disable_vectorize={value}")
        _compiled(tvmflow, models / "small.onnx", "--dump-code", "ll", "--target", target, *option)
        vectors[value] = Path("small.ll").read_text().count("x float>")
    assert vectors["True"] < vectors["false"] / 2


@pytest.mark.long
def test_fast_algorithms_can_be_forbidden(tvmflow: Command, convolution: Path) -> None:
    # With many cores, the image is too small for Winograd's algorithm.
    options = ("--target", json.dumps(on_two_cores("native").tvm))
    allowed = _compiled(tvmflow, convolution, *options)["schedules"]
    forbidden = _compiled(tvmflow, convolution, *options, "--fast-algorithms", "forbid")["schedules"]
    assert "winograd" in allowed
    assert "winograd" not in forbidden


def test_a_model_may_keep_its_layout(tvmflow: Command, convolution: Path) -> None:
    nhwc = _compiled(tvmflow, convolution, "--desired-layout", "NHWC", "--dump-code", "relax")
    assert "transpose" in Path("conv.relax").read_text()
    nchw = _compiled(tvmflow, convolution, "--desired-layout", "NCHW", "--dump-code", "relax")
    assert "transpose" not in Path("conv.relax").read_text()
    assert nchw["schedules"] == {"fallback": 1}
    assert nhwc["schedules"] != nchw["schedules"]


def test_outputs_that_are_one_number_are_said_to_prove_little(tvmflow: Command) -> None:
    """A last ReLU of numbers below zero makes every output 0: any build that gives 0 is equal."""
    nodes = [helper.make_node("Sigmoid", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    path = write_model([*nodes, helper.make_node("Relu", ["b"], ["y"])], Path("zeros.onnx"))
    sentence = "the comparison proves little: every output is the same number in all samples ('y' is 0)"
    (note,) = _compiled(tvmflow, path)["notes"]
    assert note.startswith(sentence)
    assert f"b.tar.gz: {sentence}" in tvmflow("compile", path, "-o", "b.tar.gz").stdout


@pytest.mark.long
def test_a_bound_may_be_given_to_a_model_that_amplifies_rounding(tvmflow: Command) -> None:
    """The refusal names the option that takes the larger bound, here the largest difference of two sines."""
    path = save_amplifier(Path("amplifier.onnx"), 3e4)
    sentence = tvmflow("compile", path, "-o", "b.tar.gz", "--max-relative-error", "1e-6").sentence
    assert "the model amplifies rounding errors" in sentence
    assert "as --max-relative-error; `tvmflow bisect` finds the node" in sentence
    assert not Path("b.tar.gz").exists()
    _compiled(tvmflow, path, "--max-relative-error", "2")
    assert tvmflow("bisect", path, "--max-relative-error", "2").code == 0
    assert "give the one or the others" in tvmflow("bisect", path, "--max-relative-error", "1", "--rtol", "1").sentence


@pytest.mark.long
def test_a_bundle_nearer_to_the_exact_outputs_than_onnx_runtime_is_written_with_a_note(tvmflow: Command) -> None:
    """ONNX Runtime rounds the angles of a Fourier transform, and errs by a two thousandth of the outputs here."""
    nodes = [
        helper.make_node("Constant", [], ["axis"], value_int=1),
        helper.make_node("DFT", ["x", "", "axis"], ["y"]),
    ]
    path = save_model(Path("transform.onnx"), nodes, [("x", [1, 601, 2])], ["y"], opset=20)
    (note,) = _compiled(tvmflow, path)["notes"]
    assert "within the bounds of a computation in float64, from which ONNX Runtime's differ by up to" in note
    assert tvmflow("compile", path, "-o", "b.tar.gz", "--max-relative-error", "1e-6").code == 3


def test_another_compiler_links_the_library_with_its_options(tvmflow: Command, models: Path, tmp_path: Path) -> None:
    linker = tmp_path / "linker"
    linker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nexec c++ "$@"\n')
    linker.chmod(0o755)
    _compiled(
        tvmflow, models / "small.onnx", "--cross-compiler", linker, "--cross-compiler-options", "-Wl,--build-id=none -s"
    )
    assert "-shared" in (tmp_path / "log").read_text()
    assert "-Wl,--build-id=none -s" in (tmp_path / "log").read_text()
    assert tvmflow("verify", "b.tar.gz").code == 0


def _write_record(models: Path, path: Path, on: str = "native", trace: str = "[[], []]") -> None:
    """A record for the model's ReLU, by default one whose schedule is none at all."""
    from tvmflow import compiler
    from tvmflow.hardware.target import resolve
    from tvmflow.tuning import Record, workload_key
    from tvmflow.tuning.record_store import RecordStore
    from tvmflow.tuning.records import SPACE_VERSION, now, tvm_version

    target = resolve(on)
    lowered = compiler.lower(compiler.import_onnx(models / "small.onnx"), target)
    (relu,) = (item.func for item in compiler.workloads(lowered) if item.name == "relu")
    RecordStore(path).append(
        Record(
            key=workload_key(relu),
            workload="",
            trace=trace,
            seconds=1e-9,
            baseline_seconds=None,
            target=target.canonical,
            tvm_version=tvm_version(),
            space_version=SPACE_VERSION,
            tuner="xgb",
            trial=1,
            created_at=now(),
        )
    )


def test_given_tuning_records_are_used_for_this_build_only(tvmflow: Command, models: Path, tmp_path: Path) -> None:
    _write_record(models, tmp_path / "records")
    (file,) = (tmp_path / "records").iterdir()
    for place in (tmp_path / "records", file):
        assert _compiled(tvmflow, models / "small.onnx", "--tuning-records", place)["schedules"]["tuned"] == 1
    assert "tuned" not in _compiled(tvmflow, models / "small.onnx")["schedules"]


@pytest.mark.long
def test_a_record_that_changes_nothing_is_not_compared(
    tvmflow: Command, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "home"))
    _write_record(models, tmp_path / "home" / "records", trace='[[["Nonsense", [], [], []]], []]')
    document = _compiled(tvmflow, models / "small.onnx")
    assert (document["choice"], "tuned" in document["schedules"]) == (None, False)
    # So that it can be built again anywhere.
    assert read_manifest(Path("b.tar.gz")).provenance["records"] == hashlib.sha256().hexdigest()


@pytest.mark.long
@pytest.mark.skipif(host().arch != "x86_64", reason="a target that this machine cannot run is meant")
@needs("aarch64-linux-gnu-g++")
def test_what_cannot_be_compared_here_is_tuned(
    tvmflow: Command, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "home"))
    _write_record(models, tmp_path / "home" / "records", on="aarch64-cortex-a72")
    document = _compiled(tvmflow, models / "small.onnx", "--target", "aarch64-cortex-a72")
    assert document["schedules"]["tuned"] == 1
    assert document["choice"] == {
        "shipped": "tuned",
        "told": "the tuned build is shipped, not compared with the untuned: target 'aarch64-cortex-a72' is aarch64, "
        "this machine is x86_64: not verified",
        "ratio": None,
        "interval": None,
        "part": "all",
        "threads": None,
        "checks": [],
    }


def test_a_file_without_a_fitting_record_is_one_sentence(tvmflow: Command, models: Path) -> None:
    Path("none.jsonl").write_text("")
    values = ["'none.jsonl'", "'native'"]
    _assert_refused(tvmflow, models / "small.onnx", "InputError", values, "--tuning-records", "none.jsonl")


WRONG_OPTIONS = [
    (("--disabled-pass", "ChanelsLast"), ["small.onnx", "'ChanelsLast'", "'ChannelsLast'"]),
    (("--required-pass", "FuseOp"), ["'FuseOp'", "'FuseOps'"]),
    (("--print-ir-before", "FusOps"), ["'FusOps'", "'FuseOps'"]),
    (("--pass-config", "tir.disable_vectorize=1"), ["'tir.disable_vectorize'", "'tirx.disable_vectorize'"]),
    (("--pass-config", "tirx.disable_vectorize=maybe"), ["'tirx.disable_vectorize'", "'maybe'"]),
]


@pytest.mark.parametrize(("options", "values"), scale.choose(normal=WRONG_OPTIONS[:1], long=WRONG_OPTIONS))
def test_an_option_that_tvm_does_not_know_is_one_sentence(
    tvmflow: Command, models: Path, options: tuple[str, str], values: list[str]
) -> None:
    _assert_refused(tvmflow, models / "small.onnx", "OptionError", values, *options)


WRONG_VALUES = [
    (("--dump-code", "ll,llvm"), "'llvm'"),
    (("--pass-config", "tirx.noalias"), "'tirx.noalias'"),
    (("--opt-level", "5"), "0<=x<=4"),
    (("--desired-layout", "NCWH"), "'NHWC', 'NCHW'"),
    (("--fast-algorithms", "maybe"), "'allow', 'forbid'"),
    (("--tuning-records", "absent"), "'absent'"),
    (("--target", "nonsense"), "'nonsense'"),
    (("--target", '{"kind": "llvm", "mcpu": "x86-64-v3", "nonsense": 1}'), "nonsense"),
    (("--input-shapes", "x=[1,8]"), "x=[1,8]"),
    (("--cross-compiler", ""), "--cross-compiler"),
    (("--cross-compiler", "c++ '"), "No closing quotation"),
    (("--cross-compiler-options", "-s"), "--cross-compiler"),
]


@pytest.mark.parametrize(("options", "value"), WRONG_VALUES)
def test_a_wrong_value_exits_with_two(tvmflow: Command, models: Path, options: tuple[str, str], value: str) -> None:
    result = tvmflow("compile", models / "small.onnx", "-o", "b.tar.gz", *options)
    assert result.code == 2
    assert value in result.stderr


def test_a_cross_compiler_that_is_not_installed_is_named(tvmflow: Command, models: Path) -> None:
    options = ("--cross-compiler", "nonesuch-g++")
    _assert_refused(tvmflow, models / "small.onnx", "MachineError", ["'nonesuch-g++'"], *options)
    assert tvmflow("compile", models / "small.onnx", "-o", "b.tar.gz", *options).code == 1


@pytest.mark.long
def test_the_cost_models_choices_are_explained_with_their_margins(tvmflow: Command, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype("float32")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    path = save_model(tmp_path / "one.onnx", [node], [("x", [1, 16, 8, 8])], [("y", [1, 16, 8, 8])], {"w": weight})
    result = tvmflow("compile", path, "-o", tmp_path / "one.tar.gz", "--explain", "--json")
    assert result.code == 0, result.stderr
    # It runs on the cores of the machine that runs it.
    assert read_manifest(tmp_path / "one.tar.gz").max_threads is None
    (decision,) = json.loads(result.stdout)["decisions"]
    assert decision["kind"] == "algorithm"
    assert set(decision["cycles"]) == {"direct", "winograd 2", "winograd 4"}
    assert all(cycles > 0 for cycles in decision["cycles"].values())
    assert decision["choice"] in decision["cycles"]
    text = tvmflow("compile", path, "-o", tmp_path / "one.tar.gz", "--explain").stdout
    lines = [line for line in text.splitlines() if line.endswith("of the next best")]
    assert [line.split("  ")[1] for line in lines] == [decision["choice"]]
    assert "decisions" not in json.loads(tvmflow("compile", path, "-o", tmp_path / "one.tar.gz", "--json").stdout)
