"""The catalogue: which flow run an alias set in MLflow starts, by the release files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.errors import SettingsError, SpecError
from tvmflow.triggers import Alias, load

Write = Callable[..., Path]


def test_the_alias_that_a_release_file_names_asks_for_a_release(write: Write) -> None:
    file = write("digits")
    request = load([file]).find_request(Alias("net", "candidate"), "7")
    assert request is not None
    assert (request.deployment, request.parameters) == ("release/digits", {"file": str(file)})
    assert request.tag == "source:net/7"


@pytest.mark.parametrize("alias", ["production", "production-wanted"])
def test_a_channel_of_the_compiled_model_asks_for_a_promotion(write: Write, alias: str) -> None:
    catalogue = load([write("digits", channels={"staging": {}, "production": {}})])
    request = catalogue.find_request(Alias("digits", alias), "3")
    assert request is not None
    assert request.deployment == "promote/digits"
    expected = {"name": "digits", "version": "3", "channel": "production"}
    assert {key: request.parameters[key] for key in expected} == expected
    assert catalogue.find_request(Alias("digits", "champion"), "3") is None


def test_a_file_without_channels_promotes_to_any(write: Write) -> None:
    request = load([write("digits")]).find_request(Alias("digits", "anything"), "1")
    assert request is not None
    assert request.parameters["channel"] == "anything"


def test_the_compiled_model_may_have_another_name_than_the_releases(write: Write) -> None:
    catalogue = load([write("digits", registry={"model": "digits-tvm"})])
    request = catalogue.find_request(Alias("digits-tvm", "production"), "3")
    assert request is not None
    assert request.parameters["name"] == "digits"
    assert catalogue.find_request(Alias("digits", "production"), "3") is None


def test_a_version_that_retraining_registered_is_released_by_an_alias_of_the_channels_name(write: Write) -> None:
    task = {"dataset": "data:held_out"}
    file = write("digits", None, train={"function": "train:train"}, retrain={}, validate={"task": task})
    request = load([file]).find_request(Alias("digits-source", "production"), "7")
    assert request is not None
    assert request.parameters == {"file": str(file), "source": "digits-source/7"}
    assert (request.deployment, request.tag) == ("release/digits", "source:digits-source/7")
    assert load([file]).find_request(Alias("digits-source", "staging"), "7") is None


@pytest.mark.parametrize("alias", [Alias("net", "production"), Alias("other", "candidate")])
def test_other_aliases_and_models_are_not_managed(write: Write, alias: Alias) -> None:
    assert load([write("digits")]).find_request(alias, "1") is None


def test_a_model_that_is_named_by_version_or_built_here_has_no_alias_that_releases_it(write: Write) -> None:
    catalogue = load([write("pinned", "models:/net/3"), write("built", None)])
    assert [entry.source_alias for entry in catalogue.entries] == [None, None]
    assert catalogue.find_request(Alias("net", "3"), "3") is None


@pytest.mark.parametrize(
    ("second", "claimed"),
    [
        ({"name": "digits", "source": "models:/b@x"}, "name 'digits'"),
        ({"name": "b", "source": "models:/b@x", "registry": {"model": "digits"}}, "registered model 'digits'"),
        ({"name": "b"}, "source 'net@candidate'"),
    ],
)
def test_two_files_that_claim_the_same_are_refused_by_name(write: Write, second: dict, claimed: str) -> None:
    first, other = write("digits"), write(**second, file="second")
    with pytest.raises(SettingsError) as refusal:
        load([first, other])
    assert claimed in str(refusal.value)
    assert str(first) in str(refusal.value)
    assert str(other) in str(refusal.value)


def test_a_model_that_one_file_releases_is_no_source_of_another(write: Write) -> None:
    with pytest.raises(SettingsError, match="whose versions are the releases of"):
        load([write("digits"), write("b", "models:/digits@production")])


def test_the_same_file_twice_is_one(write: Write) -> None:
    file = write("digits")
    assert len(load([file, file]).entries) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.yaml"):
        load([tmp_path / "gone.yaml"])
