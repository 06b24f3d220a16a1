"""What a person sees while steps run: a line for each that ended, a spinner or bar for those that run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tvmflow.progress import Status, reporting_to

_MARKS = {"ran": "[green]✓[/]", "cached": "[cyan]=[/]", "failed": "[red]✗[/]"}


class _Bars(Progress):
    """The bars of running steps, and below them what some of them have to tell in more than a line."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, then the other lines of each step."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields.get("more"):
                yield Text(task.fields["more"], style="dim", no_wrap=True, overflow="ellipsis")


class RichReporter:
    """Shows the events of a run on a console; on one that is no terminal, plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = _Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[message]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._shown: dict[tuple[str, str | None], TaskID] = {}
        self._lock = Lock()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show running steps while the body runs."""
        with self._progress, reporting_to(self):
            yield

    def started(self, step: str, target: str | None) -> None:
        """Begin a spinner."""
        with self._lock:
            self._shown[step, target] = self._progress.add_task(_label(step, target), total=None, message="")

    def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Turn the spinner into a bar; all lines of a message but the first stand below the bars."""
        first, _, more = message.partition("\n")
        with self._lock:
            shown = self._shown.get((step, target))
            if shown is not None:
                self._progress.update(shown, completed=done, total=total or None, message=first[:60], more=more)

    def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Replace what was shown by a line with the step's time."""
        with self._lock:
            shown = self._shown.pop((step, target), None)
            if shown is not None:
                self._progress.remove_task(shown)
            said = "cached" if status == "cached" else f"{seconds:.1f} s" + (" failed" if status == "failed" else "")
            line = f"{_MARKS[status]} {_label(step, target):<32} {said:>12}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _label(step: str, target: str | None) -> str:
    return f"{step} \\[{target}]" if target else step
