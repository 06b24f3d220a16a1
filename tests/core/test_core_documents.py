"""Documents: one spelling, a format number, readers of every number ever written, and refusals by file and field."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import JsonValue

from tvmflow.documents.encoding import Document, Reader, decode, encode
from tvmflow.documents.release import Release
from tvmflow.documents.training import finite_json
from tvmflow.documents.verdict import (
    Check,
    Choices,
    ReleaseVerdict,
    RetrainVerdict,
    RetuneVerdict,
    Verdict,
    samples_of,
)
from tvmflow.errors import StoreError
from tvmflow.services import Sections
from tvmflow.stack.record import Secrets, StackRecord
from tvmflow.store.channel_document import Channel
from tvmflow.store.leases import Lease
from tvmflow.workspace import Artifact, Workspace

FORMATS = Path(__file__).parents[1] / "store" / "formats"
OLD = sorted(FORMATS.glob("release-*.json"))
PLACE = "s3://models/releases/digits/1/release.json"


def _content(path: Path = FORMATS / "release-1.json", **changes: Any) -> dict[str, Any]:
    return {**json.loads(path.read_text()), **changes}


def _refusal(document: Any) -> str:
    with pytest.raises(StoreError) as caught:
        decode(Release, json.dumps(document).encode(), PLACE)
    return str(caught.value)


KINDS = [Release, Channel, Lease, Verdict, ReleaseVerdict, RetrainVerdict, RetuneVerdict, Choices, Sections]
KINDS += [StackRecord, Secrets]


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_file_of_every_older_format(kind: type[Document]) -> None:
    files = [json.loads(path.read_text()) for path in FORMATS.glob(f"{kind.__name__.lower()}-[0-9]*.json")]
    assert {document.get("format", 1) for document in files} == set(kind.older)
    assert set(kind.older) == set(range(1, kind.model_fields["format"].default))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_a_release_of_an_older_tvmflow_is_read_without_loss(path: Path) -> None:
    old = _content(path)
    release = decode(Release, path.read_bytes(), PLACE)
    assert set(_leaves(old)) - {(("format",), old.get("format"))} <= set(_leaves(json.loads(encode(release))))
    target = release.targets[0]
    measurements = target.measurements
    assert measurements is not None
    assert (
        measurements.typical.bundle.latency_ms.p50
        == old["targets"][0]["measurements"]["points"][0]["runners"]["tvm"]["latency_ms"]["p50"]
    )
    assert target.p50 == measurements.typical.bundle.latency_ms.p50
    assert target.model_copy(update={"measurements": None}).p50 is None
    assert release.registered_version == (old["name"], old["version"])
    assert release.blobs == {
        blob["sha256"]: {blob["size"]} for blob in (target.bundle.model_dump(), old.get("report")) if blob is not None
    }


@pytest.mark.parametrize("path", sorted(FORMATS.glob("verdict-*.json")), ids=lambda path: path.stem)
def test_a_verdict_of_an_older_tvmflow_is_read_without_loss(path: Path) -> None:
    old = json.loads(path.read_text())
    verdict = decode(Verdict, path.read_bytes(), "verdict.json of MLflow run 1")
    losses = set(_leaves(old)) - set(_leaves(json.loads(encode(verdict))))
    assert losses <= {(("policy", "automatic"), False)}
    assert (verdict.from_version, verdict.verdict) == (old["from"], "refused")
    assert [check.message for check in verdict.checks] == [check["told"] for check in old["checks"]]
    assert decode(Verdict, encode(verdict), "") == verdict


def test_a_verdict_on_a_release_of_an_older_tvmflow_is_read_without_loss() -> None:
    """An error may have been `Infinity`, which is no JSON; it is null now."""
    content = (FORMATS / "releaseverdict-1.json").read_bytes()
    verdict = decode(ReleaseVerdict, content, "verdict.json of MLflow run 1")
    written = json.loads(encode(verdict), parse_constant=pytest.fail)
    losses = set(_leaves(json.loads(content))) - set(_leaves(written["targets"]))
    errors = {("x86-64-v3", "comparisons", 0, f"max_{kind}_error") for kind in ("abs", "rel")}
    assert losses == {(place, math.inf) for place in errors}
    refused = verdict.targets["x86-64-v3"]
    assert (refused.passed, refused.comparisons[0].max_abs_error) == (False, math.inf)
    assert decode(ReleaseVerdict, encode(verdict), "") == verdict


def test_a_verdict_on_a_release_without_notes_is_read_without_loss() -> None:
    content = (FORMATS / "releaseverdict-2.json").read_bytes()
    verdict = decode(ReleaseVerdict, content, "verdict.json of MLflow run 1")
    assert verdict.targets["native"].notes == ()
    assert set(_leaves(json.loads(content)["targets"])) <= set(_leaves(json.loads(encode(verdict))["targets"]))


def test_the_choice_of_builds_of_an_older_tvmflow_is_read_without_loss() -> None:
    content = (FORMATS / "choices-1.json").read_bytes()
    choices = decode(Choices, content, "choices.json of MLflow run 1")
    assert set(_leaves(json.loads(content))) <= set(_leaves(json.loads(encode(choices))["targets"]))
    assert [check.value for check in choices.targets["native"]] == [0.901]
    assert decode(Choices, encode(choices), "") == choices


@pytest.mark.parametrize("kind", [Sections, StackRecord, Secrets])
def test_a_document_of_a_state_folder_without_a_number_is_of_the_first_format(kind: type[Document]) -> None:
    content = (FORMATS / f"{kind.__name__.lower()}-unnumbered.json").read_bytes()
    document = decode(kind, content, "")
    assert json.loads(encode(document)) == {"format": 1, **json.loads(content)}
    assert decode(kind, encode(document), "") == document


def test_a_retraining_of_an_older_tvmflow_is_read_and_its_numbers_become_json() -> None:
    content = (FORMATS / "retrainverdict-1.json").read_bytes()
    verdict = decode(RetrainVerdict, content, "verdict.json of MLflow run 1")
    assert math.isnan(verdict.challenger)
    written = json.loads(encode(verdict), parse_constant=pytest.fail)
    clip = {**json.loads(content)["arguments"], "clip": "Infinity"}
    assert written == {**json.loads(content), "format": 2, "challenger": None, "arguments": clip}
    assert encode(decode(RetrainVerdict, encode(verdict), "")) == encode(verdict)
    assert finite_json([{"rate": float("-inf")}, 1.5]) == [{"rate": "-Infinity"}, 1.5]


def test_a_retuning_of_an_older_tvmflow_is_read_without_loss() -> None:
    old = json.loads((FORMATS / "retuneverdict-1.json").read_text())
    old["targets"][1]["gain"]["interval"] = {"low": 0.0, "high": float("inf")}
    verdict = decode(RetuneVerdict, json.dumps(old).encode(), "verdict.json of MLflow run 1")
    lost = set(_leaves(old)) - set(_leaves(json.loads(encode(verdict), parse_constant=pytest.fail)))
    assert lost == {(("targets", 1, "gain", "interval", "high"), float("inf"))}
    assert verdict.targets[0].gain.message == old["targets"][0]["gain"]["told"]
    assert decode(RetuneVerdict, encode(verdict), "") == verdict


def test_an_interval_without_an_upper_end_is_null_and_was_infinity() -> None:
    """A comparison with too few pairs has it, and its verdict must be JSON that everybody can read."""
    document = json.loads((FORMATS / "verdict-1.json").read_text())
    document["checks"][-1]["interval"] = {"low": 0.0, "high": float("inf")}
    verdict = decode(Verdict, json.dumps(document).encode(), "")
    interval = verdict.checks[-1].interval
    assert interval is not None
    assert (interval.low, interval.high) == (0.0, float("inf"))
    assert json.loads(encode(verdict))["checks"][-1]["interval"] == {"low": 0.0, "high": None}
    assert decode(Verdict, encode(verdict), "") == verdict
    document["checks"][-1]["value"] = float("inf")
    with pytest.raises(StoreError, match=r"^a place is damaged"):
        decode(Verdict, json.dumps(document).encode(), "a place")


def test_a_ratio_passes_where_its_whole_interval_is_within_the_bound() -> None:
    comparison = decode(Verdict, (FORMATS / "verdict-1.json").read_bytes(), "").checks[-1].comparison
    assert comparison is not None
    interval = comparison.interval
    for bound, passes in ((interval.high, True), (interval.low, False), (interval.low / 2, False)):
        check = Check.of_ratio("ratio", "", comparison, bound)
        assert (check.passed, check.value, check.interval, check.bound) == (passes, comparison.ratio, interval, bound)


def test_the_times_of_a_checks_runs_are_logged_under_its_name(tmp_path: Path) -> None:
    workspace, samples = Workspace(tmp_path), Artifact(sha256="a" * 64, size=3, name="times.npz")
    check = Check(name="ratio", message="", passed=True, samples=samples)
    bare = Check(name="size", message="", passed=True)
    assert samples_of(workspace, [check, bare]) == {"samples/ratio.npz": workspace.path(samples)}


@pytest.mark.parametrize(
    ("field", "changes"),
    [("stars", {"stars": 3}), ("channels.staging.moon", {"channels": {"staging": {"moon": "full"}}})],
)
def test_a_field_that_only_a_newer_tvmflow_can_know_asks_for_an_upgrade(field: str, changes: dict[str, Any]) -> None:
    message = f"{PLACE} has a field that this tvmflow does not know, {field}: upgrade tvmflow."
    assert _refusal(_content(**changes)) == message


def _leaves(part: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
    """Every value of a document with the keys that lead to it."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else None
    if items is None:
        return [(keys, part)]
    return [leaf for key, value in items for leaf in _leaves(value, (*keys, key))]


