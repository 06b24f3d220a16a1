"""Errors that cross processes as data: each comes back with its class, message and fields."""

import inspect
import json

import pytest

from tvmflow import errors
from tvmflow.errors import BuildError, OptionError, SpecError, TvmflowError, from_data, to_data

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, TvmflowError)]


class ColumnError(SpecError):
    """An error of another module, with a constructor and fields of its own."""

    def __init__(self, file: str, column: int) -> None:
        super().__init__(f"{file} has no column {column}")
        self.file = file
        self.column = column


def across(error: TvmflowError) -> TvmflowError:
    return from_data(json.loads(json.dumps(to_data(error))))


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_of_each_class_comes_back_as_it_was(kind: type[TvmflowError]) -> None:
    error = across(kind("größe 'x': expected 3"))
    assert type(error) is kind
    assert str(error) == "größe 'x': expected 3"
    assert error.exit_code == kind.exit_code


def test_every_class_of_the_tree_is_tested() -> None:
    assert {TvmflowError, BuildError, OptionError} < set(CLASSES)
    assert len(CLASSES) >= 20


def test_the_fields_of_an_error_come_back() -> None:
    error = BuildError("no linker")
    error.columns = [1, 2]  # type: ignore[attr-defined]
    error.stream = object()  # type: ignore[attr-defined]  # No JSON value, so it stays behind.
    assert vars(across(error)) == {"columns": [1, 2]}


def test_an_error_of_an_unknown_class_comes_back_as_its_nearest_known_base() -> None:
    error = across(ColumnError("release.yaml", 3))
    assert type(error) is SpecError
    assert str(error) == "release.yaml has no column 3"
    assert vars(error) == {"file": "release.yaml", "column": 3}


def test_a_name_that_is_no_error_is_passed_over() -> None:
    data = {"types": ["Mapping", "from_data", 7, "SystemExit"], "message": "m", "fields": {}}
    assert type(from_data(data)) is TvmflowError


@pytest.mark.parametrize(
    "data",
    [{}, {"types": ["BuildError"], "message": "m"}, {"types": 3, "message": "m", "fields": {}}, "BuildError", None, 7],
)
def test_anything_else_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="not the data of an error"):
        from_data(data)  # type: ignore[arg-type]
