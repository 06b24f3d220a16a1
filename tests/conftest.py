"""Which tests share a process when `make test` runs them on two: those of a file, and all that release models."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by file, those of `flows` together: they share a Prefect server and a trained model."""
    for item in items:
        group = item.path.parent if item.path.parent.name == "flows" else item.path
        item.add_marker(pytest.mark.xdist_group(group.name))
