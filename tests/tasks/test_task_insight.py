"""What the report shows of the samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.insight import InsightJob, _compare, _describe
from tvmflow import samples
from tvmflow.workspace import Workspace


@pytest.mark.parametrize("shape", [(), (1,), (1, 3)])
def test_outputs_of_every_rank_are_compared(shape: tuple[int, ...], workspace: Workspace, tmp_path: Path) -> None:
    rate, score = np.array(16000), np.full(shape, 0.5, "float32")
    samples.save(tmp_path / "samples.npz", [({"rate": rate}, {"score": score})] * 2)
    job = InsightJob.model_construct(
        home=workspace.folder,
        samples=workspace.keep(tmp_path / "samples.npz"),
        held_out=None,
        one_by_one=False,
        count=0,
    )

    def model(**inputs: Any) -> dict[str, Any]:
        return {"score": score + inputs["rate"] / np.float32(64000)}

    compared = list(_compare(job, model, lambda *_: None))
    assert [(index, error) for index, error, *_ in compared] == [(0, 0.25), (1, 0.25)]
    assert _describe(compared[0], None).inputs[0].values == "16000"
