"""The messages that daemons and ranks exchange, as frozen dataclasses that do not depend on protobuf."""
