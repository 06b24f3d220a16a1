"""Takes a picture of a report's page with Chromium: `python docs/picture.py PAGE.html OUTPUT.png [SECTION]`.

SECTION is the identifier of a heading, as `where-the-time-goes`; without it the picture is of the top.
"""

import html
import subprocess
import sys
import tempfile
from pathlib import Path

_WIDTH, _HEIGHT = 1000, 1100


def take(page: Path, output: Path, section: str, width: int = _WIDTH) -> None:
    """Write the picture of a page, `width` pixels wide, from a section on; "" is the top."""
    with tempfile.TemporaryDirectory() as folder:
        # Chromium's own pictures of an address with a section are empty; of a page within a page they are not.
        address = html.escape(f"{page.resolve().as_uri()}#{section}")
        frame = Path(folder) / "frame.html"
        style = f"width:{width}px;height:{_HEIGHT}px;border:0"
        frame.write_text(f'<!DOCTYPE html><body style="margin:0"><iframe style="{style}" src="{address}"></iframe>')
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        size = f"--window-size={width},{_HEIGHT}"
        command = ["chromium", *options, size, f"--screenshot={output}", frame.as_uri()]
        subprocess.run(command, check=True, timeout=120)


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
