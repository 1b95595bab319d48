"""What users may use: quotas, days of expiry, addresses at once, speeds; and what the node itself may."""
