"""The document of a release: what it says of its own origin."""

from pathlib import Path

import pytest

from support.releases import make_release
from tasks.export import ExportResult
from tasks.publish import keep_published_origin, release_document
from tasks.track import TrackResult
from tasks.train import TrainResult
from tvmflow.documents.training import Training
from tvmflow.errors import StoreError
from tvmflow.spec import parse
from tvmflow.store import ReleaseStore
from tvmflow.store.config import StoreConfig
from tvmflow.workspace import Artifact, Sources, Workspace

_FILE = Artifact(name="file", sha256="a" * 64, size=1)


def test_a_retuned_release_names_the_training_of_its_weights_and_the_code_as_it_is_now(tmp_path: Path) -> None:
    training = Training(function="train:fit", arguments={"lr": 0.1}, files={"data.csv": "b" * 64})
    before = make_release("net", "1")
    code = {"train.py": "1" * 64, "model.py": "9" * 64}
    origin = before.provenance.model_copy(update={"training": training, "code": code})
    trained = TrainResult.of_release(_FILE, before.model_copy(update={"provenance": origin}))
    exported = ExportResult(
        onnx=_FILE, samples=_FILE, undecided=_FILE, golden=0, inputs=(), outputs=(), max_abs_error=None, opset=18,
        sources=Sources(
            files={"model.py": "2" * 64, "/home/me/own/layers.py": "3" * 64},
            names={"/home/me/own/layers.py": "own.layers"},
        ),
    )  # fmt: skip
    tracked = TrackResult(run_id="r", model="net", version="2", created_at="", packages={"six": "1.17"})
    spec = parse(
        {"name": "net", "model": {"factory": "model:create"}, "inputs": [{"name": "x", "shape": [1]}]}, tmp_path
    )
    document = release_document(spec, Workspace(tmp_path / "state"), exported, trained, None, (), tracked)
    made = document.provenance
    assert (made.training, made.held_out, made.packages) == (training, None, {"six": "1.17"})
    assert made.code == {"model.py": "2" * 64, "own.layers": "3" * 64, "train.py": "1" * 64}
    assert TrainResult.of_release(_FILE, before) == TrainResult(weights=_FILE)


def test_a_change_of_code_that_makes_no_new_version_leaves_what_is_published_as_it_is(tmp_path: Path) -> None:
    store, origin = ReleaseStore(StoreConfig("tvmflow", folder=tmp_path)), make_release().provenance
    origins = [origin.model_copy(update={"code": {"model.py": digit * 64}, "packages": {}}) for digit in "12"]
    first, again = (make_release("net", "1", provenance=item) for item in origins)
    store.publish(first, [])
    with pytest.raises(StoreError, match="already published"):
        store.publish(again, [])
    assert keep_published_origin(first, first) == first
    store.publish(keep_published_origin(again, store.get_release("net", "1")), [])
    assert store.get_release("net", "1") == first
