"""Where bytes lie: regions, caches, plans between them, and the memory in which they land."""
