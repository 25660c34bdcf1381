"""The choice of a pair of instances for each request, and the queue in front of it."""
