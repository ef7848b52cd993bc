"""What operators need: the log, the audit trail, the load and how it is measured."""
