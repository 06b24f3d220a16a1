"""The consoles of commands: standard output, and the progress of steps beside it, a bar for each step that runs."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tvmflow.progress import Status, reporting_to

# The columns of a table in a file or a pipe, which have no width of their own.
_WIDTH = 120
# Where the time of a step ends on its line, after the mark.
_COLUMNS = 44
_MARKS = {"ran": "[green]✓[/]", "cached": "[cyan]=[/]", "failed": "[red]✗[/]"}


def output_console(width: int = _WIDTH) -> Console:
    """Return the console of standard output, `width` characters wide where that is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width)


class _Bars(Progress):
    """The bars of running steps, and below them the further lines of their messages."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the table of bars, then the further lines of each step."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields.get("more"):
                yield Text(task.fields["more"], style="dim", no_wrap=True, overflow="ellipsis")


class RichReporter:
    """A reporter that shows the events of a run on a console; plain lines where it is no terminal."""

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
        self._task_ids: dict[tuple[str, str | None], TaskID] = {}
        self._lock = Lock()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show running steps while the body runs."""
        with self._progress, reporting_to(self):
            yield

    def begin(self, step: str, target: str | None) -> None:
        """Show a spinner for the step; `target` is None for steps of the release."""
        with self._lock:
            self._task_ids[step, target] = self._progress.add_task(escape(_label(step, target)), total=None, message="")

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Turn the spinner into a bar; show the first line of the message beside it, the others below all bars.

        `target` is None for steps of the release.
        """
        first, _, more = message.partition("\n")
        with self._lock:
            task_id = self._task_ids.get((step, target))
            if task_id is not None:
                self._progress.update(task_id, completed=done, total=total or None, message=first[:60], more=more)

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Replace the bar by a line with the step's status and time; `target` is None for steps of the release."""
        with self._lock:
            task_id = self._task_ids.pop((step, target), None)
            if task_id is not None:
                self._progress.remove_task(task_id)
            result = "cached" if status == "cached" else f"{seconds:.1f} s" + (" failed" if status == "failed" else "")
            label = _label(step, target)
            line = f"{_MARKS[status]} {escape(label)} {result.rjust(_COLUMNS - len(label))}"
            self._console.print(line, highlight=False, soft_wrap=True)


def _label(step: str, target: str | None) -> str:
    return f"{step} [{target}]" if target else step
