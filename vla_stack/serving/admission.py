"""Who is let in at a server that can be reached from outside, and what they may ask."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vla_stack.serving.keys import AllowList, KeyFolder, Role
from vla_stack.serving.transport import CurveKeys
from vla_stack.serving.wire import Code, Kind, WireError


class Admission:
    """ZeroMQ's authenticator (ZAP) on the allow-list of a key folder, and the roles behind it.

    Args:
        context: Context of the server's socket; exists before the socket binds.
        folder: The server's keys.

    Raises:
        UserError: There are no keys, or the allow-list is damaged.
    """

    def __init__(self, context: zmq.Context, folder: KeyFolder) -> None:
        identity, self._allowed = folder.identity(), AllowList(folder)
        self.curve = CurveKeys(identity.public, identity.secret)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self._allowed)

    def check(self, kind: Kind, key: str) -> None:
        """Whether the owner of a key may send a message of this kind.

        Raises:
            WireError: AUTH, it may not, or was taken off the list since it connected.
        """
        peer = self._allowed.peer(key)
        if peer is None:
            raise WireError(Code.AUTH, "this key is no longer allowed")
        if peer.role is not Role.ROBOT and kind is not Kind.PING:
            raise WireError(Code.AUTH, f"'{peer.name}' may only observe")

    def has_role(self, key: str, role: Role) -> bool:
        """Whether the owner of a key is on the allow-list in that role."""
        peer = self._allowed.peer(key)
        return peer is not None and peer.role is role

    def close(self) -> None:
        """Stop the authenticator."""
        self._authenticator.stop()
