"""Replaces the size expressions in a function by variables of the function.

The dimensions within a model of free sizes are expressions of its inputs' dimensions, such as `(height - 1) // 4 + 1`.
In the loops of a function such an expression is in every index, and TVM's simplifier takes time that is exponential in
its length. With a variable for each size, equal layers at different depths have equal loops.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from tvmflow.compiler.operators.common import static
from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions

# Operators on sizes that no simplification sees through.
_OPAQUE = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)
_COMPOUND = (tirx.Add, tirx.Sub, tirx.Mul, *_OPAQUE)
_TYPES = (tirx.Var, *_COMPOUND)


@dataclass(frozen=True)
class _Callee:
    """A function with names of its own for sizes.

    `tensors` are the places of its tensors among the original arguments. Arguments for `scalars` follow them, as
    expressions in the original function's variables. `variables` says where a caller finds the values of these: the
    place of an argument and the axis of a tensor, None for a scalar.
    """

    function: PrimFunc
    tensors: Sequence[int]
    scalars: Sequence[Any]
    variables: Mapping[tirx.Var, tuple[int, int | None]]


@tvm.transform.module_pass(opt_level=0, name="NameSizes")
class NameSizes:
    """Replaces dimensions that are expressions by variables of the function, and merges functions that become equal.

    A variable that is a dimension of a tensor gets its value from the tensor. Other variables become scalar parameters.
    The order of these parameters, and the numbers in the functions' names, follow the order of the calls; TVM's own
    order of a function's sizes depends on memory addresses. With `products`, a product or sum of sizes that the
    function reads nowhere else becomes a variable too. Functions that TVM is still to fuse must keep these, because
    they must have the same expressions for the same sizes.
    """

    def __init__(self, products: bool = False) -> None:
        self._products = products

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with its functions of symbolic sizes, and the calls of them, rewritten."""
        calls = _calls_of_functions(mod)
        if not any(_is_symbolic(mod[variable]) for variable in calls):
            return mod
        if not self._products:
            mod = _with_one_form(mod)
            calls = _calls_of_functions(mod)
        callees = {variable: _rewritten(mod[variable], call[0], self._products) for variable, call in calls.items()}
        names: Counter[str] = Counter()
        names_in_use = {variable.name_hint for variable in mod.get_global_vars() if variable not in calls}
        merged: dict[Any, tvm.ir.GlobalVar] = {}
        functions: dict[tvm.ir.GlobalVar, Any] = {}
        variables: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        for variable, callee in callees.items():
            key = _key(callee.function)
            if key not in merged:
                merged[key] = tvm.ir.GlobalVar(_unique(variable.name_hint, names, names_in_use))
                relax.expr._update_type(merged[key], callee.function.ty)
                functions[merged[key]] = callee.function
            variables[variable] = merged[key]
        change = _ChangeCalls({variable: (variables[variable], callees[variable]) for variable in callees})
        for variable, function in mod.functions_items():
            if variable not in callees:
                functions[variable] = change.visit_expr(function) if isinstance(function, relax.Function) else function
        return tvm.IRModule(functions, attrs=mod.attrs)


