"""Export of PyTorch modules at the edges of what a forward method may take and return."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import forests, scale
from support.models import save_model, save_text
from support.processes import SECRETS, mentioned_secrets
from tasks.export import ExportJob, ExportResult, export
from tasks.original import find_original
from tasks.step import StepRunner
from tvmflow.errors import ExportError
from tvmflow.onnx_model.reading import declared_inputs, read_onnx
from tvmflow.settings import Settings
from tvmflow.source import Source, load_module
from tvmflow.spec import Model, Spec, parse
from tvmflow.workspace import Workspace

_X = {"name": "x", "shape": [2, 4]}

_SEEDED = """
import torch
from torch import nn


def create():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())
"""


def test_outputs_of_dictionaries_and_nested_tuples_are_named_in_their_order(
    export_module: Any, kept_samples: Any
) -> None:
    network = (
        "class Network(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return {'total': x.sum(-1), 'others': (x * 2, [x.max()])}\n"
    )
    result = export_module(network, inputs=[_X], outputs=["total", "double", "largest"])
    assert [(item.name, item.shape) for item in result.outputs] == [
        ("total", (2,)),
        ("double", (2, 4)),
        ("largest", ()),
    ]
    for inputs, outputs in kept_samples(result):
        assert outputs["total"] == pytest.approx(inputs["x"].sum(-1), rel=1e-4)
        assert outputs["double"] == pytest.approx(inputs["x"] * 2)
        assert outputs["largest"] == pytest.approx(inputs["x"].max())


def test_inputs_are_given_in_the_order_of_the_release_file_and_other_arguments_keep_their_defaults(
    export_module: Any, kept_samples: Any
) -> None:
    network = (
        "class Network(nn.Module):\n"
        "    def forward(self, a, b, scale=3.0, *, shift=None):\n"
        "        return (a - b) * scale\n"
    )
    result = export_module(network, inputs=[{**_X, "name": "first"}, {**_X, "name": "second"}])
    assert [item.name for item in result.inputs] == ["first", "second"]
    inputs, outputs = kept_samples(result)[0]
    assert next(iter(outputs.values())) == pytest.approx((inputs["first"] - inputs["second"]) * 3, rel=1e-5)


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ([{"name": "a", "shape": ["n", 4]}], "a float32[2, 4]"),
        ([{"name": "a", "shape": ["n", 4]}, {"name": "b", "shape": [3]}], "a float32[2, 4], b float32[3]"),
    ],
)
def test_a_model_that_does_not_take_its_inputs_says_what_it_was_called_with(
    export_module: Any, inputs: list[dict[str, Any]], given: str
) -> None:
    network = "class Network(nn.Module):\n    def forward(self, a, b):\n        return a + b\n"
    with pytest.raises(ExportError) as caught:
        export_module(network, inputs=inputs)
    assert given in str(caught.value)
    assert "`inputs`" in str(caught.value)


def test_whole_numbers_are_taken(export_module: Any) -> None:
    network = (
        "class Network(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(10, 3)\n\n"
        "    def forward(self, tokens, mask):\n"
        "        return self.embedding(tokens) * mask.unsqueeze(-1)\n"
    )
    tokens = {"kind": "integers", "low": 0, "high": 10}
    mask = {"kind": "integers", "low": 0, "high": 2}
    result = export_module(
        network,
        inputs=[
            {"name": "tokens", "shape": ["batch", "length"], "dtype": "int64", "samples": tokens},
            {"name": "mask", "shape": ["batch", "length"], "dtype": "bool", "samples": mask},
        ],
        dimensions={"batch": {"max": 4}, "length": {"max": 16, "measure": [5]}},
        outputs=["embedded"],
        export={"opset": 18},
    )
    assert result.opset == 18
    assert [item.dtype for item in result.inputs] == ["int64", "bool"]
    assert result.outputs[0].shape == ("batch", "length", 3)
    assert result.max_abs_error == 0.0


@pytest.mark.parametrize("size", scale.choose(normal=[1], long=[1, 3]))
def test_samples_go_through_the_range_of_a_dimension_and_one_of_one_possible_size_is_static(
    export_module: Any, kept_samples: Any, size: int
) -> None:
    network = "class Network(nn.Module):\n    def forward(self, x):\n        return x.softmax(-1)\n"
    result = export_module(
        network,
        inputs=[{"name": "x", "shape": ["batch", "single", 4]}],
        dimensions={
            "batch": {"min": 1, "max": 9, "tune": 4, "measure": [4, 9]},
            "single": {"min": size, "max": size},
        },
    )
    assert result.inputs[0].shape == ("batch", size, 4)
    assert [inputs["x"].shape for inputs, _ in kept_samples(result)] == [(batch, size, 4) for batch in (4, 9, 7, 1)]


def test_a_size_baked_into_the_model_is_refused(export_module: Any) -> None:
    network = "class Network(nn.Module):\n    def forward(self, x):\n        return x.reshape(2, 8)\n"
    with pytest.raises(ExportError, match="dimension 'batch' of input 'x' is 4 in the ONNX model"):
        export_module(network, inputs=[{"name": "x", "shape": ["batch", 4]}], dimensions={"batch": {"tune": 4}})


_HALVED = """class Network(nn.Module):
    def forward(self, x):
        half = nn.functional.max_pool2d(x, 2)
        return torch.cat([x, nn.functional.interpolate(half, scale_factor=2.0)], 1)
