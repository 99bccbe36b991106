"""A policy directory that differs from its manifest is refused, and a signature says who made it."""

import json
import stat

import numpy as np
import pytest

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import MANIFEST, SIGNATURE, WEIGHTS, check_manifest, write_manifest
from vla_stack.policies.signing import make_key, sign, verify


@pytest.fixture
def directory(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_manifest(tmp_path)
    return tmp_path


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_hundred_flipped_bits_of_weights_are_refused(directory):
    load_policy(directory, frozen=True)
    file = directory / WEIGHTS
    for bit in np.random.default_rng(0).integers(0, 8 * file.stat().st_size, 100):
        flip(file, int(bit))
        with pytest.raises(UserError, match=rf"{WEIGHTS} is not what was saved.*vla policy sign"):
            load_policy(directory, frozen=True)
        flip(file, int(bit))
    load_policy(directory, frozen=True)


def test_every_bit_of_a_manifest_counts(directory):
    file = directory / MANIFEST
    for bit in range(0, 8 * file.stat().st_size, 41):
        flip(file, bit)
        try:
            check_manifest(directory)
        except UserError:
            pass
        else:  # white space between its entries says nothing
            assert json.loads(file.read_bytes())["files"] == check_manifest(directory)
        flip(file, bit)


def test_files_that_come_or_go_are_refused(directory):
    (directory / "robot.json").write_text("{}")
    with pytest.raises(UserError, match=r"robot.json is not in manifest.json"):
        load_policy(directory)
    (directory / "robot.json").unlink()
    (directory / "README.md").write_text("nothing reads it")
    check_manifest(directory)
    (directory / "policy_postprocessor.json").unlink()
    with pytest.raises(UserError, match=r"policy_postprocessor.json is missing, manifest.json lists it"):
        load_policy(directory)


def test_a_directory_without_a_manifest_is_loaded_as_it_is(saved):
    assert not (saved / MANIFEST).exists()
    assert load_policy(saved, frozen=True).spec.model_version == check_manifest(saved)[WEIGHTS][:16]


def test_signatures(directory, tmp_path_factory, capsys):
    keys = tmp_path_factory.mktemp("keys")
    mine, other = make_key(keys / "mine.pem"), make_key(keys / "other.pem")
    assert stat.S_IMODE((keys / "mine.pem").stat().st_mode) == 0o600
    with pytest.raises(UserError, match="cannot be made: File exists"):
        make_key(keys / "mine.pem")
    assert verify(directory) == ""
    with pytest.raises(UserError, match="is not signed"):
        verify(directory, mine)
    assert main(["policy", "sign", str(directory), "--key", str(keys / "mine.pem")]) == 0
    assert main(["policy", "verify", str(directory), "--key", mine]) == 0
    assert f"signed by {mine}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"is signed by .*, not by {other.replace('+', '.')}"):
        verify(directory, other)
    config = directory / "config.json"
    config.write_text(config.read_text() + " ")
    assert main(["policy", "verify", str(directory)]) == 1
    assert f"{config} is not what was saved" in capsys.readouterr().err
    before = (directory / SIGNATURE).read_bytes()
    assert sign(directory, None) == "" and verify(directory) == ""  # changed by hand: digests, no signature
    (directory / SIGNATURE).write_bytes(before)
    with pytest.raises(UserError, match="is not a signature of manifest.json"):
        verify(directory)
    for text in ("{", "[]", '{"public": "x", "signature": "y"}'):
        (directory / SIGNATURE).write_text(text)
        with pytest.raises(UserError, match=f"{SIGNATURE} is damaged"):
            verify(directory)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_keys_that_are_none(directory, tmp_path_factory, content):
    file = tmp_path_factory.mktemp("keys") / "key.pem"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is no private key.*vla policy key FILE"):
        sign(directory, file)
    assert verify(directory) == ""
