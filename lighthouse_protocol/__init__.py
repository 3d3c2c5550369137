"""What both ends of a connection agree on: messages, identities, limits, refusals, wire form. No asyncio, no torch."""

VERSION = "0.1.0"
