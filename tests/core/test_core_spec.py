"""The release file: every rule, what is said when one is broken, and the template."""

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
from tvmflow.spec import Dimension, Spec, amend, load, parse, template, to_document

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
    said = str(caught.value)
    assert said.startswith("release.yaml")
    assert "\n" not in said
    return said


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
    ("channels.staging.gates.max_ratio", "channels.staging.gates.max_ratio", "max_ratio_current"),
    ("retrain.min_gains", "retrain.min_gains", "min_gain"),
    ("train.functon", "train.functon", "function"),
]


@pytest.mark.parametrize(("path", "where", "meant"), UNKNOWN)
def test_an_unknown_key_names_the_likely_one(change: Change, tmp_path: Path, path: str, where: str, meant: str) -> None:
    assert f"unknown key {where!r}; did you mean {meant!r}?" in refusal(change(path, 1), tmp_path)


def test_an_unknown_key_like_no_other_lists_the_known_ones(change: Change, tmp_path: Path) -> None:
    said = refusal(change("gates.xyzzy", 1), tmp_path)
    assert "known here are max_bundle_mb, max_latency_ms, max_ratio_onnxruntime" in said


RULES: list[tuple[str, object, str]] = [
    ("name", None, "name: is required"),
    ("name", "two words", "'two words' must consist of letters, digits, dots, dashes and underscores"),
    ("name", "digits\n", "must consist of letters"),
    ("name", 3, "name: Input should be a valid string"),
    ("model", None, "model: is required"),
    ("model", {}, "exactly one of factory, pt2, onnx and mlflow says where the model is; none is given"),
    ("model.onnx", "m.onnx", "factory and onnx are given"),
    ("model.factory", "create", "'create' is not of the form package.module:function"),
    ("model.factory", "model:create()", "is not of the form package.module:function"),
    ("model", {"onnx": "m.onnx", "weights": "w.pt"}, "arguments and weights go with factory only"),
    ("model", {"pt2": "m.pt2", "arguments": {"a": 1}}, "arguments and weights go with factory only"),
    ("model", {"mlflow": "digits@production"}, "is not of the form models:/NAME@ALIAS or models:/NAME/VERSION"),
    ("inputs", None, "inputs are needed"),
    ("inputs", {"name": "x"}, "inputs: Input should be a valid list"),
    ("inputs", [{"name": "x", "shape": [1]}] * 2, "input 'x' is given twice"),
    ("inputs.0.name", None, "inputs.0.name: is required"),
    ("inputs.0.shape", None, "inputs.0.shape: is required"),
    ("inputs.0.shape", "batch", "inputs.0.shape: Input should be a valid list"),
    ("inputs.0.shape", ["batch", 0], "dimension 0 is neither a positive number nor a name"),
    ("inputs.0.shape", ["batch", -1], "dimension -1 is neither a positive number nor a name"),
    ("inputs.0.shape", ["batch size"], "dimension 'batch size' is neither a positive number nor a name"),
    ("inputs.0.shape", ["batch", 1.5], "Input should be a valid integer"),
    ("inputs.0.dtype", "float", "inputs.0.dtype: Input should be 'float32', 'float64'"),
    ("inputs.0.dtype", "int64", "input 'input' is int64: say its samples, e.g. kind integers, low and high"),
    ("inputs.0.samples", {"kind": "gaussian"}, "inputs.0.samples.kind: Input should be 'ones', 'uniform'"),
    ("inputs.0.samples", {"kind": "npz"}, "samples of kind npz need file"),
    ("inputs.0.samples", {"kind": "function"}, "samples of kind function need function"),
    ("inputs.0.samples", {"kind": "function", "function": "f"}, "'f' is not of the form"),
    ("inputs.0.samples", {"kind": "integers", "low": 0}, "samples of kind integers need low and high"),
    ("inputs.0.samples", {"kind": "integers", "low": 3, "high": 3}, "low (3) must be below high (3)"),
    ("inputs.0.samples", {"kind": "integers", "low": 0.2, "high": 0.7}, "must be whole numbers"),
    ("inputs.0.samples", {"kind": "uniform", "low": 2, "high": 1}, "low (2) must be below high (1)"),
    ("inputs.0.samples", {"kind": "uniform", "low": 2}, "low (2) must be below high (1)"),
    ("inputs.0.samples", {"kind": "uniform", "high": -1}, "low (0) must be below high (-1)"),
    ("inputs.0.samples", {"kind": "normal", "std": 0}, "inputs.0.samples.std: Input should be greater than 0"),
    ("dimensions", [], "dimensions: Input should be a valid mapping"),
    ("dimensions.batches", {}, "dimension 'batches' stands in no input's shape; did you mean 'batch'?"),
    ("dimensions.batch.min", 0, "dimensions.batch.min: Input should be greater than or equal to 1"),
    ("dimensions.batch.min", 9, "8 is outside the range 9 to 8"),
    ("dimensions.batch.tune", 9, "9 is outside the range 1 to 8"),
    ("dimensions.batch.measure", [1, 9], "9 is outside the range 1 to 8"),
    ("outputs", ["a", "a"], "output 'a' is given twice"),
    ("export.opset", 17, "export.opset: Input should be greater than or equal to 18"),
    ("targets", [], "targets must name at least one"),
    ("targets", "native", "targets: Input should be a valid list"),
    ("targets", ["nativ"], "targets: target 'nativ' is unknown; did you mean 'native'?"),
    ("targets", [{"kind": "metal"}], "kind 'metal' is not built here"),
    ("build.exec_mode", "jit", "build.exec_mode: Input should be 'bytecode' or 'compiled'"),
    ("build.fast_algorithms", "never", "build.fast_algorithms: Input should be 'allow' or 'forbid'"),
    ("build.weights", "outside", "build.weights: Input should be 'inside' or 'apart'"),
    ("build.opt_level", 5, "build.opt_level: Input should be less than or equal to 4"),
    ("tune", {"trials": 1, "minutes": 1}, "give the budget in trials or in minutes, not both"),
    ("tune.until", "200%", "tune.until: Input should be less than 1"),
    ("tune.until", "much", "tune.until: Input should be a valid number"),
    ("tune.early_stopping", 0, "tune.early_stopping: Input should be greater than or equal to 1"),
    ("tune.trials", -1, "tune.trials: Input should be greater than or equal to 0"),
    ("tune.tuner", "annealing", "tune.tuner: Input should be 'xgb', 'ga', 'random' or 'grid'"),
    ("validate.samples", 0, "validate.samples: Input should be greater than or equal to 1"),
    ("validate.top1_agreement", 1.5, "validate.top1_agreement: Input should be less than or equal to 1"),
    ("validate.task", {"dataset": "data"}, "validate.task.dataset: 'data' is not of the form"),
    ("validate.task", {"dataset": "a:b", "metric": "f1"}, "validate.task.metric: 'f1' is not of the form"),
    ("benchmark.peers", ["tensorrt"], "benchmark.peers.0: Input should be 'onnxruntime' or 'pytorch'"),
    ("gates.max_latency_ms", 0, "gates.max_latency_ms: Input should be greater than 0"),
    ("gates.unverified_targets", "skip", "Input should be 'refuse' or 'allow'"),
    ("train", {"function": "train"}, "train.function: 'train' is not of the form"),
    ("channels", {"two words": {}}, "channel 'two words' must consist of letters"),
    ("channels", {"latest": {}}, "channel 'latest' has a name that MLflow keeps for itself"),
    ("channels", {"v2": {}}, "channel 'v2' has a name that MLflow keeps for itself"),
    ("channels", {"a": {"after": "b"}}, "channels.a.after: 'b' is no other channel of this file"),
    ("channels", {"a": {"after": "a"}}, "channels.a.after: 'a' is no other channel of this file"),
    ("channels", {"a": {"after": "b"}, "b": {"after": "a"}}, "a release would have to reach 'a' before itself"),
    ("channels.a.approval", "maybe", "channels.a.approval: Input should be 'none' or 'required'"),
    ("channels.a.gates", {"max_ratio_current": 0}, "channels.a.gates.max_ratio_current: Input should be greater"),
    ("retrain", {}, "retrain needs train, which makes the weights, and validate.task, which judges them"),
]


