"""Process groups that are made anew for every quorum."""