"""
_HEIGHT = {"name": "x", "shape": [1, 2, "height", 4]}


def test_samples_have_sizes_that_the_module_takes(export_module: Any, kept_samples: Any) -> None:
    result = export_module(
        _HALVED, inputs=[_HEIGHT], dimensions={"height": {"min": 4, "max": 40}}, validate={"samples": 6}
    )
    heights = {inputs["x"].shape[2] for inputs, _ in kept_samples(result)}
    assert len(heights) > 2
    assert all(height % 2 == 0 for height in heights)
    (note,) = result.notes()
    odd = r"the model does not run with height \d*[13579] \(RuntimeError: .*\); samples have other sizes"
    assert re.fullmatch(odd, note)


def test_a_module_that_does_not_take_a_size_to_measure_is_refused(export_module: Any) -> None:
    with pytest.raises(ExportError, match=r"the model fails on sample 1 .*Sizes of tensors must match"):
        export_module(_HALVED, inputs=[_HEIGHT], dimensions={"height": {"min": 4, "max": 40, "measure": [4, 7]}})


def test_outputs_that_are_not_deterministic_are_refused(export_module: Any) -> None:
    network = "class Network(nn.Module):\n    def forward(self, x):\n        return x + torch.rand_like(x)\n"
    with pytest.raises(ExportError, match="gives other outputs when it gets the same inputs again"):
        export_module(network, inputs=[_X])


_LINEAR = """class Network(nn.Module):
    def __init__(self):
        super().__init__()
        {line}

    def forward(self, x):
        return {result}
