"""What stands in for something that a test cannot have: each of them is called a double."""
