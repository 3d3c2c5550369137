"""Pure rules that several components apply: access, healing, leader search, quorum changes, rate limits and stalls."""