"""


@pytest.mark.parametrize(
    ("line", "result", "reason"),
    [
        (
            "self.l = nn.Linear(4, 3); nn.init.constant_(self.l.bias, float('nan'))",
            "self.l(x)",
            "NaN .*: l.bias; train",
        ),
        ("self.l = nn.LazyLinear(3)", "self.l(x)", "'l.weight' .* has no values yet"),
        ("self.l = nn.Linear(4, 3, device='meta')", "self.l(x)", "'l.weight' .* is on the device meta"),
        ("self.l = nn.Linear(4, 3)", "None", "returns no tensors"),
        ("self.l = nn.Linear(4, 3)", "x + 1 if x.sum() > 0 else x", "write torch.where or torch.cond"),
    ],
    ids=["nan", "lazy", "meta", "nothing", "decision"],
)
def test_a_module_that_cannot_be_released_is_told_what_to_do(
    export_module: Any, line: str, result: str, reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        export_module(_LINEAR.format(line=line, result=result), inputs=[_X])


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("self.l = nn.Linear(4, 3)", "self.l(x), self.l.weight"),
        ("self.l = nn.Linear(4, 3); self.register_buffer('b', torch.full((3,), float('nan')))", "self.l(x)"),
    ],
    ids=["parameter", "buffer"],
)
def test_a_module_may_return_a_parameter_and_hold_nan(export_module: Any, line: str, result: str) -> None:
    text = _LINEAR.format(line=f"torch.manual_seed(0); {line}", result=result)
    assert export_module(text, inputs=[_X]).is_repeatable


@pytest.mark.long
def test_a_compiled_module_is_taken_out_of_its_wrapper(
    export_spec: Any, user_code: Callable[[str], str], tmp_path: Path
) -> None:
    name = user_code(
        "import torch\n\ndef create():\n    return torch.nn.DataParallel(torch.compile(torch.nn.Linear(4, 3)))\n"
    )
    inputs = [{"name": "x", "shape": ["batch", 4]}]
    result = export_spec(parse({"name": "wrapped", "model": {"factory": f"{name}:create"}, "inputs": inputs}, tmp_path))
    assert result.inputs[0].shape == ("batch", 4)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"weight": (3, 4), "extra": (1,)}, "it lacks 'bias' and the model has no 'extra'"),
        ({"weight": (3, 5), "bias": (3,)}, r"'weight' has shape \[3, 5\], the model wants \[3, 4\]"),
        ({"model": None, "epoch": None}, "the file holds 'model', 'epoch'; save the state dict alone"),
        (None, "the file holds a list and no state dict"),
    ],
)
def test_weights_that_do_not_fit_say_which(
    export_spec: Any, user_code: Callable[[str], str], tmp_path: Path, state: Any, reason: str
) -> None:
    import torch

    name = user_code("import torch\n\ndef create():\n    return torch.nn.Linear(4, 3)\n")
    content = [1] if state is None else {key: 3 if size is None else torch.zeros(size) for key, size in state.items()}
    torch.save(content, tmp_path / "weights.pt")
    model = {"factory": f"{name}:create", "weights": "weights.pt"}
    with pytest.raises(ExportError, match=f"weights 'weights.pt' do not fit the model of .*: {reason}"):
        export_spec(parse({"name": "weights", "model": model, "inputs": [_X]}, tmp_path))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_weights_of_a_wrapped_module_are_those_of_the_module(
    export_spec: Any, kept_samples: Any, user_code: Callable[[str], str], tmp_path: Path, prefix: str
) -> None:
    import torch

    name = user_code("import torch\n\ndef create():\n    return torch.nn.Linear(4, 3)\n")
    torch.save({f"{prefix}weight": torch.ones(3, 4), f"{prefix}bias": torch.zeros(3)}, tmp_path / "weights.pt")
    model = {"factory": f"{name}:create", "weights": "weights.pt"}
    result = export_spec(parse({"name": "weights", "model": model, "inputs": [_X]}, tmp_path))
    for inputs, outputs in kept_samples(result):
        (output,) = outputs.values()
        np.testing.assert_allclose(output, np.repeat(inputs["x"].sum(1)[:, None], 3, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", scale.choose(normal=[["one", "two"]], long=[["one"], ["a", "b", "c", "d"]]))
def test_a_wrong_number_of_output_names_is_refused(export_module: Any, names: list[str]) -> None:
    network = "class Network(nn.Module):\n    def forward(self, x):\n        return x, x + 1, x + 2\n"
    with pytest.raises(ExportError, match=f"the model returns 3 outputs, the release file names {len(names)}"):
        export_module(network, inputs=[_X], outputs=names)


@pytest.mark.long
@pytest.mark.parametrize("opset", [18, 20])
def test_the_opset_is_the_one_asked_for(export_module: Any, opset: int) -> None:
    network = "class Network(nn.Module):\n    def forward(self, x):\n        return nn.functional.gelu(x)\n"
    result = export_module(network, inputs=[_X], export={"opset": opset})
    assert result.opset == opset


def test_the_same_model_gives_the_same_bytes_in_every_folder(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "seeded_network.py").write_text(_SEEDED)
        document = {"name": "exported", "model": {"factory": "seeded_network:create"}, "inputs": [_X]}
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "seeded_network", raising=False)
        result = export_spec(parse(document, folder))
        digests.append((result.onnx.sha256, result.samples.sha256))
        assert result.is_repeatable
    assert digests[0] == digests[1]


_ROUNDED = """
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)).{dtype}()

    def forward(self, x):
        return self.layers(x.{dtype}())
