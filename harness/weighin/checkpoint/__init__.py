"""Generate, convert, inspect and cache checkpoints, and record their checksums in manifests."""
