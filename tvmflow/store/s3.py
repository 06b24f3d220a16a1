"""Objects of an S3 server, below a prefix of a bucket."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store.client import code_of, connect, explain_errors, is_busy, status_of
from tvmflow.store.config import StoreConfig
from tvmflow.store.objects import CHUNK_BYTES, Object, ObjectEntry, ObjectStore, lock_file

# The object with which conditional writes are tried, and its content, which is the same every time.
_PROBE, _PROBE_CONTENT = "checks/conditions", b"tvmflow tries conditional writes here\n"
# An object that is replaced while it is read may break off.
_READS = 3


class S3Objects(ObjectStore):
    """The objects of an S3 server.

    `create` and `replace` use conditional writes (`If-None-Match`, `If-Match`); before the first one, a probe checks
    that the server supports them. With a `lock` in the configuration, all writers are processes of this machine, and
    that file lock takes the place of conditional writes.
    """

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self.s3 = connect(config)
        self._trial = threading.Lock()
        self._has_conditions = False

    def prepare(self) -> None:
        """Create the bucket if it is missing. Raises StoreError when it may not be listed or created."""
        from botocore.exceptions import ClientError

        bucket = self.config.bucket
        with explain_errors(self.config, "listing the bucket"):
            try:
                # Unlike a HEAD request, whose answers have no body, a refused listing says why.
                self.s3.list_objects_v2(Bucket=bucket, Prefix=self.full_key(""), MaxKeys=1)
                return
            except ClientError as error:
                if code_of(error) != "NoSuchBucket":
                    raise
        with explain_errors(self.config, "creating the bucket"):
            try:
                if self.config.region == "us-east-1":
                    self.s3.create_bucket(Bucket=bucket)
                else:
                    location: Any = {"LocationConstraint": self.config.region}
                    self.s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=location)
            except ClientError as error:
                if is_busy(error):
                    raise
                # Another process may have created it in the meantime, for the same owner.
                if code_of(error) != "BucketAlreadyOwnedByYou":
                    raise StoreError(
                        f"The bucket {bucket!r} does not exist at {self.config.server} and may not be created with "
                        f"these credentials ({code_of(error)}): create it, or correct its name."
                    ) from error

    def list_objects(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with `prefix`, in the server's order. Raises StoreError."""
        start = len(self.full_key(""))
        with explain_errors(self.config, f"listing {prefix}"):
            pages = self.s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.config.bucket, Prefix=self.full_key(prefix)
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield ObjectEntry(entry["Key"][start:], entry["Size"], entry["LastModified"])

    def read(self, key: str) -> Object | None:
        """Return an object, None if there is none; its tag is its entity tag. Raises StoreError."""
        from botocore.exceptions import IncompleteReadError, ResponseStreamingError

        for attempt in range(1, _READS + 1):
            try:
                with explain_errors(self.config, f"reading {key}"):
                    try:
                        answer = self.s3.get_object(Bucket=self.config.bucket, Key=self.full_key(key))
                    except self.s3.exceptions.NoSuchKey:
                        return None
                    with contextlib.closing(answer["Body"]) as body:
                        return Object(body.read(), answer["ETag"], answer["LastModified"])
            except StoreError as error:
                if attempt == _READS or not isinstance(error.__cause__, IncompleteReadError | ResponseStreamingError):
                    raise
        raise AssertionError

    def stream(self, key: str, consume: Callable[[bytes], object]) -> str | None:
        """Pass an object's content to `consume` in chunks; return its SHA-256, None if there is no such object.

        Raises StoreError.
        """
        hasher = hashlib.sha256()
        with explain_errors(self.config, f"reading {key}"):
            try:
                body = self.s3.get_object(Bucket=self.config.bucket, Key=self.full_key(key))["Body"]
            except self.s3.exceptions.NoSuchKey:
                return None
            with contextlib.closing(body):
                for chunk in body.iter_chunks(CHUNK_BYTES):
                    hasher.update(chunk)
                    consume(chunk)
        return hasher.hexdigest()

    def require_conditions(self) -> None:
        """Try conditional writes on a probe object; do nothing after a first success, or with a lock.

        Raises StoreError when the server ignores or refuses conditional writes.
        """
        if self.config.lock is not None:
            return
        with self._trial:
            if self._has_conditions:
                return
            self.put(_PROBE, _PROBE_CONTENT, "writing a small object to try the store")
            fresh, unchanged = {"IfNoneMatch": "*"}, {"IfMatch": '"00000000000000000000000000000000"'}
            if any(self._put_if(_PROBE, _PROBE_CONTENT, condition) for condition in (fresh, unchanged)):
                raise StoreError(self._describe_lack())
            self._has_conditions = True

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether the object now has this content.

        An object that exists stays as it is: the result is True if it has the same content, else False. Raises
        StoreError when the server fails.
        """
        return self._decide(key, content, None)

    def replace(self, key: str, content: bytes, tag: str) -> bool:
        """Replace the object if its tag is still `tag`; return whether the object now has this content.

        An object that has changed or is gone stays as it is. The result is True if it has changed to the same content,
        because a repeated request may find what it wrote itself. Raises StoreError when the server fails.
        """
        return self._decide(key, content, tag)

    def put(self, key: str, content: bytes, action: str) -> None:
        """Write an object, or replace it; `action` completes "while ..." in the StoreError."""
        with explain_errors(self.config, action):
            self.s3.put_object(Bucket=self.config.bucket, Key=self.full_key(key), Body=content)

    def put_in_parts(self, key: str, parts: Iterable[bytes], action: str) -> None:
        """Write an object as a multipart upload, which is visible only when the last part has been sent.

        The parts are sent one after the other, because some servers write them out in the order of their arrival. When
        `parts` raises, nothing is written. `action` completes "while ..." in the StoreError.
        """
        bucket, full_key = self.config.bucket, self.full_key(key)
        with explain_errors(self.config, action):
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
        with explain_errors(self.config, action), contextlib.suppress(self.s3.exceptions.NoSuchKey):
            self.s3.delete_object(Bucket=self.config.bucket, Key=self.full_key(key))

    def _decide(self, key: str, content: bytes, tag: str | None) -> bool:
        """Write a document if the object still has the tag; with None, if there is no object yet."""
        if self.config.lock is not None:
            with lock_file(self.config.lock):
                entry = self.read(key)
                if (None if entry is None else entry.tag) != tag:
                    return entry is not None and entry.content == content
                self.put(key, content, f"writing {key}")
                return True
        self.require_conditions()
        if self._put_if(key, content, {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}):
            return True
        # When the answer to the first try of a request is lost, the server refuses the second because of the first.
        return self.get(key) == content

    def _put_if(self, key: str, content: bytes, condition: dict[str, str]) -> bool:
        """Write a document under a condition; return False when the server says that it does not hold."""
        from botocore.exceptions import ClientError

        options: Any = condition
        with explain_errors(self.config, f"writing {key}"):
            try:
                self.s3.put_object(
                    Bucket=self.config.bucket,
                    Key=self.full_key(key),
                    Body=content,
                    ContentType="application/json",
                    **options,
                )
            except ClientError as error:
                match status_of(error):
                    # Absent, changed, or another client is writing it at this moment.
                    case 404 | 409 | 412:
                        return False
                    case 501:
                        raise StoreError(self._describe_lack()) from error
                    case _:
                        raise
        return True

    def _describe_lack(self) -> str:
        return (
            f"{self.config.server[0].upper()}{self.config.server[1:]} knows no conditional writes, so that two writers "
            "could overwrite each other: use a server that does, or set s3_single_writer where only this machine "
            "writes to it."
        )
