"""Messages, identities, limits, errors and the wire format that clients and servers share.

This package does not use asyncio.
"""

VERSION = "0.1.0"
