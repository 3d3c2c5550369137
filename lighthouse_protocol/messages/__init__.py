"""The messages: one frozen dataclass each."""
