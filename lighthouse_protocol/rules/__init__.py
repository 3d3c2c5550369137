"""Rules that several components apply: access, healing, preemption, quorum changes, rate limits and stalls."""
