"""HTTP to instances, and deadlines."""
