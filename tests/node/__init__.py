"""Units of `node`, by room."""
