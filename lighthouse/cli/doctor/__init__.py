"""`lighthouse doctor`: facts gathered with deadlines from this host and its lighthouse, and what they mean."""
