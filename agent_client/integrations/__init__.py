"""Integrations with Hugging Face transformers and accelerate, Lightning, and torchtitan."""
