"""The release file: every rule, the message when one is broken, and the template."""

import copy
import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from tvmflow.errors import SpecError
from tvmflow.spec import Dimension, Gates, Model, Spec, amend, load, parse, template, to_document

Document = dict[str, Any]
Change = Callable[..., Document]

GOOD: Document = {
    "name": "digits",
    "model": {"factory": "model:create"},
    "inputs": [{"name": "input", "shape": ["batch", 3, 8, 8]}],
    "dimensions": {"batch": {"min": 1, "max": 8}},
    "targets": ["native"],
}


@pytest.fixture
def change() -> Change:
    """A good document with the value at a dotted path replaced; numbers are places in a list, None removes."""

    def changed(path: str, value: object) -> Document:
        document = copy.deepcopy(GOOD)
        part: Any = document
        *before, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in before:
            part = part[key] if isinstance(key, int) else part.setdefault(key, {})
        if value is None:
            del part[last]
        else:
            part[last] = value
        return document

    return changed


def refusal(document: object, folder: Path) -> str:
    with pytest.raises(SpecError) as caught:
        parse(document, folder, "release.yaml")
    message = str(caught.value)
    assert message.startswith("release.yaml")
    assert "\n" not in message
    return message


def test_a_good_document_is_accepted_with_its_defaults(tmp_path: Path) -> None:
    spec = parse(GOOD, tmp_path)
    assert spec.inputs[0].shape == ("batch", 3, 8, 8)
    assert spec.inputs[0].dtype == "float32"
    assert spec.inputs[0].samples.kind == "normal"
    assert spec.dimension("batch") == Dimension(min=1, max=8)
    assert spec.dimension("other") == Dimension(min=1, max=None)
    assert spec.validation.top1_agreement == 1.0
    assert [target.name for target in spec.resolve_targets()] == ["native"]


UNKNOWN = [
    ("nmae", "nmae", "name"),
    ("validation", "validation", "validate"),
    ("model.factry", "model.factry", "factory"),
    ("inputs.0.dtpe", "inputs.0.dtpe", "dtype"),
    ("inputs.0.samples.lo", "inputs.0.samples.lo", "low"),
    ("dimensions.batch.mn", "dimensions.batch.mn", "min"),
    ("tune.trial", "tune.trial", "trials"),
    ("validate.task.datset", "validate.task.datset", "dataset"),
    ("build.optlevel", "build.optlevel", "opt_level"),
    ("gates.max_latency", "gates.max_latency", "max_latency_ms"),
    ("benchmark.repeat", "benchmark.repeat", "repeats"),
    ("registry.experimet", "registry.experimet", "experiment"),
    ("store.buket", "store.buket", "bucket"),
    ("export.opst", "export.opst", "opset"),
    ("channels.staging.automatc", "channels.staging.automatc", "automatic"),
    ("channels.gates.aprovals", "channels.gates.aprovals", "approval"),
    ("channels.staging.gates.max_ratio_cur", "channels.staging.gates.max_ratio_cur", "max_ratio_current"),
    ("retrain.min_gains", "retrain.min_gains", "min_gain"),
    ("train.functon", "train.functon", "function"),
]


@pytest.mark.parametrize(("path", "where", "suggestion"), UNKNOWN)
def test_an_unknown_key_names_the_likely_one(
    change: Change, tmp_path: Path, path: str, where: str, suggestion: str
) -> None:
    message = refusal(change(path, 1), tmp_path)
    assert [repr(name) for name in (where, suggestion) if repr(name) not in message] == []


def test_an_unknown_key_like_no_other_lists_the_known_ones(change: Change, tmp_path: Path) -> None:
    message = refusal(change("gates.xyzzy", 1), tmp_path)
    assert [name for name in Gates.model_fields if name not in message] == []


