"""Promotion as a user does it: checks and gates decide, verdicts are kept, a channel goes back in one command."""

import getpass
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.bundle import keygen, public_key
from tvmflow.comparison.pairs import read_samples, write_samples

PERSON = f"{getpass.getuser()}@{socket.gethostname()}"
CHANNELS = {
    "staging": {"automatic": True},
    "after-staging": {"after": "staging", "gates": {"max_latency_ms": 1000, "max_metric_drop": 0.1}},
    "after-nothing": {"after": "empty"},
    "empty": {"automatic": True, "approval": "required"},
    "fast": {"gates": {"max_latency_ms": 1e-6}},
    "beside": {"gates": {"max_ratio_current": 3.0}},
    "judged": {"gates": {"max_metric_drop": 0.1, "min_metric": 0.4}},
    "good": {"gates": {"min_metric": 0.95}},
    "signed": {"signature": "required"},
    "rebuilt": {"rebuild": "required"},
    "rebuilt-too": {"rebuild": "required"},
    "manual": {"approval": "required"},
    "back": {},
    "wary": {},
    "any": {},
    "open": {},
    "two-people": {},
    "nobody": {},
}
DATA = """
import numpy as np


def held_out():
    return {{"x": np.ones((4, 256), np.float32)}}, np.zeros(4)


def score(outputs, labels):
    return {score}
"""
# The flow as `tvmflow promote` calls it, many times in one process.
SESSION = """
import json, os, sys
from flows.promote import promote
from tvmflow.errors import TvmflowError

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
for line in sys.stdin:
    job = json.loads(line)
    settings = job.pop("settings")
    os.environ.update(settings)
    try:
        answer = promote(**job)
    except TvmflowError as error:
        answer = {"refused": str(error), "code": error.exit_code}
    for name in settings:
        del os.environ[name]
    print(json.dumps(answer), file=answers)
"""