def bind_constant_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with a function of its own for each call_tir whose arguments make symbols of it numbers.

    The model with numbers for its free sizes still calls the functions that the importer wrote for any size. TVM fuses
    such a function only with others of the same symbols.
    """
    return rewrite_functions(_BindConstantSizes(mod), mod)


@mutator
class _BindConstantSizes(PyExprMutator):  # type: ignore[misc]
    """Calls functions of which symbols are numbers."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._functions = mod

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Change a call of a function of which the arguments make symbols numbers."""
        call = super().visit_call_(op)
        if not isinstance(call.op, tvm.ir.Op) or call.op.name != "relax.call_tir":
            return call
        variable, fields = call.args[0], list(call.args[1].fields)
        function = self._functions[variable]
        numbers: dict[tirx.Var, Any] = {}
        for place, (param, ty) in enumerate(zip(function.params, _types(call), strict=True)):
            dims = _dims(param)
            pairs = [(param, fields[place])] if dims is None else zip(dims, ty.shape.values, strict=True)
            numbers |= {dim: size for dim, size in pairs if isinstance(dim, tirx.Var) and isinstance(size, tirx.IntImm)}
        if not numbers:
            return call
        params = [param for param in function.params if param not in numbers]
        own = _with_variables(PrimFunc(params, function.body, function.ret_type, function.attrs), numbers)
        tensors = relax.Tuple([field for field in fields if not isinstance(field, tirx.IntImm)])
        return relax.Call(call.op, [self.builder_.add_func(own, variable.name_hint), tensors], call.attrs, call.ty_args)


def _with_one_form(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with one form of each size in its graph: TVM compares by structure what it fuses."""
    graph = relax_functions(mod)
    forms: dict[Any, Any] = {}

    def form(size: Any) -> Any:
        key = _key(size)
        if key not in forms:
            forms[key] = _one_form(size)
        return forms[key]

    functions = {
        variable: tvm_ffi.structural_map(item, [(_COMPOUND, form)], order="pre") if variable in graph else item
        for variable, item in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def _one_form(size: Any) -> Any:
    """The form that equal sums and products of sizes have, whatever the order of their terms.

    Quotients and the like are left as they are.
    """
    parts = {_key(part): tirx.Var(f"part{place}", part.ty) for place, part in enumerate(_opaque_parts([size], {}))}
    hidden = tvm_ffi.structural_map(size, [(_OPAQUE, lambda item: parts.get(_key(item), item))], order="pre")
    meanings = {variable: key.key for key, variable in parts.items()}
    simplified = tvm.sym.Analyzer().simplify(hidden)
    return tvm_ffi.structural_map(simplified, [(tirx.Var, lambda item: meanings.get(item, item))])


def _key(value: Any) -> tvm_ffi.StructuralKey:
    """A key of tables: equal for values of equal structure."""
    return tvm_ffi.StructuralKey(value)  # type: ignore[call-arg]


def _calls_of_functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, list[relax.Call]]:
    """The functions that are called by call_tir alone, in the order of the first calls."""
    calls: dict[tvm.ir.GlobalVar, list[relax.Call]] = {}
    others: set[tvm.ir.GlobalVar] = set()

    def visit(expr: Any) -> None:
        if not isinstance(expr, relax.Call):
            return
        names = [item for item in (expr.op, *expr.args) if isinstance(item, tvm.ir.GlobalVar)]
        for variable in names:
            if not isinstance(mod[variable], PrimFunc):
                continue
            if isinstance(expr.op, tvm.ir.Op) and expr.op.name == "relax.call_tir" and len(names) == 1:
                calls.setdefault(variable, []).append(expr)
            else:
                others.add(variable)

    for _, function in sorted(relax_functions(mod).items(), key=lambda item: str(item[0].name_hint)):
        relax.analysis.post_order_visit(function, visit)
    return {variable: sites for variable, sites in calls.items() if variable not in others}


def _unique(name: str, names: Counter[str], names_in_use: set[str]) -> str:
    # The digits of a type of numbers are part of the name, those after it count the functions.
    base = re.sub(r"(bf16|fp16|int8)?\d*(?=_|$)", r"\1", name)
    while True:
        number, names[base] = names[base], names[base] + 1
        unique = f"{base}{number or ''}"
        if unique not in names_in_use:
            return unique


def _dims(variable: tirx.Var) -> list[Any] | None:
    """The dimensions of a function's tensor; None for a scalar."""
    return list(variable.ty.shape) if tirx.is_buffer_var(variable) else None


def _types(call: relax.Call) -> list[Any]:
    """The types of the arguments and of the results of a call_tir, in the order of the function's parameters."""
    (result,) = call.ty_args
    results = result.fields if isinstance(result, relax.TupleType) else [result]
    return [*(field.ty for field in call.args[1].fields), *results]


def _is_symbolic(function: PrimFunc) -> bool:
    dims = [_dims(param) for param in function.params]
    return any(shape is None or not all(isinstance(dim, tirx.IntImm) for dim in shape) for shape in dims)


