"""A measurer that measures nothing: the seconds of candidates are given, so that no clock decides a test of tuning."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from tvmflow.tuning.candidates import Candidate, Library
from tvmflow.tuning.worker_process import TrialError


class GivenSeconds:
    """A `Measurer` whose seconds come from `seconds`, by the candidate and the number of its build from 0 on.

    `is_right` says which candidates compute the right results. `timed` has the candidates of all calls of `time`.
    """

    def __init__(
        self, seconds: Callable[[Candidate, int], float], is_right: Callable[[Candidate], bool] = lambda candidate: True
    ) -> None:
        self._seconds = seconds
        self._is_right = is_right
        self._candidates: list[Candidate] = []
        self.timed: list[Candidate] = []

    def build(self, candidates: Sequence[Candidate]) -> list[Library | TrialError]:
        """Give each candidate the name of a library that is never written."""
        first = len(self._candidates)
        self._candidates += candidates
        return [
            Library(Path("/nowhere") / str(first + index), candidate.arguments)
            for index, candidate in enumerate(candidates)
        ]

    def time(self, library: Library, limit: float = 1e9) -> float:
        """Return the given seconds."""
        self.timed.append(self._candidate(library))
        return self._seconds_of(library)

    def times(
        self, libraries: Sequence[Library | TrialError], limit: Callable[[], float]
    ) -> Generator[float | TrialError]:
        """Yield the given seconds."""
        for library in libraries:
            yield library if isinstance(library, TrialError) else self.time(library, limit())

    def compare(self, *libraries: Library) -> list[float]:
        """Return the given seconds."""
        return [self._seconds_of(library) for library in libraries]

    def expect(self, reference: Library) -> None:
        """Do nothing."""

    def check(self, library: Library, reference: Library) -> None:
        """Refuse the candidates that are wrong."""
        if not self._is_right(self._candidate(library)):
            raise TrialError("wrong result")

    def _candidate(self, library: Library) -> Candidate:
        return self._candidates[int(library.path.name)]

    def _seconds_of(self, library: Library) -> float:
        return self._seconds(self._candidate(library), int(library.path.name))