RULES: list[tuple[str, object, str, list[str]]] = [
    ("name", None, "name", []),
    ("name", "two words", "name", ["'two words'"]),
    ("name", "digits\n", "name", [r"'digits\n'"]),
    ("name", 3, "name", ["string"]),
    ("model", None, "model", []),
    ("model", {}, "model", ["factory", "pt2", "onnx", "mlflow"]),
    ("model.onnx", "m.onnx", "model", ["factory and onnx"]),
    ("model.factory", "create", "model", ["'create'"]),
    ("model.factory", "model:create()", "model", ["'model:create()'"]),
    ("model", {"onnx": "m.onnx", "weights": "w.pt"}, "model", ["weights", "factory"]),
    ("model", {"pt2": "m.pt2", "arguments": {"a": 1}}, "model", ["arguments", "factory"]),
    ("model", {"mlflow": "digits@production"}, "model", ["'digits@production'", "models:/"]),
    ("inputs", None, "inputs", ["name", "shape", "dtype"]),
    ("inputs", {"name": "x"}, "inputs", ["list"]),
    ("inputs", [{"name": "x", "shape": [1]}] * 2, "inputs", ["'x'"]),
    ("inputs.0.name", None, "inputs.0.name", []),
    ("inputs.0.shape", None, "inputs.0.shape", []),
    ("inputs.0.shape", "batch", "inputs.0.shape", ["list"]),
    ("inputs.0.shape", ["batch", 0], "inputs.0.shape", ["dimension 0"]),
    ("inputs.0.shape", ["batch", -1], "inputs.0.shape", ["dimension -1"]),
    ("inputs.0.shape", ["batch size"], "inputs.0.shape", ["dimension 'batch size'"]),
    ("inputs.0.shape", ["batch", 1.5], "inputs.0.shape.1.int", ["integer"]),
    ("inputs.0.dtype", "float", "inputs.0.dtype", ["'float32'", "'float64'"]),
    ("inputs.0.dtype", "int64", "inputs.0", ["'input'", "int64", "samples"]),
    ("inputs.0.samples", {"kind": "gaussian"}, "inputs.0.samples.kind", ["'ones'", "'uniform'"]),
    ("inputs.0.samples", {"kind": "npz"}, "inputs.0.samples", ["npz", "file"]),
    ("inputs.0.samples", {"kind": "function"}, "inputs.0.samples", ["need function"]),
    ("inputs.0.samples", {"kind": "function", "function": "f"}, "inputs.0.samples", ["'f'"]),
    ("inputs.0.samples", {"kind": "integers", "low": 0}, "inputs.0.samples", ["integers", "low", "high"]),
    ("inputs.0.samples", {"kind": "integers", "low": 3, "high": 3}, "inputs.0.samples", ["low (3)", "high (3)"]),
    ("inputs.0.samples", {"kind": "integers", "low": 0.2, "high": 0.7}, "inputs.0.samples", ["(0.2)", "(0.7)"]),
    ("inputs.0.samples", {"kind": "uniform", "low": 2, "high": 1}, "inputs.0.samples", ["low (2)", "high (1)"]),
    ("inputs.0.samples", {"kind": "uniform", "low": 2}, "inputs.0.samples", ["low (2)", "high (1)"]),
    ("inputs.0.samples", {"kind": "uniform", "high": -1}, "inputs.0.samples", ["low (0)", "high (-1)"]),
    ("inputs.0.samples", {"kind": "normal", "std": 0}, "inputs.0.samples.std", ["0"]),
    ("dimensions", [], "dimensions", ["mapping"]),
    ("dimensions.batches", {}, "dimension 'batches'", ["'batch'?"]),
    ("dimensions.batch.min", 0, "dimensions.batch.min", ["1"]),
    ("dimensions.batch.min", 9, "dimensions.batch", ["8", "9"]),
    ("dimensions.batch.tune", 9, "dimensions.batch", ["9", "1 to 8"]),
    ("dimensions.batch.measure", [1, 9], "dimensions.batch", ["9", "1 to 8"]),
    ("outputs", ["a", "a"], "outputs", ["'a'"]),
    ("export.opset", 17, "export.opset", ["18"]),
    ("targets", [], "targets", []),
    ("targets", "native", "targets", ["list"]),
    ("targets", ["nativ"], "targets", ["'nativ'", "'native'?"]),
    ("targets", [{"kind": "metal"}], "targets", ["'metal'", "'llvm'", "'cuda'"]),
    ("build.exec_mode", "jit", "build.exec_mode", ["'bytecode'", "'compiled'"]),
    ("build.fast_algorithms", "never", "build.fast_algorithms", ["'allow'", "'forbid'"]),
    ("build.weights", "outside", "build.weights", ["'inside'", "'apart'"]),
    ("build.opt_level", 5, "build.opt_level", ["4"]),
    ("tune", {"trials": 1, "minutes": 1}, "tune", ["trials", "minutes"]),
    ("tune.until", "200%", "tune.until", ["1"]),
    ("tune.until", "much", "tune.until", ["number"]),
    ("tune.early_stopping", 0, "tune.early_stopping", ["1"]),
    ("tune.trials", -1, "tune.trials", ["0"]),
    ("tune.tuner", "annealing", "tune.tuner", ["'xgb'", "'ga'", "'random'", "'grid'"]),
    ("validate.samples", 0, "validate.samples", ["1"]),
    ("validate.top1_agreement", 1.5, "validate.top1_agreement", ["1"]),
    ("validate.task", {"dataset": "data"}, "validate.task.dataset", ["'data'"]),
    ("validate.task", {"dataset": "a:b", "metric": "f1"}, "validate.task.metric", ["'f1'"]),
    ("benchmark.peers", ["tensorrt"], "benchmark.peers.0", ["'onnxruntime'", "'pytorch'"]),
    ("gates.max_latency_ms", 0, "gates.max_latency_ms", ["0"]),
    ("gates.unverified_targets", "skip", "gates.unverified_targets", ["'refuse'", "'allow'"]),
    ("train", {"function": "train"}, "train.function", ["'train'"]),
    ("train", {"function": "a:b", "arguments": {"db_password": "x1"}}, "train.arguments", ["'db_password'", "child_"]),
    ("train", {"function": "a:b", "arguments": {"hub": {"hf_token": 1}}}, "train.arguments", ["'hf_token'"]),
    ("model.arguments", {"API_KEY": "x1"}, "model.arguments", ["'API_KEY'"]),
    ("channels", {"two words": {}}, "channel 'two words'", []),
    ("channels", {"latest": {}}, "channel 'latest'", ["MLflow"]),
    ("channels", {"Latest": {}}, "channel 'Latest'", ["MLflow"]),
    ("channels", {"rel.1": {}}, "channel 'rel.1'", ["dashes"]),
    ("channels", {"production-wanted": {}}, "channel 'production-wanted'", ["asks for a release"]),
    ("channels.a.gates", {"min_metric": float("nan")}, "channels.a.gates.min_metric", ["finite"]),
    ("name", "n" * 129, "name", ["128"]),
    ("inputs.0.samples", {"kind": "categories"}, "inputs.0.samples", ["need categories"]),
    ("channels", {"v2": {}}, "channel 'v2'", ["MLflow"]),
    ("channels", {"a": {"after": "b"}}, "channels.a.after", ["'b'"]),
    ("channels", {"a": {"after": "a"}}, "channels.a.after", ["'a'"]),
    ("channels", {"a": {"after": "b"}, "b": {"after": "a"}}, "channels.a.after", ["'a'"]),
    ("channels.a.approval", "maybe", "channels.a.approval", ["'none'", "'required'"]),
    ("channels.a.gates", {"max_ratio_current": 0}, "channels.a.gates.max_ratio_current", ["0"]),
    ("retrain", {}, "retrain", ["train,", "validate.task"]),
]


