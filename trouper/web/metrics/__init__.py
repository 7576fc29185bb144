"""What Prometheus reads at /metrics."""
