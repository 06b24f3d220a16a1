"""The equation of an Einsum: a letter for each dimension of its operands and of its result."""

import string
from collections.abc import Sequence

_ELLIPSIS = "..."


def letters_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand, which have as many dimensions as `ranks` says, and those of the result.

    An ellipsis stands for the dimensions that an operand has beyond its letters; these get letters that the equation
    does not use, the same ones in all operands. Raises ValueError, with the reason, where the equation does not fit the
    ranks.
    """
    left, arrow, right = "".join(equation.split()).partition("->")
    operands = left.split(",")
    if len(operands) != len(ranks):
        raise ValueError(f"an equation of {len(operands)} operands for {len(ranks)}")
    counts = [rank - len(own.replace(_ELLIPSIS, "")) for own, rank in zip(operands, ranks, strict=True)]
    if any(count < 0 or (count and _ELLIPSIS not in own) for own, count in zip(operands, counts, strict=True)):
        raise ValueError("an equation that does not fit the dimensions of its operands")
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    extra = "".join(unused[: max(counts, default=0)])
    complete = [
        own.replace(_ELLIPSIS, extra[len(extra) - count :]) for own, count in zip(operands, counts, strict=True)
    ]
    if arrow:
        return complete, right.replace(_ELLIPSIS, extra)
    every = left.replace(_ELLIPSIS, "")
    once = sorted(letter for letter in set(every) - {","} if every.count(letter) == 1)
    return complete, extra + "".join(once)
