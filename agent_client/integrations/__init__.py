"""Integrations with transformers, lightning, accelerate and torchtitan, one module each."""