def test_the_first_releases_had_no_points_no_algorithms_and_little_of_their_tuning() -> None:
    document = _content()
    (target,) = document["targets"]
    point = target["measurements"]["points"][0]
    target["measurements"] = {"runs": 9, "threads": 2, **{key: point[key] for key in ("runners", "ratio", "noise")}}
    target["tuning"] = {"trials": 0, "coverage": "0 of 2 workloads tuned"}
    for key in ("algorithms", "precision", "max_relative_error", "choice"):
        del target["verdict"][key]
    for key in ("format", "report", "channels"):
        del document[key]
    del document["provenance"]["source"]
    release = decode(Release, json.dumps(document).encode(), PLACE)
    (item,) = release.targets
    assert item.measurements is not None
    assert (item.measurements.runs, item.measurements.typical.sizes) == (9, {})
    assert item.measurements.typical.bundle.latency_ms.p50 == point["runners"]["tvm"]["latency_ms"]["p50"]
    assert (item.tuning, item.verdict.precision, item.verdict.algorithms) == (None, "fp32", {})
    assert (release.report, release.channels, release.provenance.source) == (None, {}, None)


def test_equal_documents_are_equal_bytes_in_one_order() -> None:
    release = decode(Release, OLD[0].read_bytes(), PLACE)
    reverse = dict(reversed(json.loads(encode(release)).items()))
    assert encode(decode(Release, json.dumps(reverse).encode(), PLACE)) == encode(release)
    assert encode(release).startswith(b'{\n  "channels": {\n    "production": {\n      "after": "staging",\n')
    assert encode(release.model_copy(update={"tvmflow": "ü"})).endswith(
        '"tvmflow": "ü",\n  "version": "1"\n}\n'.encode()
    )


