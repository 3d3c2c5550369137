"""The services of the design document."""