@pytest.mark.parametrize(("path", "value", "place", "names"), RULES)
def test_a_refusal_says_where_the_rule_is_broken_and_names_the_values(
    change: Change, tmp_path: Path, path: str, value: object, place: str, names: list[str]
) -> None:
    message = refusal(change(path, value), tmp_path)
    assert message.startswith((f"release.yaml: {place}: ", f"release.yaml: {place} "))
    assert [name for name in names if name not in message] == []


def test_more_problems_than_one_are_counted(tmp_path: Path) -> None:
    assert "1 more" in refusal({**GOOD, "name": 3, "build": {"opt_level": 9}}, tmp_path)
    assert "more" not in refusal({**GOOD, "name": 3}, tmp_path)


@pytest.mark.parametrize("model", [{"onnx": "m.onnx"}, {"factory": "a:b", "weights": "w.pt"}])
def test_training_goes_with_a_factory_without_weights(tmp_path: Path, model: Document) -> None:
    document = {**GOOD, "model": model, "train": {"function": "train:train"}}
    message = refusal(document, tmp_path)
    assert [name for name in ("train", "factory") if name not in message] == []
    assert parse({**document, "model": GOOD["model"]}, tmp_path).train


def test_an_onnx_model_needs_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    assert parse({"name": "m", "model": {"onnx": "m.onnx"}}, tmp_path).inputs == ()


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_that_is_no_mapping_is_refused(tmp_path: Path, document: object) -> None:
    message = refusal(document, tmp_path)
    assert [word for word in ("name", "model", "inputs", "`tvmflow init`") if word not in message] == []


MISSING: list[tuple[str, Document]] = [
    ("model.onnx", {"model": {"onnx": "absent.bin"}}),
    ("model.pt2", {"model": {"pt2": "absent.bin"}}),
    ("model.weights", {"model": {"factory": "a:b", "weights": "absent.bin"}}),
    ("train.reads", {"train": {"function": "a:b", "reads": ["absent.bin"]}}),
    (
        "inputs.x.samples.file",
        {
            "inputs": [{"name": "x", "shape": [1], "samples": {"kind": "npz", "file": "absent.bin"}}],
            "dimensions": {},
        },
    ),
]


def test_an_amended_specification_is_validated_like_the_file(tmp_path: Path) -> None:
    document = {**GOOD, "tune": {"minutes": 3}, "model": {"factory": "model:create", "arguments": {"day": date.min}}}
    spec = parse(document, tmp_path)
    changes = {"targets": ["x86-64-v3"], "tune.minutes": None, "tune.trials": 7, "benchmark.repeats": 2}
    amended = amend(spec, changes)
    assert [target.name for target in amended.resolve_targets()] == ["x86-64-v3"]
    assert (amended.tune.trials, amended.tune.minutes, amended.benchmark.repeats) == (7, None, 2)
    assert amended.folder == tmp_path
    assert amended.model == spec.model
    assert spec.tune.trials is None
    assert amend(spec, {}) == spec
    for wrong, where in (
        ({"tune.trials": 7}, "minutes"),
        ({"tune.trails": 7}, "'tune.trails'"),
        ({"targets": ["nativ"]}, "'nativ'"),
        ({"model": {"onnx": "absent.onnx"}}, "absent.onnx"),
    ):
        with pytest.raises(SpecError, match=where) as caught:
            amend(spec, wrong, "the options")
        assert str(caught.value).startswith("the options: ")


def test_an_amended_specification_keeps_the_defaults_that_depend_on_other_keys(tmp_path: Path) -> None:
    reduced = parse({**GOOD, "targets": ["x86-64-v4-bf16"], "build": {"precision": "bf16"}}, tmp_path)
    assert amend(reduced, {"tune.trials": 0}).bounds() == reduced.bounds() != reduced.validation
    assert amend(reduced, {"build.precision": "fp32"}).bounds() == reduced.validation