def test_a_release_of_a_newer_format_asks_for_an_upgrade() -> None:
    newest = Release.model_fields["format"].default
    message = f"{PLACE} has format {newest + 1}, this tvmflow reads up to {newest}; upgrade tvmflow."
    assert _refusal({"format": newest + 1, "stars": "many"}) == message


@pytest.mark.parametrize("number", [0, -1, True, "1", 1.0, None, [1]])
def test_a_format_that_is_no_number_is_damage(number: Any) -> None:
    assert "its format " in _refusal(_content(format=number))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"1", b'"text"', b"null", b"[" * 100_000])
def test_what_is_no_json_object_is_damage(content: bytes) -> None:
    with pytest.raises(StoreError, match=f"^{PLACE} is damaged .*: restore it from a backup.$"):
        decode(Release, content, PLACE)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("targets", {"targets": 3}),
        ("targets", {"targets": [3]}),
        ("name", {"name": 3}),
        ("model", {"model": "models:/digits@production"}),
        ("model", {"model": "models:/digits/0"}),
        ("model", {"model": "models:/digits/1x"}),
        ("channels", {"channels": ["staging"]}),
        ("report.sha256", {"report": {"sha256": "abc", "size": 3}}),
        ("report.size", {"report": {"sha256": "a" * 64, "size": "3"}}),
        ("created_at: it is not a finite number", {"created_at": float("nan")}),
        ("report.size: it is not a finite number", {"report": {"size": 10**400}}),
        ("name: it has half of a surrogate pair", {"name": "\ud800"}),
        ("channels.0: it has half of a surrogate pair", {"channels": ["\ud800"]}),
        ("\\ud800: it has half of a surrogate pair", {"\ud800": "key"}),
    ],
)
def test_a_fault_is_named_with_its_field(field: str, changes: dict[str, Any]) -> None:
    assert field in _refusal(_content(**changes))


