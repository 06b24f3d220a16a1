"""Ensembles of decision trees (ai.onnx.ml): reads their attributes into the tables of the operator `tvmflow.trees`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper
from tvm import relax, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.scores import class_labels, classify, transform, transform_targets
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.operators.trees import Forest, trees
from tvmflow.onnx_model.features import features_of

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_LEQ, _LT, _GTE, _GT, _EQ, _NEQ, _MEMBER, _LEAF = range(len(_MODES))
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_LINK_BITS = 32


@dataclass
class _Nodes:
    """The nodes of all trees, by row: `yes` and `no` are the rows of the children where a test holds and where not.

    `missing` says whether NaN passes the test. `members` are the numbers of a test for membership, by row.
    """

    feature: Array
    mode: Array
    value: Array
    yes: Array
    no: Array
    missing: Array
    members: dict[int, Array]


def convert_regressor(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's TreeEnsembleRegressor: the scores after the `post_transform`.

    Raises UnsupportedFormError for nodes that form no trees and for other invalid attributes, and FreeSizeError for
    rows with an unknown number of features.
    """
    targets = int(node.attrs.get("n_targets", 1))
    scores, _ = _ensemble(node, "target", targets, node.text("aggregate_function", "SUM"))
    return transform_targets(node, scores)


def convert_classifier(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's TreeEnsembleClassifier: a tuple of the labels and the scores.

    Raises UnsupportedFormError for labels that are strings, for a single class, for two classes with PROBIT or with
    weights or base values for both, and for invalid attributes. Raises FreeSizeError for rows with an unknown number of
    features.
    """
    labels = class_labels(node, "classlabels_int64s")
    post, ids = node.text("post_transform", "NONE"), np.unique(node.attrs.get("class_ids", ()))
    if len(labels) != 2:
        if len(labels) == 1:
            raise UnsupportedFormError("a single class")
        scores, _ = _ensemble(node, "class", len(labels), "SUM")
        return classify(node, scores, labels, post)
    if post == "PROBIT":
        raise UnsupportedFormError("post_transform PROBIT of two classes")
    if len(ids) != 1 or len(_numbers(node.attrs, "base_values")) > 1 - bool(ids[0]):
        raise UnsupportedFormError(
            "two classes with weights or base values for both, for which ONNX Runtime has other labels",
            "export the weights of the second class alone",
        )
    node.attrs["class_ids"] = np.zeros(len(node.attrs["class_ids"]), "int64")
    scores, weights = _ensemble(node, "class", 1, "SUM")
    return _binary(node, scores, labels, post, is_second=bool(ids[0]), all_positive=bool((weights >= 0).all()))


def _binary(
    node: Node, score: relax.Expr, labels: Array, post: str, *, is_second: bool, all_positive: bool
) -> relax.Expr:
    """The labels and scores of two classes of which one has weights: as ONNX Runtime completes the other's."""
    is_positive = node.emit(relax.op.greater(score, const(0.5 if all_positive else 0.0, "float32")))
    if is_second:
        pair = [node.emit(relax.op.zeros_like(score)), score]
    elif post == "LOGISTIC":
        score = node.emit(relax.op.sigmoid(score))
        pair = [node.emit(relax.op.subtract(const(1.0, "float32"), score)), score]
    elif all_positive:
        pair = [node.emit(relax.op.subtract(const(1.0, "float32"), score)), score]
    else:
        pair = [node.emit(relax.op.negative(score)), score]
    scores = node.emit(relax.op.concat(pair, 1))
    return relax.Tuple([_label(node, is_positive, labels), transform(node, scores, post) if is_second else scores])


def _label(node: Node, is_positive: relax.Expr, labels: Array) -> relax.Expr:
    chosen = relax.op.where(is_positive, const(int(labels[1]), "int64"), const(int(labels[0]), "int64"))
    return node.emit(relax.op.squeeze(node.emit(chosen), [1]))


def convert_ensemble(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's TreeEnsemble, whose attributes list leaves apart from the other nodes.

    Raises UnsupportedFormError for nodes that form no trees and for other invalid attributes, and FreeSizeError for
    rows with an unknown number of features.
    """
    attrs = node.attrs
    modes = numpy_helper.to_array(attrs["nodes_modes"]).astype("int64")
    splits, weights = (numpy_helper.to_array(attrs[name]) for name in ("nodes_splits", "leaf_weights"))
    count, leaves = len(modes), len(weights)
    children = {
        name: np.asarray(attrs[f"nodes_{name}nodeids"]) + count * np.asarray(attrs[f"nodes_{name}leafs"])
        for name in ("true", "false")
    }
    roots, last = np.asarray(attrs["tree_roots"]), count + leaves
    if any(not 0 <= places.min() <= places.max() < last for places in (*children.values(), roots) if len(places)):
        raise UnsupportedFormError("a number of a node that does not exist")
    none = np.zeros(leaves, "int64")
    members = numpy_helper.to_array(attrs["membership_values"]) if "membership_values" in attrs else np.zeros(0)
    groups = np.split(members, np.flatnonzero(np.isnan(members)))
    of_members = [group[~np.isnan(group)] for group in groups]
    places = np.flatnonzero(modes == _MEMBER)
    if len(places) and len(of_members) < len(places):
        raise UnsupportedFormError("membership_values of fewer sets than nodes")
    nodes = _Nodes(
        feature=np.concatenate([np.asarray(attrs["nodes_featureids"]), none]),
        mode=np.concatenate([modes, none + _LEAF]),
        value=np.concatenate([splits, none.astype(splits.dtype)]),
        yes=np.concatenate([children["true"], none]),
        no=np.concatenate([children["false"], none]),
        missing=np.concatenate([np.asarray(attrs.get("nodes_missing_value_tracks_true", [0] * count)), none]) != 0,
        members=dict(zip(places.tolist(), of_members, strict=False)),
    )
    targets = np.asarray(attrs["leaf_targetids"])
    entries = (np.arange(leaves) + count, targets, weights)
    aggregate = _AGGREGATES[int(attrs.get("aggregate_function", 1))]
    scores = _grow(node, nodes, roots, entries, int(attrs.get("n_targets", 1)), aggregate, np.zeros(0))
    return transform(node, scores, _TRANSFORMS[int(attrs.get("post_transform", 0))])


def _ensemble(node: Node, prefix: str, targets: int, aggregate: str) -> tuple[relax.Expr, Array]:
    """The scores of an ensemble whose nodes are named by tree and number, and the weights of its leaves."""
    attrs = node.attrs
    values = _numbers(attrs, "nodes_values")
    modes = [_decode(mode) for mode in attrs["nodes_modes"]]
    unknown = set(modes) - set(_MODES)
    if unknown:
        raise UnsupportedFormError(f"node mode {min(unknown)!r}")
    tree, number = (np.asarray(attrs[f"nodes_{name}ids"]) for name in ("tree", "node"))
    rows = _Rows(tree, number)
    mode = np.array([_MODES.index(item) for item in modes])
    inner = mode != _LEAF
    children = []
    for name in ("true", "false"):
        child = np.zeros(len(mode), "int64")
        child[inner] = rows.find(tree[inner], np.asarray(attrs[f"nodes_{name}nodeids"])[inner])
        children.append(child)
    nodes = _Nodes(
        feature=np.asarray(attrs["nodes_featureids"]),
        mode=mode,
        value=values,
        yes=children[0],
        no=children[1],
        missing=np.asarray(attrs.get("nodes_missing_value_tracks_true") or [0] * len(mode)) != 0,
        members={},
    )
    is_child = np.zeros(len(mode), bool)
    is_child[np.concatenate([child[inner] for child in children])] = True
    roots = np.flatnonzero(~is_child)
    weights = _numbers(attrs, f"{prefix}_weights")
    places = rows.find(*(np.asarray(attrs[f"{prefix}_{name}ids"]) for name in ("tree", "node")))
    entries = (places, np.asarray(attrs[f"{prefix}_ids"]), weights)
    scores = _grow(node, nodes, roots, entries, targets, aggregate, _numbers(attrs, "base_values"))
    scores = scores if dtype_of(scores) == "float32" else node.emit(relax.op.astype(scores, "float32"))
    return scores, weights


def _numbers(attrs: dict[str, Any], name: str) -> Array:
    """An attribute that is a list of float32, or a tensor under another name."""
    tensor = attrs.get(f"{name}_as_tensor")
    if isinstance(tensor, TensorProto):
        return np.asarray(numpy_helper.to_array(tensor))
    return np.asarray(attrs.get(name, ()), "float32")


def _decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class _Rows:
    """The rows of nodes by tree and number."""

    def __init__(self, tree: Array, number: Array) -> None:
        self._span = int(number.max(initial=0)) + 1
        keys = tree * self._span + number
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if (self._keys[1:] == self._keys[:-1]).any() or (number < 0).any():
            raise UnsupportedFormError("two nodes of one number")

    def find(self, tree: Array, number: Array) -> Array:
        """Return the rows of nodes."""
        keys = tree * self._span + number
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        if len(keys) and ((number < 0) | (number >= self._span) | (self._keys[places] != keys)).any():
            raise UnsupportedFormError("a number of a node that does not exist")
        return np.asarray(self._order[places])


def _grow(
    node: Node,
    nodes: _Nodes,
    roots: Array,
    entries: tuple[Array, Array, Array],
    targets: int,
    aggregate: str,
    base: Array,
) -> relax.Expr:
    """Return the scores of the trees: `entries` are rows of leaves, targets and numbers."""
    x, columns = _rows(node)
    if aggregate not in _AGGREGATES:
        raise UnsupportedFormError(f"aggregate_function {aggregate!r}")
    places, ids, numbers = entries
    if len(ids) and not 0 <= ids.min() <= ids.max() < targets:
        raise UnsupportedFormError("a target beyond their number")
    dtype = "float64" if dtype_of(x) == "float64" else "float32"
    x = x if dtype_of(x) == dtype else node.emit(relax.op.astype(x, dtype))
    score = "float64" if numbers.dtype == np.float64 and dtype == "float64" else "float32"
    nodes = _as_at_most(nodes, dtype)
    thresholds, features, flags, left, order = _lay_out(nodes, roots)
    depths = _depths(left, order.roots, thresholds, flags)
    by_depth = np.argsort(depths, kind="stable")
    thresholds, features, flags, left, order = _lay_out(nodes, roots[by_depth])
    if len(features) and not 0 <= features.min() <= features.max() < columns:
        raise UnsupportedFormError(f"feature {features.max()} of rows with {columns}")
    has_missing = bool(flags.any())
    bits = max(1, (columns - 1).bit_length())
    shift = bits + has_missing
    if shift + len(left).bit_length() > _LINK_BITS:
        shift, bits = 0, 30
    link = features.astype("int64") | (flags.astype("int64") << bits)
    if shift:
        links = (link | (left << shift)).astype("uint32").view("int32")[:, None]
    else:
        links = np.stack([link, left], 1).astype("int32")
    layout, tables, leaves = _leaves(places, ids, numbers.astype(score), targets, order, len(nodes.mode))
    base_values = np.zeros(targets, score)
    base_values[:] = base if base.size in (1, targets) else 0
    if base.size not in (0, 1, targets):
        raise UnsupportedFormError("base values of another number of targets")
    forest = Forest(
        trees=len(roots),
        nodes=len(left),
        depth=int(depths.max(initial=0)),
        features=columns,
        targets=targets,
        dtype=dtype,
        score=score,
        shift=shift,
        has_missing=has_missing,
        layout=layout,
        leaves=leaves,
        entries=len(tables[0]),
        aggregate=aggregate,
    )
    places_of_nodes = [np.column_stack([thresholds.view("int32"), links])] if forest.is_joint else [thresholds, links]
    arrays = [*places_of_nodes, order.roots.astype("int32"), depths[by_depth].astype("int32"), *tables, base_values]
    return node.emit(trees(x, [const(array) for array in arrays], forest))


def _rows(node: Node) -> tuple[relax.Expr, int]:
    """The rows and the number of their columns: of a symbolic number the first ones, up to the last that a node tests.

    The model checks when it runs that there are so many.
    """
    x = node.inputs[0]
    dims = dims_of(x)
    if dims is None or len(dims) != 2:
        raise FreeSizeError("rows of an unknown number of features")
    if isinstance(dims[1], int):
        return x, dims[1]
    features = features_of("TreeEnsemble", node.attrs)
    least = 1 if features is None else features.count
    node.check_size(tirx.min(dims[1], least), least)
    return node.emit(relax.op.strided_slice(x, [1], [0], [least], assume_inbound=True)), least


def _as_at_most(nodes: _Nodes, dtype: str) -> _Nodes:
    """Write all tests as `x <= value`: the other comparisons by the next number or the other child, equality by two.

    The value of a test that nothing passes is NaN.
    """
    value = nodes.value.astype(dtype)
    if dtype == "float32" and nodes.value.dtype == np.float64:
        # The largest float32 that is not above: a test of a float32 has the same result.
        value = np.where(value > nodes.value, np.nextafter(value, np.float32(-np.inf)), value)
    mode, yes, no, missing = nodes.mode, nodes.yes.copy(), nodes.no.copy(), nodes.missing.copy()
    below = _below(value)
    value = np.where((mode == _LT) | (mode == _GTE), below, value)
    swapped = (mode == _GT) | (mode == _GTE)
    yes[swapped], no[swapped] = nodes.no[swapped], nodes.yes[swapped]
    missing[swapped] = ~missing[swapped]
    plain = _Nodes(nodes.feature, np.where(mode == _LEAF, _LEAF, _LEQ), value, yes, no, missing, {})
    several = np.flatnonzero((mode == _EQ) | (mode == _NEQ) | (mode == _MEMBER))
    return _expand_equalities(nodes, plain, several, dtype) if len(several) else plain


def _below(value: Array) -> Array:
    """The next smaller number; NaN below the smallest."""
    below = np.nextafter(value, value.dtype.type(-np.inf))
    return np.asarray(np.where(np.isneginf(value), value.dtype.type(np.nan), below))


def _expand_equalities(nodes: _Nodes, plain: _Nodes, several: Array, dtype: str) -> _Nodes:
    """Write each test for equality, or for membership of a set, as a chain of tests `x <= value`.

    The numbers of a set are passed in falling order: what is at most a number and not below it equals it. A child that
    several tests lead to is reached by jumps: nodes that lead on to their left child, in mode -1.
    """
    feature, mode, value, yes, no, missing = (
        [*getattr(plain, name).tolist()] for name in ("feature", "mode", "value", "yes", "no", "missing")
    )

    def add(of: int, test: float, if_yes: int, if_no: int, passes: bool = False, kind: int = _LEQ) -> int:
        for items, item in zip(
            (feature, mode, value, yes, no, missing), (feature[of], kind, test, if_yes, if_no, passes), strict=True
        ):
            items.append(item)
        return len(mode) - 1

    def jump(to: int) -> int:
        return add(to, float("nan"), to, to, kind=-1)

    for row in several.tolist():
        members = nodes.members.get(row, nodes.value[row : row + 1]).astype(dtype)
        members = np.unique(members)[::-1]
        inside, outside = int(nodes.yes[row]), int(nodes.no[row])
        if nodes.mode[row] == _NEQ:
            inside, outside = outside, inside
        # NaN equals nothing. Where it passes the test, it goes where numbers that pass go.
        to_inside = bool(nodes.missing[row]) and nodes.mode[row] != _NEQ
        # The last test of the chain takes what is below all members.
        tail = outside
        is_first = True
        for member in members[::-1]:
            exact = add(row, float(_below(np.asarray([member], dtype))[0]), tail, inside if is_first else jump(inside))
            tail = add(row, float(member), exact, jump(outside))
            is_first = False
        value[row], yes[row], no[row], mode[row] = value[tail], yes[tail], no[tail], _LEQ
        if to_inside:
            missing[row] = True
            missing[yes[row]] = False
            # NaN takes the first exact test, which it does not pass, so it arrives inside.
        else:
            missing[row] = False
    return _Nodes(
        np.array(feature), np.array(mode), np.array(value, dtype), np.array(yes), np.array(no), np.array(missing), {}
    )


@dataclass(frozen=True)
class _Order:
    """The places of nodes: `place` by row, -1 where no tree reaches it; `roots` are the places of the roots."""

    place: Array
    roots: Array


def _lay_out(nodes: _Nodes, roots: Array) -> tuple[Array, Array, Array, Array, _Order]:
    """Return threshold, feature, flag and left child by place, and the places: tree by tree, level by level.

    Raises UnsupportedFormError where two nodes lead to one, so that they form no trees.
    """
    is_inner = nodes.mode == _LEQ
    rows, tree = roots.astype("int64"), np.arange(len(roots))
    levels, owners, parents = [rows], [tree], []
    total = len(rows)
    while True:
        splits = np.flatnonzero(is_inner[rows])
        if not len(splits):
            break
        parents.append(splits)
        tree = np.repeat(tree[splits], 2)
        rows = np.stack([nodes.no[rows[splits]], nodes.yes[rows[splits]]], 1).reshape(-1)
        levels.append(rows)
        owners.append(tree)
        total += len(rows)
        if total > len(nodes.mode):
            raise UnsupportedFormError("nodes that several others lead to")
    all_rows, owner = np.concatenate(levels), np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    rank = np.empty(total, "int64")
    rank[order] = np.arange(total)
    left = rank.copy()
    offset = 0
    for level, splits in zip(levels, parents, strict=False):
        children = offset + len(level) + 2 * np.arange(len(splits))
        left[offset + splits] = rank[children]
        offset += len(level)
    place = np.full(len(nodes.mode), -1)
    place[all_rows] = rank
    jumps = np.flatnonzero(nodes.mode[all_rows] == -1)
    left[jumps] = place[nodes.yes[all_rows[jumps]]]
    inner = is_inner[all_rows]
    threshold = np.where(inner, nodes.value[all_rows], nodes.value.dtype.type(np.nan))
    feature = np.where(inner, nodes.feature[all_rows], 0)
    flag = inner & nodes.missing[all_rows]
    return threshold[order], feature[order], flag[order], left[order], _Order(place, rank[: len(roots)])


def _depths(left: Array, roots: Array, thresholds: Array, flags: Array) -> Array:
    """The steps of the longest path of each tree."""
    goes_right, is_leaf = ~np.isnan(thresholds) | flags, left == np.arange(len(left))
    right = np.where(goes_right, left + 1, left)
    # The steps from each node to its deepest leaf: of leaves first, and then level by level upwards.
    steps = np.zeros(len(left), "int64")
    while True:
        longer = np.where(is_leaf, 0, np.maximum(steps[left], steps[np.minimum(right, len(left) - 1)]) + 1)
        if np.array_equal(longer, steps):
            return np.asarray(steps[roots])
        steps = longer


def _leaves(
    places: Array, ids: Array, numbers: Array, targets: int, order: _Order, rows: int
) -> tuple[str, list[Array], int]:
    """The layout of the leaves' numbers, their tables, and the number of leaves."""
    total = int(order.place.max()) + 1
    reached = order.place[places] >= 0 if rows else np.zeros(0, bool)
    position, ids, numbers = order.place[places][reached], ids[reached], numbers[reached]
    sequence = np.lexsort((ids, position))
    position, ids, numbers = position[sequence], ids[sequence], numbers[sequence]
    leaf_places, counts = np.unique(position, return_counts=True)
    tree = np.searchsorted(order.roots, position, side="right") - 1
    target = np.zeros(len(order.roots), "int32")
    target[tree] = ids
    if (counts == 1).all() and (target[tree] == ids).all():
        scores = np.zeros(total, numbers.dtype)
        scores[position] = numbers
        return "single", [scores, target], len(leaf_places)
    leaf = np.zeros(total, "int64")
    if (counts == targets).all() and (ids.reshape(-1, targets) == np.arange(targets)).all():
        leaf[leaf_places] = np.arange(len(leaf_places))
        return "dense", [numbers.reshape(-1, targets), leaf.astype("int32")], len(leaf_places)
    # A leaf without numbers is the first.
    leaf[leaf_places] = np.arange(len(leaf_places)) + 1
    first = np.concatenate([[0, 0], np.cumsum(counts)])
    tables = [numbers, ids.astype("int32"), first.astype("int32"), leaf.astype("int32")]
    return "sparse", tables, len(leaf_places) + 1
