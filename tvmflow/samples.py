"""Sample inputs from the release file's description, and files with samples and the original's outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tvmflow import npz, usercode
from tvmflow.arrays import Array, NamedArrays
from tvmflow.errors import SpecError
from tvmflow.spec import Dimension, Input


def measured_sizes(inputs: Sequence[Input], dimensions: Mapping[str, Dimension]) -> list[dict[str, int]]:
    """Return the sizes of the symbolic dimensions, by name, at each point to measure.

    A point takes the size at its index from the list `measure` of each dimension, the last one of a shorter list, and
    the typical size of a dimension without such a list. Static shapes give one point without sizes.
    """
    symbols = sorted({size for item in inputs for size in item.shape if isinstance(size, str)})
    ranges = {name: dimensions.get(name, Dimension()) for name in symbols}
    points = max((len(dimension.measure) for dimension in ranges.values()), default=0) or 1
    return [
        {
            name: dimension.measure[min(point, len(dimension.measure) - 1)]
            if dimension.measure
            else dimension.typical_size
            for name, dimension in ranges.items()
        }
        for point in range(points)
    ]


def choose_sizes(inputs: Sequence[Input], dimensions: Mapping[str, Dimension], index: int) -> dict[str, int]:
    """Return the sizes of the symbolic dimensions, by name, for sample `index`.

    The first samples have the sizes to measure. The others cycle through the size to tune for, the typical size plus 3,
    the smallest size, and the largest one if it is not much larger than the typical size. These reveal a size that was
    built into the model by mistake.
    """
    points = measured_sizes(inputs, dimensions)
    if index < len(points):
        return points[index]
    sizes = {}
    for name in points[0]:
        dimension = dimensions.get(name, Dimension())
        beyond = dimension.typical_size + 3
        size_choices = [
            *([dimension.tune] if dimension.tune else []),
            beyond if dimension.max is None else min(beyond, dimension.max),
            dimension.min,
            # The upper end only where it costs no more than a few typical runs.
            *(
                [dimension.max]
                if dimension.max is not None and dimension.max <= max(64, 4 * dimension.typical_size)
                else []
            ),
        ]
        distinct = [size for size in dict.fromkeys(size_choices) if size != dimension.typical_size] or size_choices[:1]
        sizes[name] = distinct[(index - len(points)) % len(distinct)]
    return sizes


def make(
    inputs: Sequence[Input],
    dimensions: Mapping[str, Dimension],
    index: int,
    seed: int,
    folder: Path,
    sizes: Mapping[str, int] | None = None,
) -> NamedArrays:
    """Return sample `index`: one array per input by name; equal seeds give equal samples.

    `folder` is the folder of the release file, where files and modules of samples are looked up. `sizes` are the sizes
    of the symbolic dimensions, by default those that `choose_sizes` returns for the index. Raises SpecError for samples
    of the wrong shape or dtype, a file or function that fails, and arrays that are too large.
    """
    chosen = choose_sizes(inputs, dimensions, index) if sizes is None else sizes
    arrays = {}
    shapes = [tuple(chosen[size] if isinstance(size, str) else size for size in item.shape) for item in inputs]
    for position, (item, shape) in enumerate(zip(inputs, shapes, strict=True)):
        generator = np.random.default_rng([seed, index, position])
        try:
            others = (*shapes[:position], *shapes[position + 1 :])
            longest = max((size for other in others for size in other[1:]), default=1)
            arrays[item.name] = _make_array(item, shape, generator, seed + index, folder, longest)
        except (ValueError, OverflowError) as error:  # NumPy has a largest array.
            raise SpecError(
                f"samples of input {item.name!r} with shape {list(shape)} cannot be made: {error}"
            ) from error
    return arrays


def make_at_sizes(inputs: Sequence[Input], sizes: Mapping[str, int], seed: int, folder: Path) -> NamedArrays:
    """Return a sample whose symbolic dimensions have these sizes: one array per input by name.

    Equal seeds give equal samples. `folder` is the folder of the release file, where files and modules of samples are
    looked up. Raises SpecError for samples of the wrong shape or dtype, a file or function that fails, and arrays that
    are too large.
    """
    return make(inputs, {}, 0, seed, folder, sizes)


def constant_outputs(outputs: Sequence[NamedArrays]) -> dict[str, str]:
    """Return what each output is, by name, where each is one number in all samples and elements; else nothing.

    `outputs` are the outputs for each sample. A comparison with such outputs proves little, unless the model has a
    single number as its output.
    """
    values: dict[str, str] = {}
    for name in outputs[0]:
        numbers = np.concatenate([arrays[name].ravel() for arrays in outputs])
        if numbers.size == 1 or not np.array_equal(numbers, np.full_like(numbers, numbers[:1]), equal_nan=True):
            return {}
        values[name] = f"{name!r} is {numbers[0]:g}" if numbers.size else f"{name!r} is empty"
    return values


def _make_array(
    item: Input, shape: tuple[int, ...], generator: np.random.Generator, seed: int, folder: Path, longest: int
) -> Array:
    """Make the array of one input; `longest` is the largest of its `lengths`."""
    samples = item.samples
    match samples.kind:
        case "ones":
            return np.ones(shape, item.dtype)
        case "uniform":
            low, high = samples.low or 0.0, 1.0 if samples.high is None else samples.high
            return generator.uniform(low, high, shape).astype(item.dtype)
        case "normal":
            return generator.normal(samples.mean, samples.std, shape).astype(item.dtype)
        case "integers":
            return generator.integers(int(samples.low or 0), int(samples.high or 2), shape).astype(item.dtype)
        case "lengths":
            return generator.integers(1, longest, shape, endpoint=True).astype(item.dtype)
        case "categories":
            return _make_categories(item, shape, generator)
        case "npz":
            array = _from_npz(item, folder)
        case "function":
            array = np.asarray(
                usercode.call(samples.function or "", f"samples of input {item.name!r}:", SpecError, shape, seed)
            )
    if array.shape != shape:
        raise SpecError(f"samples of input {item.name!r} have shape {list(array.shape)}, expected {list(shape)}")
    if array.dtype.name != item.dtype:
        raise SpecError(f"samples of input {item.name!r} are {array.dtype.name}, expected {item.dtype}")
    return array


def _make_categories(item: Input, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """An array with one of its categories for each element of a column. Raises SpecError for other columns."""
    columns = item.samples.categories or ()
    width = shape[-1] if len(shape) > 1 else 1
    if width != len(columns):
        raise SpecError(f"samples of input {item.name!r} have categories for {len(columns)} columns, expected {width}")
    is_float = item.dtype.startswith("float")
    array = (generator.normal(size=shape) if is_float else generator.integers(0, 2, shape)).astype(item.dtype)
    for column, categories in enumerate(columns):
        if categories:
            part = array[..., column] if len(shape) > 1 else array
            part[...] = generator.choice(categories, part.shape).astype(item.dtype)
    return array


def _from_npz(item: Input, folder: Path) -> Array:
    file = folder / (item.samples.file or Path())
    key = item.samples.key or item.name
    try:
        arrays = npz.read(file)
    except (OSError, ValueError) as error:
        raise SpecError(f"samples of input {item.name!r}: {str(file)!r} is no readable .npz ({error})") from error
    if key not in arrays:
        raise SpecError(f"samples of input {item.name!r}: {str(file)!r} holds no {key!r}, only {', '.join(arrays)}")
    return arrays[key]


def save(path: Path, pairs: Sequence[tuple[NamedArrays, NamedArrays]]) -> None:
    """Write samples to a file: pairs of the inputs and the original's outputs, by name."""
    arrays = {}
    for index, (inputs, outputs) in enumerate(pairs):
        arrays.update({f"{index}/input:{name}": array for name, array in inputs.items()})
        arrays.update({f"{index}/output:{name}": array for name, array in outputs.items()})
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> list[tuple[NamedArrays, NamedArrays]]:
    """Read the samples that `save` wrote: pairs of inputs and outputs, by name."""
    pairs: list[tuple[NamedArrays, NamedArrays]] = []
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            index, _, rest = name.partition("/")
            while len(pairs) <= int(index):
                pairs.append(({}, {}))
            kind, _, key = rest.partition(":")
            pairs[int(index)][kind == "output"][key] = archive[name]
    return pairs
