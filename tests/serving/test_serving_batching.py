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
from tvmflow.serving.batching import Batcher, OverloadedError, batch_dimension

MakeInputs = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[CompiledModel]:
    with runtime.load(bundle) as loaded:
        yield loaded


class _Held:
    """A batcher whose thread is held while requests are queued, and the sizes of the batches that ran."""

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
    held = _Held()
    sizes = [1, 3, 2, 1]
    asked = [inputs(size, seed) for seed, size in enumerate(sizes)]
    running = [held.batcher.submit(model, model.check_inputs(arrays)) for arrays in asked]
    held.release.set()
    for arrays, answer in zip(asked, running, strict=True):
        got, alone, wanted = answer.result(), model(**arrays), reference("1", arrays)
        np.testing.assert_array_equal(got["doubled"], wanted["doubled"])
        np.testing.assert_allclose(got["sum"], wanted["sum"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got["sum"], alone["sum"], rtol=1e-6, atol=1e-6)
    held.batcher.close()
    assert held.rows == [7]


def test_a_batch_is_no_larger_than_allowed_and_keeps_the_order(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held(max_batch=4)
    running = [held.batcher.submit(model, model.check_inputs(inputs(size))) for size in (2, 2, 3, 2, 6, 1)]
    held.release.set()
    assert [answer.result()["sum"].shape[0] for answer in running] == [2, 2, 3, 2, 6, 1]
    held.batcher.close()
    assert held.rows == [4, 3, 2, 6, 1]


def test_a_batch_is_no_larger_than_the_model_takes(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held(max_batch=1000)
    running = [held.batcher.submit(model, model.check_inputs(inputs(40))) for _ in range(2)]
    held.release.set()
    assert [answer.result()["sum"].shape[0] for answer in running] == [40, 40]
    held.batcher.close()
    assert held.rows == [40, 40]


def test_requests_of_two_models_do_not_mix(
    model: CompiledModel, bundles: dict[str, Path], inputs: MakeInputs, reference: Reference
) -> None:
    held = _Held()
    arrays = inputs(2)
    with runtime.load(bundles["2"]) as other:
        first = held.batcher.submit(model, model.check_inputs(arrays))
        second = held.batcher.submit(other, other.check_inputs(arrays))
        held.release.set()
        for version, answer in (("1", first), ("2", second)):
            np.testing.assert_allclose(answer.result()["sum"], reference(version, arrays)["sum"], rtol=1e-5, atol=1e-6)
        held.batcher.close()
    assert held.rows == [2, 2]


def test_a_request_waits_for_others_until_the_batch_is_full(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held(max_batch=2, max_delay=60.0)
    held.release.set()
    first = held.batcher.submit(model, model.check_inputs(inputs(1)))
    second = held.batcher.submit(model, model.check_inputs(inputs(1)))
    assert [answer.result(30)["sum"].shape[0] for answer in (first, second)] == [1, 1]
    held.batcher.close()
    assert held.rows == [2]


def test_a_hurried_batcher_waits_for_nobody(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held(max_delay=60.0)
    held.release.set()
    answer = held.batcher.submit(model, model.check_inputs(inputs(1)))
    held.batcher.hurry()
    assert answer.result(30)["sum"].shape == (1, 4)
    held.batcher.close()


def test_closing_runs_what_waits(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held()
    answer = held.batcher.submit(model, model.check_inputs(inputs(1)))
    assert not answer.done()
    held.release.set()
    held.batcher.close()
    # The thread has ended: what it left undone would never be answered.
    assert answer.result(0)["sum"].shape == (1, 4)


def test_an_error_reaches_its_requests_and_the_thread_goes_on(model: CompiledModel, inputs: MakeInputs) -> None:
    held = _Held()

    def fail() -> None:
        raise BundleError("no")

    failed = held.batcher.call(fail)
    # Past the checks, as no request can come: the library itself refuses it.
    wrong = held.batcher.submit(model, {name: array[:, None] for name, array in inputs(2).items()})
    right = held.batcher.submit(model, model.check_inputs(inputs(1)))
    held.release.set()
    assert isinstance(failed.exception(), BundleError)
    assert wrong.exception() is not None
    assert right.result()["sum"].shape == (1, 4)
    held.batcher.close()


def test_more_requests_than_may_wait_are_refused(
    model: CompiledModel, inputs: MakeInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "QUEUE_LIMIT", 2)
    held = _Held()
    started = threading.Event()
    held.release.set()
    held.release = threading.Event()
    held.batcher.call(lambda: started.set() or held.release.wait())
    started.wait()
    accepted = [held.batcher.submit(model, model.check_inputs(inputs(1))) for _ in range(2)]
    with pytest.raises(OverloadedError):
        held.batcher.submit(model, model.check_inputs(inputs(1)))
    held.release.set()
    assert [answer.result()["sum"].shape for answer in accepted] == [(1, 4), (1, 4)]
    held.batcher.close()