@pytest.mark.parametrize("place", [("bundle",), ("verdict",), ("measurements", "points"), ("verdict", "comparisons")])
def test_a_target_that_lacks_something_is_damage(place: tuple[str, ...]) -> None:
    document = _content()
    part = document["targets"][0]
    for key in place[:-1]:
        part = part[key]
    del part[place[-1]]
    assert place[-1] in _refusal(document) or "runners" in _refusal(document)


def test_a_point_without_the_bundle_is_damage() -> None:
    document = _content()
    del document["targets"][0]["measurements"]["points"][0]["runners"]["tvm"]
    assert "points.0.runners: Value error, the bundle, tvm, is not among them" in _refusal(document)


def test_of_several_faults_the_first_is_named() -> None:
    assert "damaged (name: " in _refusal(_content(name=3, version=3))


def _read_key(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"value": document["former"]}


def _read_number(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"value": document["value"] + 1}


def _read_text(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"value": document["value"].strip()}


class Clock(Document):
    """A document of three formats, whose readers expect what a damaged one lacks."""

    older: ClassVar[Mapping[int, Reader]] = {1: _read_key, 2: _read_number, 3: _read_text}

    format: int = 4
    value: JsonValue

    @property
    def label(self) -> str:
        return "clock 7"


def test_formats_are_read_one_after_the_other() -> None:
    assert decode(Clock, b'{"format": 3, "value": " 1 "}', "").value == "1"
    assert decode(Clock, b'{"format": 4, "value": 1}', "").value == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_an_older_reader_does_not_expect_is_damage(number: int) -> None:
    content = json.dumps({"format": number, "value": None}).encode()
    with pytest.raises(StoreError, match=r"^clock\.json is damaged \(.*\): buy another\.$"):
        decode(Clock, content, "clock.json", "buy another")


def _nest(depth: int) -> JsonValue:
    value: JsonValue = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud800", _nest(100_000)], ids=["nan", "inf", "text", "deep"]
)
def test_a_value_that_json_cannot_hold_is_refused_with_the_document(value: JsonValue) -> None:
    with pytest.raises(StoreError, match=r"^The clock 7 cannot be written as JSON: .*\.$"):
        encode(Clock.model_construct(format=4, value=value))
