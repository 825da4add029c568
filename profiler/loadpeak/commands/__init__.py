"""Commands that need nothing but this package; one file a verb."""