class _SizeNames:
    """Names for the sizes of a function's tensors that are expressions.

    `table` has what replaces an expression, by its `_key`. `scalars` are the variables that stand for a part of an
    expression, with that part.
    """

    def __init__(self, function: PrimFunc, products: bool) -> None:
        self.table: dict[Any, Any] = {}
        self.scalars: dict[tirx.Var, Any] = {}
        self._function, self._products = function, products
        self._numbers = count()
        self._analyzer = tvm.sym.Analyzer()
        self._quotients: list[tirx.FloorDiv] = []
        self._dims: set[Any] = set()

    def add(self, dims: Sequence[Any]) -> None:
        """Name these dimensions, none of which is a number or a variable."""
        self._dims |= {_key(dim) for dim in dims}
        if not self._products:
            # Nor may the expression depend on the function's other sizes, which the function that it is fused with
            # lacks.
            self._name_parts([dim for dim in dims if not isinstance(_split_last_number(dim)[0], _OPAQUE)])
        # A dimension that is an opaque expression and a number is itself the variable, as is one that is such an
        # expression alone. In functions that are still to be fused the latter come first, so that no dimension is a
        # difference: TVM would give that another expression than the dimension of the function before or after it.
        for dim in dims if self._products else sorted(dims, key=lambda dim: not isinstance(dim, _OPAQUE)):
            self._name(dim)
        self._name_parts(dims)

    def replace(self, expr: Any) -> Any:
        """Return what replaces an expression, the expression itself where nothing does."""
        key = _key(expr)
        if key not in self.table and isinstance(expr, tirx.FloorDiv):
            self.table[key] = _by_quotients(expr, self._quotients, self.table)
        return self.table.get(key, expr)

    def _name(self, dim: Any) -> None:
        """Make a variable of a dimension that is an expression, and a number larger or smaller, where that helps."""
        core, number = _split_last_number(dim)
        if self._products and isinstance(dim, tirx.Sub) and isinstance(dim.a, tirx.Mul) and static(dim.b) is not None:
            # Another dimension that is the product itself stays a multiple.
            core, number = (dim, 0) if _key(dim.a) in self._dims else (dim.a, tirx.IntImm(dim.ty.dtype, -int(dim.b)))
        is_opaque = isinstance(core, _OPAQUE)
        if _key(core) in self.table:
            if is_opaque and _key(dim) not in self.table:
                # By the variable of the other dimension it would get another expression in a function that is fused.
                self.table[_key(dim)] = self._variable(dim)
        elif is_opaque or (
            self._products and _is_alone(core, self._function, int(number) if _key(core) not in self._dims else 0)
        ):
            size = self._variable(dim)
            self.table[_key(core)] = size - int(number)
            self.table[_key(dim)] = size
        elif self._products and _is_multiple(core, self._function) and _key(core.a) not in self.table:
            # Of a product of several sizes and a number, the sizes become one.
            size = self._variable(core.a)
            self.table[_key(core.a)], self.scalars[size] = size, core.a
        elif (
            self._products
            and not core.same_as(dim)
            and _key(core) not in self._dims
            and not _is_in_quotient(core, self._function)
        ):
            # The function reads the product's factors elsewhere, but derives no size from this one.
            self.table[_key(dim)] = self._variable(dim)

    def _name_parts(self, dims: Sequence[Any]) -> None:
        """Make variables of the opaque parts of dimensions, and give each dimension one form."""
        for part in _opaque_parts(dims, self.table):
            size = self._variable(part)
            self.table[_key(part)], self.scalars[size] = size, part
        self._quotients.extend(key.key for key in self.table if isinstance(key.key, tirx.FloorDiv))
        forms = {_key(dim): self._form(dim) for dim in dims if _key(dim) not in self.table}
        self.table.update(forms)

    def _form(self, dim: Any) -> Any:
        """The expression of a dimension by the variables."""
        # Functions that are still to be fused have the form that their calls have.
        source = dim if self._products else _one_form(dim)
        form = tvm_ffi.structural_map(source, [(_COMPOUND, self.replace)], order="pre")
        return self._analyzer.simplify(form) if self._products else form

    def _variable(self, expr: Any) -> tirx.Var:
        return tirx.Var(f"size{next(self._numbers)}", expr.ty)


def _rewritten(function: PrimFunc, call: relax.Call, products: bool) -> _Callee:
    """A function with names of its own for the sizes of its tensors."""
    arguments = len(call.args[1].fields)
    if products:
        function = _by_whole_sizes(_by_sums(_by_results(function, arguments)))
    shapes = [_dims(param) for param in function.params]
    variables: dict[tirx.Var, tuple[int, int | None]] = {}
    for place, (param, shape) in enumerate(zip(function.params, shapes, strict=True)):
        if shape is None:
            variables[param] = (place, None)
        for axis, dim in enumerate(shape or ()):
            if isinstance(dim, tirx.Var):
                variables.setdefault(dim, (place, axis))
    names = _SizeNames(function, products)
    names.add([dim for shape in shapes for dim in shape or () if not isinstance(dim, tirx.IntImm | tirx.Var)])
    mapped = function
    if names.table:
        mapped = tvm_ffi.structural_map(function, [(_COMPOUND, names.replace)], order="pre")
    tensors = [place for place, shape in enumerate(shapes[:arguments]) if shape is not None]
    params = list(mapped.params)
    defined = {dim for param in params for dim in _dims(param) or () if isinstance(dim, tirx.Var)}
    plain_values = {params[place]: function.params[place] for place, shape in enumerate(shapes) if shape is None}
    values = {**plain_values, **names.scalars}
    free = values.keys() - defined
    # A walk through the body takes long: each place of a variable is a call from C++.
    read_variables = _variables([*(_dims(param) or [] for param in params), mapped.body]) if free else []
    symbols = [item for item in read_variables if item in free]
    outputs = params[arguments:]
    whole = PrimFunc(
        [*(params[place] for place in tensors), *symbols, *outputs], mapped.body, mapped.ret_type, mapped.attrs
    )
    return _Callee(whole, tensors, [values[item] for item in symbols], variables)


