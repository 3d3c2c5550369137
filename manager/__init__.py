"""One beside each replica group: speaks for its ranks."""
