"""Pure rules that both ends apply: access, healing, quorum changes, rate limits and stalls."""
