"""Ensembles of decision trees as ONNX nodes, drawn from a seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

DOMAIN = "ai.onnx.ml"


def draw_forest(
    prefix: str,
    targets: Sequence[int],
    *,
    trees: int = 5,
    depth: int = 4,
    features: int = 3,
    modes: Sequence[str] = ("BRANCH_LEQ",),
    missing: bool = False,
    per_leaf: int = 1,
    seed: int = 0,
    positive: bool = False,
) -> dict[str, Any]:
    """Return the attributes of an ensemble; `prefix` is `target` or `class`.

    Trees have up to `depth` levels of tests in these modes. Each leaf has numbers for `per_leaf` of the `targets`.
    Thresholds are multiples of a quarter.
    """
    generator = np.random.default_rng(seed)

    def below(count: int) -> int:
        """A whole number below `count`, in a tenth of the time that NumPy takes for single ones."""
        return int(generator.random() * count)

    nodes: dict[str, list[Any]] = {
        name: [] for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    }
    tracks: list[int] = []
    leaves: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        pending, count = [(0, depth)], 1
        while pending:
            number, levels = pending.pop()
            is_leaf = levels == 0 or (number > 0 and generator.random() < 0.2)
            children = (0, 0) if is_leaf else (count, count + 1)
            for name, value in zip(
                nodes,
                (
                    tree,
                    number,
                    0 if is_leaf else below(features),
                    "LEAF" if is_leaf else modes[below(len(modes))],
                    0.0 if is_leaf else (below(13) - 6) / 4,
                    *children,
                ),
                strict=True,
            ):
                nodes[name].append(value)
            tracks.append(int(missing and not is_leaf and generator.random() < 0.5))
            if is_leaf:
                chosen = targets
                if per_leaf < len(targets):
                    chosen = sorted(generator.permutation(targets)[:per_leaf].tolist())
                for target in chosen:
                    weight = float(generator.random() if positive else generator.normal())
                    for name, value in zip(leaves, (tree, number, target, weight), strict=True):
                        leaves[name].append(value)
            else:
                pending += [(children[0], levels - 1), (children[1], levels - 1)]
                count += 2
    attributes = {f"nodes_{name}": values for name, values in nodes.items()}
    if missing:
        attributes["nodes_missing_value_tracks_true"] = tracks
    return attributes | {f"{prefix}_{name}": values for name, values in leaves.items()}


def regressor(
    targets: int = 1, *, x: str = "x", y: str = "y", attributes: dict[str, Any] | None = None, **drawn: Any
) -> NodeProto:
    """Return a TreeEnsembleRegressor."""
    forest = draw_forest("target", range(targets), **drawn)
    return helper.make_node(
        "TreeEnsembleRegressor", [x], [y], domain=DOMAIN, n_targets=targets, **forest, **(attributes or {})
    )


def classifier(
    labels: Sequence[int], ids: Sequence[int], *, attributes: dict[str, Any] | None = None, **drawn: Any
) -> NodeProto:
    """Return a TreeEnsembleClassifier with weights for the classes at the places `ids`; its outputs are label and y."""
    attributes = draw_forest("class", ids, **drawn) | (attributes or {})
    if labels:
        attributes["classlabels_int64s"] = list(labels)
    return helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "y"], domain=DOMAIN, **attributes)


def rows(count: int, features: int = 3, *, missing: bool = False, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return rows of multiples of an eighth, so that many equal a threshold; some are NaN where `missing`."""
    generator = np.random.default_rng(seed)
    values = (generator.integers(-16, 17, (count, features)) / 8).astype("float32")
    if missing:
        values[generator.random(values.shape) < 0.2] = np.nan
    return values
