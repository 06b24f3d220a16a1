"""An import contract that import-linter lacks: no circle among the modules of the whole project."""

from collections.abc import Iterator

from grimp import ImportGraph
from importlinter import Contract, ContractCheck
from importlinter.application import output


class NoCirclesContract(Contract):
    """A contract that no module imports itself through other modules.

    Every import statement between modules of the root packages counts: at the top of a module, in a function, and
    under TYPE_CHECKING. An import of a package is an import of its `__init__`. Python's own import of a module's
    package does not count, so a package whose `__init__` collects names from its modules is no circle as long as these
    modules import nothing from the package itself.
    """

    type_name = "no_circles"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look for circles in the graph; the contract is kept when there are none."""
        circles = list(find_circles(graph))
        return ContractCheck(kept=not circles, metadata={"graph": graph, "circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each circle with the lines of its import statements."""
        graph: ImportGraph = check.metadata["graph"]
        for circle in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules import each other:")
            for importer, imported in zip(circle, [*circle[1:], circle[0]], strict=True):
                details = graph.get_import_details(importer=importer, imported=imported)
                lines = ", ".join(str(detail["line_number"]) for detail in details)
                output.print_error(f"  {importer} imports {imported} (line {lines})", bold=False)
            output.new_line()


def find_circles(graph: ImportGraph) -> Iterator[tuple[str, ...]]:
    """Yield circles as chains of modules, the last of which imports the first.

    Each module is in at most one chain. If the graph has circles, at least one of them is yielded.
    """
    reported: set[str] = set()
    for importer in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            chain = graph.find_shortest_chain(importer=imported, imported=importer)
            if chain is not None and reported.isdisjoint(chain):
                reported.update(chain)
                yield tuple(chain)
