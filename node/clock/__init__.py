"""The time of day: quotas, expiry dates and certificates depend on it."""
