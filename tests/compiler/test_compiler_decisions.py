"""The decisions of a build: the option that is taken, and the record of what was decided."""

import pytest
import tvm

from tvmflow.compiler.choices import Choices, Decisions, Site, shape_text

TILES = {"small": 1, "large": 2, "huge": 3}


def test_a_shape_is_written_with_its_sizes_and_the_names_of_its_symbols() -> None:
    sizes = [tvm.tirx.IntImm("int64", 56), tvm.tirx.Var("batch", "int64"), 64]
    assert shape_text(sizes) == "56xbatchx64"
    assert shape_text([]) == ""


@pytest.mark.parametrize(("override", "value"), [(None, 1), ("small", 1), ("large", 2), ("huge", 3), ("tiny", 1)])
def test_the_first_option_is_taken_unless_another_one_is_named(override: str | None, value: int) -> None:
    choices = Choices({} if override is None else {"tile: conv 1x8": override, "tile: conv 1x9": "huge"})
    assert choices.choose("tile", "conv 1x8", TILES) == value
    assert choices.overrides_cost_model("tile: conv 1x8") == (override in ("large", "huge"))


def test_a_decision_is_recorded_with_its_options_and_parts() -> None:
    choices = Choices({"edge: conv": "far"})
    assert choices.about("conv").choose("edge", {"near": "n", "far": "f"}, ("pad", "crop")) == "f"
    Decisions(choices, "pool").choose("tile", TILES)
    assert choices.sites == {
        "edge: conv": Site("edge", "conv", ("near", "far"), ("pad", "crop")),
        "tile: pool": Site("tile", "pool", ("small", "large", "huge"), ()),
    }
    assert {key: site.key for key, site in choices.sites.items()} == {key: key for key in choices.sites}


def test_a_decision_that_the_build_did_not_meet_overrides_nothing() -> None:
    choices = Choices({"tile: conv": "large"})
    assert not choices.overrides_cost_model("tile: conv")
    assert not choices.overrides_cost_model("tile: pool")
    choices.choose("tile", "pool", TILES)
    assert not choices.overrides_cost_model("tile: pool")


def test_builds_do_not_share_their_decisions() -> None:
    first, second = Choices(), Choices()
    first.choose("tile", "conv", TILES)
    assert second.sites == {}
