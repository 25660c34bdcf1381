"""Long runs in which things come and go at random: `make scale`."""