def _by_results(function: PrimFunc, arguments: int) -> PrimFunc:
    """A function that has variables for the sizes of its results rather than for those a number larger or smaller.

    A convolution without padding has a result of `h - 2` lines. TVM writes a product of that as `h * 4 - 8`, and then
    proves nothing of a loop that runs through several such dimensions. The first `arguments` are no results.
    """
    scalars = {param for param in function.params if not tirx.is_buffer_var(param)}
    results = [dim for param in function.params[arguments:] for dim in _dims(param) or ()]
    unchanged = {dim for dim in results if isinstance(dim, tirx.Var)} | scalars
    analyzer = tvm.sym.Analyzer()
    new: dict[tirx.Var, Any] = {}
    for dim in results:
        variables = _variables([dim]) if isinstance(dim, tirx.Add | tirx.Sub) else []
        if len(variables) != 1 or variables[0] in unchanged or variables[0] in new:
            continue
        number = analyzer.simplify(dim - variables[0])
        if isinstance(number, tirx.IntImm):
            new[variables[0]] = tirx.Var(f"result{len(new)}", dim.ty) - int(number)
    return _with_variables(function, new) if new else function


def _by_sums(function: PrimFunc) -> PrimFunc:
    """A function that has variables for dimensions that are the sum of a scalar and of other sizes or a number.

    The tokens of a text, put beside the 256 of an image, are `length + 256`, and beside the tokens before them, `length
    + past`. TVM writes four times that as `length * 4 + 1024`, and then proves nothing of a loop that runs through
    several such dimensions. The scalar stays a parameter, which the function reads no more.
    """
    dims = [dim for param in function.params for dim in _dims(param) or ()]
    analyzer = tvm.sym.Analyzer()
    new: dict[tirx.Var, Any] = {}
    for scalar in (param for param in function.params if not tirx.is_buffer_var(param)):
        read = [dim for dim in dims if scalar in _variables([dim])]
        rests = Counter(_key(analyzer.simplify(dim - scalar)) for dim in read)
        if not rests:
            continue
        rest = rests.most_common(1)[0][0].key
        differences = [analyzer.simplify(other.key - rest) for other in rests]
        if all(isinstance(item, tirx.IntImm) for item in differences) and not {scalar, *new} & {*_variables([rest])}:
            new[scalar] = tirx.Var(f"sum{len(new)}", scalar.ty) - rest
    if not new:
        return function
    tensors = [param for param in function.params if tirx.is_buffer_var(param)]
    mapped = _with_variables(PrimFunc(tensors, function.body, function.ret_type, function.attrs), new)
    params = iter(mapped.params)
    whole = [next(params) if tirx.is_buffer_var(param) else param for param in function.params]
    return PrimFunc(whole, mapped.body, mapped.ret_type, mapped.attrs)


def _by_whole_sizes(function: PrimFunc) -> PrimFunc:
    """A function that has variables for dimensions such as `w * 2 - 1` where it reads `w` in no other dimension.

    Its quotients of `w`, as the number `(w + 3) // 4` of tiles of 8 columns, become those of the dimension. Where `w`
    is a scalar, that stays a parameter, which the function reads no more.
    """
    dims = [dim for param in function.params for dim in _dims(param) or ()]
    for dim in dict.fromkeys(map(_key, dims)):
        variables = _variables([dim.key])
        others = [other for other in dims if _key(other) != dim]
        if len(variables) == 1 and variables[0] not in _variables(others):
            function = _by_whole_size(function, dim.key, variables[0])
    return function


