"""People: who asks for a release, and whether two names are of one person."""

import getpass
import os
import socket


def identify_user() -> str:
    """Return the user of this process, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def is_same_person(one: str, other: str) -> bool:
    """Whether two names, each as USER@HOST, are of one user, on whatever machines."""
    return one.partition("@")[0] == other.partition("@")[0]