def test_a_document_of_a_specification_is_read_back_and_says_no_more_than_the_file(tmp_path: Path) -> None:
    spec = parse(GOOD, tmp_path)
    document = json.loads(json.dumps(to_document(spec)))
    assert document == GOOD
    assert parse(document, tmp_path) == spec


def test_a_section_keeps_its_name_of_the_file_when_a_specification_is_amended_or_written(tmp_path: Path) -> None:
    document = {**GOOD, "validate": {"samples": 2, "rtol": 0.01}}
    spec = parse(document, tmp_path)
    assert to_document(spec) == document
    amended = amend(spec, {"validate.samples": 3})
    assert (amended.validation.samples, amended.validation.rtol) == (3, 0.01)


def test_a_model_is_called_by_its_source() -> None:
    for key, value in (("factory", "m:f"), ("mlflow", "models:/m/1"), ("pt2", "m.pt2"), ("onnx", "m.onnx")):
        assert Model.model_validate({key: value}).label == value


@pytest.mark.parametrize(("key", "part"), MISSING)
def test_a_missing_file_is_named(tmp_path: Path, key: str, part: Document) -> None:
    message = refusal({**GOOD, **part}, tmp_path)
    assert message.startswith(f"release.yaml: {key}: ")
    assert f"'{tmp_path / 'absent.bin'}'" in message


def test_a_folder_is_no_model_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    assert f"'{tmp_path / 'm.onnx'}'" in refusal({**GOOD, "model": {"onnx": "m.onnx"}}, tmp_path)


def test_the_same_target_twice_is_built_once(tmp_path: Path) -> None:
    spec = parse({**GOOD, "targets": ["x86-64-v3", "x86-64-v2", "x86-64-v3"]}, tmp_path)
    assert [target.name for target in spec.resolve_targets()] == ["x86-64-v3", "x86-64-v2"]


def test_relative_paths_are_looked_up_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "m.onnx").touch()
    (tmp_path / "deep" / "release.yaml").write_text("name: m\nmodel: {onnx: m.onnx}\n")
    monkeypatch.chdir(tmp_path)
    spec = load(Path("deep/release.yaml"))
    assert spec.folder == tmp_path / "deep"
    assert spec.path(Path("m.onnx")) == tmp_path / "deep" / "m.onnx"
    assert spec.path(Path("/elsewhere")) == Path("/elsewhere")


BROKEN = [
    ("name: [", "line 1"),
    ("name: m\nmodel: a: b\n", "line 2"),
    ("name: m\n\tmodel: x", "line 2"),
    ("name: m\nmodel: {}\nname: n\n", "line 3: 'name'"),
    ("tune:\n  trials: 1\n  trials: 2\n", "line 3: 'trials'"),
    ("name: 2024-13-45", "line 1: '2024-13-45' is no timestamp"),
    ("name: m\nmodel: !!bool foo", "line 2: 'foo' is no bool"),
    ("name: !!timestamp foo", "line 1: 'foo' is no timestamp"),
    ("name: {{ name }}\nmodel: {onnx: m.onnx}", "line 1: a key is a list or a mapping"),
    ("? [a, b]\n: 1", "line 1: a key is a list or a mapping"),
    (r'name: "\UFFFFFFFF"', "YAML"),
    ("name: !!python/object/apply:os.getcwd []", "os.getcwd"),
    ("\0", "YAML"),
    ("[" * 1000, "YAML"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_yaml_is_one_sentence_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "release.yaml").write_text(text)
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        load(tmp_path / "release.yaml")
    assert "\n" not in str(caught.value)


def test_merged_yaml_may_override_a_key(tmp_path: Path) -> None:
    text = "name: m\nmodel: {factory: 'a:b', arguments: {base: &base {x: 1, y: 1}, other: {<<: *base, x: 2}}}\n"
    (tmp_path / "release.yaml").write_text(text + "inputs: [{name: x, shape: [1]}]\n")
    assert load(tmp_path / "release.yaml").model.arguments["other"] == {"x": 2, "y": 1}


def test_merged_yaml_may_be_merged_again(tmp_path: Path) -> None:
    base = "{base: &base {x: 1, y: 1}, other: &other {<<: *base, x: 2}}"
    text = f"name: m\nmodel: {{factory: 'a:b', arguments: {base}}}\ninputs: [{{name: x, shape: [1]}}]\n"
    (tmp_path / "release.yaml").write_text(text + "registry: {tags: {<<: *other, x: a, y: b}}\n")
    spec = load(tmp_path / "release.yaml")
    assert spec.model.arguments["other"] == {"x": 2, "y": 1}
    assert spec.registry.tags == {"x": "a", "y": "b"}


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "release.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        load(tmp_path / "release.yaml")


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="`tvmflow init`") as caught:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_the_template_is_a_release_file(tmp_path: Path) -> None:
    spec = parse(yaml.safe_load(template("digits")), tmp_path)
    assert spec.name == "digits"
    assert spec.model.factory == "model:create"


@pytest.mark.parametrize("name", ["1.0", "2024-01-01", "2024-13-45", "on", "null", "12"])
def test_a_name_that_yaml_would_read_otherwise_is_quoted(tmp_path: Path, name: str) -> None:
    assert parse(yaml.safe_load(template(name)), tmp_path).name == name