"""


@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", "float32"), ("half", "float16")])
def test_modules_of_16_bits_may_differ_by_what_they_round(
    dtype: str, result: str, export_module: Any, kept_samples: Any
) -> None:
    network = _ROUNDED.replace("{dtype}", dtype)
    exported = export_module(network, inputs=[{"name": "x", "shape": [64, 4]}])
    assert exported.rounds_activations
    assert [item.dtype for item in (*exported.inputs, *exported.outputs)] == ["float32", result]
    assert 0 < exported.max_abs_error < 0.1
    assert {outputs.dtype.name for _, named in kept_samples(exported) for outputs in named.values()} == {result}
    with pytest.raises(ExportError, match="ONNX Runtime differs from PyTorch"):
        export_module(network, inputs=[{"name": "x", "shape": [64, 4]}], export={"rtol": 1e-6, "atol": 1e-6})


def test_a_file_in_bfloat16_is_taken_for_float32(export_spec: Callable[[Spec], ExportResult], tmp_path: Path) -> None:
    kind, weights = TensorProto.BFLOAT16, {"w": np.arange(12).reshape(4, 3).astype(ml_dtypes.bfloat16)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])]
    save_model(tmp_path / "model.onnx", nodes, [("x", ["n", 4], kind)], [("y", ["n", 3], kind)], weights, opset=22)
    exported = export_spec(parse({"name": "brain", "model": {"onnx": "model.onnx"}}, tmp_path))
    assert [(item.name, item.dtype) for item in (*exported.inputs, *exported.outputs)] == [
        ("x", "float32"),
        ("y", "float32"),
    ]
    assert exported.rounds_activations


@pytest.mark.parametrize("content", [b"", b"no ONNX at all", b"\x08\x09"], ids=["empty", "text", "without a graph"])
def test_what_is_no_onnx_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ExportError, match=r"model\.onnx' is not a readable ONNX file"):
        read_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("return 3", "returned a int, not a torch.nn.Module"), ("raise OSError('gone')", "raised OSError: gone")],
)
def test_a_factory_that_gives_no_module_is_refused(
    export_spec: Callable[[Spec], ExportResult],
    user_code: Callable[[str], str],
    tmp_path: Path,
    factory: str,
    reason: str,
) -> None:
    name = user_code(f"def create():\n    {factory}\n")
    spec = parse({"name": "exported", "model": {"factory": f"{name}:create"}, "inputs": [_X]}, tmp_path)
    with pytest.raises(ExportError, match=reason):
        export_spec(spec)


def test_free_dimensions_without_a_name_are_called_after_input_and_axis(tmp_path: Path) -> None:
    sizes: list[int | str | None] = [-1, None, 0, "?", "time", "p2o.Size.1", 3]
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["in.put"], ["y"])],
            "model",
            [helper.make_tensor_value_info("in.put", TensorProto.FLOAT, sizes)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [-1, None, 0, "?", "time", "p2o.Size.1", 3])],
        )
    )
    onnx.save(model, tmp_path / "model.onnx")
    entries = read_onnx(tmp_path / "model.onnx")
    assert declared_inputs(entries)[0].shape == (
        "in_put_0",
        "in_put_1",
        "in_put_2",
        "in_put_3",
        "time",
        "p2o_Size_1",
        3,
    )
    assert entries.graph.output[0].type.tensor_type.shape.dim[5].dim_param == "p2o_Size_1"


def test_unnamed_dimensions_of_two_inputs_get_two_names_that_no_other_dimension_has(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", [name], [f"{name}_out"]) for name in ("x", "y", "z")],
        "model",
        [
            value("x", TensorProto.FLOAT, [-1, 4]),
            value("y", TensorProto.FLOAT, [-1, 4]),
            value("z", TensorProto.FLOAT, ["x_0", 4]),
        ],
        [value(f"{name}_out", TensorProto.FLOAT, None) for name in ("x", "y", "z")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    inputs = declared_inputs(read_onnx(tmp_path / "model.onnx"))
    assert [item.shape[0] for item in inputs] == ["x_0_2", "y_0", "x_0"]


def test_an_export_says_that_its_factory_does_not_give_the_same_weights_twice(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path, user_code: Callable[[str], str]
) -> None:
    name = user_code(_SEEDED.replace("torch.manual_seed(0)", "pass"))
    spec = parse({"name": "repeated", "model": {"factory": f"{name}:create"}, "inputs": [_X]}, tmp_path)
    assert not export_spec(spec).is_repeatable


@pytest.mark.usefixtures("children_in_forks")
def test_a_model_factory_sees_no_credentials_but_the_variables_that_settings_name(
    workspace: Workspace, tmp_path: Path, user_code: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    name = user_code("import os\n\ndef create():\n    print(*os.environ.items(), sep='\\n')\n    raise OSError\n")
    spec = parse({"name": "printing", "model": {"factory": f"{name}:create"}, "inputs": [_X]}, tmp_path)
    settings = Settings(child_variables=("SOMEBODYS_TOKEN", "ABSENT"))
    runner = StepRunner.of(spec, settings, workspace)
    with pytest.raises(ExportError, match="raised OSError"):
        export(runner, ExportJob.of(spec, find_original(spec, workspace)))
    output = (workspace.folder / "logs" / "printing" / "export.log").read_text()
    assert "('PATH', " in output
    assert mentioned_secrets(output) == ["SOMEBODYS_TOKEN"]


def _leave_trace(path: Path) -> Any:
    import torch

    path.touch()
    return torch.nn.Identity()


def test_a_registered_pickle_is_not_loaded_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow.pytorch
    import torch

    class LeavesTrace(torch.nn.Module):
        def __reduce__(self) -> Any:
            return _leave_trace, (tmp_path / "trace",)

    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    mlflow.pytorch.save_model(
        LeavesTrace(), str(tmp_path / "model"), serialization_format="pickle", pip_requirements=["torch"]
    )
    model = Model(mlflow="models:/net/1")
    source = Source(kind="mlflow-pytorch", model=model, path=tmp_path / "model")
    with pytest.raises(ExportError, match=r"model 'models:/net/1' cannot be loaded \(.*pickle"):
        load_module(source)
    assert not (tmp_path / "trace").exists()
    load_module(source.model_copy(update={"trusts_pickle": True}))
    assert (tmp_path / "trace").exists()


def test_weights_are_read_from_safetensors(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path, user_code: Callable[[str], str], kept_samples: Any
) -> None:
    import torch
    from safetensors.torch import save_file

    name = user_code(_SEEDED)
    save_file({"0.weight": torch.zeros(3, 4), "0.bias": torch.full((3,), 2.0)}, tmp_path / "weights.safetensors")
    model = {"factory": f"{name}:create", "weights": "weights.safetensors"}
    result = export_spec(parse({"name": "read", "model": model, "inputs": [_X]}, tmp_path))
    for _, outputs in kept_samples(result):
        assert next(iter(outputs.values())) == pytest.approx(2.0)


def test_weights_from_a_file_are_repeatable(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path, user_code: Callable[[str], str]
) -> None:
    import torch

    name = user_code(_SEEDED.replace("torch.manual_seed(0)", "pass"))
    torch.save({"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)}, tmp_path / "weights.pt")
    model = {"factory": f"{name}:create", "weights": "weights.pt"}
    assert export_spec(parse({"name": "repeated", "model": model, "inputs": [_X]}, tmp_path)).is_repeatable


def _onnx_spec(folder: Path, nodes: list[Any], shape: list[Any], weights: dict[str, Any], **sections: Any) -> Any:
    save_model(folder / "model.onnx", nodes, [("x", shape)], ["y"], weights)
    return parse({"name": "free", "model": {"onnx": "model.onnx"}, **sections}, folder)


def test_a_norm_that_onnx_runtime_wrote_into_the_standard_domain_is_taken(export_spec: Any, tmp_path: Path) -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=-1, epsilon=1e-5)
    result = export_spec(_onnx_spec(tmp_path, [node], [2, 8], {"g": np.ones(8, "float32")}))
    assert result.outputs[0].shape == (2, 8)


def test_a_model_without_operators_of_onnx_itself_has_the_version_of_its_own(export_spec: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model.onnx", [forests.regressor()], [("x", [2, 3])], [("y", [2, 1])])
    model = onnx.load(path)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid(forests.DOMAIN, 3))
    onnx.save(model, path)
    assert export_spec(parse({"name": "forest", "model": {"onnx": "model.onnx"}}, tmp_path)).opset == 3


def test_an_output_that_shares_only_the_name_of_a_fixed_dimension_has_its_own_size(
    export_spec: Any, tmp_path: Path
) -> None:
    node = helper.make_node("ReduceSum", ["x"], ["y"])
    save_model(tmp_path / "model.onnx", [node], [("x", ["batch", 3])], [("y", ["batch", "batch"])])
    inputs = [{"name": "x", "shape": [2, 3]}]
    result = export_spec(parse({"name": "named", "model": {"onnx": "model.onnx"}, "inputs": inputs}, tmp_path))
    assert result.outputs[0].shape == (1, 1)


def test_sizes_at_which_an_onnx_model_runs_are_found_by_trying(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    # A kernel of 25 frames that are not padded; 48 bands, whatever the file says.
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["frames"]),
        helper.make_node("Add", ["frames", "bands"], ["y"]),
    ]
    weights = {"kernel": np.ones((2, 1, 25, 1), "float32"), "bands": np.ones((2, 1, 48), "float32")}
    result = export_spec(_onnx_spec(tmp_path, nodes, ["batch", 1, "time", "bands"], weights))
    ranges = result.dimensions
    assert (ranges["batch"].min, ranges["batch"].typical_size) == (1, 1)
    assert ranges["time"].min == 25
    assert (ranges["bands"].min, ranges["bands"].typical_size) == (48, 48)
    shapes = [inputs["x"].shape for inputs, _ in kept_samples(result)]
    assert all(shape[2] >= 25 for shape in shapes)
    assert len(set(shapes)) > 1


@pytest.mark.parametrize(("end", "least"), [(2**62, 8), (3, 1)], ids=["some", "none"])
def test_sizes_at_which_an_output_has_no_elements_are_left_out_where_there_are_others(
    end: int, least: int, export_spec: Any, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Slice", ["x", "start", "end", "axis"], ["rest"]),
        helper.make_node("Relu", ["rest"], ["y"]),
    ]
    weights = {"start": np.array([7]), "end": np.array([end]), "axis": np.array([1])}
    result = export_spec(_onnx_spec(tmp_path, nodes, [2, "n"], weights))
    assert result.dimensions["n"].min == least


def test_samples_beside_the_sizes_to_measure_have_sizes_that_the_model_takes(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["small"], kernel_shape=[8], strides=[8]),
        helper.make_node("Resize", ["small", "", "scales"], ["large"], mode="nearest"),
        helper.make_node("Add", ["x", "large"], ["y"]),
    ]
    weights = {"scales": np.array([1, 1, 8], "float32")}
    dimensions = {"t": {"min": 8, "max": 64, "measure": [16]}}
    spec = _onnx_spec(tmp_path, nodes, [1, 2, "t"], weights, dimensions=dimensions)
    shapes = [inputs["x"].shape for inputs, _ in kept_samples(export_spec(spec))]
    assert shapes[0] == (1, 2, 16)
    # The guess is 19, of which no eighth is whole.
    assert shapes[1] == (1, 2, 24)


def test_a_sample_that_the_model_refuses_for_its_numbers_gets_the_smallest_size(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    """About half of a mask are ones: up to the position of 34, some masks of 64 have too many."""
    save_text(
        tmp_path / "model.onnx",
        f"""<ir_version: 9, opset_import: ["" : 18]>
        g (float[batch, length] x, int64[batch, length] mask) => (float[batch, length] y)
        <float[34] table = {{{", ".join(map(str, range(34)))}}}, int64 axis = {{1}}>
        {{ places = CumSum (mask, axis)  taken = Gather (table, places)  y = Add (x, taken) }}""",
    )
    shapes = [
        inputs["mask"].shape
        for inputs, _ in kept_samples(export_spec(parse({"name": "m", "model": {"onnx": "model.onnx"}}, tmp_path)))
    ]
    assert shapes[0] == (1, 64)
    assert (1, 1) in shapes


@pytest.mark.long
def test_samples_beside_the_sizes_to_measure_take_little_memory(
    export_spec: Any, kept_samples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products of four of 64 numbers take 64 MiB, of 128 numbers a GiB, which is a guess."""
    nodes = [
        helper.make_node("Unsqueeze", ["x", "last"], ["column"]),
        helper.make_node("Mul", ["x", "column"], ["table"]),
        helper.make_node("Unsqueeze", ["table", "axes"], ["tables"]),
        helper.make_node("Mul", ["table", "tables"], ["all"]),
        helper.make_node("ReduceMax", ["all"], ["y"], keepdims=0),
    ]
    weights = {"last": np.array([1]), "axes": np.array([2, 3])}
    dimensions = {"n": {"min": 64, "max": 128, "measure": [64]}}
    spec = _onnx_spec(tmp_path, nodes, ["n"], weights, dimensions=dimensions)
    assert max(inputs["x"].size for inputs, _ in kept_samples(export_spec(spec))) == 128
    monkeypatch.setattr("tvmflow.hardware.memory.LIGHT_BYTES", 1 << 20)
    again = spec.model_copy(update={"validation": spec.validation.model_copy(update={"seed": 1})})
    assert max(inputs["x"].size for inputs, _ in kept_samples(export_spec(again))) < 128


