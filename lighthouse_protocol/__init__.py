"""Messages, identities, limits, refusals and wire format, shared by both ends of a connection. No asyncio, no torch."""

VERSION = "0.1.0"
