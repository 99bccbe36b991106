"""Keys and tokens of openpi's protocol, as they are typed."""

from __future__ import annotations

import argparse

import pytest

from vla_stack.errors import UserError
from vla_stack.verbs.openpi_arguments import add_openpi_arguments, new_token, read_token, renamed_keys


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_openpi_arguments(parser)
    return parser.parse_args(words)


def test_keys_are_pairs():
    args = parsed("--keys", "front=observation/image", "--keys", "state=a+b")
    assert renamed_keys(args) == {"front": "observation/image", "state": "a+b"}
    for bad in ("front", "=x", "front="):
        with pytest.raises(UserError, match="NAME=KEY"):
            renamed_keys(parsed("--keys", bad))


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path):
    file = tmp_path / "token"
    token = new_token(file)
    assert len(token) >= 32 and new_token(file) == read_token(file) == token
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UserError, match="read by others"):
        read_token(file)


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"two words of some length\n", "für-alle-fälle-ein-token".encode(), b"\xff" * 20]
)
def test_what_is_no_token_is_said(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(UserError, match="token"):
        read_token(file)
    with pytest.raises(UserError, match="cannot read"):
        read_token(tmp_path / "absent")
