"""MLflow's webhooks: the check of a delivery's signature and age, and its content.

Deliveries are signed by Standard Webhooks: `v1,` and base64(HMAC-SHA256(secret, "{id}.{timestamp}.{body}")).
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PATH = "/webhooks/mlflow"
SIGNATURE_HEADER = "X-MLflow-Signature"
DELIVERY_HEADER = "X-MLflow-Delivery-Id"
TIMESTAMP_HEADER = "X-MLflow-Timestamp"
# MLflow signs a delivery once and repeats it for some seconds; clocks differ.
MAX_AGE_SECONDS = 300
_VERSION = "v1"
_MAX_ID = 100
_SECONDS = re.compile(r"[0-9]{1,12}")


class DeliveryError(Exception):
    """A delivery that is refused: the HTTP status and the reason of the answer."""

    def __init__(self, status: Literal[401, 422], reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class _AliasData(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    alias: str = Field(min_length=1)
    version: str = Field(pattern=r"^[1-9][0-9]*$")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True)

    entity: str
    action: str
    data: dict[str, object]


@dataclass(frozen=True)
class AliasEvent:
    """A delivery that reports that the alias of a registered model was set to a version; `delivery` is its id."""

    delivery: str
    name: str
    alias: str
    version: str


def sign(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """Return MLflow's signature of the delivery with the id `delivery`: `v1,` and the HMAC-SHA256 in base64."""
    content = f"{delivery}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), content, hashlib.sha256).digest()
    return f"{_VERSION},{base64.b64encode(digest).decode()}"


def read_delivery(secret: str, headers: Mapping[str, str], body: bytes, now: float) -> AliasEvent | None:
    """Read a delivery; return None for an event of another kind. `now` is in seconds since 1970.

    Raises DeliveryError with 401 for a wrong signature or a time more than five minutes off, with 422 for a body that
    MLflow does not send. The body is parsed only when its signature is right.
    """
    delivery, timestamp = headers.get(DELIVERY_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
    signature = headers.get(SIGNATURE_HEADER, "")
    # As bytes: compare_digest accepts only ASCII strings, and a header may hold other characters.
    if not hmac.compare_digest(sign(secret, delivery, timestamp, body).encode(), signature.encode()):
        raise DeliveryError(401, "the signature is wrong")
    if not _SECONDS.fullmatch(timestamp) or abs(now - int(timestamp)) > MAX_AGE_SECONDS:
        raise DeliveryError(401, f"the delivery's time is more than {MAX_AGE_SECONDS} seconds off")
    if not 0 < len(delivery) <= _MAX_ID:
        raise DeliveryError(422, "the delivery has no usable id")
    try:
        event = _Body.model_validate_json(body)
        if (event.entity, event.action) != ("model_version_alias", "created"):
            return None
        data = _AliasData.model_validate(event.data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise DeliveryError(422, f"{where}: {first['msg']}") from error
    return AliasEvent(delivery, data.name, data.alias, data.version)
