"""The fleet: instances, their state, and the ways to join and leave."""
