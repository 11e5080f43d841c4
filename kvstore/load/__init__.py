"""Load on a running sidecar: clients that look up, load and store, and what that took (`kvstore bench load`)."""
