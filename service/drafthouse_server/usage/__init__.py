"""What streams are billed for: records, the journal that they are written to, and their store."""
