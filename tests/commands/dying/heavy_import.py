"""Import a module that fills large tables when it is imported."""

from parts import lookup_tables  # CALLED

print(len(lookup_tables.SQUARES))
