"""A release that is out of bounds: measured, kept in MLflow with its verdict, and not published."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tvmflow.documents.encoding import decode
from tvmflow.documents.figures import Answers
from tvmflow.documents.verdict import ReleaseVerdict

# The first caller, which is the original's side, scores 1, everybody after it less.
_METRIC = """
from pathlib import Path


def falling(outputs, labels):
    calls = Path(__file__).with_suffix(".calls")
    before = calls.read_text() if calls.exists() else ""
    calls.write_text(before + "x")
    return 1.0 - 0.25 * len(before)
"""


def _refuse(digits: Any, file: Path) -> tuple[str, dict[str, Any], Any]:
    """Release a file that must be refused; the sentence, the kept verdict and the run."""
    client = digits.machine.mlflow
    before = _published(digits)
    earlier = {run.info.run_id for run in _runs(client)}
    result = digits.machine.release(file)
    assert result.code == 3, result.stderr
    assert result.document["error"]["type"] == "VerdictError"
    assert _published(digits) == before
    (run,) = [
        run for run in _runs(client) if run.info.run_id not in earlier and "mlflow.parentRunId" not in run.data.tags
    ]
    assert run.data.tags["tvmflow.verdict"] == "refused"
    assert run.info.run_id in result.sentence
    content = Path(client.download_artifacts(run.info.run_id, "verdict.json")).read_bytes()
    assert decode(ReleaseVerdict, content, "").targets.keys() == {"native"}
    verdict = json.loads(content)["targets"]["native"]
    assert not verdict["passed"]
    return result.sentence, verdict, run


def _runs(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("tvmflow").experiment_id]))


def _published(digits: Any) -> tuple[list[str], list[str], list[Path]]:
    """What is in the store, in the registry and among the blobs."""
    machine = digits.machine
    return (
        [release["version"] for release in machine.releases("digits")],
        [version.version for version in machine.versions("digits")],
        sorted((machine.home / "s3" / "tvmflow" / "blobs").rglob("*")),
    )


def test_a_gate_that_is_not_kept_refuses_the_release(digits: Any) -> None:
    sentence, verdict, _ = _refuse(digits, digits.derived("small", gates={"max_bundle_mb": 0.001}))
    assert [name for name in ("'native'", "max_bundle_mb") if name not in sentence] == []
    assert "max_bundle_mb" in verdict["reasons"][0]


@pytest.mark.long
def test_a_gate_on_a_ratio_is_decided_by_as_many_rounds_as_it_takes(digits: Any) -> None:
    sections = {
        "benchmark": {"repeats": 5, "rounds": 1, "peers": ["onnxruntime"]},
        "gates": {"max_ratio_onnxruntime": 1e-6},
    }
    sentence, verdict, _ = _refuse(digits, digits.derived("slow", **sections))
    assert "gate max_ratio_onnxruntime allows 1e-06" in sentence
    (pairs,) = re.findall(r"(\d+) pairs", verdict["reasons"][0])
    assert int(pairs) >= 9
    assert "undecided" not in sentence


@pytest.mark.long  # A lower score is found by the same step.
def test_outputs_beyond_the_tolerance_refuse_the_release(digits: Any) -> None:
    bounds = {"samples": 8, "rtol": 0, "atol": 0, "task": {"dataset": "data:held_out"}}
    sentence, verdict, run = _refuse(digits, digits.derived("exact", validate=bounds))
    assert "'logits'" in sentence
    assert verdict["comparisons"][0]["max_abs_error"] > 0
    assert Answers.model_validate(verdict["answers"]).is_right().mean() == verdict["metric_bundle"]
    assert run.info.status == "FINISHED"


def test_a_lower_score_of_the_bundle_refuses_the_release(digits: Any) -> None:
    (digits.folder / "falling.py").write_text(_METRIC)
    bounds = {"samples": 8, "task": {"dataset": "data:held_out", "metric": "falling:falling", "drop": 0.1}}
    sentence, verdict, _ = _refuse(digits, digits.derived("falling", validate=bounds))
    assert [name for name in ("falling:falling", "0.7500", "1.0000", "0.1") if name not in sentence] == []
    assert (verdict["metric_original"], verdict["metric_bundle"]) == (1.0, 0.75)


@pytest.mark.long
def test_a_lower_score_within_the_allowed_drop_is_released(digits: Any) -> None:
    (digits.folder / "sinking.py").write_text(_METRIC)
    bounds = {"samples": 8, "task": {"dataset": "data:held_out", "metric": "sinking:falling", "drop": 0.25}}
    result = digits.machine.release(digits.derived("sinking", validate=bounds))
    assert result.code == 0, result.stderr
    assert result.document["targets"][0]["metric"] == {"original": 1.0, "bundle": 0.75}


@pytest.mark.long
def test_a_refused_release_passes_once_its_bounds_are_met(digits: Any) -> None:
    refusal = digits.machine.release(digits.derived("large", gates={"max_bundle_mb": 0.002}))
    assert refusal.code == 3
    passed = digits.machine.release(digits.derived("large", gates={"max_bundle_mb": 100}))
    assert passed.code == 0, passed.stderr
    assert [name for name, status in passed.steps.items() if status == "ran"] == ["track", "publish"]
