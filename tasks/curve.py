"""The curve of a tuning: the model's estimated latency by trial, in MLflow and as a picture."""

from collections.abc import Mapping, Sequence
from html import escape

from tasks.step import Context
from tasks.tune import TuneResult
from tvmflow.registry import Registry
from tvmflow.spec import Tune
from tvmflow.target import Target
from tvmflow.workspace import Outcome

METRIC = "tuning_latency_ms"
PICTURE = "tuning.svg"

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 70, 20, 30, 40


def log_curve(registry: Registry, run_id: str, tuned: TuneResult) -> None:
    """Record the curve on a run, with the trial as step, in ms. Raises RegistryError."""
    if tuned.curve:
        registry.log_curve(run_id, METRIC, tuned.curve)


def keep_curve(context: Context, target: Target, budget: Tune, tuned: Outcome[TuneResult]) -> str:
    """Keep what `tvmflow tune` did for a target in an MLflow run of its own; the run's id. Raises RegistryError."""
    registry, name, result = context.registry, context.spec.name, tuned.result
    params: dict[str, object] = {"target": target.canonical, "tuning_coverage": str(result.coverage)}
    params |= {key: value for key, value in budget.model_dump().items() if value is not None}
    tags = {
        **context.spec.registry.tags,
        "tvmflow.kind": "tune",
        "tvmflow.name": name,
        "tvmflow.target": target.name,
    }
    run_id = registry.start_release(f"tune {name} for {target.name}", params, tags)
    registry.log_metrics(run_id, {**latencies(result), "tuning_trials": result.trials, "tuning_seconds": tuned.seconds})
    log_curve(registry, run_id, result)
    if result.curve:
        with context.workspace.scratch() as folder:
            (folder / PICTURE).write_text(picture(result.curve, f"{name}, {target.name}"))
            registry.log_artifacts(run_id, {PICTURE: folder / PICTURE})
    registry.finish(run_id, "FINISHED")
    return run_id


def latencies(tuned: TuneResult) -> Mapping[str, float]:
    """The estimated latency in ms without tuning and now, as far as it is known."""
    found = {"estimated_untuned_ms": tuned.untuned_ms, "estimated_latency_ms": tuned.latency_ms}
    return {key: value for key, value in found.items() if value is not None}


def picture(curve: Sequence[tuple[int, float]], title: str) -> str:
    """The curve as SVG: trials to the right, ms upwards from 0."""
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
    written = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in texts
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f'<path d="M{left} {_TOP} V{bottom} H{right}" fill="none" stroke="#888"/>'
        f'<path d="{path}" fill="none" stroke="#1565c0" stroke-width="2"/>{written}</svg>\n'
    )
