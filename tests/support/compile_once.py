"""A compiler that compiles a source once for all checkouts: `compile_once.py FOLDER c++ OPTIONS -c SOURCE -o OBJECT`.

It keeps objects in FOLDER by the digest of the source after its includes, of the compiler's version and of the options
but for paths. The lines that a sanitiser reports may be those of another checkout.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The objects that stay in the folder, the last ones used.
_MOST = 40
_OPTIONS_OF_PATHS = ("-o", "-MF", "-MT", "-isystem", "-I", "-c")


def compile_once(folder: Path, command: list[str]) -> int:
    """Put the object of a compiler's command line where it says, and return the exit code."""
    if "-c" not in command or "-o" not in command:
        return subprocess.call(command)
    output = Path(command[command.index("-o") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # This also writes the file of dependencies.
        text = Path(scratch) / "text"
        options = [str(text) if word == str(output) and command[place - 1] == "-o" else word
                   for place, word in enumerate(command) if word != "-c"]  # fmt: skip
        if subprocess.call([*options, "-E", "-P"]) != 0:
            return subprocess.call(command)
        kept = folder / _key(command, text.read_bytes())
        if kept.is_file():
            os.utime(kept)
            shutil.copyfile(kept, output)
            return 0
        code = subprocess.call(command)
        if code == 0:
            shutil.copyfile(output, Path(scratch) / "object")
            (Path(scratch) / "object").replace(kept)
    for other in sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)[:-_MOST]:
        other.unlink(missing_ok=True)
    return code


def _key(command: list[str], text: bytes) -> str:
    """The name of the object that a command makes of a source, whose text after its includes is given."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    before = ["", *command]
    options = [
        word
        for word, last in zip(command, before, strict=False)
        if not word.startswith(_OPTIONS_OF_PATHS) and last not in _OPTIONS_OF_PATHS
    ]
    digest = hashlib.sha256(version)
    for part in (*map(str.encode, options), text):
        digest.update(len(part).to_bytes(8) + part)
    return f"{digest.hexdigest()}.o"


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2:]))