@pytest.mark.parametrize(("path", "value", "said"), RULES)
def test_a_broken_rule_is_named(change: Change, tmp_path: Path, path: str, value: object, said: str) -> None:
    assert said in refusal(change(path, value), tmp_path)


def test_more_problems_than_one_are_counted(tmp_path: Path) -> None:
    assert refusal({**GOOD, "name": 3, "build": {"opt_level": 9}}, tmp_path).endswith("(and 1 more)")


@pytest.mark.parametrize("model", [{"onnx": "m.onnx"}, {"factory": "a:b", "weights": "w.pt"}])
def test_training_goes_with_a_factory_without_weights(tmp_path: Path, model: Document) -> None:
    document = {**GOOD, "model": model, "train": {"function": "train:train"}}
    assert "train makes the weights of a factory's model" in refusal(document, tmp_path)


def test_an_onnx_model_needs_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    assert parse({"name": "m", "model": {"onnx": "m.onnx"}}, tmp_path).inputs == ()


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_that_is_no_mapping_is_refused(tmp_path: Path, document: object) -> None:
    assert "must be a mapping with name, model and inputs; `tvmflow init` writes one" in refusal(document, tmp_path)


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
        ({"tune.trials": 7}, "in trials or in minutes"),
        ({"tune.trails": 7}, "'tune.trails'"),
        ({"targets": ["nativ"]}, "'nativ'"),
        ({"model": {"onnx": "absent.onnx"}}, "absent.onnx"),
    ):
        with pytest.raises(SpecError, match=where) as caught:
            amend(spec, wrong, "the options")
        assert str(caught.value).startswith("the options: ")


