"""Protocol code shared by clients and servers: messages, identities, limits, errors and wire format. No asyncio."""

VERSION = "0.1.0"
