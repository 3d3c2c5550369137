"""The phases and collectives of this rank."""
