"""TCP connections between groups: sockets, the handshake, the listener, and a tag on every frame."""
