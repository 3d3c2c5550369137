"""Integrations with trainers of other libraries: transformers, lightning, accelerate, torchtitan."""
