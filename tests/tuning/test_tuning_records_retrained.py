"""Every record of a model serves it after a retraining, and nothing is measured for it again."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from tasks.relax_import import ImportJob
from tasks.relax_import import work as import_model
from tasks.tune import TuneJob, TuneResult, work
from tvmflow.hardware.target import Target
from tvmflow.spec import Build, Tune
from tvmflow.workspace import Workspace


def _trained(path: Path, seed: int) -> Path:
    """A small network of convolutions as for the digits, with the weights of a seed."""
    chance = np.random.default_rng(seed)
    weights = {
        "w1": chance.normal(size=(16, 1, 3, 3)),
        "b1": chance.normal(size=16),
        "w2": chance.normal(size=(16, 16, 3, 3)),
        "b2": chance.normal(size=16),
        "w3": chance.normal(size=(16 * 4 * 4, 10)),
        "b3": chance.normal(size=10),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("MaxPool", ["r2"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"]),
    ]
    values = {name: value.astype(np.float32) for name, value in weights.items()}
    return save_model(path, nodes, [("x", [1, 1, 8, 8])], ["y"], values)


def _tuned(workspace: Workspace, path: Path, target: Target) -> TuneResult:
    def emit(done: float, total: float, message: str) -> None:
        """Nobody watches."""

    shapes: dict[str, tuple[int | str, ...]] = {"x": (1, 1, 8, 8)}
    imported = import_model(
        ImportJob(home=workspace.folder, onnx=workspace.keep(path), model_label="model.onnx", shapes=shapes), emit
    )
    budget = Tune(trials=4, tuner="random", seed=1)
    return work(
        TuneJob(
            home=workspace.folder,
            imported=imported,
            target=target,
            build=Build(),
            variants=(),
            tune=budget,
            threads=target.threads,
        ),
        emit,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, native: Target) -> tuple[TuneResult, TuneResult]:
    """The results of tuning a model, and then the same model with other weights."""
    folder = tmp_path_factory.mktemp("retrained")
    workspace = Workspace(folder / "state")
    first, second = (_tuned(workspace, _trained(folder / f"{seed}.onnx", seed), native) for seed in (0, 1))
    return first, second


def test_a_retrained_model_finds_every_record_and_measures_nothing(both: tuple[TuneResult, TuneResult]) -> None:
    first, second = both
    assert (first.trials, second.trials) == (4, 0)
    assert second.records == first.records
    assert [item.name for item in second.workloads] == [item.name for item in first.workloads]
    assert second.coverage.tuned == first.coverage.tuned > 0


def test_the_coverage_counts_workloads_and_their_share_of_the_time(both: tuple[TuneResult, TuneResult]) -> None:
    coverage = both[0].coverage
    seconds = {item.name: item.calls * (item.best_seconds or 0.0) for item in both[0].workloads}
    names = {item.name for item in both[0].workloads if item.trials or item.status == "tuned"}
    assert (coverage.tuned, coverage.workloads) == (len(names), len(both[0].workloads))
    assert coverage.share_of_time == pytest.approx(sum(seconds[name] for name in names) / sum(seconds.values()))
    assert str(coverage).startswith(f"{len(names)} of {len(seconds)} workloads tuned, ")
