"""The display of steps that run, as a terminal shows it."""

from io import StringIO

from rich.console import Console

from flows.release import ReleaseSummary, TargetSummary
from support.releases import make_measurements
from tvmflow.cli.display import RichReporter
from tvmflow.cli.release import show
from tvmflow.settings import Settings


def test_the_summary_of_a_release_says_that_the_machine_was_busy() -> None:
    sentence = "the machine was busy while it was measured: rounds differ by 28%"
    target = TargetSummary(
        target="native",
        bundle_uri="",
        bundle_sha256="",
        bundle_path="bundle.tar.gz",
        bundle_size=8,
        max_abs_error=None,
        top1_agreement=None,
        metric=None,
        latency_ms=None,
        ratio={},
        runs=64,
        measurements=make_measurements(1.0).points,
        busyness=sentence,
        tuning="0 of 1 workloads tuned",
        choice=None,
        schedules={},
        steps={},
    )
    summary = ReleaseSummary(
        name="net", version="1", release_uri="", mlflow_run_id="", mlflow_model="", targets=(target,)
    )
    output = StringIO()
    show(summary, Settings(), Console(file=output, width=120))
    assert f"native: {sentence}" in output.getvalue().splitlines()


def test_a_step_that_tells_more_than_a_line_shows_it_below_the_bars_while_it_runs() -> None:
    output = StringIO()
    reporter = RichReporter(Console(file=output, force_terminal=True, width=120))
    with reporter.live():
        reporter.begin("tune", "native")
        reporter.advance("tune", "native", 3, 8, "5 trials left\n> convolution 12.5 us\n  dense 3.0 us")
        reporter._progress.refresh()
        lines = [line.strip() for line in output.getvalue().splitlines()]
        reporter.end("tune", "native", "ran", 1.0)
    assert any("tune [native]" in line and "5 trials left" in line for line in lines)
    assert any("> convolution 12.5 us" in line for line in lines)
    assert not any("5 trials left" in line and "convolution" in line for line in lines)


def test_the_times_of_steps_stand_below_each_other_whatever_the_steps_are_called() -> None:
    output = StringIO()
    reporter = RichReporter(Console(file=output, width=120))
    steps = [("export", None), ("build", "native"), ("integrity", "digits 1 to production"), ("gate", "[bold]" * 9)]
    with reporter.live():
        for step, target in steps:
            reporter.begin(step, target)
            reporter.end(step, target, "ran", 12.3)
    *lines, longest = output.getvalue().splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[-1].split() == ["✓", "integrity", "[digits", "1", "to", "production]", "12.3", "s"]
    assert longest == f"✓ gate [{'[bold]' * 9}] 12.3 s"
