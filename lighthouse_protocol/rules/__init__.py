"""Pure rules that several components apply: access, healing, quorum changes, rate limits and stalls."""
