"""Batches: requests that run together get what they would get alone."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow import runtime
from tvmflow.bundle import TensorSpec, read_manifest
from tvmflow.errors import BundleError
from tvmflow.runtime import CompiledModel
from tvmflow.serving import batching
from tvmflow.serving.batching import Batcher, batch_dimension
from tvmflow.serving.limits import OverloadedError

MakeInputs = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[CompiledModel]:
    with runtime.load(bundle) as loaded:
        yield loaded


class _Gate:
    """A batcher behind a gate: requests queue until `release` is set, `rows` has the size of each batch run."""

    def __init__(self, max_batch: int = 64, max_delay: float = 0.0) -> None:
        self.rows: list[int] = []
        self.batcher = Batcher(max_batch=max_batch, max_delay=max_delay, on_batch=self.rows.append)
        self.release = threading.Event()
        self.batcher.call(self.release.wait)


def _shapes(bundle: Path, inputs: Any, outputs: Any) -> Any:
    def specs(shapes: Any) -> Any:
        return tuple(TensorSpec(str(index), shape, "float32") for index, shape in enumerate(shapes))

    return replace(read_manifest(bundle), inputs=specs(inputs), outputs=specs(outputs))


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([("n", 3), ("n",)], [("n", 2)], "n"),
        ([("n", "t")], [("n", "t", 8)], "n"),
        ([(1, 3)], [(1, 2)], None),
        ([("n", 3), ()], [("n", 2)], None),
        ([("n", 3)], [(1, 2)], None),
        ([("n", 3)], [("n", "n")], None),
        ([("n", 3), ("m", 3)], [("n", 3)], None),
    ],
)
def test_the_batch_dimension_is_first_everywhere_and_nowhere_else(
    bundle: Path, inputs: Any, outputs: Any, expected: str | None
) -> None:
    assert batch_dimension(_shapes(bundle, inputs, outputs)) == expected


def test_requests_that_wait_run_together_and_get_their_own_rows(
    model: CompiledModel, inputs: MakeInputs, reference: Reference
) -> None:
    gate = _Gate()
    sizes = [1, 3, 2, 1]
    requests = [inputs(size, seed) for seed, size in enumerate(sizes)]
    answers = [gate.batcher.submit(model, model.check_inputs(arrays)) for arrays in requests]
    gate.release.set()
    for arrays, answer in zip(requests, answers, strict=True):
        actual, alone, expected = answer.result(), model(**arrays), reference("1", arrays)
        np.testing.assert_array_equal(actual["doubled"], expected["doubled"])
        np.testing.assert_allclose(actual["sum"], expected["sum"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(actual["sum"], alone["sum"], rtol=1e-6, atol=1e-6)
    gate.batcher.close()
    assert gate.rows == [7]


def test_a_batch_is_no_larger_than_allowed_and_keeps_the_order(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate(max_batch=4)
    answers = [gate.batcher.submit(model, model.check_inputs(inputs(size))) for size in (2, 2, 3, 2, 6, 1)]
    gate.release.set()
    assert [answer.result()["sum"].shape[0] for answer in answers] == [2, 2, 3, 2, 6, 1]
    gate.batcher.close()
    assert gate.rows == [4, 3, 2, 6, 1]


def test_a_batch_is_no_larger_than_the_model_takes(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate(max_batch=1000)
    answers = [gate.batcher.submit(model, model.check_inputs(inputs(40))) for _ in range(2)]
    gate.release.set()
    assert [answer.result()["sum"].shape[0] for answer in answers] == [40, 40]
    gate.batcher.close()
    assert gate.rows == [40, 40]


def test_requests_of_two_models_do_not_mix(
    model: CompiledModel, bundles: dict[str, Path], inputs: MakeInputs, reference: Reference
) -> None:
    gate = _Gate()
    arrays = inputs(2)
    with runtime.load(bundles["2"]) as other:
        first = gate.batcher.submit(model, model.check_inputs(arrays))
        second = gate.batcher.submit(other, other.check_inputs(arrays))
        gate.release.set()
        for version, answer in (("1", first), ("2", second)):
            np.testing.assert_allclose(answer.result()["sum"], reference(version, arrays)["sum"], rtol=1e-5, atol=1e-6)
        gate.batcher.close()
    assert gate.rows == [2, 2]


def test_a_request_waits_for_others_until_the_batch_is_full(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate(max_batch=2, max_delay=60.0)
    gate.release.set()
    first = gate.batcher.submit(model, model.check_inputs(inputs(1)))
    second = gate.batcher.submit(model, model.check_inputs(inputs(1)))
    assert [answer.result(30)["sum"].shape[0] for answer in (first, second)] == [1, 1]
    gate.batcher.close()
    assert gate.rows == [2]


def test_a_hurried_batcher_waits_for_nobody(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate(max_delay=60.0)
    gate.release.set()
    answer = gate.batcher.submit(model, model.check_inputs(inputs(1)))
    gate.batcher.hurry()
    assert answer.result(30)["sum"].shape == (1, 4)
    gate.batcher.close()


def test_closing_runs_the_requests_that_wait(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate()
    answer = gate.batcher.submit(model, model.check_inputs(inputs(1)))
    assert not answer.done()
    gate.release.set()
    gate.batcher.close()
    # The thread has ended: a request that it skipped would never be answered.
    assert answer.result(0)["sum"].shape == (1, 4)


def test_an_error_reaches_its_requests_and_the_thread_goes_on(model: CompiledModel, inputs: MakeInputs) -> None:
    gate = _Gate()

    def fail() -> None:
        raise BundleError("no")

    failed = gate.batcher.call(fail)
    # The checks would refuse these inputs; without them the library itself does.
    wrong = gate.batcher.submit(model, {name: array[:, None] for name, array in inputs(2).items()})
    right = gate.batcher.submit(model, model.check_inputs(inputs(1)))
    gate.release.set()
    assert isinstance(failed.exception(), BundleError)
    assert wrong.exception() is not None
    assert right.result()["sum"].shape == (1, 4)
    gate.batcher.close()


def test_more_requests_than_may_wait_are_refused(
    model: CompiledModel, inputs: MakeInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "QUEUE_LIMIT", 2)
    gate = _Gate()
    started = threading.Event()
    gate.release.set()
    gate.release = threading.Event()
    gate.batcher.call(lambda: started.set() or gate.release.wait())
    started.wait()
    answers = [gate.batcher.submit(model, model.check_inputs(inputs(1))) for _ in range(2)]
    with pytest.raises(OverloadedError):
        gate.batcher.submit(model, model.check_inputs(inputs(1)))
    gate.release.set()
    assert [answer.result()["sum"].shape for answer in answers] == [(1, 4), (1, 4)]
    gate.batcher.close()
