"""What is recorded of each request: answer headers, log lines, metrics, traces."""
