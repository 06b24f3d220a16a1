"""How many workers calls use, whether they spin, and many threads on one model."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tvmflow import runtime
from tvmflow.arrays import NamedArrays
from tvmflow.errors import InputError
from tvmflow.runtime import CompiledModel, threads

OWN = """
import gc, os, sys, time
from pathlib import Path
from tvmflow import runtime
def workers(expected):
    # A thread names itself when it first runs.
    end = time.monotonic() + 60
    while True:
        count = sum(task.joinpath("comm").read_text() == "tvmflow\\n" for task in Path("/proc/self/task").iterdir())
        if count == expected or time.monotonic() > end:
            return count
        time.sleep(0.01)
"""
# A library without threads of its own, as bundles held them before there were any.
OLDER = """
import os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
from tvmflow import runtime
from tvmflow.runtime import library, threads
threads.start = lambda *arguments: None
# Without torch, which `import tvm_ffi` would import too.
library.load()
import tvm_ffi
def run(model):
    model(**model.sample[0])
    return tvm_ffi.get_global_func("runtime.NumThreads")()
"""


def python(code: str, bundle: Path, **environment: str) -> list[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TVM_")}
    process = subprocess.run(
        [sys.executable, "-c", code, str(bundle)],
        env={**inherited, "TVM_USE_RUNTIME_LIB": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_each_model_has_workers_of_its_own_until_it_is_closed_or_gone(bundle: Path) -> None:
    code = """
three, two, one = (runtime.load(sys.argv[1], threads=count) for count in (3, 2, 1))
print(workers(3), three.threads, two.threads, one.threads)
two(**two.sample[0])
two.close()
two.close()
print(workers(2))
three(**three.sample[0])
del three
gc.collect()
print(workers(0))
"""
    assert python(OWN + code, bundle) == ["3 3 2 1", "2", "0"]


def test_a_model_without_workers_starts_no_thread_of_tvm(bundle: Path) -> None:
    code = """
before = len(os.listdir("/proc/self/task"))
model = runtime.load(sys.argv[1], threads=1)
model(**model.sample[0])
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert python(OWN + code, bundle) == ["0"]


def test_a_process_ends_while_the_workers_of_an_open_model_look_for_work(bundle: Path) -> None:
    code = """
model = runtime.load(sys.argv[1], threads=3, spin=100_000_000)
model(**model.sample[0])
print(workers(2))
"""
    assert python(OWN + code, bundle) == ["2"]


def test_a_child_process_calls_the_model_of_its_parent(bundle: Path) -> None:
    code = """
import numpy as np
model = runtime.load(sys.argv[1], threads=2)
inputs, outputs = model.sample
def is_right():
    return all(np.allclose(value, outputs[name], atol=1e-5) for name, value in model(**inputs).items())
print(is_right(), flush=True)
child = os.fork()
if child == 0:
    os._exit(0 if is_right() else 1)
print(os.waitpid(child, 0)[1], is_right())
"""
    assert python(OWN + code, bundle) == ["True", "0 True"]


def test_fewer_threads_than_requested_are_a_warning(bundle: Path) -> None:
    code = """
import warnings
from tvmflow.runtime import threads
class NoMoreThreads:
    def implements_function(self, name, query_imports):
        return True
    def get_function(self, name, query_imports):
        return lambda *arguments: 1
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    threads.start(NoMoreThreads(), 4, 0)
print(caught[0].category.__name__, caught[0].message)
"""
    (line,) = python(OWN + code, bundle)
    assert line.startswith("RuntimeWarning the system gives 1 of 4 threads")


def test_an_older_library_gets_the_workers_it_was_loaded_for(bundle: Path) -> None:
    code = """
two, one, three = (runtime.load(sys.argv[1], threads=count) for count in (2, 1, 3))
print([run(model) for model in (one, three, two, one, two)])
with ThreadPoolExecutor(1) as pool:
    print([pool.submit(run, model).result() for model in (two, three)])
"""
    assert python(OLDER + code, bundle) == ["[1, 3, 2, 1, 2]", "[2, 3]"]


def test_more_workers_than_tvms_pool_has_is_a_warning_that_says_what_to_do(bundle: Path) -> None:
    code = """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(run(runtime.load(sys.argv[1], threads=1)), len(told))
    late = runtime.load(sys.argv[1], threads=2)
    print(run(late), told[0].category.__name__, told[0].message)
    with ThreadPoolExecutor(1) as pool:
        print(pool.submit(run, late).result(), len(told))
"""
    first, second, third = python(OLDER + code, bundle)
    assert first == "1 0"
    assert second.startswith("1 RuntimeWarning model 'small' was loaded for 2 threads, but the workers of this thread")
    assert second.endswith("set TVM_NUM_THREADS=2")
    assert third == "2 1"


def test_what_is_asked_for_comes_before_the_environment(bundle: Path) -> None:
    code = """
print(runtime.load(sys.argv[1]).threads, runtime.load(sys.argv[1], threads=1).threads)
"""
    assert python(OWN + code, bundle, TVM_NUM_THREADS="3") == ["3 1"]


def test_a_model_gets_the_cores_of_this_machine_up_to_its_own_bound(bundle: Path) -> None:
    code = """
from tvmflow.runtime import threads
from tvmflow.hardware.target import host
print(*(threads.choose_count(None, most) == min(most or host().cores, host().cores) for most in (None, 1, 2, 4096)))
"""
    assert python(OWN + code, bundle) == ["True True True True"]


