"""The coordinator: who trains together."""
