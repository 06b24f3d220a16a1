"""The tuning curve: the model's estimated latency after each trial, in MLflow and as an SVG picture."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from tasks.tune import TuneResult
from tvmflow.errors import RegistryError
from tvmflow.hardware.target import Target
from tvmflow.registry import Registry
from tvmflow.spec import Spec, Tune
from tvmflow.workspace import Outcome, Workspace

METRIC = "tuning_latency_ms"
PICTURE = "tuning.svg"
# Seconds between two looks at the file of the curve, and the most points of a request.
_LOOK_SECONDS, _POINTS = 3.0, 1000

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 70, 20, 30, 40


def log_curve(registry: Registry, run_id: str, tuned: TuneResult) -> None:
    """Log the curve of a result in ms, with the trial as step, to an MLflow run. Raises RegistryError."""
    if tuned.curve:
        registry.log_curve(run_id, METRIC, tuned.curve)


class Curve:
    """The MLflow run of `tvmflow tune` for one target, to which the curve is logged while the step tunes.

    `path` is the file to which the step writes the curve. A registry that fails does not stop the tuning: `error` is
    then its error, and the curve ends there.
    """

    def __init__(
        self, spec: Spec, workspace: Workspace, registry: Registry, target: Target, budget: Tune, path: Path
    ) -> None:
        """Open the MLflow run and start to follow the file; keep an error of the registry in `error`."""
        self.path = path
        self.error: RegistryError | None = None
        self._spec = spec
        self._workspace = workspace
        self._registry = registry
        self._target = target
        self._run_id = ""
        self._read = 0
        self._steps: set[int] = set()
        self._end = threading.Event()
        name = spec.name
        params = {key: value for key, value in budget.model_dump().items() if value is not None}
        tags = {
            **spec.registry.tags,
            "tvmflow.kind": "tune",
            "tvmflow.name": name,
            "tvmflow.target": target.name,
        }
        try:
            self._run_id = registry.start_run(
                f"tune {name} for {target.name}", {"target": target.canonical, **params}, tags
            )
        except RegistryError as error:
            self.error = error
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, tuned: Outcome[TuneResult]) -> None:
        """Log the result of the step and the rest of the curve, and end the run as finished.

        An error of the registry is kept in `error`.
        """
        self._stop()
        registry, run_id, result = self._registry, self._run_id, tuned.result
        if self.error is not None:
            return
        try:
            registry.set_run_tag(run_id, "tvmflow.coverage", str(result.coverage))
            metrics = {"tuning_trials": result.trials, "tuning_seconds": tuned.seconds}
            registry.log_metrics(run_id, {**latencies(result), **metrics})
            if result.curve:
                self._log([(step, value) for step, value in result.curve if step not in self._steps])
                with self._workspace.scratch() as folder:
                    title = f"{self._spec.name}, {self._target.name}"
                    (folder / PICTURE).write_text(picture(result.curve, title))
                    registry.log_artifacts(run_id, {PICTURE: folder / PICTURE})
            registry.finish_run(run_id, "FINISHED")
        except RegistryError as error:
            self.error = error

    def give_up(self, interrupted: bool) -> None:
        """End the run with the curve so far, as killed if the user `interrupted` the step, otherwise as failed."""
        self._stop()
        if self.error is None:
            try:
                self._registry.finish_run(self._run_id, "KILLED" if interrupted else "FAILED")
            except RegistryError as error:
                self.error = error

    def _follow(self) -> None:
        while self.error is None and not self._end.wait(_LOOK_SECONDS):
            self._look()

    def _stop(self) -> None:
        self._end.set()
        self._thread.join()
        if self.error is None:
            self._look()

    def _look(self) -> None:
        """Log the points that the file has gained since the last look."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[self._read : text.rfind("\n") + 1]
        self._read += len(lines)
        points = [(int(step), float(value)) for step, value in map(str.split, lines.splitlines())]
        try:
            self._log(points)
        except RegistryError as error:
            self.error = error

    def _log(self, points: Sequence[tuple[int, float]]) -> None:
        for start in range(0, len(points), _POINTS):
            self._registry.log_curve(self._run_id, METRIC, points[start : start + _POINTS])
        self._steps.update(step for step, _ in points)


@contextmanager
def open_curve(spec: Spec, workspace: Workspace, registry: Registry, target: Target, budget: Tune) -> Iterator[Curve]:
    """Open an MLflow run and log the curve to it while the body tunes.

    The body must call `finish` of the curve; an exception from the body ends the run as failed or killed.
    """
    with workspace.scratch() as folder:
        curve = Curve(spec, workspace, registry, target, budget, folder / "curve")
        try:
            yield curve
        except BaseException as error:
            curve.give_up(isinstance(error, KeyboardInterrupt))
            raise


def latencies(tuned: TuneResult) -> Mapping[str, float]:
    """Return the estimated latencies in ms before and after tuning, by metric name, without those that are unknown."""
    metrics = {"estimated_untuned_ms": tuned.untuned_ms, "estimated_latency_ms": tuned.latency_ms}
    return {name: value for name, value in metrics.items() if value is not None}


def picture(curve: Sequence[tuple[int, float]], title: str) -> str:
    """Return the curve, at least one pair of trial and ms, as SVG text: trials to the right, ms upwards from 0."""
    last, most = max(1, curve[-1][0]), max(value for _, value in curve) or 1.0

    def place(trial: int, value: float) -> tuple[float, float]:
        right = _LEFT + (_WIDTH - _LEFT - _RIGHT) * trial / last
        down = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / most)
        return round(right, 1), round(down, 1)

    path = "M{} {}".format(*place(*curve[0]))
    for trial, value in curve[1:]:
        path += " H{} V{}".format(*place(trial, value))
    (left, bottom), (right, _) = place(0, 0.0), place(last, 0.0)
    texts = [
        (left, _TOP - 12, "start", f"{title}: estimated latency {curve[0][1]:.3f} -> {curve[-1][1]:.3f} ms"),
        (left - 8, place(0, most)[1] + 4, "end", f"{most:.3g} ms"),
        (left - 8, bottom, "end", "0"),
        (left, bottom + 20, "start", "trial 0"),
        (right, bottom + 20, "end", str(curve[-1][0])),
    ]
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in texts
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f'<path d="M{left} {_TOP} V{bottom} H{right}" fill="none" stroke="#888"/>'
        f'<path d="{path}" fill="none" stroke="#1565c0" stroke-width="2"/>{labels}</svg>\n'
    )
