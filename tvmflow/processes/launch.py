"""The start of a child process: this code ties it to its parent, then runs a Python module or a program in it."""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str, from_working_folder: bool = False) -> list[str]:
    """Return the command line that runs a Python module in a process that dies with this one.

    The module search path of that process begins with its working folder only if `from_working_folder` is set.
    """
    kind = "local-module" if from_working_folder else "module"
    return [sys.executable, "-P", __file__, str(os.getpid()), kind, module, *arguments]


def program_command(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command`, which begins with a path, in a process that dies with this one."""
    # The kernel's promise outlasts the exec. A `preexec_fn` would ask for it in a forked copy of a process with
    # threads, which may deadlock.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), "program", *command]


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it, a thread of the process `parent`, ends.

    Raises SystemExit when the parent has ended already, OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the kernel was asked.
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def _main() -> None:
    parent, kind, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if kind == "program":
        os.execv(command[0], command)  # noqa: S606 -- without a shell, from an argument list
    if kind == "local-module":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 -- as the interpreter itself has it there
    # This package may have been imported from the parent's working folder.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))  # noqa: PTH120 -- pathlib takes time to import
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
