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
    assert ranges == {"batch": one, "states": one, "frames": Dimension(min=40, measure=(192,))}


def test_dimensions_of_one_size_by_chance_shrink_alone() -> None:
    inputs = (Input(name="x", shape=(1, "high", "wide")),)
    ranges = find_dimensions(inputs, {}, lambda sizes: sizes["high"] >= 7 and sizes["wide"] >= 5)
    assert ranges == {"high": Dimension(min=7, measure=(256,)), "wide": Dimension(min=5, measure=(256,))}


def test_a_batch_that_grows_only_with_another_that_grows_alone_is_free() -> None:
    """The batch of a mask has a name of its own: it is broadcast, or equal to that of the tokens."""
    inputs = (Input(name="ids", shape=("n", "length")), Input(name="mask", shape=("m", "whole", "layers", "k")))

    def runs(sizes: Sizes) -> bool:
        return sizes["n"] in (1, sizes["m"]) and sizes["whole"] >= sizes["length"] and sizes["k"] == 4

    ranges = find_dimensions(inputs, {}, runs)
    assert ranges is not None
    assert {name: item.max for name, item in ranges.items() if item.max is not None} == {"k": 4}


def test_the_size_to_measure_is_no_single_frame_and_within_what_the_model_takes() -> None:
    inputs = (Input(name="x", shape=("batch", "frames", 40)), Input(name="y", shape=("batch", "bands")))
    ranges = find_dimensions(inputs, {}, lambda sizes: max(sizes.values()) <= 100)
    within = Dimension(min=1, measure=(64,))
    assert ranges == {"batch": Dimension(min=1, measure=(1,)), "frames": within, "bands": within}


def test_the_size_to_measure_of_wide_inputs_stays_small() -> None:
    inputs = (Input(name="x", shape=("batch", 4096, "frames")),)
    ranges = find_dimensions(inputs, {}, lambda sizes: True)
    assert ranges == {"batch": Dimension(min=1, measure=(1,)), "frames": Dimension(min=1, measure=(64,))}


def test_a_model_that_runs_at_no_size_has_no_ranges() -> None:
    assert find_dimensions((Input(name="x", shape=("batch", 4)),), {}, lambda sizes: False) is None


_DECODER = (
    Input(name="ids", shape=("batch", 1)),
    Input(name="mask", shape=("batch", "total")),
    Input(name="keys", shape=("batch", 4, "past", 8)),
    Input(name="values", shape=("batch", 4, "earlier", 8)),
)


def test_a_mask_of_one_more_than_the_earlier_tokens_is_found() -> None:
    def runs(sizes: Sizes) -> bool:
        return sizes["total"] == sizes["past"] + 1 == sizes["earlier"] + 1

    ranges = find_dimensions(_DECODER, {}, runs)
    past = Dimension(min=1, measure=(16,))
    batch, total = Dimension(min=1, measure=(1,)), Dimension(min=2, measure=(17,))
    assert ranges == {"batch": batch, "past": past, "earlier": past, "total": total}


def test_a_mask_as_long_as_earlier_and_new_tokens_together_is_found() -> None:
    inputs = tuple(Input(name=name, shape=("batch", name)) for name in ("new", "past", "all"))
    ranges = find_dimensions(inputs, {}, lambda sizes: sizes["all"] == sizes["new"] + sizes["past"])
    assert ranges is not None
    assert {name: item.min for name, item in ranges.items()} == {"all": 2, "batch": 1, "new": 1, "past": 1}


def test_a_dimension_that_only_must_be_larger_begins_beside_small_ones() -> None:
    def runs(sizes: Sizes) -> bool:
        return sizes["past"] == sizes["earlier"] < sizes["total"]

    ranges = find_dimensions(_DECODER, {}, runs)
    assert ranges is not None
    assert {name: item.min for name, item in ranges.items()} == {"batch": 1, "past": 1, "earlier": 1, "total": 2}


def test_many_layers_whose_earlier_tokens_have_names_of_their_own_are_found() -> None:
    layers = tuple(f"past_{layer}" for layer in range(40))
    inputs = (Input(name="mask", shape=(1, "total")), *(Input(name=name, shape=(1, name)) for name in layers))

    def runs(sizes: Sizes) -> bool:
        return {sizes[name] for name in layers} == {sizes["total"] - 1}

    ranges = find_dimensions(inputs, {}, runs)
    assert ranges is not None
    assert ranges["total"] == Dimension(min=2, measure=(17,))
    assert {ranges[name] for name in layers} == {Dimension(min=1, measure=(16,))}


def test_sizes_of_more_elements_than_memory_may_hold_are_not_tried() -> None:
    tried: list[Sizes] = []
    assert find_dimensions(_DECODER, {}, lambda sizes: tried.append(sizes) is not None) is None
    assert tried
    assert max(sizes["batch"] * sizes["past"] * 32 for sizes in tried) <= 1 << 24


def test_a_size_that_the_weights_fix_is_tried() -> None:
    inputs = (Input(name="x", shape=("batch", "channels", "length")),)

    def runs(sizes: Sizes) -> bool:
        return sizes["channels"] == 3 and sizes["length"] >= 5

    assert find_dimensions(inputs, {}, runs) is None
    ranges = find_dimensions(inputs, {}, runs, [80, 3])
    assert ranges is not None
    assert (ranges["channels"].min, ranges["length"].min) == (3, 5)
    assert (ranges["channels"].max, ranges["length"].max) == (3, None)


def test_a_size_beside_which_no_other_is_taken_ends_its_range() -> None:
    inputs = (Input(name="x", shape=("batch", "bands")), Input(name="state", shape=(2, "states", 8)))

    def runs(sizes: Sizes) -> bool:
        return sizes["batch"] == sizes["states"] and sizes["bands"] == 8

    ranges = find_dimensions(inputs, {}, runs)
    assert ranges is not None
    limits = {name: (item.min, item.max) for name, item in ranges.items()}
    assert limits == {"batch": (1, None), "states": (1, None), "bands": (8, 8)}


def test_many_batches_that_must_be_equal_take_few_runs() -> None:
    names = [f"batch_{place}" for place in range(40)]
    tried: list[Sizes] = []

    def runs(sizes: Sizes) -> bool:
        tried.append(sizes)
        return len({sizes[name] for name in names}) == 1

    ranges = find_dimensions(tuple(Input(name=name, shape=(name, 8)) for name in names), {}, runs)
    assert ranges == dict.fromkeys(names, Dimension(min=1, measure=(1,)))
    assert len(tried) < 100


def test_sizes_with_a_step_are_not_taken_for_single_ones() -> None:
    inputs = (Input(name="x", shape=("batch", "windows", "hops")),)

    def runs(sizes: Sizes) -> bool:
        return sizes["windows"] % 96 == 0 and sizes["hops"] % 16 == 0

    ranges = find_dimensions(inputs, {}, runs)
    assert ranges is not None
    assert {item.max for item in ranges.values()} == {None}


def test_a_model_that_runs_at_all_sizes_is_run_at_few() -> None:
    tried: list[Sizes] = []
    inputs = (Input(name="ids", shape=("batch", "length")),)
    ranges = find_dimensions(inputs, {}, lambda sizes: tried.append(sizes) is None)
    assert ranges == {"batch": Dimension(min=1, measure=(1,)), "length": Dimension(min=1, measure=(256,))}
    assert len(tried) <= 4
    assert sum(sizes["batch"] * sizes["length"] > 2 for sizes in tried) == 1
