"""Building and running candidates in worker processes that may crash or hang."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm.tirx import PrimFunc

from support.processes import SECRETS, mentioned_secrets
from support.waits import wait_until
from tvmflow.hardware.profiles import named
from tvmflow.hardware.target import Target
from tvmflow.processes.launch import module_command
from tvmflow.tuning.cache_state import bytes_to_read, make_reader, warm_arguments, weight_bytes
from tvmflow.tuning.candidates import Argument, Candidate, Library, arguments_of
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.traces import normalize
from tvmflow.tuning.worker_process import CrashError, LateError, TrialError, WorkerProcess


def candidate(func: PrimFunc) -> Candidate:
    return Candidate(tvm.ir.save_json(normalize(func)), arguments_of(func) or ())


def build(pool: MeasurePool, func: PrimFunc) -> Library:
    (library,) = pool.build([candidate(func)])
    assert isinstance(library, Library)
    return library


@pytest.fixture(scope="module")
def pool(native: Target) -> Iterator[MeasurePool]:
    with MeasurePool(native.canonical, builders=2, threads=1, timeout=10, deadline=math.inf) as pool:
        yield pool


def test_a_candidate_that_crashes_does_not_harm_the_next(
    pool: MeasurePool, aborts: PrimFunc, adds_one: PrimFunc
) -> None:
    with pytest.raises(CrashError):
        pool.time(build(pool, aborts))
    assert pool.time(build(pool, adds_one)) > 0


def test_a_candidate_that_hangs_costs_only_its_timeout(native: Target, sleeps: PrimFunc, adds_one: PrimFunc) -> None:
    with MeasurePool(native.canonical, builders=1, threads=1, timeout=2, deadline=math.inf) as pool:
        with pytest.raises(LateError):
            pool.time(build(pool, sleeps))
        assert pool.time(build(pool, adds_one)) > 0


def test_a_candidate_that_cannot_be_built_is_refused_with_the_reason(pool: MeasurePool, adds_one: PrimFunc) -> None:
    broken = Candidate(candidate(adds_one).func, (), '[[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]')
    refusal, library = pool.build([broken, candidate(adds_one)])
    assert isinstance(refusal, TrialError)
    assert isinstance(library, Library)


def test_a_killed_builder_is_replaced(pool: MeasurePool, adds_one: PrimFunc) -> None:
    build(pool, adds_one)
    for process in psutil.Process().children():
        if "tvmflow.tuning.worker" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
    assert all(isinstance(library, Library) for library in pool.build([candidate(adds_one)] * 4))


def test_a_wrong_result_is_refused(pool: MeasurePool, adds_one: PrimFunc, adds_one_but_once: PrimFunc) -> None:
    right, wrong, reference = (build(pool, func) for func in (adds_one, adds_one_but_once, adds_one))
    pool.check(right, reference)
    with pytest.raises(TrialError, match="argument 1"):
        pool.check(wrong, reference)


def test_the_process_of_a_candidate_sees_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "part = pathlib.Path(__file__).with_name('part')\n"
        "part.write_text('\\n'.join(f'{name}={value}' for name, value in os.environ.items()))\n"
        "part.rename(part.with_name('environment'))\n"
    )
    for name, value in {**SECRETS, "PYTHONPATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    # A fork does not run the user's module as it starts.
    monkeypatch.setattr("tvmflow.processes.supervisor.module_command", module_command)
    worker = WorkerProcess(tmp_path / "log", {"TVM_NUM_THREADS": "1"})
    try:
        worker.start()
        wait_until((tmp_path / "environment").is_file)
    finally:
        worker.end()
    environment = (tmp_path / "environment").read_text()
    assert "TVM_NUM_THREADS=1" in environment.splitlines()
    assert mentioned_secrets(environment) == []


def test_no_worker_outlives_its_pool(native: Target) -> None:
    before = set(psutil.Process().children())
    with MeasurePool(native.canonical, builders=2, threads=1, timeout=10, deadline=math.inf):
        workers = set(psutil.Process().children()) - before
        assert len(workers) == 3
    assert not any(worker.is_running() for worker in workers)


def test_the_weights_of_a_model_are_all_arguments_but_the_warm_ones() -> None:
    dense = tuple(Argument(shape, "float32") for shape in ((1, 64), (64, 10), (1, 10), (10,), (1, 10)))
    narrow = tuple(Argument((8,), dtype) for dtype in ("uint16", "int8", "uint16"))
    # The residual has the result's shape.
    assert weight_bytes([(dense, 2), (narrow, 1), ((), 3)]) == 2 * 4 * (64 * 10 + 10) + 8
    assert warm_arguments([(item.shape, item.dtype) for item in dense]) == [0, 2, 4]


@pytest.mark.parametrize("name", ["cortex-a72", "granite-rapids"])
def test_no_more_is_read_than_the_last_cache_of_a_processor_holds(native: Target, name: str) -> None:
    profile = named(name)
    last = (profile.third or profile.second).size
    target = replace(native, profile=profile)
    assert [bytes_to_read(size, target) for size in (0, last, 2 * last)] == [0, last, last]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_reader_reads_every_byte(native: Target, threads: int) -> None:
    size = 64 * 12
    candidate = make_reader(size, threads)
    data, total = (np.ones(item.shape, item.dtype) for item in candidate.arguments)
    assert data.nbytes == size
    func = tvm.ir.load_json(candidate.func).with_attr("tirx.is_scheduled", True)
    library = tvm.compile(tvm.IRModule({"main": func}), tvm.target.Target(native.tvm))
    tensors = [tvm.runtime.tensor(array) for array in (data, total)]
    library["main"](*tensors)
    assert tensors[1].numpy().sum() == size / 4


def test_a_candidate_is_measured_with_the_weights_of_a_model_read_between_its_calls(
    native: Target, aborts: PrimFunc, adds_one: PrimFunc
) -> None:
    with MeasurePool(native.canonical, builders=1, threads=2, timeout=10, deadline=math.inf, weights=1 << 20) as pool:
        library = build(pool, adds_one)
        assert pool.time(library) > 0
        with pytest.raises(CrashError):
            pool.time(build(pool, aborts))
        # The new process reads them too.
        assert all(seconds > 0 for seconds in pool.compare(library, library))
