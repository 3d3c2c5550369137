"""What is compared of a state. No I/O, no clock."""
