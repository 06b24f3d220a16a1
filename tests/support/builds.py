"""What the compiler did to a model."""

from collections import Counter

from tvmflow.compiler import Built


def rule_counts(built: Built) -> Counter[str]:
    """How many functions of a built model each schedule rule scheduled, by the rule's name."""
    return Counter(rule for _, rule in built.schedules)
