"""Run a plan: take its measurements (cells) in order, each in a supervised process (worker)."""
