"""Files that cannot be read as settings: one line that names the file and says what to do."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core import limits
from lmcache_core.errors import SettingsError
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import Composed, compose
from lmcache_core.settings.sources import read_environment

Read = Callable[[Registry, Path], Composed]
TIER = ["--l2.cold.type=acme", "--l2.cold.bucket=b"]


def as_toml(registry: Registry, path: Path) -> Composed:
    return compose(registry, TIER, {}, path)


def as_yaml(registry: Registry, path: Path) -> Composed:
    named = path.with_name(path.name + ".yaml")
    if path.exists():
        path.rename(named)
    return compose(registry, TIER, {}, named)


def as_env_file(registry: Registry, path: Path) -> Composed:
    return compose(registry, TIER, {}, None, path)


def as_secret(registry: Registry, path: Path) -> Composed:
    folder = path.with_name("mount")
    folder.mkdir()
    path.rename(folder / "l2.cold.token")
    return compose(registry, [*TIER, f"--secrets_dir={folder}"], {})


FILES = [as_toml, as_yaml, as_env_file]


def refused(read: Read, registry: Registry, path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        read(registry, path)
    return str(caught.value)


@pytest.mark.parametrize("read", FILES)
def test_a_file_that_is_not_there_is_named(registry: Registry, tmp_path: Path, read: Read) -> None:
    assert "absent" in refused(read, registry, tmp_path / "absent")
    assert "cannot be read: No such file" in refused(read, registry, tmp_path / "absent")


@pytest.mark.parametrize("read", FILES)
def test_a_directory_is_no_settings_file(registry: Registry, tmp_path: Path, read: Read) -> None:
    (tmp_path / "folder").mkdir()
    assert "cannot be read: Is a directory" in refused(read, registry, tmp_path / "folder")


@pytest.mark.parametrize("read", [*FILES, as_secret])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x7fELF\x02\x01\x01\0\0\xff\xfe", "not UTF-8"),
        (b"a = 1\0", "is binary: write text"),
        ("name = 'ä'".encode("utf-16"), "save it as UTF-8"),
        (b"#" * (limits.SETTINGS_FILE_BYTES_MAX + 1), "bytes: is it the right file?"),
    ],
    ids=["program", "zero", "utf-16", "huge"],
)
def test_what_is_no_text_or_far_too_large_is_refused(
    registry: Registry, tmp_path: Path, read: Read, content: bytes, said: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    message = refused(read, registry, tmp_path / "file")
    assert said in message
    assert str(tmp_path) in message
    assert len(message) < 400


def test_an_endless_file_is_refused_as_a_huge_one(registry: Registry) -> None:
    assert "bytes" in refused(as_toml, registry, Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("l1: [", "not valid YAML"),
        ("- l1\n- l2\n", "is not valid YAML: it is not a table"),
        ("- [name, a]\n", "is not valid YAML: it is not a table"),
        ("just words", "is not valid YAML: it is not a table"),
        ("l1: !!python/object/apply:os.system [id]\n", "not valid YAML"),
        ("&a l1: &b\n  x: *b\n", "nested too deeply"),
        ("l1:\n  watermrk: 0.5\n", "did you mean 'l1.watermark'"),
        ("l1: {watermark: [1]}\n", "l1.watermark"),
        ("1: x\n", "1 "),
        ("on: x\n", "True "),
        ("[[" * 3000, "not valid YAML"),
    ],
)
def test_yaml_that_is_no_table_of_settings_is_refused(registry: Registry, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "file").write_text(text)
    assert said in refused(as_yaml, registry, tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("l2:\n  one: {type: plain}\nname: y\nl2:\n  two: {type: plain}\n", "line 4: l2 is given twice, on line 1"),
        ("l2: {one: {type: plain, type: other}}\n", "line 1: type is given twice"),
        ("l2:\n  one:\n    type: plain\n    'type': other\n", "line 4: type is given twice, on line 3"),
    ],
)
def test_equal_names_in_a_table_of_yaml_are_refused_as_in_toml(
    registry: Registry, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert said in refused(as_yaml, registry, tmp_path / "file")


def test_aliases_of_yaml_that_multiply_are_refused(registry: Registry, tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 9):
        lines.append(f"a{level}: &a{level} {{{', '.join(f'k{each}: *a{level - 1}' for each in range(9))}}}")
    (tmp_path / "file").write_text("\n".join(lines))
    assert f"more than {limits.SETTINGS_MAX:,} settings" in refused(as_yaml, registry, tmp_path / "file")


def test_yaml_without_its_reader_says_what_to_install(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "file").write_text("name: a\n")
    assert "pip install 'lmcache-core[yaml]'" in refused(as_yaml, registry, tmp_path / "file")


@pytest.mark.parametrize("line", ["LMCACHE_CORE_NAME", "LMCACHE_CORE_NAME='a", "=x", "LMCACHE CORE=1"])
def test_a_line_of_an_env_file_that_is_no_assignment_is_named(registry: Registry, tmp_path: Path, line: str) -> None:
    (tmp_path / "env").write_text(f"# first\n{line}\n")
    assert "line 2 is not NAME=VALUE" in refused(as_env_file, registry, tmp_path / "env")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LMCACHE_CORE_NAME=a\nX=1\nLMCACHE_CORE_NAME=b\n", "line 3: LMCACHE_CORE_NAME is given twice"),
        ("LMCACHE_CORE_NAME=a\nLMCACHE_CORE_name=b\n", "LMCACHE_CORE_NAME and LMCACHE_CORE_name are the same setting"),
    ],
)
def test_a_setting_that_an_env_file_has_twice_is_refused(
    registry: Registry, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "env").write_text(text)
    assert said in refused(as_env_file, registry, tmp_path / "env")


def test_two_variables_that_are_one_setting_are_refused() -> None:
    with pytest.raises(SettingsError, match="LMCACHE_CORE_L1__NAME and LMCACHE_CORE_l1__name are the same setting"):
        read_environment({"LMCACHE_CORE_L1__NAME": "a", "LMCACHE_CORE_l1__name": "b"})


def test_an_env_file_expands_nothing(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("LMCACHE_CORE_L2__COLD__TOKEN=pa${HOME}$ss\n")
    token = as_env_file(registry, tmp_path / "env").settings.l2["cold"].settings.token
    assert token.get_secret_value() == "pa${HOME}$ss"


@pytest.mark.parametrize("name", ["LMCACHE_CORE_PLUGINS", "LMCACHE_CORE_NATIVE", "LMCACHE_CORE_ENV_FILE"])
def test_a_variable_that_an_env_file_cannot_set_is_refused_there(registry: Registry, tmp_path: Path, name: str) -> None:
    (tmp_path / "env").write_text(f"{name}=x\n")
    assert "has no effect there: set it in the environment" in refused(as_env_file, registry, tmp_path / "env")


# --- secrets ------------------------------------------------------------------------------------------------


def with_secrets(registry: Registry, folder: Path, *flags: str) -> Composed:
    return compose(registry, [*TIER, f"--secrets_dir={folder}", *flags], {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("l2.cold.tokn", "did you mean 'l2.cold.token'"),
        ("LMCACHE_CORE_L2__COLD__TOKN", "did you mean 'l2.cold.token'"),
        ("l1", "is a table"),
        ("l2_cold_token", "write l2.cold.token"),
    ],
)
def test_a_misspelt_secret_is_an_error_with_what_was_meant(
    registry: Registry, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(SettingsError) as caught:
        with_secrets(registry, tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_what_others_keep_in_the_same_directory_is_not_opened(registry: Registry, tmp_path: Path) -> None:
    account = tmp_path / "kubernetes.io" / "serviceaccount"
    account.mkdir(parents=True)
    (account / "token").write_bytes(b"\xff\0")
    (tmp_path / "keystore.jks").write_bytes(b"\xff\0" * 100_000)
    (tmp_path / ".hidden").write_bytes(b"\xff")
    found = with_secrets(registry, tmp_path)
    assert found.warnings == [f"{tmp_path / 'keystore.jks'} is not a setting and is ignored"]


def test_two_files_for_one_setting_are_refused(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "l2.cold.token").write_text("first")
    (tmp_path / "lmcache_core_l2__cold__token").write_text("second")
    with pytest.raises(SettingsError, match="are the same setting: remove one of them"):
        with_secrets(registry, tmp_path)


def test_a_wrong_secret_is_refused_without_showing_it(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "l2.cold.region").write_text("hunter2-hunter2")
    (tmp_path / "l2.cold.token").write_text("abc")
    with pytest.raises(SettingsError, match=r"l2\.cold\.region.*must be 'north' or 'south'") as caught:
        with_secrets(registry, tmp_path)
    assert "hunter2" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_a_secret_cannot_name_directories_of_secrets(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "secrets_dir").write_text("/run/secrets")
    with pytest.raises(SettingsError, match="secrets_dir has no effect there: set secrets_dir in the settings file"):
        with_secrets(registry, tmp_path)


@pytest.mark.parametrize(("path", "said"), [("absent", "No such file"), ("file", "Not a directory")])
def test_a_directory_that_is_not_there_is_named(registry: Registry, tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=rf"secrets directory {tmp_path}/{path} cannot be read: {said}"):
        with_secrets(registry, tmp_path / path)


@pytest.mark.parametrize("value", ["relative/path", "~nobody-has-this-name"])
def test_a_directory_of_secrets_is_an_absolute_path(registry: Registry, value: str) -> None:
    with pytest.raises(SettingsError, match=r"secrets_dir \(--secrets_dir\): path '"):
        with_secrets(registry, Path(value))


def test_a_link_out_of_the_directory_is_refused(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("outside")
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "l2.cold.token").symlink_to(tmp_path / "key")
    with pytest.raises(SettingsError, match=r"l2\.cold\.token is not a file within .*: put it there"):
        with_secrets(registry, tmp_path / "mount")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["file", "folder", "mount"])
def test_a_secret_that_the_server_may_not_read_is_named_with_its_cure(
    registry: Registry, open_folder: Path, what: str
) -> None:
    mount = open_folder / "mount"
    folder = mount / "l2" / "cold"
    folder.mkdir(parents=True)
    (folder / "token").write_text("secret")
    closed = {"file": folder / "token", "folder": folder, "mount": mount}[what]
    closed.chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(SettingsError) as caught:
            with_secrets(registry, mount)
    finally:
        os.seteuid(0)
    assert f"{closed} cannot be read: Permission denied: let uid 65534 read it; in Kubernetes" in str(caught.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o644, 0o777])
def test_no_mode_that_a_mount_may_have_is_worth_a_warning(registry: Registry, tmp_path: Path, mode: int) -> None:
    (tmp_path / "l2.cold.token").write_text("secret")
    (tmp_path / "l2.cold.token").chmod(mode)
    assert with_secrets(registry, tmp_path).warnings == []
