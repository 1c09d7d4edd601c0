"""Every figure that jaxft quotes, each one command."""
