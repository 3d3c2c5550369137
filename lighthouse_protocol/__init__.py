"""Messages, identities, limits, errors and wire format that clients and servers share. No module uses asyncio."""

VERSION = "0.1.0"
