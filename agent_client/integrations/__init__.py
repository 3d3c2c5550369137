"""Trainers of other libraries, each module with its own: transformers, lightning, accelerate, torchtitan."""
