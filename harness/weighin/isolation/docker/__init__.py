"""Run workers in Docker containers."""
