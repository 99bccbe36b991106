"""Policies behind a socket: wire format, policy server, torch-free client."""
