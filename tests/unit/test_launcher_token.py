"""A run that is started on this machine has a token, which its owner alone can read."""

import stat
from pathlib import Path

import pytest

from headway.launcher.token import api_token, token_file


def test_a_run_gets_a_token_that_its_owner_alone_can_read_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_API_TOKEN", raising=False)
    monkeypatch.delenv("HEADWAY_API_TOKEN_FILE", raising=False)
    token, path = api_token(tmp_path), token_file(tmp_path)
    assert path is not None
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert api_token(tmp_path) == token


def test_the_users_token_wins_and_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_TOKEN", "mine")
    assert api_token(tmp_path) == "mine"
    assert token_file(tmp_path) is None
    assert not list(tmp_path.iterdir())
