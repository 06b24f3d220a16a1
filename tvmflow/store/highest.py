"""The highest number of each channel that this host has seen: an older channel cannot be put in its place."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tvmflow.errors import StatementError, StoreError
from tvmflow.files import write_whole
from tvmflow.store.config import StoreConfig
from tvmflow.store.keys import require_name
from tvmflow.store.objects import lock_file


@dataclass(frozen=True)
class Highest:
    """The highest number that this host has seen of a channel, kept in the file `path`; None keeps nothing."""

    path: Path | None

    @classmethod
    def of(cls, config: StoreConfig, name: str, channel: str) -> Self:
        """Return the object for a channel of the store that `config` names; its file is in the folder `config.memory`.

        If that folder is None, the object keeps nothing. Raises StoreError for a name or channel that is not allowed.
        """
        require_name("name", name)
        require_name("channel", channel)
        if config.memory is None:
            return cls(None)
        store = hashlib.sha256(f"{config.endpoint or config.folder}\n{config.uri}".encode()).hexdigest()
        return cls(config.memory / store / name / channel)

    @property
    def number(self) -> int:
        """The number, 0 for a channel that this host has not seen. Raises StatementError for a damaged file."""
        if self.path is None:
            return 0
        try:
            return int(self.path.read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise StatementError(
                f"{self.path} does not hold the number of a channel: remove it if you know why it is damaged."
            ) from error

    def raise_to(self, number: int) -> None:
        """Keep a number unless a higher one is kept. Raises StoreError when the file cannot be written."""
        if self.path is None:
            return
        with lock_file(self.path.with_name(f".{self.path.name}.lock")):
            if number <= self.number:
                return
            try:
                write_whole(self.path, f"{number}\n")
            except OSError as error:
                raise StoreError(f"{self.path} cannot be written: {error.strerror or error}.") from error
