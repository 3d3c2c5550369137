"""The wire contract of lighthouse-ft: messages, identities, errors, limits. No asyncio, no torch."""

# `protos` is a generic import name; agent_client checks this mark before it trusts what it imported.
LIGHTHOUSE_FT = "lighthouse-ft"
VERSION = "0.1.0"
