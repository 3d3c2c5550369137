"""What facts mean: a finding for each, with its remedy. Pure."""