def test_a_process_that_may_use_one_core_gets_one_worker(bundle: Path) -> None:
    code = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(runtime.load(sys.argv[1]).threads)
"""
    assert python(OWN + code, bundle) == ["1"]


@pytest.mark.parametrize("prelude", [pytest.param(OWN, id="own"), pytest.param(OLDER, id="older")])
def test_one_worker_leaves_its_thread_free_to_move(bundle: Path, prelude: str) -> None:
    code = """
before = os.sched_getaffinity(0)
model = runtime.load(sys.argv[1], threads=1)
model(**model.sample[0])
print(os.sched_getaffinity(0) == before)
"""
    assert python(prelude + code, bundle) == ["True"]


@pytest.mark.parametrize(("variable", "expected"), [({}, "4000 2"), ({"TVM_THREAD_POOL_SPIN_COUNT": "9"}, "9 2")])
def test_idle_workers_of_tvm_sleep_soon_unless_the_user_says_otherwise(
    bundle: Path, variable: dict[str, str], expected: str
) -> None:
    code = """
model = runtime.load(sys.argv[1], threads=2)
print(os.environ["TVM_THREAD_POOL_SPIN_COUNT"], run(model))
"""
    assert python(OLDER + code, bundle, **variable) == [expected]


@pytest.mark.parametrize(
    ("requested", "variable", "expected"),
    [(None, {}, 4000), (None, {"TVM_THREAD_POOL_SPIN_COUNT": "9"}, 9), (7, {}, 7)],
)
def test_the_spin_of_workers_is_the_models_or_the_users(
    requested: int | None, variable: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TVM_THREAD_POOL_SPIN_COUNT", raising=False)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert threads.choose_spin(requested) == expected


def test_spin_reaches_the_workers_of_tvm_only_before_they_start(bundle: Path) -> None:
    code = """
model = runtime.load(sys.argv[1], threads=2, spin=0)
print(os.environ["TVM_THREAD_POOL_SPIN_COUNT"], run(model))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    runtime.load(sys.argv[1], spin=0)
    runtime.load(sys.argv[1], spin=7)
    print(*(item.message for item in told))
"""
    first, second = python(OLDER + code, bundle)
    assert first == "0 2"
    assert second.startswith("spin=7 comes too late, this process has workers already")


@pytest.mark.parametrize(("name", "value"), [("threads", 0), ("threads", -1), ("spin", -1)])
def test_numbers_that_make_no_sense_are_refused(bundle: Path, name: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"^{name} is {value}, expected [01] or more$"):
        runtime.load(bundle, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("TVM_NUM_THREADS", "many", "a positive number"), ("TVM_THREAD_POOL_SPIN_COUNT", "-1", "a number")],
)
def test_a_variable_that_is_no_number_is_refused(
    bundle: Path, name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refusal:
        runtime.load(bundle)
    assert str(refusal.value) == f"the environment variable {name} is {value!r}, expected {expected}"


def test_a_variable_that_was_refused_is_forgotten(bundle: Path) -> None:
    code = """
from tvmflow.errors import InputError
first = runtime.load(sys.argv[1])
count = os.environ["TVM_NUM_THREADS"]
os.environ["TVM_NUM_THREADS"] = "many"
try:
    runtime.load(sys.argv[1])
except InputError:
    os.environ["TVM_NUM_THREADS"] = count
print(runtime.load(sys.argv[1]).threads == first.threads)
"""
    assert python(OLDER + code, bundle) == ["True"]


def test_sixteen_threads_with_shapes_of_their_own_get_right_results(
    model: CompiledModel, inputs: Callable[[int], NamedArrays], reference: Callable[[NamedArrays], NamedArrays]
) -> None:
    expected = {batch: reference(inputs(batch)) for batch in range(1, 9)}

    def work(seed: int) -> float:
        generator = np.random.default_rng(seed)
        worst = 0.0
        for batch in generator.integers(1, 9, 40).tolist():
            outputs = model(**inputs(batch))
            worst = max(worst, *(float(np.abs(outputs[name] - expected[batch][name]).max()) for name in outputs))
        return worst

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(work, range(16))) < 1e-5


def test_a_benchmark_has_a_value_per_measurement(model: CompiledModel, inputs: Callable[[int], NamedArrays]) -> None:
    times = model.benchmark(inputs(2), repeat=5, number=3, warmup=2)
    assert (len(times.seconds), times.number) == (5, 3)
    assert 0 < times.min <= times.median <= times.max
    assert times.min <= times.mean <= times.max
    assert times.percentile(0) == times.min
    assert times.std == pytest.approx(np.std(times.seconds, ddof=1))


def test_a_benchmark_takes_the_golden_sample_where_it_is_given_nothing(model: CompiledModel) -> None:
    once = model.benchmark(repeat=1)
    assert (len(once.seconds), once.std) == (1, 0.0)


@pytest.mark.parametrize(("name", "value"), [("repeat", 0), ("number", 0), ("warmup", -1)])
def test_a_benchmark_of_nothing_is_refused(model: CompiledModel, name: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"^{name} is {value}, expected"):
        model.benchmark(**{name: value})
