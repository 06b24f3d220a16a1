"""Commands in processes of their own, with no setting from the developer's shell."""

import os
import sys
from pathlib import Path

TVMFLOW = Path(sys.executable).with_name("tvmflow")
# A developer's own settings must not decide what the tests talk to.
_FOREIGN = ("TVMFLOW_", "TVM_", "MLFLOW_", "PREFECT_", "AWS_", "RCLONE_")


def is_foreign(name: str) -> bool:
    """Whether an environment variable configures tvmflow or one of the servers."""
    return name.startswith(_FOREIGN)


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without foreign settings, with these ones."""
    return {**{name: value for name, value in os.environ.items() if not is_foreign(name)}, **settings}
