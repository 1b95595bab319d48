"""Units of `drivers`, by room."""
