"""Puts into a few words what TVM, LLVM and linkers say at length."""

_LONGEST = 300


def reason(error: BaseException) -> str:
    """The line of an error's message that tells most: the first, or the last where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Command line:", "#", "^"))]
    if not telling:
        return type(error).__name__
    line = telling[-1] if telling[0].endswith(":") else telling[0]
    return line.rstrip(".:")[:_LONGEST]