@pytest.mark.parametrize("name", ["two words", "a: b", "", "-x", "a\n"])
def test_a_template_is_not_made_for_a_name_that_would_be_refused(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        template(name)
    assert repr(name) in str(caught.value)


_COMMENTED = re.compile(r"^(?P<indent> *)# (?P<line> *[a-z0-9_]+:.*)$")


def uncommented(text: str, is_included: Callable[[str], bool]) -> str:
    """Uncomment the lines of the sections of a template for which `is_included` holds."""
    lines, section = [], ""
    for line in text.splitlines():
        match = _COMMENTED.match(line)
        content = match["indent"] + match["line"] if match else line
        if content and not content.startswith((" ", "#")):
            section = content.partition(":")[0]
        lines.append(content if match and is_included(section) else line)
    return "\n".join(lines)


SECTIONS = [
    "train", "outputs", "export", "build", "tune", "validate", "benchmark", "gates", "channels", "registry", "store",
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with every file that the template names."""
    for name in ("weights.pt", "model.pt2", "model.onnx", "data.csv"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("section", SECTIONS)
def test_every_commented_section_of_the_template_can_be_taken_in(files: Path, section: str) -> None:
    text = uncommented(template("digits"), lambda name: name == section)
    document = yaml.safe_load(text)
    assert section in document
    assert text != template("digits")
    parse(document, files)


def test_all_commented_sections_of_the_template_can_be_taken_in_together(files: Path) -> None:
    sections = {*SECTIONS, "retrain"}
    document = yaml.safe_load(uncommented(template("digits"), lambda name: name in sections))
    assert set(document) >= sections
    parse(document, files)


def test_tuning_ends_at_a_part_that_is_written_in_per_cent_or_as_a_number(files: Path) -> None:
    document = yaml.safe_load(template("m"))
    budgets = [parse({**document, "tune": {"until": until}}, files).tune for until in ("2%", " 2 % ", 0.02)]
    assert [tune.until for tune in budgets] == [0.02] * 3
    assert all(tune.has_budget for tune in budgets)
    assert not parse({**document, "tune": {"until": "2%", "trials": 0}}, files).tune.has_budget


def test_commented_out_sections_show_the_defaults(files: Path) -> None:
    sections = ("export", "build", "tune", "validate", "benchmark", "outputs", "store", "registry")
    spec = parse(yaml.safe_load(uncommented(template("m"), lambda name: name in sections)), files)
    defaults = parse(yaml.safe_load(template("m")), files)
    assert spec.export == defaults.export
    assert spec.build == defaults.build
    assert spec.tune == defaults.tune
    assert spec.validation.model_copy(update={"task": None}) == defaults.validation
    assert spec.benchmark.model_copy(update={"threads": None}) == defaults.benchmark


def test_retraining_can_be_taken_in_with_what_it_needs(files: Path) -> None:
    sections = ("train", "validate", "retrain")
    spec = parse(yaml.safe_load(uncommented(template("m"), lambda name: name in sections)), files)
    assert spec.retrain is not None
    assert (spec.retrain.channel, spec.retrain.source) == ("production", "m-source")


def test_a_channel_of_retraining_must_be_among_the_channels(files: Path) -> None:
    document = yaml.safe_load(uncommented(template("m"), lambda name: name in ("train", "validate", "retrain")))
    message = refusal({**document, "channels": {"a": {}}}, files)
    assert [name for name in ("retrain.channel", "'production'") if name not in message] == []


def test_automatic_channels_come_in_the_files_order_after_those_they_follow(tmp_path: Path) -> None:
    channels = {
        "production": {"automatic": True, "after": "canary"},
        "beta": {"automatic": True},
        "canary": {"after": "staging"},
        "staging": {"automatic": True},
    }
    spec = parse({**GOOD, "channels": channels}, tmp_path)
    assert spec.automatic_channels() == ("beta", "staging", "production")


@pytest.mark.parametrize("key", ["arguments", "weights"])
def test_what_goes_with_a_factory_can_be_taken_in(files: Path, key: str) -> None:
    text = re.sub(rf"^  # ({key}:)", r"  \1", template("m"), flags=re.MULTILINE)
    assert getattr(parse(yaml.safe_load(text), files).model, key)


@pytest.mark.parametrize("key", ["pt2", "onnx", "mlflow"])
def test_each_other_source_can_take_the_factorys_place(files: Path, key: str) -> None:
    text = re.sub(r"^  factory:.*\n", "", template("m"), flags=re.MULTILINE)
    text = re.sub(rf"^  # ({key}:)", r"  \1", text, flags=re.MULTILINE)
    assert getattr(parse(yaml.safe_load(text), files).model, key)


def test_the_template_shows_every_key() -> None:
    words = set(re.findall(r"\w+", template("m")))
    models = [Spec]
    missing = set()
    while models:
        model = models.pop()
        for name, field in model.model_fields.items():
            if (field.alias or name) not in words:
                missing.add(f"{model.__name__}.{name}")
            models += [item for item in _models(field.annotation) if item not in models]
    assert not missing


def _models(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [item for part in getattr(annotation, "__args__", ()) for item in _models(part)]


@pytest.mark.parametrize(
    ("model", "extra", "name"),
    [
        ({"factory": "a:b"}, {"benchmark": {"peers": ["pytorch"]}}, "benchmark.peers"),
        ({"onnx": "m.onnx"}, {}, "ONNX"),
    ],
)
@pytest.mark.parametrize("channel", [None, "production"])
def test_a_ratio_gate_without_its_peer_is_refused(
    model: dict[str, str], extra: dict[str, object], name: str, channel: str | None, tmp_path: Path
) -> None:
    gate = "max_ratio_onnxruntime" if "factory" in model else "max_ratio_pytorch"
    gates: Document = {"gates": {gate: 1.0}}
    sections = gates if channel is None else {"channels": {channel: gates}}
    document = {"name": "x", "model": model, "inputs": [{"name": "a", "shape": [1]}], **sections, **extra}
    with pytest.raises(SpecError, match=name) as caught:
        parse(document, tmp_path)
    assert ("gates" if channel is None else f"channels.{channel}.gates") + f".{gate}" in str(caught.value)


def test_a_ratio_is_measured_until_all_of_its_gates_are_decided(tmp_path: Path) -> None:
    channels = {"a": {"gates": {"max_ratio_onnxruntime": 0.9}}, "b": {"gates": {"max_ratio_onnxruntime": 1.5}}, "c": {}}
    spec = parse({**GOOD, "gates": {"max_ratio_onnxruntime": 1.5}, "channels": channels}, tmp_path)
    assert spec.ratio_bounds("onnxruntime") == (0.9, 1.5)
    assert spec.ratio_bounds("pytorch") == ()


DEFAULTS: Document = {
    "export": {"opset": 18, "optimize": True, "options": {}, "rtol": 1e-3, "atol": None},
    "targets": ["native"],
    "outputs": [],
    "train": None,
    "retrain": None,
    "channels": {},
    "build": {
        "opt_level": 3,
        "required_passes": [],
        "disabled_passes": [],
        "config": {},
        "exec_mode": "bytecode",
        "weights": "inside",
        "precision": "fp32",
        "threads": None,
        "fast_algorithms": "allow",
    },
    "tune": {"trials": None, "minutes": None, "until": None, "early_stopping": 256, "tuner": "xgb", "seed": 0},
    "validate": {
        "samples": 4,
        "seed": 0,
        "rtol": 1e-3,
        "atol": None,
        "max_relative_error": None,
        "top1_agreement": 1.0,
        "task": None,
        "show": None,
    },
    "benchmark": {
        "repeats": 50,
        "rounds": 3,
        "warmup": 10,
        "threads": None,
        "peers": ["onnxruntime", "pytorch"],
        "callers": [],
    },
    "gates": {
        "max_latency_ms": None,
        "max_ratio_onnxruntime": None,
        "max_ratio_pytorch": None,
        "max_bundle_mb": None,
        "unverified_targets": "refuse",
    },
    "registry": {"experiment": None, "model": None, "tags": {}},
    "store": {"endpoint": None, "bucket": None, "prefix": None},
}


def test_what_a_release_file_does_not_say_is_as_documented(tmp_path: Path) -> None:
    document = parse({**GOOD, "dimensions": {"batch": {}}}, tmp_path).model_dump(mode="json", by_alias=True)
    assert {key: document[key] for key in DEFAULTS} == DEFAULTS
    assert document["dimensions"] == {"batch": {"min": 1, "max": None, "tune": None, "measure": []}}
    (tensor,) = document["inputs"]
    assert tensor["dtype"] == "float32"
    assert tensor["samples"] == {
        "kind": "normal",
        "low": None,
        "high": None,
        "mean": 0.0,
        "std": 1.0,
        "categories": None,
        "file": None,
        "key": None,
        "function": None,
    }
    sections = {
        "train": {"function": "train:train"},
        "validate": {"task": {"dataset": "data:held_out"}},
        "channels": {"production": {}},
        "retrain": {},
    }
    document = parse({**GOOD, **sections}, tmp_path).model_dump(mode="json", by_alias=True)
    assert document["train"] == {"function": "train:train", "arguments": {}, "reads": []}
    assert document["validate"]["task"] == {
        "dataset": "data:held_out",
        "arguments": {},
        "metric": "accuracy",
        "drop": 0.0,
        "batch": 64,
    }
    assert document["retrain"] == {"channel": "production", "min_gain": 0.0, "source": None}
    assert document["channels"]["production"] == {
        "automatic": False,
        "approval": "none",
        "by_hand": "wish",
        "keep": 5,
        "signature": "optional",
        "rebuild": "optional",
        "after": None,
        "gates": dict.fromkeys(
            (
                "max_ratio_current",
                "max_ratio_onnxruntime",
                "max_ratio_pytorch",
                "max_relative_error",
                "max_latency_ms",
                "min_throughput",
                "max_load_ms",
                "max_memory_mb",
                "max_bundle_mb",
                "min_top1_agreement",
                "max_metric_drop",
                "min_metric",
                "max_vulnerabilities",
            )
        ),
    }


LIMITS: list[tuple[str, list[object], list[object]]] = [
    ("export.opset", [18, 24], [17, 25]),
    ("export.rtol", [0, 1e-9], [-1e-9]),
    ("export.atol", [0, 1e-9], [-1e-9]),
    ("build.opt_level", [0, 4], [-1, 5]),
    ("tune.trials", [0, 1], [-1]),
    ("tune.minutes", [1e-3], [0]),
    ("tune.until", [0.001, 0.999, "99%"], [0, 1, "0%", "100%", "%"]),
    ("tune.early_stopping", [1], [0]),
    ("validate.samples", [1], [0]),
    ("validate.rtol", [0], [-1e-9]),
    ("validate.atol", [0], [-1e-9]),
    ("validate.max_relative_error", [0], [-1e-9]),
    ("validate.top1_agreement", [0, 1], [-0.1, 1.1]),
    ("validate.task", [{"dataset": "a:b", "drop": 0, "batch": 1}], [{"dataset": "a:b", "drop": -0.1}]),
    ("validate.task", [{"dataset": "a:b", "metric": "m:f"}], [{"dataset": "a:b", "batch": 0}]),
    ("benchmark.repeats", [1], [0]),
    ("benchmark.rounds", [1], [0]),
    ("benchmark.warmup", [0], [-1]),
    ("benchmark.threads", [1], [0]),
    ("gates.max_latency_ms", [0.1], [0]),
    ("gates.max_ratio_onnxruntime", [0.1], [0]),
    ("gates.max_ratio_pytorch", [0.1], [0]),
    ("gates.max_bundle_mb", [0.1], [0]),
    ("channels.c.gates.max_ratio_current", [0.1], [0]),
    ("channels.c.gates.max_ratio_onnxruntime", [0.1], [0]),
    ("channels.c.gates.max_ratio_pytorch", [0.1], [0]),
    ("channels.c.gates.max_relative_error", [0, 0.1], [-0.1]),
    ("channels.c.gates.max_latency_ms", [0.1], [0]),
    ("channels.c.gates.min_throughput", [0.1], [0]),
    ("channels.c.gates.max_load_ms", [0.1], [0]),
    ("channels.c.gates.max_memory_mb", [0.1], [0]),
    ("channels.c.gates.max_bundle_mb", [0.1], [0]),
    ("channels.c.gates.min_top1_agreement", [0, 1], [-0.1, 1.1]),
    ("channels.c.gates.max_metric_drop", [0], [-0.1]),
    ("channels.c.gates.min_metric", [-1, 0], ["x"]),
    ("channels.c.gates.max_vulnerabilities", [0, 1], [-1, 0.5]),
    ("dimensions.batch", [{"min": 1}, {"min": 4, "max": 4}, {"tune": 9}], [{"min": 0}, {"min": 5, "max": 4}]),
    ("dimensions.batch", [{"min": 2, "max": 8, "measure": [2, 8], "tune": 2}], [{"min": 2, "measure": [1]}]),
    ("dimensions.batch", [{"max": 8, "tune": 8}], [{"max": 8, "tune": 9}, {"max": 8, "measure": [1, 9]}]),
    ("inputs.0.shape", [["batch", 1]], [["batch", 0], ["batch", "2x"]]),
    ("inputs.0.samples", [{"std": 0.1}], [{"std": 0}]),
    ("inputs.0.samples", [{"kind": "uniform", "low": -1, "high": 0}], [{"kind": "uniform", "low": 1}]),
    ("inputs.0.samples", [{"kind": "integers", "low": 0, "high": 1}], [{"kind": "integers", "high": 1}]),
    ("inputs.0.samples", [{"kind": "ones", "low": 3, "high": 1}], [{"kind": "integers", "low": 1, "high": 1}]),
    ("inputs.0.samples", [{"kind": "function", "function": "m:f"}], [{"kind": "integers", "low": 0, "high": 1.5}]),
    ("name", ["a", "0", "a.b-c_D9"], ["-a", ".a", "_a", "a b", "é"]),
    ("channels", [{"v": {}}, {"v1a": {}}, {"latest1": {}}], [{"v1": {}}, {"v12": {}}, {"latest": {}}, {"-x": {}}]),
    ("model", [{"mlflow": "models:/a@b"}, {"mlflow": "models:/a/3"}], [{"mlflow": "models:/a"}]),
    ("model", [{"factory": "a.b:c"}], [{"mlflow": "models:/a/b/c"}, {"mlflow": "models:/a@b/c"}, {"factory": "1:c"}]),
]


@pytest.mark.parametrize(("path", "accepted", "refused"), LIMITS)
def test_values_are_accepted_up_to_their_limits(
    change: Change, tmp_path: Path, path: str, accepted: list[object], refused: list[object]
) -> None:
    for value in accepted:
        parse(change(path, value), tmp_path)
    for value in refused:
        assert path.partition(".")[0].rstrip("s") in refusal(change(path, value), tmp_path)


def test_a_reduced_precision_has_wider_bounds_unless_the_file_sets_its_own(tmp_path: Path) -> None:
    targets = {"bf16": "x86-64-v4-bf16", "int8": "x86-64-v4-vnni", "fp16": "aarch64-cortex-a76", "fp32": "x86-64-v2"}
    for precision, target in targets.items():
        document = {**GOOD, "targets": [target], "build": {"precision": precision}}
        spec = parse(document, tmp_path)
        assert spec.bounds().max_relative_error == (None if precision == "fp32" else 0.05)
        assert spec.bounds().model_copy(update={"max_relative_error": None}) == spec.validation
        for key, value in (("rtol", 1e-3), ("atol", 1e-4), ("max_relative_error", 0.2)):
            explicit = parse({**document, "validate": {key: value}}, tmp_path)
            assert explicit.bounds() == explicit.validation
        seeded = parse({**document, "validate": {"seed": 3}}, tmp_path)
        assert seeded.bounds().max_relative_error == spec.bounds().max_relative_error


def test_a_model_that_rounds_its_activations_gets_a_bound_on_errors(tmp_path: Path) -> None:
    spec = parse({**GOOD, "targets": ["x86-64-v2"]}, tmp_path)
    assert spec.bounds(rounds_activations=True).max_relative_error == 0.05
    explicit = parse({**GOOD, "targets": ["x86-64-v2"], "validate": {"atol": 1e-4}}, tmp_path)
    assert explicit.bounds(rounds_activations=True) == explicit.validation


def test_a_budget_is_anything_but_no_trials(tmp_path: Path) -> None:
    budgets = [
        ({}, False),
        ({"trials": 0}, False),
        ({"trials": 0, "until": 0.1}, False),
        ({"trials": 1}, True),
        ({"minutes": 1}, True),
        ({"until": 0.1}, True),
        ({"until": 0.1, "minutes": 2}, True),
    ]
    for tune, has_budget in budgets:
        assert parse({**GOOD, "tune": tune}, tmp_path).tune.has_budget is has_budget, tune


def test_the_typical_size_is_measured_else_tuned_else_the_smallest() -> None:
    assert Dimension(min=2, tune=3, measure=(5, 4)).typical_size == 5
    assert Dimension(min=2, tune=3).typical_size == 3
    assert Dimension(min=2).typical_size == 2


def test_channels_follow_each_other_however_long_the_way_is(change: Change, tmp_path: Path) -> None:
    ring = {"a": {"after": "c"}, "b": {"after": "a"}, "c": {"after": "b"}, "d": {"after": "a"}}
    assert "channels.a.after" in refusal(change("channels", ring), tmp_path)
    row = {
        "d": {"after": "c", "automatic": True},
        "c": {"after": "b"},
        "b": {"after": "a"},
        "a": {"automatic": True},
        "e": {"automatic": True},
    }
    assert parse(change("channels", row), tmp_path).automatic_channels() == ("a", "d", "e")


def test_a_retrained_model_is_released_from_its_source(tmp_path: Path) -> None:
    more = {"train": {"function": "t:t"}, "validate": {"task": {"dataset": "d:d"}}}
    assert parse({**GOOD, **more}, tmp_path).source_alias is None
    assert parse({**GOOD, **more, "retrain": {}}, tmp_path).source_alias == ("digits-source", "production")
    retraining = {"retrain": {"source": "mine", "channel": "staging"}}
    assert parse({**GOOD, **more, **retraining}, tmp_path).source_alias == ("mine", "staging")
    elsewhere = {**GOOD, **more, **retraining, "channels": {"production": {}}}
    assert "'staging'" in refusal(elsewhere, tmp_path)
    for lacking in ("train", "validate"):
        document = {**GOOD, **more, **retraining}
        del document[lacking]
        assert lacking in refusal(document, tmp_path)


def test_a_precision_that_a_target_lacks_is_refused(tmp_path: Path) -> None:
    document = {**GOOD, "targets": ["x86-64-v4-bf16", "x86-64-v3"], "build": {"precision": "bf16"}}
    message = refusal(document, tmp_path)
    assert "build.precision" in message
    assert "'x86-64-v3'" in message


def test_a_secret_among_the_arguments_is_not_repeated_and_other_names_are_none(tmp_path: Path) -> None:
    secret = {"secret": "correct horse battery staple"}
    assert "horse" not in refusal({**GOOD, "train": {"function": "a:b", "arguments": secret}}, tmp_path)
    names = ("pad_token", "max_tokens", "token_dropout", "key", "keys", "passes", "secretary", "learning_rate")
    arguments = dict.fromkeys(names, 1)
    document = {**GOOD, "model": {"factory": "a:b", "arguments": arguments}}
    assert parse(document, tmp_path, "release.yaml").model.arguments == (arguments)


@pytest.mark.parametrize("value", ['"\\uD800"', '{"\\uD800": 1}', "!!binary gIGC"])
def test_a_value_that_no_step_could_be_given_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "release.yaml"
    path.write_text(
        f"name: m\nmodel: {{factory: 'a:b', arguments: {{x: {value}}}}}\ninputs: [{{name: x, shape: [1]}}]\n"
    )
    with pytest.raises(SpecError, match=r"release\.yaml: model: "):
        load(path)


def test_control_characters_in_a_message_are_escaped(change: Change, tmp_path: Path) -> None:
    message = refusal(change("channels", {"\x1b[2J\n": []}), tmp_path)
    assert message.isprintable()
    assert r"\x1b[2J\n" in message
    long = {"onnx": "x" * 5000}
    assert refusal({**GOOD, "model": long}, tmp_path).startswith("release.yaml: model.onnx: ")
