"""YAML to cells; strategies and models by name, found without importing torch."""