def _by_whole_size(function: PrimFunc, dim: Any, part: tirx.Var) -> PrimFunc:
    """A function that has a variable for `dim`, a multiple of `part` and a number that is none; itself for others."""
    analyzer = tvm.sym.Analyzer()
    number = analyzer.simplify(tvm_ffi.structural_map(dim, [(tirx.Var, lambda _: tirx.IntImm(part.ty.dtype, 0))]))
    factor = analyzer.simplify(tvm_ffi.structural_map(dim, [(tirx.Var, lambda _: part + 1)]) - dim)
    if not isinstance(number, tirx.IntImm) or not isinstance(factor, tirx.IntImm) or int(number) % int(factor) == 0:
        return function
    size = tirx.Var(f"whole_{part.name}", dim.ty)
    quotient = tirx.floordiv(size - int(number), int(factor))

    def replace(expr: Any) -> Any:
        if not str(expr.ty).startswith("int") or part not in _variables([expr]):
            return expr
        more = analyzer.simplify(expr - dim)
        if isinstance(more, tirx.IntImm):
            return size + int(more) if int(more) else size
        if not isinstance(expr, _OPAQUE):
            return expr
        parts = [tvm_ffi.structural_map(item, [(_COMPOUND, replace)], order="pre") for item in (expr.a, expr.b)]
        whole = [
            tvm_ffi.structural_map(item, [(tirx.Var, lambda own: quotient if own.same_as(part) else own)])
            for item in parts
        ]
        return analyzer.simplify(type(expr)(*whole))

    mapped = tvm_ffi.structural_map(function, [(_COMPOUND, replace)], order="pre")
    key = _key(quotient)
    if part in _variables([*(_dims(param) or [] for param in mapped.params), mapped.body]):
        return function
    return function if _has_quotient(mapped, lambda expr: _key(expr) == key) else mapped


def _with_variables(function: PrimFunc, new: Mapping[tirx.Var, Any]) -> PrimFunc:
    """A function with other expressions for its variables, simplified."""
    analyzer = tvm.sym.Analyzer()

    def replace(expr: Any) -> Any:
        if not str(expr.ty).startswith("int") or not new.keys() & {*_variables([expr])}:
            return expr
        return analyzer.simplify(tvm_ffi.structural_map(expr, [(tirx.Var, lambda item: new.get(item, item))]))

    return tvm_ffi.structural_map(
        function, [(_COMPOUND, replace), (tirx.Var, lambda item: new.get(item, item))], order="pre"
    )


def _split_last_number(dim: Any) -> tuple[Any, Any]:
    """An expression as a sum of another and of a number, the number last in TVM's order; 0 where it has none."""
    return (dim.a, dim.b) if isinstance(dim, tirx.Add) and isinstance(dim.b, tirx.IntImm) else (dim, 0)


def _is_alone(core: Any, function: PrimFunc, number: int = 0) -> bool:
    """Whether an expression is a product or a sum of sizes that a function reads in it alone, better as a variable.

    TVM proves little of a quotient by or of such an expression, so loops that run through one could not be tiled. The
    pixels of several images of free sizes, one image after another, are a sum of products. A size times a number stays
    where the function divides it by nothing, or without remainder: that it is a multiple helps. But no dimension is a
    multiple that is larger or smaller by a `number` which is none. Nor is a difference to a number a variable.
    """
    if not isinstance(core, tirx.Mul | tirx.Add | tirx.Sub):
        return False
    if isinstance(core.b, tirx.IntImm) and not isinstance(core, tirx.Mul):
        return False
    if isinstance(core.b, tirx.IntImm) and number % int(core.b) == 0 and not _is_divided(core, function):
        return False
    # Of equal quotients a function gets one variable, so that two sizes may be computed from one dimension.
    dims = [dim for param in function.params for dim in _dims(param) or ()]
    parts = {_key(part): tirx.Var(f"part{place}", part.ty) for place, part in enumerate(_opaque_parts(dims, {}))}
    of_parts = [(_COMPOUND, lambda expr: parts.get(_key(expr), expr))]
    table = {**parts, _key(core): tirx.Var("size", core.ty)}
    mapped = tvm_ffi.structural_map(function, [(_COMPOUND, lambda expr: table.get(_key(expr), expr))], order="pre")
    others = [*(_dims(param) or [] for param in mapped.params), mapped.body]
    return not {*_variables([tvm_ffi.structural_map(core, of_parts, order="pre")])} & {*_variables(others)}


def _is_multiple(core: Any, function: PrimFunc) -> bool:
    """Whether an expression is a number times a product of several sizes, which `_is_alone` in the function."""
    has_number = isinstance(core, tirx.Mul) and isinstance(core.b, tirx.IntImm)
    return has_number and isinstance(core.a, tirx.Mul) and _is_alone(core.a, function)


