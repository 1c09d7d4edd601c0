"""A coordinator of the next version of the protocol, which takes no group of this one."""

from jaxft_coordinator._cli import main
from jaxft_protocol.coordinator import sessions

if __name__ == "__main__":
    sessions.PROTOCOL_VERSION += 1
    main()
