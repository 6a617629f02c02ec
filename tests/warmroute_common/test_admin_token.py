"""The file by which this machine's commands administer a router."""

import os
from pathlib import Path

import pytest

from warmroute_common.admin_token import (
    HEADER,
    admin_token_headers,
    remove_admin_token,
    write_admin_token,
)

URL = "http://127.0.0.1:8080"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let only ``tmp_path`` hold tokens."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_its_user_can_read_the_token() -> None:
    path = write_admin_token("t", 8080)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for url in (URL, "http://localhost:8080/v1", "https://[::1]:8080"):
        assert admin_token_headers(url) == {HEADER: "t"}


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8081", "http://10.0.0.1:8080", "http://evil.example:8080", "http://[", ""],
)
def test_the_token_is_sent_to_its_router_only(url: str) -> None:
    write_admin_token("t", 8080)
    assert admin_token_headers(url) == {}


def test_a_restarted_router_replaces_its_token_and_the_old_one_does_not_remove_it() -> None:
    old = write_admin_token("old", 8080)
    new = write_admin_token("new", 8080)
    remove_admin_token(old, "old")
    assert admin_token_headers(URL) == {HEADER: "new"}
    remove_admin_token(new, "new")
    assert admin_token_headers(URL) == {}


def test_a_directory_of_somebody_else_is_never_used(places: Path, tmp_path: Path) -> None:
    """Another user may have made it first, to read tokens or to say which are sent."""
    trap = places / f"warmroute-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "admin-8080").write_text("trap")
    trap.symlink_to(elsewhere)
    with pytest.raises(OSError):
        write_admin_token("t", 8080)
    assert admin_token_headers(URL) == {}
    trap.unlink()
    trap.mkdir(mode=0o755)
    trap.chmod(0o755)
    with pytest.raises(OSError, match="only this user may enter"):
        write_admin_token("t", 8080)


def test_a_link_at_the_files_place_is_replaced_and_not_followed(places: Path) -> None:
    victim = places / "victim"
    victim.write_text("kept")
    path = write_admin_token("t", 8080)
    path.unlink()
    path.symlink_to(victim)
    assert admin_token_headers(URL) == {}
    assert write_admin_token("t", 8080) == path
    assert victim.read_text() == "kept" and not path.is_symlink()


def test_the_runtime_directory_goes_first(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places))
    assert write_admin_token("t", 8080).parent == places / "warmroute"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "missing"))
    assert write_admin_token("u", 8080).parent == places / f"warmroute-{os.getuid()}"
    assert admin_token_headers(URL) == {HEADER: "u"}
