"""Shortens the messages of TVM, LLVM and linkers to one line."""

_LONGEST = 300


def shorten(error: BaseException) -> str:
    """Return the most useful line of an error's message, of at most 300 characters; its type where it has none.

    That is the first line, or the last where the first ends in a colon.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("Command line:", "#", "^"))]
    if not lines:
        return type(error).__name__
    line = lines[-1] if lines[0].endswith(":") else lines[0]
    return line.rstrip(".:")[:_LONGEST]
