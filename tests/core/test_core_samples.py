"""Samples: every kind, repeatable by seed, through the whole range of sizes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow import npz, samples
from tvmflow.errors import SpecError
from tvmflow.spec import Dimension, Input

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """One sample of one input x."""

    def one(
        kind: dict[str, Any],
        shape: tuple[int | str, ...] = (4, 25),
        dtype: str = "float32",
        index: int = 0,
        seed: int = 0,
    ) -> Any:
        item = Input.model_validate({"name": "x", "shape": shape, "dtype": dtype, "samples": kind})
        return samples.make([item], {}, index, seed, tmp_path)["x"]

    return one


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `sampling` beside the release file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sampling.py").write_text(
        "import numpy as np\n"
        "def good(shape, seed): return np.full(shape, seed, np.float32)\n"
        "def wrong_shape(shape, seed): return np.zeros((1, *shape), np.float32)\n"
        "def wrong_dtype(shape, seed): return np.zeros(shape)\n"
        "def nothing(shape, seed): return None\n"
        "def fails(shape, seed): raise RuntimeError('no data\\nat all')\n"
        "number = 3\n"
    )
    yield tmp_path
    sys.modules.pop("sampling", None)


def test_ones_are_ones(make: Make) -> None:
    assert (make({"kind": "ones"}, dtype="int64") == np.ones((4, 25), np.int64)).all()


def test_normal_has_the_mean_and_deviation_asked_for(make: Make) -> None:
    array = make({"kind": "normal", "mean": 5, "std": 0.1}, shape=(1000,))
    assert array.dtype == np.float32
    assert abs(array.mean() - 5) < 0.02
    assert 0.08 < array.std() < 0.12


def test_uniform_stays_between_its_bounds(make: Make) -> None:
    array = make({"kind": "uniform", "low": -3, "high": -1}, shape=(1000,), dtype="float64")
    assert -3 <= array.min() < -2.9
    assert -1.1 < array.max() < -1


def test_uniform_is_between_zero_and_one_by_default(make: Make) -> None:
    array = make({"kind": "uniform"}, shape=(1000,))
    assert 0 <= array.min() < 0.1
    assert 0.9 < array.max() <= 1


def test_integers_go_up_to_the_bound_without_it(make: Make) -> None:
    array = make({"kind": "integers", "low": 2, "high": 5}, shape=(100,), dtype="int64")
    assert array.dtype == np.int64
    assert set(array.tolist()) == {2, 3, 4}


def test_lengths_are_those_of_the_items_of_other_inputs(tmp_path: Path) -> None:
    text = Input(name="text", shape=("batch", "length", 2), dtype="float32")
    lengths = Input.model_validate(
        {"name": "lengths", "shape": ["batch"], "dtype": "int64", "samples": {"kind": "lengths"}}
    )
    for length in (1, 3):
        arrays = samples.make([lengths, text], {}, 0, 0, tmp_path, {"batch": 100, "length": length})
        assert arrays["lengths"].dtype == np.int64
        assert set(arrays["lengths"].tolist()) == {1, 2, *range(1, length + 1)}


def test_truth_values_come_as_such(make: Make) -> None:
    array = make({"kind": "integers", "low": 0, "high": 2}, dtype="bool")
    assert array.dtype == np.bool_
    assert array.any()
    assert not array.all()


@pytest.mark.parametrize("kind", [{"kind": "normal"}, {"kind": "uniform"}, {"kind": "integers", "low": 0, "high": 9}])
def test_the_same_seed_gives_the_same_sample(make: Make, kind: dict[str, Any]) -> None:
    assert (make(kind, seed=3) == make(kind, seed=3)).all()
    assert not (make(kind, seed=3) == make(kind, seed=4)).all()
    assert not (make(kind, seed=3, index=0) == make(kind, seed=3, index=1)).all()


def test_two_inputs_of_one_sample_differ(tmp_path: Path) -> None:
    sample = samples.make([Input(name=name, shape=(9,)) for name in "ab"], {}, 0, 0, tmp_path)
    assert not (sample["a"] == sample["b"]).any()


def test_a_function_is_given_shape_and_seed(make: Make, functions: Path) -> None:
    array = make({"kind": "function", "function": "sampling:good"}, shape=(2, 3), seed=5, index=2)
    assert (array == np.full((2, 3), 7, np.float32)).all()


BAD_FUNCTIONS = [
    ("wrong_shape", r"samples of input 'x' have shape \[1, 4, 25\], expected \[4, 25\]"),
    ("wrong_dtype", "samples of input 'x' are float64, expected float32"),
    ("nothing", r"samples of input 'x' have shape \[\]"),
    ("fails", "'sampling:fails' raised RuntimeError: no data$"),
    ("absent", "module 'sampling' has no 'absent'"),
    ("number", "'sampling:number' is a int, not a function"),
]


@pytest.mark.parametrize(("name", "message"), BAD_FUNCTIONS)
def test_a_function_that_does_not_fit_is_one_sentence(make: Make, functions: Path, name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make({"kind": "function", "function": f"sampling:{name}"})


def test_a_missing_module_is_named(make: Make) -> None:
    with pytest.raises(SpecError, match="there is no module 'no_such_module' beside the release file"):
        make({"kind": "function", "function": "no_such_module:f"})


def test_arrays_of_a_file_are_taken_by_the_inputs_name_or_the_key(make: Make, tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones((2, 3), np.float32)}
    npz.write(tmp_path / "data.npz", arrays)
    assert (make({"kind": "npz", "file": "data.npz"}, shape=(2, 3)) == arrays["x"]).all()
    assert (make({"kind": "npz", "file": "data.npz", "key": "y"}, shape=(2, 3)) == arrays["y"]).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 24), np.float32)}, r"have shape \[4, 24\], expected \[4, 25\]"),
        ({"x": np.zeros((4, 25))}, "are float64, expected float32"),
        ({"y": np.zeros(3), "z": np.zeros(3)}, "holds no 'x', only y, z"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(
    make: Make, tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    npz.write(tmp_path / "data.npz", arrays)
    with pytest.raises(SpecError, match=message):
        make({"kind": "npz", "file": "data.npz"})


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"no arrays", b"\x93NUMPY"])
def test_a_file_that_is_none_is_one_sentence(make: Make, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(data)
    with pytest.raises(SpecError, match=r"data\.npz' is no readable \.npz"):
        make({"kind": "npz", "file": "data.npz"})


@pytest.fixture
def first_sizes() -> Callable[[Dimension], list[int]]:
    """The sizes of one symbolic dimension in the first eight samples."""

    def sizes(dimension: Dimension) -> list[int]:
        item = Input(name="x", shape=("batch",))
        return [samples.choose_sizes([item], {"batch": dimension}, index)["batch"] for index in range(8)]

    return sizes


FirstSizes = Callable[[Dimension], list[int]]


def test_the_first_samples_have_the_sizes_that_are_measured(first_sizes: FirstSizes) -> None:
    assert first_sizes(Dimension(max=16, tune=4, measure=(2, 7, 3)))[:3] == [2, 7, 3]


def test_without_sizes_to_measure_the_first_sample_has_the_size_to_tune_at(first_sizes: FirstSizes) -> None:
    assert first_sizes(Dimension(max=16, tune=4))[0] == 4


def test_samples_reach_both_ends_the_tuned_and_an_odd_size(first_sizes: FirstSizes) -> None:
    assert set(first_sizes(Dimension(min=1, max=16, tune=4, measure=(2,)))) == {1, 2, 4, 5, 16}


def test_a_far_upper_end_is_not_run(first_sizes: FirstSizes) -> None:
    assert max(first_sizes(Dimension(min=1, max=4096, tune=4))) < 4096


def test_sizes_stay_in_a_narrow_range(first_sizes: FirstSizes) -> None:
    assert set(first_sizes(Dimension(min=3, max=4))) == {3, 4}


def test_a_dimension_without_bounds_is_tried_beyond_its_typical_size(first_sizes: FirstSizes) -> None:
    assert first_sizes(Dimension())[0] == 1
    assert max(first_sizes(Dimension())) > 1


def test_a_fixed_dimension_keeps_its_size(first_sizes: FirstSizes) -> None:
    assert set(first_sizes(Dimension(min=3, max=3))) == {3}


def test_a_symbolic_dimension_has_one_size_in_all_inputs(tmp_path: Path) -> None:
    inputs = [Input(name="a", shape=("batch", 2)), Input(name="b", shape=(3, "batch"))]
    for index in range(4):
        sample = samples.make(inputs, {"batch": Dimension(max=8)}, index, 0, tmp_path)
        assert sample["a"].shape[0] == sample["b"].shape[1]


def test_sizes_can_be_given(tmp_path: Path) -> None:
    sample = samples.make_at_sizes([Input(name="a", shape=("batch", 2))], {"batch": 7}, 0, tmp_path)
    assert sample["a"].shape == (7, 2)


def test_samples_come_back_as_they_were_kept(tmp_path: Path) -> None:
    pairs = [
        ({"a/b": np.ones(2), "c:d": np.zeros((), np.int64)}, {"output:x": np.arange(index, dtype=np.float32)})
        for index in range(12)
    ]
    samples.save(tmp_path / "kept.npz", pairs)
    loaded = samples.load(tmp_path / "kept.npz")
    assert len(loaded) == 12
    for (inputs, outputs), (kept_inputs, kept_outputs) in zip(pairs, loaded, strict=True):
        assert list(inputs) == list(kept_inputs)
        assert all((inputs[name] == kept_inputs[name]).all() for name in inputs)
        assert (outputs["output:x"] == kept_outputs["output:x"]).all()


def test_arrays_are_written_under_any_name(tmp_path: Path) -> None:
    arrays = {name: np.array([index], np.int32) for index, name in enumerate(("file", "args", "allow_pickle", "a/b"))}
    npz.write(tmp_path / "any.npz", arrays)
    assert {name: array.tolist() for name, array in npz.read(tmp_path / "any.npz").items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        npz.read(tmp_path / "objects.npz")