def test_an_amended_specification_keeps_the_defaults_that_depend_on_other_keys(tmp_path: Path) -> None:
    reduced = parse({**GOOD, "targets": ["x86-64-v4-bf16"], "build": {"precision": "bf16"}}, tmp_path)
    assert amend(reduced, {"tune.trials": 0}).bounds == reduced.bounds != reduced.validation
    assert amend(reduced, {"build.precision": "fp32"}).bounds == reduced.validation


def test_a_document_of_a_specification_is_read_back_and_says_no_more_than_the_file(tmp_path: Path) -> None:
    spec = parse(GOOD, tmp_path)
    document = json.loads(json.dumps(to_document(spec)))
    assert document == GOOD
    assert parse(document, tmp_path) == spec


@pytest.mark.parametrize(("key", "part"), MISSING)
def test_a_missing_file_is_named(tmp_path: Path, key: str, part: Document) -> None:
    assert f"{key}: there is no file '{tmp_path / 'absent.bin'}'" in refusal({**GOOD, **part}, tmp_path)


def test_a_folder_is_no_model_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    assert "there is no file" in refusal({**GOOD, "model": {"onnx": "m.onnx"}}, tmp_path)


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
    ("name: [", "at line 1"),
    ("name: m\nmodel: a: b\n", "at line 2"),
    ("name: m\n\tmodel: x", "at line 2"),
    ("name: m\nmodel: {}\nname: n\n", "at line 3: 'name' is given twice"),
    ("tune:\n  trials: 1\n  trials: 2\n", "at line 3: 'trials' is given twice"),
    ("name: 2024-13-45", "month must be in 1..12"),
    ("name: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("\0", "not valid YAML"),
    ("[" * 5000, "not valid YAML"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
def test_broken_yaml_is_one_sentence_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "release.yaml").write_text(text)
    with pytest.raises(SpecError, match=re.escape(said)) as caught:
        load(tmp_path / "release.yaml")
    assert "\n" not in str(caught.value)


def test_merged_yaml_may_override_a_key(tmp_path: Path) -> None:
    text = "name: m\nmodel: {factory: 'a:b', arguments: {base: &base {x: 1, y: 1}, other: {<<: *base, x: 2}}}\n"
    (tmp_path / "release.yaml").write_text(text + "inputs: [{name: x, shape: [1]}]\n")
    assert load(tmp_path / "release.yaml").model.arguments["other"] == {"x": 2, "y": 1}


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "release.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load(tmp_path / "release.yaml")


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"cannot be read .*`tvmflow init` writes one"):
        load(tmp_path / name)


