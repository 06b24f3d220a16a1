"""`tvmflow init`: a new release file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow.spec import load

Command = Callable[..., Any]


def test_it_writes_a_release_file_named_after_its_folder(tvmflow: Command) -> None:
    Path("digits").mkdir()
    result = tvmflow("init", "digits/release.yaml")
    assert result.code == 0
    assert "tvmflow release digits/release.yaml" in result.stdout
    assert load(Path("digits/release.yaml")).name == "digits"


def test_without_a_name_the_file_is_release_yaml(tvmflow: Command) -> None:
    assert tvmflow("init").code == 0
    assert load(Path("release.yaml")).model.factory == "model:create"


def test_a_folder_whose_name_no_release_may_have_gives_one_like_it(tvmflow: Command) -> None:
    Path("my model: two").mkdir()
    assert tvmflow("init", "my model: two/release.yaml").code == 0
    assert load(Path("my model: two/release.yaml")).name == "my-model--two"


def test_the_name_can_be_given(tvmflow: Command) -> None:
    assert tvmflow("init", "--name", "2024").code == 0
    assert load(Path("release.yaml")).name == "2024"


def test_a_name_that_no_release_may_have_is_refused(tvmflow: Command) -> None:
    result = tvmflow("init", "--name", "my model")
    assert result.code == 2
    assert "'my model' must consist of up to 128 letters" in result.sentence
    assert not Path("release.yaml").exists()


def test_a_file_that_is_there_is_not_overwritten(tvmflow: Command) -> None:
    Path("release.yaml").write_text("mine")
    result = tvmflow("init")
    assert result.code == 2
    assert "--force" in result.sentence
    assert Path("release.yaml").read_text() == "mine"


def test_force_overwrites_it(tvmflow: Command) -> None:
    Path("release.yaml").write_text("mine")
    assert tvmflow("init", "--force").code == 0
    assert load(Path("release.yaml")).name


def test_a_place_that_cannot_be_written_is_reported(tvmflow: Command) -> None:
    assert "'absent/release.yaml' cannot be written (No such file" in tvmflow("init", "absent/release.yaml").sentence
