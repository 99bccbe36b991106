"""Who is let in at a server that can be reached from outside, and what they may ask."""

from __future__ import annotations

from vla_stack.errors import UserError
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.keys import AllowList, KeyFolder, Role
from vla_stack.serving.wire import Code, Kind, WireError


class Admission:
    """The allow-list of a key folder, and the roles behind it.

    Args:
        folder: The server's keys.

    Raises:
        UserError: There are no keys, or the allow-list is damaged.
    """

    def __init__(self, folder: KeyFolder) -> None:
        identity, self._allowed = folder.identity(), AllowList(folder)
        self.curve = CurveKeys(identity.public, identity.secret)

    def admits(self, key: str) -> bool:
        """Whether the owner of a key may connect."""
        try:
            return self._allowed.peer(key) is not None
        except UserError:  # damaged while the server runs: nobody new
            return False

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
