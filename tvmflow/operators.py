"""The user's own operators: each has a definition as a function of ONNX, and a converter that compiles it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmflow import usercode
from tvmflow.errors import ExportError
from tvmflow.onnx_model.graph import nodes_of

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class OwnOperator:
    """An operator of another domain than the standard's.

    `function` defines what it computes: ONNX Runtime runs it as the reference. `convert` takes a
    `tvmflow.compiler.onnx.Node` and returns the Relax expression that is compiled in its place.
    """

    function: "onnx.FunctionProto"
    convert: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The name with the domain, as `org.example.Squareplus`."""
        return f"{self.function.domain}.{self.function.name}"

    def __call__(self, node: Any) -> Any:
        """Return the Relax expression that computes a node, a `tvmflow.compiler.onnx.Node`."""
        return self.convert(node)


def operator(function: str) -> Callable[[Callable[[Any], Any]], OwnOperator]:
    """Return the decorator that turns a converter, as in `OwnOperator.convert`, into an OwnOperator.

    `function` is the operator's definition in ONNX's textual syntax, with its domain:
    `<domain: "org.example", opset_import: ["": 18]> Twice (x) => (y) { y = Add (x, x) }`.

    Raises ExportError for a text that cannot be read and for an operator of the standard's domain.
    """
    import onnx.parser

    try:
        definition = onnx.parser.parse_function(function)
    except onnx.parser.ParseError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ExportError(f"the function of an operator cannot be read ({' '.join(lines[1:3])})") from error
    if definition.domain in ("", "ai.onnx", "ai.onnx.ml"):
        raise ExportError(f"operator {definition.name!r} needs a domain of its own, as org.example")

    def decorate(convert: Callable[[Any], Any]) -> OwnOperator:
        return OwnOperator(definition, convert)

    return decorate


def load_operators(addresses: Iterable[str]) -> dict[str, OwnOperator]:
    """Import operators, each named as `package.module:operator`, and return them by name, as `org.example.Twice`.

    Raises ExportError when an import fails, and for a function that is not decorated with `operator`.
    """
    operators = {}
    for address in addresses:
        value = usercode.find(address, "operator", ExportError)
        if not isinstance(value, OwnOperator):
            raise ExportError(f"operator {address!r} is a function; decorate it with tvmflow.operators.operator")
        operators[value.name] = value
    return operators


def define(model: "onnx.ModelProto", operators: Mapping[str, OwnOperator]) -> None:
    """Add the functions of those `operators` that a model uses and does not define itself, in place.

    `operators` are by name with the domain, as `load_operators` returns them.
    """
    import onnx

    own = {f"{function.domain}.{function.name}" for function in model.functions}
    imported = {entry.domain for entry in model.opset_import}
    node_types = {f"{node.domain}.{node.op_type}" for node in nodes_of(model.graph)}
    for name in sorted(node_types & operators.keys() - own):
        function = operators[name].function
        model.functions.append(function)
        # A domain that the graph uses is imported already; the function may use others.
        for entry in function.opset_import:
            if entry.domain not in imported:
                model.opset_import.append(onnx.helper.make_opsetid(entry.domain, entry.version))
                imported.add(entry.domain)
