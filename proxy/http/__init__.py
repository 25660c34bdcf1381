"""HTTP to instances, and limits of time."""
