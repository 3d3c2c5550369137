"""The whole system on a virtual clock, from one seed, over the same pure machines as production."""
