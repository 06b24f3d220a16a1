"""The display of steps that run, as a terminal shows it."""

from io import StringIO

from rich.console import Console

from tvmflow.cli.display import RichReporter


def test_a_step_that_tells_more_than_a_line_shows_it_below_the_bars_while_it_runs() -> None:
    output = StringIO()
    reporter = RichReporter(Console(file=output, force_terminal=True, width=120))
    with reporter.live():
        reporter.started("tune", "native")
        reporter.progressed("tune", "native", 3, 8, "5 trials left\n> convolution 12.5 us\n  dense 3.0 us")
        reporter._progress.refresh()
        lines = [line.strip() for line in output.getvalue().splitlines()]
        reporter.ended("tune", "native", "ran", 1.0)
    assert any("tune [native]" in line and "5 trials left" in line for line in lines)
    assert any("> convolution 12.5 us" in line for line in lines)
    assert not any("5 trials left" in line and "convolution" in line for line in lines)
