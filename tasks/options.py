"""Options: what a release file says to the compiler, in the compiler's own terms."""

from typing import TYPE_CHECKING

from tvmflow.bundle import TensorSpec
from tvmflow.spec import Build, Spec

if TYPE_CHECKING:
    from tvmflow.compiler import BuildOptions


def as_options(section: Build, variants: tuple[dict[str, int], ...]) -> "BuildOptions":
    """The compiler's options for a release file's section `build`."""
    from tvmflow.compiler import BuildOptions

    options = {**section.model_dump(), "fast_algorithms": section.fast_algorithms == "allow"}
    return BuildOptions(**options, variants=variants)


def variants(spec: Spec, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
    """The sizes of symbolic dimensions that get functions of their own: those that the release file says to tune at."""
    names = {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    sizes = {name: size for name in sorted(names) if (size := spec.dimension(name).tune) is not None}
    return (sizes,) if sizes else ()
