"""Options: the compiler's options that a release file asks for."""

from typing import TYPE_CHECKING

from tvmflow.bundle import TensorSpec
from tvmflow.spec import Build, Spec

if TYPE_CHECKING:
    from tvmflow.compiler import BuildOptions


def as_options(section: Build, variants: tuple[dict[str, int], ...]) -> "BuildOptions":
    """Return the compiler's options for a release file's section `build` and the given `variants`."""
    from tvmflow.compiler import BuildOptions

    options = {**section.model_dump(exclude={"threads"}), "fast_algorithms": section.fast_algorithms == "allow"}
    return BuildOptions(**options, variants=variants)


def variants(spec: Spec, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
    """Return the sizes of the symbolic dimensions of `inputs`, by name, for which the build specialises functions.

    They are the sizes that the release file says to tune at: a tuple of one mapping, or an empty tuple where it names
    none.
    """
    names = {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    sizes = {name: size for name in sorted(names) if (size := spec.dimension(name).tune) is not None}
    return (sizes,) if sizes else ()
