"""The receiver of MLflow's webhooks: a small FastAPI application."""

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from tvmflow import __version__
from tvmflow.errors import TvmflowError
from tvmflow.triggers.catalogue import Alias, Catalogue, RunRequest
from tvmflow.triggers.webhook import PATH, DeliveryError, read_delivery

# An alias event has some two hundred bytes.
MAX_BODY = 64 * 1024
# How long a client may take to send a request, in seconds; MLflow sends its few bytes at once.
PATIENCE = 30.0
_LOG = logging.getLogger("tvmflow.triggers")

Submit = Callable[[RunRequest, str], str]
"""Starts the requested run and returns the flow run's id; called again with the same key, that of the same run."""


def application(secret: str, catalogue: Callable[[], Catalogue], submit: Submit, patience: float = PATIENCE) -> FastAPI:
    """Create the FastAPI application that receives MLflow's webhooks and starts the runs that they ask for.

    It calls `catalogue` for every delivery, so that changed release files take effect at once. `secret` is the key of
    the deliveries' signatures; `submit` starts a requested run. Answers 202 when a flow run was started, 200 for an
    event that is not managed here, 401 for a delivery that is forged or old, 408 for one that has not arrived in
    `patience` seconds, 413 for one that is too large, 422 for one that MLflow does not send, and 503 when the flow run
    could not be started, so that MLflow retries.
    """
    app = FastAPI(title="tvmflow", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post(PATH)
    async def receive(request: Request) -> JSONResponse:
        body = bytearray()
        try:
            async with asyncio.timeout(patience):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BODY:
                        return _answer(413, reason=f"a delivery has at most {MAX_BODY} bytes")
        except TimeoutError:
            return _answer(408, reason=f"the delivery has not arrived in {patience:g} seconds")
        try:
            event = read_delivery(secret, request.headers, bytes(body), time.time())
        except DeliveryError as error:
            _LOG.warning("refused a delivery: %s", error.reason)
            return _answer(error.status, reason=error.reason)
        if event is None:
            return _answer(200, ignored="not the event of an alias")
        alias = Alias(event.name, event.alias)
        try:
            run_request = (await run_in_threadpool(catalogue)).find_request(alias, event.version)
            if run_request is None:
                _LOG.info("%s set to %s: not managed here", alias, event.version)
                return _answer(200, ignored=f"{alias} is not managed here")
            run = await run_in_threadpool(submit, run_request, f"mlflow-webhook-{event.delivery}")
        except TvmflowError as error:
            _LOG.error("%s set to %s: nothing started: %s", alias, event.version, error)
            return _answer(503, reason=str(error))
        _LOG.info("%s set to %s: %s, flow run %s", alias, event.version, run_request.deployment, run)
        return _answer(202, deployment=run_request.deployment, flow_run=run)

    return app


def _answer(status: int, **content: str) -> JSONResponse:
    return JSONResponse(content, status)
