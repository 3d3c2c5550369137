"""Generated from protos/; see lighthouse_protocol.generate."""
