"""Show: samples as text by a function of the user's, which may raise, crash or hang without stopping a release."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.releases import make_release
from tasks.insight import Insight
from tasks.report import ReportJob
from tasks.show import ShowJob, Text, Texts, TextsJob, find_show, texts, work_texts
from tasks.step import StepRunner
from tvmflow import samples
from tvmflow.errors import ExportError
from tvmflow.report.insight import SampleInsight
from tvmflow.workspace import Workspace

UserCode = Callable[[str], str]


@pytest.fixture(scope="module", autouse=True)
def _forks(children_in_forks: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Children are forks of a server that has started: no test's time limit holds for that."""
    folder = tmp_path_factory.mktemp("forks")
    find_show(StepRunner(Workspace(folder / "state"), "net", folder, timeout=60), ShowJob(function="json:dumps"))


def _job(workspace: Workspace, function: str, chunks: list[list[int]], *indices: int) -> TextsJob:
    """The job that shows samples of one number each, which are in chunks where a chunk has more than one."""
    with workspace.scratch() as folder:
        pairs = [({"x": np.array(chunk).reshape(-1, 1)}, {"y": np.array(chunk)}) for chunk in chunks]
        samples.save(folder / "samples.npz", pairs)
        data = workspace.keep(folder / "samples.npz")
    is_chunked = any(len(chunk) > 1 for chunk in chunks)
    job = TextsJob(function=function, data=data, is_chunked=is_chunked, indices=indices, target="native")
    return job.model_copy(update={"home": workspace.folder})


@pytest.mark.parametrize("chunks", [[[1, 2, 3], [4, 5, 5]], [[1], [2], [3], [4], [5]]])
def test_a_sample_of_held_out_data_comes_without_the_axis_of_samples(
    workspace: Workspace, user_code: UserCode, chunks: list[list[int]]
) -> None:
    name = user_code(
        "def show(inputs):\n    return f\"{inputs['x'].shape[-1]} {inputs['x'].ndim} {inputs['x'].max()}\""
    )
    result = work_texts(_job(workspace, f"{name}:show", chunks, 0, 2, 4), lambda *_: None)
    axes = 1 if len(chunks[0]) > 1 else 2
    assert result.texts == {index: Text(text=f"1 {axes} {index + 1}") for index in (0, 2, 4)}
    assert not result.has_failed


_FAILS_AT_FIRST = """
import os, signal, time

def show(inputs):
    if not os.path.exists({marker!r}):
        print("/a/file", flush=True)
        {statement}
    return "fine"
"""
_ENDS = {
    "ended with exit code 3": "os._exit(3)",
    "ended with exit code 0": "os._exit(0)",
    "was killed by SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
    "took longer than 0.05 minutes": "time.sleep(600)",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("end", "statement"), _ENDS.items())
def test_a_process_that_ends_is_one_sentence_and_the_next_run_calls_the_function_again(
    workspace: Workspace, tmp_path: Path, user_code: UserCode, end: str, statement: str
) -> None:
    marker = tmp_path / "mended"
    module = _FAILS_AT_FIRST.format(marker=str(marker), statement=statement)
    function = f"{user_code(module)}:show"
    job, runner = _job(workspace, function, [[7]], 0), StepRunner(workspace, "net", tmp_path, timeout=3)
    failed = texts(runner, job).result
    assert failed.problem == (f"The samples are not shown as text: function that shows a sample {function!r} {end}.")
    assert failed.texts == {}
    marker.touch()
    again = texts(runner, job)
    assert (again.status, again.result.texts, again.result.problem) == ("ran", {0: Text(text="fine")}, None)
    assert texts(runner, job).status == "cached"


def test_a_function_that_raises_is_called_again_by_the_next_run(
    workspace: Workspace, tmp_path: Path, user_code: UserCode
) -> None:
    function = f"{user_code('def show(inputs): return inputs[str(9)]')}:show"
    job, runner = _job(workspace, function, [[7]], 0), StepRunner(workspace, "net", tmp_path, timeout=60)
    sentence = f"function that shows a sample {function!r} raised KeyError"
    assert [texts(runner, job).status for _ in range(2)] == ["ran", "ran"]
    assert texts(runner, job).result.texts == {0: Text(text=sentence, failed=True)}


_IMPORT_ENDS = {
    "the process that imports {module!r} ended with exit code 3": "import os; os._exit(3)",
    "the process that imports {module!r} took longer than 0.05 minutes": "import time; time.sleep(600)",
    "importing {module!r} raised ConnectionError: no network": "raise ConnectionError('no network')",
    "importing {module!r} raised AttributeError: no attribute": "raise AttributeError('no attribute')",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("end", "statement"), _IMPORT_ENDS.items())
def test_an_import_that_fails_stops_no_release_and_is_tried_again(
    workspace: Workspace, tmp_path: Path, user_code: UserCode, end: str, statement: str
) -> None:
    marker = tmp_path / "mended"
    condition = f"from pathlib import Path\nif not Path({str(marker)!r}).exists():"
    module = user_code(f"{condition}\n    {statement}\ndef show(inputs): return ''")
    runner = StepRunner(workspace, "net", tmp_path, timeout=3)
    job = ShowJob(function=f"{module}:show")
    expected = f"function that shows a sample '{module}:show': {end.format(module=module)}"
    assert find_show(runner, job).result.problem == expected
    marker.touch()
    again = find_show(runner, job)
    assert (again.status, again.result.problem) == ("ran", None)
    assert find_show(runner, job).status == "cached"


@pytest.mark.parametrize(
    ("code", "function", "reason"),
    [
        ("def show(inputs): return ''", "shwo", "has no 'shwo'"),
        ("import a_module_of_nobody", "show", "imports 'a_module_of_nobody', which is not installed"),
        ("show = 1", "show", "is a int, not a function"),
    ],
)
def test_a_function_that_no_later_try_will_find_is_refused(
    workspace: Workspace, tmp_path: Path, user_code: UserCode, code: str, function: str, reason: str
) -> None:
    job = ShowJob(function=f"{user_code(code)}:{function}")
    with pytest.raises(ExportError, match=reason):
        find_show(StepRunner(workspace, "net", tmp_path, timeout=60), job)


def _insight(problem: str | None = None) -> Insight:
    worst = tuple(
        SampleInsight(index=index, error=0.5, answer=1, original_answer=1, label=None, inputs=()) for index in (4, 2)
    )
    return Insight(
        functions=(), layers=(), peaks=None, worst=worst, flipped=worst[:1], flips=1, samples=9, problem=problem
    )


def test_texts_go_to_their_samples() -> None:
    shown = Texts(texts={4: Text(text="four"), 2: Text(text="two")}).add_to(_insight())
    assert [sample.text for sample in (*shown.worst, *shown.flipped)] == ["four", "two", "four"]
    assert shown.problem is None
    unshown = Texts(texts={}, problem="It is not shown.").add_to(_insight())
    assert [sample.text for sample in unshown.worst] == [None, None]
    assert unshown.problem == "It is not shown."


def test_a_page_with_a_failure_is_written_again_when_the_texts_are_there() -> None:
    def key(insight: Insight) -> object:
        job = ReportJob(
            release=make_release("net"), channel="production", production=None, history=(),
            insights={"native": insight}, checks=(), layers_before={},
        )  # fmt: skip
        return job.cache_key()

    shown = Texts(texts={4: Text(text="four"), 2: Text(text="two")}).add_to(_insight())
    assert key(_insight("It is not shown.")) != key(shown)
    assert key(shown) == key(shown.model_copy(update={"samples": 10}))
