"""Measurements. A benchmark prints a table for people, then one JSON line for machines."""
