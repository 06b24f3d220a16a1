"""Release files that name registered models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a release file of a registered model, with further sections, and returns its path."""

    def write_release_file(
        name: str, source: str | None = "models:/net@candidate", file: str | None = None, **more: Any
    ) -> Path:
        model = {"mlflow": source} if source else {"factory": "model:create"}
        inputs = [] if source else [{"name": "x", "shape": [1, 4]}]
        path = tmp_path / f"{file or name}.yaml"
        path.write_text(yaml.safe_dump({"name": name, "model": model, "inputs": inputs, **more}))
        return path

    return write_release_file
