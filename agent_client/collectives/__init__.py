"""Process groups that connect the replica groups. They are recreated for each quorum."""
