"""The modules of the example that a test module names."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Iterator[dict[str, ModuleType]]:
    """The modules of the example `EXAMPLE` of the test module, by name.

    They are forgotten afterwards: every example has a `model`.
    """
    folder = EXAMPLES / request.module.EXAMPLE
    names = [path.stem for path in folder.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: import_module(name) for name in names}
        for name in names:
            sys.modules.pop(name, None)
