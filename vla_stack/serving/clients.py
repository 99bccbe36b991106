"""One door to policy servers, ours and those that speak openpi's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_stack.errors import UserError
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.endpoint import OpenpiAddress
from vla_stack.serving.pictures import Pictures

if TYPE_CHECKING:
    from vla_stack.serving.openpi_client import OpenpiClient

type Client = PolicyClient | OpenpiClient


def open_client(server: str | OpenpiAddress, pictures: Pictures = Pictures()) -> Client:
    """A client that is not connected yet; ``pictures`` says in what form it sends them to a server of ours.

    Raises:
        UserError: The endpoint is malformed, keys or certificate are missing, or the package for websockets is.
    """
    if isinstance(server, str):
        return PolicyClient(server, pictures=pictures)
    try:
        from vla_stack.serving.openpi_client import OpenpiClient
    except ImportError as e:
        raise UserError(f"openpi's protocol needs a package: {e}", 'pip install "vla-stack[openpi]"') from None
    return OpenpiClient(server)