@dataclass(frozen=True)
class Shipped:
    """A machine that released two versions of a model: 1 is quick and scores 0.9, 2 is slow, signed and scores 0.5."""

    machine: Any
    session: "subprocess.Popen[str]"
    first: dict[str, Any]
    public_key: Path
    file: Path

    def promote(self, version: str, channel: str, *, settings: dict[str, str] | None = None, **options: Any) -> Any:
        job = {
            "name": "tiny",
            "version": version,
            "channel": channel,
            "who": "ann",
            "settings": settings or {},
            **options,
        }
        assert self.session.stdin is not None
        assert self.session.stdout is not None
        self.session.stdin.write(json.dumps(job) + "\n")
        self.session.stdin.flush()
        return json.loads(self.session.stdout.readline())

    def promoted(self, version: str, channel: str, **options: Any) -> dict[str, Any]:
        outcome = self.promote(version, channel, **options)
        assert "refused" not in outcome, outcome["refused"]
        return dict(outcome)

    def refused(self, version: str, channel: str, **options: Any) -> str:
        """The sentence of a promotion that is refused."""
        outcome = self.promote(version, channel, **options)
        assert outcome.get("code") == 3, outcome
        return str(outcome["refused"])

    def held(self, channel: str) -> tuple[str | None, str | None]:
        """The version that the channel's pointer is at, and the one that the alias is at."""
        document = self.machine.channel("tiny", channel)
        pointer = None if document is None else document.version
        alias = self.machine.mlflow.get_registered_model("tiny").aliases.get(channel)
        return pointer, None if alias is None else str(alias)

    def verdicts(self, channel: str) -> list[tuple[Any, dict[str, Any]]]:
        """The promotion runs in MLflow of a channel, the latest first, with their verdicts."""
        client = self.machine.mlflow
        experiment = client.get_experiment_by_name("tvmflow").experiment_id
        runs = client.search_runs(
            [experiment], f"tags.tvmflow.kind = 'promotion' and tags.tvmflow.channel = '{channel}'"
        )
        return [
            (run, json.loads(Path(client.download_artifacts(run.info.run_id, "verdict.json")).read_text()))
            for run in runs
        ]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory, machine: Any, make: Any) -> Iterator[Shipped]:
    from onnx import helper

    key = tmp_path_factory.mktemp("keys") / "key"
    keygen(key)
    answers = []
    for layers, score, settings in ((1, 0.9, {}), (64, 0.5, {"TVMFLOW_SIGNING_KEY": str(key)})):
        folder = tmp_path_factory.mktemp("model")
        (folder / "data.py").write_text(DATA.format(score=score))
        weights = {"w": np.full((256, 256), 1 / 256, np.float32)}
        names = ["x", *(f"h{layer}" for layer in range(layers - 1)), "y"]
        nodes = [helper.make_node("MatMul", [before, "w"], [after]) for before, after in pairwise(names)]
        make.onnx(folder, nodes, weights, ("batch", 256))
        task = {"dataset": "data:held_out", "metric": "data:score"}
        file = make.file(folder, channels=CHANNELS, validate={"samples": 1, "top1_agreement": None, "task": task})
        result = replace(machine, settings={**machine.settings, **settings}).release(file)
        assert result.code == 0, result.stderr
        answers.append(result.document)
    (key.parent / "session.py").write_text(SESSION)
    with (key.with_name("log")).open("w") as log:
        session = subprocess.Popen(
            [*machine.commands.stand_in, str(os.getpid()), "-m", "session"],
            env={**machine.environment, "PYTHONPATH": str(key.parent)},
            cwd=machine.home.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with session:
        yield Shipped(machine, session, answers[0], key.with_name("key.pub"), file)


def test_a_release_is_promoted_to_its_automatic_channels(shipped: Shipped) -> None:
    outcomes = {item["channel"]: item for item in shipped.first["promotions"]}
    assert set(outcomes) == {"staging", "empty"}
    assert (outcomes["staging"]["status"], outcomes["staging"]["from_version"]) == ("moved", None)
    assert outcomes["empty"]["status"] == "left"
    assert "tvmflow promote tiny 1 --channel empty --approve`" in outcomes["empty"]["told"]
    assert shipped.held("staging") == ("2", "2")
    assert shipped.held("empty") == (None, None)


@pytest.mark.long
def test_the_list_shows_which_channels_hold_a_release(shipped: Shipped) -> None:
    shipped.promoted("1", "any")
    holding = {release["version"]: release["held_by"] for release in shipped.machine.run("list", "--json").document}
    assert "any" in holding["1"]
    assert "staging" in holding["2"]
    table = shipped.machine.run("list", "tiny").stdout
    assert "staging" in next(line for line in table.splitlines() if " 2 " in line)


def test_a_promotion_moves_alias_and_channel_and_is_kept_with_its_figures(shipped: Shipped) -> None:
    outcome = shipped.promoted("1", "after-staging", why="a first try")
    assert (outcome["moved"], outcome["from_version"], outcome["status"]) == (True, None, "moved")
    assert shipped.held("after-staging") == ("1", "1")
    (move,) = shipped.machine.channel("tiny", "after-staging").moves
    assert (move.who, move.from_version, move.to_version, move.why) == ("ann", None, "1", "a first try")
    ((run, verdict),) = shipped.verdicts("after-staging")
    assert run.info.run_id == outcome["mlflow_run_id"]
    assert run.info.status == "FINISHED"
    assert {key: run.data.tags[f"tvmflow.{key}"] for key in ("name", "version", "verdict", "moved")} == {
        "name": "tiny", "version": "1", "verdict": "passed", "moved": "true",
    }  # fmt: skip
    assert [check["name"] for check in verdict["checks"]] == [
        "whole", "after", "name", "golden sample", "max_latency_ms", "max_metric_drop",
    ]  # fmt: skip
    assert 0 < verdict["checks"][4]["value"] <= 1000
    assert "after-staging" in verdict["checks"][5]["told"]

    again = shipped.promoted("1", "after-staging")
    assert (again["moved"], again["status"]) == (False, "unchanged")
    assert len(shipped.verdicts("after-staging")) == 1


def test_promoting_again_repairs_an_alias_that_is_elsewhere(shipped: Shipped) -> None:
    shipped.promoted("1", "any")
    shipped.machine.mlflow.set_registered_model_alias("tiny", "any", "2")
    assert shipped.promoted("1", "any")["status"] == "unchanged"
    assert shipped.held("any") == ("1", "1")

    # What an alias asked for is left once it asks for something else.
    left = shipped.promoted("2", "any", while_wanted=True)
    assert (left["moved"], left["status"]) == (False, "left")
    assert "tiny@any" in left["told"]
    assert shipped.held("any") == ("1", "1")
    shipped.machine.mlflow.set_registered_model_alias("tiny", "any-wanted", "2")
    assert shipped.promoted("2", "any", while_wanted=True)["moved"]
    assert shipped.held("any") == ("2", "2")
    assert "any-wanted" not in shipped.machine.mlflow.get_registered_model("tiny").aliases


def test_an_alias_that_is_set_by_hand_is_a_wish_and_by_policy_none(shipped: Shipped) -> None:
    shipped.promoted("1", "any")
    shipped.machine.mlflow.set_registered_model_alias("tiny", "any", "2")
    assert shipped.promoted("2", "any", while_wanted=True)["moved"]
    assert shipped.held("any") == ("2", "2")
    result = shipped.machine.run("channel", "set", "tiny", "any", "by_hand=refuse", "--why", "too many hands", "--json")
    assert result.code == 0, result.stderr
    shipped.machine.mlflow.set_registered_model_alias("tiny", "any", "1")
    left = shipped.promoted("1", "any", while_wanted=True)
    assert (left["status"], left["moved"]) == ("left", False)
    assert "tiny@any-wanted" in left["told"]
    assert shipped.held("any") == ("2", "2")


@pytest.mark.long
def test_a_release_meets_the_channels_policy_and_not_the_one_of_its_file(shipped: Shipped) -> None:
    """The release file asks nothing of `open`; somebody has set a gate that no release keeps."""
    shipped.promoted("1", "open")
    change = ("channel", "set", "tiny", "open", "gates.max_latency_ms=1e-6", "--why", "it must be quick", "--json")
    result = shipped.machine.run(*change)
    assert result.code == 0, result.stderr
    assert "max_latency_ms" in shipped.refused("2", "open")
    assert shipped.held("open") == ("1", "1")
    # The file's proposal takes effect when somebody applies it.
    wrong = shipped.machine.run("channel", "apply", shipped.file, "--channel", "nowhere")
    assert wrong.code == 2
    assert "'nowhere'" in wrong.sentence
    applied = shipped.machine.run("channel", "apply", shipped.file, "--channel", "open", "--json")
    assert applied.code == 0, applied.stderr
    assert shipped.promoted("2", "open")["moved"]
    changes = [event for event in shipped.machine.channel("tiny", "open").history if event.kind == "policy"]
    assert [(event.who, event.why) for event in changes] == [
        (PERSON, "it must be quick"), (PERSON, f"applied from {shipped.file.name}"),
    ]  # fmt: skip
    table = shipped.machine.run("channel", "show", "tiny").stdout.splitlines()
    assert "no conditions" in next(line for line in table if line.strip().startswith("open"))


@pytest.mark.long
def test_a_policy_that_cannot_be_is_refused(shipped: Shipped) -> None:
    for value in ("approval=maybe", "gates=1", "gates.max_latency_ms", "after=[", "a.b=1"):
        assert shipped.machine.run("channel", "set", "tiny", "nobody", value).code == 2, value
    assert shipped.machine.run("channel", "show", "tiny", "nobody").code == 1


def test_another_person_approves_and_an_older_wish_is_superseded(shipped: Shipped) -> None:
    shipped.machine.run("channel", "set", "tiny", "two-people", "approval=another", "--json")
    assert "--approve" in shipped.refused("1", "two-people")
    wish = shipped.machine.channel("tiny", "two-people").wish
    assert (wish.version, wish.who) == ("1", "ann")
    assert "another person than ann" in shipped.refused("1", "two-people", approved=True)
    assert shipped.held("two-people") == (None, None)
    shipped.promoted("1", "two-people", approved=True, who="bert", why="fine")
    (move,) = shipped.machine.channel("tiny", "two-people").moves
    assert (move.who, move.why) == ("ann", "approved by bert; fine")
    assert "--approve" in shipped.refused("2", "two-people")
    assert shipped.promoted("1", "two-people", who="bert")["status"] == "unchanged"
    end = shipped.machine.channel("tiny", "two-people").history[-1]
    assert (end.kind, end.version, end.outcome, end.who) == ("wish", "2", "superseded", "bert")
    history = shipped.machine.run("history", "tiny", "--channel", "two-people").stdout
    assert "superseded" in history


def _spoil_samples(shipped: Shipped, run: str, folder: Path) -> None:
    """Replace the kept times of a verdict by those of equal sides."""
    path = shipped.machine.mlflow.download_artifacts(run, "samples/max_ratio_current.npz", str(folder))
    equal = [pair.model_copy(update={"candidate": pair.baseline}) for pair in read_samples(Path(path))]
    write_samples(Path(path), equal)
    shipped.machine.mlflow.log_artifact(run, path, "samples")


def test_a_slower_release_is_refused_with_the_ratio_and_its_alias_is_put_back(shipped: Shipped, tmp_path: Path) -> None:
    first = shipped.promoted("1", "beside")
    last = first["checks"][-1]
    assert (last["name"], last["value"], last["passed"]) == ("max_ratio_current", None, True)
    shipped.machine.mlflow.set_registered_model_alias("tiny", "beside", "2")
    sentence = shipped.refused("2", "beside")
    assert [name for name in ("max_ratio_current allows 3", "1 on beside", "pairs") if name not in sentence] == []
    assert shipped.held("beside") == ("1", "1")
    run, verdict = shipped.verdicts("beside")[0]
    assert run.info.run_id in sentence
    assert (run.data.tags["tvmflow.verdict"], verdict["verdict"], verdict["from"]) == ("refused", "refused", "1")
    assert verdict["checks"][-1]["value"] > 3
    status = shipped.machine.run("status", "--json")
    assert status.code == 0, status.stderr
    (row,) = [row for row in status.document["channels"] if row["channel"] == "beside"]
    assert (row["name"], row["version"], "2" in row["newer"]) == ("tiny", "1", True)
    assert row["verdict"] == {"version": "2", "verdict": "refused", "reasons": verdict["reasons"]}
    assert "tvmflow verdict tiny 2 --channel beside" in [task["command"] for task in status.document["tasks"]]
    again = shipped.machine.run("verdict", "tiny", "2", "--channel", "beside", "--replay", "--json")
    assert again.code == 0, again.stderr
    assert (again.document["checks"], again.document["verdict"]) == (verdict["checks"], "refused")
    assert len(again.document["checks"][-1]["comparison"]["pairs"]) >= 9
    _spoil_samples(shipped, run.info.run_id, tmp_path)
    again = shipped.machine.run("verdict", "tiny", "2", "--channel", "beside", "--replay", "--json")
    document, error = map(json.loads, again.stdout.splitlines())
    assert (again.code, document["checks"][-1]["passed"]) == (3, True)
    assert "is decided otherwise" in error["error"]["message"]
    assert "max_ratio_current" in shipped.machine.mlflow.get_model_version("tiny", "2").tags["tvmflow.refused.beside"]


@pytest.mark.long  # tests/tasks/test_task_gate.py compares metrics.
def test_a_lower_metric_is_refused(shipped: Shipped) -> None:
    shipped.promoted("1", "judged")
    sentence = shipped.refused("2", "judged")
    assert [name for name in ("0.5000", "0.9000", "1 on judged", "max_metric_drop") if name not in sentence] == []
    assert shipped.held("judged") == ("1", "1")


def test_figures_out_of_bounds_are_refused_and_a_new_channels_alias_is_deleted(shipped: Shipped) -> None:
    for channel, gate, limit in (("good", "min_metric", "0.95"), ("fast", "max_latency_ms", "1e-06")):
        shipped.machine.mlflow.set_registered_model_alias("tiny", channel, "1")
        sentence = shipped.refused("1", channel)
        assert [name for name in (channel, gate, limit) if name not in sentence] == []
        assert shipped.held(channel) == (None, None)


def test_a_channel_that_comes_after_another_wants_it_to_have_held_the_release(shipped: Shipped) -> None:
    assert "empty" in shipped.refused("1", "after-nothing")
    assert shipped.held("after-nothing") == (None, None)


def test_a_release_that_is_not_whole_is_refused(shipped: Shipped) -> None:
    (digest,) = {
        target["bundle"]["sha256"] for item in shipped.machine.releases("tiny")[:1] for target in item["targets"]
    }
    with _damaged(shipped.machine.home / "s3" / "tvmflow" / "blobs" / "sha256" / digest):
        sentence = shipped.refused("1", "back")
    assert digest in sentence
    assert shipped.held("back") == (None, None)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        yield
    finally:
        path.write_bytes(content)


@pytest.mark.long
def test_a_channel_can_ask_for_bundles_that_are_the_same_when_built_again(shipped: Shipped) -> None:
    done = shipped.promoted("1", "rebuilt")
    (sentence,) = [check["told"] for check in done["checks"] if check["name"] == "rebuild"]
    assert sentence.startswith("target 'native' is the same when built again: ONNX file, ")
    assert "mod.so" in sentence


def test_a_channel_refuses_bundles_that_the_model_in_mlflow_does_not_give(shipped: Shipped, tmp_path: Path) -> None:
    run, client = shipped.first["mlflow_run_id"], shipped.machine.mlflow
    model = Path(client.download_artifacts(run, "model.onnx", str(tmp_path)))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "model.onnx"
    other.write_bytes(model.read_bytes().replace(b"MatMul", b"MatMuI"))
    client.log_artifact(run, str(other))
    try:
        assert "target 'native': " in shipped.refused("1", "rebuilt-too")
    finally:
        client.log_artifact(run, str(model))


def test_a_channel_for_signed_releases_takes_those_of_a_trusted_key(shipped: Shipped) -> None:
    assert "TVMFLOW_TRUSTED_KEYS" in shipped.refused("2", "signed")
    trusting = {"TVMFLOW_TRUSTED_KEYS": str(shipped.public_key)}
    assert "this machine has no key for it" in shipped.refused("2", "signed", settings=trusting)
    signing = {**trusting, "TVMFLOW_SIGNING_KEY": str(shipped.public_key.with_suffix(""))}
    assert "The release tiny 1 is not signed" in shipped.refused("1", "signed", settings=signing)
    assert "The release tiny 1 is not signed" in shipped.refused("1", "wary", settings=signing)
    outcome = shipped.promoted("2", "signed", settings=signing)
    sentences = [check["told"] for check in outcome["checks"]]
    assert "a trusted key has signed the statement on tiny 2" in sentences
    assert any("is signed with a trusted key" in sentence for sentence in sentences)
    assert shipped.held("signed") == ("2", "2")
    wary = replace(shipped.machine, settings={**shipped.machine.settings, **trusting})
    verdict = wary.run("verdict", "tiny", "2", "--channel", "signed", "--json")
    assert verdict.document["signed_by"] == public_key(shipped.public_key)
    unsigned = wary.run("verdict", "tiny", "1", "--channel", "staging", "--json")
    assert (unsigned.code, "The verdict on tiny 1 for staging is not signed" in unsigned.sentence) == (1, True)


def test_a_channel_that_needs_a_person_takes_approve_and_names_it(shipped: Shipped) -> None:
    command = ("promote", "tiny", "1", "--channel", "manual", "--json")
    result = shipped.machine.run(*command)
    assert result.code == 3
    assert "--approve" in result.sentence
    assert shipped.held("manual") == (None, None)
    assert shipped.verdicts("manual") == []
    assert "`tvmflow promote tiny 1 --channel manual --approve`" in shipped.refused("1", "manual")
    result = shipped.machine.run(*command, "--approve", "--why", "looks good")
    assert result.code == 0, result.stderr
    assert result.document["moved"]
    assert shipped.held("manual") == ("1", "1")
    ((_, verdict),) = shipped.verdicts("manual")
    assert verdict["approval"] == {"approve": True, "who": PERSON, "why": "looks good"}


def test_a_rollback_is_one_command_and_history_tells_it(shipped: Shipped) -> None:
    for version in ("1", "2"):
        shipped.promoted(version, "back")
    result = shipped.machine.run("rollback", "tiny", "--channel", "back", "--why", "it is slow", "--json")
    assert (result.code, result.document["version"], result.document["from_version"]) == (0, "1", "2")
    assert shipped.held("back") == ("1", "1")
    history = shipped.machine.run("history", "tiny", "--channel", "back").stdout.splitlines()
    moves = [line.split() for line in history if line.strip().startswith("20") and "refused" not in line]
    assert [words[2:5] for words in moves] == [["-", "1", "ann"], ["1", "2", "ann"], ["2", "1", PERSON]]
    assert " ".join(moves[2][5:]) == "rollback: it is slow"
    last = shipped.machine.run("rollback", "tiny", "--channel", "back")
    assert last.code == 1
    assert "before 1" in last.sentence


@pytest.mark.parametrize(
    ("command", "code", "names"),
    [
        (("promote", "tiny", "1", "--channel", "stagin"), 2, ["'stagin'", "'staging'?"]),
        (("promote", "tiny", "7", "--channel", "staging"), 1, ["tiny 7"]),
        (("history", "tiny", "--channel", "nowhere"), 1, ["'nowhere'"]),
    ],
)
def test_what_does_not_exist_is_named(shipped: Shipped, command: tuple[str, ...], code: int, names: list[str]) -> None:
    result = shipped.machine.run(*command)
    assert result.code == code
    assert [name for name in names if name not in result.sentence] == []


@pytest.mark.long
def test_the_store_of_a_release_file_holds_for_commands_that_name_the_model(
    machine: Any, make: Any, tmp_path: Path
) -> None:
    make.onnx(tmp_path)
    store = {"bucket": "elsewhere", "prefix": "apart"}
    result = machine.release(make.file(tmp_path, name="apart", store=store, channels={"production": {}}))
    assert result.code == 0, result.stderr
    assert (machine.home / "s3" / "elsewhere" / "apart" / "releases" / "apart" / "1" / "release.json").is_file()
    promoted = machine.run("promote", "apart", "1", "--channel", "production", "--json")
    assert promoted.code == 0, promoted.stderr
    for command in (("history", "apart", "--channel", "production"), ("channel", "show", "apart"), ("list", "apart")):
        assert "1" in machine.run(*command).stdout
    rollback = machine.run("rollback", "apart", "--channel", "production")
    assert "before 1" in rollback.sentence
    # A machine that has neither released nor deployed it finds the file by the setting models.
    file = json.dumps([str(tmp_path / "apart.yaml")])
    (machine.home / "models" / "apart.json").write_text("{")
    damaged = machine.run("list", "apart")
    assert damaged.code == 1
    assert "apart.json is damaged" in damaged.sentence
    (machine.home / "models" / "apart.json").unlink()
    assert machine.run("list", "apart").code == 1
    managing = replace(machine, settings={**machine.settings, "TVMFLOW_MODELS": file})
    assert managing.run("list", "apart").code == 0
