"""Who vouches for a policy directory: the signature of its manifest.

    signature.json   {"public": "<base64>", "signature": "<base64>"} of the manifest's bytes, by Ed25519 (RFC 8032)

The manifest's digests say that the files are what was saved (:mod:`vla_stack.policies.directory`), the signature says
by whom.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.policies.directory import MANIFEST, SIGNATURE, check_manifest, write_manifest


def make_key(file: Path) -> str:
    """Write a new private key, which its owner alone can read; returns the public one as base64 text.

    Raises:
        UserError: The file exists, or cannot be written.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:  # private from its first byte on
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as e:
        raise UserError(f"{file} cannot be made: {e.strerror}", "give a new file; keys are never overwritten") from None
    with os.fdopen(handle, "wb") as f:
        f.write(pem)
    return _text(key.public_key())


def sign(directory: Path, key: Path | None) -> str:
    """Record the digests of a directory as it is now and, with a key, sign them.

    Args:
        directory: Policy directory.
        key: PEM file of an Ed25519 private key; None leaves the directory without a signature.

    Returns:
        The public key as base64 text, empty without a key.

    Raises:
        UserError: The key cannot be read.
    """
    private = _private(key) if key is not None else None
    write_manifest(directory)
    (directory / SIGNATURE).unlink(missing_ok=True)  # it was of other bytes, perhaps
    if private is None:
        return ""
    public = _text(private.public_key())
    signature = base64.b64encode(private.sign((directory / MANIFEST).read_bytes())).decode()
    (directory / SIGNATURE).write_text(json.dumps({"public": public, "signature": signature}, indent=1) + "\n")
    return public


def verify(directory: Path, signer: str | None = None) -> str:
    """Check a directory against its manifest, and the manifest against its signature.

    Args:
        directory: Policy directory.
        signer: Public key, as base64 text, that has to have signed it; None accepts any signer, or none.

    Returns:
        The public key of whoever signed it, empty if nobody did.

    Raises:
        UserError: There is no manifest, a file differs from it, or the signature is not by that key.
    """
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} holds no {MANIFEST}", f"record what it holds now: vla policy sign {directory}")
    check_manifest(directory)
    if not (directory / SIGNATURE).is_file():
        if signer is not None:
            raise UserError(f"{directory} is not signed", f"its maker signs it: vla policy sign {directory} --key FILE")
        return ""
    public = _check_signature(directory)
    if signer is not None and public != signer:
        raise UserError(f"{directory} is signed by {public}, not by {signer}", "get it from whom you expect it from")
    return public


def _check_signature(directory: Path) -> str:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    file = directory / SIGNATURE
    try:
        tree = json.loads(file.read_bytes())
        public, signature = (base64.b64decode(tree[k], validate=True) for k in ("public", "signature"))
        Ed25519PublicKey.from_public_bytes(public).verify(signature, (directory / MANIFEST).read_bytes())
        return str(tree["public"])
    except InvalidSignature:
        raise UserError(f"{file} is not a signature of {MANIFEST}", "get the directory again from its maker") from None
    except (ValueError, KeyError, TypeError, binascii.Error) as e:
        raise UserError(f"{file} is damaged: {e}", "get the directory again from its maker") from None


def _private(file: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    remedy = "make one: vla policy key FILE"
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e.strerror}", remedy) from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise UserError(f"{file} is no private key without a password: {str(e).splitlines()[0]}", remedy) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{file} is no Ed25519 key", remedy)
    return key


def _text(public: Any) -> str:
    return base64.b64encode(public.public_bytes_raw()).decode()
