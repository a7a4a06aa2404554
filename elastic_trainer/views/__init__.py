"""What people look at: verify, report, pages, watch, metrics and traces. Only the command line
imports it."""
