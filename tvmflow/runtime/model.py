"""A bundle loaded into this process: a model to call with arrays."""

import io
import operator
import re
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tvmflow import npz
from tvmflow.bundle import (
    DIRECT_MAIN,
    INDEX_ERROR,
    LARGEST_DIRECT_OUTPUT,
    MAIN_CONSTANTS,
    PACK_WEIGHTS,
    Manifest,
    TensorSpec,
    extract,
)
from tvmflow.errors import BundleError, InputError
from tvmflow.hardware.target import compute_capability
from tvmflow.runtime import cuda, kept, library
from tvmflow.runtime import threads as pools
from tvmflow.runtime.alignment import ALIGNMENT, copy_aligned, find_address, make_aligned
from tvmflow.runtime.inputs import InputCheck, to_one_line
from tvmflow.runtime.timings import Timings
from tvmflow.runtime.uri import locate

if TYPE_CHECKING:
    from tvmflow.arrays import Array

# Bytes; up to this size, an input is copied into a tensor that exists, which is quicker than making a tensor of its
# memory, and an output is copied, so that a small array does not hold a whole page of TVM's memory.
_LARGEST_COPY = LARGEST_DIRECT_OUTPUT
# In TVM's error for arrays whose sizes are not those that the model relies on.
_CONTRADICTION = "match_cast"
# The two sizes in that error, as the virtual machine words it.
_TWO_SIZES = re.compile(r"\((\d+) vs\. (\d+)\)")
# A thread's cache of prepared calls is emptied when it holds calls of this many shapes.
_CALL_CACHE_SIZE = 64


def load(path_or_uri: Path | str, *, threads: int | None = None, spin: int | None = None) -> "CompiledModel":
    """Verify a bundle, load its library and return the model.

    `path_or_uri` is a path, `file://`, `s3://BUCKET/KEY`, or a release, `release://NAME@CHANNEL` or
    `release://NAME/VERSION`. Of a release's bundles, the best one that this machine can run is loaded and kept in a
    cache.

    `threads` is the number of worker threads of a call: by default TVM_NUM_THREADS; without that variable, one for each
    physical core that this process may use, at most the bundle's `max_threads`. `spin` is how many times an idle worker
    looks for work before it sleeps: by default TVM_THREAD_POOL_SPIN_COUNT, else 4000, which is a millisecond or two; 0
    spares the processor and costs some microseconds per call.

    A model has worker threads of its own, from here to `close`. They serve one caller at a time: calls that other
    threads make meanwhile run on the threads of their callers. A bundle that was built before libraries had threads of
    their own uses TVM's pool, and a RuntimeWarning says when that is smaller than `threads` or ignores `spin`.

    Raises BundleError when the file is damaged or this machine cannot run it, before any of its code runs; StoreError
    when it cannot be fetched; InputError for a number of threads below 1 or a spin below 0.
    """
    refusals: list[BundleError] = []
    with closing(locate(path_or_uri)) as files:
        for file in files:
            try:
                return _open(file, threads, spin)
            except BundleError as error:
                refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise BundleError(f"no bundle of {str(path_or_uri)!r} runs on this machine: {'; '.join(map(str, refusals))}")


def _open(file: Path, threads: int | None, spin: int | None) -> "CompiledModel":
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        manifest = extract(file, Path(folder))
        manifest.check_host()
        # The library stays in memory when its file is removed with the folder.
        return CompiledModel(manifest, Path(folder), threads, spin)


def _arrays(
    stream: IO[bytes], file: str, bundle: str, read: "Callable[[IO[bytes]], dict[str, Array]]" = npz.parse
) -> "dict[str, Array]":
    """Read a bundle's weights, in the order in which `main` takes them, or its golden sample: arrays by name.

    Raises BundleError when the file does not hold plain arrays.
    """
    try:
        return read(stream)
    except ValueError as error:
        raise BundleError(f"bundle {bundle!r}: its {file} holds no plain arrays ({error}); build it again") from error


@dataclass(frozen=True, slots=True)
class _Call:
    """A call for inputs of certain shapes: the library's function, and for each input one that makes its tensor.

    `others` are the function's arguments after the inputs.
    """

    function: "Callable[..., Any]"
    inputs: "tuple[Callable[[Array], Any], ...]"
    others: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _DirectCall:
    """A call of the direct form of `main` for inputs of certain shapes, with memory of its own.

    Small inputs are copied to `inputs`; the places of the others are in `large`. `arguments` are tensors with the
    memory of `inputs`, the other arguments, and tensors with the memory of `outputs`, which are by name.
    """

    function: "Callable[..., Any]"
    inputs: "tuple[Array, ...]"
    large: tuple[int, ...]
    arguments: tuple[Any, ...]
    outputs: "tuple[tuple[str, Array], ...]"


