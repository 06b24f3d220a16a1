"""Settings: the environment overrides the file, the file overrides the defaults, and secrets stay hidden."""

import os
import pwd
from pathlib import Path

import pytest

from tvmflow import fetch, services, settings
from tvmflow.errors import SettingsError
from tvmflow.settings import Settings


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("TVMFLOW_", "MLFLOW_", "PREFECT_")):
            monkeypatch.delenv(name)


def write(text: str) -> None:
    Path("tvmflow.toml").write_text(text)


def test_without_file_and_environment_everything_is_embedded(tmp_path: Path) -> None:
    loaded = Settings.load()
    assert loaded.state == tmp_path / ".tvmflow"
    assert (loaded.s3_endpoint, loaded.mlflow_tracking_uri, loaded.prefect_api_url) == (None, None, None)


def test_the_file_comes_before_the_defaults() -> None:
    write('s3_bucket = "models"\nstep_timeout_minutes = 3.5\n')
    assert Settings.load().s3_bucket == "models"
    assert Settings.load().step_timeout_minutes == 3.5
    assert Settings.load().s3_region == "us-east-1"


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write('s3_bucket = "models"\ns3_prefix = "team"\n')
    monkeypatch.setenv("TVMFLOW_S3_BUCKET", "others")
    assert Settings.load().s3_bucket == "others"
    assert Settings.load().s3_prefix == "team"


def test_a_user_without_a_home_folder_must_say_where_the_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container has one that runs under any user id."""

    def fail(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", fail)
    words = "no home folder for that user; set TVMFLOW_HOME"
    with pytest.raises(SettingsError, match=words), services.open_store(Settings.load()):
        pass
    with pytest.raises(SettingsError, match=words):
        fetch.cache_folder(Settings.load())
    monkeypatch.setenv("TVMFLOW_HOME", "state")
    with services.open_store(Settings.load()) as store:
        assert store.config.memory == tmp_path / "state" / "seen"
    assert fetch.cache_folder(Settings.load()) == tmp_path / "state" / "bundles"


def test_the_home_folder_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TVMFLOW_S3_FOLDER", "~nobody-of-that-name/s3")
    with (
        pytest.raises(SettingsError, match="'~nobody-of-that-name/s3' is not known"),
        services.open_store(Settings.load()),
    ):
        pass
    monkeypatch.setenv("TVMFLOW_HOME", "~nobody-of-that-name/state")
    with pytest.raises(SettingsError, match="'~nobody-of-that-name/state' is not known"):
        Settings.load()


@pytest.mark.parametrize("setting", ["mlflow_tracking_uri", "prefect_api_url", "work_pool"])
def test_a_setting_of_several_names_may_come_from_several_sources(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(settings.record, "settings", lambda state: {setting: "of the stack"})
    assert getattr(Settings.load(), setting) == "of the stack"
    write(f'{setting} = "of the file"')
    assert getattr(Settings.load(), setting) == "of the file"
    monkeypatch.setenv(f"TVMFLOW_{setting.upper()}", "of the environment")
    assert getattr(Settings.load(), setting) == "of the environment"
    Path("tvmflow.toml").unlink()
    assert getattr(Settings.load(), setting) == "of the environment"


def test_the_file_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.toml").write_text('home = "/state"')
    monkeypatch.setenv("TVMFLOW_SETTINGS", str(tmp_path / "other.toml"))
    assert Settings.load().state == Path("/state")


def test_a_named_file_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_SETTINGS", "absent.toml")
    with pytest.raises(SettingsError, match=r"'absent\.toml', named by TVMFLOW_SETTINGS, does not exist"):
        Settings.load()


def test_mlflows_and_prefects_own_variables_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert Settings.load().mlflow_tracking_uri == "http://127.0.0.1:5000"
    assert Settings.load().prefect_api_url == "http://127.0.0.1:4200/api"
    monkeypatch.setenv("TVMFLOW_MLFLOW_TRACKING_URI", "http://127.0.0.1:5001")
    assert Settings.load().mlflow_tracking_uri == "http://127.0.0.1:5001"


def test_an_unknown_setting_in_the_file_is_refused_with_the_known_ones() -> None:
    write('s3_buket = "models"')
    with pytest.raises(
        SettingsError,
        match=r"setting 's3_buket' is unknown; known are advisories, .*home, .*'tvmflow\.toml'",
    ):
        Settings.load()


@pytest.mark.parametrize("text", ["s3_bucket = models", "= 3", "[", 'a = "\\q"'])
def test_a_file_that_is_no_toml_is_refused(text: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=r"settings file 'tvmflow\.toml' is not valid TOML: "):
        Settings.load()


def test_a_variable_that_is_no_list_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_MODELS", "a.yaml")
    with pytest.raises(SettingsError, match=r"^environment variable TVMFLOW_MODELS is 'a.yaml', .* a list is '\["):
        Settings.load()


def test_a_file_that_is_no_text_is_refused() -> None:
    Path("tvmflow.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not valid TOML"):
        Settings.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [("STEP_TIMEOUT_MINUTES", "0"), ("PARALLEL_TARGETS", "many"), ("S3_CHECKSUMS", "never"), ("S3_PATH_STYLE", "2")],
)
def test_a_wrong_value_names_the_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TVMFLOW_{name}", value)
    with pytest.raises(SettingsError, match=rf"setting '{name.lower()}' is wrong: .* \(from TVMFLOW_{name} or"):
        Settings.load()


def test_secrets_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_S3_SECRET_KEY", "hush-hush")
    write('s3_access_key = "whispered"\ns3_session_token = "murmured"\n')
    loaded = Settings.load()
    for text in (repr(loaded), str(loaded), loaded.model_dump_json()):
        assert not any(secret in text for secret in ("hush-hush", "whispered", "murmured"))
    assert loaded.s3_secret_key is not None
    assert loaded.s3_secret_key.get_secret_value() == "hush-hush"


def test_a_line_break_at_the_end_belongs_to_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("S3_ACCESS_KEY", "S3_SECRET_KEY", "S3_SESSION_TOKEN", "S3_ENDPOINT", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(f"TVMFLOW_{name}", "http://a\n")
    loaded = Settings.load()
    for secret in (loaded.s3_access_key, loaded.s3_secret_key, loaded.s3_session_token):
        assert secret is not None
        assert secret.get_secret_value() == "http://a"
    assert loaded.s3_endpoint == loaded.mlflow_tracking_uri == "http://a"


def test_a_wrong_setting_does_not_show_the_secrets_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_S3_SECRET_KEY", "hush-hush")
    write("s3_access_key = 12345\n")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert "s3_access_key" in str(caught.value)
    assert "hush-hush" not in str(caught.value)
    assert "12345" not in str(caught.value)


def test_a_mistyped_variable_is_refused_with_the_likely_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_S3_ENDPIONT", "http://127.0.0.1:9000")
    with pytest.raises(SettingsError, match="TVMFLOW_S3_ENDPIONT is no setting; did you mean TVMFLOW_S3_ENDPOINT"):
        Settings.load()


def test_what_devices_obey_is_no_key_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", "release-key.pub")
    Settings.load()
    write('trusted_keys = "release-key.pub"\n')
    with pytest.raises(SettingsError, match="setting 'trusted_keys' is unknown"):
        Settings.load()
