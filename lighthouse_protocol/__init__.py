"""Messages, identities, limits, errors and the wire format that clients and servers share, without asyncio."""

VERSION = "0.1.0"
