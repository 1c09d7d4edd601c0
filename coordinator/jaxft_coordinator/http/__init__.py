"""The HTTP port: metrics, health, an API, and a page."""
