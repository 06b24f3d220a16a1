"""An HTTP server that waits for the requests of its clients for a limited time only."""

import time
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn


class PatientServer(uvicorn.Server):
    """uvicorn's server, which closes connections on which no whole request arrives in `patience` seconds.

    Each takes a file descriptor. A request whose body is being read by the application is the application's to end.
    """

    def __init__(self, config: uvicorn.Config, patience: float) -> None:
        super().__init__(config)
        self._patience = patience
        # The last request of each connection that waits for one, and since when.
        self._waiting: WeakKeyDictionary[Any, tuple[Any, float]] = WeakKeyDictionary()

    async def on_tick(self, counter: int) -> bool:
        """Close silent connections, then do what uvicorn does ten times a second."""
        now = time.monotonic()
        connections: tuple[Any, ...] = tuple(self.server_state.connections)
        for connection in connections:
            request = connection.cycle
            last, since = self._waiting.get(connection, (self, now))
            if last is not request or (request is not None and not request.response_complete):
                self._waiting[connection] = request, now
            elif now - since > self._patience:
                connection.transport.close()
        return await super().on_tick(counter)
