"""What a hostile machine or network does to a process."""