class _PerThread(threading.local):
    """A thread's own virtual machine, the machine's functions, and prepared calls by the shapes of the inputs.

    `stages` has, by the place of an input, memory for arrays that the library cannot read where they are.
    """

    def __init__(self) -> None:
        self.machine: Any = None
        self.functions: dict[str, Callable[..., Any]] = {}
        self.calls: dict[tuple[tuple[int, ...], ...], _Call | _DirectCall] = {}
        self.stages: dict[int, Array] = {}


class CompiledModel:
    """A compiled model: call it with arrays in order or by name; it returns the outputs by name.

    Threads can share a model: each thread gets a virtual machine of its own.
    """

    def __init__(
        self, manifest: Manifest, folder: Path, threads: int | None, spin: int | None = None, session: Any = None
    ) -> None:
        """Load the library from the folder that `extract` filled.

        `threads` and `spin` are those of `load`. `session` is TVM's RPC session of another machine, which runs the
        model then. Raises BundleError when the library cannot be loaded or the machine lacks the GPU that it needs,
        InputError for a number of threads below 1 or a spin below 0.
        """
        self.manifest = manifest
        self.threads = pools.choose_count(threads, manifest.max_threads)
        looks = pools.choose_spin(spin)
        self._warns_of_fewer_threads = threads is not None
        library.load()
        import tvm_ffi

        self._from_dlpack = tvm_ffi.from_dlpack
        self._tensor_type, self._array_type = tvm_ffi.Tensor, tvm_ffi.Array
        # The array's own iterator takes as long as a small model.
        self._item_of, self._size_of = map(tvm_ffi.get_global_func, ("ffi.ArrayGetItem", "ffi.ArraySize"))
        self._remote = session is not None
        # Whether arrays can share memory with tensors: not with another machine's, and not with a GPU's.
        self._on_cpu = manifest.arch != "cuda" and not self._remote
        kind = "cuda" if manifest.arch == "cuda" else "cpu"
        self._device = session.device(kind, 0) if self._remote else None
        if self._remote and not self.device.exist:
            raise BundleError(f"bundle {manifest.name!r} needs an NVIDIA GPU, and the remote machine shows none")
        self._gpu = None if self._on_cpu or self._remote else _gpu_for(manifest)
        try:
            if self._remote:
                session.upload(str(folder / "mod.so"))
            self._library: Any = (
                session.load_module("mod.so")
                if self._remote
                # By default it would stay in memory, with its weights, and on the disk until the process ends.
                else tvm_ffi.load_module(str(folder / "mod.so"), keep_module_alive=False)
            )
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise BundleError(f"bundle {manifest.name!r}: its library cannot be loaded ({reason})") from error
        stop_threads = pools.start(self._library, self.threads, looks) if self._on_cpu else None
        self._uses_tvms_pool = self._on_cpu and stop_threads is None
        if self._uses_tvms_pool:
            pools.reserve(self.threads, spin)
        self._stop_threads = None if stop_threads is None else weakref.finalize(self, stop_threads)
        self._sample_file = (folder / "sample.npz").read_bytes()
        self._local = _PerThread()
        self._has_direct_main = self._on_cpu and self._library.implements_function(DIRECT_MAIN, query_imports=True)
        self._params = self._weights(folder)
        self._direct, self._constants = self._find_direct_main()
        self._input_check = InputCheck(manifest)
        self._names = self._input_check.names
        self._dtypes = tuple(np.dtype(spec.dtype) for spec in self.inputs)
        self._output_names = tuple(spec.name for spec in self.outputs)
        self._is_free = self._on_cpu and any(least != largest for least, largest in manifest.dimensions.values())
        kept.limit.leave_out()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, in order."""
        return self.manifest.outputs

    @property
    def sample(self) -> "tuple[dict[str, Array], dict[str, Array]]":
        """The golden sample: inputs by name, and the outputs, by name, that the original model gives for them.

        Raises BundleError when its file does not hold plain arrays.
        """
        return npz.part(self._sample, "input:"), npz.part(self._sample, "output:")

    @property
    def typical_inputs(self) -> "dict[str, Array]":
        """Inputs by name with the typical sizes of free dimensions, where the golden sample has others; else its own.

        Raises BundleError when their file does not hold plain arrays.
        """
        return npz.typical_inputs(self._sample)

    @property
    def undecided(self) -> "dict[str, Array]":
        """Masks of the golden outputs by name: the integers and bools that rounding decides, as equal scores do.

        An output without a mask has none.
        """
        return npz.part(self._sample, "undecided:")

    @cached_property
    def _sample(self) -> "dict[str, Array]":
        return _arrays(io.BytesIO(self._sample_file), "sample.npz", self.manifest.name)

    def __call__(self, /, *args: "npt.ArrayLike", **kwargs: "npt.ArrayLike") -> "dict[str, Array]":
        """Run the model once and return its outputs by name, as new arrays.

        A large array is the very memory that the model wrote, where the bundle's `fresh_outputs` allows it. When the
        array is gone, later calls use that memory again. What is kept for later calls, which at ever other sizes need
        ever other blocks, is given back to the system when it is more than 256 MiB and twice what the largest needed.

        Takes every input, in order or by name. Raises InputError for an input that is missing, unknown, or of the wrong
        shape or dtype, for integers beyond the table in which the model looks them up, and for sizes that contradict
        each other while the model runs; ValueError when the model is closed.
        """
        arrays: Sequence[Any] = (*args, *map(kwargs.get, self._names[len(args) :])) if kwargs else args
        call = self._find_call(arrays) if len(args) + len(kwargs) == len(self._names) else None
        if call is None:
            checked, sizes = self._input_check.check(self._input_check.match(args, kwargs))
            arrays = tuple(checked.values())
            call = self._find_call(arrays) or self._prepare_call(arrays, sizes)
        if self._input_check.indices:
            self._input_check.check_indices(arrays)
        if pools.are_mixed and self._uses_tvms_pool:
            pools.use_workers(self.threads)
        if isinstance(call, _DirectCall):
            arguments: Sequence[Any] = call.arguments
            small = arrays
            if call.large:
                arguments = [*arguments]
                for place in call.large:
                    arguments[place] = self._to_tensor(arrays[place], place)
                small = [array for place, array in enumerate(arrays) if place not in call.large]
            for buffer, array in zip(call.inputs, small):  # noqa: B905
                buffer[...] = array
            try:
                call.function(*arguments)
            except RuntimeError as error:
                self._refuse_inputs(error, arrays)
                raise
            return {name: output.copy() for name, output in call.outputs}
        return self._run(call, arrays)

    def _refuse_inputs(self, error: RuntimeError, arrays: Sequence[Any]) -> None:
        """Raise InputError in place of TVM's error where the inputs are at fault.

        Their sizes contradict each other, or they lead to an index outside of the model's data.
        """
        if INDEX_ERROR in str(error):
            reason = to_one_line(error).partition(INDEX_ERROR)[2]
            raise InputError(f"the model does not run with these inputs: {reason}") from error
        if _CONTRADICTION not in str(error):
            return
        shapes = ", ".join(f"{name} {[*np.shape(array)]}" for name, array in zip(self._names, arrays, strict=True))
        sizes = _TWO_SIZES.search(str(error))
        if sizes is not None:
            reason = "two sizes that must be equal are {} and {}".format(*sizes.groups())
        else:
            reason = to_one_line(error).removeprefix(f"{_CONTRADICTION} error: ")
        raise InputError(f"the model does not run with inputs of the shapes {shapes}: {reason}") from error

    def _run(self, call: _Call, arrays: Sequence[Any]) -> "dict[str, Array]":
        """Run a function of the virtual machine and return the outputs by name."""
        if self._is_free:
            kept.limit.check()
        try:
            result = call.function(*map(operator.call, call.inputs, arrays), *call.others)
        except RuntimeError as error:
            self._refuse_inputs(error, arrays)
            raise
        if self._is_free:
            kept.limit.learn()
        if type(result) is self._array_type and self._size_of(result) == len(self._output_names):
            item_of, to_array = self._item_of, self._to_array
            return {name: to_array(item_of(result, place)) for place, name in enumerate(self._output_names)}
        values = [result] if isinstance(result, self._tensor_type) else result
        return dict(zip(self._output_names, map(self._to_array, values), strict=True))

    def _weights(self, folder: Path) -> tuple[Any, ...]:
        """The packed weights, which `main` and the variants take after the inputs."""
        tensors: tuple[Any, ...] = ()
        if self.manifest.has_weights_file:
            with (folder / "mod.params").open("rb") as stream:
                # Their digest was checked; a check sum would take as long as to read them.
                arrays = _arrays(stream, "mod.params", self.manifest.name, npz.view)
            tensors = tuple(map(self._to_tensor, arrays.values()))
        return tuple(self._functions()[PACK_WEIGHTS](*tensors)) if self.manifest.packs_at_load else tensors

    def _find_direct_main(self) -> "tuple[Callable[..., Any] | None, tuple[Any, ...]]":
        """The direct form of `main` and the constants that it takes; None where the library has no such form."""
        if not self._has_direct_main:
            return None, ()
        direct = self._library.get_function(DIRECT_MAIN, query_imports=True)
        return direct, tuple(self._functions()[MAIN_CONSTANTS]())

    def _find_call(self, values: Sequence[Any]) -> _Call | _DirectCall | None:
        """The prepared call for inputs of these shapes; None if there is none, or one is no array of its dtype."""
        # Every step of this loop counts in a call of a few microseconds.
        shapes = []
        for value, dtype in zip(values, self._dtypes):  # noqa: B905
            if type(value) is not np.ndarray or (value.dtype is not dtype and value.dtype != dtype):
                return None
            shapes.append(value.shape)
        return self._local.calls.get(tuple(shapes))

    def _prepare_call(self, arrays: "Sequence[Array]", sizes: Mapping[str, int]) -> _Call | _DirectCall:
        """Prepare this thread's call for inputs of these shapes, which have been checked, and cache it."""
        if self._uses_tvms_pool:
            self._start_pool()
        name = self._function_for(sizes)
        direct = self._prepare_direct(arrays, sizes) if name == "main" else None
        call = direct or self._prepare_function(name, arrays)
        calls = self._local.calls
        if len(calls) >= _CALL_CACHE_SIZE:
            calls.clear()
        calls[tuple(array.shape for array in arrays)] = call
        return call

    def _prepare_function(self, name: str, arrays: "Sequence[Array]") -> _Call:
        """Prepare a call of a function of the virtual machine."""
        inputs = tuple(map(self._copier_for, range(len(arrays)), arrays))
        return _Call(self._functions()[name], inputs, self._params)

    def _copier_for(self, place: int, example: "Array") -> "Callable[[Array], Any]":
        """The function that makes tensors of arrays of the example's shape and dtype, for the input at this place."""
        if self._gpu is not None:
            return self._gpu.copier(example)
        is_small = self._on_cpu and example.nbytes <= _LARGEST_COPY
        return self._copier(example) if is_small else partial(self._to_tensor, place=place)

    def _prepare_direct(self, arrays: "Sequence[Array]", sizes: Mapping[str, int]) -> _DirectCall | None:
        """Prepare a call of the direct form of `main`; None without such a form, and for a large output.

        A large output is not copied, and the virtual machine makes memory for it. It runs all calls of a thread that
        observes it by TVM's instruments.
        """
        if self._direct is None or self._local.machine is not None:
            return None
        shapes = [
            tuple(sizes.get(size, -1) if isinstance(size, str) else size for size in spec.shape)
            for spec in self.outputs
        ]
        if any(min(shape, default=0) < 0 for shape in shapes):
            # The sizes follow from those of the inputs, or there would be no direct form.
            call = self._prepare_function("main", arrays)
            shapes = [output.shape for output in self._run(call, arrays).values()]
        outputs = {
            spec.name: make_aligned(shape, np.dtype(spec.dtype))
            for spec, shape in zip(self.outputs, shapes, strict=True)
        }
        # NumPy gives an empty array strides that a function of the library refuses.
        if any(array.nbytes > _LARGEST_COPY or not array.size for array in outputs.values()):
            return None
        large = tuple(place for place, array in enumerate(arrays) if array.nbytes > _LARGEST_COPY)
        inputs = {place: copy_aligned(array) for place, array in enumerate(arrays) if place not in large}
        arguments = (
            *(self._from_dlpack(inputs[place]) if place in inputs else None for place in range(len(arrays))),
            *self._params,
            *self._constants,
            *map(self._from_dlpack, outputs.values()),
        )
        return _DirectCall(self._direct, tuple(inputs.values()), large, arguments, tuple(outputs.items()))

    def _start_pool(self) -> None:
        workers = pools.use_workers(self.threads)
        if self._warns_of_fewer_threads and workers < self.threads:
            warnings.warn(
                f"model {self.manifest.name!r} was loaded for {self.threads} threads, but the workers of this thread "
                f"are {workers} already; load the model with most threads first, or set TVM_NUM_THREADS={self.threads}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _copier(self, example: "Array") -> "Callable[[Array], Any]":
        """Make a tensor for arrays of the example's shape and dtype; return the function that copies one into it."""
        buffer = copy_aligned(example)
        tensor = self._from_dlpack(buffer)

        def copy(array: "Array") -> Any:
            buffer[...] = array
            return tensor

        return copy

    def _to_tensor(self, array: "Array", place: int | None = None) -> Any:
        """An array as a tensor on the model's device.

        On a CPU, an array that the library cannot read where it is is copied: to memory that this thread keeps for the
        input at `place`, if it is one.
        """
        if not self._on_cpu:
            if self._gpu is not None:
                return self._gpu.to_tensor(array)
            from tvm import runtime

            return runtime.tensor(array, self.device)
        # Libraries of former versions load whole vectors from memory that is aligned as TVM aligns its own.
        alignment = array.itemsize if self.manifest.unaligned_inputs else ALIGNMENT
        is_usable = find_address(array) % alignment == 0 and array.flags.writeable and array.flags.c_contiguous
        return self._from_dlpack(array if is_usable else self._copy_aligned(array, place))

    def _copy_aligned(self, array: "Array", place: int | None) -> "Array":
        """A copy of an array in aligned memory: in new memory, or in that which this thread keeps for an input.

        New memory would cost more than the copy: the system clears each page of it at the first write.
        """
        if place is None:
            return copy_aligned(array)
        stages = self._local.stages
        if place not in stages or stages[place].nbytes < array.nbytes:
            stages[place] = make_aligned((array.nbytes,), np.dtype(np.uint8))
        copy = stages[place][: array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def _function_for(self, sizes: Mapping[str, int]) -> str:
        """The name of the function for these sizes of the symbolic dimensions: a variant built for them, or `main`."""
        for variant in self.manifest.variants:
            if all(sizes[name] == size for name, size in variant.sizes.items()):
                return variant.function
        return "main"

    def _functions(self) -> "dict[str, Callable[..., Any]]":
        """The functions of this thread's virtual machine."""
        if not self._local.functions:
            if self._library is None:
                raise ValueError(f"model {self.manifest.name!r} is closed")
            if not self._remote:
                machine = library.create_machine(self._library, on_gpu=self._gpu is not None)
                self._local.functions = self._find_functions(machine)
            else:
                self._local.functions = self._find_functions(self._lookup_of(self.machine))
        return self._local.functions

    def _lookup_of(self, machine: Any) -> "Callable[[str], Callable[..., Any]]":
        """The function that looks up a function of TVM's virtual machine by its name."""
        # A remote call can return one tensor only: a stateful one keeps several there, to be fetched one by one.
        return partial(_stateful, machine) if self._remote else machine.__getitem__

    def _find_functions(self, find: "Callable[[str], Callable[..., Any]]") -> "dict[str, Callable[..., Any]]":
        """Look up `main`, the variants and what loading calls. Raises BundleError for a function that is not there."""
        names = ["main", *(item.function for item in self.manifest.variants)]
        if self.manifest.packs_at_load:
            names.append(PACK_WEIGHTS)
        if self._has_direct_main:
            names.append(MAIN_CONSTANTS)
        try:
            return {name: find(name) for name in names}
        except AttributeError as error:
            raise BundleError(f"bundle {self.manifest.name!r}: {error}; build it again") from error

    def _to_array(self, tensor: Any) -> "Array":
        if not self._on_cpu:
            array: Array = tensor.numpy() if self._gpu is None else self._gpu.to_array(tensor)
            return array
        array = np.from_dlpack(tensor)
        # Without `fresh_outputs` an output may be memory of an input or a constant of the library. Versions of NumPy
        # differ in whether they may write to memory of others.
        is_own = array.nbytes > _LARGEST_COPY and self.manifest.fresh_outputs and array.flags.writeable
        return array if is_own else array.copy()

    def check_inputs(self, inputs: "Mapping[str, npt.ArrayLike]") -> "dict[str, Array]":
        """Return inputs by name as C-contiguous arrays, in the model's order, strings as their places in the labels.

        Raises InputError for an input that is missing, unknown, or of the wrong shape or dtype, and for integers beyond
        the table in which the model looks them up.
        """
        arrays = self._input_check.check(inputs)[0]
        self._input_check.check_indices(tuple(arrays.values()))
        return arrays

    def benchmark(
        self,
        inputs: "Mapping[str, npt.ArrayLike] | None" = None,
        *,
        repeat: int = 10,
        number: int = 1,
        warmup: int = 1,
    ) -> "Timings":
        """Time whole calls of the model, including the checks of inputs and the copies of outputs.

        Takes `repeat` measurements of `number` runs each, after `warmup` runs that do not count. `inputs` are arrays by
        name, by default the typical ones. Raises InputError for wrong inputs, for `repeat` or `number` below 1, and
        for `warmup` below 0.
        """
        for name, value, least in (("repeat", repeat, 1), ("number", number, 1), ("warmup", warmup, 0)):
            if value < least:
                raise InputError(f"{name} is {value}, expected {least} or more")
        arrays = self.check_inputs(self.typical_inputs if inputs is None else inputs)
        for _ in range(warmup):
            self(**arrays)
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            for _ in range(number):
                self(**arrays)
            seconds.append((time.perf_counter() - start) / number)
        return Timings(tuple(seconds), number)

    def time_function(
        self, inputs: "Mapping[str, npt.ArrayLike]", *, repeat: int = 10, number: int = 1, warmup: int = 1
    ) -> "Timings":
        """Time the library's function alone: its inputs are on the device already, its outputs stay there.

        Takes `repeat` measurements of `number` runs each, after `warmup` runs that do not count; the three are not
        checked. TVM's evaluator measures on the machine that runs the model, so that an RPC connection does not count.
        Raises InputError for wrong inputs, ValueError when the model is closed.
        """
        arrays, sizes = self._input_check.check(inputs)
        if self._uses_tvms_pool:
            self._start_pool()
        machine, name = self.machine, self._function_for(sizes)
        # TVM's package accepts tensors of its own class only; tensors from before its import have another class.
        tensors = [
            tensor if self._remote else self._from_dlpack(tensor)
            for tensor in (*map(self._to_tensor, arrays.values()), *self._params)
        ]
        machine.set_input(name, *tensors)
        for _ in range(warmup):
            machine.invoke_stateful(name)
        evaluate = machine.time_evaluator("invoke_stateful", self.device, number=number, repeat=repeat)
        return Timings(tuple(map(float, evaluate(name).results)), number)

    @property
    def machine(self) -> Any:
        """The calling thread's `tvm.runtime.vm.VirtualMachine`, for TVM's own instruments; it runs the thread's calls.

        Raises ImportError without TVM's Python package, ValueError when the model is closed.
        """
        if self._local.machine is None:
            if self._library is None:
                raise ValueError(f"model {self.manifest.name!r} is closed")
            with library.without_torch():
                from tvm.runtime.vm import VirtualMachine
            # TVM's package accepts libraries of its own class only; one loaded before its import has another class.
            self._local.machine = VirtualMachine(library.rewrap(self._library), self.device)
            self._local.calls.clear()
            self._local.functions = self._find_functions(self._lookup_of(self._local.machine))
        return self._local.machine

    @property
    def device(self) -> Any:
        """The device that runs the model, an object of TVM's device class.

        Raises ImportError without TVM's Python package.
        """
        if self._device is None:
            with library.without_torch():
                from tvm import runtime
            self._device = runtime.device("cpu" if self._on_cpu else "cuda", 0)
        return self._device

    def close(self) -> None:
        """End the threads, and free the library and its memory; calling the model afterwards raises ValueError."""
        if self._stop_threads is not None:
            self._stop_threads()
        self._local = _PerThread()
        self._library = self._direct = None
        self._params = self._constants = ()
        if self._on_cpu:
            kept.limit.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gpu_for(manifest: Manifest) -> cuda.Memory:
    """The memory of this machine's GPU. Raises BundleError without one."""
    try:
        memory = cuda.Memory()
    except BundleError as error:
        raise BundleError(f"bundle {manifest.name!r} needs an NVIDIA GPU: {error}") from error
    needed = compute_capability(manifest.tvm_target)
    if needed is not None and memory.capability < needed:
        major, minor = memory.capability
        raise BundleError(
            f"bundle {manifest.name!r} is built for NVIDIA GPUs of compute capability {needed[0]}.{needed[1]}, "
            f"this machine's has {major}.{minor}; build for cuda-sm{major}{minor}"
        )
    return memory


def _stateful(machine: Any, name: str) -> "Callable[..., Any]":
    """A function of a virtual machine that keeps its outputs in the machine and fetches them one by one."""

    def call(*tensors: Any) -> Any:
        machine.set_input(name, *tensors)
        machine.invoke_stateful(name)
        return machine.get_outputs(name)

    return call
