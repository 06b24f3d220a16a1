"""Sizes of free dimensions are found by trial."""

from tvmflow.dimensions import Sizes, find_dimensions
from tvmflow.spec import Dimension, Input


def _takes(sizes: Sizes) -> bool:
    """Whether a model runs that takes equal batches in two inputs and 40 frames at least."""
    return sizes["batch"] == sizes["states"] and sizes["frames"] >= 40


def test_dimensions_that_must_be_equal_shrink_together() -> None:
    inputs = (Input(name="x", shape=("batch", "frames")), Input(name="state", shape=(2, "states", 8)))
    ranges = find_dimensions(inputs, {}, _takes)
    one = Dimension(min=1, measure=(1,))
    assert ranges == {"batch": one, "states": one, "frames": Dimension(min=40, measure=(48,))}


def test_dimensions_of_one_size_by_chance_shrink_alone() -> None:
    inputs = (Input(name="x", shape=(1, "high", "wide")),)
    ranges = find_dimensions(inputs, {}, lambda sizes: sizes["high"] >= 7 and sizes["wide"] >= 5)
    assert ranges == {"high": Dimension(min=7, measure=(8,)), "wide": Dimension(min=5, measure=(8,))}


def test_a_model_that_runs_at_no_size_has_no_ranges() -> None:
    assert find_dimensions((Input(name="x", shape=("batch", 4)),), {}, lambda sizes: False) is None
