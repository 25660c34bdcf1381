"""What a person or Prometheus can see of the proxy."""