@pytest.mark.parametrize(("columns", "batch"), [(20_000, 1), (20, 64)], ids=str)
def test_a_bundle_holds_the_first_sample_that_is_small_beside_the_model(
    columns: int, batch: int, export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    dimensions = {"n": {"measure": [64]}}
    spec = _onnx_spec(tmp_path, nodes, ["n", 4], {"w": np.ones((4, columns), "float32")}, dimensions=dimensions)
    result = export_spec(spec)
    sizes = [inputs["x"].shape[0] for inputs, _ in kept_samples(result)]
    assert sizes[0] == 64
    assert sizes[result.golden] == batch


def test_a_model_that_runs_at_no_size_is_refused_with_the_first_reason(export_spec: Any, tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "target"], ["y"])
    spec = _onnx_spec(tmp_path, [node], ["n"], {"target": np.array([7, 11, 13], "int64")})
    with pytest.raises(ExportError, match="dimensions"):
        export_spec(spec)


def _save_lookup(folder: Path, scale: float) -> None:
    """Write a model that takes rows of a table by its input times `scale`, which ONNX Runtime refuses beyond 4."""
    save_text(
        folder / "model.onnx",
        f"""<ir_version: 9, opset_import: ["" : 18]> g (float[50] x) => (float[50] y)
        <float[4] table = {{1, 2, 3, 4}}, float scale = {{{scale}}}>
        {{ scaled = Mul (x, scale)  places = Cast <to = 7> (scaled)  y = Gather (table, places) }}""",
    )


