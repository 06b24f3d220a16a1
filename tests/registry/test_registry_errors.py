"""The errors of a registry that cannot be used, and the secrets that they never show."""

import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tvmflow.errors import RegistryError, RegistryUnavailableError, SettingsError
from tvmflow.registry import Registry, RegistryConfig, embedded_registry
from tvmflow.registry.config import without_secrets

# Nothing listens on the discard port of a host without inetd.
NOBODY = "127.0.0.1:9"


@pytest.fixture(params=[200, 401, 403, 502])
def stranger(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """A server that is no MLflow and answers everything with one status and a page."""
    status = int(request.param)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield status, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.mark.timeout(30)
def test_a_server_that_is_down_is_one_sentence_whatever_is_called_first() -> None:
    for call in (Registry.check, lambda registry: registry.start_run("demo", {}, {})):
        with pytest.raises(RegistryError) as caught:
            call(Registry(RegistryConfig(f"http://{NOBODY}")))
        assert f"MLflow at http://{NOBODY} does not answer" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_server_that_refuses_or_is_no_mlflow_is_one_sentence(stranger: tuple[int, str]) -> None:
    status, address = stranger
    expected = {401: "MLFLOW_TRACKING_USERNAME", 403: "MLFLOW_SERVER_ALLOWED_HOSTS", 502: r"is failing .*\(HTTP 502\)"}
    with pytest.raises(RegistryError, match=expected.get(status, "is not MLflow")) as caught:
        Registry(RegistryConfig(address)).check()
    # Releases wait for a server whose proxy says that it is away.
    assert isinstance(caught.value, RegistryUnavailableError) == (status == 502)
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(30)
def test_a_password_in_the_address_is_never_shown() -> None:
    config = RegistryConfig(f"http://ann:open%20sesame@{NOBODY}", f"http://bob:open%20sesame@{NOBODY}/models")
    with pytest.raises(RegistryError) as caught:
        Registry(config).check()
    text = "".join(traceback.format_exception(caught.value)) + repr(config) + config.address
    assert NOBODY in text
    assert "sesame" not in text


def test_a_refusal_is_one_sentence_without_the_password(server: str) -> None:
    registry = Registry(RegistryConfig(server.replace("//", "//ann:sesame@")))
    registry.check()
    with pytest.raises(RegistryError, match="could not set the alias 'production' of 'nothing'") as caught:
        registry.set_alias("nothing", "production", "1")
    assert "\n" not in str(caught.value)
    assert "sesame" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("password", ["open/sesame", "12/sesame", "open?sesame", "open#sesame", "o[sesame", "o sesame"])
def test_a_password_that_is_not_escaped_is_refused_and_never_shown(password: str) -> None:
    with pytest.raises(SettingsError, match="of its password as %XX") as caught:
        RegistryConfig(f"http://ann:{password}@{NOBODY}")
    assert NOBODY in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_passwords_are_cut_out_of_a_sentence_whatever_they_hold() -> None:
    sentence = "http://ann:a/b@c@host/x refused, sqlite:////tmp/a@b/mlflow.db and http://other/y did not"
    assert without_secrets(sentence) == sentence.replace("ann:a/b@c@", "")


@pytest.mark.parametrize("uri", ["", "mlruns", "file:///tmp/mlruns", "databricks", "http://", "sqlite:///:memory:"])
def test_an_address_of_another_kind_is_refused(uri: str) -> None:
    with pytest.raises(SettingsError, match="sqlite:///FILE"):
        RegistryConfig(uri)


@pytest.mark.timeout(30)
def test_a_file_that_is_no_database_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database" * 100)
    with pytest.raises(RegistryError, match="file is not a database"):
        Registry(embedded_registry(tmp_path)).check()


@pytest.mark.long
def test_two_processes_that_open_a_new_registry_share_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tvmflow.registry import Registry, embedded_registry\n"
        "print(Registry(embedded_registry(Path(sys.argv[1]))).start_run('demo', {}, {}))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    runs = [process.communicate(timeout=120)[0].strip() for process in processes]

    registry = Registry(embedded_registry(tmp_path / "shared"))
    assert [registry.run_exists(run_id) for run_id in runs] == [True, True]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["artifacts", "mlflow.db"]


def test_importing_the_registry_does_not_import_mlflow() -> None:
    program = "import sys, tvmflow.registry; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
