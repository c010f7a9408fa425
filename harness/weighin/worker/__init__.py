"""Take one measurement (cell) inside the measured process, which imports little before torch."""
