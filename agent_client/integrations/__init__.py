"""Integrations of transformers, lightning, accelerate and torchtitan, one module each."""
