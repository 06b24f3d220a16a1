"""Objects in a bucket, below a prefix: the S3 requests of the release store and the shared workspace."""

import contextlib
import datetime
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store.client import code_of, connect, explained
from tvmflow.store.config import StoreConfig

# Above the 10 ms within which two embedded servers on one folder see each other's objects.
SETTLE_SECONDS = 0.05
MAX_PARTS = 10_000
"""S3's limit on the parts of one upload."""
_CHUNK_BYTES = 2**20
_LOOKS_FOR_WRITTEN = 20


class InterruptedReadError(StoreError):
    """The server ended the connection while it sent an object."""


@dataclass(frozen=True)
class ObjectEntry:
    """An object in a listing: its key relative to the prefix, its size in bytes, and when it was written."""

    key: str
    size: int
    last_modified: datetime.datetime


class ObjectStore:
    """The objects below one prefix of one bucket. Keys are relative to the prefix.

    Every method raises StoreError, in one sentence, when the server is unreachable or refuses. Threads may share an
    instance.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.s3 = connect(config)

    def uri(self, key: str) -> str:
        """Return the `s3://` address of an object."""
        return f"{self.config.uri}/{key}"

    def full_key(self, key: str) -> str:
        """Return the key of an object in the bucket: the store's prefix and `key`."""
        return f"{self.config.prefix}/{key}" if self.config.prefix else key

    def ensure_bucket(self) -> None:
        """Create the bucket if it is missing. Raises StoreError when it may not be listed or created."""
        from botocore.exceptions import ClientError

        bucket = self.config.bucket
        with explained(self.config, "listing the bucket"):
            try:
                # Unlike a HEAD request, whose answers have no body, a refused listing says why.
                self.s3.list_objects_v2(Bucket=bucket, Prefix=self.full_key(""), MaxKeys=1)
                return
            except ClientError as error:
                if code_of(error) != "NoSuchBucket":
                    raise
        with explained(self.config, "creating the bucket"):
            try:
                if self.config.region == "us-east-1":
                    self.s3.create_bucket(Bucket=bucket)
                else:
                    location: Any = {"LocationConstraint": self.config.region}
                    self.s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=location)
            except ClientError as error:
                # Another process may have created it in the meantime, for the same owner.
                if code_of(error) != "BucketAlreadyOwnedByYou":
                    raise StoreError(
                        f"The bucket {bucket!r} does not exist at {self.config.server} and may not be created with "
                        f"these credentials ({code_of(error)}): create it, or correct its name."
                    ) from error

    def list_objects(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with `prefix`, in the server's order. Raises StoreError."""
        start = len(self.full_key(""))
        with explained(self.config, f"listing {prefix}"):
            pages = self.s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.config.bucket, Prefix=self.full_key(prefix)
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield ObjectEntry(entry["Key"][start:], entry["Size"], entry["LastModified"])

    def get(self, key: str, *, just_written: bool = False) -> bytes | None:
        """Return the content of an object, None if there is none; `just_written` is as in `stream`.

        Raises StoreError.
        """
        chunks: list[bytes] = []
        return None if self.stream(key, chunks.append, just_written=just_written) is None else b"".join(chunks)

    def get_with_etag(self, key: str) -> tuple[bytes, str] | None:
        """Return the content of an object and its entity tag, None if there is no such object.

        Raises InterruptedReadError when the server ends the connection while it sends the content, StoreError when it
        fails.
        """
        from botocore.exceptions import IncompleteReadError, ResponseStreamingError

        try:
            with explained(self.config, f"reading {key}"):
                try:
                    answer = self.s3.get_object(Bucket=self.config.bucket, Key=self.full_key(key))
                except self.s3.exceptions.NoSuchKey:
                    return None
                with contextlib.closing(answer["Body"]) as body:
                    return body.read(), answer["ETag"]
        except StoreError as error:
            if isinstance(error.__cause__, IncompleteReadError | ResponseStreamingError):
                raise InterruptedReadError(str(error)) from error
            raise

    def stream(self, key: str, consume: Callable[[bytes], object], *, just_written: bool = False) -> str | None:
        """Pass an object's content to `consume` in chunks; return its SHA-256, None if there is no such object.

        With `just_written` an absent object is looked for during a second, because a busy rclone overlooks new ones at
        times. Raises StoreError when the server fails.
        """
        hasher = hashlib.sha256()
        looks = _LOOKS_FOR_WRITTEN if just_written else 1
        with explained(self.config, f"reading {key}"):
            while True:
                try:
                    body = self.s3.get_object(Bucket=self.config.bucket, Key=self.full_key(key))["Body"]
                    break
                except self.s3.exceptions.NoSuchKey:
                    looks -= 1
                    if not looks:
                        return None
                    time.sleep(SETTLE_SECONDS)
            with contextlib.closing(body):
                for chunk in body.iter_chunks(_CHUNK_BYTES):
                    hasher.update(chunk)
                    consume(chunk)
        return hasher.hexdigest()

    def put(self, key: str, content: bytes, action: str) -> None:
        """Write an object, or replace it; `action` completes "while ..." in the StoreError."""
        with explained(self.config, action):
            self.s3.put_object(Bucket=self.config.bucket, Key=self.full_key(key), Body=content)

    def put_if_unchanged(self, key: str, content: bytes, etag: str | None) -> bool:
        """Write a JSON document if the object still has the entity tag; with None, if there is no object yet.

        Returns False when the server says that the object has another tag or that another client is writing it, else
        True. A server without conditional writes writes the document in any case. Raises StoreError when the server
        fails.
        """
        from botocore.exceptions import ClientError

        condition: Any = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with explained(self.config, f"writing {key}"):
            try:
                self.s3.put_object(
                    Bucket=self.config.bucket,
                    Key=self.full_key(key),
                    Body=content,
                    ContentType="application/json",
                    **condition,
                )
            except ClientError as error:
                match error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"):
                    case 409 | 412:
                        return False
                    case 501:
                        # The server has no conditional writes; the writer's claim protects the object.
                        self.put(key, content, f"writing {key}")
                    case _:
                        raise
        return True

    def put_in_parts(self, key: str, parts: Iterable[bytes], action: str) -> None:
        """Write an object as a multipart upload, which is visible only when the last part has been sent.

        The parts are sent one after the other, because some servers write them out in the order of their arrival. When
        `parts` raises, there is no object. `action` completes "while ..." in the StoreError.
        """
        bucket, full_key = self.config.bucket, self.full_key(key)
        with explained(self.config, action):
            upload = self.s3.create_multipart_upload(Bucket=bucket, Key=full_key)["UploadId"]
            try:
                uploaded_parts: list[Any] = []
                for number, part in enumerate(parts, start=1):
                    answer = self.s3.upload_part(
                        Bucket=bucket, Key=full_key, UploadId=upload, PartNumber=number, Body=part
                    )
                    uploaded_parts.append({"PartNumber": number, "ETag": answer["ETag"]})
                self.s3.complete_multipart_upload(
                    Bucket=bucket, Key=full_key, UploadId=upload, MultipartUpload={"Parts": uploaded_parts}
                )
            except BaseException:
                # The first error is the one to raise; the server expires an upload that cannot be withdrawn now.
                with contextlib.suppress(Exception):
                    self.s3.abort_multipart_upload(Bucket=bucket, Key=full_key, UploadId=upload)
                raise

    def delete(self, key: str, action: str) -> None:
        """Delete an object, if it exists; `action` completes "while ..." in the StoreError."""
        with explained(self.config, action), contextlib.suppress(self.s3.exceptions.NoSuchKey):
            self.s3.delete_object(Bucket=self.config.bucket, Key=self.full_key(key))
