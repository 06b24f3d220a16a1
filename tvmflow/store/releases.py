"""Releases in a bucket: each is written once, is complete or absent, and its blobs are checked."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.encoding import decode, encode
from tvmflow.documents.release import Release
from tvmflow.errors import StatementError, StoreError
from tvmflow.store.backends import open_objects
from tvmflow.store.blobs import BlobStore, Progress
from tvmflow.store.config import StoreConfig
from tvmflow.store.keys import NAME, blob_key, numeric_order, release_key, require_name, statement_key
from tvmflow.store.statements import Claim, Envelope, Subject, check, sign

# A person waits for the check, so a server that accepts connections but does not answer fails soon.
_CHECK_READ_TIMEOUT = 4.0


class ReleaseClaim(Claim):
    """The claim that a release has the document and the blobs that the statement names as its subjects."""

    predicate_type = "urn:tvmflow:release:1"
    name: str
    version: str


class ReleaseStore:
    """The releases under one prefix of one bucket.

        blobs/sha256/<digest>                     payloads, written once, shared by releases
        releases/<name>/<version>/release.json    a release exists when this does
        releases/<name>/<version>/statement.json  the signed statement on it, where a key signs
        channels/<name>/<channel>.json            see `channels`

    Every method raises `StoreError`, in one sentence, when the server is unreachable, refuses, or holds something else
    than expected. An instance may be shared by threads.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.objects = open_objects(config)
        self._blobs = BlobStore(self.objects)

    def check(self) -> None:
        """Check that the store can be read and written, and create the bucket if it is missing.

        Takes about ten seconds at most. Leaves up to two small objects in `checks/`, which are the same every time.
        Raises StoreError when the store cannot be used, or lets two concurrent writers overwrite each other.
        """
        timeout = min(self.config.read_timeout, _CHECK_READ_TIMEOUT)
        objects = open_objects(replace(self.config, read_timeout=timeout, attempts=min(self.config.attempts, 2)))
        objects.prepare()
        content = b"tvmflow can write here\n"
        objects.put("checks/writable", content, "writing a small object to try the store")
        if objects.get("checks/writable") != content:
            raise StoreError(
                f"{self.config.uri} at {self.config.server} does not give back what was just written: check the "
                "server's disk and log before releasing to it."
            )
        self.objects.require_conditions()

    def put_blob(self, path: Path, sha256: str, on_progress: Progress | None = None) -> str:
        """Send a file whose SHA-256 is `sha256`, unless the store has it already; return its `s3://` address.

        `on_progress`, if there is one, gets the number of bytes sent since its last call. Raises StoreError when the
        digest differs, the file cannot be read, the blob cannot be read back, or the server fails.
        """
        return self._blobs.put(path, sha256, on_progress)

    def get_blob(self, sha256: str, destination: Path) -> None:
        """Fetch a blob into the file `destination`, which appears, or is replaced, only when its digest is right.

        Raises StoreError for a blob that is missing or damaged, a file that cannot be written, and a server that fails.
        """
        self._blobs.fetch(sha256, destination)

    def publish(
        self,
        release: Release,
        blobs: Sequence[tuple[Path, str]],
        on_progress: Progress | None = None,
        require_lease: Callable[[], None] = lambda: None,
    ) -> str:
        """Send `blobs`, pairs of file and SHA-256, then write the release; return the address of its release.json.

        Each blob of the release must be among `blobs` or in the store already. To publish the same release again is a
        success, and leaves its document as it is. The same version of another content is refused, also when two
        publishers race. After an interruption at any point there is no release yet, and a second call completes it.
        With a signing key, a statement on the release is written after it. `on_progress` gets the number of bytes sent
        since its last call. `require_lease` is called right before the document is written, and may raise. Raises
        StoreError when it is refused or the server fails.
        """
        key = release_key(release.name, release.version)
        content = encode(release)
        published = self.objects.get(key)
        if published is not None:
            self._require_same(key, published, release)
        references = release.blobs
        for path, sha256 in blobs:
            _require_size(path, references.pop(sha256, set()))
        for sha256, sizes in references.items():
            if fault := self._blobs.find_fault(sha256, sizes):
                raise StoreError(
                    f"The {release.label} refers to the blob {sha256}, which {fault} in {self.config.uri}: "
                    "publish it with its file."
                )
        for path, sha256 in blobs:
            self.put_blob(path, sha256, on_progress)
        if published is None:
            require_lease()
            if not self.objects.create(key, content):
                published = self.objects.get(key)
                self._require_same(key, published, release)
        if self.config.signing_key is not None:
            self._sign(release, published or content, self.config.signing_key)
        return self.objects.uri(key)

    def sign_release(self, name: str, version: str, key: Path) -> None:
        """Sign a statement on a release as it is in the store; an earlier statement is replaced.

        Raises StoreError for a release that is not published or whose blobs are not whole, SettingsError for a key that
        cannot be read.
        """
        content = self._read(name, version)
        release = self._decode(name, version, content)
        if fault := self.find_fault(release):
            raise StoreError(f"The {release.label} is not whole: {fault}")
        self._sign(release, content, key)

    def read_statement(self, name: str, version: str) -> Envelope | None:
        """Return the statement on a release, unchecked; None if there is none. Raises StoreError for a damaged one."""
        content = self.objects.get(statement_key(name, version))
        return None if content is None else Envelope.parse(content, f"The release {name} {version}")

    def get_release(self, name: str, version: str, *, trusted: Sequence[Path] = ()) -> Release:
        """Return one release.

        One of the keys in the files `trusted` must have signed a statement on it; if there are none, statements are
        not checked. Raises StoreError for a version that is not published (the message lists those that are), for a
        document that is damaged, of another release or of a newer format, and when the server fails; StatementError
        when no trusted key has signed the statement, or the release was changed since.
        """
        return self._decode(name, version, self._read_checked(name, version, trusted)[0])

    def get_signed_release(self, name: str, version: str, trusted: Sequence[Path]) -> tuple[Release, Envelope | None]:
        """Return a release and the statement on it, None if nobody has signed it.

        One of the keys in the files `trusted` must have signed the statement; if there are none, it is not checked.
        Raises StoreError for a version that is not published and a damaged document, StatementError when no trusted key
        has signed the statement, or the release was changed since.
        """
        content, statement = self._read_checked(name, version, trusted)
        release = self._decode(name, version, content)
        return release, statement or self.read_statement(name, version)

    def list_subjects(self, name: str, version: str, trusted: Sequence[Path]) -> tuple[Subject, ...]:
        """Return the subjects of a statement on a release: its document and its blobs.

        Raises StatementError when none of the keys in the files `trusted` has signed the statement on the release;
        without such keys it is not checked. Raises StoreError for a damaged document.
        """
        content, _ = self._read_checked(name, version, trusted)
        return _list_subjects(self._decode(name, version, content), content)

    def _read_checked(self, name: str, version: str, trusted: Sequence[Path]) -> tuple[bytes, Envelope | None]:
        """The bytes of a release's document, and the statement on it that a trusted key has signed.

        Without trusted keys, the statement is not read: it is None.
        """
        content = self._read(name, version)
        if not trusted:
            return content, None
        statement = self.read_statement(name, version)
        self._check_statement(statement, name, version, content, trusted)
        return content, statement

    def _read(self, name: str, version: str) -> bytes:
        """The bytes of a release's document. Raises StoreError for a version that is not published."""
        content = self.objects.get(release_key(name, version))
        if content is None:
            published = ", ".join(self.list_versions(name)) or "none"
            raise StoreError(
                f"There is no release {name} {version} in {self.config.uri}; published versions: {published}."
            )
        return content

    def _decode(self, name: str, version: str, content: bytes) -> Release:
        """The release whose document has these bytes. Raises StoreError when it is damaged or of another release."""
        uri = self.objects.uri(release_key(name, version))
        release = decode(Release, content, uri)
        if (release.name, release.version) != (name, version):
            raise StoreError(
                f"{uri} is the document of {release.name} {release.version}: publish {name} {version} again."
            )
        return release

    def _sign(self, release: Release, content: bytes, key: Path) -> None:
        """Write the statement on a release whose document has these bytes."""
        name, version = release.name, release.version
        envelope = sign(ReleaseClaim(name=name, version=version), _list_subjects(release, content), key)
        self.objects.put(
            statement_key(name, version), envelope.to_bytes(), f"writing the statement on {name} {version}"
        )

    def _check_statement(
        self, statement: Envelope | None, name: str, version: str, content: bytes, trusted: Sequence[Path]
    ) -> None:
        """Raise StatementError unless the statement is a trusted key's, about this release and these bytes."""
        topic = f"The release {name} {version}"
        remedy = f"sign it with `tvmflow sign release://{name}/{version}`"
        claim, digests = check(statement, ReleaseClaim, trusted, topic, remedy)
        if (claim.name, claim.version) != (name, version):
            raise StatementError(f"{topic} has the statement on {claim.name} {claim.version}: do not trust it.")
        key = release_key(name, version)
        if digests.get(key) != Subject.of(key, content).digest["sha256"]:
            raise StatementError(f"{topic} was changed after it was signed: do not trust it.")

    def has_release(self, name: str, version: str) -> bool:
        """Whether that version is published. Raises StoreError."""
        return self.objects.get(release_key(name, version)) is not None

    def verify_release(self, name: str, version: str) -> Release:
        """Read every blob of a release and compare size and digest; return the release.

        If TVMFLOW_TRUSTED_KEYS names keys, one of them must have signed the statement on the release. Raises StoreError
        when a blob is missing or damaged, or the release is not published, not signed by such a key, or changed since.
        """
        release = self.get_release(name, version, trusted=trusted_keys())
        if fault := self.find_fault(release):
            raise StoreError(f"The {release.label} is not whole: {fault}")
        return release

    def find_fault(self, release: Release) -> str | None:
        """Read every blob of a release; return the first fault as a sentence, None if there is none.

        Raises StoreError when the server fails.
        """
        for sha256, sizes in release.blobs.items():
            if fault := self._blobs.find_fault(sha256, sizes):
                return f"{self.objects.uri(blob_key(sha256))} {fault}; publish it again from where it was built."
        return None

    def list_names(self) -> list[str]:
        """Return the names that have a release, sorted. Raises StoreError."""
        return sorted({name for name, _ in self._list_published("releases/")})

    def explain_missing(self, kind: str, name: str) -> StoreError:
        """Return the error for a name without a `kind`, "release" or "channel"; it lists the names with a release."""
        names = ", ".join(self.list_names()) or "none"
        return StoreError(f"there is no {kind} of {name!r} in {self.config.uri}; released are: {names}")

    def list_versions(self, name: str) -> list[str]:
        """Return the published versions of a name, oldest first: 9 before 10, 1.9 before 1.10. Raises StoreError."""
        require_name("name", name)
        return sorted((version for _, version in self._list_published(f"releases/{name}/")), key=numeric_order)

    def iterate_releases(self, name: str | None = None) -> Iterator[Release]:
        """Yield the releases of `name`, or of all names (None), in order of name and version.

        Raises StoreError when one of them is damaged, or the server fails.
        """
        for each in self.list_names() if name is None else [name]:
            for version in self.list_versions(each):
                yield self.get_release(each, version)

    def _list_published(self, prefix: str) -> Iterator[tuple[str, str]]:
        for entry in self.objects.list_objects(prefix):
            match entry.key.split("/"):
                case ["releases", name, version, "release.json"] if NAME.fullmatch(name) and NAME.fullmatch(version):
                    yield name, version

    def _require_same(self, key: str, published: bytes | None, release: Release) -> None:
        # An older tvmflow may have published it in an older format, which stays as it is.
        if published is None or decode(Release, published, self.objects.uri(key)) != release:
            raise StoreError(
                f"{self.objects.uri(key)} is already published with other content and stays as it is: choose another "
                "version."
            )


def _list_subjects(release: Release, content: bytes) -> tuple[Subject, ...]:
    """The subjects of a statement on a release whose document has these bytes."""
    blobs = (Subject(name=blob_key(sha256), digest={"sha256": sha256}) for sha256 in release.blobs)
    return (Subject.of(release_key(release.name, release.version), content), *blobs)


def _require_size(path: Path, sizes: Collection[int]) -> None:
    try:
        length = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path} cannot be read for the release store: {error.strerror or error}.") from error
    for size in sizes:
        if size != length:
            raise StoreError(f"{path} has {length} bytes, but its release says {size}: build the release again.")
