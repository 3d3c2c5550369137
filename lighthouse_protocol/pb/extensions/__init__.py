"""Messages that lighthouse-ft adds."""
