"""Checkpoints on disk: formats, offsets, making, splitting, and manifests with checksums."""
