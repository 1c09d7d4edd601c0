"""Sockets between groups: the handshake, the listener, and frames that nobody can change."""