def test_the_template_is_a_release_file(tmp_path: Path) -> None:
    spec = parse(yaml.safe_load(template("digits")), tmp_path)
    assert spec.name == "digits"
    assert spec.model.factory == "model:create"


@pytest.mark.parametrize("name", ["1.0", "2024-01-01", "on", "null", "12"])
def test_a_name_that_yaml_would_read_otherwise_is_quoted(tmp_path: Path, name: str) -> None:
    assert parse(yaml.safe_load(template(name)), tmp_path).name == name


@pytest.mark.parametrize("name", ["two words", "a: b", "", "-x", "a\n"])
def test_a_template_is_not_made_for_a_name_that_would_be_refused(name: str) -> None:
    with pytest.raises(SpecError, match="must consist of letters"):
        template(name)


_COMMENTED = re.compile(r"^(?P<indent> *)# (?P<line> *[a-z0-9_]+:.*)$")


def uncommented(text: str, wanted: Callable[[str], bool]) -> str:
    """The template with the commented-out lines of the wanted sections taken in."""
    lines, section = [], ""
    for line in text.splitlines():
        found = _COMMENTED.match(line)
        shown = found["indent"] + found["line"] if found else line
        if shown and not shown.startswith((" ", "#")):
            section = shown.partition(":")[0]
        lines.append(shown if found and wanted(section) else line)
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
    written = [parse({**document, "tune": {"until": until}}, files).tune for until in ("2%", " 2 % ", 0.02)]
    assert [tune.until for tune in written] == [0.02] * 3
    assert all(tune.has_budget for tune in written)
    assert not parse({**document, "tune": {"until": "2%", "trials": 0}}, files).tune.has_budget


def test_what_is_commented_out_shows_the_defaults(files: Path) -> None:
    sections = ("export", "build", "tune", "validate", "benchmark", "outputs", "store", "registry")
    taken = parse(yaml.safe_load(uncommented(template("m"), lambda name: name in sections)), files)
    plain = parse(yaml.safe_load(template("m")), files)
    assert taken.export == plain.export
    assert taken.build == plain.build
    assert taken.tune == plain.tune
    assert taken.validation.model_copy(update={"task": None}) == plain.validation
    assert taken.benchmark.model_copy(update={"threads": None}) == plain.benchmark


def test_retraining_can_be_taken_in_with_what_it_needs(files: Path) -> None:
    sections = ("train", "validate", "retrain")
    taken = parse(yaml.safe_load(uncommented(template("m"), lambda name: name in sections)), files)
    assert taken.retrain is not None
    assert (taken.retrain.channel, taken.retrain.source) == ("production", "m-source")


def test_a_channel_of_retraining_must_be_among_the_channels(files: Path) -> None:
    document = yaml.safe_load(uncommented(template("m"), lambda name: name in ("train", "validate", "retrain")))
    assert "retrain.channel: 'production' is not among channels" in refusal({**document, "channels": {"a": {}}}, files)


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
    shown = set(re.findall(r"\w+", template("m")))
    models = [Spec]
    missing = set()
    while models:
        model = models.pop()
        for name, field in model.model_fields.items():
            if (field.alias or name) not in shown:
                missing.add(f"{model.__name__}.{name}")
            models += [item for item in _models(field.annotation) if item not in models]
    assert not missing


def _models(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [item for part in getattr(annotation, "__args__", ()) for item in _models(part)]


@pytest.mark.parametrize(
    ("model", "extra", "message"),
    [
        ({"factory": "a:b"}, {"benchmark": {"peers": ["pytorch"]}}, "needs onnxruntime among benchmark.peers"),
        ({"onnx": "m.onnx"}, {}, "cannot be checked for an ONNX file"),
    ],
)
def test_a_ratio_gate_without_its_peer_is_refused(
    model: dict[str, str], extra: dict[str, object], message: str, tmp_path: Path
) -> None:
    gate = "max_ratio_onnxruntime" if "factory" in model else "max_ratio_pytorch"
    document = {"name": "x", "model": model, "inputs": [{"name": "a", "shape": [1]}], "gates": {gate: 1.0}, **extra}
    with pytest.raises(SpecError, match=message):
        parse(document, tmp_path)
