"""Blobs and releases in a bucket: written once, read back, and published whole or not at all."""

import contextlib
import datetime
import hashlib
import io
import json
import random
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store.client import code_of, connect, explained
from tvmflow.store.config import StoreConfig

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB_ADDRESS = re.compile(r"(?:^|/)blobs/sha256/([0-9a-f]{64})$")
_CHUNK = 2**20
_MOST_PARTS = 10_000
# A check answers a waiting person: a server that accepts connections and then says nothing is given up soon.
_CHECK_READ_TIMEOUT = 4.0
_CLAIM_PATIENCE_SECONDS = 15.0
# Above the 10 ms within which two embedded servers on one folder see each other's objects.
_SETTLES_SECONDS = 0.05
_LOOKS_FOR_WRITTEN = 20
# Far above what the few small requests under a claim can take; what is older was left by a publisher that died.
_CLAIM_LIFETIME = datetime.timedelta(minutes=15)

Progress = Callable[[int], None]
"""Called with the number of bytes sent since the last call."""


class ReleaseStore:
    """The releases under one prefix of one bucket.

        blobs/sha256/<digest>                     payloads, written once, shared by releases
        releases/<name>/<version>/release.json    written last: a release exists when this does
        claims/<name>/<version>/<digest>-<nonce>  who is about to write that release.json; short-lived

    Every method raises `StoreError`, in one sentence, when the server is unreachable, refuses, or holds something else
    than expected. An instance may be shared by threads.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._s3 = connect(config)

    # -- Is it usable? -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Make sure that the store can be read and written, creating the bucket if it is missing.

        Takes about ten seconds at most. Leaves one small object, `checks/writable`, which is the same every time.
        """
        timeout = min(self.config.read_timeout, _CHECK_READ_TIMEOUT)
        store = ReleaseStore(replace(self.config, read_timeout=timeout, attempts=min(self.config.attempts, 2)))
        store._ensure_bucket()
        content = b"tvmflow can write here\n"
        store._put("checks/writable", content, "writing a small object to try the store")
        if store._get("checks/writable") != content:
            raise StoreError(
                f"{self.config.uri} at {self.config.server} does not give back what was just written: check the "
                "server's disk and log before releasing to it."
            )

    def _ensure_bucket(self) -> None:
        from botocore.exceptions import ClientError

        bucket = self.config.bucket
        with explained(self.config, "listing the bucket"):
            try:
                # Unlike a HEAD request, whose answers have no body, a refused listing says why.
                self._s3.list_objects_v2(Bucket=bucket, Prefix=self._key(""), MaxKeys=1)
                return
            except ClientError as error:
                if code_of(error) != "NoSuchBucket":
                    raise
        with explained(self.config, "creating the bucket"):
            try:
                if self.config.region == "us-east-1":
                    self._s3.create_bucket(Bucket=bucket)
                else:
                    location: Any = {"LocationConstraint": self.config.region}
                    self._s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=location)
            except ClientError as error:
                # Another process may have created it in the meantime, for the same owner.
                if code_of(error) != "BucketAlreadyOwnedByYou":
                    raise StoreError(
                        f"The bucket {bucket!r} does not exist at {self.config.server} and may not be created with "
                        f"these credentials ({code_of(error)}): create it, or correct its name."
                    ) from error

    # -- Blobs ---------------------------------------------------------------------------------------------------------

    def put_blob(self, path: Path, sha256: str, on_progress: Progress | None = None) -> str:
        """Send a file whose SHA-256 is `sha256`, unless the store has it already; return its `s3://` address.

        The file is hashed while it is sent and nothing becomes visible if it is not what `sha256` says; what was
        written is read back and hashed too. A damaged blob in the store is replaced.
        """
        key = _blob_key(sha256)
        report = on_progress or _ignore
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if self._blob_fault(sha256, [size]) is None:
                    _check_digest(hashlib.file_digest(file, "sha256").hexdigest(), path, sha256)
                    report(size)
                    return self._uri(key)
                if size <= self.config.part_size:
                    content = file.read()
                    _check_digest(hashlib.sha256(content).hexdigest(), path, sha256)
                    self._put(key, content, f"sending {path.name}")
                    report(len(content))
                else:
                    self._put_in_parts(key, file, path, sha256, size, report)
        except OSError as error:
            raise StoreError(f"{path} cannot be read for the release store: {error.strerror or error}.") from error
        if fault := self._blob_fault(sha256, [size], just_written=True):
            raise StoreError(
                f"{self._uri(key)} {fault} right after it was written: check the server's disk and log, then "
                "publish again."
            )
        return self._uri(key)

    def get_blob(self, sha256: str, destination: Path) -> None:
        """Fetch a blob into `destination`, which appears, or is replaced, only when the digest is right."""
        key = _blob_key(sha256)
        partial = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}.part")
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                digest = self._stream(key, file.write)
            if digest is None:
                raise StoreError(f"{self._uri(key)} is missing: publish the release again from where it was built.")
            if digest != sha256:
                raise StoreError(
                    f"{self._uri(key)} is damaged (its content has the digest {digest}): publish the release again "
                    "from where it was built."
                )
            partial.replace(destination)
        except OSError as error:
            raise StoreError(
                f"{destination} cannot be written with a blob of the release store: {error.strerror or error}."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _put_in_parts(
        self, key: str, file: io.BufferedReader, path: Path, sha256: str, size: int, report: Progress
    ) -> None:
        """Send one part after the other: some servers write parts out in order, and the digest needs the order too."""
        bucket, full_key = self.config.bucket, self._key(key)
        part_size = max(self.config.part_size, -(-size // _MOST_PARTS))
        hasher = hashlib.sha256()
        with explained(self.config, f"sending {path.name}"):
            upload = self._s3.create_multipart_upload(Bucket=bucket, Key=full_key)["UploadId"]
            try:
                parts: list[Any] = []
                while chunk := file.read(part_size):
                    hasher.update(chunk)
                    answer = self._s3.upload_part(
                        Bucket=bucket, Key=full_key, UploadId=upload, PartNumber=len(parts) + 1, Body=chunk
                    )
                    parts.append({"PartNumber": len(parts) + 1, "ETag": answer["ETag"]})
                    report(len(chunk))
                _check_digest(hasher.hexdigest(), path, sha256)
                self._s3.complete_multipart_upload(
                    Bucket=bucket, Key=full_key, UploadId=upload, MultipartUpload={"Parts": parts}
                )
            except BaseException:
                # The first error is the one to tell; the server expires what cannot be withdrawn now.
                with contextlib.suppress(Exception):
                    self._s3.abort_multipart_upload(Bucket=bucket, Key=full_key, UploadId=upload)
                raise

    def _blob_fault(self, sha256: str, sizes: Collection[int], *, just_written: bool = False) -> str | None:
        """What is wrong with a blob in the store, read in full, as the end of a sentence; None if nothing is.

        `sizes` are the bytes that it is said to have.
        """
        found = 0

        def count(chunk: bytes) -> None:
            nonlocal found
            found += len(chunk)

        digest = self._stream(_blob_key(sha256), count, just_written=just_written)
        if digest is None:
            return "is missing"
        for size in sizes:
            if size != found:
                return f"has {found} bytes instead of {size}"
        if digest != sha256:
            return f"is damaged (its content has the digest {digest})"
        return None

    # -- Releases ------------------------------------------------------------------------------------------------------

    def publish(
        self,
        name: str,
        version: str,
        release: Mapping[str, Any],
        blobs: Sequence[tuple[Path, str]],
        on_progress: Progress | None = None,
    ) -> str:
        """Send `blobs`, pairs of file and SHA-256, then write the release; return the address of its release.json.

        The document refers to a blob by `"sha256": DIGEST` (beside which a `"size"` in bytes is checked too) or by an
        address that ends in `blobs/sha256/DIGEST`, at any depth; each must be among `blobs` or already in the store.
        Publishing the same document again is a success. The same version with another document is refused, also when
        two publishers race. Interrupted anywhere, there is no release yet, and publishing again completes it.
        """
        key = _release_key(name, version)
        document = _canonical(name, version, release)
        found = self._get(key)
        if found is not None:
            self._require_same(key, found, document)
        references = _references(release)
        for path, sha256 in blobs:
            _check_size(path, references.pop(sha256, set()))
        for sha256, sizes in references.items():
            if fault := self._blob_fault(sha256, sizes):
                raise StoreError(
                    f"The release {name} {version} refers to the blob {sha256}, which {fault} in {self.config.uri}: "
                    "publish it with its file."
                )
        for path, sha256 in blobs:
            self.put_blob(path, sha256, on_progress)
        if found is None:
            self._write_once(name, version, document)
        return self._uri(key)

    def get_release(self, name: str, version: str) -> dict[str, Any]:
        """The document of one release; `StoreError` names the versions there are when it is not among them."""
        key = _release_key(name, version)
        content = self._get(key)
        if content is None:
            published = ", ".join(self.list_versions(name)) or "none"
            raise StoreError(
                f"There is no release {name} {version} in {self.config.uri}; published versions: {published}."
            )
        try:
            document = json.loads(content)
        except ValueError as error:
            raise StoreError(
                f"{self._uri(key)} is damaged: it is not a JSON document; restore it from a backup."
            ) from error
        if not isinstance(document, dict):
            raise StoreError(f"{self._uri(key)} is damaged: it is not a JSON object; restore it from a backup.")
        return document

    def has_release(self, name: str, version: str) -> bool:
        """Whether that version is published."""
        return self._get(_release_key(name, version)) is not None

    def verify_release(self, name: str, version: str) -> dict[str, Any]:
        """Read every blob of a release back and compare size and digest; return the release's document."""
        release = self.get_release(name, version)
        if fault := self.find_fault(release):
            raise StoreError(f"The release {name} {version} is not whole: {fault}")
        return release

    def find_fault(self, release: Mapping[str, Any]) -> str | None:
        """What is wrong with the blobs of a release's document, each read in full, in words; None if nothing is."""
        for sha256, sizes in _references(release).items():
            if fault := self._blob_fault(sha256, sizes):
                return f"{self._uri(_blob_key(sha256))} {fault}; publish it again from where it was built."
        return None

    def list_names(self) -> list[str]:
        """The names that have a release, sorted."""
        return sorted({name for name, _ in self._published("releases/")})

    def list_versions(self, name: str) -> list[str]:
        """The published versions of a name, oldest number first: 9 before 10, 1.9 before 1.10."""
        _require_name("name", name)
        return sorted((version for _, version in self._published(f"releases/{name}/")), key=_numeric_order)

    def iterate_releases(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """The documents of all releases, or of all versions of one name, in the order of `names` and `versions`."""
        for each in self.list_names() if name is None else [name]:
            for version in self.list_versions(each):
                yield self.get_release(each, version)

    def _published(self, prefix: str) -> Iterator[tuple[str, str]]:
        for key, _ in self._list(prefix):
            match key.split("/"):
                case ["releases", name, version, "release.json"] if _NAME.fullmatch(name) and _NAME.fullmatch(version):
                    yield name, version

    def _write_once(self, name: str, version: str, document: bytes) -> None:
        """Write release.json so that of several publishers with different documents at most one succeeds.

        `IfNoneMatch` alone would do, but some servers ignore it and others enforce it only most of the time. So each
        publisher first leaves a claim and then looks for those of others. Of two publishers the one whose claim came
        later is bound to see the other's, as listings are consistent, and whoever sees one withdraws and tries again
        after a random pause; whoever sees none looks for release.json once more and writes it. A claim is taken back
        only when the fate of release.json is known; one left behind by a crash is void after fifteen minutes, and never
        hinders the same document.
        """
        key = _release_key(name, version)
        digest = hashlib.sha256(document).hexdigest()
        deadline = time.monotonic() + _CLAIM_PATIENCE_SECONDS
        mine: set[str] = set()
        while True:
            claim = f"claims/{name}/{version}/{digest}-{secrets.token_hex(8)}"
            mine.add(claim)
            self._put(claim, b"%s\n" % digest.encode(), "claiming the version")
            time.sleep(_SETTLES_SECONDS)
            rivals = [other for other in self._live_claims(f"claims/{name}/{version}/") if digest not in other]
            found = self._get(key)
            if found is None and not rivals and self._put_if_absent(key, document):
                found = self._get(key, just_written=True)
                if found is None:
                    raise StoreError(
                        f"{self._uri(key)} is missing right after it was written: check the server's disk and log, "
                        "then publish again."
                    )
            # Also those of earlier rounds: a busy rclone may answer a deletion and not do it.
            self._withdraw(mine)
            if found is not None:
                self._require_same(key, found, document)
                return
            if time.monotonic() > deadline:
                raise StoreError(
                    f"The release {name} {version} is being published by somebody else with other content "
                    f"({self._uri(rivals[0] if rivals else key)}): choose another version, or try again in "
                    f"{_CLAIM_LIFETIME.seconds // 60} minutes if that publisher was killed."
                )
            time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - not for secrets, only to part the rivals

    def _live_claims(self, prefix: str) -> list[str]:
        claims = dict(self._list(prefix))
        # The age is the difference of two of the server's times, so that this machine's clock does not matter.
        newest = max(claims.values(), default=datetime.datetime.max)
        return [claim for claim, written in claims.items() if newest - written < _CLAIM_LIFETIME]

    def _withdraw(self, claims: Collection[str]) -> None:
        for claim in claims:
            # A claim that stays makes others wait at most, and a publisher may lack the right to delete.
            with contextlib.suppress(StoreError), explained(self.config, "withdrawing a claim"):
                self._s3.delete_object(Bucket=self.config.bucket, Key=self._key(claim))

    def _put_if_absent(self, key: str, content: bytes) -> bool:
        """Whether it was written; False when the server says that somebody else has written or is writing it."""
        from botocore.exceptions import ClientError

        with explained(self.config, f"writing {key}"):
            try:
                self._s3.put_object(
                    Bucket=self.config.bucket,
                    Key=self._key(key),
                    Body=content,
                    ContentType="application/json",
                    IfNoneMatch="*",
                )
            except ClientError as error:
                match error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"):
                    case 409 | 412:
                        return False
                    case 501:
                        # The server does not know the condition; the claim has to do.
                        self._put(key, content, f"writing {key}")
                    case _:
                        raise
        return True

    def _require_same(self, key: str, found: bytes, document: bytes) -> None:
        if found != document:
            raise StoreError(
                f"{self._uri(key)} is already published with other content and stays as it is: choose another version."
            )

    # -- Objects -------------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self.config.prefix}/{key}" if self.config.prefix else key

    def _uri(self, key: str) -> str:
        return f"{self.config.uri}/{key}"

    def _put(self, key: str, content: bytes, doing: str) -> None:
        with explained(self.config, doing):
            self._s3.put_object(Bucket=self.config.bucket, Key=self._key(key), Body=content)

    def _get(self, key: str, *, just_written: bool = False) -> bytes | None:
        chunks: list[bytes] = []
        return None if self._stream(key, chunks.append, just_written=just_written) is None else b"".join(chunks)

    def _stream(self, key: str, consume: Callable[[bytes], object], *, just_written: bool = False) -> str | None:
        """Hand an object's content to `consume` piece by piece; return its SHA-256, None if there is no such object.

        An object that was just written may take a second to appear: a busy rclone overlooks one now and then.
        """
        hasher = hashlib.sha256()
        looks = _LOOKS_FOR_WRITTEN if just_written else 1
        with explained(self.config, f"reading {key}"):
            while True:
                try:
                    body = self._s3.get_object(Bucket=self.config.bucket, Key=self._key(key))["Body"]
                    break
                except self._s3.exceptions.NoSuchKey:
                    looks -= 1
                    if not looks:
                        return None
                    time.sleep(_SETTLES_SECONDS)
            with contextlib.closing(body):
                for chunk in body.iter_chunks(_CHUNK):
                    hasher.update(chunk)
                    consume(chunk)
        return hasher.hexdigest()

    def _list(self, prefix: str) -> Iterator[tuple[str, datetime.datetime]]:
        """The keys under a prefix, relative to the store's, and when each was written."""
        start = len(self._key(""))
        with explained(self.config, f"listing {prefix}"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.config.bucket, Prefix=self._key(prefix)
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield entry["Key"][start:], entry["LastModified"]


def _canonical(name: str, version: str, release: Mapping[str, Any]) -> bytes:
    """The one spelling of a document: equal documents are equal bytes."""
    try:
        text = json.dumps(dict(release), sort_keys=True, ensure_ascii=False, indent=2, allow_nan=False)
        return f"{text}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"The release {name} {version} cannot be written as JSON: {error}.") from error


def _references(document: Mapping[str, Any]) -> dict[str, set[int]]:
    """The digests of the blobs that a document refers to, each with the sizes that it tells for it."""
    found: dict[str, set[int]] = {}

    def visit(value: Any) -> None:
        match value:
            case str():
                if address := _BLOB_ADDRESS.search(value):
                    found.setdefault(address[1], set())
            case Mapping():
                digest, size = value.get("sha256"), value.get("size")
                if isinstance(digest, str):
                    _require_sha256(digest)
                    found.setdefault(digest, set()).update([size] if isinstance(size, int) else [])
                for each in value.values():
                    visit(each)
            case list() | tuple():
                for each in value:
                    visit(each)

    visit(document)
    return found


def _blob_key(sha256: str) -> str:
    _require_sha256(sha256)
    return f"blobs/sha256/{sha256}"


def _release_key(name: str, version: str) -> str:
    _require_name("name", name)
    _require_name("version", version)
    return f"releases/{name}/{version}/release.json"


def _require_name(what: str, text: str) -> None:
    if not _NAME.fullmatch(text):
        raise StoreError(
            f"The release {what} {text!r} is not valid: use up to 128 letters, digits, '.', '_' and '-', the first of "
            "them a letter, a digit or '_'."
        )


def _require_sha256(text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise StoreError(f"{text!r} is not a SHA-256 digest: expected 64 lower-case hexadecimal digits.")


def _check_digest(found: str, path: Path, sha256: str) -> None:
    if found != sha256:
        raise StoreError(
            f"{path} has the SHA-256 {found} instead of {sha256}: it changed since it was built; build it again."
        )


def _check_size(path: Path, sizes: Collection[int]) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path} cannot be read for the release store: {error.strerror or error}.") from error
    for size in sizes:
        if size != found:
            raise StoreError(f"{path} has {found} bytes, but its release says {size}: build the release again.")


def _numeric_order(version: str) -> list[tuple[int, str]]:
    """Runs of digits compare as numbers, the rest as text."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", version)]


def _ignore(count: int) -> None:
    """Report progress to nobody."""
