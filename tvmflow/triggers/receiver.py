"""The receiver of MLflow's webhooks: a small FastAPI application."""

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
_LOG = logging.getLogger("tvmflow.triggers")

Submit = Callable[[RunRequest, str], str]
"""Starts what is wished and returns the flow run's id; with the same key again, that of the same run."""


def application(secret: str, catalogue: Callable[[], Catalogue], submit: Submit) -> FastAPI:
    """The application: `catalogue` is asked for with every delivery, so that changed release files count at once.

    202: a flow run was started; 200: it is nothing of ours; 401: forged or old; 413: too large; 422: not MLflow's;
    503: the flow run could not be started, which MLflow tries again.
    """
    app = FastAPI(title="tvmflow", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post(PATH)
    async def receive(request: Request) -> JSONResponse:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _answer(413, reason=f"a delivery has at most {MAX_BODY} bytes")
        try:
            said = read_delivery(secret, request.headers, bytes(body), time.time())
        except DeliveryError as refused:
            _LOG.warning("refused a delivery: %s", refused.reason)
            return _answer(refused.status, reason=refused.reason)
        if said is None:
            return _answer(200, ignored="no event of ours")
        alias = Alias(said.name, said.alias)
        try:
            wish = (await run_in_threadpool(catalogue)).find_request(alias, said.version)
            if wish is None:
                _LOG.info("%s set to %s: not managed here", alias, said.version)
                return _answer(200, ignored=f"{alias} is not managed here")
            run = await run_in_threadpool(submit, wish, f"mlflow-webhook-{said.delivery}")
        except TvmflowError as error:
            _LOG.error("%s set to %s: nothing started: %s", alias, said.version, error)
            return _answer(503, reason=str(error))
        _LOG.info("%s set to %s: %s, flow run %s", alias, said.version, wish.deployment, run)
        return _answer(202, deployment=wish.deployment, flow_run=run)

    return app


def _answer(status: int, **content: str) -> JSONResponse:
    return JSONResponse(content, status)
