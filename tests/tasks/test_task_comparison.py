"""A pair of bundles: they are loaded again and again, and their turns alternate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.steps import compile_by_steps
from tasks.comparison import PairJob, work
from tvmflow import npz, runtime
from tvmflow.comparison import Pair
from tvmflow.comparison.pairs import Samples


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    save_model(folder / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])], [("x", [1, 8])], [("y", [1, 8])])
    document = {"name": "relu", "model": {"onnx": "relu.onnx"}, "targets": ["native"]}
    return compile_by_steps(document, folder, folder / "state")


def _measure(bundle: Path, folder: Path, seconds: float, slowdown: float = 0.0) -> Samples:
    sample = folder / "inputs.npz"
    npz.write(sample, {"x": np.ones((1, 8), np.float32)})
    job = PairJob(bundles=(bundle, bundle), sample=sample, threads=(1, 1), seconds=seconds, seed=0, slowdown=slowdown)
    return work(job, lambda done, total, message: None).samples


def test_both_are_loaded_again_and_again(bundle: Path, tmp_path: Path) -> None:
    samples = _measure(bundle, tmp_path, 0.3, slowdown=1.0)
    assert len(samples.loads) > 1
    assert sum(samples.loads) == len(samples.candidate) == len(samples.baseline)
    assert min(samples.loads) >= 7
    assert Pair.of(samples).ratio > 1.5


def test_a_run_never_follows_a_timed_run_of_its_own_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    load, count = runtime.load, iter(range(1000))

    @contextmanager
    def load_and_record(path: Path, **options: Any) -> Iterator[Any]:
        name = next(count)
        with load(path, **options) as model:

            def call(**inputs: Any) -> Any:
                calls.append(name)
                return model(**inputs)

            yield call

    monkeypatch.setattr(runtime, "load", load_and_record)
    samples = _measure(bundle, tmp_path, 0.0)
    # Each was run twice in turn when it was loaded; from then on every turn is an untimed run and a timed one.
    turns = calls[4:]
    assert len(turns) == 4 * len(samples.candidate)
    assert turns[::2] == turns[1::2]
    assert all(one != other for one, other in zip(turns[::2], turns[2::2], strict=False))
