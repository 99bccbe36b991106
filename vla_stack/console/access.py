"""Who may open the console: one-time tokens, sessions, the Host and Origin of every request, and a certificate.

A token is good for one browser, once: opening the printed address exchanges it for a session cookie. Sessions are
signed, so that the e-stop's process knows them without being told. The cookie alone is not enough for anything that
acts: the Origin must be the console's own, so no other page of the same browser can drive the robot, and the Host must
be one of the console's names, so none can by another name that points here (DNS rebinding).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
from pathlib import Path

from aiohttp import web

from vla_stack.errors import UserError
from vla_stack.serving.keys import KeyFolder

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CERTIFICATE_DAYS = 365
INVITED = 64  # addresses that may wait to be used when a page asks for one
REFUSED = (
    "<!doctype html><meta charset=utf-8><title>Operator console</title><body>"
    "<h1>This address has been used, or is not of this console.</h1><p>An address opens one browser, once. The "
    "terminal of <code>vla console</code> prints a new one after each use; an open console makes one with "
    "“Another screen”.</p>"
)


class Access:
    """Tokens and sessions of one running console.

    Args:
        host: Name or address that the page is reached by.
        port: Its port.
        tls: Whether it is served over TLS.

    Raises:
        UserError: The page would be open to a network without TLS, or ``host`` is no single place.
    """

    def __init__(self, host: str, port: int, tls: bool) -> None:
        if host in ("", "0.0.0.0", "::", "*"):
            raise UserError(
                f"--host {host or repr('')} is no address to open", "give the name or address of this computer"
            )
        if not tls and host not in LOOPBACK:
            raise UserError(f"--host {host} is not this computer alone, which needs TLS")
        names = LOOPBACK if host in LOOPBACK else (host,)
        hosts = [f"[{name}]" if ":" in name else name for name in names]
        self.port, default = port, {True: 443, False: 80}[tls]
        self.hosts, self.stop_hosts = (
            frozenset(f"{name}:{p}" for name in hosts) | frozenset(hosts if p == default else ())
            for p in (port, port + 1)
        )
        self._scheme = "https" if tls else "http"
        self.base = f"{self._scheme}://{hosts[names.index(host)]}:{port}"
        self.cookie = f"vla_console_{port}"  # cookies do not know of ports
        self._tokens: set[str] = set()
        self._secret = secrets.token_bytes(32)

    def invite(self) -> str:
        """An address that opens the console once."""
        token = secrets.token_urlsafe(24)
        self._tokens.add(_digest(token))
        return f"{self.base}/?token={token}"

    @property
    def invitations(self) -> int:
        """Addresses that have not been used."""
        return len(self._tokens)

    def redeem(self, token: str) -> str | None:
        """A new session for a token, which is used up; None where it is not one."""
        if _digest(token) not in self._tokens:
            return None
        self._tokens.remove(_digest(token))
        name = secrets.token_urlsafe(24)
        return f"{name}.{self._sign(name)}"

    def known(self, session: str) -> bool:
        """Whether a cookie is a session of this console."""
        name, _, signature = session.partition(".")
        return hmac.compare_digest(_encoded(signature), _encoded(self._sign(name)))

    def session(self, request: web.Request) -> str:
        """The cookie of a request, empty where it has none."""
        return request.cookies.get(self.cookie, "")

    def check(self, request: web.Request, acts: bool, stop: bool = False) -> None:
        """Host, session and, where it ``acts``, origin of a request; ``stop``: to the e-stop's port.

        Raises:
            HTTPMisdirectedRequest, HTTPForbidden: They are wrong; the connection ends.
        """
        wrong: web.HTTPException | None = None
        if not self.right_host(request.headers.get("Host"), stop):
            wrong = web.HTTPMisdirectedRequest(text="this console has another name")
        elif not self.known(self.session(request)):
            wrong = web.HTTPForbidden(text=REFUSED, content_type="text/html")
        elif acts and not self.right_origin(request.headers.get("Origin")):
            wrong = web.HTTPForbidden(text="only the console's own page may do this")
        if wrong is not None:
            raise closing(wrong)

    def right_host(self, host: str | None, stop: bool = False) -> bool:
        """Whether the Host header is a name of the console, or of the e-stop's port."""
        return host is not None and host.lower() in (self.stop_hosts if stop else self.hosts)

    def policy(self, host: str) -> str:
        """The content security policy of a page that was opened under ``host``: its own files and the e-stop's port."""
        name, scheme = host.removesuffix(f":{self.port}"), self._scheme.replace("http", "ws")
        return (
            f"default-src 'self'; connect-src 'self' {scheme}://{name}:{self.port + 1}; img-src 'self' blob: data:; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
        )

    def right_origin(self, origin: str | None) -> bool:
        """Whether the Origin header is the console's own page."""
        scheme, _, host = (origin or "").partition("://")
        return scheme == self._scheme and host.lower() in self.hosts

    def _sign(self, name: str) -> str:
        return hmac.new(self._secret, _encoded(name), "sha256").hexdigest()


def closing(answer: web.HTTPException) -> web.HTTPException:
    """An answer that ends the connection."""
    answer.force_close()
    return answer


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # what a header has that is no text


def _digest(text: str) -> str:
    # Looking a hash up takes no time that depends on how much of a guess is right.
    return hashlib.sha256(_encoded(text)).hexdigest()


def tls_context(host: str, certificate: Path | None, key: Path | None) -> tuple[ssl.SSLContext, str]:
    """TLS for a console: the given certificate, or a self-signed one for ``host`` that is made once and kept.

    Returns:
        The context, and the certificate's SHA-256 fingerprint as browsers show it.

    Raises:
        UserError: Only one of the two files is given, or they cannot be used.
    """
    if (certificate is None) != (key is None):
        raise UserError("--cert and --key go together")
    if certificate is None or key is None:
        certificate, key = own_certificate(host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
        digest = (
            hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first_certificate(certificate.read_text()))).hexdigest().upper()
        )
    except (OSError, ValueError) as e:
        raise UserError(f"{certificate} and {key} are no certificate and its key: {e}", "both are PEM files") from None
    return context, ":".join(digest[i : i + 2] for i in range(0, 64, 2))


def _first_certificate(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    start = pem.index("-----BEGIN CERTIFICATE-----")
    return pem[start : pem.index(end, start) + len(end)] + "\n"


def own_certificate(host: str) -> tuple[Path, Path]:
    """Self-signed certificate and key for a host, beside this computer's other keys; made anew where it has expired."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder = KeyFolder().path / "console"
    stem = hashlib.sha256(host.encode()).hexdigest()[:12]
    certificate, key_file = folder / f"{stem}.crt", folder / f"{stem}.key"
    now = datetime.datetime.now(datetime.UTC)
    if certificate.is_file() and key_file.is_file():
        kept = x509.load_pem_x509_certificate(certificate.read_bytes())
        if kept.not_valid_after_utc > now + datetime.timedelta(days=1):
            return certificate, key_file
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vla console")])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.unlink(missing_ok=True)
    handle = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # private from its first byte on
    with os.fdopen(handle, "wb") as f:
        f.write(pem)
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return certificate, key_file