def test_a_model_that_takes_no_normal_numbers_gets_samples_from_zero_to_one(export_spec: Any, tmp_path: Path) -> None:
    _save_lookup(tmp_path, 3.5)
    result = export_spec(parse({"name": "lookup", "model": {"onnx": "model.onnx"}}, tmp_path))
    assert result.outputs[0].shape == (50,)


def test_samples_of_tokens_are_those_of_the_whole_vocabulary(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    inputs = [(name, [4, 16], TensorProto.INT64) for name in ("tokens", "mask")]
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["rows", "kept"], ["y"]),
    ]
    save_model(tmp_path / "model.onnx", nodes, inputs, ["y"], {"table": np.arange(1000, dtype="float32")})
    result = export_spec(parse({"name": "tokens", "model": {"onnx": "model.onnx"}}, tmp_path))
    tokens, masks = (
        np.concatenate([inputs[name] for inputs, _ in kept_samples(result)]) for name in ("tokens", "mask")
    )
    assert tokens.max() > 500
    assert tokens.max() < 1000
    assert set(masks.ravel()) == {0, 1}


def test_a_vector_of_integers_as_long_as_the_batch_has_lengths_of_the_items(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    # The sum of 10 frames, of which those from `lengths` - 1 on are left out.
    inputs = [("frames", ["batch", 10]), ("lengths", ["batch"], TensorProto.INT64)]
    nodes = [
        helper.make_node("Sub", ["lengths", "one"], ["ends"]),
        helper.make_node("Unsqueeze", ["ends", "last"], ["column"]),
        helper.make_node("Less", ["places", "column"], ["is_kept"]),
        helper.make_node("Where", ["is_kept", "frames", "nothing"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "last"], ["y"], keepdims=0),
    ]
    weights = {"one": np.array(1), "last": np.array([-1]), "places": np.arange(10), "nothing": np.float32(0)}
    save_model(tmp_path / "model.onnx", nodes, inputs, ["y"], weights)
    pairs = kept_samples(export_spec(parse({"name": "lengths", "model": {"onnx": "model.onnx"}}, tmp_path)))
    assert max(inputs["lengths"].max() for inputs, _ in pairs) > 2
    assert len({float(number) for _, outputs in pairs for number in outputs["y"]}) > 1


def test_a_model_that_takes_no_samples_is_refused_with_what_to_do(export_spec: Any, tmp_path: Path) -> None:
    _save_lookup(tmp_path, 35.0)
    with pytest.raises(ExportError, match="give samples that it takes under `inputs` of a release file"):
        export_spec(parse({"name": "lookup", "model": {"onnx": "model.onnx"}}, tmp_path))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_integers_without_a_sign_are_taken(export_spec: Any, tmp_path: Path, dtype: str) -> None:
    text = f'<ir_version: 9, opset_import: ["" : 18]> g ({dtype}[n] x) => (float[n] y) {{ y = Cast <to = 1> (x) }}'
    save_text(tmp_path / "model.onnx", text)
    assert export_spec(parse({"name": "whole", "model": {"onnx": "model.onnx"}}, tmp_path)).inputs[0].dtype == dtype


def test_integers_that_a_model_divides_by_are_not_zero(export_spec: Any, kept_samples: Any, tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (int64[8] x, int64[8] z) => (int64[8] y, int64[8] r) { y = Div (x, z)  r = Mod (x, z) }"""
    save_text(tmp_path / "model.onnx", text)
    pairs = kept_samples(export_spec(parse({"name": "quotients", "model": {"onnx": "model.onnx"}}, tmp_path)))
    assert all(inputs["z"].min() > 0 for inputs, _ in pairs)


def test_samples_of_categories_are_those_that_the_encoder_of_each_column_knows(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    """An encoder without zeros stops at others, as scikit-learn's does by default."""
    text = """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml": 2]> g (float[n, 3] x) => (float[n, 5] y)
    <int64[1] first = {0}, int64[1] last = {2}> {
      a = Gather <axis = 1> (x, first)
      b = ai.onnx.ml.ArrayFeatureExtractor (x, last)
      c = Cast <to = 7> (b)
      d = ai.onnx.ml.OneHotEncoder <cats_int64s = [3, 5], zeros = 0> (a)
      e = ai.onnx.ml.OneHotEncoder <cats_int64s = [1, 2, 9], zeros = 0> (c)
      f = Flatten (d)
      g = Flatten (e)
      y = Concat <axis = 1> (f, g)
    }"""
    save_text(tmp_path / "model.onnx", text)
    pairs = kept_samples(export_spec(parse({"name": "categories", "model": {"onnx": "model.onnx"}}, tmp_path)))
    first, middle, last = np.concatenate([inputs["x"] for inputs, _ in pairs]).T
    assert set(first) == {3, 5}
    assert set(last) == {1, 2, 9}
    assert len(set(middle)) == len(middle)


def test_shapes_that_the_operators_do_not_give_are_left_out(export_spec: Any, tmp_path: Path) -> None:
    """ONNX Runtime takes such files, as editors leave them that change a node and not the recorded shapes."""
    text = """<ir_version: 9, opset_import: ["" : 18]> g (float[n, 3] x) => (float[7] y)
    <float[2] a> { a = Neg (x)  y = Abs (a) }"""
    save_text(tmp_path / "model.onnx", text)
    result = export_spec(parse({"name": "stale", "model": {"onnx": "model.onnx"}}, tmp_path))
    assert result.outputs[0].shape == ("n", 3)


def test_an_export_says_which_strings_are_numbers_in_a_bundle(
    export_spec: Any, kept_samples: Any, tmp_path: Path
) -> None:
    text = """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml": 2]> g (string[n] x) => (string[n] y) {
      y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_strings = ["u", "v"]> (x)
    }"""
    save_text(tmp_path / "model.onnx", text)
    result = export_spec(parse({"name": "labels", "model": {"onnx": "model.onnx"}}, tmp_path))
    assert result.labels == {"x": ("a", "b"), "y": ("u", "v")}
    assert result.notes() == [
        "input 'x' of the model holds strings; a bundle takes their places, from 0 on, in a, b, and -1 for any other",
        "output 'y' of the model holds strings; in a bundle it holds their places, from 0 on, in u, v",
    ]
    for inputs, outputs in kept_samples(result):
        assert set(inputs["x"]) <= {0, 1}
        np.testing.assert_array_equal(inputs["x"], outputs["y"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(string[n] x) => (string[n] y) { y = Identity (x) }", "input 'x' of the ONNX model holds strings"),
        ("(float[n] x) => (string[n] y) { y = Cast <to = 8> (x) }", "output 'y' .* holds strings that it computes"),
        ("(uint4[n] x) => (float[n] y) { y = Cast <to = 1> (x) }", "let the model take one of these and cast it"),
        ("(float[4, 2] x) => (seq(float[1, 2]) y) { y = SplitToSequence (x) }", "output 'y' .* is no tensor but a seq"),
    ],
)
def test_inputs_and_outputs_that_no_bundle_has_are_refused(
    export_spec: Any, tmp_path: Path, text: str, reason: str
) -> None:
    save_text(tmp_path / "model.onnx", f'<ir_version: 9, opset_import: ["" : 18]> g {text}')
    with pytest.raises(ExportError, match=reason):
        export_spec(parse({"name": "odd", "model": {"onnx": "model.onnx"}}, tmp_path))


def test_an_output_declared_without_dimensions_gets_those_that_it_has(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path
) -> None:
    node = helper.make_node("Sigmoid", ["x"], ["y"])
    save_model(tmp_path / "model.onnx", [node], [("x", ["n", 3])], [("y", [])])
    result = export_spec(parse({"name": "flat", "model": {"onnx": "model.onnx"}}, tmp_path))
    assert result.outputs[0].shape == ("n", 3)
