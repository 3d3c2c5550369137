"""The Agent, the interface for training scripts, and the parts of a step: quorum, collectives and vote."""
