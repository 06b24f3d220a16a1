"""Einsum: every equation is that of ONNX Runtime, and sums of products are matrix products."""

from collections.abc import Callable
from typing import Any

import onnx
import pytest
from onnx import helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.compiler import CompiledModel, import_onnx
from tvmflow.errors import UnsupportedOperatorError

Shape = tuple[int, ...]

# An equation, and the shapes of its operands.
_EQUATIONS: list[tuple[str, list[Shape]]] = [
    ("ij,jk->ik", [(3, 4), (4, 5)]),
    ("ij,jk", [(3, 4), (4, 5)]),
    ("b i j , b j k -> b i k", [(2, 3, 4), (2, 4, 5)]),
    ("bhid,bhjd->bhij", [(2, 3, 5, 4), (2, 3, 6, 4)]),
    ("bhij,bhjd->bihd", [(2, 3, 5, 6), (2, 3, 6, 4)]),
    ("ibnd,jbnd->bnij", [(5, 2, 3, 4), (6, 2, 3, 4)]),
    ("nkctv,kvw->nctw", [(2, 3, 4, 5, 6), (3, 6, 7)]),
    ("ab,cd->dcba", [(2, 3), (4, 5)]),
    ("i,i->", [(6,), (6,)]),
    ("i,j", [(3,), (4,)]),
    ("bd,bd->b", [(3, 5), (3, 5)]),
    ("bd,de->e", [(3, 5), (5, 4)]),
    ("bij,bj->bi", [(2, 3, 4), (2, 4)]),
    ("ij->ji", [(3, 4)]),
    ("ij->", [(3, 4)]),
    ("bij->bj", [(2, 3, 4)]),
    ("ii", [(4, 4)]),
    ("bii->bi", [(2, 4, 4)]),
    ("iij,jk->ik", [(3, 3, 4), (4, 5)]),
    ("...ij,...jk->...ik", [(2, 3, 4, 5), (2, 3, 5, 6)]),
    ("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)]),
    ("...i,...i", [(2, 3, 4), (2, 3, 4)]),
    ("bi,oij,bj->bo", [(3, 4), (6, 4, 5), (3, 5)]),
    ("ab,bc,cd,de->ae", [(2, 3), (3, 4), (4, 5), (5, 6)]),
    # A dimension of one is repeated.
    ("ij,jk->ik", [(3, 1), (4, 5)]),
    ("bhid,bhjd->bhij", [(2, 3, 5, 4), (1, 3, 6, 4)]),
    ("aB,BA->aA", [(2, 3), (3, 4)]),
]


# Of a normal run, one of each kind: batches, outer products, sums before and after a product, diagonals, an ellipsis, a
# chain, and a dimension of one.
_SOME = [_EQUATIONS[place] for place in (4, 7, 11, 18, 19, 22, 25)]
# The same with a weight in place of an operand: first and second, after a sum, with a batch, in a chain, of one row.
_SOME_WEIGHTS = [(_EQUATIONS[place], operand) for place, operand in ((0, 0), (11, 1), (3, 1), (22, 1), (24, 0))]


def _node(equation: str, count: int) -> onnx.NodeProto:
    return helper.make_node("Einsum", [f"x{place}" for place in range(count)], ["y"], equation=equation)


def _case(equation: str, shapes: list[Shape], constant: int | None = None, *, free: bool = False) -> tuple[Any, ...]:
    """The arguments of `save_model`, and a feed. The operand at `constant` is a weight; others may have free sizes."""
    arrays = {f"x{place}": normal(*shape, seed=place) for place, shape in enumerate(shapes)}
    weights = {name: arrays.pop(name) for name in list(arrays) if name == f"x{constant}"}
    inputs = [
        (name, [f"{name}_{axis}" if free and size > 1 else size for axis, size in enumerate(array.shape)])
        for name, array in arrays.items()
    ]
    return ([_node(equation, len(shapes))], inputs, ["y"], weights), arrays


@pytest.mark.long
def test_an_equation_is_what_it_is_in_onnx_runtime(assert_all_same: Callable[..., CompiledModel]) -> None:
    assert_all_same(_case(*item) for item in _EQUATIONS)


def test_an_equation_of_free_sizes_is_what_it_is_in_onnx_runtime(assert_all_same: Callable[..., CompiledModel]) -> None:
    assert_all_same(_case(*item, free=True) for item in scale.choose(normal=_SOME, long=_EQUATIONS))


def test_an_equation_with_a_weight_is_what_it_is_in_onnx_runtime(assert_all_same: Callable[..., CompiledModel]) -> None:
    several = [item for item in _EQUATIONS if len(item[1]) > 1]
    cases = [(item, place) for item in several for place in range(2)]
    assert_all_same(_case(*item, place) for item, place in scale.choose(normal=_SOME_WEIGHTS, long=cases))


@pytest.mark.parametrize(
    ("equation", "shapes", "constant"),
    [
        ("bld,dhe->bhle", [(1, 64, 32), (32, 2, 16)], 1),
        ("oc,bchw->bohw", [(32, 16), (1, 16, 8, 8)], 0),
        ("bhid,bhjd->bhij", [(1, 2, 64, 32), (1, 2, 64, 32)], None),
        ("nkctv,kvw->nctw", [(1, 2, 16, 8, 16), (2, 16, 16)], 1),
    ],
    ids=["projection", "pointwise", "scores", "graph"],
)
def test_a_sum_of_products_is_a_matrix_product(
    make_model: Any, assert_same_as_onnxruntime: Any, equation: str, shapes: list[Shape], constant: int | None
) -> None:
    model, feed = _case(equation, shapes, constant)
    built = assert_same_as_onnxruntime(make_model(*model), feed)
    assert rule_counts(built)["rows"] + rule_counts(built)["batch_matmul"] == 1


@pytest.mark.parametrize("equation", ["ij->ij", "ij,jk,kl->il", "i,jk->ik"])
def test_an_equation_that_does_not_fit_its_operands_is_refused(make_model: Any, equation: str) -> None:
    inputs = [("x0", [3, 4]), ("x1", [4, 5])]
    path = make_model([_node(equation, 2)], inputs, [("y", None)])
    with pytest.raises(UnsupportedOperatorError, match="an equation"):
        import_onnx(path)
