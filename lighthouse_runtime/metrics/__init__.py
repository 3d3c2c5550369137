"""What metrics are made of."""
