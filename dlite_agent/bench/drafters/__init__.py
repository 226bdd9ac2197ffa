"""Drafters against each other on held-out sessions."""