def _is_divided(core: Any, function: PrimFunc) -> bool:
    """Whether a function divides an expression, or a sum of it and others, and rounds the quotient."""
    key = _key(core)
    return _has_quotient(function, lambda quotient: any(_key(part) == key for part in _terms(quotient.a)))


def _is_in_quotient(core: Any, function: PrimFunc) -> bool:
    """Whether a function divides what it computes of an expression's variables."""
    variables = {*_variables([core])}
    kinds = (tirx.FloorDiv, tirx.FloorMod)
    return _has_quotient(function, lambda quotient: bool(variables & {*_variables([quotient])}), kinds)


def _has_quotient(function: PrimFunc, holds: Callable[[Any], bool], kinds: tuple[type, ...] = (tirx.FloorDiv,)) -> bool:
    """Whether a condition holds for any quotient that a function computes, or any expression of these `kinds`."""
    has_any = False

    def visit(quotient: Any) -> tvm_ffi.WalkResult:
        nonlocal has_any
        has_any = has_any or holds(quotient)
        return tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(function.body, [(kinds, visit)])
    return has_any


def _terms(expr: Any) -> Iterable[Any]:
    """The terms of a sum."""
    if isinstance(expr, tirx.Add | tirx.Sub):
        return [*_terms(expr.a), *_terms(expr.b)]
    return [expr]


def _by_quotients(expr: tirx.FloorDiv, quotients: Sequence[tirx.FloorDiv], table: Mapping[Any, Any]) -> Any:
    """A quotient by a multiple of another's divisor, computed from that: `(x + 8) // 32` is `(x // 4 + 2) // 8`."""
    analyzer = tvm.sym.Analyzer()
    for other in sorted(quotients, key=lambda item: -int(item.b) if isinstance(item.b, tirx.IntImm) else 0):
        if not isinstance(expr.b, tirx.IntImm) or not isinstance(other.b, tirx.IntImm) or int(other.b) < 1:
            continue
        divisor, more = int(other.b), analyzer.simplify(expr.a - other.a)
        if int(expr.b) % divisor == 0 and isinstance(more, tirx.IntImm) and int(more) % divisor == 0:
            return tirx.floordiv(table[_key(other)] + int(more) // divisor, int(expr.b) // divisor)
    return expr


def _opaque_parts(dims: Sequence[Any], table: Mapping[Any, Any]) -> list[Any]:
    """The largest opaque expressions in dimensions, but for those of `table`."""
    parts: dict[Any, Any] = {}

    def collect(expr: Any) -> None:
        key = _key(expr)
        if key in table:
            return
        if isinstance(expr, _OPAQUE):
            parts.setdefault(key, expr)
        elif isinstance(expr, _COMPOUND):
            collect(expr.a)
            collect(expr.b)

    for dim in dims:
        collect(dim)
    return list(parts.values())


def _variables(roots: Iterable[Any]) -> list[tirx.Var]:
    """The variables in expressions and statements, in the order in which they occur first."""
    variables: dict[tirx.Var, None] = {}

    def visit(variable: tirx.Var) -> tvm_ffi.WalkResult:
        variables.setdefault(variable)
        return tvm_ffi.WalkResult.ADVANCE

    for root in roots:
        tvm_ffi.structural_walk(root, [(tirx.Var, visit)])
    return list(variables)


@mutator
class _ChangeCalls(PyExprMutator):  # type: ignore[misc]
    """Changes calls of functions: the new function takes the tensors and then its scalars."""

    def __init__(self, callees: Mapping[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, _Callee]]) -> None:
        super().__init__(None)
        self._callees = callees

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Change a call of one of the functions."""
        call = super().visit_call_(op)
        if not call.args or call.args[0] not in self._callees:
            return call
        variable, callee = self._callees[call.args[0]]
        fields, types = list(call.args[1].fields), _types(call)

        def value(name: tirx.Var) -> Any:
            place, axis = callee.variables[name]
            return fields[place] if axis is None else types[place].shape.values[axis]

        scalars = [
            tvm_ffi.structural_map(scalar, [(tirx.Var, value)]) if not isinstance(scalar, tirx.Var) else value(scalar)
            for scalar in callee.scalars
        ]
        arguments = relax.Tuple([*(fields[place] for place in callee.tensors), *scalars])
        return relax.Call(call.op, [variable, arguments], call.attrs, call.ty_args)
