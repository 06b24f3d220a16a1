"""Runs: MLflow runs of releases, targets, promotions and evaluations, with parameters, tags, metrics and files."""

import datetime
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from tvmflow.comparison import write_finite
from tvmflow.errors import RegistryError
from tvmflow.registry.connection import Connection, get_or_none, quote

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
MetricPoint = tuple[str, float, int]
"""The key of a metric, its value, and its step."""

_PARENT_RUN = "mlflow.parentRunId"
_FLOW_RUN = "tvmflow.flow_run"
# The key of the step that opened the run: a step that runs again goes on with what its dead predecessor began.
_KEY = "tvmflow.key"
# What else than a release a run is of, and the kinds that are written at once: a tuning may take hours.
_KIND, _BRIEF = "tvmflow.kind", ("retrain", "retune", "failure", "promotion")


class Runs(Connection):
    """Runs of MLflow, by their ids. Every method raises RegistryError when MLflow fails."""

    def start_run(
        self, name: str, params: Mapping[str, object], tags: Mapping[str, str], *, key: str | None = None
    ) -> str:
        """Open a run in the configured experiment and return its id.

        A run that a step opened under the same `key` before, and that is not deleted, is opened again; with None the
        run is new. Raises RegistryError.
        """
        with self._explain_errors(f"open the run {name!r}"):
            from mlflow.entities import Param

            client, experiment = self._client(), self._experiment()
            run_id = None if key is None else self._find_run(experiment, {_KEY: key})
            if run_id is None:
                all_tags = {**tags, **({} if key is None else {_KEY: key})}
                run_id = str(client.create_run(experiment, tags=all_tags, run_name=name).info.run_id)
            else:
                client.update_run(run_id, status="RUNNING")
            client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
            return run_id

    def start_target_run(
        self,
        parent_run_id: str,
        target_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        key: str | None = None,
    ) -> str:
        """Open the run of one target, inside a release's run, and return its id.

        A run that a step opened under the same `key` before, and that is not deleted, is opened again; with None the
        run is new. Raises RegistryError.
        """
        return self.start_run(target_name, params, {**tags, _PARENT_RUN: parent_run_id}, key=key)

    def read_start(self, run_id: str) -> datetime.datetime:
        """Return the time at which a run was opened first, in UTC. Raises RegistryError."""
        with self._explain_errors(f"read the run {run_id}"):
            milliseconds = self._client().get_run(run_id).info.start_time
        return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)

    def end_abandoned_runs(self, tags: Mapping[str, str]) -> list[str]:
        """End as KILLED the experiment's open runs that have all of these tags and wait for nobody; return their ids.

        These are the runs that steps opened under a `key`, and those of the kinds (tag `tvmflow.kind`) retrain, retune,
        failure and promotion, which are written at once. The runs nested in them end too. The run that a Prefect flow
        opened for a promotion stays open, because it may wait for a person. Call this while no such step runs; a run
        that is just being written still ends with the status that its writer gives it. Raises RegistryError.
        """
        with self._explain_errors("end runs that nobody works on"):
            client, experiment = self._client(), self._experiment()
            running = client.search_runs([experiment], f"attributes.status = 'RUNNING' and {_query(tags)}")
            abandoned = [str(run.info.run_id) for run in running if _is_written_at_once(run.data.tags)]
            for run_id in abandoned:
                nested = f"attributes.status = 'RUNNING' and {_query({_PARENT_RUN: run_id})}"
                for run in client.search_runs([experiment], nested):
                    client.set_terminated(run.info.run_id, "KILLED")
                client.set_terminated(run_id, "KILLED")
            return abandoned

    def _find_run(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        """The id of the newest run of an experiment with all of these tags, None if there is none."""
        runs = self._client().search_runs([experiment], _query(tags), max_results=1)
        return next((str(run.info.run_id) for run in runs), None)

    def open_promotion_run(
        self, release_run: str, name: str, tags: Mapping[str, str], flow_run: str | None = None
    ) -> str:
        """Open the run of a promotion and return its id; nest it in the release's run where that still exists.

        `flow_run` is the id of the Prefect flow run that promotes. If it opened a run before it was suspended, that run
        is returned, with `tags` set on it. With None as `flow_run`, the run is new. Raises RegistryError.
        """
        with self._explain_errors(f"open the run {name!r}"):
            client = self._client()
            release = get_or_none(client.get_run, release_run)
            experiment = self._experiment() if release is None else str(release.info.experiment_id)
            if flow_run is not None:
                run_id = self._find_run(experiment, {_FLOW_RUN: flow_run})
                if run_id is not None:
                    for key, value in tags.items():
                        client.set_tag(run_id, key, value)
                    return run_id
            all_tags = dict(tags)
            if release is not None:
                all_tags[_PARENT_RUN] = release_run
            if flow_run is not None:
                all_tags[_FLOW_RUN] = flow_run
            return str(client.create_run(experiment, tags=all_tags, run_name=name).info.run_id)

    def set_run_tag(self, run_id: str, key: str, value: str) -> None:
        """Set a tag of a run. Raises RegistryError."""
        with self._explain_errors(f"tag the run {run_id}"):
            self._client().set_tag(run_id, key, value)

    def finish_run(self, run_id: str, status: RunStatus) -> None:
        """End a run with a status. Raises RegistryError."""
        with self._explain_errors(f"close the run {run_id}"):
            self._client().set_terminated(run_id, status)

    def run_exists(self, run_id: str) -> bool:
        """Whether the run exists and is not deleted. Raises RegistryError."""
        with self._explain_errors(f"read the run {run_id}"):
            run = get_or_none(self._client().get_run, run_id)
        return run is not None and run.info.lifecycle_stage == "active"

    def find_runs(self, tags: Mapping[str, str]) -> list[str]:
        """Return the ids of the experiment's finished runs that have all of these tags, newest first.

        Raises RegistryError.
        """
        with self._explain_errors("search its runs"):
            query = f"attributes.status = 'FINISHED' and {_query(tags)}"
            runs = self._client().search_runs([self._experiment()], query)
            return [str(run.info.run_id) for run in runs]

    def log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Record metrics of a run by name. Raises RegistryError."""
        with self._explain_errors(f"record metrics of the run {run_id}"):
            self._log_points(run_id, [(key, value, 0) for key, value in metrics.items()])

    def log_curve(self, run_id: str, key: str, curve: Sequence[tuple[int, float]]) -> None:
        """Record a metric of a run from pairs of step and value; leave out values that are not finite.

        One call takes at most 1000 pairs. Raises RegistryError.
        """
        points = [(key, value, step) for step, value in curve if math.isfinite(value)]
        with self._explain_errors(f"record {key!r} of the run {run_id}"):
            self._log_points(run_id, points)

    def log_artifacts(self, run_id: str, files: Mapping[str, Path]) -> None:
        """Store files with a run, each under its artifact path (`folder/name`).

        Raises RegistryError when MLflow fails, or a file is missing: none is stored then.
        """
        for path in files.values():
            if not path.is_file():
                raise RegistryError(f"the artifact {str(path)!r} is not a file; run the step that writes it again")
        with self._explain_errors(f"store artifacts of the run {run_id}"), tempfile.TemporaryDirectory() as scratch:
            for artifact_path, path in files.items():
                place = PurePosixPath(artifact_path)
                local = path
                if path.name != place.name:
                    # MLflow stores a file under its own name only.
                    local = Path(scratch, place.name)
                    shutil.copyfile(path, local)
                folder = str(place.parent)
                self._client().log_artifact(run_id, str(local), None if folder == "." else folder)

    def log_tables(self, run_id: str, tables: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
        """Store tables with a run, each under its artifact path (`folder/name.json`), and have MLflow's UI show them.

        A table is a list of one row or more with the same keys; it replaces one that is there. Numbers that are not
        finite are left out. Raises RegistryError.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        with tempfile.TemporaryDirectory() as scratch:
            files = {place: Path(scratch, str(index)) for index, place in enumerate(tables)}
            for place, rows in tables.items():
                # MLflow's own `log_table` rounds to ten decimals, and adds the rows to those that are there.
                cells = [
                    [write_finite(cell) if isinstance(cell, float) else cell for cell in row.values()] for row in rows
                ]
                document = {"columns": list(rows[0]), "data": cells}
                files[place].write_text(json.dumps(document))
            self.log_artifacts(run_id, files)
        with self._explain_errors(f"store tables of the run {run_id}"):
            client = self._client()
            marks = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            marks += [mark for place in tables if (mark := {"path": place, "type": "table"}) not in marks]
            client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(marks))

    def fetch_artifact(self, run_id: str, artifact_path: str, folder: Path) -> Path | None:
        """Fetch a file of a run into `folder` and return its path; None when the run or the file does not exist.

        Raises RegistryError.
        """
        with self._explain_errors(f"read {artifact_path!r} of the run {run_id}"):
            client = self._client()
            if get_or_none(client.get_run, run_id) is None:
                return None
            parent = str(PurePosixPath(artifact_path).parent)
            siblings = client.list_artifacts(run_id, None if parent == "." else parent)
            if all(item.path != artifact_path for item in siblings):
                return None
            return Path(client.download_artifacts(run_id, artifact_path, str(folder)))

    def _log_points(self, run_id: str, points: Iterable[MetricPoint], model_id: str | None = None) -> None:
        """Record points of metrics on a run, and on a logged model where one is named."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(key, float(value), now, step, model_id=model_id, run_id=run_id) for key, value, step in points
        ]
        self._client().log_batch(run_id, metrics=metrics)


def _query(tags: Mapping[str, str]) -> str:
    """MLflow's filter for runs that have all of these tags."""
    return " and ".join(f"tags.`{key}` = {quote(value)}" for key, value in tags.items())


def _is_written_at_once(tags: Mapping[str, str]) -> bool:
    """Whether a run with these tags is of a step or of a verdict, and waits for nobody."""
    return _KEY in tags or (tags.get(_KIND) in _BRIEF and _FLOW_RUN not in tags)
