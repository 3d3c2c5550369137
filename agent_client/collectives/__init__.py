"""Process groups, which are recreated for each quorum."""
