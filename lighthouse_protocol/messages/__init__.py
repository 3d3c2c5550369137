"""What is told: one frozen dataclass per message."""
